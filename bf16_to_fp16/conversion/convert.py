"""The command ``convert``: make a rescaled fp16 checkpoint and its report from a bf16 checkpoint. The output appears at
``out`` only after the last step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint.contents import WEIGHTS, is_converted
from ..checkpoint.files import check_free_space, read_json, sha256_of
from ..checkpoint.folder import carry_over, converted_already, has_tokenizer, records, tokenizer_beside
from ..checkpoint.naming import FOLDER_LAYOUT, LAYOUTS, SPIECE_FILE
from ..checkpoint.packing import check_out_file, pack, put_file_in_place, tokenizer_inside
from ..checkpoint.reader import Checkpoint
from ..checkpoint.recorded import summary_of
from ..checkpoint.sources import own_name, shown_in_a_command
from ..checkpoint.staging import scratch, staged
from ..checkpoint.writer import Written, write_fp16
from ..environment import SCHEMA
from ..errors import UserError
from ..families.resolve import resolve
from ..json_text import as_json, write_json
from ..measuring.batch import describe_batches
from ..measuring.fidelity import fidelity, output_errors, reference_of
from ..progress import Progress, progress_of
from ..quiet import quiet
from ..report import build as reports
from ..report import remedies
from ..report.card import write_card
from ..report.page import write_page
from ..report.schema import CARD, PAGE, REPORT, FileEntry, Output, Report, read
from ..report.steps import Decided, Rewritten
from ..report.stored import read_plan
from ..rescaling.apply import edited_config, writes
from ..rescaling.edits import listed_edits
from ..rescaling.exponents import output_factors
from ..rescaling.plan import Plan, describe_plan
from ..rescaling.planner import Planned
from ..results import dump
from ..targets import AUTO
from ..wording import listed
from .evidence import measure
from .options import FIXED, Destination, Options, Provenance
from .planning import Opened, decide, open_source, replayed


@dataclass(frozen=True)
class Conversion:
    """The result of ``convert``. ``report``: explained in docs/report.md. ``planned``: what the planner returned; None
    for a replayed plan. ``nbytes``: the size of the weights, after a dry run. ``next``: the next command that the
    report names, with full paths so that it runs."""

    report: Mapping[str, Any] = field(repr=False)
    out: Path | None
    planned: Planned | None = field(repr=False)
    plan: Plan = field(repr=False)
    nbytes: int | None = None
    notes: tuple[str, ...] = ()
    next: str = ""

    @property
    def safe(self) -> bool:
        return self.report.get("verdict") == "safe"


def convert(
    source: str | Path,
    out: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Conversion:
    """Convert ``source`` (a folder, a file of weights or a Hub id) to an fp16 checkpoint at ``out``; return the result.

    options: the fields of ``Options``. dry_run: make the plan and write nothing. force: replace an ``out`` that this
    program wrote. Raises UserError for unusable input; ``out`` is then not written."""
    place = Destination(Path(out), force=force, dry_run=dry_run)
    return convert_by(Options(**options), source, place, progress=progress)


@quiet()
def convert_by(
    options: Options,
    source: str | Path,
    place: Destination,
    *,
    provenance: Provenance | None = None,
    progress: Progress | bool | None = None,
) -> Conversion:
    options.check()
    if options.layout == FOLDER_LAYOUT or place.dry_run:
        return convert_to_folder(options, source, place, progress_of(progress), provenance)
    return convert_to_file(options, source, place, progress_of(progress))


def convert_to_folder(
    options: Options, source: str | Path, place: Destination, progress: Progress, provenance: Provenance | None = None
) -> Conversion:
    place.check(source)
    asked = None if options.target == AUTO else options.target
    stored = None if options.plan is None else read_plan(Path(options.plan), asked)
    opened = open_source(source, options, place, progress)
    check_unconverted(opened.checkpoint)
    if not place.dry_run:  # fails before anything is computed
        nbytes = sum(2 * math.prod(tensor.shape) for tensor in opened.layout.tensors.values())
        copies = 1 if options.layout == FOLDER_LAYOUT else 2  # a file is packed from a folder
        check_free_space(place.out, copies * nbytes)
    if stored is None:
        decided = decide(opened, options, progress)
    else:
        decided = replayed(opened, stored.of_plan, stored.target or asked or "half", options)
    opened = opened.with_edits_of(decided)
    if place.dry_run:
        return dry_run(opened, decided)
    inputs = describe_batches(opened.inputs, seed=0, data=options.data) if options.run_model else None
    with staged(place.out, force=place.force) as work:
        moved = provenance is not None and provenance.lineage.finetune.start is not None
        rewritten = rewrite(opened, decided, work, options, progress, moved=moved)
        measured = measure(opened, decided, work, options, progress)
        unproven = [site.name for site in measured.certificate.sites if not site.holds]
        if provenance is not None and unproven:
            measured = replace(measured, attack=provenance.search(work, unproven, opened.device))
        report = reports.build(
            opened.checkpoint,
            decided,
            rewritten,
            measured,
            command=provenance.command if provenance else options.command(source, place.out),
            inputs=inputs,
            others=records(work, {file.name for file in rewritten.written.files}),
            max_kl=options.max_kl,
        )
        if provenance is not None:
            with progress.step("Comparing fp16 with the original"):
                original = reference_of(provenance.original, opened.inputs)
                probabilities = resolve(provenance.original).gives_probabilities
                kept = fidelity(original.fp32, original.bf16, measured.half, probabilities=probabilities)
            report = provenance.judge(reports.descended(report, provenance.lineage, kept))
        elif not report.safe:
            report = report.model_copy(
                update={"next": next_of(options, report, shown_in_a_command(source), place.out.name)}
            )
        opened.checkpoint.check_unchanged()
        report = write_report(work, report)
    then = next_of(options, report, str(source), str(place.out)) if report.next else ""
    return Conversion(dump(report), place.out, decided.planned, measured.plan, next=then)


def dry_run(opened: Opened, decided: Decided) -> Conversion:
    layout, plan = decided.layout, decided.plan
    edits = list(listed_edits(layout, plan, decided.predicted).values())
    more: dict[str, Any] = {"inexact": edits} if edits else {}
    more |= {"outputs": output_errors(output_factors(layout, plan), (), (), ()), "signals": decided.signals}
    described = Plan.model_validate(describe_plan(plan))
    report = Report(schema=SCHEMA, family=layout.family.name, plan=described, **more)
    nbytes = sum(math.prod(write.shape) * write.dtype.itemsize for write in writes(opened.checkpoint, layout, plan))
    return Conversion(dump(report), None, decided.planned, plan, nbytes)


def rewrite(
    opened: Opened, decided: Decided, work: Path, options: Options, progress: Progress, *, moved: bool = False
) -> Rewritten:
    checkpoint, layout = opened.checkpoint, decided.layout
    with progress.step(f"Writing {len(layout.tensors)} tensors") as advance:
        written = write_fp16(
            checkpoint,
            writes(checkpoint, layout, decided.plan),
            work,
            one_file=options.layout != FOLDER_LAYOUT,
            advance=advance,
        )
    check_finite(written)
    write_json(work / "config.json", edited_config(layout, decided.plan, moved=moved))
    carried, left_out = carry_over(
        checkpoint.home, work, tokenizer=tokenizer_beside(checkpoint.home, options.subfolder)
    )
    if options.layout == FOLDER_LAYOUT and not has_tokenizer(work):
        progress.say(
            f"{checkpoint.name} has no tokenizer, so the output has none; put one beside the source and convert again"
        )
    return Rewritten(written, carried, left_out)


def check_finite(written: Written) -> None:
    for name, stats in written.stats.items():
        if stats.nonfinite:
            raise UserError(
                f"tensor {name}: {stats.nonfinite} of {stats.elements} weights are inf, NaN, or over 65504 under this"
                " plan; use another revision of the checkpoint, repair the tensor, or leave out --plan"
            )


def next_of(options: Options, report: Report, source: str, out: str) -> str:
    if report.short:
        return remedies.IN_PYTORCH
    if alone := remedies.tower_alone(report.family, report.regimes):
        return alone
    steps, target = list[str](), report.target
    if options.plan is None:
        target, stream = options.target, options.stream is not None
        holding = {"--exact": options.exact, "--no-audit": not options.run_model, "--stream": stream}
        if flags := [flag for flag, given in (holding | {"--eps fixed": options.eps == FIXED}).items() if given]:
            steps.append(f"leave out {listed(flags)}, so that convert can try more plans")
    if options.plan is not None or not options.exact:
        steps.append(remedies.finetuning_of(source, f"{out}-finetuned", report.regimes, target, options.subfolder))
    return "; ".join(steps)


def convert_to_file(options: Options, source: str | Path, place: Destination, progress: Progress) -> Conversion:
    """Convert to a temporary folder beside ``place.out``, and pack that folder into one file. The disk must hold the
    weights twice."""
    check_out_file(place.out, Path(source), force=place.force)
    layout = LAYOUTS[options.layout]
    with scratch(place.out) as work:
        folder, file = work / place.out.name, work / "packed"
        done = convert_to_folder(options, source, Destination(folder), progress)
        report, plan = read(Report, done.report), done.plan
        summary = {
            "layout": options.layout,
            **{key: done.report.get(key) for key in ("verdict", "proof", "target", "tiers", "command", "environment")},
            "source": {key: done.report["source"].get(key) for key in ("path", "revision", "sha256")},
            "max_length": options.max_length,
            "residual_exponent": plan.residual_exponent,
            "eps": plan.eps,
            "drift_of_eps": None if plan.drift is None else plan.drift.measured_kl,
            "config": read_json(folder / "config.json", "config"),
        }
        with progress.step(f"Packing the weights into one file for --layout {options.layout}"):
            tokenizer = tokenizer_inside(Path(source), folder, layout.naming)
            pack(folder / WEIGHTS, file, layout.naming, summary, tokenizer)
            written = {"name": place.out.name, "nbytes": file.stat().st_size, "sha256": sha256_of(file)}
            put_file_in_place(file, place.out, force=place.force)
        left_out = tokenizer is None and Path(source).is_file() and (folder / SPIECE_FILE).is_file()
    notes = []
    if layout.eps is None and plan.eps is not None:
        notes.append(f"to be loaded with a norm eps of {plan.eps!r} in its config")
    if left_out:
        notes.append(f"the tokenizer inside {own_name(source)} is left out: {layout.naming.title} has no place for it")
    then = next_of(options, report, str(source), str(place.out)) if report.next else ""
    report_of_file = {**done.report, "output": {"files": [written]}}
    return replace(done, report=report_of_file, out=place.out, notes=tuple(notes), next=then)


def check_unconverted(checkpoint: Checkpoint) -> None:
    home, file = checkpoint.home, checkpoint.weight_files[0]
    if file.is_relative_to(home) and is_converted(home):
        raise converted_already(home)
    if not file.is_relative_to(home) and summary_of(file) is not None:
        raise converted_already(file)


def write_report(work: Path, report: Report) -> Report:
    """Write the HTML page, the model card and the report to ``work``; return the report, which lists page and card."""
    # Read back as from the file, so that anyone can make page and card again from it.
    stored = read(Report, json.loads(as_json(dump(report))))
    write_page(work / PAGE, stored)
    write_card(work / CARD, stored, read_json(work / "config.json", "config"))
    # Page and card are made from the report, so only now can it list them.
    added = [FileEntry.model_validate(record) for record in records(work, {file.name for file in report.output.files})]
    report = report.model_copy(update={"output": Output(files=[*report.output.files, *added])})
    write_json(work / REPORT, dump(report))
    return report
