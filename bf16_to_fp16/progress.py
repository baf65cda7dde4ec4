"""Progress of the work: a bar on a terminal, one line per step elsewhere, always on standard error.

Standard output belongs to data. Colours and bars come from rich, which respects ``NO_COLOR`` and dumb terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

Advance = Callable[[int, int], None]
"""Called with (done, total) as work proceeds."""


class Progress:
    """Shows on standard error how far the work is; with ``quiet`` nothing at all, as library calls do by default."""

    def __init__(self, *, quiet: bool = False) -> None:
        """Open the console."""
        self.console = Console(stderr=True, quiet=quiet, highlight=False)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def step(self, text: str) -> Iterator[Advance]:
        """Announce a step and yield a function that shows how far it is; on a terminal a bar with the time left."""
        if not self.console.is_terminal:
            self.say(text)
            yield lambda done, total: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with ProgressBar(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(text, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        self.say(text)
