"""What a training log says, for people: each event with its steps and usual cause, as text and as a picture.

``logs`` reads the curves and ``detector`` finds the events, while a finetune runs as well as afterwards.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.staging import check_file, replacing
from ..errors import UserError
from ..svg import follow_schemes
from .detector import events
from .events import EVENT_KINDS, Curve, Divergence, Event, Plateau, ResumeBump, ScaleCollapse, Spike
from .logs import read_log

BARS = "▁▂▃▄▅▆▇█"
LETTERS: dict[type[Event], str] = {Spike: "S", Divergence: "D", Plateau: "P", ResumeBump: "R", ScaleCollapse: "C"}
PICTURES = (".svg", ".png", ".pdf")

FACTS = {
    "svg": {"Date": None, "Creator": "bf16-to-fp16", "Format": None, "Type": None},
    "png": {"Software": "bf16-to-fp16"},
    "pdf": {"Creator": "bf16-to-fp16"},
}
"""What a picture's own metadata say, by its format: that this program drew it, and so may replace it."""

_COLOURS = {
    "Spike": "#d62728",
    "Divergence": "#8c1d40",
    "Plateau": "#7f7f7f",
    "ResumeBump": "#ff7f0e",
    "ScaleCollapse": "#9467bd",
}


def advise_losses(log: str | Path, *, z: float = 6.0, window: int = 64) -> dict[str, Any]:
    """Return the events of a training log: ``events``, each with kind, start, end (None: it lasts), size and cause.

    log: the state of a transformers Trainer, CSV, JSONL (this project's own too), or a folder with one of them. z,
    window: as ``detector.Detector`` takes them. Further keys: ``log``, ``losses`` (how many), ``first_step``,
    ``last_step``, ``last_loss`` and ``counts`` by kind. Raises UserError for a log that cannot be read, has no losses,
    or fewer than half a window.
    """
    return loss_report(str(log), read_log(log), z=z, window=window)[0]


def loss_report(name: str, curve: Curve, *, z: float, window: int) -> tuple[dict[str, Any], list[Event]]:
    """Return the report on a curve and its events."""
    if window < 16 or not z > 0:
        raise UserError(f"a window of {window} and a z of {z:g} compare nothing; give at least 16, and a positive z")
    curve_events = events(curve, z=z, window=window)
    if len(curve.losses) < window // 2 and not curve_events:
        largest = 2 * len(curve.losses)
        smaller = f", or give a --window from 16 to {largest}" if largest >= 16 else ""
        raise UserError(
            f"{name}: {len(curve.losses)} losses are too few to compare with each other; log every step{smaller}"
        )
    return {
        "mode": "losses",
        "log": name,
        "losses": len(curve.losses),
        "first_step": min(curve.steps),
        "last_step": curve.steps[-1],
        "last_loss": curve.losses[-1],
        "z": z,
        "window": window,
        "counts": {kind: sum(event.kind == kind for event in curve_events) for kind in EVENT_KINDS},
        "events": [event.to_json() for event in curve_events],
    }, curve_events


def event_in_words(event: Mapping[str, Any]) -> str:
    """Return what an event was: how high the loss rose or how far the scale fell, and how it came back."""
    size, kind = event["size"], event["kind"]
    if kind == "ScaleCollapse":
        return "to 0" if size is None else f"by {size:.0f} halvings"
    if kind == "Plateau":
        return f"fell by {100 * size:.1f}%"
    rise = "to inf or NaN" if size is None else f"up by {size:.3g}"
    return f"{rise}, {event['recovery']} recovery" if kind == "Spike" and event["recovery"] != "open" else rise


def steps_in_words(event: Mapping[str, Any]) -> str:
    """Return the steps of an event: "100 to 103", "100 to the end"."""
    return f"{event['start']:,} to {'the end' if event['end'] is None else format(event['end'], ',')}"


