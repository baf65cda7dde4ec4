"""``make gpu`` without a card: every part but the finetune, which has tests of its own, on the CPU at tiny shapes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, "benchmarks")

from results import tables_in

ROOT = Path(__file__).parents[1]
PARTS = ("kernels", "audit", "half")

FAILING = """
import sys
sys.path.insert(0, "benchmarks")
import gpu

def broken(session):
    session.row("before", 1)
    raise RuntimeError("first line\\nsecond")

gpu.PARTS["kernels"] = broken
gpu.main()
"""


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.exhaustive
def test_every_part_runs_on_the_cpu_and_no_value_passes_its_bound(warm_python: Path) -> None:
    done = run(warm_python, "benchmarks/gpu.py", "--device", "cpu", "--only", *PARTS)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    [table] = tables_in(done.stdout)
    assert list(dict.fromkeys(row[0] for row in table["rows"])) == list(PARTS)
    assert [row[0] for row in table["rows"] if row[1] == "the whole part"] == list(PARTS)
    [error] = [row[2] for row in table["rows"] if row[2].endswith(" of what is allowed")]
    assert 0 < float(error.split()[0]) <= 1


def test_a_part_that_fails_is_reported_in_one_line_and_the_others_go_on(warm_python: Path, tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = run(warm_python, str(script), "--device", "cpu", "--only", "kernels", "audit")
    assert done.returncode == 1
    assert "| kernels | failed: RuntimeError: first line |" in done.stdout and "second" not in done.stdout
    assert done.stdout.count("failed: ") == 1 and "| audit | the whole part |" in done.stdout


def test_a_device_that_is_not_there_is_refused(warm_python: Path) -> None:
    done = run(warm_python, "benchmarks/gpu.py", "--device", "cuda")
    assert done.returncode == 2
    assert "this machine has no CUDA device that torch can use; give --device cpu" in done.stderr
