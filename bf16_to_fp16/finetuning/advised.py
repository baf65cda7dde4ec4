"""The pair of learning rate and batch that moves weights of 16 bits, put into a recipe.

An update of Adam has about the size of the learning rate, and a weight that is rounded to nearest moves where that
reaches half its gap. Where too few do, the learning rate is raised until enough do, and the batch with it, linearly
(Goyal et al., arXiv:1706.02677), by accumulating more passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from ..errors import UserError
from ..optim import rounding
from ..optim.formats import FORMATS, half_gaps
from ..optim.stalls import DEFAULT_SHARE, Layer
from ..progress import Progress
from ..wording import rounded_up
from .optimizers import typical_magnitude
from .recipe import Recipe


def with_advised_pair(recipe: Recipe, parameters: Iterable[Tensor], progress: Progress) -> Recipe:
    """Return ``recipe`` with learning rate and accumulation raised until half the weights move, and say what was done.

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
    return recipe.with_pair(needed, passes)
