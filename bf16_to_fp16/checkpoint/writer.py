"""Weights streamed from a checkpoint into safetensors files: pieces read, converted, written and hashed side by side.

One piece of a tensor at a time is under way in each step, so the memory needed does not depend on the checkpoint's
size. Threads do one step each: reading and hashing, converting (``pieces``), writing (``disk``), hashing what was
written. Several processes may share the files. The bytes written depend on neither number.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from ..errors import UserError
from ..system import end_with, flush, is_direct
from .disk import Sink, created, one_torch_thread, writing
from .formats import SAFETENSORS_DTYPES, RunningHash, bytes_of, read_exactly, reading
from .pieces import NOTHING, Piece, Scratch, TensorStats, convert_piece, output_pieces, room
from .reader import Checkpoint
from .shards import FileRecord, OutFile, Write, check_write, lay_out, remove, shards, size_of, write_index

SLOTS = 4
"""Pieces on their way besides one for each converting thread."""


FLUSH_SECONDS = 0.25
"""Seconds between two flushes of files that do go through the page cache."""


REPORT_SECONDS = 0.2
"""Seconds between two looks at what worker processes have done."""


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
    advance: Callable[[int, int], None] | None = None,
) -> Written:
    """Write tensors as safetensors into ``folder``: ``model.safetensors``, or shards and their index, under the names
    that the source's files have for them.

    max_shard_size: bytes of tensors in a shard, else a tensor goes to the shard that its source came from and one
    without source to the last. advance: called with bytes done and in all, from one thread at a time. threads: that
    convert, besides those that read, write and hash. workers: processes that share the shards among them; a script
    that asks for several needs the guard ``if __name__ == "__main__"``. The bytes written depend on neither.
    Nothing is clamped: what is beyond fp16 becomes inf and is counted. Raises UserError for a full disk (before any
    work where the file system can reserve space) and errors of a disk; what was written is then removed.
    """
    names = [w.name for w in writes]
    if len(set(names)) != len(names):
        raise ValueError("two tensors to write have the same name")
    for write in writes:
        check_write(write, checkpoint)
    files = lay_out(shards(checkpoint, writes, max_shard_size), folder, checkpoint.stored_names)
    whole = Workload(checkpoint, tuple(files), tuple(checkpoint.weight_files), hashes, threads)
    parts = whole.divided(workers)
    written = [write_workload(parts[0], advance)] if len(parts) == 1 else in_processes(parts, advance)
    stats = {name: stats for workload in written for name, stats in workload.stats.items()}
    sources = {file: digest for workload in written for file, digest in workload.source_sha256.items()}
    by_name = {record.name: record for workload in written for record in workload.files}
    records = [by_name[file.path.name] for file in files]
    if len(files) > 1:
        try:
            records.append(write_index(files, folder, checkpoint.stored_names, hashes))
        except BaseException:
            remove(files)
            raise
    return Written({w.name: stats[w.name] for w in writes}, tuple(records), dict(sorted(sources.items())))


@dataclass(frozen=True)
class Workload:
    """What one process writes: output files with tensors of ``checkpoint``, which so many ``threads`` convert, and if
    ``hashes`` are wanted the source files that it hashes, which others may read as well."""

    checkpoint: Checkpoint
    files: tuple[OutFile, ...]
    sources: tuple[Path, ...]
    hashes: bool
    threads: int

    def divided(self, workers: int) -> list[Workload]:
        """Return the workloads of at most ``workers`` processes, of about the same size; each source is hashed where
        most of it is read."""
        groups: list[list[OutFile]] = [[] for _ in range(max(1, min(workers, len(self.files))))]
        for file in sorted(self.files, key=lambda f: -f.size):
            min(groups, key=lambda group: sum(f.size for f in group)).append(file)
        read = [Counter[Path]() for _ in groups]
        for group, count in zip(groups, read, strict=True):
            for write in (w for file in group for w, _ in file.tensors if w.source is not None):
                count[self.checkpoint.tensors[str(write.source)].file] += size_of(write)
        sources: list[list[Path]] = [[] for _ in groups]
        for path in self.sources:
            sources[max(range(len(groups)), key=lambda i: read[i][path])].append(path)
        pairs = zip(groups, sources, strict=True)
        return [replace(self, files=tuple(group), sources=tuple(paths)) for group, paths in pairs]


def write_workload(workload: Workload, advance: Callable[[int, int], None] | None) -> Written:
    """Write the files of one process, whole and flushed to the disk, or none of them."""
    with ExitStack() as stack:
        pipeline = WritePipeline(workload, advance, stack)
        pipeline.run()
        for file in workload.files:
            with writing(file.path):
                os.fsync(pipeline.outputs[file.path])
        records = tuple(FileRecord(f.path.name, f.size, pipeline.written_sha256(f)) for f in workload.files)
        return Written(pipeline.stats, records, pipeline.source_sha256())


def in_processes(parts: Sequence[Workload], advance: Callable[[int, int], None] | None) -> list[Written]:
    """Write each workload in a process of its own, which is spawned and ends with this one; if one fails, no file of
    any stays."""
    context = multiprocessing.get_context("spawn")
    done = context.Array("q", len(parts), lock=False)
    total = sum(f.size for workload in parts for f in workload.files)
    with ProcessPoolExecutor(len(parts), context, start_worker, (done, os.getpid())) as pool:
        futures = [pool.submit(write_workload_counted, workload, number) for number, workload in enumerate(parts)]
        try:
            waiting = set(futures)
            while waiting:
                ended, waiting = wait(waiting, timeout=REPORT_SECONDS, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                if advance is not None:
                    advance(sum(done), total)
        except BaseException as error:
            for process in list((pool._processes or {}).values()):
                process.terminate()  # it cleans up after itself
            wait(futures)
            remove(
                f
                for future, workload in zip(futures, parts, strict=True)
                if not future.exception()
                for f in workload.files
            )
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
    end_with(parent)


def write_workload_counted(workload: Workload, number: int) -> Written:
    """Write a workload in a worker process, counting where the parent can see it."""

    def count(done: int, total: int) -> None:
        COUNTS[number] = done

    return write_workload(workload, count)


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


SlotQueue = SimpleQueue["Slot | None"]
"""Slots in the order of their pieces; None when there are no more."""


@dataclass
class WritePipeline:
    """The state that threads share while they write: open files, hashes, counts.

    Slots go round: one thread reads pieces (and hashes them), a pool converts them, one thread collects them for the
    disk and one hashes them, each in the order of the files. A piece changes hands three times, which matters: a
    thread that is woken costs as much as hashing some kilobytes.
    """

    workload: Workload
    advance: Callable[[int, int], None] | None
    stack: ExitStack
    checkpoint: Checkpoint = field(init=False)
    hashes: bool = field(init=False)
    files: tuple[OutFile, ...] = field(init=False)
    stats: dict[str, TensorStats] = field(init=False)
    outputs: dict[Path, int] = field(init=False)
    sources: dict[Path, int] = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoint, self.hashes, self.files = self.workload.checkpoint, self.workload.hashes, self.workload.files
        self.stats = {w.name: NOTHING for f in self.files for w, _ in f.tensors}
        used = {self.checkpoint.tensors[str(n)].file for n in (w.source for f in self.files for w, _ in f.tensors) if n}
        mine = [*sorted(used), *(p for p in self.workload.sources if self.hashes and p not in used)]
        self.sources = {p: self.stack.enter_context(reading(p)) for p in mine}
        self.outputs = {f.path: self.stack.enter_context(created(f.path, f.size)) for f in self.files}
        self.source_hashes = {p: RunningHash(self.sources[p], p) for p in self.workload.sources if self.hashes}
        self.output_hashes = {f.path: hashlib.sha256() for f in self.files if self.hashes}
        self.upcoming = iter(self.files)
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.pieces = output_pieces(self.checkpoint, self.files)
        self.scratch = threading.local()
        self.done, self.total = 0, sum(f.size for f in self.files)

    def run(self) -> None:
        """Write everything; raise the first exception once all threads have ended."""
        threads = self.workload.threads
        free, read, written = SlotQueue(), SlotQueue(), SlotQueue()
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
                        flush(descriptor)
        except BaseException:
            self.stop.set()
            raise

    def stage(self, line: SlotQueue, act: Callable[[Slot], bool], after: SlotQueue) -> None:
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
            source = slot.source[: piece.elements * SAFETENSORS_DTYPES[piece.info.dtype].itemsize].view(
                SAFETENSORS_DTYPES[piece.info.dtype]
            )
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
        return convert_piece(source, piece, slot.output_of(piece), self.scratch.own)

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
        self.add_done(len(result))
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
        self.add_done(len(file.header))
        return True

    def add_done(self, nbytes: int) -> None:
        """Report progress."""
        with self.lock:
            self.done += nbytes
            if self.advance is not None:
                self.advance(self.done, self.total)

    def written_sha256(self, file: OutFile) -> str | None:
        """Return the hash of an output file, None without hashing."""
        return self.output_hashes[file.path].hexdigest() if self.hashes else None

    def source_sha256(self) -> dict[str, str]:
        """Return the hashes of this workload's source files by name; empty without hashing."""
        for running in self.source_hashes.values():
            running.catch_up(os.fstat(running.descriptor).st_size)
        return {self.checkpoint.file_name(p): r.digest.hexdigest() for p, r in self.source_hashes.items()}
