"""Whether a converted folder is what its report says: anyone's check of a published or local checkpoint.

A report is only a claim. The files are hashed, the plan is held against config and weights (and replayed, where the
original is at hand), the certificate is computed again from the weights, and the audit is run again. Each thing that
does not hold is named with its reason; what comes after a failed hash would speak of other files and is not run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..auditing.every_output import OutputError
from ..auditing.fidelity import Fidelity, reference_of
from ..auditing.regimes import Audited, RegimeResult
from ..bounds.arithmetic import MAX_LENGTH, Arithmetic
from ..bounds.findings import Certificate
from ..checkpoint.layouts import LAYOUTS
from ..checkpoint.packing import summary_of
from ..checkpoint.places import local_source, own_name
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..conversion.editing import change_by
from ..conversion.measuring import audited, bounded, compare, errors_of, in_fp32_too, measured_edits, outputs_of_few
from ..conversion.options import FIXED, check_data, read_command
from ..conversion.planning import observe_source, own_length
from ..devices import Device
from ..environment import SCHEMA
from ..errors import UserError
from ..families.known import architectures, padding_entry
from ..families.layout import Layout
from ..families.older import differences
from ..families.other_class import read_as
from ..families.resolve import resolve
from ..progress import Progress, shown_by
from ..quiet import quiet
from ..report import schema
from ..report.build import Decided, kept_bits_of, signals_of, tiers_of
from ..report.page import Result
from ..report.remedies import UNSAFE_BY_REPORT
from ..report.stored import Packed, read_packed
from ..rescaling.edits import edits_of, listed_edits
from ..rescaling.plan import Plan
from ..rescaling.planner import TRAIN_MARGIN_BITS
from ..run import probe
from ..run.agreement import agreed_layout
from ..run.batch import SWEEP, Batch, describe_batches
from ..run.stock import load_config
from ..targets import MARGIN_BITS, TARGETS
from ..verification.claims import check_claims, check_sentences
from ..verification.comparing import Problem, compared
from ..verification.files import beside_weights, check_files, check_foreign, check_tensors, check_unread
from ..verification.keys import How, not_checked
from ..verification.locating import locate, read_recorded
from ..verification.measured import check_inputs, check_regimes
from ..verification.pipelines import check_pipeline
from ..verification.plans import Replayed, check_plan, check_source, replay
from ..verification.proof import check_audit, check_certificate, check_proof, check_tiers
from ..verification.views import check_views
from ..wording import counted

CHECKS = ("files", "plan", "replay", "certificate", "audit", "fidelity", "tiers", "claims", "views")


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
    """Check a converted checkpoint (folder, one file or Hub id) against its report and return what was found.

    original: the source (folder or Hub id) that the recorded plan is replayed on. data: text to audit on besides the
    built-in probe. run_model: False leaves the audit out. subfolder: of the checkpoint in
    the source. endpoint: the Hub's address. device: auto, cpu, cuda, cuda:N
    or mps. ``verdict`` is "safe" where every check holds and the report itself says so (of one file its metadata, which
    list no hashes); ``problems`` names the others, ``as_reported`` says that they are those of an unsafe checkpoint
    whose report is true. Raises UserError for a source that is not a converted checkpoint.
    """
    progress = shown_by(progress)
    check_data(data, run_model=run_model)
    if original is not None:
        local_source(original)  # hashing takes long
    on, name, revision, findings = Device(device, progress), own_name(source), None, Findings()
    if Path(source).is_file():
        subject, files = packed_subject(Path(source)), 1
    else:
        folder, revision, extra = locate(source, subfolder, endpoint, progress)
        name = name if revision is None else str(source)
        report = read_recorded(folder)
        if original is not None and report.finetune is not None:
            raise UserError(f"{source} was finetuned, so no plan leads to it from the original; leave out --original")
        assert report.plan is not None and report.certificate is not None  # ``locating.NEEDED`` asks for them
        subject = Subject(folder, report, report.plan, report.source, report.certificate.max_length)
        files = len(report.output.files)
        with progress.step("Hashing the files") as advance:
            findings.add("files", check_files(folder, report, extra=extra, advance=advance))
    claim, problems = subject.claim, findings.problems
    if not problems:
        origin = None if original is None else open_checkpoint(original, endpoint=endpoint)
        if origin is not None and (other := subject.source.class_in("after")) is not None:
            origin = read_as(origin, other)
        examine(subject, origin, data, findings, run_model=run_model, device=on, progress=progress)
    if subject.packed is None and not problems:
        look_beside(subject, original, findings, alone=subfolder is not None and revision is not None)
    if not claim.safe:
        said_in = schema.REPORT if subject.packed is None else subject.place.name
        problems.append(Problem("report", said_in, "says itself that the checkpoint is unsafe", UNSAFE_BY_REPORT))
    totals = None
    if findings.certificate is not None:
        totals = {key: value for key, value in findings.certificate.to_json().items() if key != "sites"}
    return Result(
        schema.dump(
            schema.Verification(
                schema=SCHEMA,
                verdict="unsafe" if problems else "safe",
                verified=not problems,
                as_reported=not claim.safe and only_what_is_reported(problems, claim),
                source=schema.Source(path=name, revision=revision),
                report=schema.Claim(verdict=claim.verdict, proof=claim.proof, family=claim.family),
                checks=findings.outcome,
                problems=[schema.ProblemEntry(**asdict(problem)) for problem in problems],
                not_checked=findings.unchecked,
                notes=findings.notes,
                files=files,
                target=claim.target,
                certificate=None if totals is None else schema.CertificateEntry.model_validate(totals),
                tiers=findings.tiers,
                padding=findings.padding,
                regimes=schema.regimes_of(findings.regimes),
                edits=findings.edits,
                environment=schema.Environment.model_validate(on.environment()),
            )
        )
    )


def look_beside(subject: Subject, original: str | Path | None, findings: Findings, *, alone: bool) -> None:
    """Check the pipeline that a folder lies in, where there is one; alone: whether nothing else of it is here."""
    place = Path(original) if original is not None and Path(original).is_dir() else None
    if (wrong := check_pipeline(subject.place, subject.claim, place)) is not None:
        findings.add("pipeline", wrong)
    elif alone:
        findings.notes.append(
            "only this folder of the repository was looked at; download the whole to check what else a pipeline needs"
            " changed"
        )


@dataclass(frozen=True)
class Subject:
    """What is verified: the folder or file, what is claimed of it, the plan and source that are recorded, and for how
    many positions its certificate is; packed: of one file, what it says of itself."""

    place: Path
    claim: schema.Report
    plan: Plan
    source: schema.Source
    max_length: int
    packed: Packed | None = None

    def own_eps(self, model_type: object) -> float | None:
        """Return the eps of the tool that is to read it, None where its config is asked."""
        hosted = None if self.packed is None else LAYOUTS[self.packed.layout].hosted(model_type)
        return None if hosted is None else hosted.eps


@dataclass
class Findings:
    """What was found so far: problems, how each check ended, and what was computed again."""

    problems: list[Problem] = field(default_factory=list)
    outcome: dict[str, str] = field(default_factory=lambda: dict.fromkeys(CHECKS, "not run"))
    certificate: Certificate | None = None
    tiers: dict[str, schema.TierEntry] = field(default_factory=dict)
    regimes: Mapping[str, RegimeResult] = field(default_factory=dict)
    padding: int | None = 0
    unchecked: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    edits: int = 0

    def add(self, check: str, problems: list[Problem]) -> None:
        """Note how a check ended."""
        self.outcome[check] = "failed" if problems else "passed"
        self.problems += problems


def examine(
    subject: Subject,
    original: Checkpoint | None,
    data: str | None,
    findings: Findings,
    *,
    run_model: bool,
    device: Device,
    progress: Progress,
) -> None:
    """Hold the plan against config and weights, replay it on the original, and compute certificate, audit and tiers
    again; then hold all else that the report says against these."""
    claim, plan, checkpoint = subject.claim, subject.plan, open_checkpoint(subject.place)
    layout, replayed, again, of_original = agreed_layout(checkpoint), None, None, None
    findings.padding, findings.notes = padding_entry(layout.config), notes_on(checkpoint, layout, subject)
    if subject.packed is not None:
        findings.add("files", check_tensors(subject.place, checkpoint, subject.packed))
    else:
        findings.add("files", check_unread(checkpoint, claim) + check_foreign(checkpoint, layout, claim))
    beside = claim if subject.packed is None else None  # one file lists nothing beside its plan
    findings.add(
        "plan", check_plan(checkpoint, layout, plan, subject.source, beside, subject.own_eps(layout.family.model_type))
    )
    findings.edits = 0 if findings.problems else len(listed_edits(layout, plan))
    if original is not None:
        replayed = replay(original, checkpoint, plan, subject.source, progress)
        of_original = None if replayed.layout is None else (original, replayed.layout)
        findings.unchecked |= replayed.unchecked
        findings.add("replay", replayed.problems + compare_replayed(subject, replayed, original, findings))
    if subject.packed is None:
        findings.certificate, certified = recompute(checkpoint, layout, claim, progress, device)
        findings.add("certificate", check_certificate(findings.certificate, claim))
    else:
        arithmetic, target = Arithmetic(subject.max_length), claim.target or "half"
        findings.certificate, certified = bounded(checkpoint, layout, target, arithmetic, device, progress)
        findings.add("certificate", check_proof(findings.certificate, claim))
    if run_model:
        again = run_again(checkpoint.folder, claim, progress, device, data=data, original=of_original)
        findings.regimes = again.ran.regimes
        problems = check_audit(findings.regimes)
        if subject.packed is None and claim.regimes:
            findings.notes += again.other_text
            if again.same_text:
                problems += check_inputs(claim, again.described())
            entries = schema.regimes_of(again.ran.regimes)
            problems += [] if problems else check_regimes(claim, entries, same_text=again.same_text)
        findings.add("audit", problems)
    layout_before = None if replayed is None or replayed.problems else replayed.layout
    if original is not None and layout_before is not None:  # what is not its output differs anyhow
        if again is not None and claim.regimes and again.same_text:
            findings.add(
                "fidelity", check_fidelity(original, checkpoint, layout_before, claim, plan, again, progress, device)
            )
        elif not claim.regimes and claim.fidelity is not None:
            findings.add("fidelity", check_few(original, checkpoint, layout_before, claim, plan, progress))
    findings.tiers = tiers_of(layout, certified, findings.regimes)
    findings.add("tiers", check_tiers(findings.tiers, certified, claim, ran=run_model))
    if subject.packed is not None:
        findings.add("claims", check_packed(subject, checkpoint.config))
        findings.unchecked |= dict.fromkeys(("environment", "drift_of_eps", "source.path"), How.NEVER.value)
        findings.unchecked |= {} if replayed else {"plan": How.ORIGINAL.value, "weights": How.ORIGINAL.value}
        return
    said = {"family": claim.family, "padding": claim.padding, "older": claim.older}
    true = {"family": layout.family.name, "padding": findings.padding, "older": differences(layout, checkpoint.config)}
    findings.add(
        "claims", check_claims(claim) + compared("claims", said, true) + check_command(claim, checkpoint.config)
    )
    problems, unseen = check_views(checkpoint.folder, claim, checkpoint.config)
    findings.add("views", problems)
    ran, whole = again is not None and bool(claim.regimes), replayed is not None and replayed.source is not None
    same_text = again is None or again.same_text
    known = not_checked(claim, ran=ran, original=whole, same_text=same_text)
    if original is not None and not whole:
        other = "is not compared: the original that was given is not what this was made from"
        known = {key: other if why in (How.ORIGINAL.value, How.BOTH.value) else why for key, why in known.items()}
    if original is None:
        known |= dict.fromkeys(beside_weights(checkpoint.folder), How.ORIGINAL.value)
    elif original.revision is not None:
        known = {key: why for key, why in known.items() if key not in ("source.path", "source.revision")}
    findings.unchecked = known | unseen | findings.unchecked


def notes_on(checkpoint: Checkpoint, layout: Layout, subject: Subject) -> list[str]:
    """Return what limits the claim of a certificate, in sentences: its length, where rows may be longer."""
    longest, own = subject.max_length, own_length(checkpoint.folder, layout.config)
    if longest >= (own or MAX_LENGTH):
        return []
    takes = f"the config has {counted(own, 'position')}" if own else "the model takes rows of any length"
    return [
        f"the certificate is for up to {counted(longest, 'position')} and {takes}: nothing is claimed of longer rows;"
        f" convert the source again with --max-length {own or MAX_LENGTH}"
    ]


def compare_replayed(subject: Subject, replayed: Replayed, original: Checkpoint, findings: Findings) -> list[Problem]:
    """Return where the source and the weights' counts are not what the replay shows."""
    if replayed.source is None or replayed.weights is None:
        return []
    weights = subject.claim.weights if subject.packed is None else subject.packed.weights
    problems, unchecked = check_source(subject.source, replayed.source)
    findings.unchecked |= unchecked
    if original.revision is not None:
        path = str(subject.source.path).partition("@")[0]
        said = {"path": path, "revision": subject.source.revision}
        given = {"path": original.source.partition("@")[0], "revision": original.revision}
        problems += compared("replay", said, given, "source")
    return problems + compared(
        "replay", None if weights is None else schema.dump(weights), schema.dump(replayed.weights), "weights"
    )


