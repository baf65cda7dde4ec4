"""The optimizer of a run, from its recipe: which parameters are decayed, and in what units a step is taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..optim.adamw import AdamW
from .recipe import Recipe


def typical_magnitude(parameter: Tensor) -> float:
    """Return the median of |w| of a tensor that is not all zeros, which a few outlier rows or channels do not move;
    the root mean square where more than half of it is zero."""
    size = parameter.detach().float().abs()
    median = float(size.median())
    return median if median > 0 else float(size.square().mean().sqrt()) or 1.0


def make_optimizer(recipe: Recipe, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW for ``parameters``: torch's for fp32 ones, this package's for weights kept in 16 bits."""
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
        # its inverse, so epsilon does as well; and decay, which the scaled learning rate multiplies, is undone.
        groups = [
            {
                **group,
                "params": [p],
                "scale": scale,
                "eps": given.epsilon / scale,
                "weight_decay": group.get("weight_decay", given.weight_decay) / scale,
            }
            for group in groups
            for p, scale in ((p, typical_magnitude(p)) for p in group["params"])
        ]
    if given.weights == "fp32" and given.moments == "fp32":
        return torch.optim.AdamW(groups, **options)  # type: ignore[arg-type]
    moments = {"fp32": "float32", "bf16": "bfloat16", "8bit": "8bit"}[given.moments]
    exact = {"rounding": given.rounding, "moments": moments, "seed": recipe.seed, "compile": recipe.compile or None}
    return AdamW(groups, **options, **exact)  # type: ignore[arg-type]