def sparkline(curve: Curve, curve_events: Sequence[Event], width: int = 100) -> tuple[str, str]:
    """Return the curve as a line of bars, ``width`` columns of equally many losses, and a line of letters under it.

    A column is as high as the median of its losses, or as the largest where an event begins; × is for none finite.
    """
    count = len(curve.losses)
    width = min(width, count)
    edges = [count * column // width for column in range(width + 1)]
    starts: dict[int, str] = {}
    place = {step: index for index, step in reversed(list(enumerate(curve.steps)))}
    for event in curve_events:
        index = place.get(event.start, 0)
        column = next(c for c in range(width) if index < edges[c + 1])
        starts.setdefault(column, LETTERS[type(event)])
    heights = []
    for column in range(width):
        part = [loss for loss in curve.losses[edges[column] : edges[column + 1]] if math.isfinite(loss)]
        choose = max if column in starts else statistics.median
        heights.append(choose(part) if part else math.nan)
    known = [height for height in heights if math.isfinite(height)]
    # Logarithmic where it can be, as in the picture; one high spike would otherwise flatten all the rest.
    scale = math.log if known and min(known) > 0 else float
    low, high = (scale(min(known)), scale(max(known))) if known else (0.0, 1.0)
    step = (high - low) / (len(BARS) - 1) or 1.0
    bars = "".join("×" if math.isnan(h) else BARS[round((scale(h) - low) / step)] for h in heights)
    return bars, "".join(starts.get(column, " ") for column in range(width)).rstrip()


def write_picture(path: Path, curve: Curve, curve_events: Sequence[Event], title: str) -> None:
    """Draw the curve with its events to ``path``, as SVG, PNG or PDF by its ending; raise UserError for another one."""
    check_picture(path)
    with replacing(path) as new:
        draw_curve(curve, curve_events, new, title, format=path.suffix.lower().removeprefix("."))
        if path.suffix.lower() == ".svg":
            follow_schemes(new)


def check_picture(path: Path) -> None:
    """Raise UserError unless a picture can be written at ``path``."""
    if path.suffix.lower() not in PICTURES:
        raise UserError(f"{path}: unknown kind of picture {path.suffix!r}; use {', '.join(PICTURES)}")
    check_file(path, "choose another file for --picture")


def draw_curve(curve: Curve, curve_events: Sequence[Event], target: Path, title: str, *, format: str) -> None:
    """Draw the curve as "svg", "png" or "pdf", with events shaded and named, and a logged loss scale below."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    scaled = [(step, scale) for step, scale in zip(curve.steps, curve.scales, strict=True) if scale]
    # The text of an SVG has the font of the page that it is on.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "losses", "font.size": 9}):
        figure = Figure(figsize=(7.5, 4.2 if scaled else 3.2), layout="constrained")
        rows, heights = (2, [3, 1]) if scaled else (1, [1])
        axes: list[Any] = [*figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]]
        axes[0].plot(curve.steps, curve.losses, linewidth=0.8, color="#1f77b4")
        axes[0].set_ylabel("loss")
        if title:
            axes[0].set_title(title)
        known = [loss for loss in curve.losses if math.isfinite(loss)]
        lost = [step for step, loss in zip(curve.steps, curve.losses, strict=True) if not math.isfinite(loss)]
        if lost:  # at the lower edge, since they have no height
            edge = {"transform": axes[0].get_xaxis_transform(), "color": "#d62728", "markersize": 4}
            axes[0].plot(lost, [0.02] * len(lost), "x", label="no number", **edge)
        if known and max(known) > 20 * min(known) > 0:
            axes[0].set_yscale("log")
        if scaled:
            axes[1].plot([step for step, _ in scaled], [scale for _, scale in scaled], linewidth=0.8, color="#1f77b4")
            axes[1].set_yscale("log", base=2)
            axes[1].set_ylabel("loss scale")
        axes[-1].set_xlabel("step")
        named: set[str] = set()
        least = (max(curve.steps) - min(curve.steps)) / 400  # a short event would not be seen
        for event in curve_events:
            end = max(curve.steps) if event.end is None else event.end
            label = None if event.kind in named else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", event.kind).lower()
            named.add(event.kind)
            span = {"color": _COLOURS[event.kind], "alpha": 0.25, "label": label}
            axis = axes[-1 if isinstance(event, ScaleCollapse) else 0]
            axis.axvspan(event.start, max(end, event.start + least), **span)
        for axis in axes:
            if axis.get_legend_handles_labels()[1]:
                axis.legend(loc="upper right", fontsize=7)
        figure.savefig(target, format=format, dpi=150, metadata=FACTS[format])
