"""Draw a report's figures of the largest |x| by block, on a log2 axis. Each stack (encoder or decoder) has two: values
before and after the plan, and bounds beside observed values. The page sets their colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ..bounds.kinds import Line, SiteKind, traits
from ..families.places import FEED_FORWARD as FEED_FORWARDS
from ..families.places import STACKS, SUBLAYERS
from ..numerics import FP16_MAX
from ..results import BoundEntry, CertificateEntry
from ..wording import bound_magnitude, infinite, known, magnitude, power
from .schema import SignalEntry


@dataclass(frozen=True)
class Series:
    name: str
    css: str
    marker: str
    placeholder: str


STREAM = Series("residual stream", Line.STREAM, "o", "#000004")
ATTENTION = Series("attention's output", Line.ATTENTION, "D", "#000008")
FEED_FORWARD = Series("feed-forward's output", Line.FEED_FORWARD, "s", "#000005")
PRODUCT = Series("feed-forward's neurons or gated product", Line.PRODUCT, "^", "#000006")
SCORES = Series("attention scores and their span; at the decoder's end: logits", Line.SCORES, "v", "#000009")
SERIES = (STREAM, ATTENTION, FEED_FORWARD, PRODUCT, SCORES)
_INK, _GRID, _LIMIT, _PAPER = "#000001", "#000002", "#000003", "#000007"
_VARIABLES = {_INK: "ink", _GRID: "grid", _LIMIT: "limit", _PAPER: "paper"} | {s.placeholder: s.css for s in SERIES}


@dataclass(frozen=True)
class Point:
    """A point of a figure: the largest |x| of one kind of activation in one block."""

    series: Series
    x: int  # the block in its stack
    upper: float  # before the plan, or the bound
    lower: float | None  # after the plan, or the largest found: infinite for an overflow, None if nothing ran


@dataclass(frozen=True)
class Picture:
    svg: Markup
    words: str


def before_and_after(signals: Sequence[SignalEntry]) -> list[Picture]:
    stacks = {stack: signal_points(signals, stack) for stack in STACKS}
    return pictures(stacks, lambda before: f"before {magnitude(before)}", "after")


def bound_and_observed(certificate: CertificateEntry) -> list[Picture]:
    stacks = {stack: bound_points(certificate.sites, stack) for stack in STACKS}
    return pictures(stacks, lambda bound: f"bound {bound_magnitude(bound)}", "found")


def signal_points(signals: Iterable[SignalEntry], stack: str) -> list[Point]:
    """Return the points of a stack's figure: one for each block of each series (line of the figure). A point has the
    largest values before and after the plan. A signal with a value of 0 or infinity is left out. Logits follow the
    decoder's last block."""
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


def bound_points(sites: Sequence[BoundEntry], stack: str) -> list[Point]:
    gated = any(site.kind == SiteKind.PRODUCT for site in sites)
    mine = [site for site in sites if (site.stack or STACKS[-1]) == stack]
    end = 1 + max((site.block for site in mine if site.block is not None), default=-1)
    points = []
    for site in mine:
        line = traits(site.kind).line
        if line is Line.ATTENTION and site.role == FEED_FORWARDS:
            line = Line.FEED_FORWARD
        series = next((series for series in SERIES if series.css == line), None)
        outside = (site.block is None) != (site.kind == SiteKind.LOGITS)
        if series is None or outside or (gated and site.kind == SiteKind.ACTIVATION):
            continue
        worst = site.observed
        observed = None if worst is None else math.inf if infinite(worst) or worst > site.limit else worst
        bound = math.inf if infinite(site.largest) else site.largest
        points.append(Point(series, end if site.block is None else site.block, bound, observed))
    return largest(points)


def largest(points: Iterable[Point]) -> list[Point]:
    merged: dict[tuple[Series, int], Point] = {}
    for point in points:
        same = merged.get((point.series, point.x), point)
        lower = max((value for value in (same.lower, point.lower) if value is not None), default=None)
        merged[point.series, point.x] = Point(point.series, point.x, max(same.upper, point.upper), lower)
    return sorted(merged.values(), key=lambda point: point.x)


def pictures(stacks: Mapping[str, Sequence[Point]], in_words: Callable[[float], str], prefix: str) -> list[Picture]:
    """Return a figure for each stack that has points, with a caption that names its largest values. in_words: formats
    the largest ``Point.upper`` for the caption. prefix: the caption's word before the largest ``Point.lower``,
    such as "after"."""
    shown = [v for points in stacks.values() for p in points for v in (p.upper, p.lower) if v and known(v)]
    if not shown:
        return []
    low = max(-14, min(0, math.floor(math.log2(min(shown)))))
    high = min(64, max(18, math.ceil(math.log2(max(shown))) + 1))
    result = []
    for stack, points in stacks.items():
        if points:
            most = max((p.lower for p in points if p.lower is not None), default=None)
            values = in_words(max(p.upper for p in points)) + ("" if most is None else f", {prefix} {magnitude(most)}")
            caption = f"{stack}, largest values: {values}; the limit is 65,504"
            result.append(Picture(themed(drawn(points, stack, low, high), caption), caption))
    return result


def drawn(points: Sequence[Point], stack: str, low: int, high: int) -> str:
    """Return a line chart of a stack's points as SVG, with ``Point.upper`` dashed and ``Point.lower`` solid. low, high:
    the ends of the y axis, as log2 of |x|."""
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    def line(mine: Sequence[tuple[int, float]], style: str, width: float, **look: Any) -> None:
        # What is past an end of the axis stands there.
        y = [min(high - 0.4, max(low + 0.2, math.log2(value) if value > 0 else low)) for _, value in mine]
        size = 3.6 if len(mine) < 20 else 2.4
        axes.plot([x for x, _ in mine], y, style, linewidth=width, markersize=size, **look)

    with rc_context():
        rcdefaults()  # ignores the user's matplotlibrc
        rcParams.update({"svg.fonttype": "none", "svg.hashsalt": stack, "font.size": 9})  # equal points, equal bytes
        canvas = Canvas(figsize=(5.2, 3.5), layout="constrained")
        axes = canvas.add_subplot(facecolor="none")
        canvas.patch.set_visible(False)
        axes.axhspan(math.log2(FP16_MAX), high, color=_LIMIT, alpha=0.1, linewidth=0)
        axes.axhline(math.log2(FP16_MAX), color=_LIMIT, linewidth=1.4)
        for series in SERIES:
            mine = [p for p in points if p.series is series]
            look = {"color": series.placeholder, "marker": series.marker}
            line([(p.x, p.upper) for p in mine], "--", 0.9, markerfacecolor=_PAPER, **look)
            line([(p.x, p.lower) for p in mine if p.lower is not None], "-", 1.5, **look)
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
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
        target = io.StringIO()
        canvas.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return target.getvalue()


def themed(svg: str, words: str) -> Markup:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    svg = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1 %s>", svg, count=1, flags=re.DOTALL)
    label = Markup('role="img" aria-label="{}" xmlns="{}" xmlns:xlink="{}"').format(
        words, "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
    )
    return Markup(svg.replace("%s", str(label), 1))
