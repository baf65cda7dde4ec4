"""The report as a page: one HTML file that carries everything it shows, loads nothing, and forbids every request.

It is made from the report alone. The order is a reader's: the verdict in a sentence, three figures, the pictures, then
the tables. Names come from other people's files, so all text goes through Jinja2's autoescape.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..families.known import named
from ..families.older import is_older_key
from ..numerics import FP16_MAX
from ..results import Fidelity, dump
from ..wording import (
    bound_magnitude,
    bytes_in_words,
    counted,
    excess,
    headroom,
    headroom_by_bound,
    headroom_or_excess,
    in_bits,
    listed,
    magnitude,
    percent,
    power,
    reached,
    scientific,
    signed,
    significant_bits,
    tightness,
    times,
)
from . import facts, figures
from .answers import Verification
from .remedies import unsafe_sites
from .result import Result as Shown
from .result import fragment
from .schema import FinetuneEntry, RegimeEntry, Report, UnprovenEntry, WeightsEntry, read
from .site_table import site_table
from .tables import Column, Table, names, numbers

MOST_UNSAFE = 12
"""Broken sites listed with their remedy; most others only pass on what broke before, and are in the site table."""
MAIN_FIGURES = 3
"""Figures of the headline: headroom, what is certified, fp16's error against bf16's; others where one is missing."""
MOST_FIGURES = 4  # figures of the headline of an audit, so that they stand in one row
MOST_EDITS = 12  # edits that the plan lists, the dearest
MOST_EXPONENTS = 300  # signals of the plan that are listed with their exponents
MOST_SUNK = 12  # signals under the normal numbers that are listed
LARGEST = 6  # signals named below the picture
MOST_EVALUATIONS = 12  # rows of the table of evaluations; of more the last, and others spread evenly
_NAMES = {"query_key": "query/key", "asymptotic": "gate or neuron"}  # of kinds of signals, in words
_KINDS = {
    "value": "values",
    "neuron": "neurons",
    "query_key": "queries and keys",
    "residual": "further streams",
    "input": "what norms alone read",
    "gate": "gates, by edits",
    "scores": "scores, by edits",
    "logits": "logits, by edits",
    "tanh": "what a tanh reads, by edits",
    "routing": "routers, by edits",
}
"""Ends of signal names, and what to call them; every other signal that a plan moves is the output of a norm."""
_over2 = partial(excess, decimals=2)


def write_page(path: Path, report: Report) -> None:
    """Write the report of a conversion or an audit to ``path`` as one self-contained HTML file, UTF-8, under 2 MB."""
    path.write_text(render(report), encoding="utf-8", errors="backslashreplace", newline="\n")


def render(report: Report) -> str:
    """Return the page; parts that the report lacks (an audit has no plan, a replayed plan no signals) are left out."""
    regimes, run = report.regimes, report.finetune
    # Where the most is fp16.
    widest = "half" if "half" in regimes else next(iter(regimes), "")
    seen = bool(widest) and not report.signals and report.certificate is None
    sunk, left_out = facts.underflow_rows(regimes), report.source.left_out
    return (
        jinja_environment()
        .get_template("report.html.jinja")
        .render(
            report=report,
            audited=figures.audit_pictures(regimes[widest].sites) if seen else (),
            audited_regime=widest,
            tiers=Table(TIER_COLUMNS, facts.tier_rows(report), "In which runtimes it is safe", "tiers"),
            sunk=Table(SUNK_COLUMNS, sunk[:MOST_SUNK], SUNK),
            hidden_sunk=max(0, len(sunk) - MOST_SUNK),
            gradients=facts.gradients_in_words(report),
            fidelity=closeness_table(report),
            weights=weight_rows(report.weights, "finetuned" if run else "source", report.source.dtype),
            sites=site_table(report),
            replaced=[name for name in left_out if not name.endswith("/")],
            folders=[name for name in left_out if name.endswith("/")],
            hashes=[("source", name, digest) for name, digest in report.source.sha256.items()]
            + [("output", file.name, file.sha256 or "not computed") for file in report.output.files],
            **(certificate_parts(report) if report.certificate is not None else {}),
        )
    )


def certificate_parts(report: Report) -> dict[str, Any]:
    """Return what the template needs of a report's certificate."""
    certificate = report.certificate
    assert certificate is not None  # for which this is called
    unproven, found_by = report.uncertified, facts.found_by(report)
    one_reason = len({site.reason for site in unproven}) == 1
    columns = UNPROVEN_COLUMNS[: -1 if one_reason else None]
    return {
        "brackets": figures.bracket_pictures(certificate),
        "partial_sums": any(site.partial > 1.1 * site.bound for site in certificate.sites),
        "bounds": bound_table(report),
        "found_by": found_by,
        "overflowed": any(site.observed is not None and not site.observed <= FP16_MAX for site in certificate.sites),
        "unproven": Table(columns, unproven[: facts.UNCERTIFIED_SHOWN], id="unproven"),
        "more_unproven": Table(columns, unproven[facts.UNCERTIFIED_SHOWN : facts.MOST_UNCERTIFIED]),
        "unproven_count": len(unproven),
        "hidden_unproven": max(0, len(unproven) - facts.MOST_UNCERTIFIED),
        "one_reason": one_reason,
        "remedies": remedies_of(report, unproven),
    }


