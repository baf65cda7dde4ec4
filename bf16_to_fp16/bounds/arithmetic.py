"""Bounds of the errors that rounding to fp16 adds.

Rounding x gives x·(1 + δ) + η with |δ| ≤ ``UNIT`` and |η| ≤ ``TINY`` (Higham, Accuracy and Stability of Numerical
Algorithms, 2.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError, shortened
from ..numerics import MAX_LENGTH, MOST_POSITIONS, NORM_FLOOR

if TYPE_CHECKING:
    from torch import Tensor

UNIT = 2.0**-11  # largest relative error of rounding to a normal fp16 number
TINY = 2.0**-25  # largest absolute error of rounding to a subnormal fp16 number
UNIT32 = 2.0**-24  # the same as ``UNIT`` for fp32, in which kernels accumulate
SPLITS = 8  # partial sums of one reduction that a kernel may round to fp16 and add in fp16
LONGEST_SUM = 2**17  # terms of one sum where sums are made in fp16

COMPUTED = 1 + 2.0**-18
"""Factor on the bounds for the rounding of their own computation in fp32 and fp64."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch off TF32, bf16 matrix products and autocast within a ``with`` block or a decorated function. Otherwise
    matrix products may round their factors to TF32, bf16 or fp16, an error that no bound covers."""
    import torch  # slow to load, and options are checked without it

    # torch before 2.9 has only the one setting, for every device.
    mkldnn = getattr(torch.backends.mkldnn, "matmul", None)
    backends: list[Any] = [] if mkldnn is None else [mkldnn, torch.backends.cuda.matmul]
    single = None if backends else torch.get_float32_matmul_precision()
    before = [backend.fp32_precision for backend in backends]
    plain = all(precision == "ieee" for precision in before) if backends else single == "highest"
    if plain and not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        yield
        return
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        if single is not None:
            torch.set_float32_matmul_precision("highest")
        for backend in backends:
            backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            if single is not None:
                torch.set_float32_matmul_precision(single)
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


def growth(terms: int) -> float:
    """Return an upper bound on the ratio of a sum computed in fp16 to the sum of its terms' magnitudes.

    It also holds for partial sums. The additions may be in any order and grouping, a bias may be a further term, and
    the terms may be rounded products."""
    # Let G(n) be the largest ratio for n terms, and u = 2⁻¹¹. For parts a, b ≥ 0 a computed sum is at most
    # (1 + u)·(a + b). It is also at most a + 2b and 2a + b, since a + b is rounded by no more than its distance from a
    # or b. Subnormals add exactly. No term passes more than n − 1 additions, so G(n) ≤ (1 + u)ⁿ⁻¹.
    # G(n) ≤ F(n) = 2·(1 + u)^(n/1024) by induction; F(1) ≥ 1. Let two parts have n₁ and n₂ terms and the ratios g₁ and
    # g₂. The whole's ratio is at most g₁, g₂ or its value where two of these limits meet: g₁·(1 + 2w)/(1 + w·g₁/g₂)
    # with w = u/(1 − u), or the same with 1 and 2 exchanged. It grows with g₁ and g₂, so put g₁ = F(n₁) ≥ 2 and
    # g₂ = (1 + u)^(n₂ − 1). With q = 1/g₂ it is at most F(n₁)·(1 + 2w)/(1 + 2wq). The logarithm of F(n₁)'s factor is at
    # most 2w·(1 − q), where 1 − q ≤ 1 and 1 − q ≤ (n₂ − 1)·ln(1 + u). With 2w = 2/2047 that is at most
    # (n₂/1024)·ln(1 + u): up to n₂ = 2048 by the second, from 2051 on by the first, between by q > 0.36.
    return min(rounded(terms + 1), 2 * rounded(2 + terms / 1024))


def rounded(roundings: float) -> float:
    """Return the largest factor that so many roundings to normal fp16 numbers can have; inf past fp64's range."""
    try:
        return (1 + UNIT) ** roundings
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Arithmetic:
    """The assumptions of a certificate about arithmetic and inputs.

    Every operation's output is rounded to fp16 at most once. Matrix products accumulate in fp32 in any order, except
    that ``splits`` partial sums may be rounded to fp16 and added there. Norms and softmax compute in fp32, where a
    LayerNorm's mean and standard deviation are off by at most ``norm_units`` times 2⁻²⁴·mean|x|. Each query of an
    attention sees at least one position. ``norms16`` and ``sums16`` replace fp32 by fp16."""

    max_length: int = MAX_LENGTH  # most positions of a sequence
    splits: int = SPLITS  # most partial sums of a matrix product that are rounded to fp16 and added in fp16
    train: bool = False  # dropout multiplies by 1/(1−p); neither the loss nor the backward pass is covered
    planned: Mapping[str, int] | None = None
    """By stream, the exponent that a later rescaling is assumed to give the stream; streams without an entry have 0. If
    this mapping is given, even as {}, ``tiny`` is 0, so bounds leave out most errors of subnormal numbers."""
    exact: bool = False  # real arithmetic without any rounding
    norms16: bool = False  # norms square, sum and divide in fp16; streams' mean squares are over ``NORM_FLOOR``
    sums16: bool = False  # every sum is made in fp16, term by term in any order, or in blocks

    def __post_init__(self) -> None:
        if not 1 <= self.max_length <= MOST_POSITIONS:
            length = shortened(self.max_length)
            raise UserError(f"the maximum length is {length}; give a number of positions from 1 to {MOST_POSITIONS}")

    @property
    def unit(self) -> float:
        """The largest relative error of one rounding to a normal fp16 number; 0 in exact arithmetic."""
        return 0.0 if self.exact else UNIT

    @property
    def tiny(self) -> float:
        """The largest absolute error of one rounding to a subnormal fp16 number; 0 if not counted."""
        return 0.0 if self.exact or self.planned is not None else TINY

    @property
    def floor(self) -> float:
        """The largest absolute error that subnormal numbers cause in one element of a matrix product. With ``sums16``
        every product of two numbers may be subnormal; otherwise only partial sums and the result may be."""
        if not self.sums16 or not self.tiny:
            return (self.splits + 2) * self.tiny
        longest = max(LONGEST_SUM, self.max_length)
        return longest * growth(longest) * self.tiny

    def gamma(self, terms: int) -> float:
        """Return a bound of the error of a sum of ``terms`` products, relative to the sum of their absolute values."""
        if self.sums16:
            return growth(terms) - 1
        # Tensor cores add k ≥ 4 products and the sum so far at once. They cut off each addend, and the result, at 2⁻²³
        # of the largest addend (Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, 2021).
        # So k products cost (k + 2)·2⁻²³, at most 3·2⁻²⁴ for each. Kernels that round every addition need 2⁻²⁴.
        return 0.0 if self.exact else (3 * terms + 12) * UNIT32 + self.splits * UNIT

    @property
    def attention_sum(self) -> float:
        """The largest sum of one query's attention weights after softmax has rounded them."""
        if self.exact:
            return 1.0
        # Partial sums of what is positive only grow, so each addition loses at most a unit of the whole. In fp16 no sum
        # of weights up to 1 passes 4096, where one more is rounded away.
        unit = UNIT if self.sums16 else UNIT32
        return (1 + UNIT) * (1 + (self.max_length + 8) * unit) + self.max_length * TINY

    def norm_factor(self, width: int) -> float:
        """Return an upper bound on ‖n‖₂/√width for the normalised vector n of an RMS norm. It is 1 for norms in fp32.
        For norms in fp16 the bound holds only if the mean square of the norm's input is over ``NORM_FLOOR``. The bound
        is inf if ``width`` is so large that rounding could make the computed mean square 0."""
        if not self.norms16:
            return 1.0
        # Squares, sum, mean and root are in fp16. Each addition loses up to ``UNIT`` times the final sum, each
        # subnormal square or mean up to ``TINY``.
        underflow = TINY / NORM_FLOOR
        left = (1 - underflow) / ((1 + width * UNIT) * (1 + UNIT) ** 6) - underflow
        return (1 + UNIT) ** 2 / math.sqrt(left) if left > 0 else math.inf

    def rounded(self, values: Tensor) -> Tensor:
        """Return a bound of |x| after one rounding to fp16, for |x| up to ``values``."""
        return values * (1 + self.unit) + self.tiny

    def rounded_length(self, length: float, width: int) -> float:
        """Return a bound of ‖x‖₂ after each of ``width`` components is rounded, for ‖x‖₂ up to ``length``."""
        return (length * (1 + self.unit) + self.tiny * math.sqrt(width)) * COMPUTED

    def summed(self, values: Tensor) -> Tensor:
        """Return bounds of a matrix product that include two roundings to fp16: of the finished product, and of the sum
        with a bias. Errors of subnormals (``floor``) are included too. values: bounds before these roundings."""
        return values * (1 + self.unit) ** 2 + self.floor


