"""The runtimes that a checkpoint can be checked in: their one list, which imports neither torch nor any of them.

A new one is a module of this folder with ``run``, its entry here, and its distribution in the extra ``runtimes``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import how_to_install
from ...errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from ...families.layout import Layout
    from ..batch import Batch
    from .types import Outcome

Run = Callable[[Path, "Layout", "Batch"], "Outcome"]
"""Exports the checkpoint in a folder and runs it on a batch; raises UserError for one that it cannot take."""

Expected = Callable[["Tensor", "Batch", Any], "Tensor"]
"""Makes what a runtime gives, [rows, length], from stock logits, the batch and the config."""


@dataclass(frozen=True)
class Runtime:
    """A runtime by its name: the distribution, which is its module too, and how it is run.

    ``expected``: None where it gives what stock code does. ``note``: what ``check --help`` says of it.
    """

    name: str
    distribution: str
    run: Run
    expected: Expected | None = None
    note: str = ""

    def gives(self, *, states: bool) -> str:
        """Return what is compared, in words."""
        if self.expected is not None:
            return "log-probabilities"
        return "last hidden states" if states else "logits"


def later(module: str, function: str = "run") -> Callable[..., Any]:
    """Return a function of a module of this folder, which is imported when it is called."""
    return lambda *given: getattr(import_module(f".{module}", __package__), function)(*given)


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("openvino", "openvino", later("openvino")),
        Runtime("onnxruntime", "onnxruntime", later("onnxruntime")),
        Runtime("ctranslate2", "ctranslate2", later("ctranslate2"), later("ctranslate2", "log_probabilities")),
        Runtime(
            "onnx-reference",
            "onnx",
            later("onnx_reference"),
            note="numpy, every operation in fp16, norms included.",
        ),
    )
}


def installed(name: str) -> Runtime:
    """Return a runtime by its name; raise UserError where there is none, or it is not installed."""
    runtime = RUNTIMES.get(name)
    if runtime is None:
        raise UserError(f"no runtime {name!r}; the known ones are {', '.join(RUNTIMES)}")
    if find_spec(runtime.distribution) is None:
        raise UserError(f"{name} is not installed ({runtime.distribution} is missing); {how_to_install('runtimes')}")
    return runtime