def attentions_run(report: Report) -> str:
    """Return with which attentions a report's regimes ran, in words."""
    ran = report.attention or dict.fromkeys(run.attention for regime in report.regimes.values() for run in regime.runs)
    shown = [{"sdpa": "SDPA"}.get(name, name) for name in ran] or ["eager", "SDPA"]
    return f"{'Each with' if len(shown) > 1 else 'With'} {listed(shown)} attention."


def machine_rows(report: Report) -> list[tuple[str, object]]:
    """Return what is known of the machine but for versions, with the devices of each part of the work in words."""
    given = dump(report.environment)
    devices = given.pop("devices", {})
    rows = [(key, value) for key, value in given.items() if key != "versions"]
    return rows + [(f"device of the {part}", ", then ".join(names)) for part, names in devices.items()]


@cache
def jinja_environment() -> Environment:
    """Return the Jinja2 environment of the HTML templates: everything escaped, an unknown name is an error."""
    loader = PackageLoader("bf16_to_fp16.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"significant": significant_bits, "breakable": breakable, "with_command": with_command}
    environment.globals |= {"facts": facts, "figures": figures, "page": sys.modules[__name__]}
    return environment


def breakable(name: object) -> Markup:
    """Return text, escaped, whose dotted names may wrap behind their dots, but not numbers."""
    return Markup(re.sub(r"(?<!\d)\.|\.(?!\d)", ".<wbr>", str(escape(str(name)))))


def with_command(said: str) -> Markup:
    """Return a sentence, escaped, in which a command behind its last words, "…: ", stands as code."""
    words, colon, command = said.partition(": ")
    return Markup("{}: <code>{}</code>").format(words, command) if colon else escape(said)


@dataclass(frozen=True)
class Figure:
    """One figure of the headline: what it is, its value, and what it was measured on."""

    name: str
    value: str
    note: str


class Result(Shown):
    """A report as a dictionary, which a notebook shows as the verdict and its figures, check by check, or as what was
    uploaded."""

    def _repr_html_(self) -> str:
        if "checks" in self:
            verification = read(Verification, self)
            rows = [(name, outcome, "") for name, outcome in verification.checks.items()]
            rows += [(problem.check, problem.name, problem.reason) for problem in verification.problems]
            return fragment("verified" if verification.verified else "not verified", rows)
        if "uploaded" in self:
            files = [(each["name"], bytes_in_words(each["nbytes"]), each["sha256"]) for each in self["files"]]
            return fragment(self["url"] or f"{self['repo']}: nothing was uploaded", files)
        return summary(read(Report, self))


def summary(report: Report) -> str:
    """Return the verdict of a report and the figures of its headline as a piece of HTML."""
    rows = [(figure.name, figure.value, figure.note) for figure in headline(report)]
    return fragment(facts.verdict_sentence(report), rows)


def source_name(report: Report) -> str:
    """Return the last part of the source's path or Hub id, without the revision, and the sub-folder if there is one."""
    path, inside = report.source.path or report.family or "checkpoint", report.source.subfolder
    whole = path.removesuffix(f"/{inside}") if inside else path
    name = whole.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1].partition("@")[0] or path
    return f"{name}/{inside}" if inside else name


