"""Read the losses of a training run from its log, and find spikes, divergences and plateaus in them. A log is a
transformers Trainer's state, JSONL or CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import UserError, first_line
from ..report.screen import console
from .detector import CAUSES, WINDOW, events

# Keys of loss and step in logs; the first that is there is read.
LOSS_NAMES = ("loss", "train_loss", "train/loss", "training_loss", "train/train_loss")
STEP_NAMES = ("step", "global_step", "train/global_step", "trainer/global_step", "iteration", "_step")

KINDS = "give a trainer_state.json, .csv or .jsonl (wandb exports CSV)"


def read_log(path: str | Path) -> list[tuple[int, float]]:
    """Return the (step, loss) rows of a CSV, JSONL or ``trainer_state.json`` file. If ``path`` is a folder, its newest
    log is read, or else the newest in its ``checkpoint-*`` folders. Raises UserError if no losses can be read."""
    path = Path(path)
    if path.is_dir():
        names = ("log.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json")
        logs = [log for name in names for log in path.glob(name)]
        if not logs:
            raise UserError(f"{path}: no trainer_state.json and no log.jsonl in the folder; give the log's file")
        path = max(logs, key=lambda log: (log.parent == path, log.stat().st_mtime, log.parent.name))
    try:
        rows = _rows(path.read_text(encoding="utf-8-sig"), path.suffix.lower())
        curve = _curve([row for row in rows if isinstance(row, Mapping)])
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {KINDS}") from error
    except (ValueError, TypeError, KeyError, OverflowError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as a log ({first_line(error)}); {KINDS}") from error
    if not curve:
        raise UserError(f"{path}: no losses in it; their column must be called {LOSS_NAMES[0]} or {LOSS_NAMES[1]}")
    return curve


def _rows(text: str, suffix: str) -> list[Any]:
    if suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    if suffix == ".json":
        return list(json.loads(text)["log_history"])
    if suffix != ".jsonl":
        raise ValueError(f"unknown kind of log {suffix!r}")
    *lines, last = [line for line in text.split("\n") if line.strip()] or [text]
    rows = [json.loads(line) for line in lines]
    try:
        return [*rows, json.loads(last)]
    except ValueError:
        if not rows:
            raise
        return rows  # of a run that was killed while it wrote


def _curve(rows: list[Mapping[str, Any]]) -> list[tuple[int, float]]:
    names = {name for row in rows for name in row}
    loss, step = (next((name for name in known if name in names), None) for known in (LOSS_NAMES, STEP_NAMES))
    curve: list[tuple[int, float]] = []
    for number, row in enumerate(rows):
        value = None if loss is None else row.get(loss)
        if value is None and "skipped_examples" in row:
            value = math.nan  # a step that a finetune could not take; its log has null for NaN
        if value is None or str(value).strip() == "":
            continue
        size = float(value)
        # JSON has no infinity, and this project's logs write the largest double for it.
        size = math.copysign(math.inf, size) if abs(size) == sys.float_info.max else size
        at = None if step is None else row.get(step)
        after = curve[-1][0] + 1 if curve else number
        curve.append((after if at is None or at == "" else int(float(at)), size))
    return curve


def advise_losses(log: str | Path) -> dict[str, Any]:
    """Return the spikes, divergences and plateaus of a training log, each with its usual cause.

    log: a file or folder that ``read_log`` can read. In ``events``, ``end`` is None for an event that lasts to the end
    of the log. ``size`` is how far the loss rose, or the share by which it fell in a plateau; it is None if losses are
    NaN or infinite. Raises UserError for an unreadable log, or if a log has fewer than 32 losses and no events."""
    curve = read_log(log)
    anomalies = events(curve)
    if len(curve) < WINDOW // 2 and not anomalies:
        raise UserError(f"{log}: {len(curve)} losses, but {WINDOW // 2} are needed; log every step")
    rows = [{name: None if value == math.inf else value for name, value in vars(event).items()} for event in anomalies]
    return {
        "mode": "losses",
        "log": str(log),
        "losses": len(curve),
        "first_step": min(step for step, _ in curve),
        "last_step": curve[-1][0],
        "events": [row | {"cause": CAUSES[event.kind]} for row, event in zip(rows, anomalies, strict=True)],
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
        rows.add_row(event["kind"].lower(), f"{event['start']:,} to {end}", change, event["cause"])
    screen.print(rows)