@dataclass(frozen=True)
class Repeated:
    """A run of a converted checkpoint again: its inputs and what was said of them, what ran in fp32 as well, and what
    it showed. ``same_text``: whether it ran on what the report says."""

    inputs: list[Batch]
    said: schema.Inputs
    data: str | None
    in_fp32: list[Batch]
    ran: Audited

    @property
    def same_text(self) -> bool:
        """Whether the report's text, or none where it has none, was run."""
        if self.data is None or self.said.data is None:
            return self.data is None and self.said.data is None
        return bool(self.described()["sha256"] == self.said.sha256)

    @property
    def other_text(self) -> list[str]:
        """What there is to say where other text ran, a sentence."""
        how = "no --data" if self.said.data is None else f"--data {self.said.data.name}"
        said = f"the report's figures, fidelity among them, are those with {how}: give the same to compare them"
        return [] if self.same_text else [said]

    def described(self) -> dict[str, Any]:
        """Return what was run as a report says it."""
        return describe_batches(self.inputs, seed=self.said.seed or 0, data=self.data)


def run_again(
    folder: Path,
    report: schema.Report,
    progress: Progress,
    device: Device,
    *,
    data: str | None = None,
    original: tuple[Checkpoint, Layout] | None = None,
) -> Repeated:
    """Return what a converted folder shows on the inputs that its report names, and on ``data``.

    original: with its layout, whose weights choose the ids anew, and with which outputs are to be compared.
    """
    said, config = report.inputs or schema.Inputs(), load_config(folder)
    seed, swept = said.seed or 0, any(entry.kind == SWEEP for entry in said.batches)
    how: dict[str, Any] = {"seed": seed, "sweep": swept}
    with torch.random.fork_rng(devices=[]):
        if original is not None and said.chosen:
            how["opened"] = (original[0], resolve(original[0]))
        else:
            how["chosen"] = probe.usable(said.chosen, config)
        inputs = probe.audit_batches(config, folder, data, **how)
        in_fp32 = [] if original is None or report.plan is None else in_fp32_too(inputs, original[1], report.plan)
        train = report.target == "train"
        ran = audited(open_checkpoint(folder), inputs, in_fp32, device, progress, train=train, seed=seed)
    return Repeated(inputs, said, data, in_fp32, ran)


