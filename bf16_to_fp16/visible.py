"""Escape hidden characters in printed text, since names from files could steer a terminal or hide text: Unicode's
control and format characters (but newline and tab), line separators, and surrogates, which no stream takes."""

from __future__ import annotations

import json
import sys
import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Categories of the characters that are escaped


def visible(text: str, *, as_json: bool = False) -> str:
    """Escape hidden characters as Python does, or with ``as_json`` as JSON does, so that JSON stays JSON."""
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in HIDDEN else (json.dumps(c) if as_json else ascii(c))[1:-1]
        for c in text
    )


def show(text: str, *, aside: bool = False) -> None:
    print(visible(text), file=sys.stderr if aside else sys.stdout)
