"""Stream weights into safetensors files: read, scale, round, count and hash them. Each chunk goes through all steps
while it is in the processor's cache."""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from io import FileIO
from itertools import chain
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .files import created, read_exactly, reading, sha256_of, write_all, writing
from .formats import SAFETENSORS_DTYPES, bytes_of
from .reader import Checkpoint
from .shards import FileRecord, Write, lay_out, shards

ELEMENTS = 1 << 18  # elements in a chunk: 512 kB of bf16
FLUSHED = 1 << 26  # bytes between two calls of fsync, so that the disk works at the same time
MOST_WAITING = 8  # jobs in the queue of the hashing thread

FP32_REACH = 100
"""The largest sum of exponents, without signs, for which fp32 is wide enough to scale values for fp16. A value that
leaves fp32's range, 2⁻¹²⁶ to 2¹²⁸, at any step ends below 2⁻²⁶ or above 2²⁸, which is outside fp16."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TensorStats:
    """Counts of a tensor's written elements."""

    elements: int
    lossless: int  # finite and equal to the scaled value
    normal: int  # not subnormal
    flushed_to_zero: int  # written as zero, but not zero in the source
    nonfinite: int
    amax: float  # the largest |x|, NaN if an element is NaN
    nonzero: int  # not zero in the source

    def plus(self, other: TensorStats) -> TensorStats:
        amax = math.nan if math.isnan(self.amax + other.amax) else max(self.amax, other.amax)
        sums = map(add, astuple(self), astuple(other))
        return replace(TensorStats(*sums), amax=amax)


@dataclass(frozen=True)
class Written:
    stats: dict[str, TensorStats]
    files: tuple[FileRecord, ...]
    source_sha256: dict[str, str]


def write_fp16(
    checkpoint: Checkpoint,
    writes: Sequence[Write],
    folder: Path,
    *,
    one_file: bool = False,
    hashes: bool = True,
    advance: Callable[[int, int], None] | None = None,
) -> Written:
    """Write tensors as safetensors files into ``folder``; return their counts and the files' sizes and hashes. A value
    beyond fp16 becomes inf and is counted. If writing fails, the new files are removed. one_file: write one file,
    instead of files as in the source. hashes: compute SHA-256 of files. advance: called with the bytes done and the
    total."""
    files = lay_out(shards(checkpoint, writes, one_file=one_file), folder, checkpoint.stored_names)
    stats = {write.name: TensorStats(0, 0, 0, 0, 0, 0.0, 0) for write in writes}
    records: list[FileRecord] = []
    done, total = 0, sum(file.size for file in files)
    with ExitStack() as stack:
        # Chunks are too small for torch's threads, whose spinning would take the cores from the hashes.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        read = {checkpoint.tensors[write.source].file for write in writes if write.source is not None}
        sources = {path: stack.enter_context(reading(path)) for path in sorted(read)}
        outputs = [stack.enter_context(created(file.path)) for file in files]
        # Hashing, the disk and all else take equally long, so they run at the same time.
        hasher, flusher, source_hasher = (ThreadPoolExecutor(1) for _ in range(3))
        for executor in (hasher, flusher, source_hasher):
            stack.callback(executor.shutdown, cancel_futures=True)
        digests = {path: source_hasher.submit(sha256_of, path) for path in (checkpoint.weight_files if hashes else ())}
        waiting: deque[Future[object]] = deque()
        for file, output in zip(files, outputs, strict=True):
            digest = hashlib.sha256()
            flushed: Future[object] = flusher.submit(bool)
            parts = (converted(write, checkpoint, sources, stats) for write in file.writes)
            for data in chain([memoryview(file.header)], *parts):
                if hashes:
                    waiting.append(hasher.submit(digest.update, data))
                while len(waiting) > MOST_WAITING:
                    waiting.popleft().result()
                with writing(file.path):
                    write_all(output, data)
                    if (done + len(data)) // FLUSHED > done // FLUSHED:
                        flushed.result()
                        flushed = flusher.submit(os.fsync, output)
                done += len(data)
                if advance is not None:
                    advance(done, total)
            with writing(file.path):
                flushed.result()
                os.fsync(output)
            while waiting:
                waiting.popleft().result()
            records.append(FileRecord(file.path.name, file.size, digest.hexdigest() if hashes else None))
        source_sha256 = {checkpoint.file_name(path): digest.result() for path, digest in digests.items()}
    return Written(stats, tuple(records), dict(sorted(source_sha256.items())))


