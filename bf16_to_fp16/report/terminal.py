"""Print the report, with colours and tables on a terminal. ``NO_COLOR`` turns colours off."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.text import Text

from .. import wording
from ..checkpoint.contents import MODULES
from ..checkpoint.files import read_json
from ..families.known import architectures, loading_class, named, of_model_type
from ..numerics import FP16_MAX
from ..rescaling.plan import Plan
from ..rescaling.planner import Planned
from ..targets import TIERS
from . import coverage, facts, other_reports, schema, uses
from .screen import Column, Screen, Table, bad, console, good, names, numbers
from .sections import TIER_COLUMNS, exponent_rows

WORST_SITES = 6
MOST_EDITS = 3  # edits that are named, the dearest


def print_conversion(report: schema.Report, out: Path, notes: Sequence[str] = (), *, then: str = "") -> None:
    """Print the outcome of a conversion. out: the folder or file written. notes: further lines to print. then: the next
    step to advise, in place of ``report.next``."""
    screen = console()
    if report.signals:
        screen.print(source_line(report))
    screen.print(verdict_line(report, "output: "))
    print_advice(screen, report, in_folder=not out.is_file())
    for line in (*([runtimes_line(report)] if report.tiers else ()), *notes):
        screen.say(line)
    if (report.safe or report.short) and not out.is_file():
        screen.say(load_line(out))
    then = then or report.next
    if report.safe and not then and not out.is_file():
        command = shlex.join(["bf16-to-fp16", "verify", str(out)])
        then = f"verify it on the target machine, if possible with your own text (--data): {command}"
    screen.rows(("next", then), ("written", out) if out.is_file() else ("report", out / schema.PAGE))


def print_pipeline(report: Mapping[str, Any], out: Path) -> None:
    screen, encoders = console(), [entry["subfolder"] for entry in report["encoders"]]
    print_title(out.name)
    linked, copied, size = report["linked"], report["copied"], decimal(report["nbytes"])
    screen.say(f"other files: {size}, unchanged ({linked:,} linked, {copied:,} copied)")
    if linked:
        screen.say("a linked file is shared with the source: copy the folder before you change such a file")
    screen.rows(("left out", ", ".join(report["left_out"])))
    if report["verdict"] != "safe":
        unsafe = [entry["subfolder"] for entry in report["encoders"] if entry["verdict"] != "safe"]
        screen.print(bad("pipeline: unsafe", f"{wording.listed(unsafe)} is not safe in fp16, as said above"))
        return
    screen.print(good("pipeline: safe", f"{wording.listed(encoders)} in fp16; of other components nothing is claimed"))
    dtype = "torch.float16"
    if report.get("dtype") not in (None, dtype):  # the other components may overflow fp16
        each = "".join(f'"{name}": {dtype}, ' for name in encoders)
        dtype = f'{{{each}"default": {report["dtype"]}}}'
    screen.say(f'load: DiffusionPipeline.from_pretrained("{out}", torch_dtype={dtype})')


def print_advice(screen: Screen, report: schema.Report, *, in_folder: bool = True) -> None:
    has_card = in_folder and report.safe and report.plan is not None
    held = f"{plan.eps:g}, fixed by the program that runs the output" if (plan := report.plan) and plan.eps_held else ""
    screen.rows(
        ("any input", coverage.headroom_by_proof(report)),
        ("accuracy", facts.accuracy(report)),
        ("function", facts.inexactness(report)),
        *facts.function_rows(report, MOST_EDITS),
        ("eps", held),
        ("to train it", f"the folder's {schema.CARD}, “{uses.TITLE}”" if has_card else ""),
        ("older versions", "; ".join(report.older)),
        ("padding", coverage.padding_advice(report)),
        ("not covered", coverage.tower_advice(report)[1]),
    )


def source_line(report: schema.Report) -> Text:
    # One for each module and side; of a head's output the last entry, its logits, counts.
    signals = list({(signal.module, signal.side): signal for signal in report.signals}.values())
    run, name = report.finetune, "source"
    if run is not None:
        whose = "untrained weights (no trained step was kept)" if run.kept == 0 < run.steps else "trained weights"
        name = f"{whose}, from a rescaled start" if run.recipe.get("rescale", True) else whose
    largest = max(signals, key=lambda signal: signal.before)
    over, most = sum(signal.before > FP16_MAX for signal in signals), wording.magnitude(largest.before)
    if not over:
        kept = wording.below_limit(math.log2(FP16_MAX / largest.before)) if largest.before else "nothing but zeros"
        aside = coverage.tower_aside(report.family)
        sentence = f"did not overflow on what was run{aside}; its largest value, {most}, is {kept}"
        adds = "; plain fp16 may do, and this adds the proof" if report.proven and run is None else ""
        return good(name, f"{sentence}{adds}")
    where = f"{'entering' if largest.side == 'input' else 'at'} {largest.module}"
    worst = f"{most} {where}, {wording.over_limit(largest.before)}"
    return bad(name, f"overflows fp16 at {over:,} of {len(signals):,} sites that the plan watches, at worst {worst}")


def runtimes_line(report: schema.Report) -> str:
    proven = f"proven{coverage.tower_aside(report.family)}{coverage.states_aside(report)}"
    parts = []
    for tier, entry, held in facts.held_tiers(report, proven):
        why = f" ({entry.reason})" if entry.reason and tier.target == report.target else ""
        parts.append(f"{tier.title}: {held}{why}")
    return "safe in: " + " · ".join(parts)


def verdict_line(report: schema.Report, whose: str = "") -> Text:
    label, sentence = facts.verdict_of(report)
    return (good if report.safe else bad)(f"{whose}{label}", sentence)


def load_line(out: Path) -> str:
    file = out / "config.json"
    config = read_json(file, "config") if file.is_file() else {}
    family, architecture = of_model_type(config.get("model_type")), next(iter(architectures(config)), "")
    half = "" if family is not None and family.made_in_fp32 else ".half()"  # which rounds buffers kept in fp32
    if (out / MODULES).is_file():
        options = "" if half else ', model_kwargs={"dtype": torch.float16}'
        return f'load: SentenceTransformer("{out}"{options}){half}'
    return f'load: {loading_class(architecture)}.from_pretrained("{out}", dtype=torch.float16){half}'


def print_title(title: str) -> None:
    console().print(Text(f"\n{title}", "bold"))


def print_audit(report: schema.Report, page: Path | None = None) -> None:
    screen = console()
    screen.print(verdict_line(report))
    print_advice(screen, report)
    if named(report.family) is None:
        screen.print(
            f"no certificate: {report.family} is none of the classes that can be bounded and converted"
            " (bf16-to-fp16 families)"
        )
    screen.table(Table(TIER_COLUMNS, facts.tier_rows(report)))
    if words := facts.gradients_in_words(report):
        screen.print(words)
    if report.regimes:
        name, regime = min(report.regimes.items(), key=lambda each: (not each[1].broken, each[1].headroom_bits))
        first = "first broken" if regime.broken else "tightest"
        title = f"{name}: the {first} of {wording.counted(len(regime.sites), 'site')} that were measured"
        screen.table(Table(SITE_COLUMNS, regime.sites[:WORST_SITES], title))
    broken = [f"{entry.signal}, {entry.reason}" for entry in report.unsafe if entry.kind == "found"]
    print_first(screen, "unsafe", broken)  # the table shows what broke
    if report.attack is not None and report.certificate is not None:
        screen.print(facts.attacked(report))
        lines = [f"{x.name}, bound {wording.bound_magnitude(x.bound)}; {x.reason}" for x in report.uncertified]
        print_first(screen, "not certified", lines)
        for remedy in () if report.next else dict.fromkeys(site.remedy for site in report.uncertified):
            screen.print(f"what helps: {remedy}")
    screen.rows(("next", report.next), ("report", page))


def print_certificate(report: schema.Report) -> None:
    screen, certificate = console(), report.certificate
    assert certificate is not None  # certify always has one
    over = certificate.over
    if certificate.holds:
        screen.print(good("certified", f"{facts.claim(report)}, by bounds at {len(certificate.sites):,} sites"))
    else:
        screen.print(bad("not certified", facts.claim(report)))
    print_advice(screen, report)
    ranked = sorted(certificate.sites, key=lambda site: site.headroom_bits)
    shown = ranked[: max(WORST_SITES, min(len(over), 4 * WORST_SITES))]
    why = {site.name: site.reason for site in report.uncertified}
    columns = (
        names("site"),
        Column("what", "kind"),
        numbers("bound", "bound", wording.bound_magnitude),
        numbers("partial sums", "partial", wording.bound_magnitude),
        numbers("limit", "limit", wording.magnitude),
        numbers("headroom", "headroom_bits", wording.headroom_by_bound),
        Column("why", lambda site: why.get(site.name, "")),
    )
    screen.table(Table(columns, shown, f"sites with the least headroom, by bounds {coverage.where(report.target)}"))
    if report.tiers:
        screen.say(runtimes_line(report))
    print_more(screen, len(over) - len(shown), "over their limit")
    screen.rows(("next", report.next))


SITE_COLUMNS = (
    names("site"),
    numbers("max |x|", facts.reached_at, str),
    numbers("headroom", facts.headroom_at, str),
    numbers("non-finite", "nonfinite"),
    numbers("saturated", "saturated"),
    Column("by design", facts.by_design),
)


def print_first(screen: Screen, what: str, lines: Sequence[str]) -> None:
    for line in lines[:WORST_SITES]:
        screen.print(f"{what}: {line}")
    print_more(screen, len(lines) - WORST_SITES, what)


def print_more(screen: Screen, hidden: int, what: str) -> None:
    if hidden > 0:
        screen.print(f"and {hidden:,} more {what}; --json FILE lists all")


def print_planned(report: schema.Report, planned: Planned | None) -> None:
    screen = console()
    if report.signals:
        screen.print(source_line(report))
        after = max(signal.after for signal in report.signals)
        screen.print(f"after: the largest of these values would be {wording.magnitude(after)}")
    screen.rows(*facts.function_rows(report, MOST_EDITS))
    if planned is None:
        return
    passed = [each for each in planned.violations if each.excess_bits > (planned.plan.margin_bits or 0.0)]
    if passed:
        screen.print(bad("unsafe", f"{wording.counted(len(passed), 'limit')} would be exceeded, as listed below"))
    elif weak := len(planned.violations) + len(planned.fallbacks):
        sentence = f"{wording.counted(weak, 'signal')} would have bounds over a limit, or less headroom than the margin"
        screen.print(good("safe on what was run", sentence))
    else:
        screen.print(good("safe", "no input would drive a value over its limit, by bounds computed from the source"))


def print_plan(plan: Plan, planned: Planned | None) -> None:
    screen = console()
    rows = [("residual stream", wording.signed(plan.residual_exponent)), *exponent_rows(plan.exponents)]
    screen.table(Table((Column("what", 0), Column("value", 1)), rows, f"plan for {plan.family}"))
    violations = [] if planned is None else planned.violations
    lines = [f"{each.signal} by {wording.excess(each.excess_bits, 2)} bits" for each in violations]
    print_first(screen, "over the limit with margin", lines)


def print_verification(result: other_reports.Verification) -> None:
    screen, environment = console(), result.environment
    ran = list(dict.fromkeys(name for names in environment.devices.values() for name in names))
    screen.say(f"device: {wording.listed(ran) if ran else environment.device}")
    screen.table(Table((Column("check", 0), Column("result", 1)), list(result.checks.items())))
    for problem, after in zip_longest(result.problems, result.problems[1:]):
        remedy = "" if after is not None and after.remedy == problem.remedy else f"; {problem.remedy}"
        screen.say(f"{problem.check}: {problem.name}: {problem.reason}{remedy}")
    screen.rows(*(("note", note) for note in result.notes))
    if result.verified and result.certificate is not None:
        tightest = min(result.regimes.values(), key=lambda regime: regime.headroom_bits, default=None)
        sentence = "nothing was run"
        if tightest is not None:
            sentence = f"the largest observed {tightest.measured} is {wording.below_limit(tightest.headroom_bits)}"
        inputs = f"up to {wording.counted(result.certificate.max_length, 'position')}"
        aside = coverage.input_exceptions(result.padding, result.report.family)
        unmet = facts.unmet_target(result)
        there = coverage.where(TIERS[0].target if unmet else result.target)
        every = f"proven {there} for every input of {inputs}{aside}"
        proof = every if result.certificate.holds else "safe on what was run"
        sentence += f"; edited at {wording.counted(result.edits, 'site')}" if result.edits else ""
        sentence += f"; {unmet}" if unmet else ""
        screen.print(good("verified", f"{wording.counted(result.files, 'file')} as recorded, {proof}; {sentence}"))
    else:
        screen.print(bad("not verified", f"{wording.counted(len(result.problems), 'problem')} above"))
