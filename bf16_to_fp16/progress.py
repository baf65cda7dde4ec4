"""Show progress on standard error: a bar on a terminal (by rich, which respects ``NO_COLOR``), else lines of text. The
module also escapes hidden characters in printed text."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.segment import Segment

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode's control and format characters, line separators, surrogates

Advance = Callable[[int, int], None]  # called with (done, total) as work proceeds


def visible(text: str) -> str:
    """Escape hidden characters except newline and tab, because names from files could steer a terminal or hide text."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in HIDDEN else ascii(c)[1:-1] for c in text)


def show(text: str, *, aside: bool = False) -> None:
    print(visible(text), file=sys.stderr if aside else sys.stdout)


class VisibleConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


class Progress:
    """Shows progress on standard error, or nothing if ``quiet``, as in library calls without ``progress=True``."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = VisibleConsole(stderr=True, quiet=quiet, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def step(self, text: str) -> Iterator[Advance]:
        """Show a bar named ``text`` inside a ``with`` block, and yield the function that moves the bar. If standard
        error is no terminal, only ``text`` is printed and the function does nothing."""
        if not self.console.is_terminal:
            self.say(text)
            yield lambda done, total: None
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with ProgressBar(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(text, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        self.say(text)


def progress_of(progress: Progress | bool | None) -> Progress:
    """Return ``progress`` itself if it is a ``Progress``, else a new one, silent unless ``progress`` is True."""
    return progress if isinstance(progress, Progress) else Progress(quiet=not progress)
