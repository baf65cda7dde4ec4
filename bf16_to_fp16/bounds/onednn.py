"""oneDNN's fp32 product on the CPU, which is faster than the BLAS of torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def onednn_linear() -> Any:
    """Return oneDNN's linear in fp32; None where torch has none, or is set to round factors."""
    with torch._C._DisableTorchDispatch():  # observers of a model's operations need not see these
        x = torch.full((2, 64), 1 + 2.0**-12)
        try:
            linear = torch.ops.mkldnn._linear_pointwise.default
            exact = bool((linear(x, torch.ones_like(x), None, "none", [], "") == 64 + 2.0**-6).all())
        except (AttributeError, RuntimeError):
            return None
    return linear if exact else None


def times_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return left·rightᵀ, by oneDNN on the CPU in fp32. left [m, k], right [n, k], contiguous as oneDNN needs."""
    linear = onednn_linear() if left.dtype == torch.float32 and left.device.type == "cpu" else None
    if linear is None:
        return left @ right.t()
    made: Tensor = linear(left, right, None, "none", [], "")
    return made
