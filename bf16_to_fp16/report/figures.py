"""A report's two figures for each stack, with log2 |x| by block: before and after the plan; bound and observed. The
page draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..bounds.kinds import Line, SiteKind, traits
from ..families.places import FEED_FORWARD as FEED_FORWARDS
from ..families.places import STACKS, SUBLAYERS
from ..numerics import FP16_MAX
from ..results import BoundEntry, CertificateEntry
from ..wording import bound_magnitude, infinite, known, magnitude, power
from .schema import SignalEntry

LEFT, RIGHT, TOP, BOTTOM = 52, 392, 8, 214  # of the plot, in a figure of 400 × 256


@dataclass(frozen=True)
class Series:
    """``css``: a class. ``mark``: the SVG path of a point's mark."""

    name: str
    css: str
    mark: str


STREAM = Series("residual stream", Line.STREAM, "M-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0z")
ATTENTION = Series("attention's output", Line.ATTENTION, "M0-3 3 0 0 3-3 0z")
FEED_FORWARD = Series("feed-forward's output", Line.FEED_FORWARD, "M-2-2H2V2H-2z")
PRODUCT = Series("feed-forward's neurons or gated product", Line.PRODUCT, "M0-3 3 2H-3z")
SCORES = Series("attention scores and their span; last in the decoder: logits", Line.SCORES, "M0 3 3-2H-3z")
SERIES = (STREAM, ATTENTION, FEED_FORWARD, PRODUCT, SCORES)


@dataclass(frozen=True)
class Point:
    """The largest |x| of one kind of signal. ``x``: the block in its stack. ``upper``: the value before the plan, or
    the bound. ``lower``: the value after the plan, or the largest value found: infinite for an overflow, None if
    nothing ran."""

    series: Series
    x: int
    upper: float
    lower: float | None


@dataclass(frozen=True)
class Picture:
    """One stack's figure. ``lines``: series, "upper" or "lower", and points. ``powers``, ``blocks``: the axes' labels
    with their places. ``limit``: the height of fp16's limit."""

    stack: str
    words: str
    lines: Sequence[tuple[Series, str, Sequence[tuple[float, float]]]]
    powers: Sequence[tuple[float, str]]
    blocks: Sequence[tuple[float, int]]
    limit: float


def before_and_after(signals: Sequence[SignalEntry]) -> list[Picture]:
    stacks = {stack: signal_points(signals, stack) for stack in STACKS}
    return pictures(stacks, lambda before: f"before {magnitude(before)}", "after")


def bound_and_observed(certificate: CertificateEntry) -> list[Picture]:
    stacks = {stack: bound_points(certificate.sites, stack) for stack in STACKS}
    return pictures(stacks, lambda bound: f"bound {bound_magnitude(bound)}", "found")


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


def pictures(stacks: Mapping[str, Sequence[Point]], upper: Callable[[float], str], lower: str) -> list[Picture]:
    """Return each stack's figure with a caption. upper: returns the caption's words for the largest dashed value.
    lower: the word before the largest solid one, such as "after"."""
    shown = [v for points in stacks.values() for p in points for v in (p.upper, p.lower) if v and known(v)]
    if not shown:
        return []
    low = max(-14, min(0, math.floor(math.log2(min(shown)))))
    high = min(64, max(18, math.ceil(math.log2(max(shown))) + 1))
    result = []
    for stack, points in stacks.items():
        if points:
            most = max((p.lower for p in points if p.lower is not None), default=None)
            values = upper(max(p.upper for p in points)) + ("" if most is None else f", {lower} {magnitude(most)}")
            caption = f"{stack}, largest values: {values}; the limit is 65,504"
            result.append(drawn(points, stack, caption, low, high))
    return result


def drawn(points: Sequence[Point], stack: str, words: str, low: int, high: int) -> Picture:
    last = max(1, *(point.x for point in points))

    def across(block: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * block / last, 2)

    def up(exponent: float) -> float:
        return round(TOP + (BOTTOM - TOP) * (high - exponent) / (high - low), 2)

    def place(block: int, value: float) -> tuple[float, float]:
        # What is past an end of the axis stands there.
        return across(block), up(min(high - 0.4, max(low + 0.2, math.log2(value) if value > 0 else low)))

    lines: list[tuple[Series, str, list[tuple[float, float]]]] = []
    for series in SERIES:
        mine = [point for point in points if point.series is series]
        lines.append((series, "upper", [place(point.x, point.upper) for point in mine]))
        lines.append((series, "lower", [place(point.x, point.lower) for point in mine if point.lower is not None]))
    step, every = 4 if high - low < 40 else 8, math.ceil((last + 1) / 9)
    exponents = range(low + -low % step, high + 1, step)
    return Picture(
        stack,
        words,
        lines,
        powers=[(up(e), "65504" if e == 16 else power(e)) for e in exponents],
        blocks=[(across(block), block) for block in range(0, last + 1, every)],
        limit=up(math.log2(FP16_MAX)),
    )
