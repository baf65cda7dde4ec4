"""The certificate's bounds as functions with a gradient: how near they are to it, and that the gradient is theirs."""

from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from support.contract import layout_of
from torch import Tensor

from bf16_to_fp16.bounds.certificate import bound
from bf16_to_fp16.bounds.differentiable import DifferentiableBounds
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import effective
from bf16_to_fp16.families.wiring import outputs_of


def live(model: Any, *, stream: bool = True) -> tuple[Layout, dict[str, Tensor], DifferentiableBounds]:
    """The layout of a model, its tensors by name, and its bounds."""
    layout = layout_of(model)
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return layout, named, DifferentiableBounds(layout, named.__getitem__, stream=stream)


def is_stream(site: str, layout: Layout) -> bool:
    """Whether a site is the residual stream or what joins it, where the certificate refines single rows."""
    return any(site in (w.add, *outputs_of(w)) for stack in layout.stacks() for w in stack.sublayers)


@pytest.mark.parametrize("kind", [*tiny.SEARCHED, "gemma3-images"])
def test_every_bound_is_the_certificates_but_for_what_refines_the_stream(kind: str) -> None:
    layout, named, bounds = live(tiny.build(kind, 1))
    certificate = bound(layout, lambda name: effective(layout.tensors[name], named[name].detach()))
    measured = bounds.measure()
    for site, values in measured.items():
        proven = certificate.at(site)
        assert proven is not None, site
        most = 3.0 if is_stream(site, layout) else 1.02
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
    model = tiny.build(kind, 2, factor=1.0).double()
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
