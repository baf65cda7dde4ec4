"""Columns of a few weights of a safetensors file multiplied with powers of two, all else kept to the byte.

A file is written anew beside the old one, in a stream, and takes its place: the old one may be another folder's, by a
hard link. Every product is checked to be exact, so that the inverse powers bring the file back bit for bit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from .. import system
from ..errors import UserError
from ..wording import counted
from .disk import writing
from .files import read_bytes, reading, size_of
from .formats import READ_BYTES, SAFETENSORS_DTYPES, bytes_of
from .headers import FLOATING_DTYPES, TensorInfo, read_whole_header
from .places import shown
from .staging import created

ByTensor = Mapping[str, Sequence[int]]
"""Powers of two by tensor: one for each of so many equal blocks of its columns."""

Piece = tuple[memoryview, memoryview, float]


@dataclass(frozen=True)
class Rescaled:
    """A file before and after: the SHA-256 of each, and the largest magnitude that was made."""

    before: str
    after: str
    amax: float


def holders(folder: Path, tensor: str) -> list[Path]:
    """Return the safetensors files right in a folder that hold a tensor of this name: of one set, or of variants."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    return [file for file in files if tensor in read_whole_header(file, any_dtype=True)[0]]


def check_scalable(file: Path, exponents: ByTensor) -> dict[str, TensorInfo]:
    """Return where tensors lie in a file; raise UserError for one whose columns cannot be multiplied so."""
    tensors = read_whole_header(file, any_dtype=True)[0]
    for name, powers in exponents.items():
        info = tensors[name]
        if info.dtype not in FLOATING_DTYPES:
            raise UserError(
                f"{file}: tensor {shown(name)} is {info.dtype}, quantised, and has to carry a power of two; give the"
                " pipeline that this was quantised from"
            )
        if len(info.shape) != 2 or info.shape[1] % len(powers):
            raise UserError(
                f"{file}: tensor {shown(name)} has the shape {list(info.shape)}, and a matrix with"
                f" {counted(len(powers), 'equal block')} of columns belongs there; fetch the pipeline again"
            )
    return {name: tensors[name] for name in exponents}


def rescale_columns(
    file: Path,
    exponents: ByTensor,
    advance: Callable[[int, int], None] | None = None,
    *,
    name: str = "",
    write: bool = True,
) -> Rescaled:
    """Multiply the columns of a file's tensors with 2 to the ``exponents``, and return what it was and became.

    advance: called with bytes done and in all. name: of the file in messages. write: False leaves the file as it is,
    and only finds what it would become. Raises UserError where a product is not exact, and for a full disk; the file
    then is as it was.
    """
    info = check_scalable(file, exponents)
    before, after, done, amax = hashlib.sha256(), hashlib.sha256(), 0, 0.0
    new = file.with_name(f"{file.name}.rescaled")
    with reading(file) as source:
        size = size_of(source)

        def pieces() -> Iterator[memoryview]:
            nonlocal done, amax
            for old, data, largest in scaled(source, size, info, exponents, name or str(file)):
                amax = max(amax, largest)
                before.update(old)
                after.update(data)
                done += len(data)
                yield data
                if advance is not None:
                    advance(done, size)

        if write:
            with created(new, size) as output:
                for data in pieces():
                    with writing(new):
                        system.write_all(output, data)
        else:
            for _ in pieces():
                pass
    if write:
        with writing(file):
            os.replace(new, file)
    return Rescaled(before.hexdigest(), after.hexdigest(), amax)


def scaled(
    source: FileIO, size: int, tensors: Mapping[str, TensorInfo], exponents: ByTensor, name: str
) -> Iterator[Piece]:
    """Yield the bytes of a file in order, as they are and as they become, and the largest magnitude of products."""
    position = 0
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        yield from unchanged(source, position, info.offset)
        width = max(1, info.shape[1]) * SAFETENSORS_DTYPES[info.dtype].itemsize
        factors = columns_of(info, exponents[info.name])
        step = max(1, READ_BYTES // width) * width
        for begin in range(info.offset, info.offset + info.nbytes, step):
            old = read_bytes(source, min(step, info.offset + info.nbytes - begin), begin)
            product = exact(old, factors, info, name)
            yield memoryview(old), bytes_of(product), float(product.double().abs().max())
        position = info.offset + info.nbytes
    yield from unchanged(source, position, size)


def unchanged(source: FileIO, begin: int, end: int) -> Iterator[Piece]:
    """Yield the bytes of a part of a file, twice each."""
    for position in range(begin, end, READ_BYTES):
        data = memoryview(read_bytes(source, min(READ_BYTES, end - position), position))
        yield data, data, 0.0


def columns_of(info: TensorInfo, powers: Sequence[int]) -> torch.Tensor:
    """Return the factor of every column of a tensor, fp64."""
    each = torch.tensor([2.0**power for power in powers], dtype=torch.float64)
    return each.repeat_interleave(info.shape[1] // len(powers))


def exact(old: bytes, factors: torch.Tensor, info: TensorInfo, name: str) -> torch.Tensor:
    """Return rows of a tensor times the factors of its columns, in its dtype; raise UserError where the way back would
    not give the same bits."""
    dtype = SAFETENSORS_DTYPES[info.dtype]
    rows = torch.frombuffer(bytearray(old), dtype=dtype).view(-1, info.shape[1])
    product = (rows.double() * factors).to(dtype)
    back = (product.double() / factors).to(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    lost = int((back.view(bits) != rows.view(bits)).sum())
    if lost:
        raise UserError(
            f"{name}: {counted(lost, 'value')} of {shown(info.name)} would leave the range of {info.dtype} times"
            f" 2^{int(factors.max().log2())}, which makes up for an encoder's factor; give a pipeline whose other"
            " weights are bf16 or fp32, or convert the encoder alone with --subfolder"
        )
    return product
