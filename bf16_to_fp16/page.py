"""The report as a page: one HTML file that carries everything it shows and loads nothing.

It is made from the report's dict alone, so it cannot say anything else than ``fp16_report.json``. The order is that of
a reader: the verdict in a sentence, three figures, a picture, then the tables. Names come from other people's files,
so all text goes through Jinja2's autoescape. The site table may have thousands of rows: it travels as JSON and is drawn
by a small script, with the tightest rows in the HTML for readers without scripts. A content policy in the page forbids
every request. The picture's colours are CSS variables, so that it follows light and dark like the text around it.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from .numerics import FP16_MAX, headroom_bits

MOST_SITE_BYTES = 1_500_000
"""Of the site table's JSON; beyond it the sites with most headroom are left out, so that the page stays under 2 MB."""

ROWS_WITHOUT_SCRIPT = 60
"""Rows of the site table that stand in the HTML itself."""

MOST_UNSAFE = 12
"""Broken sites listed with their remedy; most others only pass on what broke before, and are in the site table."""

LARGEST = 6
"""Signals named below the picture."""

_OVERFLOWED_BITS = headroom_bits(65536.0)
"""Headroom that the audit writes for an overflow."""

_ALL_BITS = 39.0
"""More headroom than this is all that fp16 has."""

_KINDS = {"value": "values", "neuron": "neurons", "query_key": "queries and keys"}
"""Ends of signal names, and what to call them; every other signal that a plan moves is the output of a norm."""


def write_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report of a conversion or an audit to ``path`` as one self-contained HTML file, UTF-8, under 2 MB."""
    path.write_text(render(report), encoding="utf-8")


def render(report: Mapping[str, Any]) -> str:
    """Return the page; parts that the report lacks (an audit has no plan, a replayed plan no signals) are left out."""
    plan, regimes = report.get("plan"), report.get("regimes") or {}
    data = site_data(regimes)
    template = environment().get_template("report.html.jinja")
    return template.render(
        report=report,
        title=source_name(report),
        safe=report.get("verdict") == "safe",
        sentence=verdict_sentence(report),
        figures=figures(report),
        pictures=pictures(report.get("signals") or ()),
        series=SERIES,
        largest=largest_signals(report.get("signals") or ()),
        regimes=regime_rows(regimes),
        unsafe=unsafe_rows(report),
        plan=plan,
        moves=plan_rows(report) if plan else (),
        exact=is_exact(plan) if plan else False,
        histograms=histograms(plan.get("exponents") or {}) if plan else (),
        fidelity=fidelity_rows(report.get("fidelity")),
        weights=weight_rows(report.get("weights")),
        sites=site_rows(regimes, ROWS_WITHOUT_SCRIPT),
        site_data=data,
        hidden_sites=sum(len(r["sites"]) for r in regimes.values()) - len(data["rows"]),
        hashes=hash_rows(report),
    )


def environment() -> Environment:
    """Return the Jinja2 environment of the HTML templates: everything escaped, an unknown name is an error."""
    made = Environment(
        loader=PackageLoader("bf16_to_fp16"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"magnitude": magnitude, "bits": bits, "breakable": breakable}
    return made


def breakable(name: object) -> Markup:
    """Return a dotted name, escaped, that may wrap behind its dots."""
    return Markup(str(escape(str(name))).replace(".", ".<wbr>"))


# --- numbers -------------------------------------------------------------------------------------------------------


def infinite(value: float) -> bool:
    """Return whether a number is infinite, also as JSON has it: ± the largest double."""
    return math.isinf(value) or abs(value) >= sys.float_info.max


def magnitude(value: float | None) -> str:
    """Return a magnitude with four digits, three where it needs a power of ten."""
    if value is None or math.isnan(value):
        return "NaN"
    if infinite(value):
        return "∞"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 0.01 <= abs(value) < 1000 else scientific(value)


def bits(value: float | None) -> str:
    """Return headroom in bits with one decimal, rounded down; "none" after an overflow, "–" where there is no limit."""
    if value is None or math.isnan(value):
        return "–"
    if value <= _OVERFLOWED_BITS:
        return "none"
    return "all" if value > _ALL_BITS else f"{math.floor(value * 10) / 10:.1f}"


def scientific(value: float | None) -> str:
    """Return an error with three digits, "∞" for what is infinite or was too large to say."""
    if value is None or math.isnan(value) or infinite(value):
        return "∞"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}×10{superscript(int(exponent))}"


def percent(fraction: float) -> str:
    """Return a share in percent with at most four decimals, rounded down so that only 1 gives 100%."""
    return f"{math.floor(fraction * 1e6) / 1e4:.4f}".rstrip("0").rstrip(".") + "%"


def power(exponent: int) -> str:
    """Return 2 with a superscript exponent."""
    return "2" + superscript(exponent)


def superscript(exponent: int) -> str:
    """Return an integer in superscript."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def listed(names: Sequence[str]) -> str:
    """Return names as prose: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def signed(exponent: int) -> str:
    """Return an integer with its sign, a true minus."""
    return f"{exponent:+d}".replace("-", "−") if exponent else "0"


# --- verdict and figures -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One figure of the headline: what it is, its value, and what it was measured on."""

    name: str
    value: str
    note: str


