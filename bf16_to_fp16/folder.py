"""The output folder: staged beside its place, filled, synced, and renamed into it whole or not at all.

Besides the weights a checkpoint has files that belong to it (tokenizer, generation settings, the modules of a
sentence encoder). They are carried over byte for byte; weights in other formats are not, since they would still
hold the old values, and the report names them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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
        os.rmdir(tempfile.mkdtemp(prefix=_partial(out), dir=parent))
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
            os.rmdir(tempfile.mkdtemp(prefix=_partial(path), dir=path.absolute().parent))
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise UserError(f"{path}: cannot be written there ({reason}); {mend}")


def nearest_parent(path: Path) -> Path:
    """Return the closest ancestor of ``path`` that exists, if only as a link to nowhere."""
    parent = path.absolute().parent
    while not os.path.lexists(parent):
        parent = parent.parent
    return parent


def _partial(out: Path) -> str:
    """How the names of unfinished folders beside ``out`` begin."""
    return f".{out.absolute().name}.partial-"


@contextmanager
def staged(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` that takes its place when the block ends well and vanishes when it does not.

    Raises UserError where the folder cannot be made or put in place; ``out`` then is as it was.
    """
    out = out.absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=_partial(out), dir=out.parent))
    except OSError as error:
        raise UserError(f"{out.parent}: {error.strerror}; choose another output path") from error
    try:
        yield work
        # mkdtemp makes private folders; the result has the permissions of any other.
        umask = os.umask(0)
        os.umask(umask)
        work.chmod(0o777 & ~umask)
        sync_tree(work)
        put_in_place(work, out, force=force)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def put_in_place(work: Path, out: Path, *, force: bool) -> None:
    """Rename ``work`` to ``out``; with ``force`` an existing folder steps aside first and comes back if the rename
    fails."""
    aside = None
    if force and out.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
        try:
            os.rename(out, aside / "old")
        except OSError as error:
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
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(out.parent)


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
                shutil.copytree(entry, target / entry.name)
                carried.append(f"{entry.name}/")
            elif not entry.name.startswith("."):
                left_out.append(f"{entry.name}/")
        elif entry.name == "README.md":
            if not back:
                shutil.copyfile(entry, target / "SOURCE_README.md")
                carried.append("README.md")
        elif back and entry.name == "SOURCE_README.md":
            shutil.copyfile(entry, target / "README.md")
            carried.append(entry.name)
        elif entry.name in OWN_FILES:
            continue
        elif entry.name.endswith(OTHER_WEIGHTS):
            left_out.append(entry.name)
        else:
            shutil.copyfile(entry, target / entry.name)
            carried.append(entry.name)
    if tokenizer is not None and tokenizer.is_dir():
        for entry in sorted(tokenizer.iterdir()):
            if entry.is_file() and not (target / entry.name).exists() and entry.name not in OWN_FILES:
                shutil.copyfile(entry, target / entry.name)
                carried.append(entry.name)
    return carried, left_out


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
