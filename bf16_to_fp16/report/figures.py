"""The pictures of a report: one drawing style, values on a log2 axis against fp16's limit, one picture per stack.

Two kinds: what the largest values were before and are after rescaling, and the certificate's bracket, from the worst
value that was found to the bound that no input can pass. Where there was a finetune, its curves as well. Colours are
placeholders that become CSS variables, so that a picture follows light and dark like the text around it; lines differ
in shape as well, for those who see no colours.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ..families.known import FAMILIES, named, roles_of
from ..families.roles import STACKS, Roles, block_of, last, stack_in, stack_of
from ..numerics import FP16_MAX
from ..wording import bits, bound_magnitude, infinite, known, magnitude, power
from .schema import BoundEntry, CertificateEntry, FinetuneEntry, SignalEntry, SiteEntry


@dataclass(frozen=True)
class Series:
    """A line of the picture: its name, its CSS class, and how it is drawn where colours fail."""

    name: str
    css: str
    marker: str
    placeholder: str


# What all families call the two outputs, each name once.
_ATTENTIONS = dict.fromkeys(name for family in FAMILIES for name in roles_of(family).attention_outputs)


_FEED_FORWARDS = dict.fromkeys(name for family in FAMILIES for name in roles_of(family).feed_forward_outputs)


STREAM = Series("residual stream, at each norm", "stream", "o", "#000004")


ATTENTION = Series(f"attention's output ({', '.join(_ATTENTIONS)})", "attention", "D", "#000008")


FEED_FORWARD = Series(f"feed-forward's output ({', '.join(_FEED_FORWARDS)})", "added", "s", "#000005")


PRODUCT = Series(f"its neurons or gated product, into {' or '.join(_FEED_FORWARDS)}", "product", "^", "#000006")


SCORES = Series("attention scores and their span; last in the decoder: logits", "scores", "v", "#000009")


SERIES = (STREAM, ATTENTION, FEED_FORWARD, PRODUCT, SCORES)


BRACKETS = (Series("residual stream", STREAM.css, STREAM.marker, STREAM.placeholder), *SERIES[1:])


_INK, _GRID, _LIMIT, _PAPER = "#000001", "#000002", "#000003", "#000007"


_VARIABLES = {_INK: "ink", _GRID: "grid", _LIMIT: "limit", _PAPER: "paper"} | {s.placeholder: s.css for s in SERIES}


@dataclass(frozen=True)
class Point:
    """One observed signal in the picture: x in blocks from the bottom of its stack, max |x| before and after."""

    series: Series
    x: float
    before: float
    after: float


@dataclass(frozen=True)
class Picture:
    """The picture of one stack: its name, the SVG, what it shows in words, and whether it takes the page's width."""

    stack: str
    svg: Markup
    words: str
    wide: bool = False


def pictures(signals: Sequence[SignalEntry], family: str | None) -> list[Picture]:
    """Return a picture of each stack that has signals: max |x| before and after on a log2 axis against 65504."""
    stacks = {name: points(signals, name, family) for name in STACKS}
    values = [v for ps in stacks.values() for p in ps for v in (p.before, p.after)]
    if not values:
        return []
    low = min(0, math.floor(math.log2(min(values))))
    high = max(18, math.ceil(math.log2(max(values))) + 1)
    made = []
    for name, ps in stacks.items():
        if ps:
            words = before_after_in_words(ps, name) + beyond_in_words(ps, name, signals, family)
            made.append(Picture(name, draw_before_after(ps, name, low, high, words), words))
    return made


def points(signals: Sequence[SignalEntry], stack: str, family: str | None) -> list[Point]:
    """Return the points of one stack: norm inputs, sublayer outputs, neurons and scores, spread evenly within their
    block, and the logits behind the last.

    A norm of the stream begins a sublayer, the output that follows in the report's order ends it; of experts, which
    stand side by side, the largest counts. Zeros and infinite values have no place on a log axis and are left out.
    """
    known_as = roles_of(named(family))
    found = [
        s for s in signals if stack_in(s.module, named(family)) == stack or (s.kind, stack) == ("logits", STACKS[-1])
    ]
    place, sublayers = places(found, known_as)
    end = max(sublayers, default=-1) + 1
    result: dict[tuple[Series, float], Point] = {}
    for s in found:
        written = place.get((s.module, s.side if s.kind == "residual" else "output"))
        if s.kind == "logits":
            series, x = SCORES, float(end)
        elif s.kind == "residual" and s.side == "input" and block_of(s.module) is None:
            series, x = STREAM, float(end)
        elif s.kind == "scores" and (within := attention_at(s.module, place)) is not None:
            series, x = SCORES, at(within, sublayers)
        elif written is not None and s.kind == "residual":
            outputs = FEED_FORWARD if last(s.module) in known_as.feed_forward_outputs else ATTENTION
            series, x = STREAM if s.side == "input" else outputs, at(written, sublayers)
        elif written is not None and s.kind == "neuron" and s.side == "input":
            series, x = PRODUCT, at(written, sublayers)
        else:
            continue
        before, after = known(s.before), known(s.after)
        if before and after:
            same = result.get((series, x), Point(series, x, before, after))
            result[series, x] = Point(series, x, max(before, same.before), max(after, same.after))
    return sorted(result.values(), key=lambda p: p.x)


