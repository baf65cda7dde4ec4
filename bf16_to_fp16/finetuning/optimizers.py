"""The optimizer of a run, from its recipe: which it is, and in what units a step is taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..optim.adamw import AdamW
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
