"""What is written where: tensors to files, headers and offsets, the index of shards.

All of it is settled before the first byte, so that pieces can be written in any order. Names of files and their index
are those of transformers. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .disk import created, write_all, writing
from .formats import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from .reader import Checkpoint

LARGEST_EXPONENT = 500
"""Exponents beyond it are refused; fp64, which the general path scales in, has room for twice as much."""


@dataclass(frozen=True)
class Write:
    """One tensor to write: ``source`` (a tensor of the checkpoint) or ``data``, times ``gain`` and powers of two.

    The power's exponent is ``exponent`` + ``row_exponents[i]`` + ``column_exponents[j]`` (integer tensors over the
    first and the second axis). ``gain`` is applied in fp64 and rounded to fp32 before the exponents. ``offset`` is
    added before all that and taken off after it, in fp64. ``dtype``: what to store.
    """

    name: str
    shape: tuple[int, ...]
    source: str | None
    data: torch.Tensor | None = None
    exponent: int = 0
    row_exponents: torch.Tensor | None = None
    column_exponents: torch.Tensor | None = None
    gain: float = 1.0
    offset: float = 0.0
    dtype: torch.dtype = torch.float16

    def as_dtype(self, name: str) -> Write:
        """Return the same write with another dtype, spelled as in safetensors ("BF16")."""
        return replace(self, dtype=SAFETENSORS_DTYPES[name])


@dataclass(frozen=True)
class FileRecord:
    """A file written: its name in the folder, its size in bytes, its SHA-256 in hexadecimal (None without hashing)."""

    name: str
    nbytes: int
    sha256: str | None


def remove(files: Iterable[OutFile]) -> None:
    """Remove what was written of files."""
    for file in files:
        file.path.unlink(missing_ok=True)


WEIGHTS = "model.safetensors"


INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class OutFile:
    """A file to be written: its header, and its tensors with the offset of each in the file."""

    path: Path
    header: bytes
    tensors: tuple[tuple[Write, int], ...]
    size: int


def size_of(write: Write) -> int:
    """Return the bytes that a tensor takes in the output."""
    return math.prod(write.shape) * write.dtype.itemsize


def dtype_of(write: Write, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype that a tensor's values have before they are written."""
    if write.source is not None:
        return SAFETENSORS_DTYPES[checkpoint.tensors[write.source].dtype]
    assert write.data is not None
    return write.data.dtype


def check_write(write: Write, checkpoint: Checkpoint) -> None:
    """Raise ValueError for a write that contradicts itself or the checkpoint."""
    if (write.source is None) == (write.data is None):
        raise ValueError(f"{write.name}: give either source or data")
    dtype = dtype_of(write, checkpoint)
    shape = tuple(write.data.shape) if write.data is not None else checkpoint.tensors[str(write.source)].shape
    if shape != write.shape:
        raise ValueError(f"{write.name}: shape {write.shape}, but the values have {shape}")
    if not dtype.is_floating_point or write.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{write.name}: cannot write {dtype} as {write.dtype}")
    reach = abs(write.exponent)
    for axis, exponents in enumerate((write.row_exponents, write.column_exponents)):
        if exponents is None:
            continue
        if len(write.shape) > 2 or len(write.shape) <= axis or tuple(exponents.shape) != (write.shape[axis],):
            raise ValueError(
                f"{write.name}: exponents of shape {tuple(exponents.shape)} on axis {axis} of {write.shape}"
            )
        reach += int(exponents.abs().max()) if exponents.numel() else 0
    if reach > LARGEST_EXPONENT:
        raise ValueError(f"{write.name}: exponents up to {reach}")


def shards(checkpoint: Checkpoint, writes: Sequence[Write], max_shard_size: int | None) -> list[list[Write]]:
    """Divide tensors into the files they go to; no file is empty unless there is nothing to write.

    By source file, in the checkpoint's order; or greedily in order of names, where a tensor of more than
    ``max_shard_size`` bytes has a file to itself.
    """
    ordered = sorted(writes, key=lambda w: w.name)
    if max_shard_size is None:
        groups: list[list[Write]] = [[] for _ in checkpoint.weight_files]
        number = {file: i for i, file in enumerate(checkpoint.weight_files)}
        for write in ordered:
            # What was dequantised lies beside the one file that it came from.
            place = number.get(checkpoint.tensors[write.source].file, 0) if write.source is not None else -1
            groups[place].append(write)
        return [g for g in groups if g] or [[]]
    result: list[list[Write]] = [[]]
    left = max_shard_size
    for write in ordered:
        if size_of(write) > left and result[-1]:
            result.append([])
            left = max_shard_size
        result[-1].append(write)
        left -= size_of(write)
    return result


def lay_out(groups: Sequence[Sequence[Write]], folder: Path, names: Mapping[str, str]) -> list[OutFile]:
    """Return the files for groups of tensors, in each wider dtypes first, so that all are aligned, then by name; names:
    what files call those that are called otherwise."""
    files = []
    for number, group in enumerate(groups, 1):
        name = WEIGHTS if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins, end = [], 0
        ordered = sorted(group, key=lambda w: (-w.dtype.itemsize, w.name))
        for write in ordered:
            begins.append(end)
            end += size_of(write)
            entries[names.get(write.name, write.name)] = {
                "dtype": SAFETENSORS_NAMES[write.dtype],
                "shape": list(write.shape),
                "data_offsets": [begins[-1], end],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        placed = tuple((w, len(header) + b) for w, b in zip(ordered, begins, strict=True))
        files.append(OutFile(folder / name, header, placed, len(header) + end))
    return files


def write_index(files: Sequence[OutFile], folder: Path, names: Mapping[str, str], hashes: bool) -> FileRecord:
    """Write the index of shards as transformers spells it; names: as in ``lay_out``."""
    placed = {names.get(write.name, write.name): file.path.name for file in files for write, _ in file.tensors}
    writes = [write for file in files for write, _ in file.tensors]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(w.shape) for w in writes),
            "total_size": sum(size_of(w) for w in writes),
        },
        "weight_map": placed,
    }
    text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    with created(folder / INDEX, len(text)) as descriptor, writing(folder / INDEX):
        write_all(descriptor, memoryview(text), 0)
        os.fsync(descriptor)
    return FileRecord(INDEX, len(text), hashlib.sha256(text).hexdigest() if hashes else None)
