"""Print tables and lines. ``Table`` holds a table's data. ``Screen`` prints it, drawn by rich on a terminal and as
plain lines elsewhere. The module imports nothing slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from rich.box import HEAVY_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from ..progress import VisibleConsole

PLAIN_WIDTH = 1000  # more than any row needs, so that none is folded


@dataclass(frozen=True)
class Column:
    """A table's column. ``of``: the attribute, index or function that gives a row's value. ``write``: formats the
    value. ``css``: the class of its cells on the page, "n" for numbers or "site" for names."""

    title: str
    of: str | int | Callable[[Any], Any]
    write: Callable[[Any], str] = str
    css: str = ""

    def text(self, row: Any) -> str:
        if callable(self.of):
            return self.write(self.of(row))
        return self.write(row[self.of] if isinstance(self.of, int) else getattr(row, self.of))


def names(title: str, of: str | int | Callable[[Any], Any] = "name") -> Column:
    return Column(title, of, css="site")


def numbers(title: str, of: str | int | Callable[[Any], Any], write: Callable[[Any], str] = "{:,}".format) -> Column:
    return Column(title, of, write, "n")


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""

    def lines(self) -> Iterator[list[str]]:
        for row in self.rows:
            yield [column.text(row) for column in self.columns]


class Screen(VisibleConsole):
    """A console that draws tables with wrapped cells on a terminal, and prints one plain line per row elsewhere."""

    def say(self, text: str) -> None:
        self.print(Text(text), soft_wrap=True)

    def rows(self, *rows: tuple[str, object]) -> None:
        """Print a line for each (label, words) whose words are not empty."""
        for label, words in rows:
            if words:
                self.say(f"{label}: {words}")

    def table(self, table: Table) -> None:
        lines, framed = list(table.lines()), self.is_terminal
        if not lines:
            return
        shown = [i for i in range(len(table.columns)) if any(line[i] for line in lines)]
        result = RichTable(
            title=table.title or None, title_justify="left", box=HEAVY_HEAD if framed else None, pad_edge=framed
        )
        for column in (table.columns[i] for i in shown):
            result.add_column(column.title, justify="right" if column.css == "n" else "left", overflow="fold")
        for line in lines:
            result.add_row(*(line[i] for i in shown))
        self.print(result)


def console(*, stderr: bool = False) -> Screen:
    # Printed names come from other people's files and are no markup.
    screen = Screen(stderr=stderr, highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = PLAIN_WIDTH
    return screen


def good(word: str, rest: str) -> Text:
    return Text.assemble((word, "bold green"), ": ", rest)


def bad(word: str, rest: str) -> Text:
    return Text.assemble((word, "bold red"), ": ", rest)


def print_families(rows: Iterable[Mapping[str, Any]]) -> None:
    keys = {"family": "name", "model_type": "model_type", "architectures": "architectures", "covers": "title"}
    columns = [Column(title, itemgetter(key)) for title, key in keys.items()]
    console().table(Table(columns, [{**row, "architectures": "\n".join(row["architectures"])} for row in rows]))
