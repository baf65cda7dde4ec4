"""The report as a page: one HTML file that carries everything it shows and loads nothing.

It is made from the report alone, so it cannot say anything else than ``fp16_report.json``. The order is that of
a reader: the verdict in a sentence, three figures, the pictures (what rescaling did, the certificate's bracket of every
layer, the curves of a finetune), then the tables. Names come from other people's files, so all text goes through
Jinja2's autoescape. The site table may have thousands of rows: it travels as JSON and is drawn by a small script, with
the tightest rows in the HTML for readers without scripts. A content policy in the page forbids every request. How
numbers are rounded is in ``wording``, how pictures are drawn in ``figures``.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..numerics import FP16_MAX
from ..rescaling.plan import Plan
from ..wording import (
    about,
    bound_magnitude,
    counted,
    excess,
    headroom,
    headroom_by_bound,
    headroom_or_excess,
    in_bits,
    infinite,
    known,
    listed,
    magnitude,
    percent,
    power,
    reached,
    rounded_down,
    rounded_up,
    scientific,
    shown_bound,
    signed,
    significant_bits,
    tightness,
    times,
)
from .figures import BLOCKS, BRACKETS, SERIES, audit_pictures, bracket_pictures, curve_pictures, pictures
from .remedies import unsafe_sites
from .rows import (
    BF16_BITS,
    MOST_UNCERTIFIED,
    STANDINGS,
    UNCERTIFIED_SHOWN,
    bound_rows,
    bounds_by_name,
    by_design,
    carried_over,
    coverage,
    distances,
    distinct,
    first_broken,
    for_target,
    found_by,
    kept_bits_tables,
    least_precise,
    moved_by,
    standing,
    tier_rows,
    uncertified_rows,
    underflow_rows,
    verdict_sentence,
)
from .schema import (
    FidelityEntry,
    FinetuneEntry,
    RegimeEntry,
    Report,
    SignalEntry,
    SiteEntry,
    UnprovenEntry,
    UnsafeEntry,
    WeightsEntry,
    dump,
)

MOST_SITE_BYTES = 1_500_000
"""Bytes of the site table's JSON; past it sites with most headroom are left out, so that the page stays under 2 MB."""


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


def write_page(path: Path, report: Report) -> None:
    """Write the report of a conversion or an audit to ``path`` as one self-contained HTML file, UTF-8, under 2 MB."""
    path.write_text(render(report), encoding="utf-8", errors="backslashreplace", newline="\n")


def render(report: Report) -> str:
    """Return the page; parts that the report lacks (an audit has no plan, a replayed plan no signals) are left out."""
    plan, regimes, certificate, run = report.plan, report.regimes, report.certificate, report.finetune
    data = site_data(report)
    unproven = uncertified_rows(report)
    covers, leaves = coverage(report)
    # Where the most is fp16.
    widest = "half" if "half" in regimes else next(iter(regimes), "")
    template = jinja_environment().get_template("report.html.jinja")
    return template.render(
        report=report,
        title=source_name(report),
        safe=report.safe,
        standing=STANDINGS[standing(report)],
        proven=report.proven,
        sentence=verdict_sentence(report),
        figures=figures(report),
        pictures=pictures(report.signals),
        series=SERIES,
        largest=largest_signals(report.signals),
        audited=audit_pictures(regimes[widest].sites) if widest and not report.signals and not certificate else (),
        audited_regime=widest,
        audit_series=BLOCKS.values(),
        attentions=attentions_run(report.attention or seen_with(report)),
        certificate=certificate,
        brackets=bracket_pictures(certificate) if certificate else (),
        bracket_series=BRACKETS,
        partial_sums=certificate is not None and any(site.partial > 1.1 * site.bound for site in certificate.sites),
        bounds=bound_rows(certificate) if certificate else (),
        found_by=found_by(report),
        overflowed=any(is_overflow(site.observed) for site in certificate.sites) if certificate else False,
        covers=covers,
        leaves=leaves,
        tiers=tier_rows(report),
        unproven=unproven[:UNCERTIFIED_SHOWN],
        more_unproven=unproven[UNCERTIFIED_SHOWN:MOST_UNCERTIFIED],
        one_reason=len({site.reason for site in unproven}) == 1,
        remedies=remedies_of(report, unproven),
        hidden_unproven=max(0, len(unproven) - MOST_UNCERTIFIED),
        precision=kept_bits_tables(report),
        least_precise=least_precise(report),
        bf16_bits=BF16_BITS,
        sunk=underflow_rows(regimes),
        regimes=regime_rows(regimes),
        unsafe=unsafe_rows(report),
        plan=plan,
        moves=plan_rows(report) if plan else (),
        exact=is_exact(plan) if plan else False,
        histograms=histograms(plan.exponents) if plan else (),
        exponents=exponent_rows(plan.exponents)[:MOST_EXPONENTS] if plan else (),
        hidden_exponents=max(0, len(plan.exponents) - MOST_EXPONENTS) if plan else 0,
        run=run,
        moved=moved_by(run) if run else "",
        target=for_target(report),
        curves=curve_pictures(run) if run else (),
        run_rows=run_rows(run) if run else (),
        evaluations=evaluation_table(run.evaluations) if run else None,
        kept=fidelity_rows(run.fidelity) if run else None,
        fidelity=fidelity_rows(report.fidelity, "finetuned model in fp32" if run else None),
        weights=weight_rows(report.weights, "finetuned" if run else "source", report.source.dtype),
        sites=site_rows(report, ROWS_WITHOUT_SCRIPT),
        columns=[(i, *COLUMNS[i]) for i in data["columns"]],
        site_data=data,
        hidden_sites=all_sites(report) - len(data["rows"]),
        machine=machine_rows(report),
        replaced=[name for name in report.source.left_out if not name.endswith("/")],
        folders=[name for name in report.source.left_out if name.endswith("/")],
        hashes=hash_rows(report),
    )