def places(
    signals: Sequence[SignalEntry], known_as: Roles
) -> tuple[dict[tuple[str, str], tuple[int, int]], Counter[int]]:
    """Return by (module, side) in which block and which of its sublayers the stream is read and outputs are, and how
    many sublayers each block has; other norms than those with which sublayers begin are left out."""
    place: dict[tuple[str, str], tuple[int, int]] = {}
    sublayers: Counter[int] = Counter()
    outputs = (*known_as.attention_outputs, *known_as.feed_forward_outputs)
    for s in signals:
        number, reads = block_of(s.module), s.side == "input"
        named_so = last(s.module) in (known_as.sublayer_norms if reads else outputs)
        if s.kind != "residual" or number is None or not named_so or (s.module, s.side) in place:
            continue
        sublayers[number] += reads
        place[s.module, s.side] = (number, max(0, sublayers[number] - 1))
    return place, sublayers


def attention_at(module: str, place: Mapping[tuple[str, str], tuple[int, int]]) -> tuple[int, int] | None:
    """Return where an attention's output is, which is inside it or beside it."""
    for outer in (module, module.rpartition(".")[0]):
        for (path, side), found in place.items():
            if side == "output" and path.startswith(f"{outer}."):
                return found
    return None


def at(place: tuple[int, int], sublayers: Mapping[int, int]) -> float:
    """Return the x of a sublayer: its block plus its share of it."""
    block, number = place
    return block + number / max(1, sublayers[block])


def before_after_in_words(found: Iterable[Point], stack: str) -> str:
    """Return what a picture shows in a sentence."""
    before, after = max(p.before for p in found), max(p.after for p in found)
    return f"{stack}: the largest value is {magnitude(before)} before and {magnitude(after)} after; the limit is 65,504"


def beyond_in_words(found: Iterable[Point], stack: str, signals: Sequence[SignalEntry], family: str | None) -> str:
    """Return which signal of a stack was larger than all that are drawn; empty where none was."""
    others = [s for s in signals if stack_in(s.module, named(family)) == stack and known(s.before) is not None]
    most = max(others, key=lambda s: s.before, default=None)
    if most is None or most.before <= max(p.before for p in found):
        return ""
    return f"; not drawn: {most.module}, {magnitude(most.before)} before and {magnitude(most.after)} after"


def draw_before_after(found: Sequence[Point], stack: str, low: int, high: int, words: str) -> Markup:
    """Return the SVG of one stack before and after; ``low`` and ``high`` are the axis' ends as powers of two."""
    with drawn(stack, low, high, words) as (axes, result):
        for series in SERIES:
            mine = [p for p in found if p.series is series]
            x = [p.x for p in mine]
            look: dict[str, Any] = {
                "color": series.placeholder,
                "marker": series.marker,
                "markersize": 3.6 if len(mine) < 20 else 2.4,
            }
            axes.plot(x, [math.log2(p.before) for p in mine], "--", linewidth=0.9, markerfacecolor=_PAPER, **look)
            axes.plot(x, [math.log2(p.after) for p in mine], "-", linewidth=1.5, **look)
    return result[0]


