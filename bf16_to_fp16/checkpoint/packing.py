"""Write a converted folder as one file, with the names that a tool expects and ``undo``'s data in the metadata. Format:
https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import files, headers
from .files import created, sync, write_all, writing
from .naming import SPIECE, SPIECE_FILE, STOCK, Naming
from .recorded import SUMMARY, TENSORS, UNDO_DATA, summary_of
from .staging import ELSEWHERE, check_apart, check_file, umask

COPIED_BYTES = 1 << 22  # bytes copied at a time


def check_out_file(out: Path, source: Path | None, *, force: bool) -> None:
    """Raise UserError unless ``out`` is free or, under ``force``, a file that ``convert --layout`` wrote."""
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
    weights: Path, target: Path, naming: Naming, metadata: Mapping[str, str], tokenizer: bytes | None = None
) -> None:
    tensors = sorted(headers.read_whole_header(weights)[0].values(), key=lambda info: info.offset)
    running = hashlib.sha256()
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata, TENSORS: running.hexdigest()}}
    end = 0
    for info in tensors:
        entries[naming.from_stock(info.name)] = headers.entry_of(info.dtype, info.shape, end, info.nbytes)
        end += info.nbytes
    shape = (len(tokenizer or b""),)
    if tokenizer is not None:
        entries[SPIECE] = headers.entry_of("U8", shape, end, *shape)
    header = headers.header_of(entries)
    if len(header) > files.LONGEST_HEADER:
        raise UserError(f"{target.name}: a header of {len(header):,} bytes cannot be read; leave out --layout")
    with created(target) as out, files.reading(weights) as source, writing(target):
        write_all(out, memoryview(header))
        for part in hashing(source, tensors, running, naming):
            write_all(out, part)
        if tokenizer is not None:
            running.update(described(SPIECE, "U8", shape) + tokenizer)
            write_all(out, memoryview(tokenizer))
        # The header holds the tensors' hash, now known; its length stays, since digests are equally long.
        entries["__metadata__"] = {"format": "pt", **metadata, TENSORS: running.hexdigest()}
        os.lseek(out, 0, os.SEEK_SET)
        write_all(out, memoryview(headers.header_of(entries)))
        os.fsync(out)


def tokenizer_inside(file: Path, folder: Path, naming: Naming) -> bytes | None:
    """Return the tokenizer that the source file held; ``folder`` has it, extracted when the file was opened."""
    inside = folder / SPIECE_FILE
    return inside.read_bytes() if file.is_file() and inside.is_file() and naming is STOCK else None


def hashing(
    source: FileIO, tensors: Iterable[headers.TensorInfo], running: Any, naming: Naming = STOCK
) -> Iterator[memoryview]:
    """Yield the bytes of an open file's tensors, and feed each tensor's description and bytes to a hash."""
    buffer = memoryview(bytearray(COPIED_BYTES))
    for info in tensors:
        running.update(described(naming.from_stock(info.name), info.dtype, info.shape))
        for done in range(0, info.nbytes, COPIED_BYTES):
            part = buffer[: info.nbytes - done]
            files.read_exactly(source, part, info.offset + done)
            running.update(part)
            yield part


def described(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    return json.dumps([name, dtype, list(shape)], ensure_ascii=False).encode()


def tensors_sha256(file: Path) -> str:
    running = hashlib.sha256()
    tensors = sorted(headers.read_whole_header(file, any_dtype=True)[0].values(), key=lambda info: info.offset)
    with files.reading(file) as source:
        for _ in hashing(source, tensors, running):
            pass
    return running.hexdigest()


def put_file_in_place(file: Path, out: Path, *, force: bool) -> None:
    with writing(out, ELSEWHERE):
        file.chmod(0o666 & ~umask())
        if force and out.exists():
            check_our_file(out)
        elif out.exists():
            raise UserError(f"{out} appeared while it was being made; {ELSEWHERE} or give --force")
        os.replace(file, out)
    with suppress(OSError):
        sync(out.parent)


def metadata_of(summary: Mapping[str, Any], way_back: Mapping[str, Any]) -> dict[str, str]:
    packed = zlib.compress(json.dumps(way_back, ensure_ascii=False).encode(), 9)
    return {SUMMARY: json.dumps(summary, ensure_ascii=False), UNDO_DATA: base64.b64encode(packed).decode()}
