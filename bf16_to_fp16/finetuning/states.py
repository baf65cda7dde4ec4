"""The folder of a run: its log, and the saved states of the training, each of which is complete or absent.

The folder has ``start`` (the rescaled checkpoint), ``log.jsonl``, ``step-00000100`` for each state, and
``best-00000100`` with weights that may become the result. Files are read without running code (``weights_only``). A
resumed run first removes the log's lines after the state from which it continues."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..checkpoint.files import sync, sync_tree
from ..environment import HOW_TO_TRAIN
from ..errors import UserError, first_line
from ..json_text import finite
from .recipe import Recipe

STATE, TENSORS = "state.pt", "model.safetensors"

KEPT = 3  # newest states that stay: where the newest is damaged, a run goes on from one before it

GOES_ON = "free some space; the same command then goes on with the run"


class RunFolder:
    """Saves and finds the states of a run in the folder ``path``. Only the newest ``KEPT`` states stay."""

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
        """Yield an empty folder to write into, then move it to ``place`` and keep only the newest ``KEPT`` states.
        main: whether this process makes, moves and removes folders. wait: a function that waits for all processes.
        Raises UserError if the disk fails."""
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
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def keep(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with self.writing(self.best(step)) as work:
            # A weight that is shared has several names, and one storage under two is refused.
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, work / TENSORS)

    def keep_only(self, steps: Collection[int]) -> None:
        for place in set(self.path.glob("best-*")) - {self.best(step) for step in steps}:
            shutil.rmtree(place, ignore_errors=True)


def remove(place: Path) -> None:
    """Remove a state's folder, its ``STATE`` file first: after an interruption the folder must not look complete."""
    (place / STATE).unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def on_a_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch's writer of zip files raises a RuntimeError of this name.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise UserError(f"{path}: cannot be written ({first_line(error)}); {GOES_ON}") from error


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise damaged(folder / TENSORS) from error


def damaged(file: Path) -> UserError:
    return UserError(f"{file}: cannot be read; remove {file.parent} to resume from an earlier step")


def read_state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise many kinds
        raise damaged(folder / STATE) from error
    return state


LOG = "log.jsonl"


class RunLog:
    """Writes the log file of a run, one JSON object on each line. track: a function that also gets the values of each
    line except lists, such as ``accelerator.log``."""

    def __init__(self, path: Path, track: Callable[..., None] = lambda values, step: None) -> None:
        self.path, self.track = path, track
        path.parent.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        """Remove the lines of all steps after ``step`` from the log, and a last line that is cut short."""
        if self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(kept), encoding="utf-8", newline="\n")
            partial.replace(self.path)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a line with the values of a step. Infinite numbers become ± the largest double, and NaN becomes null."""
        row = {"step": step, **values}
        with on_a_disk(self.path), open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")
        # Lists are left to the file.
        self.track({key: value for key, value in row.items() if isinstance(value, (int, float, Mapping))}, step=step)


def start_tracker(accelerator: Any, recipe: Recipe, folder: Path) -> None:
    if recipe.wandb == "off":
        return
    if not accelerator.log_with:  # accelerate leaves out what is not installed
        raise UserError(f"wandb is not installed; {HOW_TO_TRAIN}, or set wandb: off")
    project, given = os.environ.get("WANDB_PROJECT", "bf16-to-fp16"), {"mode": recipe.wandb, "dir": str(folder)}
    try:
        accelerator.init_trackers(project, recipe.describe(), {"wandb": given})
    except Exception as error:  # of many kinds
        raise UserError(f"wandb: {' '.join(str(error).split())}; set wandb to offline or off") from error