@contextmanager
def drawn(stack: str, low: int, high: int, words: str, wide: bool = False) -> Iterator[tuple[Any, list[Markup]]]:
    """Give the axes of one stack's picture with their limit line and grid; on leaving, the list holds the SVG.

    x: blocks from the bottom of the stack. y: log2 of the largest |x|, from ``low`` to ``high``.
    """
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    with styled(stack, (10.4 if wide else 5.2, 3.5), words) as (axes, result):
        axes.axhspan(math.log2(FP16_MAX), high, color=_LIMIT, alpha=0.1, linewidth=0)
        axes.axhline(math.log2(FP16_MAX), color=_LIMIT, linewidth=1.4)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, min_n_ticks=1))
        yield axes, result
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(MultipleLocator(4 if high - low < 40 else 8))
        axes.yaxis.set_major_formatter(lambda value, _: "65504" if value == 16 else power(round(value)))
        axes.set_xlabel(f"{stack} block", color=_INK)
        # Room around the labels, since the page shows them larger on narrow screens.
        axes.set_ylabel("max |x|", color=_INK, labelpad=10)


@contextmanager
def styled(name: str, inches: tuple[float, float], words: str) -> Iterator[tuple[Any, list[Markup]]]:
    """Give the axes of a picture of a size in inches in the common style; on leaving, the list holds the SVG.

    name: what the ids inside the SVG are made from, so that the same picture has the same bytes.
    """
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure as Canvas

    result: list[Markup] = []
    with rc_context():
        rcdefaults()  # whatever the user's matplotlibrc says
        rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9})
        canvas = Canvas(figsize=inches, layout="constrained")
        axes = canvas.add_subplot(facecolor="none")
        canvas.patch.set_visible(False)
        yield axes, result
        axes.grid(axis="y", color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, length=0, pad=6)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
        target = io.StringIO()
        canvas.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    result.append(themed(target.getvalue(), words))


def themed(svg: str, words: str) -> Markup:
    """Return an SVG of matplotlib for use inside HTML: colours as CSS variables, sized by the page, described."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var(--{variable})")
    svg = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1 %s>", svg, count=1, flags=re.DOTALL)
    label = Markup('role="img" aria-label="{}" xmlns="{}" xmlns:xlink="{}"').format(
        words, "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
    )
    return Markup(svg.replace("%s", str(label), 1))


# --- an audit --------------------------------------------------------------------------------------------------------


BLOCKS = (
    Series("residual stream and other sums", STREAM.css, STREAM.marker, STREAM.placeholder),
    Series("outputs of linears", FEED_FORWARD.css, FEED_FORWARD.marker, FEED_FORWARD.placeholder),
    Series("gated products, and what norms put out", PRODUCT.css, PRODUCT.marker, PRODUCT.placeholder),
    Series("attention scores", SCORES.css, SCORES.marker, SCORES.placeholder),
)


_OF_OPERATION = {"add": BLOCKS[0], "": BLOCKS[1], "mul": BLOCKS[2], "scores": BLOCKS[3]}


def audit_pictures(sites: Iterable[SiteEntry]) -> list[Picture]:
    """Return a picture of each column of blocks that a regime ran: per block and kind of operation the largest |x|, of
    what broke that in fp32.

    Sites outside the blocks are left out, and those by design, whose size means nothing. What overflowed is drawn at
    the limit where fp32's value is not known.
    """
    sites = list(sites)
    attentions = {site.name.removesuffix(":scores") for site in sites if site.name.endswith(":scores")}
    largest: dict[str, dict[Series, dict[int, SiteEntry]]] = {}
    for site in sites:
        path, _, operation = site.name.partition(":")
        series, block = _OF_OPERATION.get(operation.partition("#")[0]), block_of(site.name)
        if path in attentions and series is not None:
            series = BLOCKS[3]
        if series is None or block is None or site.limit is None or site.benign or not known(site.reached):
            continue
        blocks = largest.setdefault(stack_of(path) or "model", {}).setdefault(series, {})
        if block not in blocks or site.reached > blocks[block].reached:
            blocks[block] = site
    values = [s.reached for of in largest.values() for blocks in of.values() for s in blocks.values() if s.reached > 0]
    if not values:
        return []
    low, high = min(0, math.floor(math.log2(min(values)))), max(18, math.ceil(math.log2(max(values))) + 1)
    made = []
    for stack, found in largest.items():
        top = max((site for blocks in found.values() for site in blocks.values()), key=lambda site: site.reached)
        words = f"{stack}: the largest value is {magnitude(top.reached)}, at {top.name}; the limit is 65,504"
        made.append(Picture(stack, draw_audit(found, stack, low, high, words), words))
    return made


def draw_audit(found: Mapping[Series, Mapping[int, SiteEntry]], stack: str, low: int, high: int, words: str) -> Markup:
    """Return the SVG of one column of blocks; a cross is what is over the limit."""
    with drawn(stack, low, high, words) as (axes, result):
        for series, blocks in found.items():
            y = {block: math.log2(site.reached) for block, site in sorted(blocks.items()) if site.reached > 0}
            look: dict[str, Any] = {"color": series.placeholder, "markersize": 3.6 if len(y) < 20 else 2.4}
            axes.plot(list(y), list(y.values()), "-", marker=series.marker, linewidth=1.3, **look)
            over = [block for block, bits in y.items() if bits > math.log2(FP16_MAX)]
            axes.plot(over, [y[block] for block in over], "x", color=_LIMIT, markersize=7, markeredgewidth=1.4)
    return result[0]


# --- the bracket -----------------------------------------------------------------------------------------------------


WIDE_FROM = 16
"""Last block from which a picture of brackets takes the page's width."""


