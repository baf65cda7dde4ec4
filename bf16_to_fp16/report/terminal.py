"""Print the report, with colours and tables on a terminal; ``NO_COLOR`` is respected."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.text import Text

from .. import wording
from ..checkpoint.contents import MODULES
from ..families.known import half_call, loading_class, named
from ..numerics import FP16_MAX
from ..rescaling.plan import Plan
from ..rescaling.planner import Planned, Violation
from ..results import AttackEntry, CertificateEntry, Fidelity, RegimeEntry
from ..targets import TIERS
from . import answers, facts, schema, uses
from .screen import Output, bad, console, good
from .sections import (
    REGIME_COLUMNS,
    TIER_COLUMNS,
    exponent_rows,
    regime_rows,
)
from .stored import read_packed
from .tables import Column, Table, names, numbers

WORST_SITES = 6
MOST_EDITS = 3  # edits that are named, the dearest
CHECK_NAMES = {
    "files": "files: hashes against the report",
    "plan": "plan: against config and weights",
    "replay": "replay: the plan applied to the original",
    "certificate": "certificate: computed again",
    "audit": "audit: run again",
    "fidelity": "fidelity: the original run again",
    "tiers": "runtimes: bounds and audit against the report",
    "report": "report: verdict against the rest",
}


def print_conversion(report: schema.Report, out: Path, *, then: str = "") -> None:
    screen = console()
    print_outcome(screen, report)
    if report.tiers:
        screen.say(runtimes_line(report))
    if report.finetune is not None:
        screen.print(Text(f"finetune: {facts.moved_by(report.finetune)}"))
    if report.safe or report.short:
        screen.say(load_line(out))
    print_next(screen, then or report.next or check_next(report, out))
    screen.say(f"report: {out / schema.PAGE}")


def print_pipeline(report: Mapping[str, Any], out: Path) -> None:
    screen, encoders = console(), [entry["subfolder"] for entry in report["encoders"]]
    print_title(out.name)
    rest, how = report["linked"] + report["copied"], [f"{report[kind]:,} {kind}" for kind in ("linked", "copied")]
    size = wording.bytes_in_words(report["nbytes"])
    screen.say(f"the rest: {wording.counted(rest, 'file')}, {size}, byte for byte ({', '.join(how)})")
    if report["linked"]:
        screen.say("a linked file is the source's own: to write to one later, convert with --copy")
    if report["left_out"]:
        screen.say(f"left out: {', '.join(report['left_out'])}")
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


def print_demo(pairs: Sequence[tuple[str, schema.Report, schema.Report]]) -> None:
    def proven(report: schema.Report) -> str:
        if report.certificate is None or not report.certificate.holds:
            return "not proven"
        return f"{wording.factor(report.certificate.headroom_bits)} ×"

    def moved(report: schema.Report) -> str:
        return "" if report.plan is None else ", ".join(f"2^{r}" for r in report.plan.residual_exponents)

    def run(report: schema.Report) -> str:
        return f"{wording.factor(min(regime.headroom_bits for regime in report.regimes.values()))} ×"

    before, after = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    close = [report.fidelity or Fidelity() for report in after]
    broken = [max(regime.nonfinite + regime.saturated for regime in report.regimes.values()) for report in after]
    share = [report.weights.lossless_fraction if report.weights else 0.0 for report in after]
    rows = [
        ("as trained, in fp16: inf or NaN", [f"{report.regimes['half'].nonfinite:,}" for report in before]),
        ("converted, in fp16: inf, NaN or saturated", [f"{count:,}" for count in broken]),
        ("largest value run, below the limit", [run(report) for report in after]),
        ("any input, by proof", [proven(report) for report in after]),
        ("residual stream, times", [moved(report) for report in after]),
        ("KL to fp32, nats: original in bf16", [f"{each.kl_bf16 or 0:.1e}" for each in close]),
        ("the same: converted in fp16", [f"{each.kl_fp16 or 0:.1e}" for each in close]),
        ("weights carried over bit for bit", [wording.percent(each) for each in share]),
    ]
    columns = [Column("", 0), *(numbers(pair[0], i, str) for i, pair in enumerate(pairs, 1))]
    console().table(Table(columns, [(title, *cells) for title, cells in rows], "the three checkpoints"))


def print_file(report: schema.Report, out: Path, notes: Sequence[str], *, then: str = "") -> None:
    screen = console()
    print_outcome(screen, report)
    for line in (runtimes_line(report), *notes):
        screen.say(line)
    print_next(screen, then or check_next(report, out))
    screen.say(f"written: {out}")


def print_outcome(screen: Output, report: schema.Report) -> None:
    if report.signals:
        screen.print(source_line(report))
    screen.print(verdict_line(report, "output: "))
    print_advice(screen, report)


def print_advice(screen: Output, report: schema.Report) -> None:
    _, inside = facts.tower_advice(report)
    proofs = [
        f"{place} {wording.below_limit(bits)}" for place, bits in (facts.by_proof(report) if report.proven else ())
    ]
    older = "; ".join(report.older)
    for what, advice in (
        ("any input", f"{'; '.join(proofs)} ({facts.PROVEN})" if proofs else ""),
        ("accuracy", accuracy(report)),
        ("function", facts.inexactness(report)),
        *facts.edit_rows(report, MOST_EDITS),
        *facts.centred_rows(report),
        ("eps", facts.held_eps(report)),
        ("outputs", facts.scaled_outputs(report)),
        ("to finetune", uses.finetuning(report)),
        ("beware", uses.harm(report)),
        ("class", facts.other_class(report)),
        ("older versions", older),
        ("padding", facts.padding_advice(report)),
        ("not covered", inside),
    ):
        if advice:
            screen.say(f"{what}: {advice}")


def accuracy(report: schema.Report) -> str:
    if report.fidelity is None:
        return ""
    how, note = facts.closeness(report)
    return f"{how}{' than bf16' if how.endswith(('closer', 'off')) else ''}; {note}"


def source_line(report: schema.Report) -> Text:
    # One for each module and side; of a head's output the last entry, its logits, counts.
    signals = list({(signal.module, signal.side): signal for signal in report.signals}.values())
    run, name = report.finetune, "source"
    if run is not None:
        whose = "untrained weights (step 0 is kept)" if run.kept == 0 < run.steps else "trained weights"
        name = f"{whose}, from a rescaled start" if run.recipe.get("rescale", True) else whose
    largest = max(signals, key=lambda signal: signal.before)
    over = sum(signal.before > FP16_MAX for signal in signals)
    aside = f", the {tower} aside" if (tower := facts.tower_of(report.family)) else ""
    if not over:
        kept = wording.below_limit(math.log2(FP16_MAX / largest.before)) if largest.before else "nothing but zeros"
        said = f"did not overflow on what was run{aside}; its largest value, {plain(largest.before)}, is {kept}"
        adds = "; plain fp16 may do, and this adds the proof" if report.proven and run is None else ""
        return good(name, f"{said}{adds}")
    where = f"{'entering' if largest.side == 'input' else 'at'} {largest.module}"
    worst = f"{plain(largest.before)} {where}, {wording.over_limit(largest.before)}"
    return bad(name, f"overflows fp16 at {over:,} of {len(signals):,} sites that the plan watches, at worst {worst}")


def runtimes_line(report: schema.Report) -> str:
    said, proven = [], "proven"
    if tower := facts.tower_of(report.family):
        proven += f", the {tower} aside"
    if MODULES in report.source.carried_over:
        proven += " to the encoder's last states"
    for tier in TIERS:
        if (entry := report.tiers.get(tier.name)) is not None:
            why = f" ({entry.reason})" if entry.reason and tier.target == report.target else ""
            said.append(f"{tier.title}: {facts.held_in(entry, proven, broken=bool(report.broken_regimes))}{why}")
    return "safe in: " + " · ".join(said)


def verdict_line(report: schema.Report, whose: str = "") -> Text:
    label, sentence = facts.verdict_of(report)
    return (good if report.safe else bad)(f"{whose}{label}", sentence)


def print_next(screen: Output, then: str) -> None:
    if then:
        screen.say(f"next: {then}")


def check_next(report: schema.Report, out: Path) -> str:
    how = f"verify it on the target machine, if possible with your own text (--data): {verify_command(out)}"
    return how if report.safe else ""


def load_line(out: Path) -> str:
    try:
        architecture = json.loads((out / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    except (OSError, ValueError, LookupError, TypeError):
        architecture = ""
    half = half_call(architecture)
    if (out / MODULES).is_file():
        options = "" if half else ', model_kwargs={"dtype": torch.float16}'
        return f'load: SentenceTransformer("{out}"{options}){half}'
    kind = loading_class(architecture)
    return f'load: {kind}.from_pretrained("{out}", dtype=torch.float16){half}'


def verify_command(out: Path) -> str:
    return shlex.join(["bf16-to-fp16", "verify", str(out)])


def print_title(title: str) -> None:
    console().print(Text(f"\n{title}", "bold"))


def print_audit(report: schema.Report, then: str = "", page: Path | None = None) -> None:
    screen = console()
    screen.print(verdict_line(report))
    print_advice(screen, report)
    if named(report.family) is None:
        screen.print(
            f"no certificate: {report.family} is none of the classes that can be bounded and converted"
            " (bf16-to-fp16 families)"
        )
    print_tiers(screen, report)
    screen.table(Table(REGIMES, regime_rows(report.regimes)))
    print_underflow(screen, report.regimes)
    if words := facts.gradients_in_words(report):
        screen.print(words)
    for name, regime in report.regimes.items():
        which = "first broken" if regime.broken_sites else "tightest"
        title = f"{name}: the {which} of {wording.counted(len(regime.sites), 'site')} that were measured"
        screen.table(Table(SITE_COLUMNS, regime.sites[:WORST_SITES], title))
    print_found(screen, report)  # the tables show what broke
    if report.attack is not None and report.certificate is not None:
        print_attack(screen, report.attack, report.certificate)
        print_uncertified(screen, report)
    print_next(screen, then or report.next)
    if page is not None:
        screen.say(f"report: {page}")


def print_underflow(screen: Output, regimes: Mapping[str, RegimeEntry]) -> None:
    for name, regime in regimes.items():
        if sunk := [site.name for site in regime.underflow]:
            screen.print(
                f"{name}: below fp16's smallest normal number (6.1e-05) on every input, where few bits are kept, at"
                f" {wording.counted(len(sunk), 'site')}: {', '.join(sunk[:3])}{', …' if len(sunk) > 3 else ''}"
            )


def print_attack(screen: Output, attack: AttackEntry, certificate: CertificateEntry) -> None:
    bounds = {site.name: site.bound for site in certificate.sites}
    screen.print(
        f"the worst input that {wording.counted(attack.steps, 'gradient step')} found is"
        f" {wording.below_limit(attack.worst_headroom_bits)}"
    )
    # inf or NaN in fp16 may come from an earlier site; fp32 shows the site's own value.
    largest = {s.name: s.worst if s.worst <= FP16_MAX else s.fp32 for s in attack.sites}
    ranked = sorted(
        (s for s in attack.sites if s.name in bounds), key=lambda s: largest[s.name] / s.limit, reverse=True
    )
    columns = (
        names("site"),
        numbers("random", "random", wording.reached),
        numbers("found", lambda site: largest[site.name], wording.reached),
        numbers("bound", lambda site: bounds[site.name], bound_of),
        numbers("limit", "limit", plain),
        numbers(
            "bound / found",
            lambda site: wording.times(wording.tightness(bounds[site.name], largest[site.name])).replace("–", "-"),
            str,
        ),
    )
    screen.table(Table(columns, ranked[:WORST_SITES], "worst found"))
    if overflowed := [s for s in attack.sites if not s.half <= FP16_MAX]:
        screen.print(
            f"{wording.counted(len(overflowed), 'site')} gave inf or NaN in fp16, as whatever follows an overflow does;"
            " the values above are those in fp32"
        )


def print_certificate(report: schema.Report, then: str = "") -> None:
    screen, certificate = console(), report.certificate
    assert certificate is not None  # certify always has one
    over = certificate.over
    if certificate.holds:
        inputs = facts.every_input(report, length=True).removeprefix("every ")
        sites = wording.counted(len(certificate.sites), "site")
        screen.print(good("certified", f"no {inputs} can overflow it, by bounds at {sites}"))
    else:
        count = f"{len(over)} of {wording.counted(len(certificate.sites), 'bound')}"
        screen.print(bad("not certified", f"{count} can pass their limit{facts.for_target(report)}"))
    print_advice(screen, report)
    ranked = sorted(certificate.sites, key=lambda site: site.headroom_bits)
    shown = ranked[: max(WORST_SITES, min(len(over), 4 * WORST_SITES))]
    why = {site.name: site.reason for site in report.uncertified}
    columns = (
        names("site"),
        Column("what", "kind"),
        numbers("bound", "bound", bound_of),
        numbers("partial sums", "partial", bound_of),
        numbers("limit", "limit", plain),
        numbers("headroom", "headroom_bits", wording.headroom_by_bound),
        Column("why", lambda site: why.get(site.name, "")),
    )
    screen.table(Table(columns, shown, f"tightest by bound{facts.for_target(report)}"))
    print_tiers(screen, report)
    print_more(screen, len(over), "over their limit", len(shown))
    print_next(screen, then or report.next)


def bound_of(value: float) -> str:
    return "none" if math.isnan(value) or wording.infinite(value) else plain(wording.rounded_up(value, 4))


def plain(value: float) -> str:
    """Return a number with four digits, or all its whole digits under ten million: 65504 is not 65500."""
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:,.4g}"


def print_tiers(screen: Output, report: schema.Report) -> None:
    if rows := facts.tier_rows(report):
        screen.table(Table(TIER_COLUMNS, rows))


def brought_back(folder: Path) -> str:
    if folder.is_file():
        return came_through("the source's weights", read_packed(folder).weights)
    words = "does not say how the weights came through; take the one that convert wrote"
    report = schema.read_report(folder / schema.REPORT, {"weights": words}, words, also=("finetune",))
    assert report.weights is not None  # asked for
    trained = report.finetune is not None
    whose = "the finetuned weights from before the rescaling" if trained else "the source's weights"
    return came_through(whose, report.weights)


def came_through(whose: str, weights: schema.WeightsEntry) -> str:
    """Return in words how many weights come back bit for bit: at least those that fp16 held."""
    changed = round(weights.elements * (1 - weights.lossless_fraction))
    if changed == 0:
        return f"{whose}, all of them bit for bit"
    return f"{whose}, all but at most {changed:,} of {weights.elements:,} bit for bit, those to fp16's precision"


def print_uncertified(screen: Output, report: schema.Report) -> None:
    unproven = report.uncertified
    for site in unproven[:WORST_SITES]:
        screen.print(f"not certified: {site.name}, bound {bound_of(site.bound)}; {site.reason}")
    print_more(screen, len(unproven), "not certified")
    if not report.next:
        for remedy in dict.fromkeys(site.remedy for site in unproven):
            screen.print(f"what helps: {remedy}")


SITE_COLUMNS = (
    names("site"),
    numbers("max |x|", lambda s: wording.reached(s.reached) if s.limit or s.nonfinite else plain(s.amax), str),
    numbers(
        "headroom",
        lambda s: (
            wording.headroom_or_excess(s.headroom_bits, s.reached, s.limit) if s.limit else wording.headroom(None)
        ),
        str,
    ),
    numbers("non-finite", "nonfinite"),
    numbers("saturated", "saturated"),
    Column("by design", facts.by_design),
)
REGIMES = (*REGIME_COLUMNS, names("tightest or first broken", itemgetter("tightest")))
PAIRS = (Column("what", 0), Column("value", 1))


def print_found(screen: Output, report: schema.Report) -> None:
    found = [entry for entry in report.unsafe if entry.kind == "found"]
    for entry in found[:WORST_SITES]:
        screen.print(f"unsafe: {entry.signal}, {entry.reason}")
    print_more(screen, len(found), "unsafe")


def print_limits(screen: Output, violations: Sequence[Violation]) -> None:
    for each in violations[:WORST_SITES]:
        bits = wording.excess(each.excess_bits, 2)
        screen.print(f"over its limit with margin: {each.signal} by {bits} bits")
    print_more(screen, len(violations), "over their limit with margin")


def print_more(screen: Output, count: int, what: str, shown: int = WORST_SITES) -> None:
    if count > shown:
        screen.print(f"and {count - shown:,} more {what}; --json FILE lists all")


def print_planned(report: schema.Report, planned: Planned | None) -> None:
    screen = console()
    if report.signals:
        screen.print(source_line(report))
        after = max(signal.after for signal in report.signals)
        kept = wording.below_limit(math.log2(FP16_MAX / after) if after else math.inf)
        screen.print(f"after: the largest of these values would be {plain(after)}, {kept}")
    scaled = facts.scaled_outputs(report)
    rows = [("outputs", scaled)] if scaled else []
    for what, how in rows + facts.edit_rows(report, MOST_EDITS) + facts.centred_rows(report):
        screen.say(f"{what}: {how}")
    if planned is None:
        return
    passed = [each for each in planned.violations if each.excess_bits > (planned.plan.margin_bits or 0.0)]
    if passed:
        screen.print(bad("unsafe", f"{wording.counted(len(passed), 'limit')} would be passed, below"))
    elif planned.violations:
        said = f"{wording.counted(len(planned.violations), 'limit')} would hold by less than the margin, below"
        screen.print(good("safe on what was run", said))
    elif planned.fallbacks:
        over = wording.counted(len(planned.fallbacks), "signal")
        screen.print(good("safe on what was run", f"{over} would pass a limit by bound and hold by what was observed"))
    else:
        screen.print(good("safe", "every limit would hold for every input, by bounds of the source"))


def print_plan(plan: Plan, planned: Planned | None) -> None:
    screen = console()
    rows = [("residual stream", wording.signed(plan.residual_exponent)), *exponent_rows(plan.exponents)]
    screen.table(Table(PAIRS, rows, f"plan for {plan.family}"))
    for name, factor in plan.gain_correction.items():
        screen.print(f"{name} times {factor:.6f} against the drift of eps")
    if planned is not None:
        print_limits(screen, planned.violations)


def print_upload(upload: Any, repo: str, *, public: bool = False, aside: bool = False) -> None:
    """Print the planned upload. aside: to standard error, where standard output is for data."""
    screen = console(stderr=aside)
    seen = "public: everyone can read it" if public else "private, if the repository is new (--public for a public one)"
    screen.say(seen)
    items = upload.items()
    sizes = [(item.name, item.nbytes) for item in items]
    sizes.append((f"{len(items)} files", sum(nbytes for _, nbytes in sizes)))
    screen.table(Table((Column("file", 0), numbers("size", 1, wording.bytes_in_words)), sizes, f"for {repo}"))
    if upload.card_edited:
        screen.say("README.md: edited since the conversion")


def print_published(result: Mapping[str, Any]) -> None:
    screen = console()
    if result["dry_run"]:
        screen.print("dry run: nothing was sent")
    elif result["url"] is None:
        screen.print("nothing was uploaded")
    elif not result["uploaded"]:
        screen.say(f"{result['url']} has all of it already")
    else:
        kind = "private" if result["private"] else "public"
        files = wording.counted(len(result["uploaded"]), "file")
        screen.say(f"{result['url']} ({kind}): {files} in {result['commit']}")
    if result["kept"]:
        screen.say(f"these stay: {', '.join(result['kept'])}")


def print_verification(result: answers.Verification) -> None:
    screen, environment = console(), result.environment
    ran = list(dict.fromkeys(name for names in environment.devices.values() for name in names))
    screen.say(f"device: {wording.listed(ran) if ran else environment.device}")
    rows = [(CHECK_NAMES.get(check, check), outcome) for check, outcome in result.checks.items()]
    screen.table(Table((Column("check", 0), Column("result", 1)), rows))
    for problem in result.problems:
        screen.say(f"{problem.check}: {problem.name}: {problem.reason}; {problem.remedy}")
    for note in result.notes:
        screen.say(f"note: {note}")
    if result.verified and result.certificate is not None:
        kept = min((regime.headroom_bits for regime in result.regimes.values()), default=None)
        said = "nothing was run" if kept is None else f"the largest value run is {wording.below_limit(kept)}"
        inputs = f"up to {wording.counted(result.certificate.max_length, 'position')}"
        aside = facts.claim_end(result.padding, result.report.family)
        unmet = facts.unmet_target(result)
        there = f" {facts.where(TIERS[0].target)}" if unmet else facts.for_target(result)
        every = f"proven for every input of {inputs}{aside}{there}"
        proof = every if result.certificate.holds else "safe on what was run"
        edits = f"; edited at {wording.counted(result.edits, 'site')}, so not quite the source's function"
        said += edits if result.edits else ""
        said += f"; {unmet}" if unmet else ""
        screen.print(good("verified", f"{wording.counted(result.files, 'file')} as recorded, {proof}; {said}"))
    else:
        screen.print(bad("not verified", f"{wording.counted(len(result.problems), 'problem')} above"))
