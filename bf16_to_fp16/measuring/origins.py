"""Track which tensors are computed only from constants, as masks are. This tells intended infinities from overflows,
for ``SiteObserver`` and ``Tap``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, constant_pad_nd

from ..numerics import FP16_MAX, FP16_STEP

MASK_FROM = -FP16_MAX / 2  # a constant at or below this is a mask, not a number: half of fp16's lowest value (-32752)

MASKED_REACH = -math.log(FP16_STEP)
"""How far a masked score must lie below its row's largest score (16.6) for an attention weight of at most 2⁻²⁴."""

FACTORIES = {
    "full_like",
    "zeros_like",
    "ones_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "zero_",
    "fill_",
    "lift_fresh",
}
"""Operations that make a constant."""

UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"}
"""Operations whose output has no values yet."""

MASKING = dict.fromkeys(("add", "sub", "mul", "minimum"), "pointwise")
MASKING |= {"clone": "copy", "_to_copy": "copy", "constant_pad_nd": "pad", "pad": "pad"}
MASKING |= {kind: kind for kind in ("where", "masked_fill", "cat")}
"""Operations whose output keeps the masks of their inputs, and the way in which each combines them."""

_ORIGIN = "_bf16_to_fp16_origin"


@dataclass(slots=True)
class Origin:
    """What a tensor was computed from, stored as an attribute of the tensor."""

    constant: bool = False  # no activation or parameter went into it
    masked: Tensor | None = None  # positions that a mask hides
    least: float = 0.0  # the lowest Python number that a constant was computed from; 0 if none is negative


def origin_of(tensor: Any) -> Origin | None:
    return getattr(tensor, _ORIGIN, None)


def set_origin(tensor: Tensor, origin: Origin | None) -> None:
    setattr(tensor, _ORIGIN, origin)


def only_constants(args: Iterable[Any]) -> bool:
    for operand in args:
        if isinstance(operand, Tensor):
            if operand.is_floating_point():
                origin = origin_of(operand)
                if origin is None or not origin.constant:
                    return False
        elif isinstance(operand, (list, tuple)) and not only_constants(operand):
            return False
    return True


def of_constants(operands: Iterable[Any]) -> Origin:
    return Origin(constant=True, least=_least(operands))


def _least(operands: Iterable[Any]) -> float:
    least = 0.0
    for operand in operands:
        if isinstance(operand, (int, float)):
            least = min(least, operand)
        elif isinstance(operand, Tensor):
            origin = origin_of(operand)
            least = least if origin is None else min(least, origin.least)
        elif isinstance(operand, (list, tuple)):
            least = min(least, _least(operand))
    return least


def forget_origin(out: Tensor) -> None:
    for tensor in (out, out._base):
        if tensor is not None and origin_of(tensor) is not None:
            set_origin(tensor, None)


def _positions(operand: Any) -> Tensor | bool:
    """Return where an operand of a ``MASKING`` operation is masked: bools of its shape, or one for all positions."""
    if isinstance(operand, (int, float)):
        return operand <= MASK_FROM
    origin = origin_of(operand)
    if origin is None:
        return False
    if origin.masked is None and origin.constant:
        origin.masked = operand <= MASK_FROM
    return False if origin.masked is None else origin.masked


def masked_positions(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor | None:
    """Return the masked positions of an operation's output as a bool tensor that broadcasts to it, or None without a
    mask. kind: the operation's value in ``MASKING``. args, kwargs: the operation's arguments."""
    masked: Tensor | bool
    if kind == "cat":
        parts = [_positions(part) for part in args[0]]
        if not any(isinstance(part, Tensor) for part in parts):
            return None
        pairs = zip(parts, args[0], strict=True)
        whole = [torch.as_tensor(part, device=x.device).expand(x.shape) for part, x in pairs]
        masked = torch.cat(whole, *args[1:], **(kwargs or {}))
    elif kind in ("copy", "pad"):
        masked = _positions(args[0])
        if kind == "pad" and isinstance(masked, Tensor):
            # CUDA's fused attention pads a mask's rows to 16 bytes, and ignores the padding.
            masked = constant_pad_nd(masked.expand(args[0].shape), args[1], False)
    elif kind == "pointwise":
        masked = _either(_positions(args[0]), _positions(args[1]) if len(args) > 1 else False)
    elif kind == "where":
        chosen, yes, no = args[0], _positions(args[1]), _positions(args[2])
        masked = _either(_both(chosen, yes), _both(~chosen, no))
    else:
        masked = _either(_both(args[1], _positions(args[2])), _positions(args[0]))
    return masked if isinstance(masked, Tensor) else None


def scores_of_mask(args: tuple[Any, ...]) -> Tensor | None:
    """Return the attention scores if ``args`` are scores and a constant mask that are to be added, else None. For a
    mask of −inf in fp16, which hides scores of any size, also return None."""
    mask, other = (args[0], args[1]) if origin_of(args[1]) is None else (args[1], args[0])
    origin = origin_of(mask)
    if origin is None or not origin.constant or not isinstance(other, Tensor):
        return None
    # The masks of transformers hold their dtype's least finite number; others are −inf in fp16.
    held = origin.least > MASK_FROM or origin.least == torch.finfo(mask.dtype).min
    return other if held else None


def has_constant_tensor(args: Iterable[Any]) -> bool:
    """Return whether one of the arguments is a tensor made without activations or weights, as masks are."""
    # A product with such a tensor sums values of several positions. Attention scores are products of two activations.
    return any(isinstance(x, Tensor) and (origin := origin_of(x)) is not None and origin.constant for x in args)


def sees_nothing(scores: Tensor) -> bool:
    origin = origin_of(scores)
    return origin is not None and origin.masked is not None and bool(origin.masked.all(-1).any())


def masked_span(scores: Tensor, masked: Tensor) -> Tensor:
    """Return fp32 [..., queries]: by how much a mask must lower each query's masked scores to hide them. It is 0 if no
    or all keys are masked, or for NaN. scores: [..., queries, keys], before the mask. masked: hidden keys, bool."""
    cap = ceiling(masked, -math.inf, scores.dtype)
    hidden, seen = (torch.minimum(scores, most).amax(-1).float() for most in (-cap, cap))
    return (hidden - seen + MASKED_REACH).where(seen > -math.inf, 0.0).clamp(min=0)


def ceiling(masked: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    """Return a tensor that is ``most`` at masked positions and inf elsewhere. On a CPU, ``torch.minimum`` with it is 15
    times as fast as ``masked_fill``."""
    for axis, (size, stride) in enumerate(zip(masked.shape, masked.stride(), strict=True)):
        if stride == 0 and size > 1:  # expanded
            masked = masked.narrow(axis, 0, 1)
    return torch.full(masked.shape, math.inf, dtype=dtype, device=masked.device).masked_fill_(masked, most)


def _either(a: Tensor | bool, b: Tensor | bool) -> Tensor | bool:
    if a is False:
        return b
    if b is False:
        return a
    return a | b


def _both(a: Tensor, b: Tensor | bool) -> Tensor | bool:
    if b is False:
        return False
    return a if b is True else a & b