@dataclass(frozen=True)
class Bracket:
    """The bracket of one kind of signal in one block: the worst value found, the bound, the bound of partial sums.

    Each is the largest of its sites. ``found`` is None where nothing was run, and infinite for an overflow; a bound may
    be infinite. ``block``: None for the logits, which come after the last one.
    """

    series: Series
    block: int | None
    found: float | None
    bound: float
    partial: float


def brackets(sites: Sequence[BoundEntry], stack: str, family: str | None) -> list[Bracket]:
    """Return the brackets of one stack from a certificate's sites, by kind and block."""
    outputs = roles_of(named(family)).feed_forward_outputs
    gated = any(site.kind == "product" for site in sites)
    merged: dict[tuple[Series, int | None], Bracket] = {}
    for site in sites:
        series = series_of(site, gated, outputs)
        within, place = stack_of(site.name), block_of(site.name)
        if series is None or (within or "decoder") != stack or (place is None) != (site.kind == "logits"):
            continue
        found = site.observed
        found = None if found is None else math.inf if infinite(found) or found > site.limit else found
        bounds = (math.inf if infinite(value) else value for value in (site.bound, site.partial))
        fresh = Bracket(series, place, found, *bounds)
        old = merged.get((series, place), fresh)
        known_found = [b.found for b in (old, fresh) if b.found is not None]
        merged[series, place] = Bracket(
            series, place, max(known_found, default=None), max(old.bound, fresh.bound), max(old.partial, fresh.partial)
        )
    return list(merged.values())


def series_of(site: BoundEntry, gated: bool, feed_forwards: Sequence[str]) -> Series | None:
    """Return the line that a site of a certificate belongs to, None for one that the picture leaves out.

    feed_forwards: what the family calls the outputs of its feed-forwards.
    """
    kind, name = site.kind, site.name
    if kind == "output":
        return BRACKETS[2] if last(name) in feed_forwards else BRACKETS[1]
    if kind == ("product" if gated else "activation"):
        return BRACKETS[3]
    return {"residual": BRACKETS[0], "scores": SCORES, "masked scores": SCORES, "logits": SCORES}.get(kind)


def bracket_pictures(certificate: CertificateEntry, family: str | None) -> list[Picture]:
    """Return a picture of each stack that the certificate bounds: per block and kind of signal a bracket."""
    stacks = {name: brackets(certificate.sites, name, family) for name in STACKS}
    values = [v for bs in stacks.values() for b in bs for v in (b.found, b.bound, b.partial) if v and known(v)]
    if not values:
        return []
    low = max(-14, min(0, math.floor(math.log2(min(values)))))
    high = min(64, max(18, math.ceil(math.log2(max(values))) + 1))
    made = []
    for name, found in stacks.items():
        if found:
            words = bracket_in_words(found, name) + undrawn_in_words(found, name, certificate.sites)
            wide = max((b.block for b in found if b.block is not None), default=0) >= WIDE_FROM
            made.append(Picture(name, draw_brackets(found, name, low, high, words, wide), words, wide))
    return made


def bracket_in_words(found: Sequence[Bracket], stack: str) -> str:
    """Return what a picture of brackets shows in a sentence."""
    top, worst = max(b.bound for b in found), max((b.found for b in found if b.found is not None), default=None)
    reached = "" if worst is None else "overflows" if math.isinf(worst) else f"is {magnitude(worst)}"
    said = f"the largest value found {reached}, " if reached else ""
    return f"{stack}: {said}the largest bound is {bound_magnitude(top)}; the limit is 65,504"


