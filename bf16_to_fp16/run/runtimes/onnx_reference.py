"""ONNX's reference evaluator, with every operation in fp16: what a runtime without any fp32 inside would compute.

numpy stands behind it: each operation takes fp16 and gives fp16, norms and softmaxes included. Inside a product or a
sum numpy accumulates in fp32 and rounds once, so it is real fp16 arithmetic from operation to operation, not within
one. Its fp16 products are slow; here its fp32 ones compute the same.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...families.layout import Layout
from ..batch import Batch
from .onnx_export import all_in_fp16, export
from .types import FLOATS, Arithmetic, Outcome, inputs_of

MOVES = {"Cast", "Constant", "Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Transpose", "Where"}
"""Operations that compute nothing; of others only those with a floating-point result count."""


def run(folder: Path, layout: Layout, batch: Batch) -> Outcome:
    """Export, turn what is fp32 into fp16, run node by node, and return what came out."""
    import onnx
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class MatMul(OpRun):
        """The operation of this name: a product accumulated in fp32 and rounded once."""

        def _run(self, a: Any, b: Any) -> tuple[Any]:
            return (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),)

    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-check-") as scratch:
        path = Path(scratch, "model.onnx")
        export(folder, layout, batch, path)
        model = onnx.load(path)
    all_in_fp16(model)
    feeds = {name: ids.numpy() for name, ids in inputs_of(batch).items()}
    with np.errstate(all="ignore"):  # infinities are what is looked for
        results = ReferenceEvaluator(model, new_ops=[MatMul]).run(None, feeds, intermediate=True)
    assert isinstance(results, dict)
    products: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    for node in model.graph.node:
        kind = str(results[node.output[0]].dtype)
        if kind in FLOATS and node.op_type not in MOVES:
            operations[kind] += 1
            products[kind] += node.op_type in ("MatMul", "Gemm")
    how = "every node, by the type of its result; inside a product or a sum numpy accumulates in fp32"
    found = Arithmetic(dict(+products), dict(operations), how)
    return Outcome(torch.from_numpy(results["output"]).float(), "CPU (numpy)", found)
