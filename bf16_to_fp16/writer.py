"""Streaming weights from a checkpoint into fp16 safetensors files, scaled by powers of two and counted on the way.

One piece of a tensor at a time is read, scaled in fp32, rounded, counted and written, so the memory needed does not
depend on the checkpoint's size. Threads do one step each: reading and hashing, converting, writing, hashing what was
written. The bytes written do not depend on their number.

Three things make it about as fast as copying. A piece stays in the processor's cache for all passes over it. Counting
needs few of them: bf16 has 8 significant bits and fp16 11, so a bf16 weight that ends up above 2⁻¹⁷ (an eighth of
fp16's smallest normal number) is carried over exactly, and only those below are looked at one by one. And large files
go to the disk past the page cache, which spends more time on finding room for them than all the rest takes, and throws
out what others are about to read.

Names of files and their index are those of transformers. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import math
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from .checkpoint import DTYPES, NAMES, Checkpoint, RunningHash, TensorInfo, bytes_of, read_exactly, reading
from .errors import UserError
from .numerics import FP16_TINY

ELEMENTS = 1 << 19
"""Elements converted at a time: 1 MB of bf16, little enough to stay in a processor's cache from one pass to the next.
A quarter of it where all values are compared, which takes more memory for each."""

SAFE_FACTOR = 100
"""Largest |exponent| of one fp32 factor. With two of them nothing that fp16 can hold is lost in between: what one takes
below fp32's 2⁻¹²⁶ or above its 2¹²⁸, the other cannot bring back above 2⁻²⁶ or below 2²⁸."""

LARGEST_EXPONENT = 500
"""Exponents beyond it are refused; fp64, which the general path scales in, has room for twice as much."""

FP16_NORMAL, FP16_INF = 0x0400, 0x7C00
"""Bits of fp16's smallest normal number and of its infinity, without sign."""

INEXACT = 0x0080
"""Bits of 2⁻¹⁷, the largest fp16 number that a bf16 value can become by rounding: from 2⁻¹⁷ on the last of its 8
significant bits is worth at least 2⁻²⁴, fp16's smallest step."""

SLOTS = 4
"""Pieces on their way besides one for each converting thread."""

BUFFER = 1 << 21
"""Bytes that go to the disk at a time."""

IN_FLIGHT = 2
"""Buffers that are on their way to the disk at a time."""

ALIGNMENT = 4096
"""Offsets and lengths that go past the page cache are multiples of it, as every disk's blocks divide it."""

DIRECT_FROM = 1 << 26
"""Size in bytes from which on a file is written past the page cache; what is smaller is rather kept there, to be read
again soon."""

FLUSH_SECONDS = 0.25
"""Seconds between two flushes of files that do go through the page cache."""

REPORT_SECONDS = 0.2
"""Seconds between two looks at what worker processes have done."""

PR_SET_PDEATHSIG = 1
"""Linux's prctl option: the signal that a process gets when its parent ends."""

SPACE = "free some space or choose another output path"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Write:
    """One tensor to write: ``source`` (a tensor of the checkpoint) or ``data``, times ``gain`` and powers of two.

    The power's exponent is ``exponent`` + ``row_exponents[i]`` + ``column_exponents[j]`` (integer tensors over the
    first and the second axis). ``gain`` is applied in fp64 and rounded to fp32 before the exponents. ``dtype``: what
    to store.
    """

    name: str
    shape: tuple[int, ...]
    source: str | None
    data: torch.Tensor | None = None
    exponent: int = 0
    row_exponents: torch.Tensor | None = None
    column_exponents: torch.Tensor | None = None
    gain: float = 1.0
    dtype: torch.dtype = torch.float16

    def as_dtype(self, name: str) -> Write:
        """Return the same write with another dtype, spelled as in safetensors ("BF16")."""
        return replace(self, dtype=DTYPES[name])


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
class FileRecord:
    """A file written: its name in the folder, its size in bytes, its SHA-256 in hexadecimal (None without hashing)."""

    name: str
    nbytes: int
    sha256: str | None


@dataclass(frozen=True)
class Written:
    """What ``write_fp16`` wrote. ``source_sha256``: of every source weight file by name, empty without hashing."""

    stats: dict[str, TensorStats]
    files: tuple[FileRecord, ...]
    source_sha256: dict[str, str]


