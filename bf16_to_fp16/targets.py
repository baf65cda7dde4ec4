"""What a checkpoint can be made and bounded for: targets, and the tiers of arithmetic that they stand for.

Nothing here imports torch, so that the command line lists them before anything heavy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AskedTarget = Literal["auto", "half", "norm-safe", "fp16-accumulate", "train"]  # what can be asked for by name
AUTO = "auto"  # asks for the strictest tier's target that costs next to nothing
MARGIN_BITS = 1.25  # how many bits an observed signal keeps to its limit: data not seen may go 2.4 times higher


@dataclass(frozen=True)
class Tier:
    """An arithmetic: its name, the target that asks for it, what it says, and the runtimes that it stands for."""

    name: str
    target: str
    words: str
    runtimes: tuple[str, ...]


TIERS = (
    Tier(
        "torch",
        "half",
        "norms and softmax in fp32, sums in fp32 or in up to 8 parts",
        ("PyTorch (transformers, diffusers)", "vLLM", "Text Embeddings Inference"),
    ),
    Tier(
        "norm-fp16",
        "norm-safe",
        "norms square, sum and divide in fp16, mean squares over 2⁻¹⁷",
        ("ONNX exports in fp16 (ONNX Runtime, TensorRT)", "OpenVINO in fp16", "some NPUs"),
    ),
    Tier(
        "fp16-accumulate",
        "fp16-accumulate",
        "every sum in fp16, in any order, mean squares over 2⁻¹⁷",
        ("ggml on a V100", "torch.backends.cuda.matmul.allow_fp16_accumulation", "mobile delegates"),
    ),
)
"""From the weakest to the strictest."""


@dataclass(frozen=True)
class Target:
    """What weights can be planned and bounded for: its name, and what ``convert`` and ``certify`` say of it."""

    name: str
    made: str
    bounded: str
    squares: bool = False  # whether norms square the residual stream in fp16


RECORDS = (
    Target("half", "every value under 65504.", "every value."),
    Target("norm-safe", "also norms that square the residual in fp16.", "with norms in fp16.", squares=True),
    Target("fp16-accumulate", "also sums made in fp16.", "with every sum in fp16.", squares=True),
    Target("train", "with dropout, and room for weights that move and gradients.", "with dropout."),
)
"""Every target; of those with a tier, from the weakest to the strictest."""

TARGETS = tuple(target.name for target in RECORDS)

SQUARING = tuple(target.name for target in RECORDS if target.squares)
"""Targets for which norms square the residual stream in fp16."""
