"""The targets of a conversion, and tiers: groups of runtimes by arithmetic. It imports no torch, so it loads fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AskedTarget = Literal["auto", "half", "norm-safe", "fp16-accumulate", "train"]  # by name
AUTO = "auto"  # half, but a plan that is replayed keeps its own target
MARGIN_BITS = 1.25  # headroom that an observed value keeps: unseen data may go 2.4 times higher


@dataclass(frozen=True)
class Tier:
    """A group of runtimes with the same arithmetic. ``name``: its key in reports. ``target``: the target that makes a
    checkpoint fit it. ``words``: the arithmetic in words."""

    name: str
    target: str
    title: str
    words: str
    runtimes: tuple[str, ...]


TIERS = (  # from the weakest to the strictest
    Tier(
        "torch",
        "half",
        "PyTorch",
        "norms and softmax in fp32, sums in fp32 or in up to 8 parts rounded to fp16",
        ("PyTorch (transformers, diffusers)", "vLLM"),
    ),
    Tier(
        "norm-fp16",
        "norm-safe",
        "ONNX and TensorRT",
        "norms square, sum and divide in fp16; mean squares must exceed 2⁻¹⁷",
        ("ONNX exports in fp16 (ONNX Runtime, TensorRT)", "OpenVINO in fp16", "some NPUs"),
    ),
    Tier(
        "fp16-accumulate",
        "fp16-accumulate",
        "sums in fp16",
        "every sum in fp16, in any order; mean squares must exceed 2⁻¹⁷",
        ("ggml on a V100", "torch.backends.cuda.matmul.allow_fp16_accumulation", "mobile delegates"),
    ),
)


WHERE = {  # for each target, words for the arithmetic of its bounds
    "half": "in PyTorch",
    "norm-safe": "with norms in fp16",
    "fp16-accumulate": "with every sum in fp16",
    "train": "in training",
}
TARGETS = tuple(WHERE)
SQUARING = ("norm-safe", "fp16-accumulate")  # their norms square the residual stream in fp16
