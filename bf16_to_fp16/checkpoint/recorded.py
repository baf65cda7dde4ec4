"""Read what ``convert`` recorded in a folder's report or in one file's metadata. This module imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..environment import SCHEMA
from ..errors import UserError
from . import files, headers
from .files import nested_value, read_json
from .naming import LAYOUTS
from .sources import contained

REPORT = "fp16_report.json"
CONVERTED_KEY = "bf16_to_fp16"  # a key of config.json, which unlike the report survives ``save_pretrained``

NEEDED = {
    key: f"has no {key}, so convert did not write it; convert the source again"
    for key in (
        *("verdict", "source.sha256", "source.config_changes", "source.dtype", "source.dtypes", "source.made"),
        *("output.files", "plan", "certificate.sites"),
    )
}

NO_PLAN = f"holds no plan of this program; give an {REPORT} that convert wrote"


def report_data(path: Path, needed: Mapping[str, str], version: int | None = None) -> dict[str, Any]:
    """Read a report and return its JSON object. needed: the dotted keys that it must have, each with the error message
    if it is missing. version: the schema that it must have, if given."""
    data = read_json(path, "report")
    if version is not None and data.get("schema") != version:
        raise UserError(f"{path}: schema {data.get('schema')!r} is not {version}; use the release that wrote it")
    for key, words in needed.items():
        if nested_value(data, *key.split(".")) is None:
            raise UserError(f"{path}: {words}")
    return data


def recorded(folder: Path) -> dict[str, Any]:
    if not (folder / REPORT).is_file():
        check_below(folder, map(str, folder.glob(f"*/{REPORT}")))
        if saved_again(folder):
            raise UserError(
                f"{folder} is a converted checkpoint that was saved again, without {REPORT}; restore the original's"
                f" scale with bf16-to-fp16 undo {shlex.quote(str(folder))} OUT --plan CONVERTED, where CONVERTED is"
                " the folder that convert wrote"
            )
        raise UserError(f"{folder}: has no {REPORT}, so convert did not write it; give a converted folder")
    return report_data(contained(folder, REPORT), NEEDED, SCHEMA)


def saved_again(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and not (folder / REPORT).is_file() and CONVERTED_KEY in read_json(file, "config")


def check_below(source: str | Path, reports: Iterable[str]) -> None:
    if names := " or ".join(sorted(name.removesuffix(f"/{REPORT}") for name in reports)):
        raise UserError(f"{source} has no {REPORT}, but folders inside it do; give {names}")


def recorded_plan(path: Path, target: str | None) -> tuple[Path, dict[str, Any]]:
    file = path / REPORT if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{file} does not exist; give an {REPORT} or a converted folder")
    try:
        data = report_data(file, {"plan": NO_PLAN})
    except UserError as error:
        raise UserError(f"{file}: {NO_PLAN}") from error
    made_for = data.get("target") or target
    if target is not None and made_for != target:
        raise UserError(f"{file}: the plan was made for --target {made_for}; give that, or leave out --plan")
    return file, data


SUMMARY = "bf16_to_fp16"  # metadata key of one file: its conversion as JSON, with the config of its weights


def summary_of(file: Path) -> dict[str, Any] | None:
    """Return the summary that ``convert --layout`` put into a file's metadata; None if it did not write the file."""
    if not file.is_file():
        raise UserError(f"{file}: no such file; give a converted folder, or a file that convert wrote with --layout")
    metadata = headers.read_whole_header(file)[1] if file.suffix == ".safetensors" else {}
    if (text := metadata.get(SUMMARY)) is None:
        return None
    summary = files.parse_json(text.encode(), file, "metadata")
    words = (summary.get(key) for key in ("verdict", "proof", "target", "command"))
    whole = all(isinstance(word, str) for word in words) and isinstance(summary.get("config"), dict)
    if not whole or summary.get("layout") not in LAYOUTS:
        raise UserError(f"{file}: its metadata are damaged; convert the source again")
    return summary