def source_name(report: Mapping[str, Any]) -> str:
    """Return the last part of the source's path or Hub id, without the revision."""
    path = str((report.get("source") or {}).get("path") or report.get("family") or "checkpoint")
    return path.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1].partition("@")[0] or path


def broken_regimes(report: Mapping[str, Any]) -> list[str]:
    """Return the names of the regimes with values that are not finite or saturated."""
    return [name for name, r in (report.get("regimes") or {}).items() if r["nonfinite"] or r["saturated"]]


def verdict_sentence(report: Mapping[str, Any]) -> str:
    """Return the verdict in one sentence, with what it rests on."""
    regimes, broken = report.get("regimes") or {}, broken_regimes(report)
    if report.get("verdict") == "safe":
        beginning = "Safe in fp16"
        if report.get("proof") == "certified":
            beginning += " for every input, by bounds from the weights"
        if not regimes:
            return f"{beginning}; nothing was run."
        kept = min(r["headroom_bits"] for r in regimes.values())
        return (
            f"{beginning}: nothing overflowed or saturated in {listed(list(regimes))},"
            f" and the tightest place keeps {bits(kept)} bits of headroom."
        )
    if not broken:
        return "Unsafe in fp16: nothing overflowed in what was run, but see below what passes its limit."
    nonfinite, saturated = (max(regimes[b][key] for b in broken) for key in ("nonfinite", "saturated"))
    what = [f"{n:,} values {verb}" for n, verb in ((nonfinite, "are inf or NaN"), (saturated, "saturate")) if n]
    first = first_broken(regimes[broken[0]])
    return f"Unsafe in fp16: up to {listed(what)} in {listed(broken)}" + (f", first at {first}." if first else ".")


def first_broken(regime: Mapping[str, Any]) -> str | None:
    """Return the name of the site where a regime breaks first, None where it does not."""
    sites = broken_sites(regime)
    return sites[0]["name"] if sites else None


