"""Read the record of ``convert`` in a folder, or in the safetensors metadata of one file, as JSON without torch."""

from __future__ import annotations

import base64
import binascii
import shlex
import zlib
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

LONGEST_REPORT = 64_000_000  # bytes; with an exponent for each channel of an 11B model it has some 12 MB

NEEDED = {
    key: f"has no {key}, so convert did not write it; convert the source again"
    for key in (
        *("verdict", "source.sha256", "source.config_changes", "source.dtype", "source.dtypes", "source.made"),
        *("output.files", "plan", "certificate.sites"),
    )
}

NO_PLAN = f"holds no plan of this program; give an {REPORT} that convert wrote"


def report_data(path: Path, needed: Mapping[str, str], version: int | None = None) -> dict[str, Any]:
    """Return a report's JSON. needed: dotted keys that it must have, with error messages. version: the schema's."""
    data = read_json(path, "report", LONGEST_REPORT)
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
                f"{folder}: has no {REPORT}: it was converted, then saved again without it; bring it to the original's"
                f" scale by bf16-to-fp16 undo {shlex.quote(str(folder))} OUT --plan CONVERTED, the folder that"
                " convert wrote"
            )
        raise UserError(f"{folder}: has no {REPORT}, so convert did not write it; give a converted folder")
    return report_data(contained(folder, REPORT), NEEDED, SCHEMA)


def saved_again(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and not (folder / REPORT).is_file() and CONVERTED_KEY in read_json(file, "config")


def check_below(source: str | Path, reports: Iterable[str]) -> None:
    if names := " or ".join(sorted(name.removesuffix(f"/{REPORT}") for name in reports)):
        raise UserError(f"{source} has no {REPORT} of its own; give {names}")


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


SUMMARY, UNDO_DATA = "bf16_to_fp16", "bf16_to_fp16.undo"
"""Metadata keys: a summary as JSON, and ``undo``'s data as JSON, compressed and in base64."""

TENSORS = "bf16_to_fp16.tensors_sha256"  # SHA-256 over each tensor's ``described`` and bytes, in order

LONGEST_UNDO_DATA = 64_000_000  # bytes of ``undo``'s data; an XXL encoder's have less than 3 MB


def metadata_in(file: Path) -> dict[str, str]:
    return headers.read_whole_header(file, any_dtype=True)[1] if file.suffix == ".safetensors" else {}


def recorded_sha256(file: Path) -> str | None:
    return metadata_in(file).get(TENSORS)


def summary_of(file: Path) -> dict[str, Any] | None:
    """Return the conversion's summary in a file's metadata; None if no conversion wrote the file."""
    if not file.is_file():
        raise UserError(f"{file}: No such file; give a file that convert --layout wrote")
    if (text := metadata_in(file).get(SUMMARY)) is None:
        return None
    summary = files.parse_json(text.encode(), file, "metadata")
    if not all(isinstance(summary.get(key), str) for key in ("layout", "verdict", "proof", "target", "command")):
        raise UserError(f"{file}: its metadata are damaged; convert the source again")
    return summary


def packed_data(file: Path) -> dict[str, Any]:
    if (data := undo_data_of(file)) is None:
        raise UserError(f"{file}: convert --layout did not write it; give a file that it wrote, or a converted folder")
    return data


def undo_data_of(file: Path) -> dict[str, Any] | None:
    """Return ``undo``'s data in a file that a conversion wrote, with its ``layout``; None in any other file."""
    metadata = metadata_in(file)
    if UNDO_DATA not in metadata:
        return None
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(metadata[UNDO_DATA], validate=True), LONGEST_UNDO_DATA)
        if not unpacking.eof:
            raise ValueError("cut short or too long")
    except (ValueError, binascii.Error, zlib.error) as error:
        raise UserError(f"{file}: {UNDO_DATA} in its metadata is damaged; convert the source again") from error
    way_back = files.parse_json(data, file, UNDO_DATA)
    summary = files.parse_json(metadata.get(SUMMARY, "{}").encode(), file, SUMMARY)
    parts = (way_back.get("plan"), way_back.get("config"), way_back.get("source"), way_back.get("weights"))
    if not all(isinstance(part, dict) for part in parts) or summary.get("layout") not in LAYOUTS:
        raise UserError(f"{file}: {UNDO_DATA} in its metadata is damaged; convert the source again")
    return way_back | {"layout": summary["layout"]}
