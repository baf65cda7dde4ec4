"""The limits of the 16-bit formats. A product with a power of two is exact unless it overflows or loses bits below the
smallest subnormal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FP16_MAX = 65504.0  # largest finite fp16 value, (2 − 2⁻¹⁰)·2¹⁵
OVERFLOWED = 2.0**16  # reported for a value that overflowed fp16: the least power of two past its range
FP16_STEP = 2.0**-24  # smallest positive fp16 value, and the spacing of all subnormal ones

FP16_SIGNIFICANT_BITS = 11

BF16_SIGNIFICANT_BITS = 8

SATURATED_FROM = 64504.0  # values from here on are saturated: stock T5 and Pegasus code clamps to it (65504 − 1000)

PROOF_MARGIN_BITS = 1 / 32  # headroom that a bound of unscaled weights keeps, for their rounding to fp16

PROOF_LIMIT = FP16_MAX * 2.0**-PROOF_MARGIN_BITS  # the limit of a bound after scaling

GELU_CUBE_BACKWARD_LIMIT = math.sqrt(FP16_MAX / 3)
"""|x| beyond which the derivative of x³ is inf in fp16 and 0·inf gives NaN gradients (147.8)."""

NORM_FLOOR = 2.0**-17
"""Least mean square of a stream that a norm may square in fp16. Each square then loses at most 2⁻²⁵, and the norm's
output at most 2⁻⁹ of itself, as in one rounding to bf16."""

NOISE = 1e-9  # a smaller KL divergence is noise of fp32 logits
MAX_LENGTH = 32768  # positions for which a certificate holds unless it is asked for another number
MOST_POSITIONS = 2**31 - 1  # the longest sequence that a certificate may be asked for, in positions


def headroom_bits(amax: float, limit: float = FP16_MAX) -> float:
    """Return log2(limit / amax); ``inf`` for amax = 0, ``-inf`` for an infinite or NaN amax."""
    if amax == 0:
        return math.inf
    if not math.isfinite(amax):
        return -math.inf
    return math.log2(limit / amax)


def lowest_bit_exponent(x: torch.Tensor) -> torch.Tensor:
    """Return the exponent e of each element's lowest set bit, int32, so that x = odd·2ᵉ. x: fp32, bf16 or fp16. Zeros
    give 127, non-finite elements −1000. x·2ˢ is an fp16 number iff e + s ≥ −24, its significand has at most 11 bits and
    |x|·2ˢ ≤ 65504."""
    import torch  # most importers need only the limits, without torch

    bits = x.detach().to(torch.float32).contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    significand = torch.where(exponent > 0, mantissa | 0x800000, mantissa)
    lowest = (significand & -significand).to(torch.float32)  # a power of two: exact in fp32
    trailing = (lowest.view(torch.int32) >> 23) - 127
    result = torch.clamp(exponent, min=1) - 127 - 23 + trailing
    result = torch.where(significand == 0, torch.full_like(result, 127), result)
    return torch.where(exponent == 255, torch.full_like(result, -1000), result)


LARGEST_EXPONENT = 500  # exponents beyond it are refused; fp64 has room for twice as much