def headline(report: Report) -> list[Figure]:
    """Return the figures of the headline, up to four, fewer where the report lacks them."""
    regimes: Mapping[str, RegimeEntry] = report.regimes
    result: list[Figure] = []
    if regimes:
        name = "half" if "half" in regimes else min(regimes, key=lambda n: regimes[n].headroom_bits)
        regime = regimes[name]
        value = headroom_or_excess(regime.headroom_bits, regime.reached)
        broken = facts.first_broken(regime)
        site = f"; first broken: {broken}" if broken else f" at {regime.tightest}" if regime.tightest else ""
        said = reached(regime.reached)
        said = said if said == "overflow" else f"max |x| {said} of 65,504"
        ran = "pure fp16" if name == "half" else name
        result.append(Figure(f"headroom in {ran}", value, said + site))
    attack, certificate = report.attack, report.certificate
    if attack is not None and attack.sites:
        most = min(attack.sites, key=lambda site: site.headroom_bits)
        note = f"max |x| {reached(most.worst)} at {most.name}, the worst of {counted(attack.steps, 'gradient step')}"
        kept = headroom_or_excess(attack.worst_headroom_bits, most.worst, most.limit)
        result.append(Figure("headroom under attack", kept, note))
    if certificate is not None and certificate.holds:
        sites = counted(len(certificate.sites), "site")
        (nearest, least), *further = facts.by_proof(report)
        note = "".join(f"{place}: {headroom(bits)}; " for place, bits in further)
        note += f"{facts.PROVEN}; up to {counted(certificate.max_length, 'position')}, by bounds at {sites}"
        result.append(Figure(f"any input, {nearest}" if nearest else "any input", headroom(least), note))
    elif certificate is not None:
        unproven = report.uncertified
        of = f"of {len(certificate.sites):,}{facts.for_target(report)}"
        note = f"{of}, the furthest over its limit: {unproven[0].name}" if unproven else of
        result.append(Figure("not proven for every input", counted(len(unproven), "site"), note))
    close, weights, run = report.fidelity, report.weights, report.finetune
    if run is not None and (moved := facts.distances(run))[2]:
        what, unit, (first, *others) = moved
        note = f"{unit} on {first.where}".lstrip()
        note += "".join(f"; {scientific(each.value)} on {each.where}" for each in others)
        result.append(Figure(what, scientific(first.value), note))
    if close is not None:
        name = "fp16 against bf16" if run is None else "rounding, fp16 against bf16"
        result.append(Figure(name, *facts.closeness(report)))
    if weights is not None and len(result) < MAIN_FIGURES:
        zero = f"{weights.flushed_to_zero:,}" if weights.flushed_to_zero else "none"
        note = f"of {weights.elements:,}; {zero} rounded to zero"
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


TIER_COLUMNS = (Column("runtimes", 0), Column("arithmetic", 1), Column("safe", 2), Column("such as", 3))
UNPROVEN_COLUMNS = (
    names("site"),
    numbers("bound", "bound", bound_magnitude),
    numbers("limit", "limit", magnitude),
    numbers("bits over", "excess_bits", excess, over=lambda site: True),
    Column("reason", "reason"),
)
SUNK = Markup("Below fp16's smallest normal number, 2⁻¹⁴, on every input: nothing overflows there, but bits are lost")
SUNK_COLUMNS = (names("site", 0), Column("regimes", 2, ", ".join), numbers("max |x|", 1, magnitude))
LARGEST_COLUMNS = (
    names("site", "module"),
    Column("what", lambda signal: f"{_NAMES.get(signal.kind, signal.kind)}, {signal.side}"),
    numbers("before", "before", magnitude, over=lambda signal: not signal.before <= FP16_MAX),
    numbers("after", "after", magnitude, over=lambda signal: not signal.after <= FP16_MAX),
)


