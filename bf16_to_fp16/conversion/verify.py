"""The command ``verify``: compute a checkpoint's report again by ``convert``'s functions, and compare both reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..bounds.arithmetic import Arithmetic
from ..bounds.findings import Certificate
from ..bounds.tiers import bounded
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.recorded import CONVERTED_KEY
from ..checkpoint.sources import local_source, own_name
from ..devices import Device
from ..environment import SCHEMA, installed
from ..errors import UserError
from ..families.configs import config_value, looked_up
from ..families.from_config import DTYPE_KEYS
from ..families.known import padding_entry
from ..families.layout import Layout
from ..families.other_class import read_as
from ..families.resolve import resolve
from ..measuring import probe
from ..measuring.agreement import agreed_layout
from ..measuring.batch import Batch, describe_batches
from ..measuring.regimes import Audited
from ..measuring.soft_side import LEAST
from ..measuring.source_runs import observe_source
from ..measuring.stock import load_config
from ..progress import Progress, progress_of
from ..quiet import quiet
from ..report import other_reports, schema
from ..report.facts import missed
from ..report.judgement import reasons_unsafe
from ..report.observed_tiers import tiers_of
from ..report.remedies import CONVERT_AGAIN, SHORT, UNSAFE_BY_REPORT, tower_alone, unsafe_sites
from ..report.steps import Decided
from ..report.stored import originals, read_written
from ..rescaling.edits import listed_edits
from ..rescaling.exponents import check_plan_fits, output_factors
from ..rescaling.plan import mark_of
from ..results import dump
from ..targets import TARGETS
from ..wording import listed
from .comparison import differences, other_weights, replay_differences
from .evidence import audited, batches_for_fp32, compare, measured_edits, outputs_beside, searched
from .file_checks import check_foreign, check_hashes, check_unread
from .locating import locate
from .options import check_data
from .undo import config_before

CHECKS = ("files", "plan", "replay", "certificate", "audit", "fidelity", "tiers", "report")


@dataclass
class Verified:
    """The input and the findings of ``verify``. ``original``: the source, if given. ``checks``: passed, failed or not
    run, by name. ``sections``: the parts of the report that were computed again."""

    folder: Path
    report: schema.Report
    device: Device
    progress: Progress
    original: Checkpoint | None = None
    data: str | None = None
    run_model: bool = True
    problems: list[other_reports.ProblemEntry] = field(default_factory=list)
    checks: dict[str, str] = field(default_factory=lambda: dict.fromkeys(CHECKS, "not run"))
    notes: list[str] = field(default_factory=list)
    sections: dict[str, Any] = field(default_factory=dict)

    def add(self, check: str, problems: Iterable[tuple[str, ...]]) -> None:
        added = [
            other_reports.ProblemEntry(check=check, name=name, reason=reason, remedy=next(iter(remedy), CONVERT_AGAIN))
            for name, reason, *remedy in problems
        ]
        self.problems += added
        self.checks[check] = "failed" if added or self.checks[check] == "failed" else "passed"


@quiet()
def verify(
    source: str | Path,
    *,
    original: str | Path | None = None,
    data: str | None = None,
    run_model: bool = True,
    subfolder: str | None = None,
    endpoint: str | None = None,
    device: str | torch.device = "auto",
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Check a converted folder or Hub repository against its report and return every difference.

    original: the checkpoint that was converted; it adds the checks ``replay`` (of the plan) and ``fidelity`` (of the
    outputs). data: text to audit besides the probe. run_model: False skips the audit. ``verdict`` is "safe" if nothing
    differs and the report says safe. Raises UserError for anything that this program did not convert."""
    progress = progress_of(progress)
    check_data(data, run_model=run_model)
    if original is not None:
        local_source(original)  # fails before the files are hashed
    on = Device(device, progress)
    folder, revision = locate(source, subfolder, endpoint, progress)
    report = read_written(folder)
    verified = Verified(folder, report, on, progress, data=data, run_model=run_model)
    if original is not None and report.finetune is not None:
        raise UserError(f"{source} was finetuned, so it is no conversion of the original; leave out --original")
    with progress.step("Hashing the files") as advance:
        verified.add("files", check_hashes(folder, report, advance=advance))
    if not verified.problems:
        if original is not None:
            opened, name = open_checkpoint(original, endpoint=endpoint), report.source.class_in("after")
            verified.original = opened if name is None else read_as(opened, name)
        check_contents(verified)
    verified.add("report", check_verdict(report))
    return dump(
        other_reports.Verification(
            schema=SCHEMA,
            verdict="unsafe" if verified.problems else "safe",
            verified=not verified.problems,
            source=schema.Source(path=own_name(source) if revision is None else str(source), revision=revision),
            report=other_reports.Claim(verdict=report.verdict, proof=report.proof, family=report.family),
            checks=verified.checks,
            problems=verified.problems,
            notes=verified.notes,
            files=len(report.output.files),
            target=report.target,
            environment=schema.Environment.model_validate(on.environment()),
            **{"certificate": None, "tiers": {}, "regimes": {}} | verified.sections,
        )
    )


