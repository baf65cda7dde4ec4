"""The errors that users are meant to see, as ``error: …`` with status 2. Any other exception is a bug: status 70."""

from __future__ import annotations


class UserError(Exception):
    """Unusable input. The message is one line that names the file or tensor and how to mend it."""


INTERRUPTED = 130  # exit status after Ctrl-C
LONGEST_SHOWN = 120  # characters of a wrong value that an error message repeats


def shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
