"""Standard output as a screen: tables by rich, plain lines where it is no terminal; free of what is slow to import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 1000
"""More than any row needs, so that none is folded."""


class Plain(Console):
    """A console for files and pipes: a line of text for a row of a table, without frames, colours or wrapping."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, tables as columns of plain text."""
        for each in objects:
            if isinstance(each, Table):
                each.box = None
                each.pad_edge = False
        super().print(*objects, **options)


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output or error, as wide as the terminal, and plain where there is none."""
    # What is printed has names of other people's files in it, which are not markup.
    screen = Console(stderr=stderr, highlight=False, markup=False)
    return screen if screen.is_terminal else Plain(stderr=stderr, highlight=False, markup=False, width=PLAIN_WIDTH)


def good(word: str, rest: str) -> Text:
    """Return a line that begins with good news."""
    return Text.assemble((word, "bold green"), ": ", rest)


def bad(word: str, rest: str) -> Text:
    """Return a line that begins with bad news."""
    return Text.assemble((word, "bold red"), ": ", rest)


def print_families(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the supported families."""
    table = Table("family", "model_type", "architectures", "covers")
    for row in rows:
        table.add_row(row["name"], row["model_type"], "\n".join(row["architectures"]), row["title"])
    console().print(table)
