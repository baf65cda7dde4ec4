"""The command ``undo``: bring a converted folder's weights back to the source's scale, by the inverse of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.folder import carry_over, copy
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.recorded import CONVERTED_KEY
from ..checkpoint.shards import Write
from ..checkpoint.sources import written_folder
from ..checkpoint.staging import check_out, staged
from ..checkpoint.writer import Written, write_fp16
from ..errors import UserError
from ..families.configs import config_value, positive, with_value, without_value
from ..families.layout import Layout
from ..families.other_class import names_under
from ..families.resolve import resolve
from ..json_text import write_json
from ..progress import Progress, progress_of
from ..report.schema import Report, Source
from ..report.stored import originals, read_plan, read_written
from ..rescaling.apply import set_dtype, writes
from ..rescaling.edits import edited, listed_edits, without_edits
from ..rescaling.plan import Plan, composed, inverse, mark_of
from ..wording import listed


def undo(
    folder: str | Path,
    out: str | Path,
    *,
    plan: str | Path | None = None,
    force: bool = False,
    progress: Progress | bool | None = None,
) -> Path:
    """Write a converted folder's weights to ``out`` at the source's scale, and return ``out``.

    plan: the converted folder that ``folder`` was trained from, or its report; only if your own script trained
    ``folder``. The weights are then written in fp32, or in bf16 where that is exact. Edits and centred biases stay, and
    a message names them.

    Without ``plan``, weights that the conversion did not round come back bit for bit. Only the sign of a 0 can differ,
    where a rescaled gain is stored as gain − 1. Tensors that the conversion added are left out, those that it replaced
    come from the report, and those that it dropped stay missing. Raises UserError if the folder has no plan."""
    progress, out = progress_of(progress), Path(out)
    if plan is not None:
        return undo_trained(written_folder(folder), out, Path(plan), force=force, progress=progress)
    folder = written_folder(folder)
    check_out(out, folder, force=force)
    report, checkpoint = read_written(folder), open_checkpoint(folder)
    origin = report.source
    before = class_before(origin)
    if before is not None and not checkpoint.stored_names:  # with images, names in files do not depend on the class
        names = names_under(checkpoint.config, checkpoint.tensors, before)
        checkpoint = replace(checkpoint, stored_names={n: other for n, other in names.items() if n != other})
    with staged(out, force=force) as work:
        written = write_weights(checkpoint, report, work, progress)
        listing = {entry.name: entry.sha256 for entry in report.output.files}
        for name, digest in written.source_sha256.items():
            if listing.get(name) != digest:
                raise UserError(f"{folder / name} is not what convert wrote (SHA-256); fetch or convert it again")
        write_beside(checkpoint, report, work)
    return out


def undo_trained(folder: Path, out: Path, recorded: Path, *, force: bool, progress: Progress) -> Path:
    check_out(out, folder, recorded, force=force)
    report, checkpoint = read_plan(recorded), open_checkpoint(folder)
    plan = report.of_plan
    layout = resolve(checkpoint)
    if checkpoint.config.get(CONVERTED_KEY) != mark_of(plan) or layout.eps != (plan.eps or layout.eps):
        raise UserError(
            f"{folder} was not trained from the conversion in {recorded}, or its scale was changed since; give the"
            " converted folder that it was trained from"
        )
    say_what_stays(layout, plan, progress)
    whole, back = with_start(layout, without_edits(layout, plan), report.start, progress), []
    for each in writes(checkpoint, layout, inverse(whole)):
        if each.source is not None:
            # A gain that is stored less 1, or was corrected, would be rounded once more in bf16.
            exact = checkpoint.tensors[each.source].dtype == "BF16" and not each.offset and each.gain == 1
            back.append(each.as_dtype("BF16" if exact else "F32"))
    config = {key: value for key, value in checkpoint.config.items() if key != CONVERTED_KEY}
    changes = report.source.config_changes
    if (mark := changes.get(CONVERTED_KEY, {}).get("before")) is not None:  # of an earlier conversion
        config[CONVERTED_KEY] = mark
    for key in () if plan.eps_held else layout.family.eps_keys:
        config = with_value(config, key, layout.eps * 4.0**-whole.residual_exponent)
    set_dtype(config, "bfloat16" if all(each.dtype == torch.bfloat16 for each in back) else "float32")
    with staged(out, force=force) as work:
        written = write(checkpoint, back, work, progress)
        if broken := next((name for name, stats in written.stats.items() if stats.nonfinite), None):
            raise UserError(f"{folder}: tensor {broken} holds inf or NaN; take a state from before the loss diverged")
        write_json(work / "config.json", config)
        carry_over(folder, work, back=True)
        if (folder / "README.md").is_file() and not (work / "README.md").exists():
            copy(folder / "README.md", work / "README.md", folder)
    return out


def say_what_stays(layout: Layout, plan: Plan, progress: Progress) -> None:
    """Print the edits and the centred biases of ``plan``, which no power of two can undo."""
    if kept := [edit.site for edit in listed_edits(layout, plan).values()] + plan.centred_keys:
        progress.say(f"These edits stay, since undo cannot remove them: {listed(kept)}")


def with_start(layout: Layout, plan: Plan, start: Plan | None, progress: Progress) -> Plan:
    """Return one plan that does what ``start`` and then ``plan`` do, except for the edits of ``start``. A message lists
    these edits. start: the plan applied before training, if any."""
    if start is None:
        return plan
    say_what_stays(layout, start, progress)
    return composed(without_edits(layout, start), plan)


def class_before(origin: Source) -> str | None:
    """Return the source's class; None if it is unchanged, or if dropped tensors keep it from being restored."""
    return None if origin.dropped else origin.class_in("before")