def write_fp16(
    checkpoint: Checkpoint,
    writes: Sequence[Write],
    folder: Path,
    *,
    max_shard_size: int | None = None,
    hashes: bool = True,
    threads: int = 1,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write tensors as safetensors into ``folder``: ``model.safetensors``, or shards and their index.

    max_shard_size: bytes of tensors in a shard, else a tensor goes to the shard that its source came from and one
    without source to the last. progress: called with bytes done and in all, from one thread at a time. threads: that
    convert, besides those that read, write and hash. workers: processes that share the shards among them; a script
    that asks for several needs the guard ``if __name__ == "__main__"``. The bytes written depend on neither.
    Nothing is clamped: what is beyond fp16 becomes inf and is counted. Raises UserError for a full disk (before any
    work where the file system can reserve space) and errors of a disk; what was written is then removed.
    """
    names = [w.name for w in writes]
    if len(set(names)) != len(names):
        raise ValueError("two tensors to write have the same name")
    for write in writes:
        check(write, checkpoint)
    files = lay_out(shards(checkpoint, writes, max_shard_size), folder)
    parts = divide(files, workers, checkpoint)
    if len(parts) == 1:
        written = [write_part(checkpoint, parts[0], hashes, threads, progress)]
    else:
        written = in_processes(checkpoint, parts, hashes, threads, progress)
    stats = {name: stats for part in written for name, stats in part.stats.items()}
    sources = {file: digest for part in written for file, digest in part.source_sha256.items()}
    by_name = {record.name: record for part in written for record in part.files}
    records = [by_name[file.path.name] for file in files]
    if len(files) > 1:
        try:
            records.append(write_index(files, folder, hashes))
        except BaseException:
            remove(files)
            raise
    return Written({w.name: stats[w.name] for w in writes}, tuple(records), dict(sorted(sources.items())))


@dataclass(frozen=True)
class Part:
    """What one process writes: output files, and the source files that it hashes, which others may read as well."""

    files: tuple[OutFile, ...]
    sources: tuple[Path, ...]


def divide(files: Sequence[OutFile], workers: int, checkpoint: Checkpoint) -> list[Part]:
    """Return the parts of at most ``workers`` processes, of about the same size; each source is hashed where most of
    it is read."""
    groups: list[list[OutFile]] = [[] for _ in range(max(1, min(workers, len(files))))]
    for file in sorted(files, key=lambda f: -f.size):
        min(groups, key=lambda group: sum(f.size for f in group)).append(file)
    read = [Counter[Path]() for _ in groups]
    for group, count in zip(groups, read, strict=True):
        for write in (w for file in group for w, _ in file.tensors if w.source is not None):
            count[checkpoint.tensors[str(write.source)].file] += size_of(write)
    sources: list[list[Path]] = [[] for _ in groups]
    for path in checkpoint.weight_files:
        sources[max(range(len(groups)), key=lambda i: read[i][path])].append(path)
    return [Part(tuple(group), tuple(paths)) for group, paths in zip(groups, sources, strict=True)]


def write_part(
    checkpoint: Checkpoint,
    part: Part,
    hashes: bool,
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> Written:
    """Write the files of one process, whole and flushed to the disk, or none of them."""
    with ExitStack() as stack:
        stream = Stream(checkpoint, part, hashes, progress, stack)
        stream.run(threads)
        for file in part.files:
            with writing(file.path):
                os.fsync(stream.outputs[file.path])
        records = tuple(FileRecord(f.path.name, f.size, stream.written_sha256(f)) for f in part.files)
        return Written(stream.stats, records, stream.source_sha256())


def in_processes(
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    hashes: bool,
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> list[Written]:
    """Write parts in a process each, which starts afresh and ends with this one; none of their files stay if one
    fails."""
    context = multiprocessing.get_context("spawn")
    done = context.Array("q", len(parts), lock=False)
    total = sum(f.size for part in parts for f in part.files)
    with ProcessPoolExecutor(len(parts), context, start_worker, (done, os.getpid())) as pool:
        futures = [
            pool.submit(write_part_counted, checkpoint, part, hashes, threads, number)
            for number, part in enumerate(parts)
        ]
        try:
            waiting = set(futures)
            while waiting:
                ended, waiting = wait(waiting, timeout=REPORT_SECONDS, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                if progress is not None:
                    progress(sum(done), total)
        except BaseException as error:
            for process in list((pool._processes or {}).values()):
                process.terminate()  # it cleans up after itself
            wait(futures)
            remove(f for future, part in zip(futures, parts, strict=True) if not future.exception() for f in part.files)
            if isinstance(error, BrokenProcessPool):
                problem = "a process that wrote weights was killed, as happens when memory ends; use fewer --workers"
                raise UserError(problem) from error
            raise
    return [future.result() for future in futures]


COUNTS: Any = None
"""In a worker process: the bytes that each has written, shared with the parent."""


def start_worker(counts: Any, parent: int) -> None:
    """Prepare a worker process: it ends when its parent is killed, and leaves Ctrl-C to it."""
    global COUNTS
    COUNTS = counts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before the line above
        os._exit(1)


def write_part_counted(checkpoint: Checkpoint, part: Part, hashes: bool, threads: int, number: int) -> Written:
    """Write a part in a worker process, counting where the parent can see it."""

    def count(done: int, total: int) -> None:
        COUNTS[number] = done

    return write_part(checkpoint, part, hashes, threads, count)


def remove(files: Iterable[OutFile]) -> None:
    """Remove what was written of files."""
    for file in files:
        file.path.unlink(missing_ok=True)


# --- where things go -----------------------------------------------------------------------------------------------

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
        return DTYPES[checkpoint.tensors[write.source].dtype]
    assert write.data is not None
    return write.data.dtype


def check(write: Write, checkpoint: Checkpoint) -> None:
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
            groups[number[checkpoint.tensors[write.source].file] if write.source is not None else -1].append(write)
        return [g for g in groups if g] or [[]]
    result: list[list[Write]] = [[]]
    room = max_shard_size
    for write in ordered:
        if size_of(write) > room and result[-1]:
            result.append([])
            room = max_shard_size
        result[-1].append(write)
        room -= size_of(write)
    return result


def lay_out(groups: Sequence[Sequence[Write]], folder: Path) -> list[OutFile]:
    """Return the files for groups of tensors, in each wider dtypes first, so that all are aligned, then by name."""
    files = []
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins, end = [], 0
        ordered = sorted(group, key=lambda w: (-w.dtype.itemsize, w.name))
        for write in ordered:
            begins.append(end)
            end += size_of(write)
            entries[write.name] = {
                "dtype": NAMES[write.dtype],
                "shape": list(write.shape),
                "data_offsets": [begins[-1], end],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        placed = tuple((w, len(header) + b) for w, b in zip(ordered, begins, strict=True))
        files.append(OutFile(folder / name, header, placed, len(header) + end))
    return files


def write_index(files: Sequence[OutFile], folder: Path, hashes: bool) -> FileRecord:
    """Write the index of shards as transformers spells it."""
    placed = {write.name: file.path.name for file in files for write, _ in file.tensors}
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


# --- pieces --------------------------------------------------------------------------------------------------------


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

    number: int
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
    single = narrow and max([abs(scalar), *parts]) <= SAFE_FACTOR
    if single:
        rows, columns = factor(rows), factor(columns)
    return Scale(single, scalar, rows, columns)


def factor(exponents: torch.Tensor | None) -> torch.Tensor | None:
    """Return 2^exponents in fp32, exactly, which torch.ldexp does not promise; None stays None."""
    if exponents is None:
        return None
    return torch.from_numpy(np.ldexp(np.float32(1), exponents.numpy()))


def pieces(checkpoint: Checkpoint, files: Sequence[OutFile]) -> Iterator[Piece]:
    """Yield the pieces of all files in the order of the output."""
    number = 0
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
                        number,
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
                    number += 1


# --- converting one piece ------------------------------------------------------------------------------------------


class Scratch:
    """The buffers of one converting thread, reused for every piece; pages that are never touched take no memory."""

    def __init__(self) -> None:
        self.values = torch.empty(ELEMENTS, dtype=torch.float32)
        self.magnitude = np.empty(ELEMENTS, np.int16)
        self.mask = np.empty(ELEMENTS, np.bool_)


def convert(source: torch.Tensor, piece: Piece, output: torch.Tensor, scratch: Scratch) -> TensorStats:
    """Fill ``output`` with the values to write for a piece and return what became of them."""
    write = piece.write
    zero = Zeros(source)
    if not piece.scale.single:
        wide = general(source, piece)
        output.copy_(torch.from_numpy(wide))
        return count(wide, output.double().numpy(), zero.everywhere(), torch.finfo(write.dtype).tiny)
    values = scratch.values[: piece.elements]
    values.copy_(source)
    if write.gain != 1.0:
        values.copy_(values.double().mul_(write.gain))
    scale(values, piece)
    output.copy_(values)
    if is_narrow(write, piece.scale, source.dtype):
        return count_narrow(values, output, zero, scratch)
    return count(values.numpy(), output.float().numpy(), zero.everywhere(), FP16_TINY)


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
    """Return a piece's scaled values in fp64: for fp64 sources, large exponents and other outputs than fp16."""
    values = source.to(torch.float64, copy=True)
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
        return np.asarray(np.ldexp(matrix, exponents.numpy())).reshape(-1)


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


def count(wanted: Array, written: Array, zero: Array, tiny: float) -> TensorStats:
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
    places = np.flatnonzero(np.less_equal(magnitude, INEXACT, out=mask))
    if 4 * places.size > elements:
        return count(values.numpy(), output.float().numpy(), zero.everywhere(), FP16_TINY)
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


# --- the stream ----------------------------------------------------------------------------------------------------


@dataclass
class Slot:
    """The room for one piece on its way, and what is known of it; used again for a later piece."""

    source: torch.Tensor
    output: torch.Tensor
    piece: Piece | None = None
    converted: Future[TensorStats] | None = None

    def output_of(self, piece: Piece) -> torch.Tensor:
        """Return room for a piece's values as written."""
        return self.bytes_of(piece).view(piece.write.dtype)

    def bytes_of(self, piece: Piece) -> torch.Tensor:
        """Return the same as uint8."""
        return self.output[: piece.elements * piece.write.dtype.itemsize]


Line = SimpleQueue["Slot | None"]
"""Slots in the order of their pieces; None when there are no more."""


@dataclass
class Stream:
    """The state that threads share while they write: open files, hashes, counts.

    Slots go round: one thread reads pieces (and hashes them), a pool converts them, one thread collects them for the
    disk and one hashes them, each in the order of the files. A piece changes hands three times, which matters: a
    thread that is woken costs as much as hashing some kilobytes.
    """

    checkpoint: Checkpoint
    part: Part
    hashes: bool
    progress: Callable[[int, int], None] | None
    stack: ExitStack
    files: tuple[OutFile, ...] = field(init=False)
    stats: dict[str, TensorStats] = field(init=False)
    outputs: dict[Path, int] = field(init=False)
    sources: dict[Path, int] = field(init=False)

    def __post_init__(self) -> None:
        self.files = self.part.files
        self.stats = {w.name: NOTHING for f in self.files for w, _ in f.tensors}
        used = {self.checkpoint.tensors[str(n)].file for n in (w.source for f in self.files for w, _ in f.tensors) if n}
        mine = [p for p in self.checkpoint.weight_files if p in used or (self.hashes and p in self.part.sources)]
        self.sources = {p: self.stack.enter_context(reading(p)) for p in mine}
        self.outputs = {f.path: self.stack.enter_context(created(f.path, f.size)) for f in self.files}
        self.source_hashes = {p: RunningHash(self.sources[p], p) for p in self.part.sources if self.hashes}
        self.output_hashes = {f.path: hashlib.sha256() for f in self.files if self.hashes}
        self.upcoming = iter(self.files)
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.pieces = pieces(self.checkpoint, self.files)
        self.scratch = threading.local()
        self.done, self.total = 0, sum(f.size for f in self.files)

    def run(self, threads: int) -> None:
        """Write everything, converting in this many threads; raise the first exception once all threads have ended."""
        free, read, written = Line(), Line(), Line()
        for _ in range(SLOTS + threads):
            free.put(Slot(room(8), room(4)))
        with (
            one_torch_thread(),
            ThreadPoolExecutor(threads, thread_name_prefix="convert") as converters,
            ThreadPoolExecutor(4, thread_name_prefix="write") as pool,
            Sink() as sink,
        ):
            self.sink = sink
            stages = [
                pool.submit(self.stage, free, partial(self.read, converters), read),
                pool.submit(self.stage, read, self.write, written),
                pool.submit(self.stage, written, self.account, free),
            ]
            flusher = pool.submit(self.flush)
            try:
                wait(stages)
            finally:
                self.stop.set()
            for future in (*stages, flusher):
                future.result()
            while self.next_file():  # those without a value, after the last piece
                pass

    def flush(self) -> None:
        """Hand to the disk what has been written, so that it works at the same time and the last fsync finds little."""
        try:
            while not self.stop.wait(FLUSH_SECONDS):
                for path, descriptor in self.outputs.items():
                    if is_direct(descriptor):
                        continue
                    with writing(path):
                        getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has only the latter
        except BaseException:
            self.stop.set()
            raise

    def stage(self, line: Line, act: Callable[[Slot], bool], after: Line) -> None:
        """Do one thing to every slot until there are no more or another thread fails."""
        try:
            while (slot := line.get()) is not None and not self.stop.is_set() and act(slot):
                after.put(slot)
        except BaseException:
            self.stop.set()
            raise
        finally:
            after.put(None)

    def read(self, converters: ThreadPoolExecutor, slot: Slot) -> bool:
        """Read the next piece and have it converted; return whether there was one."""
        slot.piece = piece = next(self.pieces, None)
        if piece is None:
            return False
        if piece.info is not None:
            source = slot.source[: piece.elements * DTYPES[piece.info.dtype].itemsize].view(DTYPES[piece.info.dtype])
            offset = piece.info.offset + piece.begin * source.itemsize
            data = bytes_of(source)
            read_exactly(self.sources[piece.info.file], data, offset, piece.info.file)
            slot.converted = converters.submit(self.convert, source, slot, piece)
            if piece.info.file in self.source_hashes:
                self.source_hashes[piece.info.file].feed(data, offset)
        else:
            assert piece.write.data is not None
            source = piece.write.data.reshape(-1)[piece.begin : piece.begin + piece.elements]
            slot.converted = converters.submit(self.convert, source, slot, piece)
        return True

    def convert(self, source: torch.Tensor, slot: Slot, piece: Piece) -> TensorStats:
        """Convert a piece into its slot and return what became of it."""
        if not hasattr(self.scratch, "own"):
            self.scratch.own = Scratch()
        return convert(source, piece, slot.output_of(piece), self.scratch.own)

    def write(self, slot: Slot) -> bool:
        """Hand a piece to the disk once it is converted."""
        piece = slot.piece
        assert piece is not None and slot.converted is not None
        stats = slot.converted.result()
        while self.sink.path != piece.path:
            self.next_file()
        assert self.sink.offset == piece.offset, "pieces come in the order of the files"
        self.sink.take(slot.bytes_of(piece))
        self.stats[piece.write.name] = self.stats[piece.write.name].plus(stats)
        return True

    def account(self, slot: Slot) -> bool:
        """Hash what was written of a piece, and report progress."""
        assert slot.piece is not None
        result = slot.bytes_of(slot.piece)
        if self.hashes:
            self.output_hashes[slot.piece.path].update(bytes_of(result))
        self.advance(len(result))
        return True

    def next_file(self) -> bool:
        """End the file that is being written and begin the next; return whether there is one."""
        self.sink.end()
        file = next(self.upcoming, None)
        if file is None:
            return False
        self.sink.begin(file.path, self.outputs[file.path], file.size)
        self.sink.take(torch.frombuffer(bytearray(file.header), dtype=torch.uint8))
        if self.hashes:
            self.output_hashes[file.path].update(file.header)
        self.advance(len(file.header))
        return True

    def advance(self, nbytes: int) -> None:
        """Report progress."""
        with self.lock:
            self.done += nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)

    def written_sha256(self, file: OutFile) -> str | None:
        """Return the hash of an output file, None without hashing."""
        return self.output_hashes[file.path].hexdigest() if self.hashes else None

    def source_sha256(self) -> dict[str, str]:
        """Return the hashes of this part's source files by name, of nothing without hashing."""
        for running in self.source_hashes.values():
            running.catch_up(os.fstat(running.descriptor).st_size)
        return {str(p.relative_to(self.checkpoint.folder)): r.digest.hexdigest() for p, r in self.source_hashes.items()}


