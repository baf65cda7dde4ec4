"""Whole states of a run on the disk: each appears complete under its name or not at all.

A run is a folder: ``start`` (the rescaled checkpoint that it began with), ``log.jsonl``, ``step-00000100`` for each
state, and ``best-00000100`` with the weights that a state may have for its result. All are written beside their place,
flushed and renamed. Nothing that a file says is run (``weights_only``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..checkpoint.disk import sync, sync_tree
from ..errors import UserError

STATE, TENSORS = "state.pt", "model.safetensors"

KEPT = 3  # newest states that stay: where the newest is damaged, a run goes on from one before it

GOES_ON = "free some space; the same command then goes on with the run"


class RunFolder:
    """The states under ``path``, of which the newest ``KEPT`` stay."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        places = self.path.glob("step-" + 8 * "[0-9]")
        return sorted(int(place.name[5:]) for place in places if (place / STATE).is_file())

    def of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def best(self, step: int) -> Path:
        return self.path / f"best-{step:08d}"

    @contextmanager
    def writing(self, place: Path, *, main: bool = True, wait: Callable[[], None] = lambda: None) -> Iterator[Path]:
        """Yield an empty folder, and put what is written there at ``place``; the oldest states beyond ``KEPT`` go.
        main: this process makes and moves folders. wait: for all others. Raises UserError where the disk fails."""
        work = place.with_name(f".{place.name}.partial")
        try:
            with on_a_disk(place):
                if main:
                    shutil.rmtree(work, ignore_errors=True)  # one that a crash left there
                    work.mkdir(parents=True)
                wait()
                yield work
                wait()
                if main:
                    sync_tree(work)
                    remove(place)
                    os.replace(work, place)
                    sync(self.path)
                    for old in self.steps()[:-KEPT]:
                        remove(self.of(old))
                wait()
        except UserError:
            shutil.rmtree(work, ignore_errors=True)
            raise

    def keep(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with self.writing(self.best(step)) as work:
            # A weight that is shared has several names, and one storage under two is refused.
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, work / TENSORS)

    def keep_only(self, steps: Collection[int]) -> None:
        for place in set(self.path.glob("best-*")) - {self.best(step) for step in steps}:
            shutil.rmtree(place, ignore_errors=True)


def remove(place: Path) -> None:
    """Remove a state: first what makes it one, so that no half of it is taken for a whole one."""
    (place / STATE).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def on_a_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; {GOES_ON}") from error
    except SafetensorError as error:
        reason = str(error).partition("I/O error: ")[2].partition(" (os error")[0]
        raise UserError(f"{path}: {reason or 'cannot be written'}; {GOES_ON}") from error
    except RuntimeError as error:
        # torch's writer of zip files, which does not say why a write came back short.
        if "inline_container" not in str(error):
            raise
        raise UserError(f"{path}: cannot be written, as where a disk is full; {GOES_ON}") from error


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise damaged(folder / TENSORS) from error


def damaged(file: Path) -> UserError:
    return UserError(f"{file}: cannot be read; remove {file.parent} to go on from the state before it")


def read_state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise many kinds
        raise damaged(folder / STATE) from error
    return state
