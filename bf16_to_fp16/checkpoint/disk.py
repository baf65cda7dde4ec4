"""Bytes to the disk: files reserved before they are written, large ones past the page cache.

The cache spends more time on finding room for a large file than all the rest of rewriting it takes, and throws out what
others are about to read.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from ..errors import UserError
from ..system import is_direct, open_new, reserve, set_direct, write_at
from .formats import bytes_of
from .staging import FREE_SPACE_REMEDY

BUFFER = 1 << 21
"""Bytes that go to the disk at a time."""


IN_FLIGHT = 2
"""Buffers that are on their way to the disk at a time."""


ALIGNMENT = 4096
"""Offsets and lengths that go past the page cache are multiples of it, as every disk's blocks divide it."""


DIRECT_FROM = 1 << 26
"""Size in bytes from which on a file is written past the page cache; what is smaller is rather kept there, to be read
again soon."""


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
        raise UserError(f"{path}: {error.strerror}; {FREE_SPACE_REMEDY}") from error


@contextmanager
def created(path: Path, size: int) -> Iterator[int]:
    """Yield a descriptor of a new file, its space reserved where possible; the file is removed if the block fails."""
    with writing(path):
        descriptor = open_new(path)
    try:
        try:
            with writing(path):
                reserve(descriptor, size)
            yield descriptor
        finally:
            os.close(descriptor)  # first: Windows removes no open file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    done = 0
    while done < len(data):
        done += write_at(descriptor, data[done:], offset + done)
