"""What fp16 arithmetic adds to a bound: the rounding of one number, of one sum, of one row of attention weights.

Floats x·(1 + u) + v with u the unit roundoff and v half the smallest subnormal (Higham, Accuracy and Stability of
Numerical Algorithms, 2.1); everything else follows from how many roundings an operation makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..numerics import FP16_MAX, headroom_bits

UNIT = 2.0**-11
"""Largest relative error of rounding to a normal fp16 number."""


TINY = 2.0**-25
"""Largest absolute error of rounding to a subnormal fp16 number."""


UNIT32 = 2.0**-24
"""The same as ``UNIT`` for fp32, in which kernels accumulate."""


MAX_LENGTH = 32768
"""Positions for which a certificate holds unless it is asked for another number."""


SPLITS = 8
"""Partial sums of one reduction that a kernel may round to fp16 and add in fp16."""


COMPUTED = 1 + 2.0**-18
"""What the bounds are multiplied with for the rounding of their own computation in fp32 and fp64."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute in the dtypes that are written down, whatever the caller has allowed, and restore that afterwards.

    ``set_float32_matmul_precision`` and autocast make matrix products round their factors to bf16 or TF32, of which no
    bound knows. Bounds are computed on the CPU.
    """
    # torch before 2.9 has only the one setting.
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    before = torch.get_float32_matmul_precision() if matmul is None else matmul.fp32_precision
    with torch.autocast("cpu", enabled=False):
        if matmul is None:
            torch.set_float32_matmul_precision("highest")
        else:
            matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            if matmul is None:
                torch.set_float32_matmul_precision(before)
            else:
                matmul.fp32_precision = before


@dataclass(frozen=True)
class Arithmetic:
    """What a certificate holds for.

    Every operation's output is rounded to fp16 at most once; matrix products accumulate in fp32 in any order, or in up
    to ``splits`` partial sums that are rounded to fp16 and added in fp16; norms and softmax compute in fp32,
    LayerNorm from deviations (not E[x²] − E[x]²);
    sequences have at most ``max_length`` positions, of which each row of attention sees at least one. ``train``:
    dropout at the config's rates multiplies by 1/(1−p); neither the loss nor the backward pass is covered.
    ``planned``: leaves subnormals out and takes the residual stream as multiplied by 2 to this power, for weights that
    are still to be scaled by it. ``exact``: real arithmetic without any rounding.
    """

    max_length: int = MAX_LENGTH
    splits: int = SPLITS
    train: bool = False
    planned: int | None = None
    exact: bool = False

    @property
    def unit(self) -> float:
        """Relative error of one rounding to fp16."""
        return 0.0 if self.exact else UNIT

    @property
    def tiny(self) -> float:
        """Absolute error of one rounding to fp16 among the subnormals."""
        return 0.0 if self.exact or self.planned is not None else TINY

    @property
    def floor(self) -> float:
        """Absolute error of a matrix product: each partial sum and the result may be subnormal."""
        return (self.splits + 2) * self.tiny

    def gamma(self, terms: int) -> float:
        """Return the error of a sum of ``terms`` products relative to the sum of their absolute values."""
        return 0.0 if self.exact else (terms + 2) * UNIT32 + self.splits * UNIT

    @property
    def attention_sum(self) -> float:
        """Largest sum of one row of attention weights after rounding them."""
        if self.exact:
            return 1.0
        return (1 + UNIT) * (1 + (self.max_length + 8) * UNIT32) + self.max_length * TINY

    def rounded(self, values: Tensor) -> Tensor:
        """Return a bound after one more rounding."""
        return values * (1 + self.unit) + self.tiny

    def rounded_length(self, length: float, width: int) -> float:
        """Return a bound of ‖x‖₂ after one more rounding of each of its ``width`` components."""
        return (length * (1 + self.unit) + self.tiny * math.sqrt(width)) * COMPUTED

    def summed(self, values: Tensor) -> Tensor:
        """Return a bound of a matrix product's result from that of the sum: at most two roundings, and the floor."""
        return values * (1 + self.unit) ** 2 + self.floor


@dataclass(frozen=True)
class Bound:
    """One site's bound: no input makes the value larger than ``bound``, nor a partial sum of it than ``partial``.

    ``name`` as the audit names the site; ``limit``: what both must stay under; ``kind``: which signal it is.
    """

    name: str
    kind: str
    bound: float
    partial: float
    limit: float = FP16_MAX

    @property
    def largest(self) -> float:
        """The larger of bound and partial sum."""
        return max(self.bound, self.partial)

    @property
    def holds(self) -> bool:
        """Whether the site cannot pass its limit."""
        return self.largest <= self.limit

    @property
    def headroom_bits(self) -> float:
        """log2(limit / largest)."""
        return headroom_bits(self.largest, self.limit)


def largest(values: Tensor | float) -> float:
    """Return the largest element; inf for NaN, which only weights beyond fp16 can give."""
    if isinstance(values, float):
        return values
    top = float(values.max()) if values.numel() else 0.0
    return math.inf if math.isnan(top) else top
