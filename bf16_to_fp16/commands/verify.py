"""Whether a converted folder is what its report says: anyone's check of a published or local checkpoint.

A report is only a claim. The files are hashed, the plan is held against config and weights (and replayed, where the
original is at hand), the certificate is computed again from the weights, and the audit is run again. Each thing that
does not hold is named with its reason; what comes after a failed hash would speak of other files and is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..auditing.regimes import REGIMES, RegimeResult, audit_folder
from ..bounds.arithmetic import MAX_LENGTH, Arithmetic
from ..bounds.certificate import TARGETS, fp16_weights
from ..bounds.findings import Certificate
from ..checkpoint.packing import summary_of
from ..checkpoint.reader import Checkpoint, open_checkpoint, own_name
from ..checkpoint.side_modules import read_side_modules
from ..devices import Device
from ..environment import SCHEMA
from ..errors import UserError
from ..families.known import padding_entry
from ..families.layout import Layout
from ..progress import Progress
from ..quiet import quiet
from ..report.build import tiers_of
from ..report.remedies import UNSAFE_BY_REPORT
from ..report.schema import (
    REPORT,
    CertificateEntry,
    Claim,
    Environment,
    Inputs,
    ProblemEntry,
    Report,
    Source,
    TierEntry,
    Verification,
    dump,
    regimes_of,
)
from ..report.stored import Packed, read_packed
from ..rescaling.plan import Plan
from ..run import probe
from ..run.agreement import agreed_layout
from ..run.batch import SWEEP
from ..run.stock import load_config
from ..verification.files import check_files, check_tensors, check_unread
from ..verification.locating import locate, read_recorded, recorded_plan
from ..verification.plans import check_plan, replay
from ..verification.problems import Problem
from ..verification.proof import check_audit, check_certificate, check_proof, check_tiers
from .certify import bounded

CHECKS = ("files", "plan", "replay", "certificate", "audit", "tiers")


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
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Check a converted checkpoint (folder, one file or Hub id) against its report and return what was found.

    original: the source (folder or Hub id) that the recorded plan is replayed on. data: text to audit on besides the
    built-in probe. run_model: False leaves the audit out. subfolder: of the checkpoint in
    the source. endpoint: the Hub's address. device: auto, cpu, cuda, cuda:N
    or mps. ``verdict`` is "safe" where every check holds and the report itself says so (of one file its metadata, which
    list no hashes); ``problems`` names the others, ``as_reported`` says that they are those of an unsafe checkpoint
    whose report is true. Raises UserError for a source that is not a converted checkpoint.
    """
    progress = progress or Progress(quiet=True)
    if data is not None and not run_model:
        raise UserError("data is of no use where nothing is run; leave out either --data or --no-audit")
    on, name, revision, found = Device(device, progress), own_name(source), None, Findings()
    if Path(source).is_file():
        subject, files = packed_subject(Path(source)), 1
    else:
        folder, revision, extra = locate(source, subfolder, endpoint, progress)
        name = name if revision is None else str(source)
        report = read_recorded(folder)
        if original is not None and report.finetune is not None:
            raise UserError(f"{source} was finetuned, so no plan leads to it from the original; leave out --original")
        subject, files = Subject(folder, report, lambda: recorded_plan(folder), report.source), len(report.output.files)
        with progress.step("Hashing the files") as advance:
            found.add("files", check_files(folder, report, extra=extra, advance=advance))
    claim, problems = subject.claim, found.problems
    if not problems:
        origin = None if original is None else open_checkpoint(original, endpoint=endpoint)
        examine(subject, origin, data, found, run_model=run_model, device=on, progress=progress)
    if not claim.safe:
        said = "says itself that the checkpoint is unsafe"
        problems.append(Problem("report", subject.said_in, said, UNSAFE_BY_REPORT))
    totals = None
    if found.certificate is not None:
        totals = {key: value for key, value in found.certificate.to_json().items() if key != "sites"}
    return dump(
        Verification(
            schema=SCHEMA,
            verdict="unsafe" if problems else "safe",
            verified=not problems,
            as_reported=not claim.safe and only_what_is_reported(problems, claim),
            source=Source(path=name, revision=revision),
            report=Claim(verdict=claim.verdict, proof=claim.proof, family=claim.family),
            checks=found.outcome,
            problems=[ProblemEntry(**asdict(problem)) for problem in problems],
            files=files,
            target=claim.target,
            certificate=None if totals is None else CertificateEntry.model_validate(totals),
            tiers=found.tiers,
            padding=found.padding,
            regimes=regimes_of(found.regimes),
            environment=Environment.model_validate(on.environment()),
        )
    )


@dataclass(frozen=True)
class Subject:
    """What is verified: the folder or file, what is claimed of it, and the plan and source that are recorded.

    packed, max_length: of one file, what it says of itself and for what length its certificate holds.
    """

    place: Path
    claim: Report
    plan: Callable[[], Plan]
    source: Source
    packed: Packed | None = None
    max_length: int = MAX_LENGTH

    @property
    def said_in(self) -> str:
        """Where the claims stand."""
        return REPORT if self.packed is None else self.place.name


