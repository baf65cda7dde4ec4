"""The main job: a bf16 checkpoint in, an exactly rescaled, certified and audited fp16 checkpoint out.

One direction, no going back: open and classify the source, bound its signals for every input and observe what they
reach in fp32, plan, stream the rescaled weights to files, bound the written weights, then load what was written with
stock code and measure it in every regime and against the source. Nothing appears at the output path before all of
that is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bounds.arithmetic import MAX_LENGTH
from ..checkpoint.folder import is_converted, records, write_json
from ..checkpoint.reader import Checkpoint
from ..checkpoint.staging import staged
from ..conversion.measuring import attack_unproven, fidelity_to_original, measure
from ..conversion.options import AUTO, Destination, Options, Provenance
from ..conversion.planning import decide, open_source, replayed
from ..conversion.rewriting import rewrite
from ..environment import SCHEMA
from ..progress import Progress
from ..quiet import quiet
from ..report import build as reports
from ..report.card import write_card
from ..report.page import write_page
from ..report.schema import PAGE, REPORT, Report, dump
from ..report.stored import read_plan_and_target
from ..rescaling.apply import writes
from ..rescaling.plan import Plan, describe_plan
from ..rescaling.planner import MARGIN_BITS, Planned
from ..run import probe

if TYPE_CHECKING:
    import torch


WHOLE = 1.5
"""Seconds of a conversion for each up to its plan: the audit takes somewhat longer than the observation that it
repeats in fp16. Measured: 1.3 for both demo checkpoints, 1.6 for a T5 of 60 million weights."""


@dataclass(frozen=True)
class Conversion:
    """What ``convert`` did: the report (its keys are listed in docs/report.md), the folder written (None for a dry
    run), the plan; of a dry run, the bytes of the weights to be written, and the seconds that the whole will take
    (None where nothing was run)."""

    report: Mapping[str, Any]
    out: Path | None
    planned: Planned | None
    plan: Plan
    nbytes: int | None = None
    seconds: float | None = None

    @property
    def safe(self) -> bool:
        """Whether the verdict is safe."""
        return self.report.get("verdict") == "safe"

    def __repr__(self) -> str:
        """Return the verdict and the folder; the report alone would fill screens."""
        verdict, proof = self.report.get("verdict", "planned"), self.report.get("proof", "nothing written")
        return f"<Conversion: {verdict}, {proof}, out={str(self.out)!r}>"


def convert(
    source: str | Path,
    out: str | Path,
    *,
    target: str = AUTO,
    data: str | None = None,
    dry_run: bool = False,
    run_model: bool = True,
    subfolder: str | None = None,
    plan: str | Path | None = None,
    force: bool = False,
    margin_bits: float = MARGIN_BITS,
    max_length: int = MAX_LENGTH,
    max_shard_size: int | None = None,
    workers: int = 1,
    seed: int = 0,
    sweep: bool = False,
    device: str | torch.device = "auto",
    config: str | Path | None = None,
    endpoint: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert ``source`` (folder, file of weights or Hub id) to an fp16 checkpoint at ``out`` and return what was done
    and measured.

    Its many parameters are the command's options, as keywords; ``Options`` says what each of them means. dry_run: plan
    only, write nothing. force: replace an existing ``out``. endpoint: the Hub's address, by default the environment's.
    Raises UserError for input that cannot be used; ``out`` then does not exist.
    """
    options = Options(
        target, data, run_model, subfolder, plan, margin_bits, max_length, max_shard_size, workers, seed, sweep, device,
        config=config,
    )  # fmt: skip
    place = Destination(Path(out), force=force, dry_run=dry_run)
    return convert_by(options, source, place, endpoint=endpoint, progress=progress)


@quiet()
def convert_by(
    options: Options,
    source: str | Path,
    place: Destination,
    *,
    provenance: Provenance | None = None,
    endpoint: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert as ``convert`` does, by ``options``; one step after the other, each from what the last one found."""
    progress, begun = progress or Progress(quiet=True), time.monotonic()
    options.check()
    place.check(Path(source) if Path(source).is_dir() else None)
    asked = None if options.target == AUTO else options.target
    stored = None if options.plan is None else read_plan_and_target(Path(options.plan), asked)
    opened = open_source(source, options, place, endpoint, progress)
    if is_converted(opened.checkpoint.folder):
        progress.say(
            f"{opened.checkpoint.name} is a converted checkpoint: bf16-to-fp16 verify checks it as it is; for another"
            " target convert what it was made from"
        )
    decided = replayed(opened, *stored) if stored is not None else decide(opened, options, progress)
    if place.dry_run:
        plan = Plan.model_validate(describe_plan(decided.plan))
        signals = reports.signals_of(decided.layout, decided.plan, decided.ranges) if decided.ranges else []
        summary = Report(schema=SCHEMA, family=decided.layout.family.name, plan=plan, signals=signals)
        nbytes = sum(math.prod(w.shape) * w.dtype.itemsize for w in writes(decided.layout, decided.plan))
        seconds = WHOLE * (time.monotonic() - begun) if decided.ranges else None
        return Conversion(dump(summary), None, decided.planned, decided.plan, nbytes, seconds)
    inputs = probe.describe_batches(opened.inputs, seed=options.seed, data=options.data) if options.run_model else None
    with staged(place.out, force=place.force) as work:
        rewritten = rewrite(opened, decided, work, options, progress)
        measured = measure(opened, decided, work, options, progress)
        if provenance is not None:
            measured = attack_unproven(work, measured, provenance.attack_steps, opened, progress)
        report = reports.build(
            opened.checkpoint,
            decided,
            rewritten,
            measured,
            command=provenance.command if provenance else options.command(source, place.out),
            inputs=inputs,
            others=records(work, {file.name for file in rewritten.written.files}),
        )
        if provenance is not None:
            with progress.step("Comparing fp16 with the original"):
                kept = fidelity_to_original(provenance.original, measured.half, opened.inputs)
            report = provenance.judge(reports.descended(report, provenance.lineage, kept))
        opened.checkpoint.check_unchanged()
        report = write_report(work, report, opened.checkpoint)
    return Conversion(dump(report), place.out, decided.planned, measured.plan)


def write_report(work: Path, report: Report, checkpoint: Checkpoint) -> Report:
    """Write the page, the card and the report itself, and return it with the other two in its list of files."""
    write_page(work / PAGE, report)
    write_card(work / "README.md", checkpoint, report)
    # Made from the report, so they can only be recorded in it afterwards.
    report = reports.listing(report, records(work, {file.name for file in report.output.files}))
    write_json(work / REPORT, dump(report))
    return report
