"""``undo``: the source's weights back from a converted folder, by the inverse of its recorded plan."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.folder import carry_over, write_json
from ..checkpoint.places import written_folder
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.staging import check_out, staged
from ..checkpoint.writer import write_fp16
from ..errors import UserError
from ..families.resolve import resolve
from ..progress import Progress
from ..report.schema import REPORT
from ..report.stored import check_written_files, read_origin, read_plan
from ..rescaling.apply import writes
from ..rescaling.plan import inverse


def undo(folder: str | Path, out: str | Path, *, force: bool = False, progress: Progress | None = None) -> Path:
    """Write the source's weights back from a converted folder by the inverse of its recorded plan, and return
    ``out``.

    Bit for bit where the conversion was lossless. Tensors that the conversion made (positions, a separated head)
    are left out; those that it dropped as copies are not restored. Nothing is claimed of what the weights compute, so
    whether stock code of the installed version agrees is not asked. Raises UserError where the folder has no plan.
    """
    progress = progress or Progress(quiet=True)
    folder, out = written_folder(folder), Path(out)
    if not (folder / REPORT).is_file():
        raise UserError(f"{folder}: has no {REPORT}, so convert did not write it; give a converted folder")
    check_out(out, folder, force=force)
    plan = read_plan(folder)
    origin = read_origin(folder)
    assert origin.dtype is not None  # read_origin
    checkpoint = open_checkpoint(folder)
    layout = resolve(checkpoint)
    stored = {"F64": "F32"}  # which holds all that came through fp16
    back = [
        write.as_dtype(stored.get(dtype := origin.dtypes.get(write.name, origin.dtype), dtype))
        for write in writes(layout, inverse(plan))
        if write.name not in origin.made
    ]
    config = dict(checkpoint.config)
    for key, sides in origin.config_changes.items():
        config.pop(key, None)
        if "before" in sides:
            config[key] = sides["before"]
    with staged(out, force=force) as work:
        with progress.step(f"Writing {len(back)} tensors") as advance:
            written = write_fp16(checkpoint, back, work, advance=advance)
        checkpoint.check_unchanged()
        check_written_files(folder, written.source_sha256)
        write_json(work / "config.json", config)
        carry_over(folder, work, back=True)
    return out
