"""Forging a converted folder as someone would who hides a change: hashes, card and page agree with what was changed."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bf16_to_fp16.checkpoint.folder import records
from bf16_to_fp16.json_text import as_json
from bf16_to_fp16.report.card import render_card
from bf16_to_fp16.report.page import render
from bf16_to_fp16.report.schema import CARD, PAGE, REPORT, Output, Report, read
from bf16_to_fp16.rescaling.plan import Plan, describe_plan


def report_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / REPORT).read_text()))


def forge(
    folder: Path,
    change: Callable[[dict[str, Any]], object] | Mapping[str, Any] | None = None,
    *,
    views: bool = True,
    new: bool = False,
) -> None:
    """Change a folder's report and its list of files to fit; views: card and page too; new: every file there is."""
    report = report_of(folder)
    if callable(change):
        change(report)
    else:
        report |= change or {}
    relist(folder, report, new=new)
    if views:
        try:
            config = json.loads((folder / "config.json").read_text())
            said = read(Report, report)
            before = said.model_copy(update={"output": Output()})
            card, page = render_card(before, config), render(before)
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError):  # nothing that can be shown
            pass
        else:
            (folder / CARD).write_text(card, encoding="utf-8", newline="\n")
            (folder / PAGE).write_text(page, encoding="utf-8", newline="\n")
            relist(folder, report)
    (folder / REPORT).write_text(as_json(report), encoding="utf-8")


def copied(folder: Path, place: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(folder, place)
    forge(place, change, views=False)
    return place


def relist(folder: Path, report: dict[str, Any], *, new: bool = False) -> None:
    there = {str(entry["name"]): entry for entry in records(folder) if entry["name"] != REPORT}
    listed = [entry["name"] for entry in report["output"]["files"]]
    names = [*(n for n in listed if n in there), *(n for n in there if new and n not in listed and n[0] != ".")]
    report["output"] = report["output"] | {"files": [there[name] for name in names]}


def plan_file(place: Path, plan: Plan) -> Path:
    place.write_text(json.dumps({"schema": 1, "target": "half", "plan": describe_plan(plan)}))
    return place


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