def check_few(
    original: Checkpoint, checkpoint: Checkpoint, layout: Layout, report: schema.Report, plan: Plan, progress: Progress
) -> list[Problem]:
    """Return where fidelity and drift of what was not audited are not what a few short rows show again."""
    rows = [probe.few_rows(load_config(original.folder))]
    ran, reference = outputs_of_few(checkpoint, rows, progress), reference_of(original, rows)
    problems = close_as_said(report, *compare(original, layout, plan, reference, ran, rows, rows))
    return problems + outputs_as_said(report, errors_of(layout, plan, reference, ran))


def outputs_as_said(report: schema.Report, errors: Mapping[str, OutputError]) -> list[Problem]:
    """Return the outputs whose recorded errors are not those that were measured again."""
    measured = {name: asdict(error) for name, error in errors.items()}
    said = {name: {key: getattr(report.outputs.get(name), key, None) for key in measured[name]} for name in measured}
    return compared("fidelity", said, measured, "outputs")


def close_as_said(report: schema.Report, close: Fidelity, plan: Plan) -> list[Problem]:
    """Return where recorded fidelity and drift are not those that were measured again."""
    again = schema.dump(schema.FidelityEntry.model_validate(close.to_json()))
    problems = compared("fidelity", schema.dump(report).get("fidelity"), again, "fidelity")
    if plan.drift is not None and report.plan is not None and report.plan.drift is not None:
        problems += compared("fidelity", report.plan.drift.model_dump(), plan.drift.model_dump(), "plan.drift")
    return problems


