"""The headers of safetensors files, checked for duplicate keys, holes, overlaps and wrong sizes. Imports no torch.
Format: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError, shortened
from .files import LONGEST_HEADER, parse_json, read_bytes, reading, size_of
from .sources import RESTORE, shown

ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1}
ITEM_SIZES |= {f"{kind}{8 * size}": size for kind in "IU" for size in (1, 2, 4, 8)}
"""Bytes of an element, for the dtypes that torch has."""

FLOATING_DTYPES = ("F64", "F32", "F16", "BF16")  # names of the dtypes that weights may have

MOST_AXES = 8  # of a tensor; the product of a million sizes would take hours


@dataclass(frozen=True)
class TensorInfo:
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def check_not_quantised(dtype: str, name: str, file: Path) -> None:
    if dtype.startswith(("I8", "U8", "F8_", "F4", "F6_", "E8M0")):
        raise UserError(
            f"{file}: tensor {shown(name)} is {shortened(dtype)}, quantised; give the checkpoint it was quantised from"
        )


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the place of every tensor in a safetensors file. Raises UserError for another library's format."""
    tensors, metadata = read_whole_header(file)
    if (made_for := metadata.get("format", "pt")) not in ("pt", "mlx"):  # every transformers reads these as PyTorch's
        raise UserError(
            f"{file}: its metadata say format {shown(made_for)}, which transformers 4 refuses or reads as weights of"
            " another library; save it again with save_pretrained"
        )
    return tensors


def read_whole_header(file: Path, *, any_dtype: bool = False) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the place of every tensor, and the file's metadata. any_dtype: allow dtypes unknown to ``formats``."""
    with reading(file) as source:
        size = size_of(source)
        if size < 8:
            raise UserError(f"{file}: {size} bytes are too few for a safetensors file; {RESTORE}")
        beginning = read_bytes(source, 8)
        if beginning == b"version ":
            raise UserError(f"{file}: a pointer of Git LFS in place of the weights; run git lfs pull in its folder")
        length = int.from_bytes(beginning, "little")
        if length > (most := min(size - 8, LONGEST_HEADER)):
            raise UserError(
                f"{file}: a header of {length} bytes does not fit the {most} that it may have; it is cut short or not"
                f" safetensors, {RESTORE}"
            )
        entries = parse_json(read_bytes(source, length, 8), file, "header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise UserError(f"{file}: __metadata__ is not a map of strings; {RESTORE}")
    tensors = {name: tensor_info(name, entry, file, 8 + length, any_dtype) for name, entry in entries.items()}
    end = 8 + length
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            raise UserError(f"{file}: tensor {shown(info.name)} overlaps the one before or leaves a hole; {RESTORE}")
        end += info.nbytes
    if end != size:
        problem = "cut short" if end > size else "longer than its tensors"
        raise UserError(f"{file}: {problem} ({size} bytes, the header says {end}); {RESTORE}")
    return tensors, metadata


def tensor_info(name: str, entry: object, file: Path, start: int, any_dtype: bool = False) -> TensorInfo:
    def invalid(problem: str) -> UserError:
        return UserError(f"{file}: tensor {shown(name)} {problem}; {RESTORE}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise invalid("does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not is_sizes(shape) or len(shape) > MOST_AXES:
        raise invalid(f"has the shape {shown(shape)}")
    if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise invalid(f"has the offsets {shown(offsets)}")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid("has a name that is not Unicode text") from error
    begin, end = offsets
    if isinstance(dtype, str) and not any_dtype:
        check_not_quantised(dtype, name, file)
    if not isinstance(dtype, str) or not (any_dtype or dtype in ITEM_SIZES):
        raise invalid(f"has the unknown dtype {shown(dtype)}")
    if (size := ITEM_SIZES.get(dtype)) is not None and (nbytes := math.prod(shape) * size) != end - begin:
        raise invalid(f"needs {nbytes} bytes for {dtype} {shape} but has {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), file, start + begin, end - begin)


def is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in value)


def entry_of(dtype: str, shape: tuple[int, ...], begin: int, nbytes: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}


def header_of(entries: Mapping[str, object]) -> bytes:
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
