"""The weights that are advised on, streamed through the checkpoint's reader a few megabytes at a time."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.formats import read_pickle
from ..checkpoint.headers import FLOATING_DTYPES, read_header
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 20  # elements that are looked at together


def open_weights(source: str | Path, subfolder: str | None = None) -> Checkpoint:
    """Open a checkpoint as ``open_checkpoint`` does, or a single ``.safetensors`` or ``.bin`` file without a config."""
    path = Path(source).expanduser()
    if subfolder is None and path.is_file():
        if path.suffix not in (".safetensors", ".bin"):
            raise UserError(f"{path} is not a checkpoint; give its folder, a .safetensors file or a Hub id")
        tensors = (read_header if path.suffix == ".safetensors" else read_pickle)(path)
        return Checkpoint(path.parent, str(source), None, {}, dict(sorted(tensors.items())), (path,), None)
    return open_checkpoint(source, subfolder)


def chosen(checkpoint: Checkpoint, patterns: Sequence[str] = ()) -> list[str]:
    """Return the names of the tensors that match one of ``patterns`` (shell wildcards), all where there are none.

    Raises UserError where none matches, and for a tensor of whole numbers.
    """
    names = [n for n in checkpoint.tensors if not patterns or any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    if not names:
        known = ", ".join(list(checkpoint.tensors)[:3])
        raise UserError(f"{checkpoint.source}: no tensor {' or '.join(patterns)}; it has {known}, ...")
    for name in names:
        if (dtype := checkpoint.tensors[name].dtype) not in FLOATING_DTYPES:
            raise UserError(
                f"{checkpoint.source}: tensor {name} is {dtype}, whole numbers; choose floating ones with --tensor"
            )
    return names


def tensor_pieces(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    """Yield a tensor in its own dtype, flat, at most about ``PIECE`` elements (or one row) at a time."""
    shape = checkpoint.tensors[name].shape
    if not shape:
        yield checkpoint.read(name).reshape(-1)
        return
    rows = max(1, PIECE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield checkpoint.read_rows(name, start, min(start + rows, shape[0])).reshape(-1)