def undrawn_in_words(found: Sequence[Bracket], stack: str, sites: Sequence[BoundEntry]) -> str:
    """Return which bound of a stack is larger than all that are drawn; empty where none is."""
    most = max((s for s in sites if (stack_of(s.name) or "decoder") == stack), key=lambda s: s.bound)
    if not most.bound > max(b.bound for b in found):
        return ""
    return f"; not drawn: {most.kind}, up to {bound_magnitude(most.bound)}"


def draw_brackets(found: Sequence[Bracket], stack: str, low: int, high: int, words: str, wide: bool) -> Markup:
    """Return the SVG of one stack's brackets: a marker at the worst found, a bar at the bound, a line between them.

    What is beyond the picture stands at its edge. An overflow is a cross where the bound allows it; elsewhere it only
    passes on what overflowed before.
    """
    end = 1 + max((b.block for b in found if b.block is not None), default=-1)
    width = 0.8 / len(BRACKETS)
    size = min(6.0, max(2.4, (500 if wide else 230) / ((end + 1) * len(BRACKETS))))
    line = max(0.9, size / 4)

    def y(value: float) -> float:
        return min(high - 0.4, max(low + 0.2, math.log2(value))) if value > 0 else low + 0.2

    with drawn(stack, low, high, words, wide) as (axes, result):
        for k, series in enumerate(BRACKETS):
            offset = (k - (len(BRACKETS) - 1) / 2) * width
            mine = [(end if b.block is None else b.block + offset, b) for b in found if b.series is series]
            summed = [(x, b) for x, b in mine if y(b.partial) > y(b.bound) + 0.1]
            seen = [(x, b.found, b.bound) for x, b in mine if b.found is not None and math.isfinite(b.found)]
            over = [x for x, b in mine if b.found == math.inf and max(b.bound, b.partial) > FP16_MAX]
            ink: dict[str, Any] = {"color": series.placeholder}
            bare: dict[str, Any] = {"linestyle": "none"}
            axes.vlines(
                [x for x, _ in summed],
                [y(b.bound) for _, b in summed],
                [y(b.partial) for _, b in summed],
                linewidth=line,
                alpha=0.4,
                **ink,
            )
            tops = [y(b.partial) for _, b in summed]
            axes.plot([x for x, _ in summed], tops, "_", markersize=1.2 * size, markeredgewidth=0.9, alpha=0.5, **ink)
            bounds = [y(b.bound) for _, b in mine]
            axes.plot([x for x, _ in mine], bounds, "_", markersize=1.5 * size, markeredgewidth=1.6, **ink)
            worst = [y(value) for _, value, _ in seen]
            axes.vlines([x for x, _, _ in seen], worst, [y(top) for _, _, top in seen], linewidth=line, **ink)
            look: dict[str, Any] = {"marker": series.marker, "markersize": 0.75 * size, "markeredgewidth": 0}
            axes.plot([x for x, _, _ in seen], worst, **bare, **look, **ink)
            at_limit = [y(1.4 * FP16_MAX)] * len(over)
            axes.plot(over, at_limit, "x", color=_LIMIT, markersize=size, markeredgewidth=1.3)
        head = any(b.block is None for b in found)
        shown = range(0, end, 1 if end < 10 or wide else 2)
        axes.set_xticks([*shown, *([end] if head else [])], [*map(str, shown), *(["head"] if head else [])])
        axes.set_xlim(-0.6, end - 0.4 + head * 0.7)
    return result[0]


# --- the finetune ----------------------------------------------------------------------------------------------------

_CURVE = (3.6, 2.5)


def curve_pictures(run: FinetuneEntry) -> list[Picture]:
    """Return the curves of a finetune over its steps: losses, headroom, loss scale; those that the report knows.

    run: the report's ``finetune``. Losses are in nats per target token; headroom is that of the tightest layer, with
    fp16's limit at 0 and what the recipe asked for as a dotted line; crosses are steps that were skipped.
    """
    curves, evaluations, penalty = run.curves, run.evaluations, run.recipe.get("penalty")
    target = penalty.get("headroom_bits") if isinstance(penalty, Mapping) else None
    skipped = [float(entry["step"]) for entry in run.skipped]
    end = float(max(1, run.steps))
    made = [
        losses_picture(pairs(curves, "task_loss"), evaluated(evaluations, "held_out_loss"), end),
        headroom_picture(
            pairs(curves, "headroom_bits") or evaluated(evaluations, "worst_headroom_bits"),
            target,
            end,
            pairs(curves, "bound_bits"),
        ),
        scale_picture(pairs(curves, "loss_scale"), skipped, end),
    ]
    return [picture for picture in made if picture is not None]


