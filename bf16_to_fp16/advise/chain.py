"""How a number past fp16's range becomes NaN: each operation of a layer that meets it, really computed.

Overflow alone gives inf, which is wrong but ordered. NaN comes from the operations whose result no ordering decides:
inf − inf (a softmax takes the largest score from all, a LayerNorm the mean), 0 · inf (a norm multiplies by one over
the root of what overflowed, attention by a weight of 0) and inf / inf. From there it reaches every token that attends
to it, the loss, and by one step of the optimizer every weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "x": lambda v: v[0],
    "softmax: x - the largest of (x, 1)": lambda v: v[0] - v.max(),
    "softmax of (x, 1), at x": lambda v: v.softmax(0)[0],
    "RMSNorm: x squared": lambda v: v[0] * v[0],
    "RMSNorm: 1 / root of the mean square": lambda v: (v * v).mean().rsqrt(),
    "RMSNorm: x times that": lambda v: v[0] * (v * v).mean().rsqrt(),
    "LayerNorm: x - the mean of (x, 1)": lambda v: v[0] - v.mean(),
    "x / the sum of (x, 1)": lambda v: v[0] / v.sum(),
    "attention: a weight of 0 times x": lambda v: v[0] * 0,
    "a residual of -x added to x": lambda v: v[0] + -v[0],
}
"""What a layer does with a vector (x, 1), on its way from inf to NaN."""

LARGEST = 1e150
"""Numbers of which doubles hold the squares."""


def to_nan(value: float) -> list[dict[str, Any]]:
    """Return each operation with its result in fp16 and bf16, each step stored in the format, and in doubles.

    value: finite, up to ``LARGEST``; its magnitude is taken. ``operation``, ``fp16``, ``bf16``, ``true`` of each, and
    what it ``becomes`` in fp16: "inf", "NaN" or "finite".
    """
    import torch

    rows = []
    for name, operation in OPERATIONS.items():
        row: dict[str, Any] = {"operation": name}
        for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("true", torch.float64)):
            vector = torch.tensor([abs(value), 1.0], dtype=torch.float64).to(dtype)
            row[kind] = float(operation(vector))
        result = row["fp16"]
        row["becomes"] = "NaN" if math.isnan(result) else "finite" if math.isfinite(result) else "inf"
        rows.append(row)
    return rows


def becomes_nan(value: float, overflow: bool) -> bool:
    """Return whether there is something to tell of a number that overflows fp16 or does not."""
    return overflow and math.isfinite(value) and abs(value) <= LARGEST
