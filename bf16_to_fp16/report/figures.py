"""The pictures of a report, one for each stack: log2 |x| against fp16's limit. Colours become the page's variables."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from ..bounds.kinds import Line, SiteKind, traits
from ..families.known import FAMILIES, roles_of
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


def _called(names: str) -> str:
    return ", ".join(dict.fromkeys(name for family in FAMILIES for name in getattr(roles_of(family), names)))


_WRITERS = _called("feed_forward_outputs")
STREAM = Series("residual stream, at each norm", Line.STREAM, "o", "#000004")
ATTENTION = Series(f"attention's output ({_called('attention_outputs')})", Line.ATTENTION, "D", "#000008")
FEED_FORWARD = Series(f"feed-forward's output ({_WRITERS})", Line.FEED_FORWARD, "s", "#000005")
PRODUCT = Series(f"its neurons or gated product, into {_WRITERS.replace(', ', ' or ')}", Line.PRODUCT, "^", "#000006")
SCORES = Series("attention scores and their span; last in the decoder: logits", Line.SCORES, "v", "#000009")
SERIES = (STREAM, ATTENTION, FEED_FORWARD, PRODUCT, SCORES)
BRACKETS = (replace(STREAM, name="residual stream"), *SERIES[1:])
_INK, _GRID, _LIMIT, _PAPER = "#000001", "#000002", "#000003", "#000007"
_VARIABLES = {_INK: "ink", _GRID: "grid", _LIMIT: "limit", _PAPER: "paper"} | {s.placeholder: s.css for s in SERIES}


@dataclass(frozen=True)
class Point:
    """One observed signal. x: blocks from the bottom of its stack. before, after: the largest |x|."""

    series: Series
    x: float
    before: float
    after: float


@dataclass(frozen=True)
class Picture:
    stack: str
    svg: Markup
    words: str
    wide: bool = False


def axis(values: Sequence[float]) -> tuple[int, int]:
    return min(0, math.floor(math.log2(min(values)))), max(18, math.ceil(math.log2(max(values))) + 1)


def pictures(signals: Sequence[SignalEntry]) -> list[Picture]:
    stacks = {name: points(signals, name) for name in STACKS}
    shown = [v for ps in stacks.values() for p in ps for v in (p.before, p.after)]
    result: list[Picture] = []
    for name, ps in stacks.items():
        if not ps:
            continue
        with drawn(result, name, axis(shown), before_after_in_words(ps, name, signals)) as axes:
            for series in SERIES:
                mine = [p for p in ps if p.series is series]
                x = [p.x for p in mine]
                size = 3.6 if len(mine) < 20 else 2.4
                look: dict[str, Any] = {"color": series.placeholder, "marker": series.marker, "markersize": size}
                axes.plot(x, [math.log2(p.before) for p in mine], "--", linewidth=0.9, markerfacecolor=_PAPER, **look)
                axes.plot(x, [math.log2(p.after) for p in mine], "-", linewidth=1.5, **look)
    return result


def points(signals: Iterable[SignalEntry], stack: str) -> list[Point]:
    """Return the points of one stack, spread evenly within their block, logits last. Of parallel experts the largest
    counts. Zeros and infinities, which a log axis cannot show, are left out."""
    mine = [s for s in signals if s.stack == stack or (s.kind, stack) == ("logits", STACKS[-1])]
    reads = [s for s in mine if s.block is not None and signal_series(s) is STREAM]
    norms = {s.module for s in reads}
    sublayers: dict[int | None, list[str | None]] = {s.block: [] for s in reads}
    for s in reads:
        if s.role not in sublayers[s.block]:
            sublayers[s.block].append(s.role)
    end = max((s.block for s in reads if s.block is not None), default=-1) + 1
    result: dict[tuple[Series, float], Point] = {}
    for s in mine:
        before, after = known(s.before), known(s.after)
        series = signal_series(s)
        if series is None or not before or not after or (s.module in norms and s.side == "output"):
            continue
        x = float(end)
        if s.block is not None and s.kind != "logits":
            order = sublayers.get(s.block, [])
            x = s.block + (order.index(s.role) / len(order) if s.role in order else 0)
        same = result.get((series, x), Point(series, x, before, after))
        result[series, x] = Point(series, x, max(before, same.before), max(after, same.after))
    return sorted(result.values(), key=lambda p: p.x)


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


def before_after_in_words(shown: Iterable[Point], stack: str, signals: Iterable[SignalEntry]) -> str:
    before, after = (max(getattr(p, side) for p in shown) for side in ("before", "after"))
    words = (
        f"{stack}: the largest value is {magnitude(before)} before and {magnitude(after)} after; the limit is 65,504"
    )
    others = [s for s in signals if s.stack == stack and known(s.before) is not None]
    most = max(others, key=lambda s: s.before, default=None)
    if most is None or most.before <= before:
        return words
    return f"{words}; not drawn: {most.module}, {magnitude(most.before)} before and {magnitude(most.after)} after"


@contextmanager
def drawn(into: list[Picture], stack: str, ends: tuple[int, int], words: str, *, wide: bool = False) -> Iterator[Any]:
    """Yield the axes of one stack's picture, and add the picture to ``into`` at the end. x: blocks. y: log2 |x|,
    between ``ends``. Equal pictures have equal bytes."""
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    low, high = ends
    with rc_context():
        rcdefaults()  # ignores the user's matplotlibrc
        rcParams.update({"svg.fonttype": "none", "svg.hashsalt": stack, "font.size": 9})
        canvas = Canvas(figsize=(10.4 if wide else 5.2, 3.5), layout="constrained")
        axes = canvas.add_subplot(facecolor="none")
        canvas.patch.set_visible(False)
        axes.axhspan(math.log2(FP16_MAX), high, color=_LIMIT, alpha=0.1, linewidth=0)
        axes.axhline(math.log2(FP16_MAX), color=_LIMIT, linewidth=1.4)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, min_n_ticks=1))
        yield axes
        axes.set_ylim(low, high)
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
    into.append(Picture(stack, themed(target.getvalue(), words), words, wide))


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


WIDE_FROM = 16  # number of blocks from which a picture of brackets takes the page's width


@dataclass(frozen=True)
class Bracket:
    """The largest of one kind of signal in one block. ``found``: None where nothing was run, infinite for an overflow.
    ``block``: None for the logits."""

    series: Series
    block: int | None
    found: float | None
    bound: float


def brackets(sites: Sequence[BoundEntry], stack: str) -> list[Bracket]:
    gated = any(site.kind == SiteKind.PRODUCT for site in sites)
    merged: dict[tuple[Series, int | None], Bracket] = {}
    for site in sites:
        series = bracket_series(site, gated)
        outside = (site.block is None) != (site.kind == SiteKind.LOGITS)
        if series is None or (site.stack or STACKS[-1]) != stack or outside:
            continue
        worst = site.observed
        worst = None if worst is None else math.inf if infinite(worst) or worst > site.limit else worst
        bound = math.inf if infinite(site.largest) else site.largest
        same = merged.get((series, site.block), Bracket(series, site.block, worst, bound))
        merged[series, site.block] = replace(
            same,
            found=max((value for value in (same.found, worst) if value is not None), default=None),
            bound=max(same.bound, bound),
        )
    return list(merged.values())


def bracket_series(site: BoundEntry, gated: bool) -> Series | None:
    line = traits(site.kind).line
    if gated and site.kind == SiteKind.ACTIVATION:
        return None
    if line is Line.ATTENTION and site.role == FEED_FORWARDS:
        line = Line.FEED_FORWARD
    return next((series for series in BRACKETS if series.css == line), None)


def bracket_pictures(certificate: CertificateEntry) -> list[Picture]:
    stacks = {name: brackets(certificate.sites, name) for name in STACKS}
    shown = [v for bs in stacks.values() for b in bs for v in (b.found, b.bound) if v and known(v)]
    if not shown:
        return []
    low, high = axis(shown)
    result: list[Picture] = []
    for name, mine in stacks.items():
        if mine:
            words = bracket_in_words(mine, name, certificate.sites)
            draw_brackets(result, mine, name, (max(-14, low), min(64, high)), words)
    return result


def bracket_in_words(shown: Sequence[Bracket], stack: str, sites: Sequence[BoundEntry]) -> str:
    top, worst = max(b.bound for b in shown), max((b.found for b in shown if b.found is not None), default=None)
    reached = "" if worst is None else "overflows" if math.isinf(worst) else f"is {magnitude(worst)}"
    said = f"the largest value found {reached}, " if reached else ""
    words = f"{stack}: {said}the largest bound is {bound_magnitude(top)}; the limit is 65,504"
    most = max((s for s in sites if (s.stack or STACKS[-1]) == stack), key=lambda s: s.largest)
    return f"{words}; not drawn: {most.kind}, up to {bound_magnitude(most.largest)}" if most.largest > top else words


def draw_brackets(into: list[Picture], shown: Sequence[Bracket], stack: str, ends: tuple[int, int], words: str) -> None:
    """Draw each worst value found, its bound as a bar, and a line between. A cross is an overflow within its bound."""
    end, (low, high) = 1 + max((b.block for b in shown if b.block is not None), default=-1), ends
    wide = end > WIDE_FROM
    size = min(6.0, max(2.4, (500 if wide else 230) / ((end + 1) * len(BRACKETS))))
    line = max(0.9, size / 4)

    def y(value: float) -> float:
        return min(high - 0.4, max(low + 0.2, math.log2(value))) if value > 0 else low + 0.2

    with drawn(into, stack, ends, words, wide=wide) as axes:
        for k, series in enumerate(BRACKETS):
            offset = (k - (len(BRACKETS) - 1) / 2) * 0.8 / len(BRACKETS)
            mine = [(end if b.block is None else b.block + offset, b) for b in shown if b.series is series]
            seen = [(x, y(b.found), y(b.bound)) for x, b in mine if b.found is not None and math.isfinite(b.found)]
            over = [x for x, b in mine if b.found == math.inf and b.bound > FP16_MAX]
            ink: dict[str, Any] = {"color": series.placeholder}
            x, bounds = across([(x, y(b.bound)) for x, b in mine])
            axes.plot(x, bounds, "_", markersize=1.5 * size, markeredgewidth=1.6, **ink)
            x, worst, bounds = across(seen, 3)
            axes.vlines(x, worst, bounds, linewidth=line, **ink)
            look: dict[str, Any] = {"marker": series.marker, "markersize": 0.75 * size, "markeredgewidth": 0}
            axes.plot(x, worst, linestyle="none", **look, **ink)
            at_limit = [y(1.4 * FP16_MAX)] * len(over)
            axes.plot(over, at_limit, "x", color=_LIMIT, markersize=size, markeredgewidth=1.3)
        head = any(b.block is None for b in shown)
        ticks = range(0, end, 1 if end < 10 or wide else 2)
        axes.set_xticks([*ticks, *([end] if head else [])], [*map(str, ticks), *(["head"] if head else [])])
        axes.set_xlim(-0.6, end - 0.4 + head * 0.7)


def across(rows: Iterable[Sequence[float]], width: int = 2) -> list[list[float]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]
