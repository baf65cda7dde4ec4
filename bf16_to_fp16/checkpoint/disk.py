"""New files: their space is reserved before they are written, they are whole or gone, and a full disk is one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError
from ..system import open_new, reserve
from ..wording import bytes_in_words

FREE_SPACE_REMEDY = "free some space or choose another output path"


def check_free_space(what: str, nbytes: int, folder: Path, *, of: str = "the cache", variable: str = "HF_HOME") -> None:
    """Raise UserError where the disk of a folder has no room for so many bytes. what: needs them. of: what the folder
    is called; variable: of the environment, that chooses another one."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise UserError(
            f"{what} needs {bytes_in_words(nbytes)} and the disk of {of} has {bytes_in_words(free)};"
            f" free some space, or set {variable} to a folder on another disk"
        )


@contextmanager
def writing(path: Path, remedy: str = FREE_SPACE_REMEDY) -> Iterator[None]:
    """Turn an error of the disk into a UserError that names the output file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from error


@contextmanager
def created(path: Path, size: int) -> Iterator[int]:
    """Yield a descriptor of a new file, its space reserved where possible; the file is removed if the block fails."""
    with writing(path):
        descriptor = open_new(path)
    try:
        with writing(path):
            reserve(descriptor, size)
        yield descriptor
    except BaseException:
        os.close(descriptor)  # first: Windows removes no open file
        path.unlink(missing_ok=True)
        raise
    os.close(descriptor)