def room(width: int) -> torch.Tensor:
    """Return room for a piece's elements of up to this many bytes; pages that are never touched take no memory."""
    return torch.empty(ELEMENTS * width, dtype=torch.uint8)


class Sink:
    """Collects the bytes of files, each from its beginning on, in buffers that threads hand to the disk.

    A large file bypasses the page cache (O_DIRECT) where the system and the file system know how.
    """

    def __init__(self) -> None:
        """Make the buffers, aligned to pages as O_DIRECT asks."""
        self.free = deque(torch.frombuffer(mmap.mmap(-1, BUFFER), dtype=torch.uint8) for _ in range(IN_FLIGHT + 1))
        self.under_way: deque[tuple[Future[None], torch.Tensor]] = deque()
        self.pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="disk")
        self.path: Path | None = None
        self.descriptor, self.offset, self.filled = -1, 0, 0

    def __enter__(self) -> Sink:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the disk."""
        self.pool.shutdown()

    def begin(self, path: Path, descriptor: int, size: int) -> None:
        """Start on an empty file, which will get ``size`` bytes."""
        self.path, self.descriptor, self.offset, self.filled = path, descriptor, 0, 0
        if size >= DIRECT_FROM:
            set_direct(descriptor, True)

    def take(self, data: torch.Tensor) -> None:
        """Append bytes (uint8) to the file; raise UserError for what the disk refused so far."""
        while len(data):
            part = data[: BUFFER - self.filled]
            self.free[0][self.filled : self.filled + len(part)].copy_(part)
            self.filled += len(part)
            self.offset += len(part)
            data = data[len(part) :]
            if self.filled == BUFFER:
                self.hand_over()

    def hand_over(self) -> None:
        """Send off the first free buffer, and wait until there is another."""
        assert self.path is not None
        buffer = self.free.popleft()
        data = bytes_of(buffer)[: self.filled]
        written = self.pool.submit(store, self.path, self.descriptor, data, self.offset - self.filled)
        self.under_way.append((written, buffer))
        self.filled = 0
        while not self.free:
            self.receive()

    def receive(self) -> None:
        """Wait for the buffer that has been under way for longest."""
        written, buffer = self.under_way.popleft()
        self.free.append(buffer)
        written.result()

    def end(self) -> None:
        """Wait until the file is written; nothing if there is none."""
        if self.filled:
            self.hand_over()
        while self.under_way:
            self.receive()


def store(path: Path, descriptor: int, data: memoryview, offset: int) -> None:
    """Write a buffer, through the page cache where its length or the file system asks for it."""
    with writing(path):
        aligned = len(data) // ALIGNMENT * ALIGNMENT if is_direct(descriptor) else 0
        try:
            write_all(descriptor, data[:aligned], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            aligned = 0
        if aligned < len(data):  # the last buffer of a file, or all of them
            set_direct(descriptor, False)
            write_all(descriptor, data[aligned:], offset + aligned)


def is_direct(descriptor: int) -> bool:
    """Return whether writes to a file bypass the page cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def set_direct(descriptor: int, on: bool) -> None:
    """Let writes to a file bypass the page cache, if that is possible, or not."""
    direct = getattr(os, "O_DIRECT", 0)  # macOS has none
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Make threads that are started inside compute with one torch thread each."""
    # A new thread takes the process-wide setting when it first computes.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a UserError that names the output file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {SPACE}") from error


@contextmanager
def created(path: Path, size: int) -> Iterator[int]:
    """Yield a descriptor of a new file, its space reserved where possible; the file is removed if the block fails."""
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with writing(path):
            reserve(descriptor, size)
        yield descriptor
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def reserve(descriptor: int, size: int) -> None:
    """Reserve space for a file; do nothing on a file system or an operating system that cannot."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
