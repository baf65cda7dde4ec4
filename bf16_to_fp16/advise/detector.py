"""Find spikes, divergences and plateaus in a training loss.

Each loss is compared with the level of the calm losses before it, which are those outside spikes. Slow divergences and
plateaus are found in the medians of chunks of calm losses."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

WINDOW = 64  # calm losses with which one is compared
CHUNK = WINDOW // 4  # losses of which a median shows slow events
FAST = WINDOW // 8  # losses within which a fall flattens out, and without a number a run has diverged
Z = 6.0  # robust standard deviations that make a spike

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
    "Plateau": "either the run has converged, or its updates vanish: they are under half the gap from a weight to the"
    " next number of its dtype; stochastic rounding, an fp32 copy of the weights or a higher learning rate shows which",
}


@dataclass
class Event:
    kind: Kind
    start: int
    end: int | None  # None while it lasts
    size: float  # rise above the earlier level; of a plateau the share by which the loss fell


@dataclass
class _Excursion:
    event: Event
    level: float
    back: float  # it is over when the median of the recent losses is at most this
    recent: list[float]
    losses: int = 1


class _Chunk(NamedTuple):
    start: int
    end: int
    median: float


class Detector:
    """Finds spikes, divergences and plateaus in the losses given to ``update``, and collects them in ``events``."""

    def __init__(self) -> None:
        self.events: list[Event] = []  # in the order of their discovery
        self._calm: list[float] = []
        self._tail: list[float] = []  # z-scores of calm losses
        self._excursion: _Excursion | None = None
        self._fresh: list[tuple[int, float]] = []  # calm losses of no chunk yet
        self._chunks: list[_Chunk] = []
        self._rising = 0  # chunks far above the lowest one
        self._lowest: _Chunk | None = None
        self._drift: Event | None = None
        self._plateau: Event | None = None
        self._flat = 0.0  # level of the plateau
        self._left = 0  # chunks that left it

    def update(self, step: int, loss: float) -> None:
        loss = loss if math.isfinite(loss) else math.inf
        if self._excursion is not None:
            self._follow(self._excursion, step, loss)
        elif len(self._calm) >= WINDOW // 2:
            self._compare(step, loss)
        elif math.isfinite(loss):
            self._accept(step, loss)
        else:  # wrong, whatever the others are
            self._begin(step, loss, 0.0, sys.float_info.max)

    def _found(self, kind: Kind, start: int, size: float) -> Event:
        self.events.append(Event(kind, start, None, size))
        return self.events[-1]

    # -- spikes

    def _level_and_deviation(self) -> tuple[float, float]:
        """Return the median of the calm losses and the robust standard deviation around it.

        On a steep fall, the deviation is around a line through the losses. The level is then the line's end, but at
        least the lowest of the last ``FAST`` losses."""
        losses = self._calm
        level, spread = _median_and_spread(losses)
        half = len(losses) // 2
        slope = (statistics.median(losses[-half:]) - statistics.median(losses[:half])) / (len(losses) - half)
        if slope < 0:
            end, scatter = _median_and_spread([loss + slope * (len(losses) - 1 - i) for i, loss in enumerate(losses)])
            if scatter < _STEEP * spread:
                # A fall flattens out.
                level, spread = max(end, min(losses[-FAST:])), scatter
        return level, max(spread, _LEAST_SIGMA * abs(level), 1e-12)

    def _compare(self, step: int, loss: float) -> None:
        level, sigma = self._level_and_deviation()
        z = (loss - level) / sigma
        # Noise with long tails falls far as well as it rises; a spike stands clear of that too. What fell further
        # than a spike rises was no noise.
        tail = min(-min(self._tail, default=0.0), Z)
        if z > max(Z, _CLEAR * tail):
            self._begin(step, loss, level, level + Z / 2 * sigma)
        else:
            self._tail = [*self._tail, z][-4 * WINDOW :]
            self._accept(step, loss)

    def _begin(self, step: int, loss: float, level: float, back: float) -> None:
        self._excursion = _Excursion(self._found("Spike", step, loss - level), level, back, recent=[loss])

    def _follow(self, excursion: _Excursion, step: int, loss: float) -> None:
        excursion.recent = [*excursion.recent, loss][-3:]
        excursion.losses += 1
        event, level = excursion.event, excursion.level
        event.size = max(event.size, loss - level)
        median = statistics.median(excursion.recent)
        if len(excursion.recent) == 3 and median <= excursion.back:
            event.end, self._excursion = step, None
            for value in excursion.recent:
                if value <= excursion.back:
                    self._accept(step, value)
            return
        coming_back = median - level < event.size / 2
        if excursion.losses > FAST and math.isinf(min(excursion.recent)):
            event.kind = "Divergence"
        elif excursion.losses > WINDOW * (4 if coming_back else 1):
            event.kind = "Divergence"
            # From here on the new level is the one to compare with.
            self._excursion = self._lowest = None
            self._calm, self._fresh, self._chunks = [], [], []

    def _accept(self, step: int, loss: float) -> None:
        self._calm = [*self._calm, loss][-WINDOW:]
        self._fresh.append((step, loss))
        if len(self._fresh) == CHUNK:
            self._chunks.append(_Chunk(self._fresh[0][0], step, statistics.median(loss for _, loss in self._fresh)))
            self._fresh = []
            self._slow_rise()
            self._plateau_check()

    # -- slow events

    def _slow_rise(self) -> None:
        """Record a divergence once two consecutive chunks have medians far above the lowest median. Later calls update
        its size and record its end."""
        chunk = self._chunks[-1]
        if self._lowest is None or chunk.median < self._lowest.median:
            self._lowest, self._rising = chunk, 0
        lowest = self._lowest.median
        rise = chunk.median - lowest
        _, sigma = self._level_and_deviation()
        # The deviation of a rising window has the rise in it, so that this errs towards silence.
        spread = sigma * math.sqrt(math.pi / CHUNK)
        high = rise > max(Z * spread, 0.05 * abs(lowest))
        self._rising = self._rising + 1 if high else 0
        if self._drift is not None:
            self._drift.size = max(self._drift.size, rise)
            if rise < self._drift.size / 2:
                self._drift.end, self._drift = chunk.end, None
        elif self._rising == 2:
            self._drift = self._found("Divergence", self._lowest.end, rise)

    def _plateau_check(self) -> None:
        """Record a plateau if a line through the medians of the last chunks hardly rises or falls. Let c be the size of
        the line's change from end to end, and E twice the standard error of c. Then c must be at most E, and c + E at
        most ``_FLAT`` times the median of the medians. Later calls update the plateau's size and record its end."""
        level, flat = self._chunks[-1].median, self._flat
        if self._plateau is not None:
            self._plateau.size = (flat - level) / abs(flat) if flat else 0.0
            self._left = self._left + 1 if abs(level - flat) > 2 * _FLAT * abs(flat) else 0
            if self._left == 2:
                self._plateau.end, self._plateau = self._chunks[-2].start, None
                del self._chunks[:-2]
            return
        length = _FLAT_CHUNKS
        while length <= len(self._chunks):
            part = self._chunks[-length:]
            medians = [chunk.median for chunk in part]
            fall, error = _fall(medians)
            middle = abs(statistics.median(medians))
            if abs(fall) <= 2 * error + 1e-12 and abs(fall) + 2 * error <= _FLAT * middle:
                self._plateau = self._found("Plateau", part[0].start, fall / middle if middle else 0.0)
                self._flat, self._left = statistics.median(medians), 0
                return
            length *= 2