def seen_with(report: Report) -> list[str]:
    """Return the attentions under which the regimes of a report ran."""
    return list(dict.fromkeys(run.attention for regime in report.regimes.values() for run in regime.runs))


def attentions_run(names: Sequence[str]) -> str:
    """Return with which attentions a report's regimes ran, in words."""
    shown = [{"sdpa": "SDPA"}.get(name, name) for name in names] or ["eager", "SDPA"]
    return f"{'Each with' if len(shown) > 1 else 'With'} {listed(shown)} attention."


def machine_rows(report: Report) -> list[tuple[str, object]]:
    """Return what is known of the machine but for versions, with the devices of each part of the work in words."""
    given = dump(report.environment)
    devices = given.pop("devices", {})
    rows = [(key, value) for key, value in given.items() if key != "versions"]
    return rows + [(f"device of the {part}", ", then ".join(names)) for part, names in devices.items()]


@cache
def jinja_environment() -> Environment:
    """Return the Jinja2 environment of the HTML templates: everything escaped, an unknown name is an error.

    There is one in a process, which compiles each template once.
    """
    made = Environment(
        loader=PackageLoader("bf16_to_fp16.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "magnitude": magnitude,
        "bound": bound_magnitude,
        "by_bound": headroom_by_bound,
        "significant": significant_bits,
        "times": times,
        "found": found_magnitude,
        "over": excess,
        "over2": partial(excess, decimals=2),
        "breakable": breakable,
        "with_command": with_command,
        "tightness": lambda site: tightness(site.bound, site.observed),
    }
    return made


def breakable(name: object) -> Markup:
    """Return text, escaped, whose dotted names may wrap behind their dots, but not numbers."""
    return Markup(re.sub(r"(?<!\d)\.|\.(?!\d)", ".<wbr>", str(escape(str(name)))))


def with_command(said: str) -> Markup:
    """Return a sentence, escaped, in which a command behind its last words, "…: ", stands as code."""
    words, colon, command = said.partition(": ")
    return Markup("{}: <code>{}</code>").format(words, command) if colon else escape(said)


# --- verdict and figures -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One figure of the headline: what it is, its value, and what it was measured on."""

    name: str
    value: str
    note: str


def source_name(report: Report) -> str:
    """Return the last part of the source's path or Hub id, without the revision, and the sub-folder if there is one."""
    path, inside = report.source.path or report.family or "checkpoint", report.source.subfolder
    whole = path.removesuffix(f"/{inside}") if inside else path
    name = whole.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1].partition("@")[0] or path
    return f"{name}/{inside}" if inside else name


