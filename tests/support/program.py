"""The program as its users call it, in this process."""

import pytest

from bf16_to_fp16 import cli


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the one error line, its last, of a command line that is refused."""
    capsys.readouterr()  # what was said before
    assert cli.main([*map(str, words)]) == 2
    printed = capsys.readouterr()
    line = printed.err.splitlines()[-1]
    assert line.startswith("error: ") and printed.err.count("error: ") == 1 and printed.out == ""
    return line
