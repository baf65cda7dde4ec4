"""What is said of work while it goes on: its total, and how long it will take, on a terminal alone."""

import io
import re

import pytest

from bf16_to_fp16 import progress
from bf16_to_fp16.progress import Progress, VisibleConsole, roughly, shown_by


def shown(monkeypatch: pytest.MonkeyPatch, *, seconds: float, terminal: bool = True) -> str:
    """Return what is shown of a step of 60 parts of so many seconds each, control sequences taken out."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    screen = Progress()
    screen.console = VisibleConsole(file=io.StringIO(), force_terminal=terminal, width=100)
    with screen.step("Observing") as advance:
        for done in range(1, 61):
            clock[0] += seconds
            advance(done, 60)
    assert isinstance(screen.console.file, io.StringIO)
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.console.file.getvalue())


def test_a_long_step_says_how_long_it_will_take_once_its_first_part_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = shown(monkeypatch, seconds=4.0)
    assert "Observing, about 4 min" in text and "60/60" in text


def test_a_short_step_and_one_that_is_not_on_a_terminal_say_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "about" not in shown(monkeypatch, seconds=0.1)
    assert shown(monkeypatch, seconds=4.0, terminal=False) == "Observing\n"


def test_a_step_without_a_known_total_counts_nothing() -> None:
    screen = Progress()
    screen.console = VisibleConsole(file=io.StringIO(), force_terminal=True, width=100)
    with screen.step("Fetching"):
        pass
    assert isinstance(screen.console.file, io.StringIO)
    assert "Fetching" in screen.console.file.getvalue() and "/?" not in screen.console.file.getvalue()


def test_a_library_call_shows_its_progress_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    given = Progress(quiet=True)
    assert shown_by(given) is given
    for asked, said in ((None, ""), (False, ""), (True, "Observing\n")):
        with shown_by(asked).step("Observing"):
            pass
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", said)


def test_a_time_is_said_in_the_unit_in_which_it_is_an_estimate() -> None:
    said = [roughly(seconds) for seconds in (3, 44, 100, 240, 5000, 5500, 20000)]
    assert said == ["about 10 s", "about 40 s", "about 2 min", "about 4 min", "about 83 min", "about 2 h", "about 6 h"]


def test_what_is_to_be_said_once_is_not_said_again() -> None:
    screen = Progress()
    screen.console = VisibleConsole(file=io.StringIO())
    for text in ("Device: cpu", "Device: cpu", "Device: cuda"):
        screen.say(text, once=True)
    assert isinstance(screen.console.file, io.StringIO)
    assert screen.console.file.getvalue() == "Device: cpu\nDevice: cuda\n"
