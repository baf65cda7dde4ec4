"""Parse JSON from other programs: every unusable text raises the same error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def loads(text: str | bytes) -> Any:
    """Parse a JSON text. Raises json.JSONDecodeError also for nesting that is too deep, integers of thousands of
    digits, invalid Unicode, and lone surrogates, which UTF-8 cannot encode."""
    try:
        value = json.loads(text)
        if ("\\u" in text) if isinstance(text, str) else (b"\\u" in text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error
    except UnicodeEncodeError as error:
        raise json.JSONDecodeError("half a character", "", 0) from error
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
    return value


def write_json(path: Path, data: Mapping[str, object]) -> None:
    # A lone surrogate, which a file's name may hold, becomes its JSON escape.
    path.write_text(as_json(data), encoding="utf-8", errors="backslashreplace", newline="\n")


def as_json(data: Mapping[str, object]) -> str:
    return json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def finite(data: object) -> object:
    """Return ``data`` with ±inf as ±the largest double and NaN as None, since JSON has neither."""
    if isinstance(data, float):
        if math.isnan(data):
            return None
        return math.copysign(sys.float_info.max, data) if math.isinf(data) else data
    if isinstance(data, Mapping):
        return {str(k): finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(v) for v in data]
    return data
