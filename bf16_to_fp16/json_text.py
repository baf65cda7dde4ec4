"""JSON of strangers: whatever it is, what cannot be used of it is one kind of error."""

from __future__ import annotations

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises json.JSONDecodeError, also where it is nested more deeply than Python can follow, holds an integer of
    thousands of digits, is no Unicode text, or holds half a character (``\\ud800``), which no file can have again.
    """
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