def largest_signals(report: Report) -> Table:
    """Return the table of the signals that were largest before."""
    ranked = sorted(facts.distinct(report.signals), key=lambda s: -math.inf if math.isnan(s.before) else -s.before)
    whose = "finetuned weights" if report.finetune is not None else "source"
    title = f"The largest, seen in fp32 on the {whose}; after: what the plan makes of them"
    return Table(LARGEST_COLUMNS, ranked[:LARGEST], title)


def bound_table(report: Report) -> Table:
    """Return the table of the tightest bounds, beside the worst values found where anything was run."""
    certificate = report.certificate
    assert certificate is not None  # for which this is called
    title = f"The least headroom by their bounds{facts.for_target(report)}"
    if certificate.holds and certificate.cost_bits is not None:
        cost = f" {_over2(certificate.cost_bits)} bits of" if certificate.cost_bits else " no"
        title += f"; proving them cost{cost} precision"
    columns = [
        names("site"),
        Column("what", "kind"),
        numbers("worst found", "observed", lambda worst: "–" if worst is None else reached(worst)),
        numbers("bound", "bound", bound_magnitude, over=lambda site: not site.bound <= site.limit),
        numbers("bound / worst found", lambda site: tightness(site.bound, site.observed), times),
        numbers("partial sums", "partial", bound_magnitude, over=lambda site: not site.partial <= site.limit),
        numbers("limit", "limit", magnitude),
        numbers("headroom", "headroom_bits", headroom_by_bound),
    ]
    if not facts.found_by(report):
        columns = [column for column in columns if "worst found" not in column.title]
    return Table(columns, facts.bound_rows(certificate), title, "bounds")


REGIME_COLUMNS = (
    Column("regime", lambda row: f"{row['name']} ({row['meaning']})"),
    numbers("non-finite", itemgetter("nonfinite")),
    numbers("saturated", itemgetter("saturated")),
    numbers("max |x|", itemgetter("amax"), str),
    numbers("headroom", itemgetter("bits"), str),
)


def regime_rows(regimes: Mapping[str, RegimeEntry]) -> list[dict[str, Any]]:
    """Return a row for each regime: counts, largest value, headroom, tightest site."""
    return [
        {
            "name": name,
            "meaning": facts.REGIME_MEANINGS.get(name, ""),
            "safe": not regime.broken,
            "nonfinite": regime.nonfinite,
            "saturated": regime.saturated,
            "amax": reached(regime.reached),
            "bits": headroom_or_excess(regime.headroom_bits, regime.reached),
            "tightest": facts.first_broken(regime) or regime.tightest or "–",
        }
        for name, regime in regimes.items()
    ]


def unsafe_tables(report: Report) -> dict[str, Any]:
    """Return what is unsafe, short of what was asked, or close to its limit, as tables, with how to go on."""
    sites = unsafe_sites(report.regimes)
    kinds = {kind: [entry for entry in report.unsafe if entry.kind == kind] for kind in ("found", "limit")}
    in_fp32 = {site.name: site.fp32 for site in (report.attack.sites if report.attack else ())}
    site, bits = names("site", "signal"), numbers("bits over", "excess_bits", _over2)
    counts = numbers("non-finite", "nonfinite"), numbers("saturated", "saturated")
    most = numbers("reached", lambda entry: in_fp32.get(entry.signal), reached)
    signal, short = names("signal", "signal"), numbers("bits of the margin missing", "excess_bits", _over2)
    return {
        "next": report.next,
        "sites": Table((site, Column("regimes", "regimes", ", ".join), *counts), sites[:MOST_UNSAFE]),
        "more": max(0, len(sites) - MOST_UNSAFE),
        "found": Table((site, most, bits), kinds["found"], "What the search drove past its limit"),
        "goals": [entry for entry in report.unsafe if entry.kind in ("goal", "inexact")],
        "limits": Table((signal, bits), kinds["limit"], "No exponent brings these under their limit with the margin"),
        "close": Table(
            (signal, short),
            report.close,
            "Under their limit by less than the margin, and no exact exponent lowers them",
        ),
    }