def write_weights(checkpoint: Checkpoint, report: Report, work: Path, progress: Progress) -> Written:
    """Undo the conversion's plan and write the resulting weights to ``work``. If the converted model came from a
    finetune, also undo the plan that rescaled the model before training."""
    plan, origin, start = report.of_plan, report.source, report.start
    assert origin.dtype is not None  # ``read_written`` checks it
    stored = {"F64": "F32"}  # fp32 holds every value that came through fp16
    layout = resolve(checkpoint)
    whole, before = with_start(layout, plan, start, progress), originals(layout, plan, origin)
    if start is not None:
        to_original = inverse(without_edits(layout, start))
        before = {name: edited(layout.tensors[name], t, to_original) for name, t in before.items()}
    replaced = {name: Write(name, tuple(t.shape), None, t) for name, t in before.items()}
    back = [
        replaced.get(each.name, each).as_dtype(stored.get(dtype := origin.dtypes.get(each.name, origin.dtype), dtype))
        for each in writes(checkpoint, layout, inverse(whole))
        if each.name not in origin.made
    ]
    return write(checkpoint, back, work, progress)


def write(checkpoint: Checkpoint, back: list[Write], work: Path, progress: Progress) -> Written:
    with progress.step(f"Writing {len(back)} tensors") as advance:
        written = write_fp16(checkpoint, back, work, advance=advance)
    checkpoint.check_unchanged()
    return written


def write_beside(checkpoint: Checkpoint, report: Report, work: Path) -> None:
    config, start = config_before(checkpoint.config, report.source), report.start
    if start is not None and not start.eps_held:
        family = resolve(checkpoint).family
        for key in family.eps_keys:
            eps = positive(key, config_value(family, config, key), "a small positive number")
            config = with_value(config, key, eps * 4.0**-start.residual_exponent)
    write_json(work / "config.json", config)
    carry_over(checkpoint.folder, work, back=True)


def config_before(config: Mapping[str, Any], origin: Source) -> dict[str, Any]:
    before = dict(config)
    for key, sides in origin.config_changes.items():
        if key == "architectures" and class_before(origin) is None:  # the head was dropped
            continue
        before = with_value(before, key, sides["before"]) if "before" in sides else without_value(before, key)
    return before
