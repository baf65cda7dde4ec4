"""What is printed holds no control characters: names in other people's files and a server's words could steer a
terminal, turn a line around or hide a part of it.

Escaped are Unicode's control and format characters (C0 but for newline and tab, C1, directions, joiners, tags), its
separators of lines, and halves of surrogate pairs, which file names of other encodings become and no stream takes.
"""

from __future__ import annotations

import json
import sys
import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Categories of the characters that are escaped


def visible(text: str, *, as_json: bool = False) -> str:
    """Return a text with what cannot be seen escaped as Python does, or as JSON does, of which it then stays one."""
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in HIDDEN else (json.dumps(c) if as_json else ascii(c))[1:-1]
        for c in text
    )


def show(text: str, *, aside: bool = False) -> None:
    print(visible(text), file=sys.stderr if aside else sys.stdout)
