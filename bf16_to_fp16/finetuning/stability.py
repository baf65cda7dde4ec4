"""When a run ends early: its loss scale collapses, gradients stay infinite, or its penalty does not come down."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .penalty import ActivationPenalty
from .recipe import Recipe

NONFINITE_STOP = 100  # skipped steps in the whole run after which it stops
OVERFLOW_STOP = 20  # overflows in a row after which the loss scale, 2**20 times smaller, has collapsed
STUCK_STOP = 1000  # steps without progress after which the penalty will not come down


@dataclass
class RunPosition:
    step: int = 0
    tokens: int = 0
    phase: int = 0
    fitting: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    least_excess: float = math.inf
    least_excess_step: int = 0


def check_progress(recipe: Recipe, penalty: ActivationPenalty | None, p: RunPosition, loss_scale: float | None) -> None:
    """Raise UserError, with the worst site's name, where a run cannot succeed."""
    at = _worst(penalty)
    row = list(itertools.takewhile(lambda s: s[1]["step"] == p.step - s[0], enumerate(reversed(p.skipped))))
    if len(row) >= OVERFLOW_STOP:
        raise UserError(
            f"{len(row)} steps in a row overflow, down to a loss scale of {loss_scale:g}{at};"
            f" set {'precision: fp32' if recipe.rescale else 'rescale: true'}, or lower schedule.learning_rate"
            if loss_scale is not None
            else f"{len(row)} steps in a row have no finite gradient{at}; lower the learning rate"
        )
    if len(p.skipped) >= NONFINITE_STOP:
        raise UserError(f"{len(p.skipped)} steps had no finite gradient{at}; look at their examples in log.jsonl")
    if penalty is None:
        return
    excess = max((o.excess_bits for o in penalty.observations().values()), default=0.0)
    if excess <= 0 or excess < p.least_excess - 0.01:
        p.least_excess, p.least_excess_step = min(excess, p.least_excess), p.step
    elif p.step - p.least_excess_step >= STUCK_STOP:
        raise UserError(
            f"the penalty has not come down for {STUCK_STOP} steps{at};"
            " raise schedule.learning_rate, lower penalty.headroom_bits,"
            " or let the task go: distillation.weight 1"
        )


def _worst(penalty: ActivationPenalty | None) -> str:
    if penalty is None or not penalty.observations():
        return ""
    name, seen = penalty.worst()
    if seen.excess_bits <= 0:
        return ", though every activation is inside its target"
    return f", worst at {name} with {seen.amax:.4g} where {seen.target:.4g} is wanted"
