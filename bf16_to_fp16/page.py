"""The report as a page: one HTML file that carries everything it shows and loads nothing.

It is made from the report's dict alone, so it cannot say anything else than ``fp16_report.json``. The order is that of
a reader: the verdict in a sentence, three figures, the pictures (what rescaling did, the certificate's bracket of every
layer, the curves of a finetune), then the tables. Names come from other people's files, so all text goes through
Jinja2's autoescape. The site table may have thousands of rows: it travels as JSON and is drawn by a small script, with
the tightest rows in the HTML for readers without scripts. A content policy in the page forbids every request. How
numbers are rounded is in ``display``, how pictures are drawn in ``pictures``.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from .display import (
    bound_magnitude,
    counted,
    excess,
    headroom,
    headroom_in_words,
    headroom_left,
    infinite,
    known,
    listed,
    magnitude,
    percent,
    power,
    rounded_down,
    rounded_up,
    scientific,
    shown_bound,
    signed,
    significant_bits,
    times,
)
from .numerics import FP16_MAX
from .pictures import BRACKETS, SERIES, bracket_pictures, curve_pictures, pictures
from .proof import (
    BF16_BITS,
    MOST_UNCERTIFIED,
    UNCERTIFIED_SHOWN,
    attack_breaks,
    bound_rows,
    bounds_by_name,
    coverage,
    found_by,
    is_proven,
    least_precise,
    precision_tables,
    sunk_rows,
    uncertified_rows,
)

MOST_SITE_BYTES = 1_500_000
"""Of the site table's JSON; beyond it the sites with most headroom are left out, so that the page stays under 2 MB."""

ROWS_WITHOUT_SCRIPT = 60
"""Rows of the site table that stand in the HTML itself."""

MOST_UNSAFE = 12
"""Broken sites listed with their remedy; most others only pass on what broke before, and are in the site table."""

MAIN_FIGURES = 3
"""Figures of the headline: headroom, what is certified, fp16's error against bf16's; others where one is missing."""

MOST_FIGURES = 4
"""Figures of the headline of an audit, so that they stand in one row."""

MOST_EXPONENTS = 300
"""Signals of the plan that are listed with their exponents."""

LARGEST = 6
"""Signals named below the picture."""

_KINDS = {"value": "values", "neuron": "neurons", "query_key": "queries and keys"}
"""Ends of signal names, and what to call them; every other signal that a plan moves is the output of a norm."""


