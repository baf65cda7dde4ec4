"""Standard output as a screen: rich's tables on a terminal, plain lines elsewhere. Nothing slow is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from ..progress import VisibleConsole
from . import tables

PLAIN_WIDTH = 1000  # more than any row needs, so that none is folded


class Name:
    def __init__(self, name: str) -> None:
        self.name = name
        self.parts = re.findall(r"[^.:]*[.:]?", name)[:-1] or [""]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        line = ""
        for part in self.parts:
            if line and len(line) + len(part) > options.max_width:
                yield Text(line)
                line = ""
            line += part
        yield Text(line, overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self.parts)), len(self.name)).with_maximum(options.max_width)


class Output(VisibleConsole):
    def say(self, text: str) -> None:
        self.print(Text(text), soft_wrap=True)

    def table(self, table: tables.Table) -> None:
        result = Table(title=table.title or None, title_justify="left")
        for column in table.columns:
            result.add_column(column.title, justify="right" if column.css == "n" else "left")
        for line in table.lines():
            cells = zip(line, table.columns, strict=True)
            result.add_row(*(Name(text) if column.css == "site" else text for text, column in cells))
        self.print(result)


class Screen(Output):
    """A terminal's console. Its tables cut no number: one that is too wide shows each row as a list."""

    def print(self, *objects: Any, **options: Any) -> None:
        for each in objects:
            super().print(self.fitted(each) if isinstance(each, Table) else each, **options)

    def fitted(self, table: Table) -> Table:
        """Return a table without empty columns, numbers whole; if too wide, the cells of a row one below another."""
        drop_empty_columns(table)
        for column in table.columns:
            number = column.justify == "right"
            sizes = [self.measure(cell) for cell in (column.header, *column.cells)]
            column.no_wrap = number
            column.min_width = max(size.maximum if number else size.minimum for size in sizes)
        if Measurement.get(self, self.options.update_width(PLAIN_WIDTH), table).minimum <= self.width:
            return table
        below = Table(
            Column(),
            Column(ratio=1, overflow="fold"),
            title=table.title,
            title_justify=table.title_justify,
            show_header=False,
            box=table.box,
            pad_edge=table.pad_edge,
        )
        for cells in zip(*(column.cells for column in table.columns), strict=True):
            for column, cell in zip(table.columns, cells, strict=True):
                below.add_row(column.header, cell)
            below.add_section()
        return below


class Plain(Output):
    """A console for files and pipes: one line for each row, without frames, colours or wrapping."""

    def print(self, *objects: Any, **options: Any) -> None:
        for each in objects:
            if isinstance(each, Table):
                drop_empty_columns(each)
                each.box = None
                each.pad_edge = False
        super().print(*objects, **options)


def drop_empty_columns(table: Table) -> None:
    table.columns = [column for column in table.columns if any(cell != "" for cell in column.cells)]


def console(*, stderr: bool = False) -> Output:
    # Printed names come from other people's files and are no markup.
    screen = Screen(stderr=stderr, highlight=False, markup=False)
    return screen if screen.is_terminal else Plain(stderr=stderr, highlight=False, markup=False, width=PLAIN_WIDTH)


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
