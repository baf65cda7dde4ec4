"""Read the headers of safetensors files. The safetensors library checks them for holes, overlaps and wrong sizes. This
module imports no torch. Format: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import UserError, shortened
from .files import reading
from .sources import RESTORE, shown

FLOATING_DTYPES = ("F64", "F32", "F16", "BF16")  # names of the dtypes that weights may have


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
    """Return the ``TensorInfo`` of every tensor in a safetensors file, by name. Raises UserError if the metadata say
    that another library's weights are in it."""
    tensors, metadata = read_whole_header(file)
    if (made_for := metadata.get("format", "pt")) not in ("pt", "mlx"):  # every transformers reads these as PyTorch's
        raise UserError(
            f"{file}: its metadata say format {shown(made_for)}, which transformers 4 refuses or reads as weights of"
            " another library; save it again with save_pretrained"
        )
    return tensors


def read_whole_header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the ``TensorInfo`` of every tensor in a safetensors file, by name, and the file's metadata. Raises
    UserError if the file is damaged or is only a Git LFS pointer."""
    with reading(file) as source:
        beginning = source.read(8)
        if beginning == b"version ":
            raise UserError(f"{file}: a pointer of Git LFS in place of the weights; run git lfs pull in its folder")
        try:
            with safe_open(file, "np"):  # which checks the header
                pass
        except SafetensorError as error:
            reason = str(error).rpartition("header: ")[2]
            raise UserError(f"{file}: cut short, damaged or not safetensors ({reason}); {RESTORE}") from error
        length = int.from_bytes(beginning, "little")
        entries = json.loads(source.read(length))
    metadata = entries.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        tensors[name] = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), file, 8 + length + begin, end - begin)
    return tensors, metadata


def entry_of(dtype: str, shape: tuple[int, ...], begin: int, nbytes: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}


def header_of(entries: Mapping[str, object]) -> bytes:
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
