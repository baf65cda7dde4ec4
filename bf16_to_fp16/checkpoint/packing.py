"""A converted folder as one file, with the names that a tool expects and the way back inside.

Only headers differ between tools, so the weights are copied as they were written. The file's own metadata say what it
was made from and how it was judged, and hold what ``undo`` needs, compressed.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from .. import system
from ..errors import UserError
from ..system import write_all
from . import files, headers
from .layouts import LAYOUTS
from .naming import STOCK, Naming
from .ownership import is_kept
from .staging import ELSEWHERE, check_apart, check_file, created, umask, writing

SUMMARY, WAY_BACK = "bf16_to_fp16", "bf16_to_fp16.undo"
"""Keys of a file's metadata: what it is, as JSON, and what ``undo`` needs, as JSON that is compressed and in base64."""

TENSORS = "bf16_to_fp16.tensors_sha256"
"""Key of a file's metadata: the SHA-256 of its tensors, as ``described`` and then their bytes, in the file's order."""

LONGEST_WAY_BACK = 64_000_000  # bytes of the plan and config that a file may hold; an XXL encoder's have less than 3 MB
COPIED_BYTES = 1 << 22  # bytes copied at a time


def check_out_file(out: Path, source: Path | None, *, force: bool, back: bool = False) -> None:
    """Raise UserError unless one file of weights can be written at ``out``: absent or, under ``force``, one that
    ``convert --layout`` wrote, apart from ``source``; back: as in ``check_out``."""
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: --layout writes one file; give an output path that ends in .safetensors")
    if out.is_dir():
        raise UserError(f"{out} is a folder; choose another output path")
    if out.exists() or out.is_symlink():
        check_apart(out, source)
        if not back:
            check_our_file(out)
        if not force:
            raise UserError(f"{out} exists; choose another output path or give --force to replace it")
    elif out.parent.exists():
        check_file(out, "choose another output path")


def check_our_file(out: Path, new: Path | None = None) -> None:
    """Raise UserError unless ``convert --layout`` wrote the file ``out``, or ``new`` has the same bytes."""
    try:
        ours = not out.is_symlink() and summary_of(out) is not None
    except UserError:
        ours = False
    if not ours and (new is None or out.is_symlink() or not is_kept(out, out.stat(), new)):
        raise UserError(f"{out} exists, and convert --layout did not write it; choose another output path")


def pack(
    weights: Path, target: Path, naming: Naming, metadata: Mapping[str, str], tokenizer: tuple[str, Path] | None = None
) -> None:
    """Write the tensors of a safetensors file to a new one under the names of ``naming``, a few MB at a time.
    tokenizer: a name, and the file whose bytes it is to stand for. Raises UserError where a tensor has no name there,
    and for a full disk."""
    tensors = sorted(headers.read_whole_header(weights)[0].values(), key=lambda info: info.offset)
    running = hashlib.sha256()
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata, TENSORS: running.hexdigest()}}
    end = 0
    for info in tensors:
        entries[naming.from_stock(info.name)] = headers.entry_of(info.dtype, info.shape, end, info.nbytes)
        end += info.nbytes
    extra = b""
    if tokenizer is not None:
        name, file = tokenizer
        extra = file.read_bytes()
        entries[name] = headers.entry_of("U8", (len(extra),), end, len(extra))
    header = headers.header_of(entries)
    if len(header) > files.LONGEST_HEADER:
        raise UserError(f"{target.name}: its header would have {len(header):,} bytes; leave out --layout")
    with created(target, len(header) + end + len(extra)) as out, files.reading(weights) as source, writing(target):
        write_all(out, memoryview(header))
        for part in hashing(source, tensors, running, naming):
            write_all(out, part)
        write_all(out, memoryview(extra))
        if tokenizer is not None:
            running.update(described(tokenizer[0], "U8", (len(extra),)) + extra)
        # Again, since it holds the hash of what follows it; a digest is as long as another.
        entries["__metadata__"] = {"format": "pt", **metadata, TENSORS: running.hexdigest()}
        os.lseek(out, 0, os.SEEK_SET)
        write_all(out, memoryview(headers.header_of(entries)))
        os.fsync(out)


