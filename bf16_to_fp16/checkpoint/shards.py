"""Plan the output files before the first byte is written. Files and index have transformers' names. Format:
https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .contents import INDEX, WEIGHTS
from .formats import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from .headers import entry_of, header_of
from .reader import Checkpoint


@dataclass(frozen=True)
class Write:
    """A tensor to write: (x + ``offset``)·``gain``·2^E − ``offset``. x is ``data``, or the source's tensor named
    ``source``. E is ``exponent`` + ``row_exponents[i]`` + ``column_exponents[j]`` for row i and column j."""

    name: str
    shape: tuple[int, ...]
    source: str | None  # the source's tensor that is x
    data: torch.Tensor | None = None  # or x itself
    exponent: float = 0
    row_exponents: torch.Tensor | None = None
    column_exponents: torch.Tensor | None = None
    gain: float = 1.0  # the product is computed in fp64 and rounded to fp32
    offset: float = 0.0  # added in fp64
    dtype: torch.dtype = torch.float16

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def as_dtype(self, name: str) -> Write:
        return replace(self, dtype=SAFETENSORS_DTYPES[name])


@dataclass(frozen=True)
class FileRecord:
    name: str
    nbytes: int
    sha256: str | None


@dataclass(frozen=True)
class OutFile:
    path: Path
    header: bytes
    writes: tuple[Write, ...]
    size: int


def shards(checkpoint: Checkpoint, writes: Sequence[Write], *, one_file: bool) -> list[list[Write]]:
    """Group the tensors by output file: all in one, or as in the source, with new tensors in the last file."""
    ordered = sorted(writes, key=lambda write: write.name)
    if one_file:
        return [ordered]
    groups: list[list[Write]] = [[] for _ in checkpoint.weight_files]
    number = {file: i for i, file in enumerate(checkpoint.weight_files)}
    for write in ordered:
        place = number[checkpoint.tensors[write.source].file] if write.source is not None else -1
        groups[place].append(write)
    return [g for g in groups if g] or [[]]


def lay_out(groups: Sequence[Sequence[Write]], folder: Path, names: Mapping[str, str]) -> list[OutFile]:
    """Return the output file of each group of tensors, and an index if there are several. In a file, wider dtypes come
    first, which aligns all tensors. names: the tensors' names in files, where they differ."""
    files = []
    for number, group in enumerate(groups, 1):
        name = WEIGHTS if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        ordered = tuple(sorted(group, key=lambda write: (-write.dtype.itemsize, write.name)))
        for write in ordered:
            stored = names.get(write.name, write.name)
            entries[stored] = entry_of(SAFETENSORS_NAMES[write.dtype], write.shape, end, write.nbytes)
            end += write.nbytes
        header = header_of(entries)
        files.append(OutFile(folder / name, header, ordered, len(header) + end))
    if len(files) > 1:
        placed = [(write, file.path.name) for file in files for write in file.writes]
        index = {
            "metadata": {
                "total_parameters": sum(math.prod(write.shape) for write, _ in placed),
                "total_size": sum(write.nbytes for write, _ in placed),
            },
            "weight_map": {names.get(write.name, write.name): file for write, file in placed},
        }
        text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
        files.append(OutFile(folder / INDEX, text, (), len(text)))
    return files
