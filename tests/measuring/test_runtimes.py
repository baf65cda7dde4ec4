"""What is said of a runtime's arithmetic is read off what it executed."""

import sys
from typing import Any

sys.path.insert(0, "benchmarks")

import runtimes


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
