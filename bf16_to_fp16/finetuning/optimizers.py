"""The optimizer of a run, from its recipe: which it is, and in what units a step is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..optim import rounding
from ..optim.adamw import AdamW
from ..optim.formats import FORMATS, half_gaps
from ..optim.stalls import DEFAULT_SHARE, Layer
from ..progress import Progress
from ..wording import rounded_up
from .recipe import Recipe

BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam, as Kingma and Ba have them; epsilon in the units of the steps


def typical_magnitude(parameter: Tensor) -> float:
    """Return the median of |w| of a tensor that is not all zeros, which a few outlier rows or channels do not move;
    the root mean square where more than half of it is zero."""
    size = parameter.detach().float().abs()
    median = float(size.median())
    return median if median > 0 else float(size.square().mean().sqrt()) or 1.0


def make_optimizer(
    recipe: Recipe, parameters: list[torch.nn.Parameter], *, fused: bool = False
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer of ``parameters``: torch's for fp32 ones, this package's for weights kept in 16
    bits, and for moments that are in fewer bits or elsewhere.

    fused: of torch's the one loop for all operations, where they would else bound a step.
    """
    given = recipe.optimizer
    # No decay: the original, not zero, is where weights should stay.
    options = {"lr": recipe.schedule.learning_rate, "betas": BETAS, "eps": EPSILON, "weight_decay": 0.0}
    # Scales behind matrices, the order in which states have them.
    parameters = sorted(parameters, key=lambda p: p.ndim <= 1)
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if given.relative:
        # A group for each tensor; the scale is kept in every state with the other options of a group. Gradients go with
        # its inverse, so epsilon does as well.
        scales = [typical_magnitude(p) for p in parameters]
        groups = [{"params": [p], "scale": s, "eps": EPSILON / s} for p, s in zip(parameters, scales, strict=True)]
    if given.weights == "fp32" and given.moments == "fp32" and not given.offload:
        return torch.optim.AdamW(groups, **options, fused=fused or None)  # type: ignore[arg-type]
    exact = {
        "rounding": given.rounding,
        "moments": {"fp32": "float32", "bf16": "bfloat16"}.get(given.moments, given.moments),
        "seed": recipe.seed,
        "offload": given.offload,
    }
    return AdamW(groups, **options, **exact)  # type: ignore[arg-type]


def with_advised_pair(recipe: Recipe, parameters: Iterable[Tensor], progress: Progress) -> Recipe:
    """Return ``recipe`` with learning rate and accumulation raised until half the 16-bit weights move, and say so.

    An update of Adam has about the size of the learning rate, and a weight that is rounded to nearest moves where that
    reaches half its gap; the batch goes with the rate, linearly (Goyal et al., arXiv:1706.02677), by more passes.
    parameters: at the start, in fp32. Raises UserError where none of them is finite in the format.
    """
    given, rate, format_ = recipe.optimizer, recipe.schedule.learning_rate, FORMATS[recipe.optimizer.weights]
    total = Layer("all")
    for parameter in parameters:
        stored = rounding.nearest(parameter.detach().float(), format_.dtype).flatten()
        stored = stored[stored.isfinite()]
        # Of an update at a learning rate of 1.
        size = typical_magnitude(stored) if given.relative else 1.0
        total.add(half_gaps(stored, format_).double() / size, rate)
    needed = total.rate_for(DEFAULT_SHARE)
    if needed is None:
        raise UserError(
            f"schedule.advised: no weight of the start is finite in {given.weights}; set optimizer.weights: fp32"
        )
    moving = 1 - total.lost / total.elements
    said = f"at learning rate {rate:g} {moving:.0%} of the {given.weights} weights move"
    if moving >= DEFAULT_SHARE:
        progress.say(f"Advised: {said}; rate and batch stay")
        return recipe
    needed = rounded_up(needed, 3)
    passes = math.ceil(recipe.data.gradient_accumulation * needed / rate)
    progress.say(
        f"Advised: {said}; learning rate {needed:g} ({needed / rate:.3g} times as much) moves {DEFAULT_SHARE:.0%}, with"
        f" {passes} passes a step instead of {recipe.data.gradient_accumulation}"
    )
    return recipe.taking(learning_rate=needed, gradient_accumulation=passes)
