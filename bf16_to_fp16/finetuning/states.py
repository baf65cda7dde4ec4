"""Whole states of a run on the disk: each appears complete under its name or not at all.

A run is a folder: ``start`` (the rescaled checkpoint that it began with), ``log.jsonl``, ``step-00000100`` for each
state, and ``best-00000100`` with the weights that a state may have for its result. All are written beside their place,
flushed and renamed. Nothing that a file says is run (``weights_only``).
"""

from __future__ import annotations

import os
import re
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

KEPT = 3  # newest states that stay: a run goes back to one before a spike, which the newest may not be

GOES_ON = "free some space; the same command then goes on with the run"


_NAME = re.compile(r"step-(\d{8})\Z")


class RunFolder:
    """The states under ``path``, of which the newest ``KEPT`` stay."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        if not self.path.is_dir():
            return []
        matches = (_NAME.match(entry.name) for entry in self.path.iterdir() if (entry / STATE).is_file())
        return sorted(int(match[1]) for match in matches if match)

    def of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    @contextmanager
    def writing(self, step: int, *, main: bool = True, wait: Callable[[], None] = lambda: None) -> Iterator[Path]:
        """Yield an empty folder, and put what is written there in place as a step's state; the oldest beyond ``KEPT``
        go.

        main, wait: whether this process makes and moves folders, and what waits for all others. Raises UserError where
        the disk fails: the states before it stay.
        """
        work, place = self.path / f".step-{step:08d}.partial", self.of(step)
        try:
            with on_a_disk(place):
                if main:
                    shutil.rmtree(work, ignore_errors=True)  # one that a crash left there
                    self._make(work)
                wait()
                yield work
                wait()
                if main:
                    sync_tree(work)
                    self.remove(step)
                    os.replace(work, place)
                    sync(self.path)
                    for old in self.steps()[:-KEPT]:
                        self.remove(old)
                wait()
        except UserError:
            shutil.rmtree(work, ignore_errors=True)
            raise

    def best(self, step: int) -> Path:
        return self.path / f"best-{step:08d}"

    def keep(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the weights of a step that may become the run's result."""
        work, place = self.path / f".best-{step:08d}.partial", self.best(step)
        with on_a_disk(place):
            for old in (work, place):
                shutil.rmtree(old, ignore_errors=True)
            work.mkdir()
            # A weight that is shared has several names, and one storage under two is refused.
            write_tensors(work, {name: tensor.clone() for name, tensor in tensors.items()})
            sync_tree(work)
            os.replace(work, place)

    def keep_only(self, steps: Collection[int]) -> None:
        for place in set(self.path.glob("best-*")) - {self.best(step) for step in steps}:
            shutil.rmtree(place, ignore_errors=True)

    def _make(self, work: Path) -> None:
        try:
            work.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}; choose another checkpointing.folder") from error

    def remove(self, step: int) -> None:
        """Remove a state: first from its name, so that no half of it is taken for a whole one."""
        place = self.of(step)
        if place.exists():
            aside = self.path / f".step-{step:08d}.removed"
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(place, aside)
            shutil.rmtree(aside, ignore_errors=True)


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


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file(dict(tensors), folder / TENSORS)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise damaged(folder / TENSORS) from error


def damaged(file: Path) -> UserError:
    return UserError(f"{file}: cannot be read; remove {file.parent} to go on from the state before it")


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    torch.save(dict(state), folder / STATE)


def read_state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise many kinds
        raise damaged(folder / STATE) from error
    return state
