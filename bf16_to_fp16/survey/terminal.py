"""A survey on the terminal: a row for each checkpoint, and where page and table are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ..report.screen import Name, console
from ..wording import headroom, listed, reached
from .page import name_of, sentence
from .rows import Row


def print_survey(rows: Sequence[Row], out: Path) -> None:
    """Print the rows and the paths of the page and the table."""
    table = Table("checkpoint", "as published", "worst value", "converted", "proof", "headroom", "for any input")
    for row in rows:
        broken = row.source_broken
        table.add_row(
            Name(name_of(row)),
            "" if row.source_verdict is None else f"overflows in {listed(broken)}" if broken else "fits",
            "" if row.source_site is None else reached(row.source_largest),
            row.verdict if row.verdict and row.status == "done" else row.status,
            row.proof or "",
            "" if row.headroom_bits is None else headroom(row.headroom_bits),
            "" if row.bound_bits is None else headroom(row.bound_bits),
        )
    screen = console()
    screen.print(table)
    for row in rows:
        if row.error:
            screen.print(f"failed: {name_of(row)}: {row.error}")
    screen.print(f"{sentence(rows)} {out / 'survey.html'}, {out / 'survey.csv'}")
