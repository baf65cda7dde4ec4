"""Torch in the place of another runtime, for tests of what is around it."""

from pathlib import Path

import torch

from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.run.batch import Batch
from bf16_to_fp16.run.runtime import Arithmetic, Outcome, Runtime, in_torch


def torch_in(dtype: torch.dtype) -> Runtime:
    """Stock code with every parameter in one format, as a runtime."""

    def run(folder: Path, layout: Layout, batch: Batch) -> Outcome:
        kind = str(dtype).removeprefix("torch.")
        return Outcome(in_torch(folder, dtype, batch), "CPU", Arithmetic({kind: 2}, {kind: 3}, "told so"))

    return Runtime("onnxruntime", "torch", run)
