"""How Adam's two moments are kept: in fp32, in bf16, or in 8 or 4 bits in torchao's blocks, each with a scale.

A moment in blocks is read into fp32 for a step and written back: 8 bits on the dynamic map of Dettmers et al.
(arXiv:2110.02861), fp8 as e4m3, 4 bits as Li et al. (arXiv:2309.01507). torchao rounds to the nearest code, with which
a second moment, that moves by a 1,000th a step, stays where it is; here it is stochastic, as for weights.
"""

from __future__ import annotations

import functools
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


@functools.cache
def _fp8_values(device: torch.device) -> Tensor:
    """Return the finite values of e4m3 in order, in fp32."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    return every[every.isfinite()].unique().to(device)


def store(moment: Any, value: Tensor, bits: Tensor) -> None:
    """Write fp32 values into a moment in blocks, each rounded up or down to a code beside it, up with the probability
    of its place between the two.

    value, bits: flat; bits are int32 with 16 random bits in their low halves. A block's scale is as torchao has it.
    """
    fp8 = moment.codes.dtype == torch.float8_e4m3fn
    values = _fp8_values(value.device) if fp8 else moment.qmap
    blocks = value.view(-1, moment.block_size)
    scale = blocks.abs().amax(-1).clip(1e-12)
    if fp8:
        scale = scale / values[-1]
    scaled = (blocks / scale.view(-1, 1)).view(-1)
    up = torch.bucketize(scaled, values, out_int32=True).clamp_(1, len(values) - 1)
    low, high = values[up - 1], values[up]
    chance = (bits & 0xFFFF).to(torch.float32).mul_(2.0**-16)
    code = up - (chance >= (scaled - low) / (high - low)).to(torch.int32)
    if fp8:
        moment.codes.copy_(values[code].to(torch.float8_e4m3fn).view(moment.codes.shape))
    else:
        packed = code.to(torch.uint8)
        packed = packed if moment.codes.numel() == len(packed) else (packed[::2] << 4) | packed[1::2]
        moment.codes.copy_(packed.view(moment.codes.shape))
    moment.scale.copy_(scale)


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
        there = hasattr(import_module(module), name)
    except ImportError:
        there = False
    if not there:
        raise UserError(f"AdamW: the installed torchao has no {module}.{name}; pip install --upgrade torchao")
    if kind == "fp8" and "mps" in devices:
        raise UserError("AdamW: moments='fp8' is for CPUs and CUDA, as mps has no float8; choose '8bit'")
