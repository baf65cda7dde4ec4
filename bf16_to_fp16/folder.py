"""The output folder: staged beside its place, filled, synced, and renamed into it whole or not at all.

Besides the weights a checkpoint has files that belong to it (tokenizer, generation settings, the modules of a
sentence encoder). They are carried over byte for byte; weights in other formats are not, since they would still
hold the old values, and the report names them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import UserError

OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".h5",
    ".msgpack",
    ".ot",
    ".onnx",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".npz",
    ".tflite",
    ".index.json",
)
"""Endings of weight files and their indexes, which are rewritten or left out, never copied."""

OWN_FILES = ("config.json", "README.md", "fp16_report.json", "fp16_report.html", ".gitattributes")
"""Top-level files that a converted folder has of its own."""


FULL_OR_FAILING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of the disk that is written to."""

SPACE = "free some space or choose another output path"


def check_out(out: Path, source: Path | None = None, *, force: bool) -> None:
    """Raise UserError unless a folder can be made at ``out``: absent or empty (or anything, under ``force``), writable,
    and apart from ``source``.

    Tried by making a folder beside it: what permissions promise, a file system may still refuse. Costs nothing, so
    that it can come before any work.
    """
    try:
        if out.exists() or out.is_symlink():
            if not out.is_dir() or out.is_symlink():
                raise UserError(f"{out} exists and is not a folder; choose another output path")
            if not force and any(out.iterdir()):
                raise UserError(f"{out} exists; choose another output path or give --force to replace it")
            if out.resolve() in (Path.cwd(), *Path.cwd().parents):
                raise UserError(f"{out} is where this runs and cannot be replaced; choose another output path")
            if out.is_mount():
                raise UserError(f"{out} is a mount point and cannot be replaced; choose a folder inside it")
        resolved = out.resolve()
        parent = nearest_parent(out)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}; choose another output path") from error
    if source is not None:
        origin = source.resolve()
        if resolved == origin or origin in resolved.parents or resolved in origin.parents:
            raise UserError(f"{out} overlaps the source {source}; choose an output path outside it")
    if not parent.is_dir():
        raise UserError(f"{parent} is not a folder; choose another output path")
    try:
        _try_out(parent / _beside(out).name)
    except OSError as error:
        raise UserError(f"{parent} is not writable ({error.strerror}); choose another output path") from error


def check_file(path: Path, mend: str) -> None:
    """Raise UserError, which ends with ``mend``, unless a file can be written at ``path``, there or in place of one."""
    reason: str | None = None
    try:
        if path.is_dir():
            reason = "Is a directory"
        elif path.exists():
            reason = None if os.access(path, os.W_OK) else "Permission denied"
        else:
            _try_out(_beside(path.absolute()))
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise UserError(f"{path}: cannot be written there ({reason}); {mend}")


def _try_out(path: Path) -> None:
    """Make a folder and remove it again; raise OSError where it cannot be made."""
    with undisturbed():
        os.mkdir(path, 0o700)
        with suppress(FileNotFoundError):  # another process took it for a leftover
            os.rmdir(path)


def nearest_parent(path: Path) -> Path:
    """Return the closest ancestor of ``path`` that exists, if only as a link to nowhere."""
    parent = path.absolute().parent
    while not os.path.lexists(parent):
        parent = parent.parent
    return parent


