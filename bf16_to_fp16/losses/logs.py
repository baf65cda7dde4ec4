"""Curves of loss and loss scale, from the logs that trainers write.

``read_log`` reads the state of a transformers Trainer, CSV and JSONL.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..json_text import loads
from .events import Curve

LOSS_NAMES = ("loss", "train_loss", "train/loss", "training_loss", "train/train_loss")
"""Names under which trainers log the training loss, the first that is there."""

STEP_NAMES = ("step", "global_step", "train/global_step", "trainer/global_step", "iteration", "_step")
"""Names of the step."""

SCALE_NAMES = ("loss_scale", "scale", "train/loss_scale", "train/scale", "loss_scaler", "grad_scale")
"""Names of the loss scale."""


def read_log(path: str | Path) -> Curve:
    """Return the losses in a log: ``trainer_state.json`` of a Trainer, CSV, JSONL, or a folder with one.

    Rows without a loss are left out; a loss scale logged on a row of its own belongs to the losses after it. Raises
    UserError for a file that is none of these, has no losses or is not UTF-8.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a trainer_state.json, .csv or .jsonl") from error
    if not content.strip():
        raise UserError(f"{path}: the log is empty; give one of a run that has logged losses")
    reader = {".json": _json_rows, ".jsonl": _jsonl_rows, ".csv": _csv_rows}.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: unknown kind of log {path.suffix!r}; use .json, .jsonl or .csv (wandb exports CSV)")
    try:
        return _curve(path, reader(path, content.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; give a .json, .jsonl or .csv") from error


def _in_folder(folder: Path) -> Path:
    for pattern in ("log.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json"):
        logs = sorted(folder.glob(pattern), key=lambda path: (path.stat().st_mtime, path.name))
        if logs:
            return logs[-1]
    raise UserError(f"{folder}: no trainer_state.json and no log.jsonl in the folder; give the log's file")


def _json_rows(path: Path, text: str) -> list[Any]:
    try:
        tree = loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object on each line, whatever the file is called
            return _jsonl_rows(path, text)
        raise UserError(f"{path}: not JSON at line {error.lineno} ({error.msg}); give a whole file") from error
    rows = tree.get("log_history", [tree]) if isinstance(tree, dict) else tree
    if not isinstance(rows, list):
        raise UserError(f"{path}: no list of rows in it; give a trainer_state.json or a list of objects")
    return rows


def _jsonl_rows(path: Path, text: str) -> list[Any]:
    """The values on the lines, apart from a last one that a kill cut off.

    Not those of ``run.texts``, which loses no row of text and takes a CSV whose last quote stays open.
    """
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and rows:  # a run that was killed while it wrote
                break
            raise UserError(f"{path}: line {number} is not JSON ({error.msg}); put one object on each line") from error
    return rows


def _csv_rows(path: Path, text: str) -> list[Any]:
    try:
        return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise UserError(f"{path}: not CSV ({error}); give a comma-separated file with a header") from error


def _curve(path: Path, rows: Iterable[Any]) -> Curve:
    """The columns of the loss, the step and the scale of rows of any kind."""
    flat = [row for row in rows if isinstance(row, Mapping)]
    names = list(dict.fromkeys(name for row in flat for name in row if isinstance(name, str)))
    loss, step, scale = (
        next((name for name in known if name in names), None) for known in (LOSS_NAMES, STEP_NAMES, SCALE_NAMES)
    )
    if loss is None:
        shown = ", ".join(names[:12]) or "none"
        raise UserError(f"{path}: no column of losses among {shown}; name one {LOSS_NAMES[0]} or {LOSS_NAMES[1]}")
    steps: list[int] = []
    losses: list[float] = []
    scales: list[float | None] = []
    latest: float | None = None
    for number, row in enumerate(flat):
        logged = _number(path, number, scale, row)
        latest = latest if logged is None else logged
        value = _number(path, number, loss, row)
        if value is None and "skipped_examples" in row:
            value = math.nan  # a step that a finetune could not take; its log has null for NaN
        if value is None:
            continue
        at = _number(path, number, step, row) if step is not None else None
        if at is None:
            at = float(steps[-1] + 1 if steps else number)
        if not math.isfinite(at):
            raise UserError(f"{path}: row {number + 1}: the step is {at}; give a whole number")
        steps.append(int(at))
        losses.append(value)
        scales.append(latest)
    if not losses:
        raise UserError(f"{path}: the column {loss!r} has no losses in it; give a run that has logged some")
    return Curve(tuple(steps), tuple(losses), tuple(scales))


def _number(path: Path, row: int, name: str | None, values: Mapping[str, Any]) -> float | None:
    value = None if name is None else values.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = float(value)
        # JSON has no infinity, and this project's logs write the largest double for it.
        return math.copysign(math.inf, number) if abs(number) == sys.float_info.max else number
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: row {row + 1}: {name} is {value!r}, which is no number; mend that row") from error