def check_fidelity(
    original: Checkpoint,
    checkpoint: Checkpoint,
    layout: Layout,
    report: schema.Report,
    plan: Plan,
    again: Repeated,
    progress: Progress,
    device: Device,
) -> list[Problem]:
    """Return where fidelity, signals, precision, drift and the cost of edits are not what running the original again
    shows."""
    ranges, reference = observe_source(original, again.inputs, progress, device)
    edited = None
    if plan.centred_keys:
        change = change_by(original, layout, edits_of(layout, plan))
        edited, _ = observe_source(original, again.inputs, progress, device, change)
    with progress.step("Comparing fp16 and bf16 with the fp32 source"):
        edits = measured_edits(checkpoint, Decided(layout, plan, report.target or "half"), again.in_fp32)
        close, drifted = compare(original, layout, plan, reference, again.ran, again.inputs, again.in_fp32)
    said, problems = schema.dump(report), close_as_said(report, close, drifted)
    problems += outputs_as_said(report, errors_of(layout, plan, reference, again.ran))
    said_of, found_of = ({edit.site: {"measured": edit.measured} for edit in each} for each in (report.inexact, edits))
    problems += compared("fidelity", said_of, found_of, "inexact")
    described: dict[str, Sequence[Any]] = {
        "signals": signals_of(layout, plan, ranges, edited),
        "precision": kept_bits_of(layout, plan, ranges),
    }
    for key, entries in described.items():
        if said.get(key):  # not where a stored plan was replayed without observing anything
            problems += compared("fidelity", said[key], [schema.dump(entry) for entry in entries], key)
    return problems