@contextmanager
def scratch(out: Path, kind: str = "partial") -> Iterator[Path]:
    """Yield an empty folder beside ``out`` that is removed at the end, unless it was renamed.

    It is locked meanwhile, and the system drops the lock of a process that is killed: so the next one that is to make
    ``out`` can tell what was left behind from what another one is working in, and removes it. Raises UserError where
    the folder cannot be made.
    """
    out = out.absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out)
    except OSError as error:
        raise UserError(f"{out.parent}: {error.strerror}; choose another output path") from error
    work, lock = _beside(out, kind), None
    try:
        try:
            lock = _claim(work)
        except OSError as error:
            raise UserError(f"{out.parent}: {error.strerror}; choose another output path") from error
        yield work
    finally:
        with undisturbed():
            shutil.rmtree(work, ignore_errors=True)
            if lock is not None:
                os.close(lock)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM to the end of the block, which is a short one that should not stop half-way."""
    waiting: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():  # where handlers run, and can be set
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not None:
                    before[number] = signal.signal(number, lambda number, _: waiting.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in waiting:
            signal.raise_signal(each)


def _beside(out: Path, kind: str = "partial") -> Path:
    """Return a path beside ``out`` that nobody else has.

    A name that is known before the folder is made can be removed whenever the making is interrupted.
    """
    return out.parent / f".{out.absolute().name}.{kind}-{secrets.token_hex(8)}"


def _claim(path: Path) -> int:
    """Make a folder for this user alone and lock it; return the descriptor that holds the lock."""
    while True:
        os.mkdir(path, 0o700)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process took it for a leftover, as it was not locked yet
            continue
        _lock(descriptor)
        if os.path.exists(path):
            return descriptor
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open folder and return whether that went; it does not where another process holds it, nor on a file
    system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep(out: Path) -> None:
    """Remove what processes that were killed left beside ``out``.

    A folder that was to be replaced stays as long as nothing has taken its place.
    """
    out = out.absolute()
    leftover = re.compile(rf"\.{re.escape(out.name)}\.(partial|replaced|rescaled)-[0-9a-f]{{16}}")
    for entry in sorted(out.parent.iterdir()):
        match = leftover.fullmatch(entry.name)
        if match is None or entry.is_symlink() or (match[1] == "replaced" and not out.exists()):
            continue
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _lock(descriptor):
                shutil.rmtree(entry, ignore_errors=True)
        finally:
            os.close(descriptor)


@contextmanager
def staged(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` that takes its place when the block ends well and vanishes when it does not.

    Raises UserError where the folder cannot be made or put in place, or the disk is full or fails meanwhile; ``out``
    then is as it was.
    """
    out = out.absolute()
    with scratch(out) as work:
        try:
            yield work
            # mkdtemp makes private folders; the result has the permissions of any other.
            umask = os.umask(0)
            os.umask(umask)
            work.chmod(0o777 & ~umask)
            sync_tree(work)
            with undisturbed():
                put_in_place(work, out, force=force)
        except OSError as error:
            if error.errno not in FULL_OR_FAILING:
                raise
            raise UserError(f"{out}: {error.strerror}; {SPACE}") from error


