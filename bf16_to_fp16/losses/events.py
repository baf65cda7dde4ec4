"""What can go wrong in a loss curve, as data: spikes, divergence, plateaus, bumps, a collapsing loss scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True)
class Event:
    """Something that happened to a run from step ``start`` to ``end`` (None while it lasts).

    ``size``: how far the loss rose above its level before, in units of the loss, unless a kind says otherwise.
    """

    start: int
    end: int | None
    size: float

    cause: ClassVar[str] = ""  # what usually causes it, and what helps

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return type(self).__name__

    def to_json(self) -> dict[str, Any]:
        """Return the event and its cause as JSON types; what is infinite is None."""
        finite = {name: None if value == math.inf else value for name, value in vars(self).items()}
        return {"kind": self.kind} | finite | {"cause": self.cause}


@dataclass(frozen=True)
class Spike(Event):
    """A rise of the loss that comes back: ``fast`` within an eighth of the window, else ``slow``; ``open`` before that.

    ``z``: its height in robust standard deviations.
    """

    recovery: Literal["fast", "slow", "open"] = "open"
    z: float = math.inf

    cause: ClassVar[str] = (
        "a batch that meets an unlucky state of the optimizer, or an overflow; rewind to an earlier checkpoint and skip"
        " the batches around it, clip the gradient, or lower beta2 or the learning rate"
    )


@dataclass(frozen=True)
class Divergence(Event):
    """A rise of the loss that stays, at once or gradually, or losses that are no longer finite."""

    cause: ClassVar[str] = (
        "a learning rate too high, attention scores or logits that grow, or values past the format's range; go back to"
        " a checkpoint before it, lower the learning rate, and audit that checkpoint"
    )


@dataclass(frozen=True)
class Plateau(Event):
    """A standstill: the loss moved by less than 1% in many steps; ``size`` is the share by which it fell."""

    cause: ClassVar[str] = (
        "either the run has converged, or its updates are smaller than half the gap between two weights and vanish;"
        " stochastic rounding, an fp32 copy of the weights or a higher learning rate tell which"
    )


@dataclass(frozen=True)
class ResumeBump(Event):
    """A rise of the loss right after the run was resumed."""

    cause: ClassVar[str] = (
        "something was not restored: the optimizer's moments, the step of the schedule, the loss scale, or the place in"
        " the data"
    )


@dataclass(frozen=True)
class ScaleCollapse(Event):
    """A loss scale that falls and falls; ``size`` is in halvings, infinite where it reached 0."""

    cause: ClassVar[str] = (
        "every step overflows, mostly in the forward pass: no loss scale can fix that;"
        " audit the checkpoint, rescale it, or train in bf16"
    )


EVENT_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Spike, Divergence, Plateau, ResumeBump, ScaleCollapse)
}
"""The kinds of events by name."""


@dataclass(frozen=True)
class Curve:
    """Losses by step, in the order in which they were logged, each with the loss scale where one was logged."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    scales: tuple[float | None, ...]