def figures(report: Report) -> list[Figure]:
    """Return the figures of the headline, up to four, fewer where the report lacks them."""
    regimes: Mapping[str, RegimeEntry] = report.regimes
    result: list[Figure] = []
    if regimes:
        name = "half" if "half" in regimes else min(regimes, key=lambda n: regimes[n].headroom_bits)
        regime = regimes[name]
        value = headroom_or_excess(regime.headroom_bits, regime.reached)
        site = first_broken(regime) or regime.tightest
        said = reached(regime.reached)
        said = said if said == "overflow" else f"max |x| {said} of 65,504"
        ran = "pure fp16" if name == "half" else name
        result.append(Figure(f"headroom in {ran}", value, f"{said} at {site}" if site else said))
    attack, certificate = report.attack, report.certificate
    if attack is not None and attack.sites:
        most = min(attack.sites, key=lambda site: site.headroom_bits)
        note = f"max |x| {reached(most.worst)} at {most.name}, the worst of {counted(attack.steps, 'gradient step')}"
        kept = headroom_or_excess(attack.worst_headroom_bits, most.worst, most.limit)
        result.append(Figure("headroom under attack", kept, note))
    if certificate is not None and certificate.holds:
        sites = counted(len(certificate.sites), "site")
        note = f"of up to {counted(certificate.max_length, 'position')}, by bounds at {sites}{for_target(report)}"
        result.append(Figure("headroom for any input", headroom(certificate.headroom_bits), note))
    elif certificate is not None:
        unproven = uncertified_rows(report)
        of = f"of {len(certificate.sites):,}{for_target(report)}"
        note = f"{of}, the furthest over its limit: {unproven[0].name}" if unproven else of
        result.append(Figure("not proven for every input", counted(len(unproven), "site"), note))
    close, weights, run = report.fidelity, report.weights, report.finetune
    if run is not None and (moved := distances(run))[2]:
        what, unit, ((first, where), *others) = moved
        note = f"{unit} on {where}".lstrip()
        note += "".join(f"; {scientific(value)} on {on}" for value, on in others)
        result.append(Figure(what, scientific(first), note))
    if close is not None:
        name = "fp16 against bf16" if run is None else "rounding, fp16 against bf16"
        result.append(Figure(name, *closeness(close, finetuned=run is not None)))
    if weights is not None and len(result) < MAIN_FIGURES:
        note = f"of {weights.elements:,}; {rounded_to_zero(weights)}"
        result.append(Figure("weights carried over bit for bit", percent(weights.lossless_fraction), note))
    if not close and not weights and regimes:
        # Beside an attack's figures there is room for one of these.
        kinds = (("nonfinite", "not finite"), ("saturated", "saturated"))
        for key, name in kinds[: max(1, MOST_FIGURES - len(result))]:
            worst = max(regimes, key=lambda n: getattr(regimes[n], key))
            count = getattr(regimes[worst], key)
            note = f"most in {worst}; what is so by design is not counted" if count else f"in {listed(list(regimes))}"
            result.append(Figure(f"values {name}", f"{count:,}", note))
    return result


def rounded_to_zero(weights: WeightsEntry) -> str:
    """Return how many weights are too small for fp16, in words."""
    return f"{weights.flushed_to_zero:,} rounded to zero" if weights.flushed_to_zero else "none rounded to zero"


def closeness(close: FidelityEntry, *, finetuned: bool = False) -> tuple[str, str]:
    """Return how much closer fp16 is to the fp32 source than bf16 in words, and the two numbers."""
    bf16, fp16 = known(close.kl_bf16), known(close.kl_fp16)
    reference = "the finetuned weights in fp32" if finetuned else "the fp32 source"
    what = f"{'KL' if close.measure == 'kl' else close.measure} to {reference}"
    note = f"{what}: fp16 {scientific(fp16)}" + ("" if bf16 is None else f", bf16 {scientific(bf16)}")
    if fp16 is None:
        return "broken", note
    if bf16 is None:
        return scientific(fp16), note
    if fp16 <= 0:
        return "no error", note
    closer, further = bf16 / fp16, fp16 / max(bf16, 1e-300)
    return (f"{about(closer)} closer" if closer >= 1 else f"{about(further)} further off"), note


def found_magnitude(found: float | None) -> str:
    """Return the worst value found at a site of the certificate, "–" where none was looked for."""
    return "–" if found is None else reached(found)


def is_overflow(found: float | None) -> bool:
    """Return whether a value is beyond fp16, NaN included."""
    return found is not None and not found <= FP16_MAX


# --- tables ----------------------------------------------------------------------------------------------------------


