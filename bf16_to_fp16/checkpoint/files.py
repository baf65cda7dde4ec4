"""Read and write files, check free space and parse JSON. Disk errors become one line. This module imports no torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ..errors import UserError, first_line
from .sources import RESTORE

FULL_OR_FAILING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}

FREE_SPACE_REMEDY = "free some space or choose another output path"


def check_free_space(out: Path, nbytes: int) -> None:
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise UserError(f"{out} needs {decimal(nbytes)} and its disk has {decimal(free)}; {FREE_SPACE_REMEDY}")


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
    """Flush a file, or a folder's entries, to the disk. On Windows, which cannot open a folder, do nothing for one."""
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


@contextmanager
def reading(file: Path) -> Iterator[FileIO]:
    if os.path.exists(file) and not os.path.isfile(file):
        raise UserError(f"{file} is not a regular file; {RESTORE}")
    try:
        waiting = getattr(os, "O_NONBLOCK", 0)  # opening a pipe would wait for its writer
        source = FileIO(file, opener=lambda path, flags: os.open(path, flags | BINARY | waiting))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {RESTORE}") from error
    with source:
        yield source


def read_exactly(source: FileIO, buffer: memoryview, offset: int) -> None:
    try:
        source.seek(offset)
        while buffer:
            count = source.readinto(buffer)
            if not count:
                raise UserError(f"{source.name} became shorter while it was read; {RESTORE}")
            buffer = buffer[count:]
    except OSError as error:
        raise UserError(f"{source.name}: {error.strerror}; {RESTORE}") from error


def sha256_of(file: Path) -> str:
    with reading(file) as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def parse_json(data: bytes, file: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in ``data``. Raises UserError if ``data`` is anything else. file, what: the file and the
    name of its content, for error messages."""
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: the {what} is not valid JSON ({first_line(error)}); {RESTORE}") from error
    if not isinstance(parsed, dict):
        raise UserError(f"{file}: the {what} is not a JSON object; {RESTORE}")
    return parsed


def read_json(file: Path, what: str) -> dict[str, Any]:
    with reading(file) as source:
        return parse_json(source.read(), file, what)


def nested_value(data: object, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data
