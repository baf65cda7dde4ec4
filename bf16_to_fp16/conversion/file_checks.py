"""Check a folder's files against its report: hashes, missing files, and weights that a loader may read instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoint.contents import INDEX, side_modules
from ..checkpoint.files import sha256_of
from ..checkpoint.folder import TEMPLATES, is_code, is_weights
from ..checkpoint.reader import Checkpoint
from ..checkpoint.sources import contained
from ..families.layout import Layout
from ..report.remedies import REMOVE
from ..report.schema import REPORT, Report
from ..wording import counted

UNLISTED = "is not in the report, so nothing is known of it"


def present_files(folder: Path) -> list[str]:
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return sorted(name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts))


def check_hashes(folder: Path, report: Report, *, advance: Any = None) -> Iterator[tuple[str, ...]]:
    """Yield (name, reason) for each file that the report lists and that is missing or changed. Files that it does not
    list follow as (name, reason, remedy). advance: called with the bytes done and the total."""
    listed = {entry.name: entry for entry in report.output.files}
    if not any(name.endswith(".safetensors") for name in listed) or "config.json" not in listed:
        yield REPORT, "lists no weights or no config.json"
        return
    total, done = sum(entry.nbytes or 0 for entry in listed.values()), 0
    for name, entry in listed.items():
        path = contained(folder, name)
        if not path.is_file():
            yield name, "is missing"
        elif (digest := sha256_of(path)) != entry.sha256:
            hashes = f"its SHA-256 is {digest[:12]}…, not {str(entry.sha256)[:12]}…"
            yield name, f"was changed, damaged or cut short: {hashes}"
        done += entry.nbytes or 0
        if advance is not None:
            advance(done, total)
    for name in sorted({*present_files(folder)} - {REPORT, *listed}):
        yield name, UNLISTED, REMOVE


def check_foreign(checkpoint: Checkpoint, layout: Layout, report: Report) -> Iterator[tuple[str, ...]]:
    """Yield (name, reason) for each file that the report lists but ``convert`` never writes: code, and files in unknown
    folders. One (name, reason, remedy) follows for all tensors that the model's class does not use."""
    folders = {*side_modules(checkpoint.folder), TEMPLATES}
    for name in sorted(entry.name for entry in report.output.files):
        first, _, below = name.partition("/")
        if is_code(name):
            yield name, "is code, and convert writes no code"
        elif below and first not in folders:
            yield name, "lies in a folder that convert does not write"
    if layout.dropped:
        first, *others = sorted(layout.dropped)
        more = f" (and {counted(len(others), 'more tensor')})" if others else ""
        reason = f"is no tensor of {layout.stock.names[0]}, and the report covers only this class{more}"
        yield first, reason, REMOVE


def check_unread(checkpoint: Checkpoint, report: Report) -> Iterator[tuple[str, ...]]:
    """Yield (name, reason) for each weight file that transformers reads but the report does not list. Yield (name,
    reason, remedy) for each weight file that the report lists but transformers does not read."""
    listed = {entry.name for entry in report.output.files}
    read = [checkpoint.file_name(file) for file in checkpoint.weight_files]
    yield from ((name, UNLISTED) for name in read if name not in listed)
    for name in sorted(listed - {*read, *([] if checkpoint.index is None else [INDEX])}):
        if "/" not in name and is_weights(name):
            yield name, f"holds other weights than {read[0]}, of which nothing is known", REMOVE
