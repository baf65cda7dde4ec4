"""The benchmarks' own logic, plans and bytes that were recorded, and ``make gpu`` without a card at tiny shapes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import peers
import pytest
import runtimes
import same
import torch
from models import DEMO, demo_corpus
from results import tables_in

from bf16_to_fp16.measuring.stock import load, load_config

ROOT = Path(__file__).parents[1]
T5 = DEMO / "t5-gated-bytes"


def test_feed_forwards_out_of_autocast_compute_in_fp32_and_a_copy_of_a_wrapped_model_is_wrapped_too() -> None:
    batch = next(demo_corpus(T5, load_config(T5), 2, input_length=64, target_length=32).training_batches())
    seen: dict[str, set[torch.dtype]] = {}
    model = peers.under_autocast(peers.without_feed_forwards(load(T5, torch.float32)))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            kind = "wo" if ".wo" in name or ".wi" in name else "other"
            module.register_forward_hook(lambda m, i, out, kind=kind: seen.setdefault(kind, set()).add(out.dtype))
    with torch.no_grad():
        model(**batch.inputs())
    assert seen == {"wo": {torch.float32}, "other": {torch.float16}}


def test_every_line_of_the_held_out_text_is_a_row() -> None:
    lines = (DEMO / "held_out.txt").read_text(encoding="utf-8").splitlines()
    rows = [row for batch in demo_corpus(T5, load_config(T5)).held_out(None) for _, row in batch.examples]
    assert sorted(rows) == list(range(len(lines))) and len(rows) > 100


@pytest.mark.parametrize("name", ["llama, auto", "t5gemma, norm-safe"])
def test_a_conversion_gives_the_recorded_bounds_plan_and_bytes(name: str) -> None:
    said, now = json.loads(same.RECORD.read_text())[name], json.loads(json.dumps(same.result_of(name)))
    assert list(same.differences(said, now)) == []


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


def kernel(name: str, *types: str) -> dict[str, Any]:
    return {"cat": "Node", "args": {"op_name": name, "input_type_shape": [{kind: [2, 3]} for kind in types]}}


def test_an_fp16_graph_that_onnx_runtime_computes_in_fp32_is_seen_in_its_profile() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "Session", "name": "model_run"},
        {"cat": "Node", "args": {"op_name": "MatMul"}},  # before and behind a kernel
        kernel("Cast", "float16"),
        kernel("MatMul", "float", "float"),
        kernel("MatMul", "int64", "int64"),
    ]
    assert runtimes.products_of_profile(events) == {"float32": 1}
    assert runtimes.products_of_profile([kernel("FusedMatMul", "float16")]) == {"float16": 1}