def largest_signals(signals: Sequence[SignalEntry]) -> list[tuple[SignalEntry, bool, bool]]:
    """Return the signals that were largest before, with whether they were and are beyond fp16."""
    ranked = sorted(distinct(signals), key=lambda s: -math.inf if math.isnan(s.before) else -s.before)
    return [(s, not s.before <= FP16_MAX, not s.after <= FP16_MAX) for s in ranked[:LARGEST]]


REGIME_MEANINGS = {
    "stock": "as from_pretrained(dtype=torch.float16) loads it",
    "amp": "fp32 weights under torch.autocast",
    "half": "every parameter in fp16, .half()",
}


def regime_rows(regimes: Mapping[str, RegimeEntry]) -> list[dict[str, Any]]:
    """Return a row for each regime: counts, largest value, headroom, tightest site."""
    rows = []
    for name, regime in regimes.items():
        rows.append(
            {
                "name": name,
                "meaning": REGIME_MEANINGS.get(name, ""),
                "safe": not regime.broken,
                "nonfinite": regime.nonfinite,
                "saturated": regime.saturated,
                "amax": reached(regime.reached),
                "bits": headroom_or_excess(regime.headroom_bits, regime.reached),
                "tightest": first_broken(regime) or regime.tightest or "–",
            }
        )
    return rows


def unsafe_rows(report: Report) -> dict[str, Any]:
    """Return what is unsafe, short of what was asked, or close to its limit, by kind, with how to go on; the sites that
    broke in the order in which they did, without those past ``MOST_UNSAFE`` ("more")."""
    sites = unsafe_sites(report.regimes)

    def of(*kinds: str) -> list[UnsafeEntry]:
        return [entry for entry in report.unsafe if entry.kind in kinds]

    reached_in_fp32 = {site.name: site.fp32 for site in (report.attack.sites if report.attack else ())}
    return {
        "next": report.next,
        "sites": sites[:MOST_UNSAFE],
        "more": max(0, len(sites) - MOST_UNSAFE),
        "found": [
            (entry.signal, reached(reached_in_fp32.get(entry.signal)), entry.excess_bits) for entry in of("found")
        ],
        "goals": of("goal", "inexact"),
        "limits": of("limit"),
        "close": report.close,
    }


def remedies_of(report: Report, unproven: Sequence[UnprovenEntry]) -> list[str]:
    """Return what helps where bounds pass their limits, each remedy once; nothing where the next step was said of the
    whole."""
    return [] if report.next else list(dict.fromkeys(site.remedy for site in unproven))


def is_exact(plan: Plan) -> bool:
    """Return whether a plan is powers of two and nothing else, so that fp32 outputs keep every bit."""
    return not (plan.gain_correction or plan.untied_head or plan.drift)


def plan_rows(report: Report) -> list[tuple[str, str]]:
    """Return what the plan does besides channels, as pairs of what and how; nothing without a plan."""
    plan = report.plan
    if plan is None:
        return []
    moved = (f"times {power(r)}" if r else "not moved" for r in plan.residual_exponents)
    rows = [("residual stream", ", ".join(moved))]
    # Of a finetune they begin with the config of what was trained, rescaled once already, not with the original's.
    whose = "config.json" if report.finetune is None else "config.json of the finetuned weights"
    for key, sides in report.source.config_changes.items():
        rows.append((f"{whose}: {key}", f"{sides.get('before', 'absent')} → {sides.get('after', 'absent')}"))
    if plan.eps is None and any(plan.residual_exponents):
        rows.append(("norm eps", "fixed in stock code, so it drifts (below)"))
    if plan.untied_head:
        rows.append(("head", "separated from the embedding, whose limit stood in the way"))
    if plan.gain_correction:
        n = len(plan.gain_correction)
        rows.append(("gain correction", f"{n} norm weights, against the mean of the eps drift"))
    if (drift := plan.drift) is not None:
        rows.append((f"drift of {plan.drifts_by}, relative change of norm outputs", scientific(drift.relative_error)))
        for what, predicted, measured in (
            ("KL", drift.predicted_kl, drift.measured_kl),
            ("largest logit error", drift.predicted_max_logit_error, drift.measured_max_logit_error),
        ):
            parts = [
                f"{w} {scientific(v)}" for w, v in (("predicted", predicted), ("measured", measured)) if v is not None
            ]
            if parts:
                rows.append((f"drift of {plan.drifts_by}, {what}", ", ".join(parts)))
    if plan.margin_bits is not None:
        kept = "what was observed" if report.regimes else "bounds"
        rows.append((f"margin kept between {kept} and limits", f"{plan.margin_bits:g} bits"))
    return rows


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


