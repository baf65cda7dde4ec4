"""Room on a disk, and its errors in one line."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError
from ..wording import bytes_in_words

FULL_OR_FAILING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of the disk that is written to."""


FREE_SPACE_REMEDY = "free some space or choose another output path"


def check_free_space(
    what: str,
    nbytes: int,
    folder: Path,
    *,
    of: str = "the cache",
    otherwise: str = "set HF_HOME to a folder on another",
) -> None:
    """Raise UserError where the disk of a folder has no room for so many bytes. what: needs them. of: what the folder
    is called; otherwise: what else to do, before "disk"."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise UserError(
            f"{what} needs {bytes_in_words(nbytes)} and the disk of {of} has {bytes_in_words(free)};"
            f" free some space, or {otherwise} disk"
        )


@contextmanager
def writing(path: Path, remedy: str = FREE_SPACE_REMEDY) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from error