def write_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report of a conversion or an audit to ``path`` as one self-contained HTML file, UTF-8, under 2 MB."""
    path.write_text(render(report), encoding="utf-8")


def render(report: Mapping[str, Any]) -> str:
    """Return the page; parts that the report lacks (an audit has no plan, a replayed plan no signals) are left out."""
    plan, regimes, certificate = report.get("plan"), report.get("regimes") or {}, report.get("certificate")
    run = report.get("finetune")
    data = site_data(report)
    unproven = uncertified_rows(report)
    covers, leaves = coverage(report)
    template = environment().get_template("report.html.jinja")
    return template.render(
        report=report,
        title=source_name(report),
        safe=report.get("verdict") == "safe",
        proven=is_proven(report),
        sentence=verdict_sentence(report),
        figures=figures(report),
        pictures=pictures(report.get("signals") or ()),
        series=SERIES,
        largest=largest_signals(report.get("signals") or ()),
        certificate=certificate,
        brackets=bracket_pictures(certificate) if certificate else (),
        bracket_series=BRACKETS,
        bounds=bound_rows(certificate) if certificate else (),
        found_by=found_by(report),
        overflowed=any(is_overflow(site["observed"]) for site in certificate["sites"]) if certificate else False,
        covers=covers,
        leaves=leaves,
        unproven=unproven[:UNCERTIFIED_SHOWN],
        more_unproven=unproven[UNCERTIFIED_SHOWN:MOST_UNCERTIFIED],
        one_reason=len({(site["reason"], site["remedy"]) for site in unproven}) == 1,
        hidden_unproven=max(0, len(unproven) - MOST_UNCERTIFIED),
        precision=precision_tables(report),
        least_precise=least_precise(report),
        bf16_bits=BF16_BITS,
        sunk=sunk_rows(regimes),
        regimes=regime_rows(regimes),
        unsafe=unsafe_rows(report),
        plan=plan,
        moves=plan_rows(report) if plan else (),
        exact=is_exact(plan) if plan else False,
        histograms=histograms(plan.get("exponents") or {}) if plan else (),
        exponents=exponent_rows(plan.get("exponents") or {})[:MOST_EXPONENTS] if plan else (),
        hidden_exponents=max(0, len(plan.get("exponents") or {}) - MOST_EXPONENTS) if plan else 0,
        run=run,
        curves=curve_pictures(run) if run else (),
        run_rows=run_rows(run) if run else (),
        evaluations=evaluation_table(run.get("evaluations") or ()) if run else None,
        kept=fidelity_rows(run.get("fidelity")) if run else None,
        fidelity=fidelity_rows(report.get("fidelity"), "finetuned model in fp32" if run else None),
        weights=weight_rows(report.get("weights"), "finetuned" if run else "source"),
        sites=site_rows(report, ROWS_WITHOUT_SCRIPT),
        columns=[(i, *COLUMNS[i]) for i in data["columns"]],
        site_data=data,
        hidden_sites=all_sites(report) - len(data["rows"]),
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
    made.filters |= {
        "magnitude": magnitude,
        "bound": bound_magnitude,
        "bits": headroom,
        "significant": significant_bits,
        "times": times,
        "found": found_magnitude,
        "over": excess,
        "over2": partial(excess, decimals=2),
        "breakable": breakable,
    }
    return made


def breakable(name: object) -> Markup:
    """Return text, escaped, whose dotted names may wrap behind their dots, but not numbers."""
    return Markup(re.sub(r"(?<!\d)\.|\.(?!\d)", ".<wbr>", str(escape(str(name)))))


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
        if is_proven(report):
            beginning += " for every input, by bounds from the weights"
        if not regimes:
            return f"{beginning}; nothing was run."
        kept = min(r["headroom_bits"] for r in regimes.values())
        return (
            f"{beginning}: nothing overflowed or saturated in {listed(list(regimes))},"
            f" and the tightest place keeps {headroom_left(kept)}."
        )
    if not broken:
        if (site := attack_breaks(report)) is not None:
            steps = counted(report["attack"]["steps"], "gradient step")
            return f"Unsafe in fp16: {steps} found an input that overflows {site['name']}."
        ran = "nothing overflowed in what was run" if regimes else "nothing was run"
        over = len(uncertified_rows(report))
        why = f"bounds pass the limit at {counted(over, 'place')}" if over and not regimes else ""
        return f"Unsafe in fp16: {ran}, but {why or 'see below what passes its limit'}."
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
    """Return the figures of the headline, up to four, fewer where the report lacks them."""
    regimes, result = report.get("regimes") or {}, []
    if regimes:
        name = "half" if "half" in regimes else min(regimes, key=lambda n: regimes[n]["headroom_bits"])
        regime = regimes[name]
        kept = headroom(regime["headroom_bits"])
        place = first_broken(regime) or next((s["name"] for s in regime["sites"] if s["headroom_bits"] is not None), "")
        reached = "overflow" if kept == "none" else f"max |x| {magnitude(regime['amax'])} of 65504"
        value = headroom_in_words(regime["headroom_bits"])
        result.append(Figure(f"headroom in {name}", value, f"{reached} at {place}" if place else reached))
    attack, certificate = report.get("attack"), report.get("certificate")
    if attack and attack["sites"]:
        worst = min(attack["sites"], key=lambda site: site["headroom_bits"])
        reached = f"max |x| {site_magnitude(worst['worst'])} at {worst['name']}"
        note = f"{reached}, the worst of {counted(attack['steps'], 'gradient step')}"
        result.append(Figure("headroom under attack", headroom_in_words(attack["worst_headroom_bits"]), note))
    if certificate and certificate["holds"]:
        places = counted(len(certificate["sites"]), "place")
        note = f"of up to {counted(certificate['max_length'], 'position')}, by bounds at {places}"
        result.append(Figure("headroom for any input", headroom_in_words(certificate["headroom_bits"]), note))
    elif certificate:
        unproven = uncertified_rows(report)
        note = (
            f"of {len(certificate['sites']):,}, the furthest over its limit: {unproven[0]['name']}" if unproven else ""
        )
        result.append(Figure("not proven for every input", counted(len(unproven), "place"), note))
    close, weights = report.get("fidelity"), report.get("weights")
    if close:
        result.append(Figure("fp16 against bf16", *closeness(close, finetuned="finetune" in report)))
    if weights and len(result) < MAIN_FIGURES:
        note = f"of {weights['elements']:,}; {weights['flushed_to_zero']:,} became 0"
        result.append(Figure("weights carried over bit for bit", percent(weights["lossless_fraction"]), note))
    if not close and not weights and regimes:
        # Beside an attack's figures there is room for one of these.
        kinds = (("nonfinite", "not finite"), ("saturated", "saturated"))
        for key, name in kinds[: max(1, MOST_FIGURES - len(result))]:
            worst = max(regimes, key=lambda n: regimes[n][key])
            count = regimes[worst][key]
            note = f"most in {worst}; what is so by design is not counted" if count else f"in {listed(list(regimes))}"
            result.append(Figure(f"values {name}", f"{count:,}", note))
    return result


def closeness(close: Mapping[str, Any], *, finetuned: bool = False) -> tuple[str, str]:
    """Return how much closer fp16 is to the fp32 source than bf16 in words, and the two numbers."""
    bf16, fp16 = known(close.get("kl_bf16")), known(close.get("kl_fp16"))
    reference = "the same weights in fp32" if finetuned else "the fp32 source"
    what = f"{'KL' if close['measure'] == 'kl' else close['measure']} to {reference}"
    note = f"{what}: fp16 {scientific(fp16)}" + ("" if bf16 is None else f", bf16 {scientific(bf16)}")
    if fp16 is None:
        return "broken", note
    if bf16 is None:
        return scientific(fp16), note
    if fp16 <= 0:
        return "no error", note
    ratio = bf16 / fp16
    return (f"{ratio:.3g}× closer" if ratio >= 1 else f"{fp16 / max(bf16, 1e-300):.3g}× further off"), note


def site_magnitude(amax: float | None) -> str:
    """Return the largest value of an fp16 site; what is beyond fp16 has overflowed."""
    return "overflow" if amax is None or is_overflow(amax) else magnitude(amax)


def found_magnitude(found: float | None) -> str:
    """Return the worst value found at a site of the certificate, "–" where none was looked for."""
    return "–" if found is None else site_magnitude(found)


def is_overflow(found: float | None) -> bool:
    """Return whether a value is beyond fp16, NaN included."""
    return found is not None and not found <= FP16_MAX


# --- tables ----------------------------------------------------------------------------------------------------------


def largest_signals(signals: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the signals that were largest before, with whether they were and are beyond fp16."""
    ranked = sorted(signals, key=lambda s: -(s["before"] if s["before"] is not None else math.inf))
    return [
        dict(s) | {f"{side}_over": not (s[side] is not None and s[side] <= FP16_MAX) for side in ("before", "after")}
        for s in ranked[:LARGEST]
    ]


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
                "bits": headroom(regime["headroom_bits"]),
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
        # The others are the sites below, which broke in a regime.
        "limits": [dict(v) for v in report.get("unsafe") or () if "regimes" not in v],
        "sites": list(where.values())[:MOST_UNSAFE],
        "more": max(0, len(where) - MOST_UNSAFE),
        "remedy": remedy(report, clean) if broken else "",
    }