def broken_sites(regime: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the sites of a regime that are not finite or saturated, those that overflow first."""
    found = [s for s in regime["sites"] if s["nonfinite"] or s["saturated"]]
    return sorted(found, key=lambda s: not s["nonfinite"])


def figures(report: Mapping[str, Any]) -> list[Figure]:
    """Return the three figures of the headline, fewer where the report lacks them."""
    regimes, result = report.get("regimes") or {}, []
    if regimes:
        name = "half" if "half" in regimes else min(regimes, key=lambda n: regimes[n]["headroom_bits"])
        regime = regimes[name]
        kept = bits(regime["headroom_bits"])
        place = first_broken(regime) or next((s["name"] for s in regime["sites"] if s["headroom_bits"] is not None), "")
        reached = "overflow" if kept == "none" else f"max |x| {magnitude(regime['amax'])} of 65504"
        value = kept if kept in ("none", "all", "–") else f"{kept} bits"
        result.append(Figure(f"headroom in {name}", value, f"{reached} at {place}" if place else reached))
    certificate = report.get("certificate")
    if certificate and certificate["holds"]:
        note = f"of up to {certificate['max_length']:,} positions, by bounds at {len(certificate['sites'])} places"
        result.append(Figure("headroom for any input", f"{bits(certificate['headroom_bits'])} bits", note))
    elif certificate:
        over = [site["name"] for site in certificate["sites"] if not site["holds"]]
        result.append(Figure("not proven for every input", f"{len(over)} places", f"the first is {over[0]}"))
    close, weights = report.get("fidelity"), report.get("weights")
    if close:
        result.append(Figure("fp16 against bf16", *closeness(close)))
    if weights:
        note = f"of {weights['elements']:,}; {weights['flushed_to_zero']:,} became 0"
        result.append(Figure("weights carried over bit for bit", percent(weights["lossless_fraction"]), note))
    if not close and not weights and regimes:
        for key, name in (("nonfinite", "not finite"), ("saturated", "saturated")):
            worst = max(regimes, key=lambda n: regimes[n][key])
            count = regimes[worst][key]
            note = f"most in {worst}; what is so by design is not counted" if count else f"in {listed(list(regimes))}"
            result.append(Figure(f"values {name}", f"{count:,}", note))
    return result


def closeness(close: Mapping[str, Any]) -> tuple[str, str]:
    """Return how much closer fp16 is to the fp32 source than bf16 in words, and the two numbers."""
    bf16, fp16 = known(close.get("kl_bf16")), known(close.get("kl_fp16"))
    what = "KL to the fp32 source" if close["measure"] == "kl" else f"{close['measure']} to the fp32 source"
    note = f"{what}: fp16 {scientific(fp16)}" + ("" if bf16 is None else f", bf16 {scientific(bf16)}")
    if fp16 is None:
        return "broken", note
    if bf16 is None:
        return scientific(fp16), note
    if fp16 <= 0:
        return "no error", note
    ratio = bf16 / fp16
    return (f"{ratio:.3g}× closer" if ratio >= 1 else f"{fp16 / max(bf16, 1e-300):.3g}× further off"), note


def known(value: float | None) -> float | None:
    """Return a number, None for one that is missing, NaN or infinite."""
    return None if value is None or math.isnan(value) or infinite(value) else value


def site_magnitude(amax: float | None) -> str:
    """Return the largest value of an fp16 site; what is beyond fp16 has overflowed."""
    if amax is None or math.isnan(amax) or amax > FP16_MAX:
        return "overflow"
    return magnitude(amax)


# --- the picture ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A line of the picture: its name, its CSS class, and how it is drawn where colours fail."""

    name: str
    css: str
    marker: str
    placeholder: str


STREAM = Series("residual stream, at each norm", "stream", "o", "#000004")
ATTENTION = Series("attention's output (o, out_proj)", "attention", "D", "#000008")
FEED_FORWARD = Series("feed-forward's output (wo, fc2)", "added", "s", "#000005")
PRODUCT = Series("its neurons or gated product, into wo or fc2", "product", "^", "#000006")
SERIES = (STREAM, ATTENTION, FEED_FORWARD, PRODUCT)

_INK, _GRID, _LIMIT, _PAPER = "#000001", "#000002", "#000003", "#000007"
_VARIABLES = {_INK: "ink", _GRID: "grid", _LIMIT: "limit", _PAPER: "paper"} | {s.placeholder: s.css for s in SERIES}
_BLOCK = re.compile(r"(?:^|\.)(?:block|layers)\.(\d+)\.")
_STACK = re.compile(r"(?:^|\.)(encoder|decoder)\.")


@dataclass(frozen=True)
class Point:
    """One observed signal in the picture: x in blocks from the bottom of its stack, max |x| before and after."""

    series: Series
    x: float
    before: float
    after: float


@dataclass(frozen=True)
class Picture:
    """The picture of one stack: its name, the SVG, and what it shows in words."""

    stack: str
    svg: Markup
    words: str


def pictures(signals: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """Return a picture of each stack that has signals: max |x| before and after on a log2 axis against 65504."""
    stacks = {name: points(signals, name) for name in ("encoder", "decoder")}
    values = [v for ps in stacks.values() for p in ps for v in (p.before, p.after)]
    if not values:
        return []
    low = min(0, math.floor(math.log2(min(values))))
    high = max(18, math.ceil(math.log2(max(values))) + 1)
    return [Picture(name, draw(ps, name, low, high), in_words(ps, name)) for name, ps in stacks.items() if ps]


def points(signals: Sequence[Mapping[str, Any]], stack: str) -> list[Point]:
    """Return the points of one stack: norm inputs, sublayer outputs and neurons, spread evenly within their block.

    A norm begins a sublayer, the output that follows in the report's order ends it. Zeros and infinite values have no
    place on a log axis and are left out.
    """
    found = [s for s in signals if (m := _STACK.search(s["module"])) and m[1] == stack]
    place: dict[tuple[str, str], tuple[int, int]] = {}
    sublayers: Counter[int] = Counter()
    for s in found:
        block = _BLOCK.search(s["module"])
        if s["kind"] == "residual" and block is not None:
            number = int(block[1])
            sublayers[number] += s["side"] == "input"
            place[s["module"], s["side"]] = (number, max(0, sublayers[number] - 1))
    end = max(sublayers, default=-1) + 1
    result = []
    for s in found:
        written = place.get((s["module"], s["side"] if s["kind"] == "residual" else "output"))
        if s["kind"] == "residual" and s["side"] == "input":
            series, x = STREAM, float(end) if written is None else at(written, sublayers)
        elif written is not None and s["kind"] == "residual":
            series = FEED_FORWARD if s["module"].endswith((".wo", ".fc2")) else ATTENTION
            x = at(written, sublayers)
        elif written is not None and s["kind"] == "neuron" and s["side"] == "input":
            series, x = PRODUCT, at(written, sublayers)
        else:
            continue
        before, after = known(s["before"]), known(s["after"])
        if before and after:
            result.append(Point(series, x, before, after))
    return sorted(result, key=lambda p: p.x)


def at(place: tuple[int, int], sublayers: Mapping[int, int]) -> float:
    """Return the x of a sublayer: its block plus its share of it."""
    block, number = place
    return block + number / max(1, sublayers[block])


def in_words(found: Iterable[Point], stack: str) -> str:
    """Return what a picture shows in a sentence."""
    before, after = max(p.before for p in found), max(p.after for p in found)
    return f"{stack}: the largest value is {magnitude(before)} before and {magnitude(after)} after; the limit is 65504"


def draw(found: Sequence[Point], stack: str, low: int, high: int) -> Markup:
    """Return the SVG of one stack; ``low`` and ``high`` are the ends of the axis as powers of two."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": stack, "font.size": 9}):
        canvas = Canvas(figsize=(5.2, 3.5), layout="constrained")
        axes = canvas.add_subplot(facecolor="none")
        canvas.patch.set_visible(False)
        axes.axhspan(math.log2(FP16_MAX), high, color=_LIMIT, alpha=0.1, linewidth=0)
        axes.axhline(math.log2(FP16_MAX), color=_LIMIT, linewidth=1.4)
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
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(MultipleLocator(4 if high - low > 14 else 2))
        axes.yaxis.set_major_formatter(lambda value, _: "65504" if value == 16 else power(round(value)))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, min_n_ticks=1))
        axes.grid(axis="y", color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel(f"{stack} block", color=_INK)
        axes.set_ylabel("max |x|", color=_INK)
        axes.tick_params(colors=_INK, length=0)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
        target = io.StringIO()
        canvas.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return themed(target.getvalue(), in_words(found, stack))


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


def largest_signals(signals: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the signals that were largest before, with whether they were and are beyond fp16."""
    ranked = sorted(signals, key=lambda s: -(s["before"] if s["before"] is not None else math.inf))
    return [
        dict(s) | {f"{side}_over": not (s[side] is not None and s[side] <= FP16_MAX) for side in ("before", "after")}
        for s in ranked[:LARGEST]
    ]


# --- tables --------------------------------------------------------------------------------------------------------

REGIMES = {
    "stock": "as from_pretrained(dtype=torch.float16) loads it",
    "amp": "fp32 weights under torch.autocast",
    "half": "every parameter in fp16, .half()",
}


def regime_rows(regimes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each regime: counts, largest value, headroom, tightest site."""
    rows = []
    for name, regime in regimes.items():
        tightest = next((s["name"] for s in regime["sites"] if s["headroom_bits"] is not None), "–")
        rows.append(
            {
                "name": name,
                "meaning": REGIMES.get(name, ""),
                "safe": not regime["nonfinite"] and not regime["saturated"],
                "nonfinite": regime["nonfinite"],
                "saturated": regime["saturated"],
                "logits": regime.get("nonfinite_logits", 0),
                "amax": site_magnitude(regime["amax"]),
                "bits": bits(regime["headroom_bits"]),
                "tightest": first_broken(regime) or tightest,
                "sites": len(regime["sites"]),
            }
        )
    return rows


def unsafe_rows(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is unsafe and what to do: limits the plan cannot hold, broken sites, how many are not listed."""
    regimes, broken = report.get("regimes") or {}, broken_regimes(report)
    clean = [name for name in regimes if name not in broken]
    where: dict[str, dict[str, Any]] = {}
    for name in broken:
        for site in broken_sites(regimes[name]):
            row = where.setdefault(site["name"], {"name": site["name"], "regimes": [], "nonfinite": 0, "saturated": 0})
            row["regimes"].append(name)
            for key in ("nonfinite", "saturated"):
                row[key] = max(row[key], site[key])
    return {
        "limits": [dict(v) for v in report.get("unsafe") or ()],
        "sites": list(where.values())[:MOST_UNSAFE],
        "more": max(0, len(where) - MOST_UNSAFE),
        "remedy": remedy(report, clean) if broken else "",
    }


def remedy(report: Mapping[str, Any], clean: Sequence[str]) -> str:
    """Return what to do with a checkpoint that broke: convert it, or what is left where it is converted already."""
    if report.get("plan") is None:
        return "Convert the checkpoint (bf16-to-fp16 convert SOURCE OUT): rescaling is exact and lowers most of these."
    if clean:
        return f"Rescaling was not enough here. Nothing broke in {listed(clean)}: use it that way, or stay with bf16."
    return "Rescaling was not enough here, and no fp16 regime is clean: stay with bf16 or fp32."


def is_exact(plan: Mapping[str, Any]) -> bool:
    """Return whether a plan is powers of two and nothing else, so that fp32 outputs keep every bit."""
    return not (plan["gain_correction"] or plan["untied_head"] or plan.get("drift"))


def plan_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the plan does besides channels, as pairs of what and how."""
    plan = report["plan"]
    r = plan["residual_exponent"]
    rows = [("residual stream", f"times {power(r)}" if r else "not moved")]
    edits = (report.get("source") or {}).get("config_changes") or {}
    for key, sides in edits.items():
        rows.append((f"config.json: {key}", f"{sides.get('before', 'absent')} → {sides.get('after', 'absent')}"))
    if plan["eps"] is None and r:
        rows.append(("norm eps", "fixed in stock code, so it drifts (below)"))
    if plan["untied_head"]:
        rows.append(("head", "separated from the embedding, whose limit stood in the way"))
    if plan["gain_correction"]:
        n = len(plan["gain_correction"])
        rows.append(("gain correction", f"{n} norm weights, against the mean of the eps drift"))
    if (drift := plan.get("drift")) is not None:
        rows.append(("eps drift, relative change of norm outputs", scientific(drift["relative_error"])))
        for key, what in (("kl", "KL"), ("max_logit_error", "largest logit error")):
            predicted, measured = drift.get(f"predicted_{key}"), drift.get(f"measured_{key}")
            parts = [
                f"{w} {scientific(v)}" for w, v in (("predicted", predicted), ("measured", measured)) if v is not None
            ]
            if parts:
                rows.append((f"eps drift, {what}", ", ".join(parts)))
    if plan.get("margin_bits") is not None:
        rows.append(("margin kept to every limit", f"{plan['margin_bits']:g} bits"))
    return rows + [("note", str(note)) for note in plan.get("notes") or ()]


@dataclass(frozen=True)
class Bar:
    """One exponent of a histogram: how many channels have it, and the bar's length in percent of the longest."""

    exponent: str
    count: int
    percent: float


@dataclass(frozen=True)
class Histogram:
    """The channel exponents of one kind of signal: channels, bars for those moved, signals moved as a whole."""

    kind: str
    channels: int
    moved: int
    bars: tuple[Bar, ...]
    whole: str


def histograms(exponents: Mapping[str, int | Sequence[int]]) -> list[Histogram]:
    """Return a histogram for each kind of signal that a plan moves."""
    kinds: dict[str, list[int | Sequence[int]]] = {}
    for name, exponent in exponents.items():
        kinds.setdefault(_KINDS.get(name.rsplit(".", 1)[-1], "norm outputs"), []).append(exponent)
    result = []
    for kind, entries in sorted(kinds.items()):
        counts = Counter(e for entry in entries if not isinstance(entry, int) for e in entry)
        whole = Counter(entry for entry in entries if isinstance(entry, int))
        moved = {e: n for e, n in sorted(counts.items()) if e}
        longest = max(moved.values(), default=1)
        bars = tuple(Bar(signed(e), n, 100 * n / longest) for e, n in moved.items())
        said = ", ".join(f"{n} by {power(e)}" for e, n in sorted(whole.items()))
        result.append(Histogram(kind, counts.total(), sum(moved.values()), bars, said))
    return result


def fidelity_rows(close: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the fidelity table: a row per measure source in bf16 and output in fp16; null was infinite."""
    if not close:
        return None
    kl = close["measure"] == "kl"
    measures = (
        ("KL(fp32 ‖ x), nats per token" if kl else f"{close['measure']} of the last states", "kl"),
        ("largest logit error" if kl else "largest error of a state", "max_logit_error"),
    )
    table = [
        (what, scientific(close.get(f"{key}_bf16")), scientific(close.get(f"{key}_fp16"))) for what, key in measures
    ]
    if close.get("kl_bf16") is None and close.get("max_logit_error_bf16") is None:
        table = [(what, "–", fp16) for what, _, fp16 in table]
    if close.get("top1_fp16") is not None:
        bf16 = close.get("top1_bf16")
        table.append(("same best token", "–" if bf16 is None else percent(bf16), percent(close["top1_fp16"])))
    return {"rows": table, "positions": close.get("positions"), "reference": close.get("reference", "fp32 source")}


def weight_rows(weights: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return how the weights came through, as pairs of what and how much."""
    if not weights:
        return []
    return [
        ("weights of the source", f"{weights['elements']:,}"),
        ("carried over bit for bit", percent(weights["lossless_fraction"])),
        ("normal in fp16 (of those not 0)", percent(weights["normal_fraction"])),
        ("became 0", f"{weights['flushed_to_zero']:,}"),
        ("not finite", f"{weights['nonfinite']:,}"),
        ("largest |w|", f"{magnitude(weights['amax'])} of 65504"),
    ]


def site_rows(regimes: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the tightest sites of the regime shown first, as the script would show them."""
    if not regimes:
        return []
    name = "half" if "half" in regimes else next(iter(regimes))
    return [
        dict(site) | {"regime": name, "max": site_magnitude(site["amax"]) if site["limit"] else magnitude(site["amax"])}
        for site in regimes[name]["sites"][:count]
    ]


def site_data(regimes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sites for the script: all, or the tightest of each regime as far as there is room."""
    most = max((len(r["sites"]) for r in regimes.values()), default=0)
    while len(json.dumps(data := compact(regimes, most))) > MOST_SITE_BYTES:
        most = most * 3 // 4
    return data


def compact(regimes: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return up to ``most`` sites of each regime in compact form: strings once, rows of numbers that point at them.

    A row: name, regime, max |x|, headroom, non-finite, saturated, limit, dtype, reason why benign. Infinite numbers
    become ±1e308, NaN null, since JSON has neither.
    """
    strings: dict[str, int] = {}

    def pointer(text: str | None) -> int | None:
        return None if text is None else strings.setdefault(str(text), len(strings))

    rows = [
        [
            pointer(site["name"]),
            pointer(name),
            number(site["amax"]),
            number(site["headroom_bits"]),
            site["nonfinite"],
            site["saturated"],
            number(site["limit"]),
            pointer(site.get("dtype")),
            pointer(site["benign"] or None),
        ]
        for name, regime in regimes.items()
        for site in regime["sites"][:most]
    ]
    shown = "half" if "half" in regimes else next(iter(regimes), "")
    return {"strings": list(strings), "rows": rows, "regimes": list(regimes), "shown": shown}


def number(value: float | None) -> float | None:
    """Return a number in five digits that JSON can hold."""
    if value is None or math.isnan(value):
        return None
    return math.copysign(1e308, value) if infinite(value) else float(f"{value:.5g}")


def hash_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (whose, file, SHA-256) of every weight file that the report knows."""
    source = (report.get("source") or {}).get("sha256") or {}
    output = (report.get("output") or {}).get("files") or ()
    rows = [("source", name, digest) for name, digest in source.items()]
    return rows + [("output", file["name"], file.get("sha256") or "not computed") for file in output]
