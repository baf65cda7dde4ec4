"""The output folder: staged beside its place, filled, synced, and renamed into it whole or not at all.

A lock says that a staged folder is being filled; one without a lock was left by a process that was killed, and the next
one removes it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import system
from ..errors import UserError

FULL_OR_FAILING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of the disk that is written to."""


FREE_SPACE_REMEDY = "free some space or choose another output path"


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
            if os.path.ismount(out):
                raise UserError(f"{out} is a mount point and cannot be replaced; choose a folder inside it")
        resolved = out.resolve()
        parent = nearest_parent(out)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}; choose another output path") from error
    if source is not None:
        origin = source.resolve()
        outside, inside = (origin, *origin.parents), resolved.parents
        if any(_same(resolved, folder) for folder in outside) or any(_same(origin, folder) for folder in inside):
            raise UserError(f"{out} overlaps the source {source}; choose an output path outside it")
    if not parent.is_dir():
        raise UserError(f"{parent} is not a folder; choose another output path")
    try:
        _try_out(parent / _beside(out).name)
    except OSError as error:
        raise UserError(f"{parent} is not writable ({error.strerror}); choose another output path") from error


def _same(one: Path, other: Path) -> bool:
    """Return whether two paths are one, or name one folder: upper and lower case are the same on most Macs."""
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))


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


def _claim(path: Path) -> int | None:
    """Make a folder for this user alone and lock it; return the descriptor that holds the lock, None where the file
    system knows no locks."""
    while True:
        os.mkdir(path, 0o700)
        lock = None
        with suppress(FileNotFoundError):  # another process took it for a leftover, as it was not locked yet
            lock = system.hold(path)
        if os.path.exists(path):
            return lock
        if lock is not None:
            os.close(lock)


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
        with suppress(OSError):
            if (lock := system.hold(entry)) is not None:
                try:
                    shutil.rmtree(entry, ignore_errors=True)
                finally:
                    os.close(lock)


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
            # The folder was made private; the result has the permissions of any other.
            umask = os.umask(0)
            os.umask(umask)
            work.chmod(0o777 & ~umask)
            sync_tree(work)
            with undisturbed():
                put_in_place(work, out, force=force)
        except OSError as error:
            if error.errno not in FULL_OR_FAILING:
                raise
            raise UserError(f"{out}: {error.strerror}; {FREE_SPACE_REMEDY}") from error


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
                system.rename_folder(out, aside / "old")
            except OSError as error:
                with suppress(OSError):
                    aside.rmdir()
                raise UserError(f"{out}: {error.strerror}; choose another output path") from error
        try:
            system.rename_folder(work, out)
        except OSError as error:
            if aside is not None:
                system.rename_folder(aside / "old", out)
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
            system.sync_folder(out.parent)
    finally:
        if lock is not None:
            os.close(lock)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below ``folder`` to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            system.sync_file(Path(root) / name)
        system.sync_folder(Path(root))
