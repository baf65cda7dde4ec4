"""Write JSON, which has no infinity and no NaN: ±inf becomes ± the largest double, and NaN becomes null."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path


def write_json(path: Path, data: Mapping[str, object]) -> None:
    # A lone surrogate, which a file's name may hold, becomes its JSON escape.
    path.write_text(as_json(data), encoding="utf-8", errors="backslashreplace", newline="\n")


def as_json(data: Mapping[str, object]) -> str:
    return json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def finite(data: object) -> object:
    """Return ``data`` with every ±inf replaced by ± the largest double, and every NaN by None. JSON has neither."""
    if isinstance(data, float):
        if math.isnan(data):
            return None
        return math.copysign(sys.float_info.max, data) if math.isinf(data) else data
    if isinstance(data, Mapping):
        return {str(k): finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(v) for v in data]
    return data