@dataclass
class Findings:
    """What was found so far: problems, how each check ended, and what was computed again."""

    problems: list[Problem] = field(default_factory=list)
    outcome: dict[str, str] = field(default_factory=lambda: dict.fromkeys(CHECKS, "not run"))
    certificate: Certificate | None = None
    tiers: dict[str, TierEntry] = field(default_factory=dict)
    regimes: Mapping[str, RegimeResult] = field(default_factory=dict)
    padding: int | None = 0

    def add(self, check: str, problems: list[Problem]) -> None:
        """Note how a check ended."""
        self.outcome[check] = "failed" if problems else "passed"
        self.problems += problems


def examine(
    subject: Subject,
    original: Checkpoint | None,
    data: str | None,
    found: Findings,
    *,
    run_model: bool,
    device: Device,
    progress: Progress,
) -> None:
    """Hold the plan against config and weights, replay it on the original, and compute certificate, audit and tiers
    again."""
    claim, checkpoint = subject.claim, open_checkpoint(subject.place)
    layout, plan = agreed_layout(checkpoint), subject.plan()
    found.padding = padding_entry(layout.config)
    if subject.packed is not None:
        found.add("files", check_tensors(subject.place, checkpoint, subject.packed))
    else:
        found.add("files", check_unread(checkpoint, claim))
    found.add("plan", check_plan(checkpoint, layout, plan, subject.source))
    if original is not None:
        found.add("replay", replay(original, checkpoint, plan, subject.source, progress))
    if subject.packed is None:
        found.certificate, certified = recompute(checkpoint, layout, claim, progress, device)
        found.add("certificate", check_certificate(found.certificate, claim))
    else:
        arithmetic = Arithmetic(subject.max_length)
        weights, target = fp16_weights(checkpoint, layout), claim.target or "half"
        found.certificate, certified = bounded(weights, layout, target, arithmetic, device, progress)
        found.add("certificate", check_proof(found.certificate, claim))
    if run_model:
        found.regimes = repeat_audit(checkpoint.folder, claim, progress, device, data=data)
        found.add("audit", check_audit(found.regimes))
    found.tiers = tiers_of(layout, certified, found.regimes)
    found.add("tiers", check_tiers(found.tiers, certified, claim, ran=run_model))


def packed_subject(file: Path) -> Subject:
    """Return what one file that ``convert --layout`` wrote claims in its metadata, which hold no hash and no bounds.

    Raises UserError where no conversion wrote it, or its metadata are damaged.
    """
    said = summary_of(file)
    if said is None:
        raise UserError(f"{file}: convert --layout did not write it; give a file that it wrote, or a converted folder")
    inside = read_packed(file)
    try:
        known = {key: said[key] for key in ("verdict", "proof", "target", "tiers")}
        claim, longest = Report.model_validate({"schema": SCHEMA} | known), int(said["max_length"])
        if claim.target not in TARGETS or longest < 1:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: its metadata are damaged; convert the source again") from error
    claim = claim.model_copy(update={"family": inside.plan.family})
    return Subject(file, claim, lambda: inside.plan, inside.source, inside, longest)


def only_what_is_reported(problems: Sequence[Problem], report: Report) -> bool:
    """Return whether the problems of an unsafe checkpoint are those that its report names itself: the verdict, and
    sites that break."""
    broken = {entry.signal for entry in report.unsafe if entry.kind == "broke"}
    return all(each.check == "report" or (each.check == "audit" and each.name in broken) for each in problems)


def recompute(
    checkpoint: Checkpoint, layout: Layout, report: Report, progress: Progress, device: Device
) -> tuple[Certificate, dict[str, bool]]:
    """Return the certificate of the files, for the same target, length and partial sums as the recorded one, and by
    tier whether its own holds."""
    recorded, target = report.certificate, report.target or "half"
    if recorded is None or target not in TARGETS or recorded.max_length < 1 or recorded.splits < 1:
        raise UserError(f"{REPORT}: its certificate names no target and length; convert the source again")
    arithmetic = Arithmetic(recorded.max_length, splits=recorded.splits)
    weights, modules = fp16_weights(checkpoint, layout), read_side_modules(checkpoint.folder)
    return bounded(weights, layout, target, arithmetic, device, progress, modules)


def repeat_audit(
    folder: Path, report: Report, progress: Progress, device: Device, *, data: str | None = None
) -> Mapping[str, RegimeResult]:
    """Return what every regime shows on the files as stock code loads them, on the probe that the report names."""
    said, config = report.inputs or Inputs(), load_config(folder)
    seed = said.seed or 0
    swept = any(entry.kind == SWEEP for entry in said.batches)
    chosen = probe.usable(said.chosen, config)
    inputs = probe.audit_batches(config, folder, data, seed=seed, sweep=swept, chosen=chosen, progress=progress)
    with torch.random.fork_rng(devices=[]), progress.step(f"Auditing {', '.join(REGIMES)}") as advance:
        train_mode = report.target == "train"
        return device.run(
            "audit",
            lambda place: audit_folder(
                folder, inputs=inputs, seed=seed, device=place, advance=advance, train_mode=train_mode
            ),
        )
