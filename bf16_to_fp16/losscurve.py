"""What a training log says went wrong: spikes, divergence, plateaus, bumps after a resume, a loss scale that collapses.

One detector serves a run while it trains and a log afterwards. It compares each loss with the median of a window of
calm ones (on a steep fall with a line through them), in units of their median absolute deviation, so that neither noise
nor earlier spikes move the yardstick.
What is out of line starts an event; what follows decides its name: a spike comes back, fast or slowly, a divergence
does not. A rise or a standstill too slow for that shows in the medians of chunks of the curve.

``read_log`` reads the state of a transformers Trainer, CSV, JSONL, and offline runs of wandb. The last need no wandb:
the file is a log of records in leveldb's format, and of each record three levels of protobuf fields are looked at.
"""

from __future__ import annotations

import copy
import csv
import io
import itertools
import json
import math
import re
import statistics
import struct
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from .errors import UserError

# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something that happened to a run from step ``start`` to ``end`` (None while it lasts).

    ``size``: how far the loss rose above its level before, in units of the loss, unless a kind says otherwise.
    """

    start: int
    end: int | None
    size: float

    cause: ClassVar[str] = ""
    """What usually causes it, and what helps."""

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
        "every step overflows, mostly in the forward pass, which no loss scale mends; audit the checkpoint, rescale it,"
        " or train in bf16"
    )


KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Spike, Divergence, Plateau, ResumeBump, ScaleCollapse)
}
"""The kinds of events by name."""


@dataclass(frozen=True)
class Curve:
    """Losses by step, in the order in which they were logged, each with the loss scale where one was logged."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    scales: tuple[float | None, ...]


# ---- the detector ---------------------------------------------------------------------------------------------------

SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

_LEAST_SIGMA = 0.005
"""Least noise that is believed, as a share of the level: smoother curves do not make small rises spikes."""

_CLEAR = 2.0
"""How many times as far above the level as the lowest of the last calm losses is below it a spike must be."""

_STEEP = 0.5
"""Share of the losses' scatter that a line through them may leave where it is to replace their median."""

_FLAT = 0.01
"""Share of the level by which the loss may change in a plateau."""

_FLAT_CHUNKS = 16
"""Least length of a plateau, in chunks of a quarter of the window; noisier curves need twice, four times as many."""

_COLLAPSE = 10
"""Halvings within a window from which a loss scale that had settled has collapsed: it should move by one or two."""

