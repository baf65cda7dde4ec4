"""Read and write files: check free space, report disk errors in one line, parse JSON strictly. Imports no torch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ..errors import UserError, shortened
from .sources import RESTORE, shown

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
    """Flush a file, or a folder's entries, to the disk. Does nothing for a folder on Windows, which cannot open one."""
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


LONGEST_HEADER = 8_000_000  # bytes of a header, a config or an index: some 50,000 tensors, a few hundred MB once parsed


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


def size_of(source: FileIO) -> int:
    return os.fstat(source.fileno()).st_size


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


def read_bytes(source: FileIO, count: int, offset: int = 0) -> bytes:
    buffer = bytearray(count)
    read_exactly(source, memoryview(buffer), offset)
    return bytes(buffer)


def sha256_of(file: Path) -> str:
    with reading(file) as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f"key {shown(key)} comes twice")
    return dict(pairs)


def no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def parse_json(data: bytes, file: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in ``data``. Raises UserError for any other JSON, for duplicate keys and for NaN."""
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=no_constant)
        if b"\\u" in data:  # a lone surrogate is valid JSON, but UTF-8 cannot encode it
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        reason = shortened(str(error)) or "nested too deeply"
        raise UserError(f"{file}: the {what} is not valid JSON ({reason}); {RESTORE}") from error
    if not isinstance(parsed, dict):
        raise UserError(f"{file}: the {what} is not a JSON object; {RESTORE}")
    return parsed


def read_json(file: Path, what: str, limit: int = LONGEST_HEADER) -> dict[str, Any]:
    with reading(file) as source:
        size = size_of(source)
        if size > limit:
            raise UserError(f"{file}: {size} bytes are too many for a {what}; {RESTORE}")
        return parse_json(read_bytes(source, size), file, what)


def nested_value(data: object, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def zip_records(file: Path) -> dict[int, int]:
    """Return the size of each record of an uncompressed zip file, by the offset of the record's data."""
    sizes = {}
    try:
        with reading(file) as raw, zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise UserError(f"{file}: compressed; unpack and zip it again without compression, or {RESTORE}")
                if record.filename.endswith((".pkl", "/byteorder")) and record.file_size > LONGEST_HEADER:
                    raise UserError(f"{file}: {record.file_size} bytes are too many for a pickle of tensors; {RESTORE}")
                if record.filename.endswith("/byteorder") and archive.read(record).decode() != sys.byteorder:
                    raise UserError(f"{file}: saved on a machine of another byte order; save it again on one like this")
                raw.seek(record.header_offset + 26)
                name, extra = struct.unpack("<HH", raw.read(4))
                sizes[record.header_offset + 30 + name + extra] = record.file_size
    except (struct.error, zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        # Encrypted and multi-disk zip files, and impossible offsets, raise the other exceptions.
        raise UserError(
            f"{file}: cut short, in torch's format of before 2020, or no checkpoint at all; {RESTORE}, or, where you"
            " trust it, load it with torch and save it with safetensors"
        ) from error
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; {RESTORE}") from error
    return sizes
