"""The log of a run: one JSON object a line on the disk, and the same numbers in Weights & Biases where asked.

A run that continues from a checkpoint first takes back the lines that were written after it, so that the log of an
interrupted run is the log of one that never stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..environment import how_to_install
from ..errors import UserError
from ..json_text import finite, loads
from .states import on_a_disk


class RunLog:
    def __init__(
        self, path: Path, wandb: str = "off", name: str = "", settings: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self._file: Any = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._run = None if wandb == "off" else self._start(wandb, name, settings or {})

    def _start(self, mode: str, name: str, settings: Mapping[str, Any]) -> Any:
        try:
            import wandb as library
        except ImportError as error:
            raise UserError(
                f"wandb is not installed; {how_to_install('train')}, or set logging.wandb.mode to off"
            ) from error
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            return library.init(
                # As the library has it: its environment variables say whose project and which.
                project=os.environ.get("WANDB_PROJECT", "bf16-to-fp16"),
                name=os.environ.get("WANDB_NAME", name),
                mode="offline" if mode == "offline" else "online",
                dir=str(self.path.parent),
                config=dict(settings),
            )
        except Exception as error:  # of many kinds; a run must not fail later for a log that cannot be
            line = " ".join(str(error).split())
            raise UserError(f"wandb: {line}; set logging.wandb.mode to offline or off") from error

    def rewind(self, step: int) -> None:
        """Take back the lines after ``step``, and one that a crash cut short."""
        self._close_file()
        if not self.path.is_file():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if line.endswith("\n") and loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8", newline="\n")
        partial.replace(self.path)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one line; infinite numbers become the largest ones, NaN null."""
        row = {"step": step, **values}
        with on_a_disk(self.path):
            if self._file is None:
                self._file = open(self.path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115  (closed by close)
            self._file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        if self._run is not None:
            self._run.log(_flat(row), step=step)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        self._close_file()
        if self._run is not None:
            self._run.finish()
            self._run = None


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested values under names with slashes, which are groups of panels there; lists are left to the file."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{above}{name}/")
        elif isinstance(value, (int, float)):
            flat[above + name] = value
    return flat
