"""The figure of each stack: log2 |x| by block, before and after the plan."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ..families.places import FEED_FORWARD as FEED_FORWARDS
from ..families.places import STACKS, SUBLAYERS
from ..numerics import FP16_MAX
from ..wording import known, magnitude, power
from .schema import SignalEntry


@dataclass(frozen=True)
class Series:
    name: str
    marker: str
    colour: str


STREAM = Series("residual stream", "o", "#1f5fa8")
ATTENTION = Series("attention's output", "D", "#8b3fa0")
FEED_FORWARD = Series("feed-forward's output", "s", "#b25c00")
PRODUCT = Series("feed-forward's neurons or gated product", "^", "#0b7a5b")
SCORES = Series("attention scores; last in the decoder: logits", "v", "#5a626d")
SERIES = (STREAM, ATTENTION, FEED_FORWARD, PRODUCT, SCORES)
_INK, _GRID, _LIMIT = "#23262b", "#dcdfe4", "#b3261e"


@dataclass(frozen=True)
class Point:
    """The largest |x| of one kind of activation, before and after the plan. ``x``: the block in its stack."""

    series: Series
    x: int
    before: float
    after: float


@dataclass(frozen=True)
class Picture:
    svg: Markup
    words: str


def before_and_after(signals: Sequence[SignalEntry]) -> list[Picture]:
    stacks = {stack: points for stack in STACKS if (points := signal_points(signals, stack))}
    shown = [value for points in stacks.values() for p in points for value in (p.before, p.after)]
    if not shown:
        return []
    low = max(-14, min(0, math.floor(math.log2(min(shown)))))
    high = min(64, max(18, math.ceil(math.log2(max(shown))) + 1))
    return [picture(stack, points, low, high) for stack, points in stacks.items()]


def picture(stack: str, points: Sequence[Point], low: int, high: int) -> Picture:
    before, after = (magnitude(max(values)) for values in zip(*((p.before, p.after) for p in points), strict=True))
    caption = f"{stack}, largest values: before {before}, after {after}; the limit is 65,504"
    return Picture(embeddable(drawn(points, stack, low, high), caption), caption)


def signal_points(signals: Iterable[SignalEntry], stack: str) -> list[Point]:
    """Return the points of one stack, logits last. A block has its largest value; zeros and infinities are dropped."""
    mine = [s for s in signals if s.stack == stack or (s.kind, stack) == ("logits", STACKS[-1])]
    norms = {s.module for s in mine if signal_series(s) is STREAM}
    end = 1 + max((s.block for s in mine if s.block is not None), default=-1)
    points = []
    for s in mine:
        before, after = known(s.before), known(s.after)
        series = signal_series(s)
        if series is None or not before or not after or (s.module in norms and s.side == "output"):
            continue
        points.append(Point(series, end if s.block is None or s.kind == "logits" else s.block, before, after))
    return largest(points)


def signal_series(s: SignalEntry) -> Series | None:
    if s.kind == "logits":
        return SCORES
    if s.block is None:
        return STREAM if (s.kind, s.side) == ("residual", "input") else None
    if s.role not in SUBLAYERS:
        return None
    if s.kind == "residual" and s.side == "output":
        return FEED_FORWARD if s.role == FEED_FORWARDS else ATTENTION
    return {("residual", "input"): STREAM, ("scores", "output"): SCORES, ("neuron", "input"): PRODUCT}.get(
        (s.kind, s.side)
    )


def largest(points: Iterable[Point]) -> list[Point]:
    merged: dict[tuple[Series, int], Point] = {}
    for point in points:
        same = merged.get((point.series, point.x), point)
        before, after = max(same.before, point.before), max(same.after, point.after)
        merged[point.series, point.x] = Point(point.series, point.x, before, after)
    return sorted(merged.values(), key=lambda point: point.x)


def drawn(points: Sequence[Point], stack: str, low: int, high: int) -> str:
    """Return one stack's figure as SVG: values before are dashed, those after solid. Equal figures have equal bytes."""
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    with rc_context():
        rcdefaults()  # ignores the user's matplotlibrc
        rcParams.update({"svg.fonttype": "none", "svg.hashsalt": stack, "font.size": 9})
        canvas = Canvas(figsize=(5.2, 3.5), layout="constrained")
        axes = canvas.add_subplot()
        axes.axhspan(math.log2(FP16_MAX), high, color=_LIMIT, alpha=0.1, linewidth=0)
        axes.axhline(math.log2(FP16_MAX), color=_LIMIT, linewidth=1.4)
        for series in SERIES:
            mine = [p for p in points if p.series is series]
            look: dict[str, Any] = {
                "color": series.colour,
                "marker": series.marker,
                "markersize": 3.6 if len(mine) < 20 else 2.4,
            }
            for values, style in (([p.before for p in mine], "--"), ([p.after for p in mine], "-")):
                # What is past an end of the axis stands there.
                y = [min(high - 0.4, max(low + 0.2, math.log2(value))) for value in values]
                axes.plot([p.x for p in mine], y, style, linewidth=1.2, **look)
        axes.set_ylim(low, high)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MultipleLocator(4 if high - low < 40 else 8))
        axes.yaxis.set_major_formatter(lambda value, _: "65504" if value == 16 else power(round(value)))
        axes.set_xlabel(f"{stack} block", color=_INK)
        # The page enlarges labels on narrow screens, so they need room.
        axes.set_ylabel("max |x|", color=_INK, labelpad=10)
        axes.grid(axis="y", color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, length=0, pad=6)
        axes.spines[["left", "right", "top"]].set_visible(False)
        target = io.StringIO()
        canvas.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return target.getvalue()


def embeddable(svg: str, words: str) -> Markup:
    """Return a figure as an HTML element that fills its place, with ``words`` for those who do not see it."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    label = Markup('role="img" aria-label="{}" xmlns="{}" xmlns:xlink="{}"').format(
        words, "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
    )
    opened = re.compile(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', re.DOTALL)
    return Markup(opened.sub(lambda found: f"<svg {found[1]} {label}>", svg, count=1))
