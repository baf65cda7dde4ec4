"""Write a converted folder as one safetensors file with another program's tensor names. The file's metadata hold a
summary of the conversion. Format: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import files, headers
from .files import created, sync, write_all, writing
from .naming import SPIECE, SPIECE_FILE, STOCK, Naming
from .recorded import SUMMARY, summary_of
from .staging import ELSEWHERE, check_apart, check_file, umask

COPIED_BYTES = 1 << 22  # bytes copied at a time


def check_out_file(out: Path, source: Path | None, *, force: bool) -> None:
    """Raise UserError if the file ``out`` cannot be written. An existing file is accepted only if ``force`` is true,
    ``convert --layout`` wrote the file, and replacing it would not harm ``source`` (see ``check_apart``)."""
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: --layout writes one file; give an output path that ends in .safetensors")
    if out.is_dir():
        raise UserError(f"{out} is a folder; choose another output path")
    if out.exists() or out.is_symlink():
        check_apart(out, source)
        check_our_file(out)
        if not force:
            raise UserError(f"{out} exists; choose another output path or give --force to replace it")
    elif out.parent.exists():
        check_file(out, "choose another output path")


def check_our_file(out: Path) -> None:
    try:
        ours = not out.is_symlink() and summary_of(out) is not None
    except UserError:
        ours = False
    if not ours:
        raise UserError(f"{out} exists, and convert --layout did not write it; choose another output path")


def pack(
    weights: Path, target: Path, naming: Naming, summary: Mapping[str, Any], tokenizer: bytes | None = None
) -> None:
    tensors = sorted(headers.read_whole_header(weights)[0].values(), key=lambda info: info.offset)
    metadata = {"format": "pt", SUMMARY: json.dumps(summary, ensure_ascii=False)}
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for info in tensors:
        entries[naming.from_stock(info.name)] = headers.entry_of(info.dtype, info.shape, end, info.nbytes)
        end += info.nbytes
    if tokenizer is not None:
        entries[SPIECE] = headers.entry_of("U8", (len(tokenizer),), end, len(tokenizer))
    header = headers.header_of(entries)
    buffer = memoryview(bytearray(COPIED_BYTES))
    with created(target) as out, files.reading(weights) as source, writing(target):
        write_all(out, memoryview(header))
        for info in tensors:
            for done in range(0, info.nbytes, COPIED_BYTES):
                part = buffer[: info.nbytes - done]
                files.read_exactly(source, part, info.offset + done)
                write_all(out, part)
        write_all(out, memoryview(tokenizer or b""))
        os.fsync(out)


def tokenizer_inside(file: Path, folder: Path, naming: Naming) -> bytes | None:
    """Return ``file``'s tokenizer, extracted into ``folder``; None without one or if ``naming`` has no place for it."""
    inside = folder / SPIECE_FILE
    return inside.read_bytes() if file.is_file() and inside.is_file() and naming is STOCK else None


def put_file_in_place(file: Path, out: Path, *, force: bool) -> None:
    with writing(out, ELSEWHERE):
        file.chmod(0o666 & ~umask())
        if force and out.exists():
            check_our_file(out)
        elif out.exists():
            raise UserError(f"another program wrote {out} meanwhile; {ELSEWHERE} or give --force")
        os.replace(file, out)
    with suppress(OSError):
        sync(out.parent)