def put_in_place(work: Path, out: Path, *, force: bool) -> None:
    """Rename ``work`` to ``out``; with ``force`` an existing folder steps aside first and comes back if the rename
    fails."""
    aside: Path | None = None
    lock = None
    try:
        if force and out.exists():
            aside = _beside(out, "replaced")
            try:
                lock = _claim(aside)
                os.rename(out, aside / "old")
            except OSError as error:
                with suppress(OSError):
                    aside.rmdir()
                raise UserError(f"{out}: {error.strerror}; choose another output path") from error
        try:
            os.rename(work, out)
        except OSError as error:
            if aside is not None:
                os.rename(aside / "old", out)
                aside.rmdir()
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise UserError(
                    f"{out} appeared while it was being made; choose another output path or give --force"
                ) from error
            raise UserError(f"{out}: {error.strerror}; choose another output path") from error
        # From here on the result stands, and whatever fails is no longer its fault.
        with suppress(OSError):
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            sweep(out)
            sync_folder(out.parent)
    finally:
        if lock is not None:
            os.close(lock)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below ``folder`` to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            with open(Path(root) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(root))


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def carry_over(
    source: Path, target: Path, *, tokenizer: Path | None = None, back: bool = False
) -> tuple[list[str], list[str]]:
    """Copy the files that belong to a checkpoint besides its weights, and return the names carried over and left
    out.

    ``tokenizer``: a folder beside the source that holds the tokenizer (diffusers layouts). A folder that
    ``modules.json`` names is carried over whole; one that is missing raises UserError. The source's model card
    becomes ``SOURCE_README.md``; ``back`` restores it from there and leaves this program's own card behind.
    """
    carried, left_out = [], []
    modules = side_modules(source)
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            if entry.name in modules:
                for path in sorted(p for p in entry.rglob("*") if not p.is_dir()):
                    copy(path, target / path.relative_to(source), source)
                carried.append(f"{entry.name}/")
            elif not entry.name.startswith("."):
                left_out.append(f"{entry.name}/")
        elif entry.name == "README.md":
            if not back:
                copy(entry, target / "SOURCE_README.md", source)
                carried.append("README.md")
        elif back and entry.name == "SOURCE_README.md":
            copy(entry, target / "README.md", source)
            carried.append(entry.name)
        elif entry.name in OWN_FILES:
            continue
        elif entry.name.endswith(OTHER_WEIGHTS):
            left_out.append(entry.name)
        else:
            copy(entry, target / entry.name, source)
            carried.append(entry.name)
    if tokenizer is not None and tokenizer.is_dir():
        for entry in sorted(tokenizer.iterdir()):
            if entry.is_file() and not (target / entry.name).exists() and entry.name not in OWN_FILES:
                copy(entry, target / entry.name, tokenizer)
                carried.append(entry.name)
    return carried, left_out


def copy(file: Path, place: Path, folder: Path) -> None:
    """Copy a file of ``folder``; raise UserError where it is no regular file, cannot be read, or is a link to one
    outside, which would publish what lies there."""
    from .checkpoint import contained

    contained(folder, file.relative_to(folder).as_posix())
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            raise OSError(errno.EINVAL, "not a regular file" if file.exists() else "a link to nowhere")
        shutil.copyfile(file, place)
    except OSError as error:
        if error.errno in FULL_OR_FAILING:
            raise
        raise UserError(f"{file}: {error.strerror or error}; restore it from the original checkpoint") from error


def records(folder: Path, known: Collection[str] = ()) -> list[dict[str, object]]:
    """Return name, size in bytes (``nbytes``) and SHA-256 of every file below ``folder`` whose name is not ``known``,
    by name."""
    found: list[dict[str, object]] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in known:
            found.append({"name": name, "nbytes": path.stat().st_size, "sha256": sha256_of(path)})
    return found


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def side_modules(source: Path) -> set[str]:
    """Return the sub-folders that a sentence encoder's ``modules.json`` names; raise UserError where one is not
    there."""
    listing = source / "modules.json"
    if not listing.is_file():
        return set()
    try:
        names = {str(m["path"]) for m in json.loads(listing.read_text(encoding="utf-8")) if m["path"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{listing}: not a list of modules with paths; restore it from the original checkpoint"
        ) from error
    for name in sorted(names):
        if Path(name).is_absolute() or ".." in Path(name).parts or len(Path(name).parts) != 1:
            raise UserError(
                f"{listing}: module path {name!r} leaves the folder; restore it from the original checkpoint"
            )
        if not (source / name).is_dir():
            raise UserError(
                f"{listing}: module {name!r} is not in {source}; fetch the whole checkpoint, its output depends on it"
            )
    return names


def write_json(path: Path, data: Mapping[str, object]) -> None:
    """Write ``data`` as JSON with two spaces of indent and a final newline, UTF-8, numbers as ``finite`` makes them."""
    path.write_text(json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def finite(data: object) -> object:
    """Return ``data`` with ±inf as ±the largest double and NaN as None: JSON has neither, and readers compare these
    as numbers."""
    if isinstance(data, float):
        if math.isnan(data):
            return None
        return math.copysign(sys.float_info.max, data) if math.isinf(data) else data
    if isinstance(data, Mapping):
        return {str(k): finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(v) for v in data]
    return data
