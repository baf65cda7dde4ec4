"""The optimizer of a recipe, and the size of its steps relative to each weight."""

from __future__ import annotations

import pydoc
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError, first_line
from ..optim.adamw import AdamW
from .recipe import Recipe

BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam, as Kingma and Ba have them; epsilon in the units of the steps


def typical_magnitude(parameter: Tensor) -> float:
    """Return the median of |w|, or the RMS if that is 0, or 1 if all are 0."""
    size = parameter.detach().float().abs()
    median = float(size.median())
    return median if median > 0 else float(size.square().mean().sqrt()) or 1.0


def make_optimizer(
    recipe: Recipe, parameters: list[torch.nn.Parameter], *, fused: bool = False
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer; raise UserError if its class or arguments are unusable. fused: whether to use the
    fused kernel of torch's AdamW."""
    given = recipe.optimizer
    # Scales behind matrices, the order in which states have them.
    parameters = sorted(parameters, key=lambda p: p.ndim <= 1)
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if given.relative:
        # A group for each tensor; the scale is kept in every state with the other options of a group. Gradients go with
        # its inverse, so epsilon does as well.
        scales = [typical_magnitude(p) for p in parameters]
        groups = [{"params": [p], "scale": s, "eps": EPSILON / s} for p, s in zip(parameters, scales, strict=True)]
    if given.name is not None:
        named: Any = pydoc.locate(given.name)
        if not issubclass(named, torch.optim.Optimizer):
            raise UserError(f"optimizer.name: {given.name} is no torch.optim.Optimizer; name a class that is")
        own = {"seed": recipe.seed} if named is AdamW else {}
        try:
            arguments = own | given.arguments
            optimizer: torch.optim.Optimizer = named(groups, lr=recipe.schedule.learning_rate, **arguments)
            return optimizer
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer.name: {given.name}: {first_line(error)}; mend optimizer.arguments") from error
    # No decay: the original, not zero, is where weights should stay.
    options: dict[str, Any] = {"betas": BETAS, "eps": EPSILON, "weight_decay": 0.0, "fused": fused or None}
    return torch.optim.AdamW(groups, recipe.schedule.learning_rate, **options)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        scaled = rate * group.get("scale", 1.0)
        if isinstance(group["lr"], Tensor):  # as torchao has it
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled
