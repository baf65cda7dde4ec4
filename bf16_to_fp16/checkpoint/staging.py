"""Build the output folder under a temporary name beside its final path, then rename it. So it is never incomplete."""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ..errors import UserError
from .files import FREE_SPACE_REMEDY, FULL_OR_FAILING, sync, sync_tree, writing
from .ownership import files_of, is_made_from, is_report, listed_files

ELSEWHERE = "choose another output path"
MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"


def check_out(out: Path, *sources: str | Path | None, force: bool) -> None:
    """Raise UserError unless a folder can be written at ``out`` without harm to a source. force: allow it to replace a
    folder that this program wrote."""
    with writing(out, ELSEWHERE):
        there = out.is_dir() and not out.is_symlink()
        if not there and (out.exists() or out.is_symlink()):
            what = "is a link" if out.is_symlink() else "exists and is not a folder"
            raise UserError(f"{out} {what}; {ELSEWHERE}")
        here = out.absolute().name in ("", "..") or (there and out.resolve() in (Path.cwd(), *Path.cwd().parents))
        if here or (there and os.path.ismount(out)):
            what = "is the current folder or above it" if here else "is a mount point"
            raise UserError(f"{out} {what} and cannot be replaced; {ELSEWHERE}")
        for source in sources:
            check_apart(out, source)
        if there and any(out.iterdir()):
            check_ours(out)
            if not force:
                raise UserError(f"{out} exists; choose another output path or give --force to replace it")
        parent = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
    if not parent.is_dir():
        raise UserError(f"{parent} is not a folder; {ELSEWHERE}")
    if not os.access(parent, os.W_OK):
        raise UserError(f"{parent} is not writable; {ELSEWHERE}")


def check_apart(out: Path, source: str | Path | None) -> None:
    """Raise UserError if replacing ``out`` would harm ``source``. It would if one contains the other, if a link in
    ``source`` leads into ``out``, or if ``source`` was converted from ``out``."""
    source = None if source is None else Path(source).expanduser()
    if source is None or not source.exists():
        return
    files = [source / name for name in files_of(source)] if out.exists() and source.is_dir() else []
    if overlap(out, source) or any(overlap(out, file) for file in files if file.is_symlink()):
        raise UserError(f"{out} overlaps the source {source}; choose an output path outside it")
    if out.is_dir() and is_made_from(source.resolve(), out):
        raise UserError(f"{out} is what {source} was made from; {ELSEWHERE}")


def overlap(one: Path, other: Path) -> bool:
    """Return whether one path is or contains the other, by ``samefile``, because most Macs ignore the case of names."""

    def same(a: Path, b: Path) -> bool:
        return a == b or (os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b))

    one, other = one.resolve(), other.resolve()
    return any(same(one, each) for each in (other, *other.parents)) or any(same(other, each) for each in one.parents)


def check_ours(out: Path) -> None:
    listed = listed_files(out)
    if (strange := next((name for name in files_of(out) if name not in listed), None)) is not None:
        where = "give the output path last, or " if (out / "config.json").is_file() and not listed else ""
        raise UserError(f"{out} exists and holds {strange}, which is not in a report there; {where}{ELSEWHERE}")


def check_file(path: Path, mend: str) -> None:
    parent = path.absolute().parent
    if path.is_dir() or not parent.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        raise UserError(f"{path} cannot be written; {mend}")
    if path.is_file() and not is_report(path):
        raise UserError(f"{path} exists, and only a report that stands alone would be replaced; {mend}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and replace ``path`` by the file written there when the block succeeds. Where that is
    impossible, as for a device or a link, yield ``path`` itself."""
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


@contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside ``out``. It is removed when the block ends, unless the block has renamed
    it. Temporary folders of processes that no longer run are removed first."""
    out = out.absolute()
    work = _beside(out)
    try:
        with writing(out.parent, ELSEWHERE):
            out.parent.mkdir(parents=True, exist_ok=True)
            sweep(out)
            work.mkdir(0o700)
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _beside(out: Path) -> Path:
    return out.parent / f".{out.absolute().name}.partial-{MACHINE}-{os.getpid()}-{secrets.token_hex(4)}"


def sweep(out: Path) -> None:
    leftover = re.compile(rf"\.{re.escape(out.name)}\.partial-{MACHINE}-(\d+)-[0-9a-f]{{8}}")
    for entry in out.parent.iterdir():
        if (match := leftover.fullmatch(entry.name)) and not psutil.pid_exists(int(match[1])):
            shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def staged(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder, which replaces ``out`` when the block succeeds and is removed when it fails. force:
    whether it may replace a folder that this program wrote and that is not empty."""
    out = out.absolute()
    with scratch(out) as work:
        try:
            yield work
            work.chmod(0o777 & ~umask())  # made private; the result has default permissions
            sync_tree(work)
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
                f"another program wrote {out} meanwhile; choose another output path or give --force"
            ) from error
        raise UserError(f"{out}: {error.strerror}; {ELSEWHERE}") from error
    finally:
        if old.exists() and not out.exists():
            os.replace(old, out)
        shutil.rmtree(old, ignore_errors=True)
    with suppress(OSError):  # the result is in place; a failure here does not matter
        sync(out.parent)
