"""What every family promises of one model, as functions, and the architectures on which that is tested."""

import copy
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import tiny
from support.adversary import adverse_inputs, observe
from support.inside import Whole, bound

from bf16_to_fp16 import convert, undo
from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.families.known import class_named
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import ModelTensors, resolve, source_weights
from bf16_to_fp16.families.signals import RESIDUAL, Kind, carried_by
from bf16_to_fp16.families.spread import channels_along
from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.fidelity import RETURN_ALL, all_outputs, unscaled
from bf16_to_fp16.measuring.probe import few_rows, images
from bf16_to_fp16.measuring.stock import config_of, set_attention, setting
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.exponents import output_factors
from bf16_to_fp16.rescaling.plan import OfChannels, Plan, inverse

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
MOVABLE = (Kind.RESIDUAL, Kind.NORM, Kind.VALUE, Kind.QUERY_KEY, Kind.NEURON, Kind.BEFORE_NORM)

FREE = ("residual", "embedding", "statistic")
"""Kinds that depend on what enters the stream, which the adversary does not move."""


@dataclass(frozen=True)
class Drawn:
    """An architecture: which of ``tiny``'s models, its config's sizes, the dtype of its weights, how large it is."""

    kind: str
    seed: int
    shape: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    factor: float

    def build(self) -> Any:
        """Return the model, in fp32 with values of the dtype; one that the dtype cannot hold is left out."""
        model = tiny.build(self.kind, self.seed, factor=self.factor, dtype=self.dtype, **dict(self.shape))
        assume(all(bool(t.isfinite().all()) for t in model.state_dict().values()))
        return model


@st.composite
def architectures(draw: st.DrawFn, entry: tiny.Entry, factors: tuple[float, ...] = (0.05, 1.0, 900.0)) -> Drawn:
    """Draw widths, heads, depths, activations, tying and dtypes of one family's models."""
    return Drawn(
        draw(st.sampled_from(sorted(entry.kinds))),
        draw(st.integers(0, 99)),
        tuple((key, draw(st.sampled_from(values))) for key, values in entry.shape.items()),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(factors)),
    )


def layout_of(model: Any) -> Layout:
    return resolve(ModelTensors(model))


