"""What this program wrote, and may therefore replace: a folder whose record lists all that is in it, or a report.

The record lists files with SHA-256; whatever is not listed, or was changed since, is the user's. A folder without a
record, as ``undo`` writes it, may give way to one that has every file of it, byte for byte.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..json_text import loads

RECORDS = ("fp16_report.json", "fp16_pipeline.json", "fp16_adapter.json")
"""What lists the files of a folder that this program wrote: a checkpoint's, a pipeline's, an adapter's."""

BELONGING = ("config.json", "model_index.json", "adapter_config.json")
"""Files of which one lies in every folder that is a checkpoint, a pipeline or an adapter."""

PAGE_MARK = '<meta name="generator" content="bf16-to-fp16">'  # what every page of this program has in its head

LARGEST_REPORT = 1 << 28  # bytes of a report that may be replaced
_REPORT = re.compile(rb'\s*\{\s*"schema": *\d+,')


def strange_file(folder: Path, new: Path | None = None) -> str | None:
    """Return the name of a file below a folder that this program did not write there or that was changed since, None
    where there is none; what ``new``, the folder that is to take its place, has as well is not lost."""
    listed = listed_files(folder)
    for name, status in files_of(folder):
        file = folder / name
        ours = name in listed and matches(file, status, listed[name])
        if not ours and (new is None or not is_kept(file, status, new / name)):
            return name
    return None


def has_record(folder: Path) -> bool:
    """Return whether a folder holds a record of what this program wrote there."""
    return any((folder / name).is_file() for name in RECORDS)


def is_whole(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, a pipeline or an adapter that this program wrote, to which nothing may
    be added."""
    return has_record(folder) and any((folder / name).is_file() for name in BELONGING)


def listed_files(folder: Path) -> dict[str, Mapping[str, Any] | None]:
    """Return what a folder's own record says of each of its files, by name; None for the record itself."""
    for name in RECORDS:
        try:
            entries = loads((folder / name).read_bytes())["output"]["files"]
            record = {str(entry["name"]): entry for entry in entries}
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if record:
            return {name: None, **record}
    return {}


def files_of(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and status of whatever is below a folder and is none, links to folders included, by name."""
    for here, folders, names in os.walk(folder, onerror=_raise):
        links = [name for name in folders if (Path(here) / name).is_symlink()]
        folders.sort()
        for name in sorted([*names, *links]):
            path = Path(here) / name
            yield path.relative_to(folder).as_posix(), path.lstat()


def _raise(error: OSError) -> None:
    raise error


def matches(file: Path, status: os.stat_result, entry: Mapping[str, Any] | None) -> bool:
    """Return whether a file is as its entry in a record says; a link to a large file of a source, which is not hashed,
    is when the source has it still."""
    if not stat.S_ISREG(status.st_mode):
        return False
    if entry is None:
        return True
    if entry.get("nbytes") != status.st_size:
        return False
    if entry.get("sha256") is None:
        return status.st_nlink > 1
    return bool(_sha256(file, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) == entry["sha256"])


@cache
def _sha256(file: Path, *_: int) -> str:
    """Return a file's SHA-256, computed once for each state of it."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def is_kept(file: Path, status: os.stat_result, new: Path) -> bool:
    """Return whether a regular file has the same bytes as another."""
    if not stat.S_ISREG(status.st_mode) or not new.is_file() or new.stat().st_size != status.st_size:
        return False
    return new.samefile(file) or filecmp.cmp(file, new, shallow=False)


def is_made_from(folder: Path, other: Path) -> bool:
    """Return whether the report in ``folder`` names weights of ``other``, which this program wrote as well, as those
    that it was made from: the original, also of what was finetuned."""
    try:
        hashes = set(loads((folder / RECORDS[0]).read_bytes())["source"]["sha256"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return any(entry and entry.get("sha256") in hashes for entry in listed_files(other).values())


def is_report(file: Path) -> bool:
    """Return whether an earlier run wrote a file as a report: JSON, page or picture, or nothing yet. A file in the
    folder of a checkpoint is none: there ``fp16_report.json`` holds the way back."""
    if any((file.parent / name).exists() for name in BELONGING):
        return False
    if file.stat().st_size > LARGEST_REPORT:
        return False
    data = file.read_bytes()
    return not data or bool(_REPORT.match(data)) or PAGE_MARK.encode() in data
