"""What every family promises, on architectures that hypothesis draws: a new family inherits this class and adds its
models to ``tiny``.

Each promise is a function of one model, so that ``benchmarks/mutation.py`` can show that a wrong declaration or a wrong
bound breaks it.
"""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import tiny
import torch
from adversary import adverse_inputs, observe
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_certificate import FREE, broken, certified
from test_families import MOVABLE, outputs, random_plan

from bf16_to_fp16 import convert, undo
from bf16_to_fp16.conversion import ModelTensors
from bf16_to_fp16.families import Layout, resolve
from bf16_to_fp16.rescaling import apply, inverse

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


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
def architectures(draw: st.DrawFn, kinds: tuple[str, ...], factors: tuple[float, ...] = (0.05, 1.0, 900.0)) -> Drawn:
    """Draw widths, heads, depths, activations, tying and dtypes."""
    kind = draw(st.sampled_from(kinds))
    heads, layers = draw(st.integers(1, 4)), st.integers(1, 2)
    if kind == "pegasus":
        shape: dict[str, Any] = {
            "d_model": 12 * draw(st.integers(1, 3)),
            "encoder_attention_heads": heads,
            "decoder_attention_heads": draw(st.sampled_from((1, 2, 3))),
            "encoder_ffn_dim": draw(st.integers(1, 50)),
            "decoder_ffn_dim": draw(st.integers(1, 50)),
            "encoder_layers": draw(layers),
            "decoder_layers": draw(layers),
            "activation_function": draw(st.sampled_from(("relu", "relu", "gelu", "gelu_new", "silu"))),
            "scale_embedding": draw(st.booleans()),
        }
    else:
        shape = {
            "d_model": draw(st.integers(3, 40)),
            "d_kv": draw(st.integers(1, 9)),
            "num_heads": heads,
            "d_ff": draw(st.integers(1, 50)),
            "num_layers": draw(layers),
            "num_decoder_layers": draw(layers),
        }
    return Drawn(
        kind,
        draw(st.integers(0, 99)),
        tuple(shape.items()),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(factors)),
    )


def layout_of(model: Any) -> Layout:
    """Return a model's layout."""
    return resolve(ModelTensors(model))


def check_classified(model: Any) -> None:
    """Every parameter is declared, once, with its shape, and every axis that may move names a signal of its size."""
    layout, state = layout_of(model), model.state_dict()
    assert set(state) - set(layout.dropped) == set(layout.tensors)
    for name, tensor in layout.tensors.items():
        assert tuple(state[name].shape) == tensor.shape
        for axis, size in zip(tensor.axes, tensor.shape, strict=True):
            assert axis is None or layout.signals[axis[1]].size == size
    for signal in layout.signals.values():
        assert signal.seen
        for sighting in signal.seen:
            model.get_submodule(sighting.module)


def check_couplings(model: Any, seed: int, layout: Layout | None = None) -> None:
    """All couplings at once leave every output bit-identical, and the inverse plan every weight."""
    layout = layout or layout_of(model)
    before, weights = outputs(model), {name: t.clone() for name, t in model.state_dict().items()}
    assert all(bool(t.isfinite().all()) for t in before)
    plan = random_plan(layout, MOVABLE, seed)
    apply(model, layout, plan)
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(model), strict=True))
    apply(model, layout, inverse(plan))
    assert all(torch.equal(weights[name], t) for name, t in model.state_dict().items())


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
        result = convert(source, Path(folder) / "out", run_model=False)
        undo(Path(folder) / "out", Path(folder) / "back")
        before, after = (load_file(Path(folder) / f / "model.safetensors") for f in ("source", "back"))
        config, again = ((Path(folder) / f / "config.json").read_text() for f in ("source", "back"))
    assert json.loads(again) == json.loads(config)
    counts = result.report["weights"]
    wrong = total = 0
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype == dtype
        wrong += int((tensor != before[name]).sum())
        total += tensor.numel()
    assert wrong <= round((1 - counts["lossless_fraction"]) * total)
    assert dtype == torch.float32 or counts["lossless_fraction"] > 0.9


class Contract:
    """Inherited by every family; ``kinds`` are those of its models in ``tiny``."""

    kinds: ClassVar[tuple[str, ...]]

    def examples(self, count: int, **options: Any) -> Any:
        """Return a decorator that runs a check on so many drawn architectures of the family."""

        def wrap(check: Any) -> Any:
            drawn = given(drawn=architectures(self.kinds, **options))(check)
            return settings(
                max_examples=count,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            )(drawn)

        return wrap

    def test_every_parameter_is_classified(self) -> None:
        @self.examples(12)
        def check(drawn: Drawn) -> None:
            check_classified(drawn.build())

        check()

    def test_all_couplings_are_exact_and_undone_to_the_bit(self) -> None:
        @self.examples(12)
        def check(drawn: Drawn) -> None:
            check_couplings(drawn.build(), drawn.seed)

        check()

    def test_no_bound_is_passed(self) -> None:
        @self.examples(5, factors=(2.0**-10, 1.0, 8.0))
        def check(drawn: Drawn) -> None:
            check_bounds(drawn.build(), drawn.seed)

        check()

    def test_undo_gives_back_what_was_carried_over(self) -> None:
        @self.examples(2, factors=(1.0, 900.0))
        def check(drawn: Drawn) -> None:
            check_round_trip(drawn.build(), drawn.dtype)

        check()

    def test_a_coupling_that_lacks_an_axis_is_noticed(self) -> None:
        """The control of the exactness above: with any one axis of the first block left out, it fails."""
        model = tiny.build(self.kinds[0])
        layout = layout_of(model)
        name, tensor = next((n, t) for n, t in layout.tensors.items() if n.endswith(("v.weight", "v_proj.weight")))
        axes = (None, *tensor.axes[1:])
        wrong = replace(layout, tensors={**layout.tensors, name: replace(tensor, axes=axes)})
        try:
            check_couplings(model, 1, wrong)
        except AssertionError:
            return
        raise RuntimeError("the check of couplings cannot fail")