def remedy(report: Mapping[str, Any], clean: Sequence[str]) -> str:
    """Return what to do with a checkpoint that broke: convert it, or what is left where it is converted already."""
    if report.get("plan") is None:
        return "Convert the checkpoint (bf16-to-fp16 convert SOURCE OUT): rescaling is exact and lowers most of these."
    if "finetune" in report:
        further = "Finetune it further (more steps, or a larger penalty.headroom_bits)"
    else:
        further = "Finetune it with the activation-magnitude penalty (bf16-to-fp16 finetune RECIPE)"
    if clean:
        return (
            f"Rescaling was not enough here. Nothing broke in {listed(clean)}: use it that way. {further},"
            " or stay with bf16."
        )
    return f"Rescaling was not enough here, and no fp16 regime is clean. {further}, or stay with bf16 or fp32."


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


def exponent_rows(exponents: Mapping[str, int | Sequence[int]]) -> list[tuple[str, str, str]]:
    """Return (signal, exponents, channels moved) of every signal that a plan moves."""
    rows = []
    for name, exponent in exponents.items():
        if isinstance(exponent, int):
            rows.append((name, signed(exponent), "all"))
        else:
            ends = sorted({min(exponent), max(exponent)})
            moved = sum(e != 0 for e in exponent)
            rows.append((name, " to ".join(map(signed, ends)), f"{moved:,} of {len(exponent):,}"))
    return rows


