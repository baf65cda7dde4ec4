"""The optimizer of a run, from its recipe: which parameters are decayed, and in what units a step is taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..optim.adamw import Adam, AdamW
from .recipe import Recipe


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
    options = {
        "lr": recipe.schedule.learning_rate,
        "betas": given.betas,
        "eps": given.epsilon,
        "weight_decay": given.weight_decay,
    }
    # Norm gains and biases are not decayed: they are scales, not directions.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if given.relative:
        # A group for each tensor; the scale is kept in every state with the other options of a group. Gradients go with
        # its inverse, so epsilon does as well; and decay, which the scaled learning rate multiplies, is undone. In a
        # gradient decay is times the weight, so that it is undone once more.
        power = 1 if given.name == "adamw" else 2
        groups = [
            {
                **group,
                "params": [p],
                "scale": scale,
                "eps": given.epsilon / scale,
                "weight_decay": group.get("weight_decay", given.weight_decay) / scale**power,
            }
            for group in groups
            for p, scale in ((p, typical_magnitude(p)) for p in group["params"])
        ]
    if given.weights == "fp32" and given.moments == "fp32" and not given.offload:
        plain = torch.optim.AdamW if given.name == "adamw" else torch.optim.Adam
        return plain(groups, **options, fused=fused or None)  # type: ignore[arg-type]
    exact = {
        "rounding": given.rounding,
        "moments": {"fp32": "float32", "bf16": "bfloat16"}.get(given.moments, given.moments),
        "seed": recipe.seed,
        "compile": recipe.compile or None,
        "offload": given.offload,
    }
    return (AdamW if given.name == "adamw" else Adam)(groups, **options, **exact)  # type: ignore[arg-type]
