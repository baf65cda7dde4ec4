"""Find out which folders and reports this program wrote and may replace. A folder's record (JSON) lists its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RECORDS = ("fp16_report.json", "fp16_pipeline.json", "fp16_adapter.json")  # of a checkpoint, a pipeline, an adapter

BELONGING = ("config.json", "model_index.json", "adapter_config.json")
"""Every checkpoint, pipeline or adapter has one of these files."""

PAGE_MARK = '<meta name="generator" content="bf16-to-fp16">'  # in the head of every page of this program

_REPORT = re.compile(rb'\s*\{\s*"schema": *\d+,')


def listed_files(folder: Path) -> dict[str, Mapping[str, Any] | None]:
    """Return the entries of a folder's record, the JSON file that lists what this program wrote there, by file name.
    The record's own name has the value None. Without a record, return {}."""
    for name in RECORDS:
        try:
            entries = json.loads((folder / name).read_bytes())["output"]["files"]
            record = {str(entry["name"]): entry for entry in entries}
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if record:
            return {name: None, **record}
    return {}


def files_of(folder: Path) -> Iterator[str]:
    def raised(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=raised):
        links = [name for name in folders if (Path(here) / name).is_symlink()]
        folders.sort()
        yield from ((Path(here) / name).relative_to(folder).as_posix() for name in sorted([*names, *links]))


def is_made_from(folder: Path, other: Path) -> bool:
    """Return whether ``folder`` was converted from ``other``, judged by the hashes in both folders' records."""
    try:
        hashes = set(json.loads((folder / RECORDS[0]).read_bytes())["source"]["sha256"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return any(entry and entry.get("sha256") in hashes for entry in listed_files(other).values())


def is_report(file: Path) -> bool:
    """Return whether a new report can replace ``file``. It must be empty or an old report, and its folder must hold no
    checkpoint, pipeline or adapter."""
    if any((file.parent / name).exists() for name in BELONGING):
        return False
    data = file.read_bytes()
    return not data or bool(_REPORT.match(data)) or PAGE_MARK.encode() in data
