"""How Adam's two moments are kept: in fp32, in bf16, or in 8 or 4 bits in torchao's blocks, each with a scale.

A moment in blocks is read into fp32 for a step and written back, rounded to torchao's nearest code: 8 bits on the
dynamic map of Dettmers et al. (arXiv:2110.02861), fp8 as e4m3, 4 bits as Li et al. (arXiv:2309.01507).
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

BLOCKED: dict[str, tuple[str, str, int]] = {
    "8bit": ("torchao.optim.subclass_8bit", "OptimState8bit", 256),
    "fp8": ("torchao.optim.subclass_fp8", "OptimStateFp8", 256),
    "4bit": ("torchao.optim.subclass_4bit", "OptimState4bit", 128),
}
"""Kinds that torchao keeps: the module and the class of the tensor, and the elements of a block."""


MOMENTS = ("float32", "bfloat16", *BLOCKED)


LEAST_BLOCKED = 4096
"""Elements of the smallest tensor that torchao keeps in blocks; the others stay in fp32, as those whose elements are no
whole number of blocks."""


def new_moment(local: Tensor, kind: str, signed: bool, device: torch.device) -> Tensor:
    """Return a moment, zero, in the shape of ``local``, on ``device``; kind: one of ``MOMENTS``."""
    if kind in BLOCKED:
        module, name, block = BLOCKED[kind]
        if local.numel() >= LEAST_BLOCKED and local.numel() % block == 0:
            # e4m3 has a sign, needed or not.
            sign = () if kind == "fp8" else (signed,)
            zeros: Tensor = getattr(import_module(module), name).zeros(local.shape, *sign, block, device)
            return zeros
    return torch.zeros(local.shape, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32, device=device)


def is_blocked(moment: Any) -> bool:
    """Return whether a tensor is one of torchao's."""
    return hasattr(moment, "codes")


def check_moments(kind: str, devices: set[str]) -> None:
    """Raise UserError where moments of a kind cannot be kept on devices of these types."""
    if kind not in BLOCKED:
        return
    if find_spec("torchao") is None:
        raise UserError(f"AdamW: moments={kind!r} needs torchao: pip install torchao, or choose 'bfloat16' (4 bytes)")
    module, name, _ = BLOCKED[kind]
    try:
        found = hasattr(import_module(module), name)
    except ImportError:
        found = False
    if not found:
        raise UserError(f"AdamW: the installed torchao has no {module}.{name}; pip install --upgrade torchao")
    if kind == "fp8" and "mps" in devices:
        raise UserError("AdamW: moments='fp8' is for CPUs and CUDA, as mps has no float8; choose '8bit'")
