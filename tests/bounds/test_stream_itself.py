"""Bounds of a stream that linears read without a norm, of a config's multipliers, and bounds with a gradient."""

import math
from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from support.contract import bound_at, certified, layout_of
from support.inside import bound
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.differentiable import DifferentiableBounds
from bf16_to_fp16.bounds.linear import enclosing_axes, summed_axes
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import effective
from bf16_to_fp16.families.wiring import outputs_of

WIDTH = 24


def gains(number: int, seed: int) -> Tensor:
    """Return gains of so many norms, some of whose channels outweigh the others: fp64 [number, d]."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(number, WIDTH, generator=generator, dtype=torch.float64).abs()
    made[:, ::5] *= 30
    return made


@pytest.mark.parametrize("number", [1, 2, 9])
def test_no_sum_of_normalised_vectors_leaves_the_ellipsoid_and_one_comes_close(number: int) -> None:
    every, axes = gains(number, number), torch.zeros(WIDTH, dtype=torch.float64)
    for gain in every:
        axes = summed_axes(axes, gain.square() * WIDTH)
    rows = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bound = (rows * axes.sqrt()).norm(dim=1)
    # What a row reaches: each term points where the row has it.
    reached = sum(math.sqrt(WIDTH) * (rows * gain).norm(dim=1) for gain in every)
    assert bool((reached <= bound).all()) and bool((bound < 1.5 * reached).all())
    assert number > 1 or bool((bound < 1.001 * reached).all())


def test_rows_of_a_table_lie_in_the_ellipsoid_of_their_box_and_length() -> None:
    rows = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[:, 3] *= 100
    rows[:, 7] = 0
    caps, length = rows.abs().amax(0), float(rows.norm(dim=1).max())
    axes = enclosing_axes(caps, length)
    inside = (rows.square() / axes.clamp(min=1e-300)).sum(1)
    assert float(axes[7]) == 0 and 0.4 < float(inside.max()) <= 1
    # The outlier channel makes no other one long: 2·d·caps² at most.
    assert bool((axes <= 2.001 * torch.minimum(caps.square() * WIDTH, torch.full_like(caps, length**2))).all())


def test_the_stream_of_a_model_stays_in_its_ellipsoid() -> None:
    """In fp16, where each sum is rounded: the first linear of each sublayer reads what the bounds say at most."""
    model = tiny.build("olmo2", 3, factor=1.0, num_hidden_layers=4).half()
    _, certificate = certified(model)
    exact = certified(model, Arithmetic(exact=True))[1]
    reads: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "up_proj")):
            module.register_forward_pre_hook(lambda _, args, name=name: reads.__setitem__(name, args[0].detach()))
    with torch.no_grad():
        model(torch.arange(96).view(8, 12))
    for name, read in reads.items():
        caps = certificate.ranges[name].input.amax
        assert bool((read.abs().amax((0, 1)) <= caps).all()), name
        weight = model.get_submodule(name).weight.double()
        made = certificate.ranges[name].output.amax.double()
        assert bool(((read.double() @ weight.t()).abs().amax((0, 1)) <= made).all()), name
        assert bool((made >= exact.ranges[name].output.amax.double()).all()), name


FOLLOWING: dict[str, dict[str, float]] = {
    "embedding_multiplier": {"model:mul": 4, "model.layers.0.input_layernorm (sum of squares)": 16},
    "residual_multiplier": {"model.layers.1:mul#2": 4, "model.norm (sum of squares)": 16},
    "attention_multiplier": {"model.layers.0.self_attn:mul#5": 4, "model.layers.0.self_attn:add#3": 4},
    "logits_scaling": {"model:div": 1 / 4},
    "layer_scalar": {"model.layers.1:add#2": 1, "model.layers.1:mul": 4, "model.norm (sum of squares)": 16},
}
"""By what the bounds of sites grow where the multiplier, which is large, grows to its fourfold."""


def multiplied(key: str, number: float) -> Any:
    """Return a Granite with a number in its config, or a Gemma 4 with its negative behind the second layer."""
    changes: dict[str, Any] = {} if key == "layer_scalar" else {key: number}
    model = tiny.build("granite" if changes else "gemma4", factor=1.0, **changes)
    if not changes:
        model.model.layers[1].layer_scalar.fill_(-number)
    return model


@pytest.mark.parametrize("key", FOLLOWING)
def test_bounds_grow_with_what_multiplies_their_sites(key: str) -> None:
    less, more = (certified(multiplied(key, number), target="norm-safe")[1] for number in (1e3, 4e3))
    for site, grows in FOLLOWING[key].items():
        assert more.at(site) == pytest.approx(grows * bound_at(less, site), rel=1e-2), site
    if key == "layer_scalar":
        layer = "model.layers.1"
        assert less.at(f"{layer}:mul") == pytest.approx(1e3 * bound_at(less, f"{layer}:add#2"), rel=1e-2)


def live(model: Any, *, stream: bool = True) -> tuple[Layout, dict[str, Tensor], DifferentiableBounds]:
    """The layout of a model, its tensors by name, and its bounds."""
    layout = layout_of(model)
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return layout, named, DifferentiableBounds(layout, named.__getitem__, stream=stream)


@pytest.mark.parametrize("kind", [*tiny.SEARCHED, "gemma3-images"])
def test_every_bound_is_the_certificates_but_for_what_refines_the_stream(kind: str) -> None:
    layout, named, bounds = live(tiny.build(kind, 1))
    certificate = bound(layout, lambda name: effective(layout.tensors[name], named[name].detach()))
    measured = bounds.measure()
    refined = {site for stack in layout.stacks() for w in stack.sublayers for site in (w.add, *outputs_of(w))}
    for site, values in measured.items():
        proven = bound_at(certificate, site)
        most = 3.0 if site in refined else 1.02
        assert 0.97 * proven <= float(values.max()) <= most * proven, site
    some = list(measured)[::3]
    alone = bounds.measure(only=some)
    assert list(alone) == some and all(torch.equal(alone[site], measured[site]) for site in some)


@pytest.mark.parametrize(
    "kind", exhaustive.beyond(["t5", "llama-biased"], ["gated", "t5", "pegasus", "mbart", "llama-biased"])
)
def test_gradients_are_finite_differences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along a random direction of all weights at once, site by site, at its largest row; a multiplier found to 1 in
    1,000 moves the slope by as much."""
    monkeypatch.setattr("bf16_to_fp16.bounds.power_iteration.STEPS", 400)  # until they have converged
    model = tiny.small(kind, 2, factor=1.0).double()
    _, _, bounds = live(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    worst = {site: values.argmax()[None] for site, values in bounds.measure().items()}
    generator = torch.Generator().manual_seed(3)
    ways = [torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.detach().abs().mean() for p in parameters]
    slopes = {}
    for site, at in worst.items():
        (value,) = bounds.at({site: at})[site].log2()
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        slopes[site] = sum(float((g * way).sum()) for g, way in zip(found, ways, strict=True) if g is not None)

    def moved(step: float) -> dict[str, float]:
        with torch.no_grad():
            for parameter, way in zip(parameters, ways, strict=True):
                parameter.add_(way, alpha=step)
            found = {site: float(bounds.at({site: at})[site].log2()) for site, at in worst.items()}
            for parameter, way in zip(parameters, ways, strict=True):
                parameter.sub_(way, alpha=step)
        return found

    step = 2.0**-20
    above, below = moved(step), moved(-step)
    for site, slope in slopes.items():
        assert slope == pytest.approx((above[site] - below[site]) / (2 * step), rel=3e-3, abs=1e-4), site
