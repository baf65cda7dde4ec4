"""One piece of a tensor at a time: scaled by powers of two, rounded to fp16, counted.

A piece stays in the processor's cache for all passes over it, and counting needs few of them: bf16 has 8 significant
bits and fp16 11, so a bf16 weight that ends up above 2⁻¹⁷ (an eighth of fp16's smallest normal number) is carried over
exactly, and only those below are looked at one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..numerics import FP16_TINY
from .formats import TensorInfo
from .reader import Checkpoint
from .shards import OutFile, Write, dtype_of

ELEMENTS = 1 << 19
"""Elements converted at a time: 1 MB of bf16, little enough to stay in a processor's cache from one pass to the next.
A quarter of it where all values are compared, which takes more memory for each."""


SAFE_FACTOR = 100
"""Largest |exponent| of one fp32 factor. With two of them nothing that fp16 can hold is lost in between: what one takes
below fp32's 2⁻¹²⁶ or above its 2¹²⁸, the other cannot bring back above 2⁻²⁶ or below 2²⁸."""


FP16_NORMAL, FP16_INF = 0x0400, 0x7C00
"""Bits of fp16's smallest normal number and of its infinity, without sign."""


LARGEST_INEXACT_BITS = 0x0080
"""Bits of 2⁻¹⁷, the largest fp16 number that a bf16 value can become by rounding: from 2⁻¹⁷ on the last of its 8
significant bits is worth at least 2⁻²⁴, fp16's smallest step."""


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TensorStats:
    """What became of a tensor's elements, counted while it was written.

    ``lossless``: written value equal to the scaled one, finite. ``normal``: finite and not below the smallest normal
    number. ``flushed_to_zero``: zero, though the source was not. ``nonfinite``: inf or NaN as written. ``amax``:
    largest magnitude written, NaN where there is a NaN. ``nonzero``: in the source.
    """

    elements: int
    lossless: int
    normal: int
    flushed_to_zero: int
    nonfinite: int
    amax: float
    nonzero: int

    def plus(self, other: TensorStats) -> TensorStats:
        """Return the stats of two pieces together."""
        amax = math.nan if math.isnan(self.amax + other.amax) else max(self.amax, other.amax)
        return TensorStats(
            self.elements + other.elements,
            self.lossless + other.lossless,
            self.normal + other.normal,
            self.flushed_to_zero + other.flushed_to_zero,
            self.nonfinite + other.nonfinite,
            amax,
            self.nonzero + other.nonzero,
        )


NOTHING = TensorStats(0, 0, 0, 0, 0, 0.0, 0)


@dataclass(frozen=True)
class Scale:
    """The powers of two of a tensor.

    ``rows`` [rows, 1] and ``columns`` [1, columns] are fp32 factors where ``single`` says that such do, else int32
    exponents; ``scalar`` is the exponent not contained in them.
    """

    single: bool
    scalar: int
    rows: torch.Tensor | None
    columns: torch.Tensor | None


@dataclass(frozen=True)
class Piece:
    """A stretch of a tensor, contiguous in its files: whole rows, or part of one row.

    Offsets are in bytes, ``begin`` counts elements.
    """

    write: Write
    scale: Scale
    info: TensorInfo | None
    rows: slice
    columns: slice
    begin: int
    elements: int
    path: Path
    offset: int


def scale_of(write: Write, source: torch.dtype) -> Scale:
    """Return the powers of two of a tensor, as fp32 factors where these lose nothing."""
    scalar, rows, columns = write.exponent, write.row_exponents, write.column_exponents
    if rows is not None:
        rows, scalar = rows.to(torch.int32).view(-1, 1) + scalar, 0
    if columns is not None:
        columns = columns.to(torch.int32).view(1, -1)
        if rows is None:
            columns, scalar = columns + scalar, 0
    parts = [int(e.abs().max()) for e in (rows, columns) if e is not None and e.numel()]
    narrow = write.dtype == torch.float16 and source != torch.float64
    single = narrow and not write.offset and max([abs(scalar), *parts]) <= SAFE_FACTOR
    if single:
        rows, columns = power_of_two(rows), power_of_two(columns)
    return Scale(single, scalar, rows, columns)


