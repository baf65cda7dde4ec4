"""Free disk space, and errors of the disk in one line."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.filesize import decimal

from ..errors import UserError

FULL_OR_FAILING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}

FREE_SPACE_REMEDY = "free some space or choose another output path"


def check_free_space(
    what: str,
    nbytes: int,
    folder: Path,
    *,
    of: str = "the cache",
    otherwise: str = "set HF_HOME to a folder on another",
) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise UserError(
            f"{what} needs {decimal(nbytes)} and the disk of {of} has {decimal(free)};"
            f" free some space, or {otherwise} disk"
        )


@contextmanager
def writing(path: Path, remedy: str = FREE_SPACE_REMEDY) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from error


BINARY: int = getattr(os, "O_BINARY", 0)  # without it Windows translates line ends, in weights as well


def write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk. Windows cannot open a folder."""
    if BINARY and path.is_dir():
        return
    descriptor = os.open(path, (os.O_RDWR if BINARY else os.O_RDONLY) | BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root) / name)
        sync(Path(root))


@contextmanager
def created(path: Path) -> Iterator[int]:
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
    try:
        yield descriptor
    except BaseException:
        os.close(descriptor)  # first: Windows removes no open file
        path.unlink(missing_ok=True)
        raise
    os.close(descriptor)