def converted(
    write: Write, checkpoint: Checkpoint, sources: Mapping[Path, FileIO], stats: dict[str, TensorStats]
) -> Iterator[memoryview]:
    """Yield a tensor's converted bytes in chunks, and add its counts to ``stats``. sources: the source's open files."""
    if write.data is None:
        info = checkpoint.tensors[str(write.source)]
    dtype = SAFETENSORS_DTYPES[info.dtype] if write.data is None else write.data.dtype
    narrow = write.dtype == torch.float16 and dtype != torch.float64 and not write.offset
    axes = [e for e in (write.row_exponents, write.column_exponents) if e is not None and e.numel()]
    reach = abs(write.exponent) + sum(float(exponents.abs().max()) for exponents in axes)
    wide = torch.float32 if narrow and reach <= FP32_REACH else torch.float64
    columns = math.prod(write.shape[1:])
    for rows, part in chunks(write.shape):
        begin, size = rows.start * columns + part.start, (rows.stop - rows.start) * (part.stop - part.start)
        if write.data is not None:
            source = write.data.reshape(-1)[begin : begin + size]
        else:
            source, offset = torch.empty(size, dtype=dtype), info.offset + begin * dtype.itemsize
            read_exactly(sources[info.file], bytes_of(source), offset)
        wanted, zero = scaled(source.to(wide, copy=True), write, rows, part)
        values = wanted.to(write.dtype)
        counts = count(wanted.numpy(), values.to(wide).numpy(), zero, torch.finfo(write.dtype).tiny)
        stats[write.name] = stats[write.name].plus(counts)
        yield bytes_of(values)


def chunks(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
    height, width = max(1, ELEMENTS // max(1, columns)), min(columns, ELEMENTS)
    for row in range(0, rows if columns else 0, height):
        for column in range(0, columns, width):
            yield slice(row, min(row + height, rows)), slice(column, min(column + width, columns))


def scaled(values: torch.Tensor, write: Write, rows: slice, columns: slice) -> tuple[torch.Tensor, Array]:
    """Scale a chunk of a tensor in place. Return its values, and a mask of values that were 0 before scaling. If
    ``write`` has an offset, the mask is of values that are 0 after scaling. rows, columns: the chunk's position."""
    zero = np.equal(values.numpy(), 0)
    if write.offset:  # adding 0 would turn -0 into 0
        values += write.offset
    if write.gain != 1.0:
        values.copy_((values.double() * write.gain).float())
    if write.exponent:
        values *= 2.0**write.exponent
    matrix = values.view(rows.stop - rows.start, -1)
    if write.row_exponents is not None:
        matrix *= powers_of_two(write.row_exponents[rows], values.dtype)[:, None]
    if write.column_exponents is not None:
        matrix *= powers_of_two(write.column_exponents[columns], values.dtype)
    if write.offset:
        values -= write.offset
        zero = np.equal(values.numpy(), 0)
    return values, zero


def powers_of_two(exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 2^exponents. They are exact for whole exponents, which torch.ldexp does not guarantee."""
    whole = exponents.floor()
    fractions = np.exp2((exponents - whole).double().numpy())
    return torch.from_numpy(np.ldexp(fractions, whole.to(torch.int32).numpy())).to(dtype)


def count(wanted: Array, written: Array, zero: Array, tiny: float) -> TensorStats:
    lossless, magnitude = np.equal(wanted, written), np.abs(written)
    normal, none = np.greater_equal(magnitude, tiny), np.equal(magnitude, 0)
    amax, zeros, nonfinite = float(magnitude.max()), int(np.count_nonzero(zero)), 0
    flushed = int(np.count_nonzero(none)) - zeros
    if flushed:
        lossless &= ~none | zero
    if not math.isfinite(amax):
        finite = np.isfinite(written)
        lossless &= finite
        normal &= finite
        nonfinite = int(np.count_nonzero(~finite))
    exact, large = (int(np.count_nonzero(mask)) for mask in (lossless, normal))
    return TensorStats(zero.size, exact, large, flushed, nonfinite, amax, zero.size - zeros)