def check_contents(verified: Verified) -> None:
    report, original, progress = verified.report, verified.original, verified.progress
    checkpoint = open_checkpoint(verified.folder)
    layout = agreed_layout(checkpoint)
    verified.add("files", check_unread(checkpoint, report))
    if report.output.card_edited:
        verified.notes.append(f"{schema.CARD} was edited before it was published: its author answers for it")
    verified.add("files", check_foreign(checkpoint, layout, report))
    verified.sections["padding"] = padding_entry(layout.config)
    verified.add("plan", check_plan(checkpoint, layout, report))
    if any(problem.check == "plan" for problem in verified.problems):
        return  # a plan that does not fit cannot be replayed
    plan = report.of_plan
    verified.sections["edits"] = len(listed_edits(layout, plan))
    before = None
    if original is not None:
        verified.add("replay", other_weights(original, report))
        if verified.checks["replay"] == "passed":
            agreed_layout(original)
            before = resolve(original, untie=plan.untied_head)
            with progress.step("Replaying the plan"):
                verified.add("replay", replay_differences(original, before, plan, checkpoint, report))
    recorded, target = report.certificate, report.target or "half"
    if recorded is None or target not in TARGETS or recorded.max_length < 1:
        raise UserError(f"{schema.REPORT}: its certificate names no target and length; convert the source again")
    # The report may choose the length, which every claim names, but not what is assumed of kernels.
    length = Arithmetic(recorded.max_length)
    certificate, certified = bounded(checkpoint, layout, target, length, verified.device, progress)
    verified.sections["certificate"] = certificate.entry(sites=False)
    verified.add("certificate", check_certificate(certificate, report))
    regimes = {}
    if verified.run_model:
        again = run_again(checkpoint, verified, before)
        regimes = again.ran.regimes
        verified.sections["regimes"] = regimes
        verified.add("audit", check_audit(again, verified))
        if not again.same_inputs and report.regimes:
            verified.notes.append("other text was run than the report names: its figures are not compared")
        if original is not None and before is not None:
            if again.same_inputs and report.regimes:
                verified.add("fidelity", check_fidelity(original, before, checkpoint, verified, again))
            verified.add("fidelity", check_exceptions(original, before, checkpoint, verified))
    tiers = verified.sections["tiers"] = tiers_of(layout, certified, regimes)
    verified.add("tiers", check_tiers(report, tiers, certified, ran=verified.run_model))


def check_verdict(report: schema.Report) -> Iterator[tuple[str, ...]]:
    if report.short:
        yield schema.REPORT, f"states that the checkpoint is safe, but short of what was asked: {missed(report)}", SHORT
        return
    if not report.safe:
        remedy = tower_alone(report.family, report.regimes) or UNSAFE_BY_REPORT
        yield schema.REPORT, "states that the checkpoint is unsafe in fp16", remedy
        return
    unsafe = [*report.unsafe, *unsafe_sites(report.regimes, report.family, converted=True), *reasons_unsafe(report)]
    yield from ((entry.signal, f"the report says safe, and also {entry.reason}") for entry in unsafe)


