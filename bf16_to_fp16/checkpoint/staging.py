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
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import system
from ..errors import UserError, shortened
from .disk import FREE_SPACE_REMEDY, FULL_OR_FAILING, writing
from .ownership import files_of, has_record, is_made_from, is_report, is_whole, strange_file

MOST_FOLDERS = 200  # folders in each other that an output may lie in; Python makes some 1,000
ELSEWHERE = "choose another output path"


def check_out(out: Path, *sources: str | Path | None, force: bool, back: bool = False) -> None:
    """Raise UserError unless a folder can be made at ``out``: absent or empty (or, under ``force``, one that this
    program wrote and that holds nothing else), writable, and apart from the ``sources`` that are here and from what
    they were made from. back: the folder is brought back by ``undo``; one without a record is then compared with it
    before it is replaced. Tried by making a folder beside it, as a file system may refuse what permissions promise."""
    with writing(out, ELSEWHERE):
        if len(out.parts) > MOST_FOLDERS:
            raise UserError(f"{shortened(out)} lies in more than {MOST_FOLDERS} folders; {ELSEWHERE}")
        if out.absolute().name in ("", ".."):
            raise UserError(f"{out} is where this runs or above it; {ELSEWHERE}")
        there = out.is_dir() and not out.is_symlink()
        if not there and (out.exists() or out.is_symlink()):
            what = "is a link" if out.is_symlink() else "exists and is not a folder"
            raise UserError(f"{out} {what}; {ELSEWHERE}")
        if there and out.resolve() in (Path.cwd(), *Path.cwd().parents):
            raise UserError(f"{out} is where this runs and cannot be replaced; {ELSEWHERE}")
        if there and os.path.ismount(out):
            raise UserError(f"{out} is a mount point and cannot be replaced; choose a folder inside it")
        for source in sources:
            check_apart(out, source)
        if inside := next((folder for folder in out.absolute().parents if is_whole(folder)), None):
            raise UserError(f"{out} lies in {inside}, which this program wrote whole; choose an output path outside it")
        if there and any(out.iterdir()):
            ours = has_record(out)
            if force if ours else not back:
                check_ours(out)  # without --force its bytes are not read
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
    """Raise UserError where ``out`` is, holds or lies in a source that is here, by whatever name, holds a file that the
    source is a link to, or is what the source was made from."""
    source = None if source is None else Path(source).expanduser()
    if source is None or not source.exists():
        return
    origin = source.resolve()
    apart = not overlap(out, source)
    if apart and out.exists() and origin.is_dir():
        links = (origin / name for name, status in files_of(origin) if stat.S_ISLNK(status.st_mode))
        apart = not any(_same(out.resolve(), each) for link in links for each in link.resolve().parents)
    if not apart:
        raise UserError(f"{out} overlaps the source {source}; choose an output path outside it")
    if out.is_dir() and is_made_from(origin, out):
        raise UserError(f"{out} is what {source} was made from; {ELSEWHERE}")


def overlap(one: Path, other: Path) -> bool:
    """Return whether one of two paths is the other or lies in it, by whatever names."""
    one, other = one.resolve(), other.resolve()
    return any(_same(one, each) for each in (other, *other.parents)) or any(_same(other, each) for each in one.parents)


def check_ours(out: Path, new: Path | None = None) -> None:
    """Raise UserError unless this program wrote the folder ``out`` and it holds nothing else; new: as
    ``strange_file``."""
    if (strange := strange_file(out, new)) is not None:
        where = "OUT comes after SOURCE; " if (out / "config.json").is_file() and not has_record(out) else ""
        raise UserError(
            f"{out} exists and holds {strange}, which this program did not write or which was changed since;"
            f" {where}choose another output path"
        )


def _same(one: Path, other: Path) -> bool:
    """Return whether two paths are one, or name one folder: upper and lower case are the same on most Macs."""
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))


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
        system.replace_file(new, path)
    finally:
        new.unlink(missing_ok=True)


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
    """Yield an empty folder beside ``out`` that is removed at the end, unless it was renamed. It is locked meanwhile,
    and the system drops the lock of a process that is killed: so the next one can tell what was left behind, which it
    removes, from what another one is working in. Raises UserError where it cannot be made."""
    out = out.absolute()
    with writing(out.parent, ELSEWHERE):
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out)
    work, lock = _beside(out, kind), None
    try:
        with writing(out.parent, ELSEWHERE):
            lock = _claim(work)
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
    """Return a path beside ``out`` that nobody else has."""
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
    """Remove what processes that were killed left beside ``out``, but a folder that was to be replaced only once
    something has its place."""
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
    """Return the permissions that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def put_in_place(work: Path, out: Path, *, force: bool) -> None:
    """Rename ``work`` to ``out``; with ``force`` it changes places with a folder that holds nothing else than this
    program wrote or ``work`` has, which steps aside first where the file system cannot do that at once."""
    aside: Path | None = None
    lock = None
    try:
        if force and out.exists():
            with writing(out, ELSEWHERE):
                check_ours(out, work)
                exchanged = system.exchange_folders(work, out)
            if exchanged:  # and ``work``, the old folder now, goes as all that is staged
                with suppress(OSError):
                    sweep(out)
                    system.sync_folder(out.parent)
                return
            aside = _beside(out, "replaced")
            try:
                lock = _claim(aside)
                system.rename_folder(out, aside / "old")
            except OSError as error:
                with suppress(OSError):
                    aside.rmdir()
                raise UserError(f"{out}: {error.strerror}; {ELSEWHERE}") from error
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
            raise UserError(f"{out}: {error.strerror}; {ELSEWHERE}") from error
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


@contextmanager
def created(path: Path, size: int) -> Iterator[int]:
    """Yield a descriptor of a new file, its space reserved where possible; the file is removed if the block fails."""
    with writing(path):
        descriptor = system.open_new(path)
    try:
        with writing(path):
            system.reserve(descriptor, size)
        yield descriptor
    except BaseException:
        os.close(descriptor)  # first: Windows removes no open file
        path.unlink(missing_ok=True)
        raise
    os.close(descriptor)