def norm_units(width: int) -> float:
    """Return the largest error of a LayerNorm's mean and standard deviation in fp32, in units of 2⁻²⁴·mean|x|.

    The bound holds for torch's kernels. It also holds for kernels that compute x − mean once, and use this result for
    the standard deviation and for the division. Errors relative to x − mean are counted in ``NORM_ERROR`` instead."""
    # A kernel that squares the same deviations that it later divides needs no allowance: both contain the mean's error.
    # Torch's kernels merge the means and the sums of squares of groups, by Welford's and Chan's updates
    # (``moments_utils.h``, ``layer_norm_kernel.cu``). Each update rounds a mean once, by at most a unit.
    # In a run of n values, or of n groups of one size, the k-th rounding has weight k/n: (n + 1)/2 units in all.
    # A merge in a tree adds at most one unit, or four where counts are no powers of two and both means are weighted.
    # On CUDA each of 128 threads runs over its vectors of 4, and 7 merges follow. On the CPU a run has 16 vectors of 4,
    # 8 or 16 lanes. Runs are merged in a tree, then the lanes one by one. The tree costs twice its depth, one more for
    # fp16's two halves and one more for lanes that fill no vector.
    cuda = 7 * (1 if width & (width - 1) == 0 else 4)
    kernels = [(4 * math.ceil(width / 512), cuda, 1)]
    for lanes in (4, 8, 16):
        vectors = math.ceil(width / lanes)
        depth = math.ceil(math.log2(math.ceil(vectors / 16)))
        kernels.append((min(vectors, 16), 2 * depth + 1 + bool(width % lanes), lanes))

    def spread(n: int) -> float:  # the largest rms of the errors of a run's means
        return math.sqrt((n * n - 1) / 12)

    def off(run: int, merges: int, lanes: int) -> float:
        groups = (run + 1) / 2 + merges
        # In exact arithmetic the root of the sum of squares is the length of a vector: the sum of one for the true
        # means and one for their errors. In the second, errors within runs are orthogonal to those between runs. The
        # k-th term of a run is D²·(k − 1)/k − D·r for a deviation D and a rounding r, which takes off at most √2 units
        # more. An error of a group's mean counts once, since merges compare that mean with others.
        mean = groups + (lanes + 1) / 2 if lanes > 1 else groups
        return max(mean, math.hypot(spread(run) + math.sqrt(2), groups + spread(lanes)))

    return max(off(*kernel) for kernel in kernels)


def largest(values: Tensor | float) -> float:
    """Return the largest element, or inf if an element is NaN. Only weights beyond fp16's range can cause NaN."""
    if isinstance(values, float):
        return values
    top = float(values.max()) if values.numel() else 0.0
    return math.inf if math.isnan(top) else top