def check_plan(checkpoint: Checkpoint, layout: Layout, report: schema.Report) -> Iterator[tuple[str, str]]:
    plan, config = report.of_plan, checkpoint.config
    try:
        check_plan_fits(layout, plan)
        originals(layout, plan, report.source)
    except (UserError, RuntimeError, OverflowError) as error:
        yield "plan", str(error).partition(";")[0]
        return
    if plan.untied_head and layout.tied is not False:
        yield "config.json", "the plan separates the head, and the checkpoint has it tied"
    for key in layout.family.eps_keys[:1]:
        before: Any = config_value(layout.family, config_before(config, report.source), key)
        if plan.eps is not None and not plan.eps_held and plan.eps != before * 4.0**plan.residual_exponent:
            yield "plan", f"has an eps of {plan.eps}, not the source's {before} times 4^{plan.residual_exponent}"
    if report.outputs and report.finetune is None:
        factors = {name: entry.factor_log2 for name, entry in report.outputs.items()}
        yield from differences(factors, output_factors(layout, plan), "outputs")
        recorded = sorted((edit.site, edit.exponent, edit.columns) for edit in report.inexact)
        planned = sorted((edit.site, edit.exponent, edit.columns) for edit in listed_edits(layout, plan).values())
        yield from differences(recorded, planned, "inexact")
    if plan.moves and config.get(CONVERTED_KEY) != mark_of(plan):
        yield "config.json", f"{CONVERTED_KEY} is not what the conversion wrote for this plan"
    wanted = {key: sides["after"] for key, sides in report.source.config_changes.items() if "after" in sides}
    if plan.eps is not None:
        wanted |= dict.fromkeys(layout.family.eps_keys, plan.eps)
    for key, value in wanted.items():
        if (value_there := looked_up(config, key)) != value:
            yield "config.json", f"{key} is {value_there}, and the conversion set {value}"
    for name, part in ((None, config), *((k, v) for k, v in config.items() if isinstance(v, Mapping))):
        for key in DTYPE_KEYS:
            at = f"{name}.{key}" if name else key
            if part.get(key) not in (None, "float16"):
                yield "config.json", f"{at} is {part[key]}, which transformers loads the weights in"


def check_certificate(certificate: Certificate, report: schema.Report) -> Iterator[tuple[str, str]]:
    assert report.certificate is not None
    yield from differences(dump(report.certificate), dump(certificate.entry()), "certificate")
    if report.proof == "certified" and not certificate.holds:
        worst = min(certificate.sites, key=lambda site: site.headroom_bits)
        yield worst.name, f"its bound is {worst.largest:.6g}, over its limit, and the report says certified"


@dataclass(frozen=True)
class Rerun:
    inputs: list[Batch]
    in_fp32: list[Batch]
    ran: Audited
    same_inputs: bool


def run_again(checkpoint: Checkpoint, verified: Verified, before: Layout | None) -> Rerun:
    report, data = verified.report, verified.data
    recorded, config = report.inputs or schema.Inputs(), load_config(checkpoint.folder)
    seed, how = recorded.seed or 0, (verified.device, verified.progress)
    with torch.random.fork_rng(devices=[]):
        chosen = probe.usable(recorded.chosen, config)
        inputs = probe.audit_batches(config, checkpoint.folder, data, seed=seed, chosen=chosen)
        in_fp32 = [] if before is None else batches_for_fp32(inputs, before, report.of_plan)
        ran = audited(checkpoint, inputs, in_fp32, *how, train=report.target == "train", seed=seed)
    return Rerun(inputs, in_fp32, ran, describe_batches(inputs, seed=seed, data=data)["sha256"] == recorded.sha256)


