"""What a run does when something goes wrong: it goes back past a spike of the loss, and ends where it cannot succeed.

A spike sends the run back to an earlier state past the batches around it (PaLM, arXiv:2204.02311, section 5.1). A loss
that diverges, a loss scale that collapses or a penalty that does not come down ends it, with the worst site's name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..advise.detector import Detector
from ..errors import UserError
from ..progress import Progress
from .penalty import ActivationPenalty
from .recipe import Recipe
from .states import RunFolder

PULLED_STEPS = 16  # steps after one with a site past its target in which a rise of the loss is laid to the penalty

REWINDS = 3  # times that a spike of the loss sends a run back
LEFT_OUT = 20  # steps of data left out around a spike: PaLM left out 200 to 500, of runs a hundred times as long
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
    rewinds: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    pulled: int | None = None
    least_excess: float = math.inf
    least_excess_step: int = 0


class Watch:
    def __init__(
        self, recipe: Recipe, penalty: ActivationPenalty | None, states: RunFolder, progress: Progress
    ) -> None:
        self.recipe, self.penalty, self.states, self.progress = recipe, penalty, states, progress
        self.detector = Detector()

    def spike(self, p: RunPosition, seen: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return the step of the state to go back to and the spike's first step, where one begins that can be undone;
        raise UserError where the loss diverges and the run has gone back as often as it may."""
        if not seen["taken"]:
            return None
        may_go_back = len(p.rewinds) < REWINDS
        pulled_until = self._pulled_until(p)
        for event in self.detector.update(p.step, seen["loss"]):
            if event.start <= pulled_until:
                # What the penalty moves costs some loss for a while; going back would only begin that again.
                continue
            if event.kind == "Divergence" and event.end is None and not may_go_back:
                raise UserError(
                    f"the loss diverges from step {event.start} on{self._worst()}; lower schedule.learning_rate,"
                    " or begin from another checkpoint"
                )
            if event.kind == "Plateau" or event.end is not None:
                continue
            earlier = [step for step in self.states.steps() if step < event.start]
            if may_go_back and earlier:
                return earlier[-1], event.start
            self.progress.say(f"Step {p.step}: the loss spikes; rewind limit reached")
        return None

    def _pulled_until(self, p: RunPosition) -> float:
        """The last step whose loss the penalty may have raised: a site was past its target shortly before."""
        seen = [] if self.penalty is None else self.penalty.observations().values()
        if any(o.excess_bits > 0 and o.weight > 0 for o in seen):
            p.pulled = p.step
        return -math.inf if p.pulled is None else p.pulled + PULLED_STEPS

    def check(self, p: RunPosition, seen: Mapping[str, Any]) -> None:
        row = list(itertools.takewhile(lambda s: s[1]["step"] == p.step - s[0], enumerate(reversed(p.skipped))))
        if len(row) >= OVERFLOW_STOP:
            raise UserError(
                f"{len(row)} steps in a row overflow, down to a loss scale of {seen['loss_scale']:g}{self._worst()};"
                f" {self._way_out()}, or lower schedule.learning_rate"
                if seen["loss_scale"] is not None
                else f"{len(row)} steps in a row have no finite gradient{self._worst()}; lower the learning rate"
            )
        if len(p.skipped) >= NONFINITE_STOP:
            raise UserError(
                f"{len(p.skipped)} steps had no finite gradient{self._worst()}; look at their examples in log.jsonl"
            )
        if self.penalty is None:
            return
        excess = max((o.excess_bits for o in self.penalty.observations().values()), default=0.0)
        if excess <= 0 or excess < p.least_excess - 0.01:
            p.least_excess, p.least_excess_step = min(excess, p.least_excess), p.step
        elif p.step - p.least_excess_step >= STUCK_STOP:
            raise UserError(
                f"the penalty has not come down for {STUCK_STOP} steps{self._worst()};"
                " raise schedule.learning_rate, lower penalty.headroom_bits,"
                " or let the task go: distillation.weight 1"
            )

    def _way_out(self) -> str:
        if not self.recipe.rescale:
            return "set rescale: true"
        if self.recipe.precision == ("fp16",):
            return "set precision: [bf16, fp16]"
        return "set precision: fp32"

    def _worst(self) -> str:
        if self.penalty is None or not self.penalty.observations():
            return ""
        name, seen = self.penalty.worst()
        if seen.excess_bits <= 0:
            return ", though every activation is inside its target"
        return f", worst at {name} with {seen.amax:.4g} where {seen.target:.4g} is wanted"