def power_of_two(exponents: torch.Tensor | None) -> torch.Tensor | None:
    """Return 2^exponents in fp32, exactly, which torch.ldexp does not promise; None stays None."""
    if exponents is None:
        return None
    return torch.from_numpy(np.ldexp(np.float32(1), exponents.numpy()))


def output_pieces(checkpoint: Checkpoint, files: Sequence[OutFile]) -> Iterator[Piece]:
    """Yield the pieces of all files in the order of the output."""
    for file in files:
        for write, start in file.tensors:
            info = checkpoint.tensors[write.source] if write.source is not None else None
            dtype = dtype_of(write, checkpoint)
            scale = scale_of(write, dtype)
            rows = write.shape[0] if write.shape else 1
            columns = math.prod(write.shape[1:])
            most = ELEMENTS if is_narrow(write, scale, dtype) else max(1, ELEMENTS // 4)
            height, width = max(1, most // max(1, columns)), min(columns, most)
            for row in range(0, rows if columns else 0, height):
                for column in range(0, columns, width):
                    bottom, right = min(row + height, rows), min(column + width, columns)
                    begin = row * columns + column
                    yield Piece(
                        write,
                        scale,
                        info,
                        slice(row, bottom),
                        slice(column, right),
                        begin,
                        (bottom - row) * (right - column),
                        file.path,
                        start + begin * write.dtype.itemsize,
                    )


class Scratch:
    """The buffers of one converting thread, reused for every piece; pages that are never touched take no memory."""

    def __init__(self) -> None:
        self.values = torch.empty(ELEMENTS, dtype=torch.float32)
        self.magnitude = np.empty(ELEMENTS, np.int16)
        self.mask = np.empty(ELEMENTS, np.bool_)


def convert_piece(source: torch.Tensor, piece: Piece, output: torch.Tensor, scratch: Scratch) -> TensorStats:
    """Fill ``output`` with the values to write for a piece and return what became of them."""
    write = piece.write
    zero = Zeros(source)
    if not piece.scale.single:
        wide = general(source, piece)
        output.copy_(torch.from_numpy(wide))
        nought = np.equal(wide, 0) if write.offset else zero.everywhere()
        return count_elements(wide, output.double().numpy(), nought, torch.finfo(write.dtype).tiny)
    values = scratch.values[: piece.elements]
    values.copy_(source)
    if write.gain != 1.0:
        values.copy_(values.double().mul_(write.gain))
    scale(values, piece)
    output.copy_(values)
    if is_narrow(write, piece.scale, source.dtype):
        return count_narrow(values, output, zero, scratch)
    return count_elements(values.numpy(), output.float().numpy(), zero.everywhere(), FP16_TINY)


def is_narrow(write: Write, scale: Scale, source: torch.dtype) -> bool:
    """Return whether only results up to 2⁻¹⁷ can be inexact: bf16 under powers of two.

    Not so for fp16 sources, whose 11 bits reach further down.
    """
    return scale.single and source == torch.bfloat16 and write.gain == 1.0


def scale(values: torch.Tensor, piece: Piece) -> None:
    """Multiply a piece's fp32 values in place by its factors."""
    if piece.scale.scalar:
        values.mul_(2.0**piece.scale.scalar)
    matrix = values.view(piece.rows.stop - piece.rows.start, -1)
    if piece.scale.rows is not None:
        matrix.mul_(piece.scale.rows[piece.rows])
    if piece.scale.columns is not None:
        matrix.mul_(piece.scale.columns[:, piece.columns])


def general(source: torch.Tensor, piece: Piece) -> Array:
    """Return a piece's scaled values in fp64: for fp64 sources, large exponents, offsets and other outputs than
    fp16."""
    values, offset = source.to(torch.float64, copy=True), piece.write.offset
    if offset:  # adding 0 would turn a -0
        values += offset
    if piece.write.gain != 1.0:
        values = values.mul_(piece.write.gain).float().double()
    exponents = torch.full((1, 1), piece.scale.scalar, dtype=torch.int32)
    rows, columns = piece.scale.rows, piece.scale.columns
    if rows is not None:
        exponents = exponents + rows[piece.rows]
    if columns is not None:
        exponents = exponents + columns[:, piece.columns]
    matrix = values.view(piece.rows.stop - piece.rows.start, -1).numpy()
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.asarray(np.ldexp(matrix, exponents.numpy())).reshape(-1)
    return scaled - offset if offset else scaled


class Zeros:
    """Which source values are zero, told by their bits, as numpy has no bf16."""

    def __init__(self, source: torch.Tensor) -> None:
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[source.dtype.itemsize]
        self.bits: Array = source.view(kind).numpy()

    def everywhere(self) -> Array:
        """Return the mask over the whole piece."""
        return np.equal(self.bits & np.iinfo(self.bits.dtype).max, 0)

    def at(self, places: Array) -> Array:
        """Return the mask at some places."""
        return np.equal(self.bits[places] & np.iinfo(self.bits.dtype).max, 0)


def count_elements(wanted: Array, written: Array, zero: Array, tiny: float) -> TensorStats:
    """Return what became of values by comparing every one of them; ``tiny``: the output's smallest normal number."""
    magnitude = np.abs(written)
    finite = np.isfinite(written)
    flushed = (magnitude == 0) & ~zero
    return TensorStats(
        elements=written.size,
        lossless=int(np.count_nonzero((written == wanted) & finite & ~flushed)),
        normal=int(np.count_nonzero((magnitude >= tiny) & finite)),
        flushed_to_zero=int(np.count_nonzero(flushed)),
        nonfinite=int(np.count_nonzero(~finite)),
        amax=float(magnitude.max()),
        nonzero=int(np.count_nonzero(~zero)),
    )


def count_narrow(values: torch.Tensor, output: torch.Tensor, zero: Zeros, scratch: Scratch) -> TensorStats:
    """Return what ``count`` does, for bf16 values under powers of two, looking only at results that may be inexact."""
    elements = output.numel()
    bits = output.view(torch.int16).numpy()
    magnitude = np.bitwise_and(bits, 0x7FFF, out=scratch.magnitude[:elements])
    top = int(magnitude.max())
    mask = scratch.mask[:elements]
    places = np.flatnonzero(np.less_equal(magnitude, LARGEST_INEXACT_BITS, out=mask))
    if 4 * places.size > elements:
        return count_elements(values.numpy(), output.float().numpy(), zero.everywhere(), FP16_TINY)
    normal = int(np.count_nonzero(np.greater_equal(magnitude, FP16_NORMAL, out=mask)))
    nonfinite = int(np.count_nonzero(magnitude >= FP16_INF)) if top >= FP16_INF else 0
    written = output.numpy()[places].astype(np.float32)
    nought = zero.at(places)
    flushed = (written == 0) & ~nought
    lossy = (written != values.numpy()[places]) | flushed
    return TensorStats(
        elements=elements,
        lossless=elements - nonfinite - int(np.count_nonzero(lossy)),
        normal=normal - nonfinite,
        flushed_to_zero=int(np.count_nonzero(flushed)),
        nonfinite=nonfinite,
        amax=float(np.array(top, np.uint16).view(np.float16)),
        nonzero=elements - int(np.count_nonzero(nought)),
    )


def room(width: int) -> torch.Tensor:
    """Return room for a piece's elements of up to this many bytes; pages that are never touched take no memory."""
    return torch.empty(ELEMENTS * width, dtype=torch.uint8)