_LEAST_SCALE = 1.0
"""A loss scale under this no longer scales up at all."""


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
        changed = [event for event, before in zip(self._found, known, strict=False) if _news(event, before)]
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
            state["excursion"] = vars(self._excursion) | {"recent": [*self._excursion.recent]}
            state["excursion"]["patient"] = self._excursion.recent.maxlen
        return copy.deepcopy(state)

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave: what follows is found as it would have been there."""
        state: dict[str, Any] = copy.deepcopy(dict(given))
        self.__init__(z=state.pop("z"), window=state.pop("window"))  # type: ignore[misc]
        self.fast = state.pop("fast")
        pairs = {name: [tuple(pair) for pair in state.pop(name)] for name in ("calm", "scales", "chunk", "chunks")}
        self._calm.extend(pairs["calm"])
        self._scales.extend(pairs["scales"])
        self._chunk, self._chunks = pairs["chunk"], pairs["chunks"]
        self._tail.extend(state.pop("tail"))
        self._found = [KINDS[event.pop("kind")](**event) for event in state.pop("found")]
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
        spread = SIGMA * statistics.median(abs(loss - level) for loss in losses)
        half = len(losses) // 2
        slope = (statistics.median(losses[-half:]) - statistics.median(losses[:half])) / (len(losses) - half)
        if slope < 0:
            flat = [loss + slope * (len(losses) - 1 - i) for i, loss in enumerate(losses)]
            end = statistics.median(flat)
            scatter = SIGMA * statistics.median(abs(loss - end) for loss in flat)
            if scatter < _STEEP * spread:
                level, spread = max(end, min(losses[-self.fast :])), scatter
        return level, max(spread, _LEAST_SIGMA * abs(level), 1e-12)

    def _loss(self, step: int, loss: float) -> None:
        if self._excursion is not None:
            self._follow(self._excursion, step, loss)
        elif len(self._calm) < self.window // 2:
            # Nothing to compare with yet, but a loss that is no number is wrong whatever the others are.
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
                self._after_resume(step, loss, level, sigma)

    def _begin(self, event: Event, level: float, sigma: float, loss: float, back: float | None = None) -> None:
        limit = level + self.z / 2 * sigma if back is None else back
        recent = deque([loss], maxlen=3 if back is None else self.fast)
        self._found.append(event)
        place = len(self._found) - 1
        self._excursion = _Excursion(place, self._count, level, sigma, limit, self._count, loss, recent)
        self._resumed = None

    def _after_resume(self, step: int, loss: float, level: float, sigma: float) -> None:
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


def _news(event: Event, before: Event) -> bool:
    """Whether an event has ended or got another name."""
    return event.end != before.end or type(event) is not type(before)


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


# ---- logs -----------------------------------------------------------------------------------------------------------

LOSSES = ("loss", "train_loss", "train/loss", "training_loss", "train/train_loss")
"""Names under which trainers log the training loss, the first that is there."""

STEPS = ("step", "global_step", "train/global_step", "trainer/global_step", "iteration", "_step")
"""Names of the step."""

SCALES = ("loss_scale", "scale", "train/loss_scale", "train/scale", "loss_scaler", "grad_scale")
"""Names of the loss scale."""


def read_log(path: str | Path) -> Curve:
    """Return the losses in a log: ``trainer_state.json`` of a Trainer, CSV, JSONL, ``.wandb``, or a folder with one.

    Rows without a loss are left out; a loss scale logged on a row of its own belongs to the losses after it. Raises
    UserError for a file that is none of these, has no losses or is not UTF-8.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a trainer_state.json, .csv, .jsonl or .wandb") from error
    if not content.strip():
        raise UserError(f"{path}: the log is empty; give one of a run that has logged losses")
    if path.suffix == ".wandb":
        return _curve(path, _wandb_rows(path, content))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; give a .json, .jsonl, .csv or .wandb") from error
    readers = {".json": _json_rows, ".jsonl": _jsonl_rows, ".csv": _csv_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: unknown kind of log {path.suffix!r}; use .json, .jsonl, .csv or .wandb")
    return _curve(path, reader(path, text))


def _in_folder(folder: Path) -> Path:
    named = ("log.jsonl", "trainer_state.json", "*.wandb")
    for pattern in (*named, "checkpoint-*/trainer_state.json", "latest-run/*.wandb"):
        found = sorted(folder.glob(pattern), key=lambda path: (path.stat().st_mtime, path.name))
        if found:
            return found[-1]
    raise UserError(f"{folder}: no trainer_state.json and no .wandb in the folder, nor log.jsonl; give the log's file")


def _json_rows(path: Path, text: str) -> list[Any]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object on each line, whatever the file is called
            return _jsonl_rows(path, text)
        raise UserError(f"{path}: not JSON at line {error.lineno} ({error.msg}); give a whole file") from error
    rows = tree.get("log_history", [tree]) if isinstance(tree, dict) else tree
    if not isinstance(rows, list):
        raise UserError(f"{path}: no list of rows in it; give a trainer_state.json or a list of objects")
    return rows


def _jsonl_rows(path: Path, text: str) -> list[Any]:
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and rows:  # a run that was killed while it wrote
                break
            raise UserError(f"{path}: line {number} is not JSON ({error.msg}); put one object on each line") from error
    return rows


def _csv_rows(path: Path, text: str) -> list[Any]:
    try:
        return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise UserError(f"{path}: not CSV ({error}); give a comma-separated file with a header") from error


def _curve(path: Path, rows: Iterable[Any]) -> Curve:
    """The columns of the loss, the step and the scale of rows of any kind."""
    flat = [row for row in rows if isinstance(row, Mapping)]
    names = list(dict.fromkeys(name for row in flat for name in row if isinstance(name, str)))
    loss, step, scale = (next((name for name in known if name in names), None) for known in (LOSSES, STEPS, SCALES))
    if loss is None:
        shown = ", ".join(names[:12]) or "none"
        raise UserError(f"{path}: no column of losses among {shown}; name one {LOSSES[0]} or {LOSSES[1]}")
    steps: list[int] = []
    losses: list[float] = []
    scales: list[float | None] = []
    latest: float | None = None
    for number, row in enumerate(flat):
        found = _number(path, number, scale, row)
        latest = latest if found is None else found
        value = _number(path, number, loss, row)
        if value is None and "skipped_examples" in row:
            value = math.nan  # a step that a finetune could not take; its log has null for NaN
        if value is None:
            continue
        at = _number(path, number, step, row) if step is not None else None
        if at is None:
            at = float(steps[-1] + 1 if steps else number)
        if not math.isfinite(at):
            raise UserError(f"{path}: row {number + 1}: the step is {at}; give a whole number")
        steps.append(int(at))
        losses.append(value)
        scales.append(latest)
    if not losses:
        raise UserError(f"{path}: the column {loss!r} has no losses in it; give a run that has logged some")
    return Curve(tuple(steps), tuple(losses), tuple(scales))


def _number(path: Path, row: int, name: str | None, values: Mapping[str, Any]) -> float | None:
    value = None if name is None else values.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = float(value)
        # JSON has no infinity, and this project's logs write the largest double for it.
        return math.copysign(math.inf, number) if abs(number) == sys.float_info.max else number
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: row {row + 1}: {name} is {value!r}, which is no number; mend that row") from error


# ---- wandb's offline file -------------------------------------------------------------------------------------------

_BLOCK, _HEADER = 32768, 7


def _wandb_rows(path: Path, content: bytes) -> Iterator[dict[str, Any]]:
    """The logged rows of an offline run: records of wandb's protobuf ``Record`` with a ``HistoryRecord`` (field 2).

    A history has items (1), of a key (1, or several for nested ones, 2) and a value: JSON (16) or, in later versions,
    true or false (4), an integer (5), a double (6), text (7) or JSON (8).
    """
    for record in _records(path, content):
        for history in _fields(record).get(2, ()):
            if not isinstance(history, bytes):
                continue
            row: dict[str, Any] = {}
            for item in _fields(history).get(1, ()):
                values = _fields(item) if isinstance(item, bytes) else {}
                keys = [key.decode("utf-8", "replace") for key in values.get(1, values.get(2, [])) if key]
                for number in (16, 8, 6, 5, 4):
                    if keys and number in values:
                        row["/".join(keys)] = _value(number, values[number][-1])
                        break
            yield {name: value for name, value in row.items() if isinstance(value, (int, float))}


def _value(number: int, raw: Any) -> Any:
    if number in (8, 16):
        try:
            value = json.loads(raw)
        except ValueError:
            return None
        # Infinities and NaN are written as text.
        return (
            {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
            if isinstance(value, str)
            else value
        )
    if number == 6:
        return struct.unpack("<d", raw)[0]
    return (raw >> 1) ^ -(raw & 1) if number == 5 else raw


def _records(path: Path, content: bytes) -> Iterator[bytes]:
    """The records of a leveldb log with wandb's head, checked; a last one that was cut off by a kill is left out."""
    if content[:4] != b":W&B":
        raise UserError(f"{path}: not a wandb file; give the .wandb of an offline run")
    place, parts = _HEADER, b""
    while place + 7 <= len(content):
        room = _BLOCK - place % _BLOCK
        if room < 7:
            place += room
            continue
        checksum, length, kind = struct.unpack_from("<IHB", content, place)
        data = content[place + 7 : place + 7 + length]
        if kind == 0 and not length:  # what a crash leaves of a block: zeros
            place += room
            continue
        if len(data) < length:
            return
        if zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            raise UserError(f"{path}: damaged at byte {place}; copy the file again from where it was written")
        place += 7 + length
        parts = data if kind in (1, 2) else parts + data  # 1 whole, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            yield parts


def _fields(message: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message by number, of all wire types: integers, or bytes."""
    found: dict[int, list[Any]] = {}
    place = 0
    try:
        while place < len(message):
            tag, place = _varint(message, place)
            value: Any
            if tag & 7 == 0:
                value, place = _varint(message, place)
            else:
                if tag & 7 == 2:
                    length, place = _varint(message, place)
                else:
                    length = {1: 8, 5: 4}[tag & 7]
                value, place = message[place : place + length], place + length
            found.setdefault(tag >> 3, []).append(value)
    except (IndexError, KeyError):
        return {}
    return found


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place += 1
        if byte < 128:
            return value, place
        shift += 7


# ---- the picture ----------------------------------------------------------------------------------------------------

_COLOURS = {
    "Spike": "#d62728",
    "Divergence": "#8c1d40",
    "Plateau": "#7f7f7f",
    "ResumeBump": "#ff7f0e",
    "ScaleCollapse": "#9467bd",
}


def picture(curve: Curve, found: Sequence[Event], title: str = "") -> str:
    """Return the curve as SVG, events shaded and named, with the loss scale below where one was logged."""
    target = io.StringIO()
    draw(curve, found, target, title, format="svg")
    return target.getvalue()


def draw(curve: Curve, found: Sequence[Event], target: Any, title: str = "", *, format: str) -> None:
    """Draw what ``picture`` returns into a file or stream, as "svg", "png" or "pdf"."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    scaled = [(step, scale) for step, scale in zip(curve.steps, curve.scales, strict=True) if scale]
    # The text of an SVG has the font of the page that it is on.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "losses", "font.size": 9}):
        figure = Figure(figsize=(7.5, 4.2 if scaled else 3.2), layout="constrained")
        axes: list[Any] = list(
            figure.subplots(2, 1, sharex=True, height_ratios=[3, 1]) if scaled else [figure.subplots()]
        )
        axes[0].plot(curve.steps, curve.losses, linewidth=0.8, color="#1f77b4")
        axes[0].set_ylabel("loss")
        if title:
            axes[0].set_title(title)
        known = [loss for loss in curve.losses if math.isfinite(loss)]
        lost = [step for step, loss in zip(curve.steps, curve.losses, strict=True) if not math.isfinite(loss)]
        if lost:  # at the lower edge, since they have no height
            edge = axes[0].get_xaxis_transform()
            axes[0].plot(
                lost, [0.02] * len(lost), "x", transform=edge, color="#d62728", markersize=4, label="no number"
            )
        if known and max(known) > 20 * min(known) > 0:
            axes[0].set_yscale("log")
        if scaled:
            axes[1].plot([step for step, _ in scaled], [scale for _, scale in scaled], linewidth=0.8, color="#1f77b4")
            axes[1].set_yscale("log", base=2)
            axes[1].set_ylabel("loss scale")
        axes[-1].set_xlabel("step")
        named: set[str] = set()
        least = (max(curve.steps) - min(curve.steps)) / 400  # a short event would not be seen
        for event in found:
            end = max(curve.steps) if event.end is None else event.end
            label = None if event.kind in named else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", event.kind).lower()
            named.add(event.kind)
            axes[-1 if isinstance(event, ScaleCollapse) and scaled else 0].axvspan(
                event.start, max(end, event.start + least), color=_COLOURS[event.kind], alpha=0.25, label=label
            )
        for axis in axes:
            if axis.get_legend_handles_labels()[1]:
                axis.legend(loc="upper right", fontsize=7)
        facts = {"Date": None, "Creator": None, "Format": None, "Type": None} if format == "svg" else {}
        figure.savefig(target, format=format, dpi=150, metadata=facts)