def outputs(model: Any, *, gradients: bool = False) -> tuple[torch.Tensor, ...]:
    """Return what a model gives of a padded batch whose rows end with the end token, and of an image."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 97, (3, 17), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    ids[[0, 1, 2], [16, 8, 16]] = setting(model.config, "eos_token_id")
    if hasattr(model, "get_base_model"):  # PEFT's wrapper, whose parts are inside
        model = model.get_base_model()
    stock = class_named(type(model).__name__)
    assert stock is not None
    decoder = {"decoder_input_ids": ids[:, :11]} if stock.takes_decoder_ids else {}
    with torch.set_grad_enabled(gradients):
        out = model(input_ids=ids, attention_mask=mask, **decoder)
        seen = tuple(run_batch(model, batch)[0] for batch in images(model.config))
    given = (*stock.gives, *(("encoder_last_hidden_state",) if stock.decodes else ()))
    return (*(out[name] for name in given), *seen)


def random_plan(layout: Layout, kinds: tuple[Kind, ...], seed: int = 0) -> Plan:
    """Return a plan that moves every channel of the given kinds by −3 to 3, and residual streams by −4."""
    generator = torch.Generator().manual_seed(seed)
    exponents: dict[str, OfChannels] = {
        name: torch.randint(-3, 4, (signal.size,), generator=generator).tolist()
        for name, signal in layout.signals.items()
        if signal.kind in kinds and signal.kind is not Kind.RESIDUAL
    }
    one = {
        n: e[0] or 2 for n, e in exponents.items() if isinstance(e, list) and layout.signals[n].kind.has_one_exponent
    }
    exponents |= one
    r = -4 if Kind.RESIDUAL in kinds else 0
    exponents |= {name: r for name in layout.streams if name != RESIDUAL and r}
    return Plan(family=layout.family.name, residual_exponent=r, exponents=exponents)


def uniform_plan(layout: Layout) -> Plan:
    """Return a plan of one number for all channels of a signal, another for the next, as planners fold equal ones."""
    movable = [s.name for s in layout.signals.values() if s.kind in MOVABLE and s.kind is not Kind.RESIDUAL]
    exponents: dict[str, OfChannels] = {name: (-3, 2, 3, -2)[i % 4] for i, name in enumerate(movable)}
    return Plan(family=layout.family.name, exponents=exponents)


def bound_at(certificate: Whole, site: str) -> float:
    """Return the bound of a site that has to have one."""
    bound = certificate.at(site)
    assert bound is not None, site
    return bound


def certified(model: Any, arithmetic: Arithmetic | None = None, **options: Any) -> tuple[Layout, Whole]:
    source = ModelTensors(model)
    layout = resolve(source)
    return layout, bound(layout, source_weights(source, layout), arithmetic, **options)


def broken(certificate: Certificate, seen: dict[str, float], kinds: tuple[str, ...] = ()) -> list[str]:
    bounds = {s.name: s for s in certificate.sites if s.kind not in (*kinds, "normalised")}
    # An inf says nothing where some bound lies beyond fp16: it may come from there.
    return [
        f"{n}: {a} > {bounds[n].bound}"
        for n, a in seen.items()
        if n in bounds and not a <= bounds[n].bound and (a < math.inf or certificate.holds)
    ]


def check_classified(model: Any) -> None:
    """Every parameter is declared, once, with its shape, and every axis that may move names a signal of its size."""
    layout, state = layout_of(model), model.state_dict()
    assert set(state) - set(layout.dropped) == set(layout.tensors)
    for name, tensor in layout.tensors.items():
        assert tuple(state[name].shape) == tensor.shape
        for axis, size in zip(tensor.axes, tensor.shape, strict=True):
            for each in carried_by(axis):
                signal = layout.signals[each.signal]
                assert signal.kind.has_one_exponent or signal.size == channels_along(size, each.spread)
    for signal in layout.signals.values():
        assert signal.seen or signal.added_at or signal.kind.has_price
        for point in signal.seen:
            model.get_submodule(point.module)


def check_couplings(model: Any, seed: int, layout: Layout | None = None) -> None:
    """All couplings at once leave every output bit-identical, and the inverse plan every weight."""
    layout = layout or layout_of(model)
    before, weights = outputs(model), {name: t.clone() for name, t in model.state_dict().items()}
    assert all(bool(t.isfinite().all()) for t in before)
    plan = random_plan(layout, MOVABLE, seed)
    for each in (plan, uniform_plan(layout)):
        apply(model, layout, each)
        assert all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))
        apply(model, layout, inverse(each))
        assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


def check_outputs(model: Any, layout: Layout, plan: Plan) -> None:
    """Everything that the stock class returns is the source's times the factor that is told of it, bit for bit."""
    set_attention(model, "eager")  # which shows its weights
    inputs = [few_rows(config_of(model)), *images(model.config)]
    moved = apply(copy.deepcopy(model), layout, plan)
    factors = output_factors(layout, plan)
    with torch.no_grad():
        runs = [[all_outputs(run_batch(each, batch, **RETURN_ALL)) for each in (model, moved)] for batch in inputs]
    assert set().union(*(before for before, _ in runs)) == factors.keys()
    for before, after in runs:
        for name, layers in before.items():
            scaled = [unscaled(each, factors[name], name) for each in after[name]]
            assert all(torch.equal(x.double(), y) for x, y in zip(layers, scaled, strict=True)), name


def check_bounds(model: Any, seed: int, batch: int = 8) -> None:
    """No input of any norm, chosen against the weights behind it, passes a bound, in fp32 or in real fp16."""
    half = copy.deepcopy(model).half()
    assume(all(bool(p.isfinite().all()) for p in half.parameters()))
    layout, certificate = certified(half)
    inputs = adverse_inputs(copy.deepcopy(half).float(), layout, batch, seed)
    assert not broken(certificate, observe(half, layout, inputs), FREE)
    assert not broken(certificate, observe(half.float(), layout, inputs, attention="sdpa"), FREE)


def check_round_trip(model: Any, dtype: torch.dtype) -> None:
    """``undo`` gives back every bit of what was carried over exactly, in the source's dtypes and under its config."""
    with tempfile.TemporaryDirectory() as folder:
        source = tiny.save(model, Path(folder) / "source", dtype)
        result = convert(source, Path(folder) / "out", target="half", run_model=False)
        undo(Path(folder) / "out", Path(folder) / "back")
        before, after = (load_file(Path(folder) / f / "model.safetensors") for f in ("source", "back"))
        config, again = ((Path(folder) / f / "config.json").read_text() for f in ("source", "back"))
    assert json.loads(again) == json.loads(config)
    assert set(after) == set(before) - set(result.report["source"]["dropped"])
    counts = result.report["weights"]
    wrong = total = 0
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype == dtype
        off, largest = (t.abs().max() for t in (tensor - before[name], before[name]))
        assert off <= largest / 100, name  # as rounding can cause
        wrong += int((tensor != before[name]).sum())
        total += tensor.numel()
    assert wrong <= round((1 - counts["lossless_fraction"]) * total)
    assert dtype == torch.float32 or counts["lossless_fraction"] > 0.9
