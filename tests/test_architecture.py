"""The folders show the flow: imports go one way, as the layers in pyproject.toml say, and nothing hides a circle."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(LINT, cwd=folder, capture_output=True, text=True)


def test_arrows_go_down_and_make_no_circle() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout
    assert "2 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        ("bounds/linear.py", "from ..commands import convert", "bounds.linear -> bf16_to_fp16.commands"),
        (
            "checkpoint/staging.py",
            "def late() -> None:\n    from ..report import page",
            "checkpoint.staging -> bf16_to_fp16.report",
        ),
        ("bounds/spectral.py", "from .certificate import bound", "No cycles are allowed in bf16_to_fp16.bounds"),
    ],
    ids=["upwards", "inside a function", "circle"],
)
def test_an_arrow_that_goes_up_is_found(module: str, line: str, said: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "bf16_to_fp16", tmp_path / "bf16_to_fp16", ignore=shutil.ignore_patterns("demo_data"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "bf16_to_fp16" / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1 and said in done.stdout
