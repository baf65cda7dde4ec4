"""The runtimes that a checkpoint can be checked in, by name."""

from __future__ import annotations

from importlib.util import find_spec

from ...environment import how_to_install
from ...errors import UserError
from . import ctranslate2, onnx_reference, onnxruntime, openvino
from .types import Runtime

RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("openvino", "openvino", ("openvino",), openvino.run),
        Runtime("onnxruntime", "onnxruntime", ("onnxruntime",), onnxruntime.run),
        Runtime("ctranslate2", "ctranslate2", ("ctranslate2",), ctranslate2.run, ctranslate2.log_probabilities),
        Runtime("onnx-reference", "onnx", ("onnx",), onnx_reference.run),
    )
}


def installed(name: str) -> Runtime:
    """Return a runtime by its name; raise UserError where there is none, or it is not installed."""
    runtime = RUNTIMES.get(name)
    if runtime is None:
        raise UserError(f"no runtime {name!r}; the known ones are {', '.join(RUNTIMES)}")
    for module in runtime.modules:
        if find_spec(module) is None:
            raise UserError(f"{name} is not installed ({module} is missing); {how_to_install('runtimes')}")
    return runtime
