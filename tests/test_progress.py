"""What is said of work while it goes on: its total and the time left, on a terminal alone."""

import io
import re

import pytest

from bf16_to_fp16.progress import Progress, VisibleConsole, progress_of


def on(terminal: bool) -> tuple[Progress, io.StringIO]:
    screen, file = Progress(), io.StringIO()
    screen.console = VisibleConsole(file=file, force_terminal=terminal, width=100)
    return screen, file


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_shows_how_far_it_is_on_a_terminal_and_is_one_line_elsewhere(terminal: bool) -> None:
    screen, file = on(terminal)
    with screen.step("Observing") as advance:
        for done in range(1, 61):
            advance(done, 60)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", file.getvalue())
    assert ("60/60" in text and "0:00:00" in text) if terminal else text == "Observing\n"


def test_a_step_without_a_known_total_counts_nothing() -> None:
    screen, file = on(terminal=True)
    with screen.step("Fetching"):
        pass
    assert "Fetching" in file.getvalue() and "/?" not in file.getvalue()


def test_a_library_call_shows_its_progress_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    given = Progress(quiet=True)
    assert progress_of(given) is given
    for asked, said in ((None, ""), (False, ""), (True, "Observing\n")):
        with progress_of(asked).step("Observing"):
            pass
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", said)


def test_what_is_to_be_said_once_is_not_said_again() -> None:
    screen, file = on(terminal=False)
    for text in ("Device: cpu", "Device: cpu", "Device: cuda"):
        screen.say(text, once=True)
    assert file.getvalue() == "Device: cpu\nDevice: cuda\n"