def hashing(
    source: FileIO, tensors: Iterable[headers.TensorInfo], running: Any, naming: Naming = STOCK
) -> Iterator[memoryview]:
    """Yield the bytes of tensors of an open file, part by part, and add them to the hash ``running``, each tensor
    behind its description under the name that ``naming`` has for it."""
    buffer = memoryview(bytearray(COPIED_BYTES))
    for info in tensors:
        running.update(described(naming.from_stock(info.name), info.dtype, info.shape))
        for done in range(0, info.nbytes, COPIED_BYTES):
            part = buffer[: info.nbytes - done]
            files.read_exactly(source, part, info.offset + done)
            running.update(part)
            yield part


def described(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return a tensor's name, dtype and shape as they are hashed."""
    return json.dumps([name, dtype, list(shape)], ensure_ascii=False).encode()


def tensors_sha256(file: Path) -> str:
    """Return the SHA-256 of a file's tensors, as ``TENSORS`` records it; raise UserError where it cannot be read."""
    running = hashlib.sha256()
    tensors = sorted(headers.read_whole_header(file, any_dtype=True)[0].values(), key=lambda info: info.offset)
    with files.reading(file) as source:
        for _ in hashing(source, tensors, running):
            pass
    return running.hexdigest()


def metadata_in(file: Path) -> dict[str, str]:
    """Return a file's own metadata, none where it is no safetensors file; raise UserError where it is damaged."""
    return headers.read_whole_header(file, any_dtype=True)[1] if file.suffix == ".safetensors" else {}


def recorded_sha256(file: Path) -> str | None:
    """Return the hash of its tensors that a file records, None where it has none."""
    return metadata_in(file).get(TENSORS)


def summary_of(file: Path) -> dict[str, Any] | None:
    """Return what a file of weights says of its conversion, None where no conversion wrote it; raise UserError where it
    is damaged."""
    if not file.is_file():
        raise UserError(f"{file}: No such file; give a file that convert --layout wrote")
    if (said := metadata_in(file).get(SUMMARY)) is None:
        return None
    summary = files.parse_json(said.encode(), file, "metadata")
    if not all(isinstance(summary.get(key), str) for key in ("layout", "verdict", "proof", "target", "command")):
        raise UserError(f"{file}: its metadata are damaged; convert the source again")
    return summary


def put_file_in_place(file: Path, out: Path, *, force: bool) -> None:
    """Move a finished file to ``out``; raise UserError where something has appeared there meanwhile."""
    with writing(out, ELSEWHERE):
        file.chmod(0o666 & ~umask())
        if force and out.exists():
            check_our_file(out, file)
        elif out.exists():
            raise UserError(f"{out} appeared while it was being made; {ELSEWHERE} or give --force")
        system.replace_file(file, out)
    with suppress(OSError):
        system.sync_folder(out.parent)


def metadata_of(summary: Mapping[str, Any], way_back: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a file: what it is, and what ``undo`` needs."""
    packed = zlib.compress(json.dumps(way_back, ensure_ascii=False).encode(), 9)
    return {SUMMARY: json.dumps(summary, ensure_ascii=False), WAY_BACK: base64.b64encode(packed).decode()}


def packed_data(file: Path) -> dict[str, Any]:
    """Return what ``undo`` needs of a file that ``convert --layout`` wrote; raise UserError for any other file."""
    if (data := way_back_of(file)) is None:
        raise UserError(f"{file}: convert --layout did not write it; give a file that it wrote, or a converted folder")
    return data


def way_back_of(file: Path) -> dict[str, Any] | None:
    """Return what ``undo`` needs of a file that this program wrote, with its ``layout``; None for any other file, and
    raise UserError where it is damaged."""
    metadata = metadata_in(file)
    if WAY_BACK not in metadata:
        return None
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(metadata[WAY_BACK], validate=True), LONGEST_WAY_BACK)
        if not unpacking.eof:
            raise ValueError("cut short or too long")
    except (ValueError, binascii.Error, zlib.error) as error:
        raise UserError(f"{file}: {WAY_BACK} in its metadata is damaged; convert the source again") from error
    way_back = files.parse_json(data, file, WAY_BACK)
    summary = files.parse_json(metadata.get(SUMMARY, "{}").encode(), file, SUMMARY)
    parts = (way_back.get("plan"), way_back.get("config"), way_back.get("source"), way_back.get("weights"))
    if not all(isinstance(part, dict) for part in parts) or summary.get("layout") not in LAYOUTS:
        raise UserError(f"{file}: {WAY_BACK} in its metadata is damaged; convert the source again")
    return way_back | {"layout": summary["layout"]}
