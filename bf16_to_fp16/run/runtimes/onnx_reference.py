"""ONNX's reference evaluator, with every operation in fp16: what a runtime without any fp32 inside would compute.

In numpy each operation takes fp16 and gives fp16, norms and softmaxes included; inside a product or a sum it
accumulates in fp32 and rounds once. Its fp16 products are slow; here its fp32 ones compute the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...families.layout import Layout
from ..batch import Batch
from ..onnx_export import MOVES, all_in_fp16, export
from ..runtime import FLOATS, Arithmetic, Outcome, Runtime, inputs_of


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
    nodes = [(str(results[node.output[0]].dtype), node.op_type) for node in model.graph.node]
    counted = ((kind, name in ("MatMul", "Gemm")) for kind, name in nodes if kind in FLOATS and name not in MOVES)
    how = "every node, by the type of its result; inside a product or a sum numpy accumulates in fp32"
    values = torch.from_numpy(results["output"]).float()
    return Outcome(values, "CPU (numpy)", Arithmetic.counted(counted, how))


RUNTIME = Runtime("onnx-reference", "onnx", run)
