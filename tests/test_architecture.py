"""The folders show the flow: imports go one way, as the layers in pyproject.toml say, and nothing hides a circle."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_arrows_go_down_and_make_no_circle() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "2 kept, 0 broken" in done.stdout