def check_command(report: schema.Report, config: Mapping[str, Any], layout: str | None = None) -> list[Problem]:
    """Return where the command that is said to do the same again is no command of this program, or would do another
    thing. config: what was written. layout: of one file."""
    line, options = report.command or "", None
    if report.finetune is not None:
        words = shlex.split(line) if line.count("'") % 2 == 0 and '"' not in line else []
        if words[:2] == ["bf16-to-fp16", "finetune"] and shlex.join(words) == line:
            return []
    else:
        options = read_command(line)
    if options is None:
        return [Problem("claims", "command", "is no command that convert records")]
    (source, _), given = options
    said, inside = report.inputs or schema.Inputs(), report.source.subfolder
    path = report.source.path or ""
    wanted: dict[str, Any] = {
        "source": path.removesuffix(f"/{inside}") if inside else path,
        "--target": given.get("--target") and report.target,
        "--layout": layout,
        "--subfolder": inside,
        "--as": given.get("--as") and next(iter(architectures(config)), None),
    }
    if layout is None:
        assert report.certificate is not None  # ``locating.NEEDED`` asks for it
        run, length = bool(report.regimes), report.certificate.max_length
        wanted |= {
            "--no-audit": None if run else "",
            "--seed": str(said.seed) if said.seed else None,
            "--max-length": None if length == MAX_LENGTH else str(length),
            "--max-kl": None if report.max_kl is None else f"{report.max_kl:g}",
        }
        if report.plan is not None and report.plan.eps is not None and "--plan" not in given:
            wanted["--eps"] = FIXED if report.plan.eps_held else None
        margin = report.plan.margin_bits if report.plan is not None else None
        if run and "--plan" not in given and margin is not None:
            # Where gains would round to it, no further margin is kept for training.
            further = (TRAIN_MARGIN_BITS, 0.0) if report.target == "train" else (0.0,)
            asked = [None if margin - bits == MARGIN_BITS else f"{margin - bits:g}" for bits in further]
            wanted["--margin"] = given.get("--margin") if given.get("--margin") in asked else asked[0]
        if run or "--data" in given:
            wanted["--data"] = said.data and given.get("--data") and said.data.name
    recorded = {key: source if key == "source" else given.get(key) for key in wanted}
    if "--data" in wanted and said.data is not None and "--data" not in given:
        return [Problem("claims", "command", "gives no --data, and the report names some")]
    return compared("claims", recorded, wanted, "command")