def remedies_of(report: Report, unproven: Sequence[UnprovenEntry]) -> list[str]:
    """Return what helps where bounds pass their limits, each once; nothing where the whole has a next step."""
    return [] if report.next else list(dict.fromkeys(site.remedy for site in unproven))


def is_exact(report: Report) -> bool:
    """Return whether a plan is powers of two that change nothing, so that fp32 outputs keep every bit."""
    plan = report.plan
    return plan is None or not (
        plan.gain_correction or plan.untied_head or plan.drift or plan.centred_keys or report.inexact
    )


def plan_rows(report: Report) -> list[tuple[str, str]]:
    """Return what the plan does besides channels, as pairs of what and how; nothing without a plan."""
    plan = report.plan
    if plan is None:
        return []
    moved = (f"times {power(r)}" if r else "not moved" for r in plan.residual_exponents)
    rows = [("residual stream", ", ".join(moved))]
    for stream, room in report.for_proof.items():
        rows.append(("for the proof", f"{stream} from {power(room)}, which what was observed asks for"))
    if scaled := facts.scaled_outputs(report):
        rows.append(("outputs", scaled))
    if other := facts.other_class(report):
        rows.append(("class", other))
    # Of a finetune they begin with the config of what was trained, rescaled once already, not with the original's.
    family = named(report.family)
    whose = "config.json" if report.finetune is None else "config.json of the finetuned weights"
    for key, sides in report.source.config_changes.items():
        why = ", for transformers 4" if "before" not in sides and family and is_older_key(family, key) else ""
        rows.append((f"{whose}: {key}", f"{sides.get('before', 'absent')} → {sides.get('after', 'absent')}{why}"))
    if (plan.eps is None or plan.eps_held) and any(plan.residual_exponents):
        where = "held for a reader that has its own" if plan.eps_held else "fixed in stock code"
        rows.append(("norm eps", f"{where}, so it drifts (below)"))
    if plan.untied_head:
        rows.append(("head", "separated from the embedding, which could not carry its exponents"))
    rows += facts.centred_rows(report) + facts.edit_rows(report, MOST_EDITS)
    if plan.gain_correction:
        n = len(plan.gain_correction)
        rows.append(("gain correction", f"{n} norm weights, against the mean of the eps drift"))
    if (drift := plan.drift) is not None:
        rows.append((f"drift of {plan.drifts_by}, relative change of norm outputs", scientific(drift.relative_error)))
        for what, predicted, measured in (
            (facts.measure_of(report), drift.predicted_kl, drift.measured_kl),
            ("largest logit error", drift.predicted_max_logit_error, drift.measured_max_logit_error),
        ):
            parts = [
                f"{word} {scientific(v)}"
                for word, v in (("predicted", predicted), ("measured", measured))
                if v is not None
            ]
            if parts:
                rows.append((f"{facts.drift_of(report)}, {what}", ", ".join(parts)))
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


def exponent_table(exponents: Mapping[str, int | Sequence[int]], most: int | None = MOST_EXPONENTS) -> Table:
    """Return the table of the signals that a plan moves, the first ``most`` of them."""
    rows = []
    for name, exponent in list(exponents.items())[:most]:
        if isinstance(exponent, int):
            rows.append((name, signed(exponent), "all"))
        else:
            ends = sorted({min(exponent), max(exponent)})
            moved = sum(e != 0 for e in exponent)
            rows.append((name, " to ".join(map(signed, ends)), f"{moved:,} of {len(exponent):,}"))
    columns = (names("signal", 0), numbers("exponent of 2", 1, str), numbers("channels moved", 2, str))
    return Table(columns, rows, id="exponents")


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


