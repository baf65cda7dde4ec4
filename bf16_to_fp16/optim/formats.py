"""bf16 and fp16 as data: the gap between neighbouring values, what a number becomes, and the update that is too small.

A format with p significant bits has 2ᵖ⁻¹ values in every binade, so the gap between neighbours is 2⁻ᵖ⁺¹ of the power of
two below, and what is added to a value vanishes where it does not pass the middle between it and its neighbour: half a
gap. bf16 (p = 8) and fp16 (p = 11) differ in that, and in where they end.

Numbers are rounded here in exact arithmetic, not by torch, whose conversion from double rounds twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from ..numerics import BF16_SIGNIFICANT_BITS, FP16_MAX, FP16_SIGNIFICANT_BITS

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A 16-bit format: significant bits, exponent of the smallest normal number, largest finite value."""

    name: str
    bits: int
    least: int
    largest: float

    @property
    def dtype(self) -> torch.dtype:
        """The format as torch has it."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16}[self.name]

    def gap(self, value: float) -> float:
        """Return the distance from the binade of ``value``'s magnitude to the next larger value, as a power of two."""
        binade = math.frexp(value)[1] - 1 if value else self.least
        return math.ldexp(1.0, max(binade, self.least) - self.bits + 1)

    def nearest(self, value: float | Fraction) -> float:
        """Return the value of the format that is nearest, ties to even, ±inf past the middle beyond the largest."""
        if isinstance(value, float) and (not math.isfinite(value) or value == 0):
            return value
        exact = Fraction(value)
        size = abs(exact)
        binade = size.numerator.bit_length() - size.denominator.bit_length()
        binade -= Fraction(2) ** binade > size
        gap = Fraction(2) ** (max(binade, self.least) - self.bits + 1)
        rounded = round(size / gap) * gap
        return math.copysign(math.inf if rounded > self.largest else float(rounded), exact)


BF16 = Format("bf16", BF16_SIGNIFICANT_BITS, -126, (2 - 2.0**-7) * 2.0**127)
FP16 = Format("fp16", FP16_SIGNIFICANT_BITS, -14, FP16_MAX)

FORMATS: dict[str, Format] = {f.name: f for f in (BF16, FP16)}  # the formats by name


def half_gaps(x: Tensor, target: Format, towards_zero: Tensor | None = None) -> Tensor:
    """Return half the distance from each value to its neighbour in ``target``: an update below it vanishes.

    x: fp32 with finite values of the format. towards_zero: bool, where the neighbour below is meant instead of the one
    above; they differ at powers of two, where the lower gap is half as large. Returns fp32 powers of two.
    """
    import torch

    binade = torch.frexp(x).exponent - 1
    binade = torch.where(x == 0, torch.full_like(binade, target.least), binade)
    if towards_zero is not None:
        power = (torch.frexp(x).mantissa.abs() == 0.5) & towards_zero
        binade = binade - power.to(binade.dtype)
    exponent = binade.clamp(min=target.least) - target.bits
    # 2⁻¹³⁴, half of bf16's last step, is subnormal in fp32 and still exact.
    return torch.ldexp(torch.ones_like(x), exponent)
