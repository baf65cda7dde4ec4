"""ONNX Runtime: the exported graph under its own optimisations, and what its profiler saw each kernel compute.

Where a provider has no fp16 kernel for an operation, ONNX Runtime casts its inputs to fp32 and the result back, and
then drops pairs of casts. Only what was executed tells, so the session profiles itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...families.layout import Layout
from ..batch import Batch
from ..onnx_export import MOVES, export
from ..runtime import FLOATS, Arithmetic, Outcome, Runtime, inputs_of

NAMES = {"float": "float32", "double": "float64"}
PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")


def run(folder: Path, layout: Layout, batch: Batch) -> Outcome:
    """Export, run under the profiler, and return what came out."""
    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-check-") as scratch:
        path = Path(scratch, "model.onnx")
        export(folder, layout, batch, path)
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(scratch, "profile"))
        options.log_severity_level = 3
        usable = [name for name in PROVIDERS if name in onnxruntime.get_available_providers()]
        session = onnxruntime.InferenceSession(str(path), options, providers=usable)
        (output,) = session.run(None, {name: ids.numpy() for name, ids in inputs_of(batch).items()})
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        device = session.get_providers()[0]
    return Outcome(torch.from_numpy(output).float(), device, arithmetic(events))


def arithmetic(events: Iterable[Mapping[str, Any]]) -> Arithmetic:
    """Return the arithmetic that the events of a profile show."""

    def operations() -> Iterator[tuple[str, bool]]:
        for event in events:
            details = event.get("args", {})
            name = details.get("op_name", "")
            if event.get("cat") != "Node" or "input_type_shape" not in details or name in MOVES:
                continue
            kinds = [NAMES.get(kind, kind) for entry in details["input_type_shape"] for kind in entry]
            if kind := next((kind for kind in kinds if kind in FLOATS), None):
                yield kind, "MatMul" in name or "Gemm" in name or name.endswith("Attention")

    how = "kernels as executed, by the type of their inputs in the session's profile"
    return Arithmetic.counted(operations(), how)


RUNTIME = Runtime("onnxruntime", "onnxruntime", run)