_EVALUATED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step": ("step", "{:,}".format),
    "held_out_loss": ("held-out loss", "{:.4g}".format),
    "held_out_divergence": ("divergence from the original", scientific),
    "bounds_over": ("bounds over", "{:.4g}".format),
    "bound_excess_bits": ("most by (bits)", "{:.4g}".format),
    "worst_headroom_bits": ("headroom", headroom),
    "worst_site": ("tightest", str),
}
"""What evaluations of a finetune have by name, and how it is called and written."""


def evaluation_table(evaluations: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return the table of a finetune's evaluations, further figures before the last column; None for none."""
    if not evaluations:
        return None
    shown = {name for evaluation in evaluations for name, value in evaluation.items() if value is not None}
    extra = sorted({k for e in evaluations for k, v in e.items() if isinstance(v, (int, float))} - set(_EVALUATED))
    order = [name for name in (*list(_EVALUATED)[:-1], *extra, "worst_site") if name in shown]
    stride = -(-len(evaluations) // MOST_EVALUATIONS)
    return Table(list(map(evaluated, order)), evaluations[::-1][::stride][::-1], id="evaluations")


def evaluated(name: str) -> Column:
    """Return the column of one figure of evaluations."""
    title, write = _EVALUATED.get(name, (name.replace("_", " "), "{:.4g}".format))

    def text(value: Any) -> str:
        return value or "–" if value is None or isinstance(value, str) else write(value)

    return Column(title, lambda evaluation: evaluation.get(name), text, "site" if name == "worst_site" else "n")


def closeness_table(report: Report, fp16: str = "output in fp16") -> Table | None:
    """Return the table of fidelity to what was converted; None where nothing was compared. fp16: its last heading."""
    close, run = report.fidelity, report.finetune
    if close is None:
        return None
    reference = "finetuned model in fp32" if run else close.reference
    return fidelity_table(close, reference, "the same in bf16" if run else "source in bf16", fp16)


def fidelity_table(close: Fidelity, reference: str, bf16: str, fp16: str = "output in fp16") -> Table:
    """Return the table of fidelity to a ``reference``, a row per measure; bf16, fp16: headings; null was infinite."""
    kl = close.measure == "kl"
    what = "KL(fp32 ‖ x), nats per token" if kl else f"{close.measure} of the last states"
    rows = [(what, scientific(close.kl_bf16), scientific(close.kl_fp16))]
    if close.kl_fp32 is not None:
        same = " (the same function, to the bit)" if close.exact else ""
        rows.append((f"the converted weights in fp32{same}", "–", scientific(close.kl_fp32)))
    largest = scientific(close.max_logit_error_bf16), scientific(close.max_logit_error_fp16)
    rows.append((f"largest {'logit error' if kl else 'error of a state'}", *largest))
    if close.kl_bf16 is None and close.max_logit_error_bf16 is None:
        rows = [(what, "–", value) for what, _, value in rows]
    if close.top1_fp16 is not None:
        bf16_share = "–" if close.top1_bf16 is None else percent(close.top1_bf16)
        rows.append(("same best token", bf16_share, percent(close.top1_fp16)))
    columns = (Column(f"against the {reference}", 0), numbers(bf16, 1, str), numbers(fp16, 2, str))
    return Table(columns, rows, cards=False)


def weight_rows(weights: WeightsEntry | None, whose: str = "source", dtype: str | None = None) -> list[tuple[str, str]]:
    """Return how the weights came through, as pairs of what and how much; ``dtype`` as for ``carried_over``."""
    if weights is None:
        return []
    return [
        ("finetuned fp32 weights" if whose == "finetuned" else f"weights of the {whose}", f"{weights.elements:,}"),
        ("carried over bit for bit", facts.carried_over(weights, dtype)),
        ("normal in fp16 (of those not 0)", percent(weights.normal_fraction)),
        ("rounded to zero", f"{weights.flushed_to_zero:,}" if weights.flushed_to_zero else "none"),
        ("not finite", f"{weights.nonfinite:,}"),
        ("largest |w|", f"{magnitude(weights.amax)} of 65,504"),
    ]
