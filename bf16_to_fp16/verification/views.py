"""Card and page against the report that they were made from: both are made again, and must be equal.

Nobody reads the JSON, so what card and page say is what is believed. Both are pure functions of the report (and of
config.json, which names the class), for one release of this program and one of matplotlib, which draws the pictures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..checkpoint.packing import summary_of
from ..environment import installed
from ..report.card import FRONT_MATTER, listing_files, render_card
from ..report.page import render
from ..report.schema import CARD, PAGE, Output, Report
from .comparing import Problem

PICTURE = re.compile(r"<svg .*?</svg>", re.DOTALL)

IDENTITY = re.compile(r'(?<=id=")[^"]*|(?<=#)[\w-]+')
"""Ids in a picture, which matplotlib makes from its coordinates."""

NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")

PIXELS = 0.5  # difference of a coordinate in a picture that another machine's arithmetic may make

NOT_OURS = "is not what the report gives: a reader would believe something else"


def other_release(report: Report) -> str:
    """Return which release of this program wrote a report, in words, where it is another than this; else ""."""
    wrote, ours = report.environment.versions.get("bf16_to_fp16"), installed("bf16_to_fp16")
    return "" if wrote == ours else f"release {wrote or 'unknown'} of bf16_to_fp16 wrote it, and this is {ours}"


def other_drawing(report: Report) -> str:
    """Return which matplotlib drew the pictures of a page, in words, where it is another than this one; else ""."""
    drew, ours = report.environment.versions.get("matplotlib"), installed("matplotlib")
    return "" if drew == ours else f"its pictures were drawn by matplotlib {drew or 'unknown'}, and this is {ours}"


def rendered(
    report: Report, folder: Path, config: Mapping[str, Any], elsewhere: Mapping[str, Path] | None = None
) -> tuple[str, str]:
    """Return card and page of a converted folder, made again from its report as it was before it listed them.

    elsewhere: files that are not in the folder yet, by name.
    """
    places = {entry.name: (elsewhere or {}).get(entry.name, folder / entry.name) for entry in report.output.files}
    added = [entry for entry in report.output.files if is_added(places[entry.name], entry.name)]
    own = {CARD, PAGE, *(entry.name for entry in added)}
    files = [entry for entry in report.output.files if entry.name not in own]
    before = report.model_copy(update={"output": Output(files=files)})
    card = render_card(before, config)
    if added:
        said = [
            {**(summary_of(places[entry.name]) or {}), "name": entry.name, "nbytes": entry.nbytes} for entry in added
        ]
        card = listing_files(card, said)
    return card, render(before)


def is_added(file: Path, name: str) -> bool:
    """Return whether a file is one of those that ``publish --add`` puts beside the checkpoint's own."""
    return name.endswith(".safetensors") and "/" not in name and summary_of(file) is not None


def check_views(folder: Path, report: Report, config: Mapping[str, Any]) -> tuple[list[Problem], dict[str, str]]:
    """Return where card and page of a folder are not what its report gives, and what of them cannot be compared, by
    name with the reason."""
    listed = {entry.name for entry in report.output.files}
    problems = [Problem("views", name, "is not in the report") for name in (CARD, PAGE) if name not in listed]
    if problems:
        return problems, {}
    if other := other_release(report):
        return [], dict.fromkeys((CARD, PAGE), other)
    try:
        card, page = rendered(report, folder, config)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        # Someone else's report may hold what no conversion gives.
        reason = f"cannot be made from the report ({type(error).__name__}), which holds what no conversion gives"
        return [Problem("views", PAGE, reason)], {}
    unchecked = {}
    if report.output.card_edited:
        unchecked[CARD] = "it was edited before it was published; only its author answers for what it says"
    elif not same_card(card, text_of(folder / CARD)):
        problems.append(Problem("views", CARD, NOT_OURS))
    drawing, theirs = other_drawing(report), text_of(folder / PAGE)
    if PICTURE.sub("", page) != PICTURE.sub("", theirs):
        problems.append(Problem("views", PAGE, NOT_OURS))
    elif drawing:
        unchecked[PAGE] = drawing
    elif not all(map(same_picture, PICTURE.findall(page), PICTURE.findall(theirs))):
        problems.append(Problem("views", PAGE, "has a picture that is not the report's"))
    return problems, unchecked


def text_of(file: Path) -> str:
    """Return the text of a file; what is not UTF-8 in it is like nothing that is written."""
    return file.read_bytes().decode("utf-8", errors="replace")


def same_card(ours: str, theirs: str) -> bool:
    """Return whether two cards say the same: front matter as data, which YAML libraries write differently, and all else
    as text."""
    matter, body = split(ours)
    other, text = split(theirs)
    return matter == other and body == text


def split(card: str) -> tuple[object, str]:
    """Return the front matter of a card, parsed, and its text."""
    front = FRONT_MATTER.match(card)
    if front is None:
        return None, card
    try:
        return yaml.safe_load(front[0].strip().strip("-")), card[front.end() :]
    except (yaml.YAMLError, ValueError, RecursionError):
        return front[0], card[front.end() :]


def same_picture(ours: str, theirs: str) -> bool:
    """Return whether two SVGs are the same but for coordinates that differ by less than a reader can see."""
    if ours == theirs:
        return True
    ours, theirs = IDENTITY.sub("", ours), IDENTITY.sub("", theirs)
    if NUMBER.sub("", ours) != NUMBER.sub("", theirs):
        return False
    pairs = zip(NUMBER.findall(ours), NUMBER.findall(theirs), strict=True)
    return all(abs(float(a) - float(b)) <= PIXELS for a, b in pairs)
