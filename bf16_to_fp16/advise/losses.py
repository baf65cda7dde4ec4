"""Losses read from the log of a run (a transformers Trainer's state, JSONL or CSV), and the events in them."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import UserError
from ..json_text import loads
from ..report.screen import console
from .detector import CAUSES, events

LOSS_NAMES = ("loss", "train_loss", "train/loss", "training_loss", "train/train_loss")
"""Names under which trainers log the training loss, the first that is there."""

STEP_NAMES = ("step", "global_step", "train/global_step", "trainer/global_step", "iteration", "_step")

Curve = list[tuple[int, float]]  # steps and losses, as they were logged


def read_log(path: str | Path) -> Curve:
    """Return the steps and losses in a ``trainer_state.json``, CSV or JSONL, or in a folder with one.

    Rows without a loss are left out. Raises UserError for a file that is none of these or has no losses.
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
    flat = [row for row in rows if isinstance(row, Mapping)]
    names = list(dict.fromkeys(name for row in flat for name in row if isinstance(name, str)))
    loss, step = (next((name for name in known if name in names), None) for known in (LOSS_NAMES, STEP_NAMES))
    if loss is None:
        shown = ", ".join(names[:12]) or "none"
        raise UserError(f"{path}: no column of losses among {shown}; name one {LOSS_NAMES[0]} or {LOSS_NAMES[1]}")
    curve: Curve = []
    for number, row in enumerate(flat):
        value = _number(path, number, loss, row)
        if value is None and "skipped_examples" in row:
            value = math.nan  # a step that a finetune could not take; its log has null for NaN
        if value is None:
            continue
        at = _number(path, number, step, row)
        if at is None:
            at = float(curve[-1][0] + 1 if curve else number)
        if not math.isfinite(at):
            raise UserError(f"{path}: row {number + 1}: the step is {at}; give a whole number")
        curve.append((int(at), value))
    if not curve:
        raise UserError(f"{path}: the column {loss!r} has no losses in it; give a run that has logged some")
    return curve


def _number(path: Path, row: int, name: str | None, values: Mapping[str, Any]) -> float | None:
    value = None if name is None else values.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: row {row + 1}: {name} is {value!r}, which is no number; mend that row") from error
    # JSON has no infinity, and this project's logs write the largest double for it.
    return math.copysign(math.inf, number) if abs(number) == sys.float_info.max else number


def advise_losses(log: str | Path, *, z: float = 6.0, window: int = 64) -> dict[str, Any]:
    """Return the spikes, divergences and plateaus of a training log, each with its usual cause.

    log: as ``read_log`` takes it. z, window: as ``Detector`` takes them. In ``events``, ``end`` is None for what was
    not over, and ``size`` for losses that are no numbers. Raises UserError for a log that cannot be read, or with fewer
    losses than half a window.
    """
    if window < 16 or not z > 0:
        raise UserError(f"a window of {window} and a z of {z:g} compare nothing; give at least 16, and a positive z")
    curve = read_log(log)
    found = events(curve, z=z, window=window)
    if len(curve) < window // 2 and not found:
        largest = 2 * len(curve)
        smaller = f", or give a --window from 16 to {largest}" if largest >= 16 else ""
        raise UserError(f"{log}: {len(curve)} losses are too few to compare with each other; log every step{smaller}")
    rows = []
    for event in found:
        row = {name: None if value == math.inf else value for name, value in vars(event).items()}
        rows.append(row | {"cause": CAUSES[event.kind]})
    return {
        "mode": "losses",
        "log": str(log),
        "losses": len(curve),
        "first_step": min(step for step, _ in curve),
        "last_step": curve[-1][0],
        "last_loss": curve[-1][1],
        "z": z,
        "window": window,
        "counts": {kind: sum(event.kind == kind for event in found) for kind in CAUSES},
        "events": rows,
    }


def print_losses(result: Mapping[str, Any]) -> None:
    screen = console()
    span = f"steps {result['first_step']:,} to {result['last_step']:,}"
    screen.print(f"{result['log']}: {result['losses']:,} losses, {span}", markup=False)
    if not result["events"]:
        screen.print("no spike, no divergence, no plateau")
        return
    rows = Table("event", "steps", "loss", "usual cause, and what helps")
    for event in result["events"]:
        end = "the end" if event["end"] is None else format(event["end"], ",")
        change = "to inf or NaN" if event["size"] is None else f"up by {event['size']:.3g}"
        if event["kind"] == "Plateau":
            change = f"fell by {100 * event['size']:.1f}%"
        elif event["recovery"] != "open":
            change += f", {event['recovery']} recovery"
        rows.add_row(event["kind"].lower(), f"{event['start']:,} to {end}", change, event["cause"])
    screen.print(rows)