def run_rows(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a finetune did, as pairs of what and how much."""
    recipe, data = run.get("recipe") or {}, run.get("data") or {}
    schedule, penalty = recipe.get("schedule") or {}, recipe.get("penalty") or {}
    skipped, rewinds = run.get("skipped") or (), run.get("rewinds") or ()
    rows = [("optimizer steps", f"{run['steps']:,}")]
    if run.get("tokens"):
        rows.append(("tokens read", f"{run['tokens']:,}"))
    if run.get("processes", 1) > 1:
        rows.append(("processes", f"{run['processes']:,}"))
    if data.get("path"):
        rows.append(("data", ", ".join(str(data[key]) for key in ("path", "objective") if data.get(key))))
    if schedule.get("learning_rate") is not None:
        rows.append(("learning rate", f"{schedule['learning_rate']:g}, {schedule.get('decay', '')}".rstrip(", ")))
    precision = recipe.get("precision")
    if precision:
        rows.append(("precision", precision if isinstance(precision, str) else ", then ".join(map(str, precision))))
    if penalty.get("headroom_bits") is not None:
        rows.append(("penalty", f"{penalty['form']}, for {penalty['headroom_bits']:g} bits of headroom"))
    rows.append(("steps skipped, gradient not finite", f"{len(skipped):,}"))
    rows.append(("rewinds after a spike of the loss", f"{len(rewinds):,}"))
    return rows


_EVALUATED = {
    "step": "step",
    "held_out_loss": "held-out loss",
    "held_out_divergence": "divergence from the original",
    "worst_headroom_bits": "headroom, bits",
    "worst_site": "tightest",
}
MOST_EVALUATIONS = 12
"""Rows of the table of evaluations; of more the last, and others spread evenly."""


def evaluation_table(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the evaluations of a finetune: headings with their classes, rows of text; None where there are none."""
    if not evaluations:
        return None
    names = [name for name in _EVALUATED if any(e.get(name) is not None for e in evaluations)]
    extra = sorted({k for e in evaluations for k, v in e.items() if isinstance(v, (int, float))} - set(_EVALUATED))
    names[-1:-1] = extra if names[-1] == "worst_site" else []
    if names[-1] != "worst_site":
        names += extra
    stride = -(-len(evaluations) // MOST_EVALUATIONS)
    columns = [(_EVALUATED.get(n, n.replace("_", " ")), "site" if n == "worst_site" else "n") for n in names]
    shown = evaluations[::-1][::stride][::-1]
    return {"columns": columns, "rows": [[evaluated_cell(e.get(n), n) for n in names] for e in shown]}


def evaluated_cell(value: Any, name: str) -> str:
    """Return one figure of an evaluation as text."""
    if value is None or isinstance(value, str):
        return value or "–"
    if name == "step":
        return f"{value:,}"
    if name == "worst_headroom_bits":
        return headroom(value)
    return scientific(value) if name == "held_out_divergence" else f"{value:.4g}"


def fidelity_rows(close: Mapping[str, Any] | None, reference: str | None = None) -> dict[str, Any] | None:
    """Return the fidelity table: a row per measure source in bf16 and output in fp16; null was infinite.

    reference: what it was measured against, where that is not what the report says.
    """
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
    against = reference or close.get("reference", "fp32 source")
    return {"rows": table, "positions": close.get("positions"), "reference": against}


def weight_rows(weights: Mapping[str, Any] | None, whose: str = "source") -> list[tuple[str, str]]:
    """Return how the weights came through, as pairs of what and how much."""
    if not weights:
        return []
    return [
        ("finetuned fp32 weights" if whose == "finetuned" else f"weights of the {whose}", f"{weights['elements']:,}"),
        ("carried over bit for bit", percent(weights["lossless_fraction"])),
        ("normal in fp16 (of those not 0)", percent(weights["normal_fraction"])),
        ("became 0", f"{weights['flushed_to_zero']:,}"),
        ("not finite", f"{weights['nonfinite']:,}"),
        ("largest |w|", f"{magnitude(weights['amax'])} of 65504"),
    ]


COLUMNS = (
    ("operation", ""),
    ("regime", ""),
    ("max |x|", "n"),
    ("headroom, bits", "n"),
    ("non-finite", "n"),
    ("saturated", "n"),
    ("limit", "n"),
    ("dtype", ""),
    ("by design", ""),
    ("bound", "n"),
    ("bound / worst found", "n"),
)
"""Heading and class of what a row of the site table holds, in the order of ``compact``."""

_MEASURED = (0, 1, 2, 3, 4, 5, 7)
_PROVEN = (0, 1, 2, 3, 9, 10, 4, 5, 7)
_ONLY_PROVEN = (0, 3, 9, 6)


def all_sites(report: Mapping[str, Any]) -> int:
    """Return how many rows the site table would have without a limit to its size."""
    return sum(len(entry["sites"]) for entry in tables(report).values())


def tables(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the regimes with their sites; where nothing was run, the certificate's sites under the name ""."""
    regimes = report.get("regimes") or {}
    if regimes or not report.get("certificate"):
        return regimes
    empty = {"amax": None, "nonfinite": 0, "saturated": 0, "benign": None}
    return {"": {"sites": [row | empty for row in bound_rows(report["certificate"], None)]}}


def site_rows(report: Mapping[str, Any], count: int) -> list[list[dict[str, str]]]:
    """Return the tightest sites of the regime shown first, cell by cell, as the script would draw them."""
    data = site_data(report)
    strings = data["strings"]
    shown = [row for row in data["rows"] if row[1] is None or strings[row[1]] == data["shown"]]
    return [[cell(row, i, strings) for i in data["columns"]] for row in shown[:count]]


def cell(row: Sequence[Any], column: int, strings: Sequence[str]) -> dict[str, str]:
    """Return one cell of the site table: its text, label and class; the first has the reason why it is benign too."""
    value = row[column]
    if column in (0, 1, 7, 8):
        text = "" if value is None else strings[value]
    elif column == 2:
        text = site_magnitude(value) if row[6] is not None else magnitude(value)
    elif column in (4, 5):
        text = f"{value:,}"
    else:
        text = headroom(value) if column == 3 else "–" if value is None else magnitude(value)
    label, kind = COLUMNS[column]
    reason = "" if column or row[8] is None else strings[row[8]]
    broken = "broken" if row[4] or row[5] else ""
    return {"text": text, "label": label, "class": kind, "benign": reason, "broken": broken}


def site_data(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sites for the script: all, or the tightest of each regime as far as there is room."""
    most = max((len(r["sites"]) for r in tables(report).values()), default=0)
    while len(json.dumps(data := compact(report, most))) > MOST_SITE_BYTES:
        most = most * 3 // 4
    return data


def compact(report: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return up to ``most`` sites of each regime in compact form: strings once, rows of numbers that point at them.

    A row: name, regime, max |x|, headroom, non-finite, saturated, limit, dtype, reason why benign, bound, bound over
    the worst found. Infinite numbers become ±1e308, NaN null, since JSON has neither. ``columns``: those to show.
    """
    strings: dict[str, int] = {}
    found, bounds = tables(report), bounds_by_name(report)

    def pointer(text: str | None) -> int | None:
        return None if not text else strings.setdefault(str(text), len(strings))

    rows = []
    for name, regime in found.items():
        for site in regime["sites"][:most]:
            # What a regime computes in fp32 has no limit of fp16, and no bound is needed there.
            bound, ratio = bounds.get(site["name"], (None, None)) if site["limit"] is not None else (None, None)
            rows.append(
                [
                    pointer(site["name"]),
                    pointer(name),
                    number(site["amax"]),
                    lower(site["headroom_bits"]),
                    site["nonfinite"],
                    site["saturated"],
                    number(site["limit"]),
                    pointer(site.get("dtype")),
                    pointer(site["benign"]),
                    number(bound) if bound is None or infinite(bound) else shown_bound(bound),
                    None if ratio is None else rounded_up(ratio, 3),
                ]
            )
    measured = [name for name in found if name]
    columns = _ONLY_PROVEN if found and not measured else _PROVEN if bounds else _MEASURED
    shown = "half" if "half" in measured else next(iter(measured), "")
    return {"strings": list(strings), "rows": rows, "regimes": measured, "shown": shown, "columns": columns}


def number(value: float | None) -> float | None:
    """Return a number that JSON can hold with the digits that ``magnitude`` shows, which scripts round otherwise."""
    if value is None or math.isnan(value):
        return None
    if infinite(value):
        return math.copysign(1e308, value)
    if 1000 <= abs(value) < 1e7:
        return float(round(value))
    return float(f"{value:.4g}" if 0.01 <= abs(value) < 1000 else f"{value:.2e}")


def lower(value: float | None) -> float | None:
    """Return headroom in four decimals, rounded down, that JSON can hold."""
    return number(value) if value is None or math.isnan(value) or infinite(value) else rounded_down(value, 4)


def hash_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (whose, file, SHA-256) of every weight file that the report knows."""
    source = (report.get("source") or {}).get("sha256") or {}
    output = (report.get("output") or {}).get("files") or ()
    rows = [("source", name, digest) for name, digest in source.items()]
    return rows + [("output", file["name"], file.get("sha256") or "not computed") for file in output]