def check_audit(again: Rerun, verified: Verified) -> Iterator[tuple[str, ...]]:
    """Yield each site that the repeated audit finds unsafe. If there is none, yield each difference of the audit from
    the report if both ran on the same inputs, and one problem if they should have but did not."""
    report, entries = verified.report, again.ran.regimes
    broken = unsafe_sites(entries, report.family, converted=True)
    yield from ((site.signal, site.reason, site.remedy) for site in broken)
    if broken or not report.regimes:
        return
    # Other versions may have other sites: only those that both audits have are compared.
    other = any(report.environment.versions.get(name) != installed(name) for name in ("torch", "transformers"))
    if not again.same_inputs:
        if verified.data is None and report.inputs is not None and report.inputs.data is None and not other:
            yield "inputs", "are not what the recorded seed and ids give"
        return
    recorded, ran = ({name: dump(entry) for name, entry in each.items()} for each in (report.regimes, entries))
    for name in recorded.keys() & ran.keys() if other else ():
        both = {site["name"] for site in recorded[name]["sites"]} & {site["name"] for site in ran[name]["sites"]}
        for each in (recorded, ran):
            each[name]["sites"] = [site for site in each[name]["sites"] if site["name"] in both]
    yield from differences(recorded, ran, "regimes")


def check_fidelity(
    original: Checkpoint, before: Layout, checkpoint: Checkpoint, verified: Verified, again: Rerun
) -> Iterator[tuple[str, str]]:
    report = verified.report
    plan, sections = report.of_plan, dump(report)
    observed = observe_source(original, again.inputs, verified.progress, verified.device)
    reference, decided = observed.reference, Decided(before, plan, report.target or "half", observed=observed)
    close, drifted = compare(original, before, plan, reference, again.ran, again.inputs, again.in_fp32)
    now: dict[str, Any] = {
        "fidelity": dump(close),
        "outputs": {n: dump(each) for n, each in outputs_beside(before, plan, reference, again.ran).items()},
    }
    if not plan.centred_keys:  # else they were observed with centred keys
        now["signals"] = [dump(entry) for entry in decided.signals]
    for key, section in now.items():
        if key in sections or key == "fidelity":  # the others are absent after ``--plan``
            yield from differences(sections.get(key), section, key)
    if plan.drift is not None and drifted.drift is not None:
        yield from differences(plan.drift.model_dump(), drifted.drift.model_dump(), "plan.drift")
    edits = measured_edits(checkpoint, decided, again.in_fp32)
    recorded, measured = ({edit.site: {"measured": edit.measured} for edit in each} for each in (report.inexact, edits))
    yield from differences(recorded, measured, "inexact")


def check_exceptions(
    original: Checkpoint, before: Layout, checkpoint: Checkpoint, verified: Verified
) -> Iterator[tuple[str, str]]:
    """Search again for inputs that edits harm, and yield (entry, reason) for differences from the report. The number of
    ids searched must be equal. The outputs of the worst single id found may diverge from the source at most twice as
    far as those of the worst single id in the report. The same goes for the worst set of several ids."""
    report = verified.report
    rare = searched(original, checkpoint, before, report.of_plan, verified.progress)
    if rare is None:
        return
    yield from differences(report.searched and report.searched.ids, rare.searched.ids, "searched.ids")
    for single in (True, False):
        recorded, again = (
            [each for each in entries if (len(each.ids) == 1) is single]
            for entries in (report.exceptions, rare.exceptions)
        )
        worst = max((each.kl for each in recorded), default=LEAST / 2)
        if again and again[0].kl > 2 * worst:
            ids, kl, kind = listed(list(map(str, again[0].ids))), again[0].kl, "id" if single else "set of ids"
            yield "exceptions", f"ids {ids} diverge by {kl:.1e}, over twice as far as any {kind} in the report"


def check_tiers(
    report: schema.Report, tiers: Mapping[str, schema.TierEntry], certified: Mapping[str, bool], *, ran: bool
) -> Iterator[tuple[str, str]]:
    for name, claim in report.tiers.items():
        now = tiers.get(name)
        if now is None:
            yield name, "is no tier of this program"
        elif claim.holds != (claim.proof is not None):
            yield name, f"the report contradicts itself: holds is {claim.holds}, and proof is {claim.proof}"
        elif claim.proof == "certified" and now.proof != "certified" and (ran or not certified[name]):
            yield name, f"the report says that this tier is certified, but {now.reason or 'it is only observed'}"
        elif claim.proof == "observed" and ran and not now.holds:
            yield name, f"the report says that this tier was observed to hold, but {now.reason}"
        elif other := sorted({*claim.runtimes} - {*now.runtimes}):
            yield name, f"the report lists {other[0]!r}, which is no runtime of this tier"
