"""OpenVINO: its own converter from PyTorch, fp16 as the precision to infer in, and the graph that it really executes.

Its CPU plugin computes in fp16 where the processor has AVX512-FP16 or AMX-FP16 (and on Arm), elsewhere in fp32, without
a word. The device lists what it can do, and the compiled graph has the precision of every node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...families.layout import Layout
from ..batch import Batch
from ..runtime import Arithmetic, Outcome, Runtime, as_function, inputs_of, tracing

NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}

MOVES = {"Concatenation", "Const", "Convert", "Gather", "Input", "Output", "Reorder", "Reshape", "Transpose"}
"""Kinds of nodes that compute nothing."""

PRODUCTS = ("FullyConnected", "MatMul", "ScaledDotProductAttention", "gemm", "fully_connected")


def run(folder: Path, layout: Layout, batch: Batch) -> Outcome:
    """Convert, compile for a device that has fp16 if any has, run, and return what came out."""
    import openvino

    core = openvino.Core()
    capable = [
        name for name in core.available_devices if "FP16" in core.get_property(name, "OPTIMIZATION_CAPABILITIES")
    ]
    device = capable[0] if capable else "CPU"
    hints = {"INFERENCE_PRECISION_HINT": openvino.Type.f16}
    compiled = core.compile_model(converted(folder, batch), device, hints)
    output = compiled([ids.numpy() for ids in inputs_of(batch).values()])[0]
    nodes = [
        {key: str(node.get_rt_info()[key].value) for key in ("layerType", "runtimePrecision")}
        for node in compiled.get_runtime_model().get_ops()
    ]
    can = ", ".join(core.get_property(device, "OPTIMIZATION_CAPABILITIES"))
    taken = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    how = f"nodes of the executed graph; asked for f16, compiled for {taken}; the device has {can}"
    named = f"{device}, {core.get_property(device, 'FULL_DEVICE_NAME')}"
    return Outcome(torch.from_numpy(output).float(), named, arithmetic(nodes, how))


def converted(folder: Path, batch: Batch) -> Any:
    """Return a folder's model, its weights in fp32 as that converter wants them, as OpenVINO's own."""
    # What openvino.convert_model does, without the message that it sends to its makers.
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    frontend = FrontEndManager().load_by_framework("pytorch")
    function, inputs = as_function(folder, torch.float32), tuple(inputs_of(batch).values())
    with tracing():
        decoder = TorchScriptPythonDecoder(function, example_input=inputs)  # which must outlive the conversion
        return frontend.convert(frontend.load(decoder))


def arithmetic(nodes: Iterable[Mapping[str, str]], how: str) -> Arithmetic:
    """Return the arithmetic of an executed graph, of whose nodes the layer's type and its precision are given."""
    layers = ((NAMES.get(node["runtimePrecision"].lower()), node["layerType"]) for node in nodes)
    return Arithmetic.counted(((kind, name in PRODUCTS) for kind, name in layers if kind and name not in MOVES), how)


RUNTIME = Runtime("openvino", "openvino", run)