def run_rows(run: FinetuneEntry) -> list[tuple[str, str]]:
    """Return what a finetune did, as pairs of what and how much."""
    recipe, data = run.recipe, run.data
    schedule, penalty = recipe.get("schedule") or {}, recipe.get("penalty") or {}
    rows = [("optimizer steps", f"{run.steps:,}")]
    if run.tokens:
        rows.append(("tokens read", f"{run.tokens:,}"))
    if run.processes > 1:
        rows.append(("processes", f"{run.processes:,}"))
    if data.get("path"):
        rows.append(("data", ", ".join(str(data[key]) for key in ("path", "objective") if data.get(key))))
    if schedule.get("learning_rate") is not None:
        rows.append(("learning rate", f"{schedule['learning_rate']:g}, {schedule.get('decay', '')}".rstrip(", ")))
    precision = recipe.get("precision")
    if precision:
        rows.append(("precision", precision if isinstance(precision, str) else ", then ".join(map(str, precision))))
    if penalty.get("headroom_bits") is not None:
        rows.append(("penalty", f"{penalty['form']}, for {in_bits(penalty['headroom_bits'])} of headroom"))
    if run.holds_bounds:
        rows.append(("bounds", "trained to come under fp16's limit and stay there"))
    rows.append(("steps skipped, gradient not finite", f"{len(run.skipped):,}"))
    rows.append(("rewinds after a spike of the loss", f"{len(run.rewinds):,}"))
    return rows


