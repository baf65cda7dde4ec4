"""The log of a run: JSON Lines on disk and, if asked, the same numbers in Weights & Biases.

A resumed run first removes the lines after its checkpoint, so that its log equals that of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..environment import how_to_install
from ..errors import UserError
from ..json_text import finite, loads
from .recipe import Recipe
from .states import on_a_disk

LOG = "log.jsonl"


class RunLog:
    """The log file; track: a second receiver of the numbers, such as ``accelerator.log``."""

    def __init__(self, path: Path, track: Callable[..., None] = lambda values, step: None) -> None:
        self.path, self.track = path, track
        path.parent.mkdir(parents=True, exist_ok=True)

    def rewind(self, step: int) -> None:
        """Remove the lines after ``step``, and a truncated last line."""
        if self.path.is_file():
            kept = "".join(line for at, line in lines(self.path) if at <= step)
            partial = self.path.with_suffix(".partial")
            partial.write_text(kept, encoding="utf-8", newline="\n")
            partial.replace(self.path)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one line; infinite numbers become the largest ones, NaN null."""
        row = {"step": step, **values}
        with on_a_disk(self.path), open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")
        # Lists are left to the file.
        self.track({key: value for key, value in row.items() if isinstance(value, (int, float, Mapping))}, step=step)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            step = int(loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if line.endswith("\n"):
            yield step, line


def start_tracker(accelerator: Any, recipe: Recipe, folder: Path) -> None:
    if recipe.wandb == "off":
        return
    if not accelerator.log_with:  # accelerate leaves out what is not installed
        raise UserError(f"wandb is not installed; {how_to_install('train')}, or set wandb: off")
    os.environ.setdefault("WANDB_SILENT", "true")
    # As the library has it: its environment variables say whose project and which.
    project = os.environ.get("WANDB_PROJECT", "bf16-to-fp16")
    given = {"name": os.environ.get("WANDB_NAME", Path(recipe.out).name), "mode": recipe.wandb, "dir": str(folder)}
    try:
        accelerator.init_trackers(project, recipe.describe(), {"wandb": given})
    except Exception as error:  # of many kinds; a run must not fail later for a log that cannot be
        raise UserError(f"wandb: {' '.join(str(error).split())}; set wandb to offline or off") from error
