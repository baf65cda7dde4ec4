"""The conversion's record in the safetensors metadata of one converted file."""

from __future__ import annotations

import base64
import binascii
import zlib
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import files, headers
from .layouts import LAYOUTS

SUMMARY, UNDO_DATA = "bf16_to_fp16", "bf16_to_fp16.undo"
"""Metadata keys: a summary as JSON, and ``undo``'s data as JSON, compressed and in base64."""

TENSORS = "bf16_to_fp16.tensors_sha256"  # SHA-256 over each tensor's ``described`` and bytes, in order

LONGEST_UNDO_DATA = 64_000_000  # bytes of ``undo``'s data; an XXL encoder's have less than 3 MB


def metadata_in(file: Path) -> dict[str, str]:
    return headers.read_whole_header(file, any_dtype=True)[1] if file.suffix == ".safetensors" else {}


def recorded_sha256(file: Path) -> str | None:
    return metadata_in(file).get(TENSORS)


def summary_of(file: Path) -> dict[str, Any] | None:
    """Return the summary of the conversion that wrote a file, None where none did."""
    if not file.is_file():
        raise UserError(f"{file}: No such file; give a file that convert --layout wrote")
    if (said := metadata_in(file).get(SUMMARY)) is None:
        return None
    summary = files.parse_json(said.encode(), file, "metadata")
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