_EVALUATED = {
    "step": "step",
    "held_out_loss": "held-out loss",
    "held_out_divergence": "divergence from the original",
    "bounds_over": "bounds over",
    "bound_excess_bits": "most by (bits)",
    "worst_headroom_bits": "headroom",
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


def fidelity_rows(close: FidelityEntry | None, reference: str | None = None) -> dict[str, Any] | None:
    """Return the fidelity table: a row per measure, source in bf16 and output in fp16; null was infinite.

    reference: what it was measured against, where that is not what the report says.
    """
    if close is None:
        return None
    kl = close.measure == "kl"
    error = "largest logit error" if kl else "largest error of a state"
    table = [
        (
            "KL(fp32 ‖ x), nats per token" if kl else f"{close.measure} of the last states",
            scientific(close.kl_bf16),
            scientific(close.kl_fp16),
        ),
        (error, scientific(close.max_logit_error_bf16), scientific(close.max_logit_error_fp16)),
    ]
    if close.kl_fp32 is not None:
        same = " (the same function, to the bit)" if close.kl_fp32 == 0 else ""
        table.insert(1, (f"output's weights in fp32{same}", "–", scientific(close.kl_fp32)))
    if close.kl_bf16 is None and close.max_logit_error_bf16 is None:
        table = [(what, "–", fp16) for what, _, fp16 in table]
    if close.top1_fp16 is not None:
        bf16 = close.top1_bf16
        table.append(("same best token", "–" if bf16 is None else percent(bf16), percent(close.top1_fp16)))
    return {"rows": table, "positions": close.positions, "reference": reference or close.reference}


def weight_rows(weights: WeightsEntry | None, whose: str = "source", dtype: str | None = None) -> list[tuple[str, str]]:
    """Return how the weights came through, as pairs of what and how much; ``dtype`` as for ``carried_over``."""
    if weights is None:
        return []
    return [
        ("finetuned fp32 weights" if whose == "finetuned" else f"weights of the {whose}", f"{weights.elements:,}"),
        ("carried over bit for bit", carried_over(weights, dtype)),
        ("normal in fp16 (of those not 0)", percent(weights.normal_fraction)),
        ("rounded to zero", f"{weights.flushed_to_zero:,}" if weights.flushed_to_zero else "none"),
        ("not finite", f"{weights.nonfinite:,}"),
        ("largest |w|", f"{magnitude(weights.amax)} of 65,504"),
    ]


COLUMNS = (
    ("site", ""),
    ("regime", ""),
    ("max |x|", "n"),
    ("headroom", "n"),
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


def all_sites(report: Report) -> int:
    """Return how many rows the site table would have without a limit to its size."""
    return sum(len(sites) for sites in tables(report).values())


def tables(report: Report) -> Mapping[str, Sequence[SiteEntry]]:
    """Return the sites of each regime; where nothing was run, the certificate's sites under the name ""."""
    if report.regimes or report.certificate is None:
        return {name: regime.sites for name, regime in report.regimes.items()}
    nothing: dict[str, Any] = {"amax": math.nan, "nonfinite": 0, "saturated": 0, "benign": None}
    rows = [
        SiteEntry(name=site.name, limit=site.limit, headroom_bits=site.headroom_bits, **nothing)
        for site in bound_rows(report.certificate, None)
    ]
    return {"": rows}


def site_rows(report: Report, count: int) -> list[list[dict[str, str]]]:
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
        # An fp32 value has no limit here, but may be inf or NaN as well.
        text = reached(value) if row[6] is not None or row[4] else magnitude(value)
    elif column == 3:
        text = site_headroom(row)
    elif column in (4, 5):
        text = f"{value:,}"
    else:
        text = "–" if value is None else magnitude(value)
    label, kind = COLUMNS[column]
    reason = "" if column or row[8] is None else strings[row[8]]
    broken = "broken" if row[4] or row[5] else ""
    return {"text": text, "label": label, "class": kind, "benign": reason, "broken": broken}


def site_headroom(row: Sequence[Any]) -> str:
    """Return the headroom of a row: by the largest |x| that was run, by the bound where nothing was run."""
    regime, largest, bits, limit = row[1], row[2], row[3], row[6]
    if bits is None or limit is None:
        return headroom(bits)
    return headroom_by_bound(bits) if regime is None else headroom_or_excess(bits, largest, limit)


def site_data(report: Report) -> dict[str, Any]:
    """Return the sites for the script: all, or the tightest of each regime as far as there is room."""
    most = max((len(sites) for sites in tables(report).values()), default=0)
    while len(json.dumps(data := compact(report, most))) > MOST_SITE_BYTES:
        most = most * 3 // 4
    return data


def compact(report: Report, most: int) -> dict[str, Any]:
    """Return up to ``most`` sites of each regime in compact form: strings once, rows of numbers that point at them.

    A row: name, regime, max |x|, headroom, non-finite, saturated, limit, dtype, reason why benign, bound, bound over
    the worst found. Infinite numbers become ±1e308, NaN null, since JSON has neither. ``columns``: those to show.
    """
    strings: dict[str, int] = {}
    found, bounds = tables(report), bounds_by_name(report)

    def pointer(text: str | None) -> int | None:
        return None if not text else strings.setdefault(str(text), len(strings))

    rows = []
    for name, sites in found.items():
        for site in sites[:most]:
            # What a regime computes in fp32 has no limit of fp16, and no bound is needed there.
            bound, ratio = bounds.get(site.name, (None, None)) if site.limit is not None else (None, None)
            rows.append(
                [
                    pointer(site.name),
                    pointer(name),
                    json_number(site.reached),
                    json_headroom(site.headroom_bits),
                    site.nonfinite,
                    site.saturated,
                    json_number(site.limit),
                    pointer(site.dtype),
                    pointer(by_design(site)),
                    json_number(bound) if bound is None or infinite(bound) else shown_bound(bound),
                    None if ratio is None else rounded_up(ratio, 3),
                ]
            )
    measured = [name for name in found if name]
    columns = _ONLY_PROVEN if found and not measured else _PROVEN if bounds else _MEASURED
    shown = "half" if "half" in measured else next(iter(measured), "")
    return {"strings": list(strings), "rows": rows, "regimes": measured, "shown": shown, "columns": columns}


def json_number(value: float | None) -> float | None:
    """Return a number that JSON can hold with the digits that ``magnitude`` shows, which scripts round otherwise."""
    if value is None or math.isnan(value):
        return None
    if infinite(value):
        return math.copysign(1e308, value)
    if 1000 <= abs(value) < 1e7:
        return float(round(value))
    return float(f"{value:.4g}" if 0.01 <= abs(value) < 1000 else f"{value:.2e}")


def json_headroom(value: float | None) -> float | None:
    """Return headroom in four decimals, rounded down, that JSON can hold."""
    return json_number(value) if value is None or math.isnan(value) or infinite(value) else rounded_down(value, 4)


def hash_rows(report: Report) -> list[tuple[str, str, str]]:
    """Return (whose, file, SHA-256) of every weight file that the report knows."""
    rows = [("source", name, digest) for name, digest in report.source.sha256.items()]
    return rows + [("output", file.name, file.sha256 or "not computed") for file in report.output.files]
