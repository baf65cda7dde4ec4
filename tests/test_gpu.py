"""``make gpu`` without a card: every part but the finetune, which has tests of its own, on the CPU at tiny shapes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("kernels", "audit", "attack", "half")

FAILING = """
import sys
sys.path.insert(0, "benchmarks")
import gpu

def broken(session, part):
    part.add("before", 1)
    raise RuntimeError("first line\\nsecond")

gpu.PARTS["kernels"] = broken
gpu.main()
"""


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.exhaustive
def test_every_part_runs_on_the_cpu_and_no_value_passes_its_bound(warm_python: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run(warm_python, "benchmarks/gpu.py", "--device", "cpu", "--only", *PARTS, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert (found["device"], found["failed"], found["violations"]) == ("cpu", [], [])
    assert tuple(found["parts"]) == PARTS
    for name, part in found["parts"].items():
        assert part["failed"] is None and part["seconds"] >= 0 and part["rows"], name
        for row in part["rows"]:
            assert f"| {name} | {row['what']} | " in done.stdout
    (error,) = (r for r in found["parts"]["kernels"]["rows"] if r["unit"] == "of what is allowed")
    assert 0 < error["value"] <= 1


def test_a_part_that_fails_is_reported_in_one_line_and_the_others_go_on(warm_python: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = run(warm_python, str(script), "--device", "cpu", "--only", "kernels", "half", "--out", str(out))
    assert done.returncode == 1
    found = json.loads(out.read_text())
    assert found["failed"] == ["kernels"] and found["parts"]["half"]["rows"]
    assert found["parts"]["kernels"]["failed"] == "RuntimeError: first line"
    assert "| kernels | failed: RuntimeError: first line |" in done.stdout


def test_a_device_that_is_not_there_is_refused(warm_python: Path) -> None:
    done = run(warm_python, "benchmarks/gpu.py", "--device", "cuda")
    assert done.returncode == 2
    assert "this machine has no CUDA device that torch can use; give --device cpu" in done.stderr
