"""The output folder: filled in a temporary folder beside its place and renamed into it, whole or not at all."""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import shutil
import signal
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from ..errors import UserError
from .disk import FREE_SPACE_REMEDY, FULL_OR_FAILING, sync, sync_tree, writing
from .ownership import files_of, is_made_from, is_report, is_whole, listed_files, strange_file

ELSEWHERE = "choose another output path"
MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"


def check_out(out: Path, *sources: str | Path | None, force: bool) -> None:
    """Raise UserError unless a folder can be made at ``out``: absent or empty (or, under ``force``, one that this
    program wrote and that holds nothing else), writable, and apart from the ``sources`` that are here and from what
    they were made from. Tried by making a folder beside it, as a file system may refuse what permissions promise."""
    with writing(out, ELSEWHERE):
        there = out.is_dir() and not out.is_symlink()
        if not there and (out.exists() or out.is_symlink()):
            what = "is a link" if out.is_symlink() else "exists and is not a folder"
            raise UserError(f"{out} {what}; {ELSEWHERE}")
        here = out.absolute().name in ("", "..") or (there and out.resolve() in (Path.cwd(), *Path.cwd().parents))
        if here or (there and os.path.ismount(out)):
            what = "is where this runs or above it" if here else "is a mount point"
            raise UserError(f"{out} {what} and cannot be replaced; {ELSEWHERE}")
        for source in sources:
            check_apart(out, source)
        if inside := next((folder for folder in out.absolute().parents if is_whole(folder)), None):
            raise UserError(f"{out} lies in {inside}, which this program wrote whole; choose an output path outside it")
        if there and any(out.iterdir()):
            check_ours(out)
            if not force:
                raise UserError(f"{out} exists; choose another output path or give --force to replace it")
        parent = nearest_parent(out)
    if not parent.is_dir():
        raise UserError(f"{parent} is not a folder; {ELSEWHERE}")
    try:
        _try_out(parent / _beside(out).name)
    except OSError as error:
        raise UserError(f"{parent} is not writable ({error.strerror}); {ELSEWHERE}") from error


def check_apart(out: Path, source: str | Path | None) -> None:
    """Raise UserError where writing ``out`` could harm a local source: one lies in the other, a file of the source is a
    link into ``out``, or the source was made from ``out``."""
    source = None if source is None else Path(source).expanduser()
    if source is None or not source.exists():
        return
    files = [source / name for name in files_of(source)] if out.exists() and source.is_dir() else []
    if overlap(out, source) or any(overlap(out, file) for file in files if file.is_symlink()):
        raise UserError(f"{out} overlaps the source {source}; choose an output path outside it")
    if out.is_dir() and is_made_from(source.resolve(), out):
        raise UserError(f"{out} is what {source} was made from; {ELSEWHERE}")


def overlap(one: Path, other: Path) -> bool:
    """Return whether two paths are the same or one lies in the other. Files are compared, not names: on most Macs upper
    and lower case are the same."""

    def same(a: Path, b: Path) -> bool:
        return a == b or (os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b))

    one, other = one.resolve(), other.resolve()
    return any(same(one, each) for each in (other, *other.parents)) or any(same(other, each) for each in one.parents)


def check_ours(out: Path) -> None:
    if (strange := strange_file(out)) is not None:
        where = "the output comes last; " if (out / "config.json").is_file() and not listed_files(out) else ""
        raise UserError(f"{out} exists and holds {strange}, which this program did not write; {where}{ELSEWHERE}")


def check_file(path: Path, mend: str) -> None:
    """Raise UserError, which ends with ``mend``, unless a report can be written at ``path``: there, in place of an
    earlier report, or to a device."""
    reason: str | None = None
    try:
        if path.is_dir():
            reason = "Is a directory"
        elif path.exists():
            reason = None if os.access(path, os.W_OK) else "Permission denied"
            if reason is None and path.is_file() and not is_report(path):
                raise UserError(f"{path} exists and is no report of this program, or belongs to a checkpoint; {mend}")
        else:
            _try_out(_beside(path.absolute()))
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise UserError(f"{path}: cannot be written there ({reason}); {mend}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file that takes its place at ``path``, over another one, when the block ends well; a
    device, a link and a file in a folder that takes no other are written as they are. Raises OSError."""
    if path.is_symlink() or (path.exists() and not (path.is_file() and os.access(path.absolute().parent, os.W_OK))):
        yield path
        return
    new = _beside(path)
    try:
        yield new
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _try_out(path: Path) -> None:
    with undisturbed():
        os.mkdir(path, 0o700)
        os.rmdir(path)


def nearest_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if os.path.lexists(parent))


@contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` that is removed at the end, unless it was renamed; what processes that were
    killed left there goes first. Raises UserError where it cannot be made."""
    out = out.absolute()
    work = _beside(out)
    try:
        with writing(out.parent, ELSEWHERE):
            out.parent.mkdir(parents=True, exist_ok=True)
            sweep(out)
            work.mkdir(0o700)
        yield work
    finally:
        with undisturbed():
            shutil.rmtree(work, ignore_errors=True)


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


def _beside(out: Path) -> Path:
    return out.parent / f".{out.absolute().name}.partial-{MACHINE}-{os.getpid()}-{secrets.token_hex(4)}"


def sweep(out: Path) -> None:
    """Remove what processes of this machine that were killed left beside ``out``."""
    leftover = re.compile(rf"\.{re.escape(out.name)}\.partial-{MACHINE}-(\d+)-[0-9a-f]{{8}}")
    for entry in out.parent.iterdir():
        if (match := leftover.fullmatch(entry.name)) and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def staged(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` that takes its place when the block ends well, and else vanishes; raise
    UserError where it cannot be made or put in place, or the disk is full or fails meanwhile."""
    out = out.absolute()
    with scratch(out) as work:
        try:
            yield work
            work.chmod(0o777 & ~umask())  # it was made private; the result has the permissions of any other
            sync_tree(work)
            with undisturbed():
                put_in_place(work, out, force=force)
        except OSError as error:
            if error.errno not in FULL_OR_FAILING:
                raise
            raise UserError(f"{out}: {error.strerror}; {FREE_SPACE_REMEDY}") from error


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def put_in_place(work: Path, out: Path, *, force: bool) -> None:
    """Rename ``work`` to ``out``, which is absent, empty, or with ``force`` a folder that holds nothing else than this
    program wrote."""
    old = _beside(out)
    try:
        if out.exists():
            if force:
                check_ours(out)
                os.replace(out, old)
            else:
                os.rmdir(out)
        os.replace(work, out)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise UserError(
                f"{out} appeared while it was being made; choose another output path or give --force"
            ) from error
        raise UserError(f"{out}: {error.strerror}; {ELSEWHERE}") from error
    finally:
        if old.exists() and not out.exists():
            os.replace(old, out)
        shutil.rmtree(old, ignore_errors=True)
    with suppress(OSError):  # the result stands, and whatever fails is no longer its fault
        sync(out.parent)