def pairs(curves: Mapping[str, Sequence[float | None]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) wherever a curve has a finite value."""
    found = zip(curves.get("step") or (), curves.get(name) or (), strict=False)
    return [(float(step), y) for step, value in found if step is not None and (y := known(value)) is not None]


def evaluated(evaluations: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) of the evaluations that have a finite value."""
    return [(float(entry["step"]), y) for entry in evaluations if (y := known(entry.get(name))) is not None]


def losses_picture(
    training: Sequence[tuple[float, float]], held_out: Sequence[tuple[float, float]], end: float
) -> Picture | None:
    """Return the picture of the task's loss in training and on held-out data, None where both are missing."""
    if not training and not held_out:
        return None
    said = [
        f"from {found[0][1]:.3f} to {found[-1][1]:.3f} {where}"
        for found, where in ((training, "in training"), (held_out, "on held-out data"))
        if found
    ]
    words = f"task loss in nats per token: {', '.join(said)}"
    with styled("losses", _CURVE, words) as (axes, result):
        axes.plot(*across(training), "-", color=STREAM.placeholder, linewidth=1.1)
        axes.plot(*across(held_out), "--", color=FEED_FORWARD.placeholder, marker="s", markersize=4, linewidth=1.1)
        by_steps(axes, "loss", end)
    return Picture("losses", result[0], words)


def headroom_picture(
    found: Sequence[tuple[float, float]],
    target: float | None,
    end: float,
    bounds: Sequence[tuple[float, float]] = (),
) -> Picture | None:
    """Return the picture of the tightest layer's headroom in bits, None where it was not measured; ``bounds``: of the
    bounds that were trained, dashed."""
    if not found:
        return None
    asked = "" if target is None else f"; asked for: {target:g}"
    words = f"headroom of the tightest layer: from {bits(found[0][1])} to {bits(found[-1][1])} bits{asked}"
    if bounds:
        words += f"; dashed, that of the tightest bound: from {bits(bounds[0][1])} to {bits(bounds[-1][1])}"
    with styled("headroom", _CURVE, words) as (axes, result):
        low = min(-0.5, 1.1 * min(values([*found, *bounds])))
        axes.axhspan(low, 0, color=_LIMIT, alpha=0.1, linewidth=0)
        axes.axhline(0, color=_LIMIT, linewidth=1.4)
        if target is not None:
            axes.axhline(target, color=_INK, linewidth=0.9, linestyle=":")
        axes.plot(*across(found), "-", color=PRODUCT.placeholder, linewidth=1.5)
        axes.plot(*across(bounds), "--", color=ATTENTION.placeholder, linewidth=1.3)
        axes.set_ylim(bottom=low)
        by_steps(axes, "bits", end)
    return Picture("headroom", result[0], words)


def scale_picture(scales: Sequence[tuple[float, float]], skipped: Sequence[float], end: float) -> Picture | None:
    """Return the picture of the loss scale, with a cross at each skipped step, None where nothing was scaled."""
    found = [(step, math.log2(value)) for step, value in scales if value > 0]
    if not found:
        return None
    missed = f"{len(skipped)} {'step' if len(skipped) == 1 else 'steps'} skipped"
    words = f"loss scale in fp16: from {2 ** found[0][1]:g} to {2 ** found[-1][1]:g}; {missed}"
    with styled("loss-scale", _CURVE, words) as (axes, result):
        axes.step(*across(found), "-", where="post", color=ATTENTION.placeholder, linewidth=1.5)
        top = max(values(found)) + 1
        axes.plot(skipped, [top] * len(skipped), "x", color=_LIMIT, markersize=5, markeredgewidth=1.3)
        axes.set_ylim(min(values(found)) - 1, top + 0.6)
        by_steps(axes, "loss scale", end, powers=True)
    return Picture("loss scale", result[0], words)


def by_steps(axes: Any, what: str, end: float, *, powers: bool = False) -> None:
    """Label a curve's axes; the steps run from 0 to ``end``; ``powers``: the values are exponents of two."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.02 * end, 1.02 * end)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=powers))
    if powers:
        axes.yaxis.set_major_formatter(lambda value, _: power(round(value)))
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(what, color=_INK, labelpad=8)


def values(found: Iterable[tuple[float, float]]) -> list[float]:
    """Return the second of each pair."""
    return [value for _, value in found]


def across(found: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return pairs as the two lists that a plot takes."""
    both = list(found)
    return [x for x, _ in both], [y for _, y in both]
