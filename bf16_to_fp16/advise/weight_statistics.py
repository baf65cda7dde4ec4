"""Read a checkpoint's weights one tensor at a time, for the advice on updates and on initial weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.formats import read_pickle
from ..checkpoint.headers import FLOATING_DTYPES, read_header
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..errors import UserError
from ..progress import Progress, progress_of

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 20  # elements that are widened together


def open_weights(source: str | Path, subfolder: str | None = None) -> Checkpoint:
    """Open a checkpoint with ``open_checkpoint``, or a single ``.safetensors`` or ``.bin`` file, which needs no config.
    Raises UserError for any other file."""
    path = Path(source).expanduser()
    if subfolder is None and path.is_file():
        if path.suffix not in (".safetensors", ".bin"):
            raise UserError(f"{path} is not a checkpoint; give its folder, a .safetensors file or a Hub id")
        tensors = (read_header if path.suffix == ".safetensors" else read_pickle)(path)
        return Checkpoint(path.parent, str(source), None, {}, dict(sorted(tensors.items())), (path,), None)
    return open_checkpoint(source, subfolder)


def floating_names(checkpoint: Checkpoint, progress: Progress | bool | None) -> Iterator[str]:
    """Yield the names of a checkpoint's floating-point tensors and show progress. Raises UserError if it has none."""
    names = [name for name, info in checkpoint.tensors.items() if info.dtype in FLOATING_DTYPES]
    if not names:
        raise UserError(f"{checkpoint.source}: it holds no floating tensors; give a checkpoint's weights")
    with progress_of(progress).step("Looking at the weights") as advance:
        for place, name in enumerate(names):
            yield name
            advance(place + 1, len(names))


def tensor_pieces(checkpoint: Checkpoint, name: str) -> Sequence[Tensor]:
    return checkpoint.read(name).flatten().split(PIECE)