def check_packed(subject: Subject, config: Mapping[str, Any]) -> list[Problem]:
    """Return where what one file says of itself is not what its plan and its other claims give; config: its own."""
    inside, said = subject.packed, summary_of(subject.place)
    assert inside is not None and said is not None  # it was opened as such
    plan, source = inside.plan, schema.dump(inside.source)
    wanted = {
        "layout": inside.layout,
        "residual_exponent": plan.residual_exponent,
        "eps": plan.eps,
        "source": {key: source.get(key) for key in ("path", "revision", "sha256")},
    }
    claim = subject.claim.model_copy(update={"command": said["command"], "source": inside.source})
    problems = compared("claims", {key: said.get(key) for key in wanted}, wanted)
    return problems + check_sentences(claim) + check_command(claim, config, inside.layout)


def packed_subject(file: Path) -> Subject:
    """Return what one file that ``convert --layout`` wrote claims in its metadata, which hold no hash and no bounds.

    Raises UserError where no conversion wrote it, or its metadata are damaged.
    """
    inside, said = read_packed(file), summary_of(file)
    assert said is not None  # it was opened as such
    try:
        known = {key: said[key] for key in ("verdict", "proof", "target", "tiers")}
        claim, longest = schema.Report.model_validate({"schema": SCHEMA} | known), int(said["max_length"])
        if claim.target not in TARGETS or longest < 1:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: its metadata are damaged; convert the source again") from error
    claim = claim.model_copy(update={"family": inside.plan.family})
    return Subject(file, claim, inside.plan, inside.source, longest, inside)


def only_what_is_reported(problems: Sequence[Problem], report: schema.Report) -> bool:
    """Return whether the problems of an unsafe checkpoint are those that its report names itself: the verdict, and
    sites that break."""
    broken = {entry.signal for entry in report.unsafe if entry.kind == "broke"}
    return all(each.check == "report" or (each.check == "audit" and each.name in broken) for each in problems)


def recompute(
    checkpoint: Checkpoint, layout: Layout, report: schema.Report, progress: Progress, device: Device
) -> tuple[Certificate, dict[str, bool]]:
    """Return the certificate of the files, for the same target, length and partial sums as the recorded one, and by
    tier whether its own holds."""
    recorded, target = report.certificate, report.target or "half"
    if recorded is None or target not in TARGETS or recorded.max_length < 1 or recorded.splits < 1:
        raise UserError(f"{schema.REPORT}: its certificate names no target and length; convert the source again")
    arithmetic = Arithmetic(recorded.max_length, splits=recorded.splits)
    return bounded(checkpoint, layout, target, arithmetic, device, progress)
