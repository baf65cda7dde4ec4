"""Spikes, divergences and plateaus of a training loss, while a run trains or from its log.

Each loss is compared with the median of a window of calm losses (on a steep fall with a line through them), in units
of their median absolute deviation, so that neither noise nor earlier spikes move the level. A spike comes back, fast
or slowly; a divergence stays. A slow rise or a standstill shows in the medians of chunks of the curve.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_LEAST_SIGMA = 0.005  # least noise that is believed, as a share of the level: a smooth curve's small rise is no spike
_CLEAR = 2.0  # how many times as far above the level as the lowest of the last calm losses is below it a spike must be
_STEEP = 0.5  # share of the losses' scatter that a line through them may leave where it is to replace their median
_FLAT = 0.01  # share of the level by which the loss may change in a plateau
_FLAT_CHUNKS = 16  # least length of a plateau, in quarters of the window; noisier curves need twice, four times as many

Kind = Literal["Spike", "Divergence", "Plateau"]

CAUSES: dict[Kind, str] = {
    "Spike": "a batch that meets an unlucky state of the optimizer, or an overflow; rewind to an earlier checkpoint and"
    " skip the batches around it, clip the gradient, or lower beta2 or the learning rate",
    "Divergence": "a learning rate too high, attention scores or logits that grow, or values past the format's range;"
    " go back to a checkpoint before it, lower the learning rate, and audit that checkpoint",
    "Plateau": "either the run has converged, or its updates are smaller than half the gap between two weights and"
    " vanish; stochastic rounding, an fp32 copy of the weights or a higher learning rate tell which",
}
"""The usual cause of each kind, and what helps."""


@dataclass(frozen=True)
class Event:
    """An event from step ``start`` to ``end`` (None while it lasts).

    ``size``: how far the loss rose above its level before; of a plateau the share by which it fell. Of a spike,
    ``recovery`` is fast within an eighth of the window, and ``z`` its height in robust standard deviations.
    """

    kind: Kind
    start: int
    end: int | None
    size: float
    recovery: Literal["fast", "slow", "open"] = "open"
    z: float = math.inf


@dataclass
class _Excursion:
    place: int  # of its event in the list
    first: int  # count of losses at its start
    level: float
    sigma: float
    back: float  # it is over when the median of the recent losses is at most this
    last_above: int
    peak: float
    recent: deque[float]


class Detector:
    """Finds events in losses as they come.

    z: robust standard deviations that make a spike; window: calm losses to compare with, at least 16. The first half
    window is only learnt from.
    """

    def __init__(self, *, z: float = 6.0, window: int = 64) -> None:
        if window < 16 or z <= 0:
            raise ValueError("a window of at least 16 losses and a positive z")
        self.z, self.window = z, window
        self.fast = window // 8
        # More than the window, so that after rewinding there is something to compare with.
        self._calm: deque[tuple[int, float]] = deque(maxlen=8 * window)
        self._tail: deque[float] = deque(maxlen=4 * window)  # z-scores of calm losses
        self._found: list[Event] = []
        self._count = 0
        self._step: int | None = None
        self._excursion: _Excursion | None = None
        self._chunk: list[tuple[int, float]] = []
        self._chunks: list[tuple[int, int, float]] = []  # first step, last step, median
        self._lowest: tuple[int, float] | None = None  # last step and median of the lowest chunk
        self._rising = 0
        self._drift: int | None = None
        self._plateau: tuple[int, float, int] | None = None  # place, level, chunks that left it

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything found so far, in the order of its discovery, as it stands now."""
        return tuple(self._found)

    def update(self, step: int, loss: float) -> tuple[Event, ...]:
        """Take in the next loss and return the events that it starts or ends; a step that goes back is a rewind."""
        known = list(self._found)
        if self._step is not None and step < self._step:
            self.rewind(step)
        self._step = step
        self._count += 1
        self._loss(step, loss if math.isfinite(loss) else math.inf)
        pairs = zip(self._found, known, strict=False)
        changed = [event for event, before in pairs if event.end != before.end or event.kind != before.kind]
        return (*changed, *self._found[len(known) :])

    def rewind(self, step: int) -> None:
        """Forget the losses after ``step``: the run goes on from there."""
        if self._excursion is not None:
            self._end(self._excursion.place, self._step if self._step is not None else step)
            self._excursion = None
        self._calm = deque([(at, loss) for at, loss in self._calm if at <= step], maxlen=self._calm.maxlen)
        self._chunk = [(at, loss) for at, loss in self._chunk if at <= step]
        chunks = [chunk for chunk in self._chunks if chunk[1] <= step]
        if len(chunks) < len(self._chunks):
            self._chunks = chunks
            lowest = min(chunks, key=lambda chunk: chunk[2], default=None)
            self._lowest, self._rising = None if lowest is None else lowest[1:], 0
            for place in (self._drift, None if self._plateau is None else self._plateau[0]):
                if place is not None:
                    self._end(place, max(step, self._found[place].start))
            self._drift = self._plateau = None

    def state_dict(self) -> dict[str, Any]:
        state = {name: [*value] if isinstance(value, deque) else value for name, value in vars(self).items()}
        state["_found"] = [vars(event) for event in self._found]
        if self._excursion is not None:
            recent = self._excursion.recent
            state["_excursion"] = vars(self._excursion) | {"recent": [*recent], "patient": recent.maxlen}
        return copy.deepcopy(state)

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        state: dict[str, Any] = copy.deepcopy(dict(given))
        self._calm = deque(map(tuple, state.pop("_calm")), maxlen=8 * state["window"])
        self._tail = deque(state.pop("_tail"), maxlen=4 * state["window"])
        self._chunk, self._chunks = ([tuple(row) for row in state.pop(name)] for name in ("_chunk", "_chunks"))
        self._found = [Event(**event) for event in state.pop("_found")]
        if (excursion := state.pop("_excursion")) is not None:
            excursion = _Excursion(recent=deque(excursion.pop("recent"), maxlen=excursion.pop("patient")), **excursion)
        self._excursion = excursion
        for name, value in state.items():
            setattr(self, name, tuple(value) if isinstance(value, list) else value)

    # -- levels

    def _yardstick(self) -> tuple[float, float]:
        """Level and robust standard deviation of the calm losses: their median and its deviations, or a line's.

        On a steep fall the window's scatter is mostly the fall itself, which would hide a spike. Where the line through
        the medians of both halves leaves clearly less, it is the yardstick; but no level under all of the last losses,
        since a fall flattens.
        """
        losses = [loss for _, loss in [*self._calm][-self.window :]]
        level = statistics.median(losses)
        spread = MAD_TO_SIGMA * statistics.median(abs(loss - level) for loss in losses)
        half = len(losses) // 2
        slope = (statistics.median(losses[-half:]) - statistics.median(losses[:half])) / (len(losses) - half)
        if slope < 0:
            flat = [loss + slope * (len(losses) - 1 - i) for i, loss in enumerate(losses)]
            end = statistics.median(flat)
            scatter = MAD_TO_SIGMA * statistics.median(abs(loss - end) for loss in flat)
            if scatter < _STEEP * spread:
                level, spread = max(end, min(losses[-self.fast :])), scatter
        return level, max(spread, _LEAST_SIGMA * abs(level), 1e-12)

    def _loss(self, step: int, loss: float) -> None:
        if self._excursion is not None:
            self._follow(self._excursion, step, loss)
        elif len(self._calm) < self.window // 2:
            # Nothing to compare with yet, but a loss that is not finite is wrong whatever the others are.
            if math.isfinite(loss):
                self._accept(step, loss)
            else:
                self._begin(Event("Spike", step, None, math.inf), 0.0, 1e-12, loss, sys.float_info.max)
        else:
            level, sigma = self._yardstick()
            z = (loss - level) / sigma
            # Noise with long tails falls far as well as it rises; a spike stands clear of that too. What fell further
            # than a spike rises was no noise.
            tail = min(-min(self._tail, default=0.0), self.z)
            if z > max(self.z, _CLEAR * tail):
                self._begin(Event("Spike", step, None, loss - level, "open", z), level, sigma, loss)
            else:
                self._tail.append(z)
                self._accept(step, loss)

    def _begin(self, event: Event, level: float, sigma: float, loss: float, back: float | None = None) -> None:
        limit = level + self.z / 2 * sigma if back is None else back
        recent = deque([loss], maxlen=3 if back is None else self.fast)
        self._found.append(event)
        place = len(self._found) - 1
        self._excursion = _Excursion(place, self._count, level, sigma, limit, self._count, loss, recent)

    def _follow(self, excursion: _Excursion, step: int, loss: float) -> None:
        excursion.recent.append(loss)
        place, event = excursion.place, self._found[excursion.place]
        if loss > excursion.peak:
            excursion.peak = loss
            change: dict[str, Any] = {"size": loss - excursion.level if math.isfinite(loss) else math.inf}
            if event.kind == "Spike":
                change["z"] = change["size"] / excursion.sigma
            self._found[place] = event = replace(event, **change)
        if loss > excursion.back:
            excursion.last_above = self._count
        lasted = excursion.last_above - excursion.first + 1
        full = len(excursion.recent) == excursion.recent.maxlen
        if full and statistics.median(excursion.recent) <= excursion.back:
            recovery = "fast" if lasted <= self.fast else "slow"
            self._end(place, step, **({"recovery": recovery} if event.kind == "Spike" else {}))
            self._excursion = None
            for value in excursion.recent:
                if value <= excursion.back:
                    self._accept(step, value)
            return
        lost = self._count - excursion.first >= self.fast and not any(map(math.isfinite, excursion.recent))
        patience = self.window
        if statistics.median(excursion.recent) - excursion.level < (excursion.peak - excursion.level) / 2:
            patience *= 4  # it is on its way back
        if (lost or self._count - excursion.first >= patience) and event.kind == "Spike":
            self._found[place] = Event("Divergence", event.start, None, event.size)
            if not lost:
                # From here on the new level is the one to compare with.
                self._excursion = None
                self._calm.clear()
                self._chunk.clear()
                self._chunks.clear()
                self._lowest = None

    def _end(self, place: int, step: int, **change: Any) -> None:
        self._found[place] = replace(self._found[place], end=step, **change)

    def _accept(self, step: int, loss: float) -> None:
        self._calm.append((step, loss))
        self._chunk.append((step, loss))
        if len(self._chunk) == self.window // 4:
            first, last = self._chunk[0][0], self._chunk[-1][0]
            self._chunks.append((first, last, statistics.median(value for _, value in self._chunk)))
            self._chunk = []
            self._slow_rise()
            self._standstill()

    # -- slow events

    def _slow_rise(self) -> None:
        """A gradual divergence: two chunks in a row far above the lowest one."""
        _, last, level = self._chunks[-1]
        if self._lowest is None or level < self._lowest[1]:
            self._lowest, self._rising = (last, level), 0
            if self._drift is not None:
                self._end(self._drift, last)
                self._drift = None
            return
        start, lowest = self._lowest
        _, sigma = self._yardstick()
        # The yardstick of a rising window has the rise in it, so that this errs towards silence.
        spread = sigma * math.sqrt(math.pi / (self.window // 4))
        high = level - lowest > max(self.z * spread, 0.05 * abs(lowest))
        self._rising = self._rising + 1 if high else 0
        if self._drift is not None:
            event = self._found[self._drift]
            self._found[self._drift] = replace(event, size=max(event.size, level - lowest))
            if level - lowest < event.size / 2:
                self._end(self._drift, last)
                self._drift = None
        elif self._rising == 2:
            self._drift = len(self._found)
            self._found.append(Event("Divergence", start, None, level - lowest))

    def _standstill(self) -> None:
        """A plateau: no change over the last chunks, and known well enough to say so."""
        first, _, level = self._chunks[-1]
        if self._plateau is not None:
            place, flat, left = self._plateau
            self._found[place] = replace(self._found[place], size=(flat - level) / abs(flat) if flat else 0.0)
            left = left + 1 if abs(level - flat) > 2 * _FLAT * abs(flat) else 0
            self._plateau = (place, flat, left)
            if left == 2:
                self._end(place, self._chunks[-3][1] if len(self._chunks) > 2 else first)
                self._plateau = None
                del self._chunks[:-2]
            return
        length = _FLAT_CHUNKS
        while length <= len(self._chunks):
            part = self._chunks[-length:]
            fall, error = _trend([median for _, _, median in part])
            middle = statistics.median(median for _, _, median in part)
            if abs(fall) <= 2 * error + 1e-12 and abs(fall) + 2 * error <= _FLAT * abs(middle):
                self._plateau = (len(self._found), middle, 0)
                self._found.append(Event("Plateau", part[0][0], None, fall / abs(middle) if middle else 0.0))
                return
            length *= 2


def _trend(values: Sequence[float]) -> tuple[float, float]:
    """By how much a straight line through the values falls from the first to the last, and its standard error."""
    count = len(values)
    mean, middle = math.fsum(values) / count, (count - 1) / 2
    across = count * (count * count - 1) / 12
    slope = math.fsum((k - middle) * (value - mean) for k, value in enumerate(values)) / across
    rest = math.fsum((value - mean - slope * (k - middle)) ** 2 for k, value in enumerate(values))
    return -slope * (count - 1), math.sqrt(rest / (count - 2) / across) * (count - 1)


def events(losses: Iterable[tuple[int, float]], *, z: float = 6.0, window: int = 64) -> list[Event]:
    """Return the events of a whole curve of steps and losses, by step; ``end`` is None where one was not over."""
    detector = Detector(z=z, window=window)
    for step, loss in losses:
        detector.update(step, loss)
    return sorted(detector.events, key=lambda event: event.start)