def _median_and_spread(losses: list[float]) -> tuple[float, float]:
    level = statistics.median(losses)
    return level, MAD_TO_SIGMA * statistics.median(abs(loss - level) for loss in losses)


def _fall(values: list[float]) -> tuple[float, float]:
    """Return the fall of a least-squares line from the first value to the last, and the standard error of that fall."""
    places = range(len(values))
    slope, start = statistics.linear_regression(places, values)
    rest = math.fsum((value - start - slope * place) ** 2 for place, value in zip(places, values, strict=True))
    across = statistics.variance(places) * (len(values) - 1)
    return -slope * (len(values) - 1), math.sqrt(rest / (len(values) - 2) / across) * (len(values) - 1)


def events(losses: Iterable[tuple[int, float]]) -> list[Event]:
    """Return the spikes, divergences and plateaus in (step, loss) pairs, sorted by their first steps. A step number
    below the one before it marks a restart, which replaces the earlier losses from that step on."""
    curve: list[tuple[int, float]] = []
    for step, loss in losses:
        if curve and step < curve[-1][0]:
            curve = [row for row in curve if row[0] < step]
        curve.append((step, loss))
    detector = Detector()
    for step, loss in curve:
        detector.update(step, loss)
    return sorted(detector.events, key=lambda event: event.start)
