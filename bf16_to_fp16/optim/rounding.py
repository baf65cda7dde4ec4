"""Exact rounding of fp32 to bf16 and fp16: stochastic and to nearest.

Rounded to nearest, a weight in 16 bits loses every update below half its gap to the next value. Rounded up with
probability (x − down)/(up − down), it is right on average (Gupta et al., arXiv:1502.02551; Zamirai et al.,
arXiv:2010.06192).

Every 2¹⁶-th bit pattern of fp32 is a bf16 value, and every 2¹³-th a normal fp16 value. So adding as many random bits as
will be cut off, and cutting, gives exactly this probability. fp16's subnormals all have the gap 2⁻²⁴: x·2²⁴ is split
into floor and fraction, both exact, and the fraction is compared with 31 random bits.

A finite value beyond the format's last finite value becomes that value; inf, NaN and the sign of zero stay.

Random bits are a keyed hash of the element's index (counter-based, as in Salmon et al., SC 2011). The key depends on
(seed, step, parameter), so chunks, ranks and interruptions do not change the result. Only int32 and fp32 operations are
used, so compiled code gives the same bits on a CPU."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from ..numerics import FP16_STEP

Key = tuple[int, int, int] | Tensor  # three int32 words: Python integers, or an int32 tensor whose first dimension is 3
BLOCK_BITS = 31  # elements with indices in the same block of 2³¹ share a key; the index within the block is hashed

_SIGN = -(1 << 31)
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_LARGEST = {torch.bfloat16: 0x7F7F0000, torch.float16: 0x477FE000}  # fp32 patterns of the last finite values
_CUT = {torch.bfloat16: 16, torch.float16: 13}  # bits of fp32's significand that the format lacks
_FP16_NORMAL = 0x38800000  # fp32 pattern of fp16's smallest normal value
_STRIDE = 0x9E3779B1 - (1 << 32)  # 2³² over the golden ratio, odd
_MULTIPLIERS = (0x21F0AAAD, 0xD35A2D97 - (1 << 32), 0x85EBCA6B - (1 << 32))
NARROW_DTYPES = (torch.bfloat16, torch.float16)


# ---- random bits ---------------------------------------------------------------------------------------------------


def make_key(seed: int, step: int, parameter: int, block: int = 0, first: int = 0) -> tuple[int, int, int]:
    """Return a key: three int32 words that determine the random bits of one parameter in one step. Other seeds, steps,
    parameters or blocks give unrelated words. block: the number of a block of 2³¹ elements. first: the index, within
    this block, of the first element that gets random bits from the key."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, parameter, block), digest_size=12).digest()
    start, second, third = struct.unpack("<3i", digest)
    start = (start + first * _STRIDE) & 0xFFFFFFFF
    return start - ((start >> 31) << 32), second, third


def counters(length: int, device: torch.device | None = None) -> Tensor:
    """Return the counters of ``length`` elements for ``random_bits``, int32: index · ``_STRIDE``, modulo 2³²."""
    return torch.arange(length, dtype=torch.int32, device=device) * _STRIDE


def random_bits(counter: Tensor, key: Key) -> Tensor:
    """Return 31 random bits for each counter in an int32 tensor; the top bit is 0. They come from two rounds of
    xor-shift and multiplication (shifts and multipliers from Wellons' hash prospector). key: from ``make_key``."""
    x = counter + key[0]
    # The masks make shifts logical: after arithmetic ones, complementary states would share all later bits.
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MULTIPLIERS[0]).add_(key[1])
    x = x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_MULTIPLIERS[1])
    return x.bitwise_xor_(x >> 16)


def more_bits(bits: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """Return two more sets of 16 random bits, in the low halves of two int32 tensors."""
    # bits: a result of ``random_bits``. The high halves of both results are not random.
    x = (bits + key[2]).mul_(_MULTIPLIERS[2])
    high = x >> 16
    return high, x.bitwise_xor_(high)


# ---- rounding, as expressions that can be fused --------------------------------------------------------------------


def stochastic(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round x up with probability (x − down)/(up − down), else down; the result is fp32 with values of ``dtype``.

    x: fp32 with quiet NaNs only. dtype: bf16, fp16, or fp32 (x is returned). bits: int32 of x's shape, whose low 16
    bits (bf16) or low 31 bits (fp16) are random. The probability is exact, except for |x| < 2⁻³¹ in fp16: there it is
    cut to a multiple of 2⁻³¹."""
    return x if dtype == torch.float32 else _round(x, dtype, bits)


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to the nearest value of ``dtype``, ties to even, finite values never to inf; the result is fp32. x: fp32
    with quiet NaNs only."""
    # Not by a cast to 16 bits and back, which a compiler may drop.
    return x if dtype == torch.float32 else _round(x, dtype, None)


def _round(x: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    """Round x by adding ``bits`` to its fp32 bit pattern and cutting the sum to a value of ``dtype``. If ``bits`` is
    None, half a gap is added, so that x is rounded to nearest."""
    pattern = x.view(torch.int32)
    magnitude = pattern & _MAGNITUDE
    cut = _CUT[dtype]
    below = (1 << cut) - 1
    noise = bits & below if bits is not None else (magnitude >> cut).bitwise_and_(1).add_(below >> 1)
    # Sign bits of differences serve as comparisons: on a CPU they are five times as fast as boolean masks.
    # Nothing is added from the largest finite value on, so that it cannot become inf, nor a NaN carry into the sign.
    noise.bitwise_and_((magnitude - _LARGEST[dtype]).bitwise_right_shift_(31))
    if dtype == torch.bfloat16:
        return noise.add_(pattern).bitwise_and_(~below).view(torch.float32)

    finite = (magnitude - _INFINITY).bitwise_right_shift_(31)
    rounded = noise.add_(magnitude).bitwise_and_(~below)
    rounded = torch.minimum(rounded, finite.bitwise_and_(_LARGEST[dtype] ^ _MAGNITUDE).bitwise_xor_(_MAGNITUDE))
    small = _subnormal(x, bits).view(torch.int32)
    subnormal = (magnitude - _FP16_NORMAL).bitwise_right_shift_(31)
    rounded = small.bitwise_xor_(rounded).bitwise_and_(subnormal).bitwise_xor_(rounded)
    return rounded.bitwise_or_(pattern & _SIGN).view(torch.float32)


def _subnormal(x: Tensor, bits: Tensor | None) -> Tensor:
    """Return |x| rounded to fp16's smallest step: to the nearest multiple if ``bits`` is None, else stochastically."""
    steps = x.abs().mul_(1 / FP16_STEP)
    if bits is None:
        return steps.round_().mul_(FP16_STEP)
    whole = steps.floor()
    up = (bits - steps.sub_(whole).mul_(2.0**31).to(torch.int32)).bitwise_right_shift_(31)  # −1 where up, else 0
    return whole.sub_(up).mul_(FP16_STEP)


# ---- whole tensors -------------------------------------------------------------------------------------------------


def index_blocks(start: int, stop: int, chunk: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut the range from ``start`` to ``stop`` at multiples of 2³¹, into pieces of at most ``chunk``. Yield start and
    stop of each piece, the number of its block of 2³¹ indices, and its start in the block."""
    while start < stop:
        block = start >> BLOCK_BITS
        end = min(stop, start + chunk, (block + 1) << BLOCK_BITS)
        yield start, end, block, start - (block << BLOCK_BITS)
        start = end
