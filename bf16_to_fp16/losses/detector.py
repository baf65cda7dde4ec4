"""What went wrong in a run: one detector for a run while it trains, and for its log afterwards.

It compares each loss with the median of a window of calm ones (on a steep fall with a line through them), in units of
their median absolute deviation, so that neither noise nor earlier spikes move the yardstick. What is out of line
starts an event; what follows decides its name: a spike comes back, fast or slowly, a divergence does not. A rise or a
standstill too slow for that shows in the medians of chunks of the curve.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .events import EVENT_KINDS, Curve, Divergence, Event, Plateau, ResumeBump, ScaleCollapse, Spike

MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_LEAST_SIGMA = 0.005  # least noise that is believed, as a share of the level: a smooth curve's small rise is no spike
_CLEAR = 2.0  # how many times as far above the level as the lowest of the last calm losses is below it a spike must be
_STEEP = 0.5  # share of the losses' scatter that a line through them may leave where it is to replace their median
_FLAT = 0.01  # share of the level by which the loss may change in a plateau
_FLAT_CHUNKS = 16  # least length of a plateau, in quarters of the window; noisier curves need twice, four times as many
_COLLAPSE = 10  # halvings within a window from which a loss scale that had settled has collapsed
_LEAST_SCALE = 1.0  # a loss scale under this no longer scales up at all


@dataclass
class _Excursion:
    """A rise that is still going on."""

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

    z: robust standard deviations from which a loss is out of line; window: calm losses that it is compared with, at
    least 16. The first half window is only learnt from.
    """

    def __init__(self, *, z: float = 6.0, window: int = 64) -> None:
        """Start with nothing known."""
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
        self._gap = 0
        self._excursion: _Excursion | None = None
        self._resumed: tuple[int, list[float]] | None = None
        self._chunk: list[tuple[int, float]] = []
        self._chunks: list[tuple[int, int, float]] = []  # first step, last step, median
        self._lowest: tuple[int, float] | None = None  # last step and median of the lowest chunk
        self._rising = 0
        self._drift: int | None = None
        self._plateau: tuple[int, float, int] | None = None  # place, level, chunks that left it
        self._scales: deque[tuple[int, float]] = deque(maxlen=window)
        self._settled = False
        self._collapse: tuple[int, float] | None = None  # place, scale before

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything found so far, in the order of its discovery, as it stands now."""
        return tuple(self._found)

    def update(self, step: int, loss: float, scale: float | None = None) -> tuple[Event, ...]:
        """Take in the next loss and return the events that it starts or ends.

        An event is returned when it starts, with ``end`` None, and once more when it is over. A ``step`` that is lower
        than the one before, or a hole in the steps, means that the run was resumed.
        """
        known = list(self._found)
        if self._step is not None:
            gap = step - self._step
            if gap < 0 or (self._gap and gap > 3 * self._gap):
                self.resumed(step)
            elif gap:
                self._gap = gap if not self._gap else min(self._gap, gap)
        self._step = step
        self._count += 1
        self._loss(step, loss if math.isfinite(loss) else math.inf)
        if scale is not None:
            self._scale(step, scale)
        pairs = zip(self._found, known, strict=False)
        changed = [event for event, before in pairs if event.end != before.end or type(event) is not type(before)]
        return (*changed, *self._found[len(known) :])

    def resumed(self, step: int) -> None:
        """Take note that the run goes on from a checkpoint at ``step``: what was logged after it no longer counts."""
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
        self._resumed = (step, [])

    def state_dict(self) -> dict[str, Any]:
        """Return all that the detector knows, as lists, dictionaries and scalars; floats may be infinite."""
        state = {name.removeprefix("_"): value for name, value in vars(self).items()}
        state |= {name: [*value] for name, value in state.items() if isinstance(value, deque)}
        state["found"] = [{"kind": event.kind} | vars(event) for event in self._found]
        if self._excursion is not None:
            recent = self._excursion.recent
            state["excursion"] = vars(self._excursion) | {"recent": [*recent], "patient": recent.maxlen}
        return copy.deepcopy(state)

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave: what follows is found as it would have been there."""
        state: dict[str, Any] = copy.deepcopy(dict(given))
        self.__init__(z=state.pop("z"), window=state.pop("window"))  # type: ignore[misc]
        self.fast = state.pop("fast")
        for name in ("calm", "scales", "chunk", "chunks"):
            getattr(self, f"_{name}").extend(tuple(pair) for pair in state.pop(name))
        self._tail.extend(state.pop("tail"))
        self._found = [EVENT_KINDS[event.pop("kind")](**event) for event in state.pop("found")]
        excursion = state.pop("excursion")
        if excursion is not None:
            recent = deque(excursion.pop("recent"), maxlen=excursion.pop("patient"))
            self._excursion = _Excursion(recent=recent, **excursion)
        for name, value in state.items():
            setattr(self, f"_{name}", tuple(value) if isinstance(value, list) else value)

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
                self._begin(Spike(step, None, math.inf), 0.0, 1e-12, loss, sys.float_info.max)
        else:
            level, sigma = self._yardstick()
            z = (loss - level) / sigma
            # Noise with long tails falls far as well as it rises; a spike stands clear of that too. What fell further
            # than a spike rises was no noise.
            tail = min(-min(self._tail, default=0.0), self.z)
            if z > max(self.z, _CLEAR * tail):
                bump = self._resumed is not None
                event = ResumeBump(step, None, loss - level) if bump else Spike(step, None, loss - level, "open", z)
                self._begin(event, level, sigma, loss)
            else:
                self._tail.append(z)
                self._accept(step, loss)
                self._after_resume(loss, level, sigma)

    def _begin(self, event: Event, level: float, sigma: float, loss: float, back: float | None = None) -> None:
        limit = level + self.z / 2 * sigma if back is None else back
        recent = deque([loss], maxlen=3 if back is None else self.fast)
        self._found.append(event)
        place = len(self._found) - 1
        self._excursion = _Excursion(place, self._count, level, sigma, limit, self._count, loss, recent)
        self._resumed = None

    def _after_resume(self, loss: float, level: float, sigma: float) -> None:
        """A bump lower than a spike shows in the median of the first losses after a resume."""
        if self._resumed is None:
            return
        start, losses = self._resumed
        losses.append(loss)
        if len(losses) < self.fast:
            return
        self._resumed = None
        # The median of n losses has π/2n of one's variance; half of z is enough for what is looked for in one place.
        excess = statistics.median(losses) - level
        if excess > self.z / 2 * sigma * math.sqrt(math.pi / 2 / len(losses)) + _LEAST_SIGMA * abs(level):
            for _ in losses:
                if self._calm:
                    self._calm.pop()
            self._begin(ResumeBump(start, None, max(losses) - level), level, sigma, loss, level + excess / 2)

    def _follow(self, excursion: _Excursion, step: int, loss: float) -> None:
        excursion.recent.append(loss)
        place, event = excursion.place, self._found[excursion.place]
        if loss > excursion.peak:
            excursion.peak = loss
            change: dict[str, Any] = {"size": loss - excursion.level if math.isfinite(loss) else math.inf}
            if isinstance(event, Spike):
                change["z"] = change["size"] / excursion.sigma
            self._found[place] = event = replace(event, **change)
        if loss > excursion.back:
            excursion.last_above = self._count
        lasted = excursion.last_above - excursion.first + 1
        full = len(excursion.recent) == excursion.recent.maxlen
        if full and statistics.median(excursion.recent) <= excursion.back:
            recovery = "fast" if lasted <= self.fast else "slow"
            self._end(place, step, **({"recovery": recovery} if isinstance(event, Spike) else {}))
            self._excursion = None
            for value in excursion.recent:
                if value <= excursion.back:
                    self._accept(step, value)
            return
        lost = self._count - excursion.first >= self.fast and not any(map(math.isfinite, excursion.recent))
        patience = self.window
        if statistics.median(excursion.recent) - excursion.level < (excursion.peak - excursion.level) / 2:
            patience *= 4  # it is on its way back
        if (lost or self._count - excursion.first >= patience) and not isinstance(event, Divergence):
            if isinstance(event, Spike):
                self._found[place] = Divergence(event.start, None, event.size)
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
            self._found.append(Divergence(start, None, level - lowest))

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
                self._found.append(Plateau(part[0][0], None, fall / abs(middle) if middle else 0.0))
                return
            length *= 2

    def _scale(self, step: int, scale: float) -> None:
        """A loss scale that falls by many halvings after it had settled, or below one."""
        if self._collapse is not None:
            place, before = self._collapse
            fallen = math.inf if scale <= 0 else math.log2(before / scale)
            event = self._found[place]
            self._found[place] = replace(event, size=max(event.size, fallen))
            if fallen <= 2:
                self._end(place, step)
                self._collapse = None
                self._scales.clear()
            return
        if scale > 0:
            self._scales.append((step, scale))
        if not self._scales:
            return
        before = max(value for _, value in self._scales)
        fallen = math.inf if scale <= 0 else math.log2(before / scale)
        full = len(self._scales) == self.window
        self._settled = self._settled or (full and fallen <= 2)
        if (scale < _LEAST_SCALE <= before) or (self._settled and fallen >= _COLLAPSE):
            self._collapse = (len(self._found), before)
            self._found.append(ScaleCollapse(self._fall(), None, fallen))

    def _fall(self) -> int:
        """The step at which the present fall of the scale began: before that it stood still or rose."""
        still, start = 0, self._scales[-1][0]
        for (at, value), (_, following) in reversed(list(itertools.pairwise(self._scales))):
            still = still + 1 if following == value else 0
            if following > value or still > 3:
                break
            start = start if following == value else at
        return start


def _trend(values: Sequence[float]) -> tuple[float, float]:
    """By how much a straight line through the values falls from the first to the last, and its standard error."""
    count = len(values)
    mean, middle = math.fsum(values) / count, (count - 1) / 2
    across = count * (count * count - 1) / 12
    slope = math.fsum((k - middle) * (value - mean) for k, value in enumerate(values)) / across
    rest = math.fsum((value - mean - slope * (k - middle)) ** 2 for k, value in enumerate(values))
    return -slope * (count - 1), math.sqrt(rest / (count - 2) / across) * (count - 1)


def events(curve: Curve, *, z: float = 6.0, window: int = 64) -> list[Event]:
    """Return what happened in a whole curve, by step; an event with ``end`` None was not over at its end."""
    detector = Detector(z=z, window=window)
    for step, loss, scale in zip(curve.steps, curve.losses, curve.scales, strict=True):
        detector.update(step, loss, scale)
    return sorted(detector.events, key=lambda event: event.start)
