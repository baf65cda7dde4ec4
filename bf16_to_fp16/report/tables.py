"""Tables as data, drawn by terminal, page and card: columns, which format their values, and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """``of``: attribute, index or function for a value. ``write``: formats it. ``css``: "site" or "n" (number)."""

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


def numbers(
    title: str,
    of: str | int | Callable[[Any], Any],
    write: Callable[[Any], str] = "{:,}".format,
) -> Column:
    return Column(title, of, write, "n")


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""

    def lines(self) -> Iterator[list[str]]:
        for row in self.rows:
            yield [column.text(row) for column in self.columns]
