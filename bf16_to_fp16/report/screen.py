"""Standard output as a screen: rich's tables on a terminal, plain lines elsewhere. Nothing slow is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from rich.box import HEAVY_HEAD
from rich.table import Table
from rich.text import Text

from ..progress import VisibleConsole
from . import tables

PLAIN_WIDTH = 1000  # more than any row needs, so that none is folded


class Output(VisibleConsole):
    """A terminal's console, whose tables fold what does not fit; for files and pipes one line for each row, without
    frames or colours."""

    def say(self, text: str) -> None:
        self.print(Text(text), soft_wrap=True)

    def table(self, table: tables.Table) -> None:
        lines, framed = list(table.lines()), self.is_terminal
        shown = [i for i in range(len(table.columns)) if any(line[i] for line in lines)]
        result = Table(
            title=table.title or None, title_justify="left", box=HEAVY_HEAD if framed else None, pad_edge=framed
        )
        for column in (table.columns[i] for i in shown):
            result.add_column(column.title, justify="right" if column.css == "n" else "left", overflow="fold")
        for line in lines:
            result.add_row(*(line[i] for i in shown))
        self.print(result)


def console(*, stderr: bool = False) -> Output:
    # Printed names come from other people's files and are no markup.
    screen = Output(stderr=stderr, highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = PLAIN_WIDTH
    return screen


def good(word: str, rest: str) -> Text:
    return Text.assemble((word, "bold green"), ": ", rest)


def bad(word: str, rest: str) -> Text:
    return Text.assemble((word, "bold red"), ": ", rest)


def print_families(rows: Iterable[Mapping[str, Any]]) -> None:
    keys = {"family": "name", "model_type": "model_type", "architectures": "architectures", "covers": "title"}
    columns = [tables.Column(title, itemgetter(key)) for title, key in keys.items()]
    console().table(tables.Table(columns, [{**row, "architectures": "\n".join(row["architectures"])} for row in rows]))


def print_refused(refused: Mapping[str, str]) -> None:
    columns = (tables.Column("not convertible", 0), tables.Column("because", 1))
    console().table(tables.Table(columns, list(refused.items())))
