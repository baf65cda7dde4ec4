"""What a power of two costs: weights pushed below fp16's normal range, signals drowned in its last step.

Scaling up risks overflow, scaling down loses low bits: below 2⁻¹⁴ fp16's spacing stays at 2⁻²⁴, so a weight with
bits under that is rounded, and under 2⁻²⁵ it vanishes. These tables say for every channel of a weight and every
exponent how many elements would be rounded and how much energy the rounding errors carry, from one histogram pass
over the weight. Rounding that no exponent can avoid (an fp32 weight has more bits than fp16 at any scale) is left
out, since it cannot inform a choice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..numerics import FP16_SIGNIFICANT_BITS, lowest_bit_exponent

GRID = 72
"""Exponents from −72 to 72 are tabulated: the residual's and those of two axes, 24 each."""


STEP_NOISE = 2.0**-48 / 12
"""Mean squared error of rounding to a grid of 2⁻²⁴."""


_LOWEST, _HIGHEST = -120, 60


_BINS = _HIGHEST - _LOWEST + 1


_REACH = FP16_SIGNIFICANT_BITS


_CHUNK = 1 << 18


@dataclass(frozen=True)
class LossTable:
    """Losses of a weight by channel and exponent.

    ``lossy``, ``error``: float32 [channels, 2·GRID + 1]; elements that scaling by 2^e makes inexact, and the
    squared error divided by 4^e, so that it compares with ``energy``. ``energy``, ``amax``: float64 [channels], of
    the unscaled weight. ``count``: elements in all.
    """

    lossy: torch.Tensor
    error: torch.Tensor
    energy: torch.Tensor
    amax: torch.Tensor
    count: int

    def total(self) -> LossTable:
        """Return the table of the whole weight as one channel."""
        return LossTable(
            self.lossy.sum(0, keepdim=True),
            self.error.sum(0, keepdim=True),
            self.energy.sum(0, keepdim=True),
            self.amax.amax(0, keepdim=True),
            self.count,
        )


def loss_table(weight: torch.Tensor, axis: int, other: torch.Tensor | None = None) -> LossTable:
    """Return what each exponent costs each channel of ``weight`` along ``axis``.

    weight: floating, 1-D or 2-D. other: int32 exponents already decided for the other axis, applied first
    (``energy`` and ``amax`` then are of the weight so scaled).
    """
    matrix = weight.detach()
    matrix = matrix.view(-1, 1) if matrix.dim() == 1 else (matrix.t() if axis == 1 else matrix)
    channels, width = matrix.shape
    by_bit = torch.empty(channels, _BINS, dtype=torch.float64)
    by_binade = torch.empty(channels, _BINS, dtype=torch.float64)
    energy_by_binade = torch.empty(channels, _BINS, dtype=torch.float64)
    amax = torch.empty(channels, dtype=torch.float64)
    rows = max(1, _CHUNK // max(1, width))
    for start in range(0, channels, rows):
        here = slice(start, start + rows)
        part = matrix[here].contiguous()
        square = part.double().square_()
        if other is not None:
            square.mul_(torch.ldexp(torch.ones(width, dtype=torch.float64), 2 * other))
        amax[here] = square.amax(1).sqrt_()  # exact: the square of 24 bits fits fp64
        key = _histogram_keys(part, other)
        key += torch.arange(part.shape[0], dtype=torch.int32).view(-1, 1) * (_BINS * _REACH)
        size = part.shape[0] * _BINS * _REACH
        key = key.view(-1)
        count = torch.bincount(key, minlength=size).view(-1, _BINS, _REACH)
        energy = torch.bincount(key, weights=square.view(-1), minlength=size).view(-1, _BINS, _REACH)
        by_binade[here] = count.sum(2).double()
        energy_by_binade[here] = energy.sum(2)
        by_bit[here] = 0
        for reach in range(_REACH):  # what falls off the lower end is below every threshold already
            by_bit[here, : _BINS - reach] += count[:, reach:, reach]
            by_bit[here, 0] += count[:, :reach, reach].sum(1)

    exponents = torch.arange(-GRID, GRID + 1)
    lossy = sum_below(by_bit, -24 - exponents)
    vanishing = sum_below(by_binade, -25 - exponents)
    vanished = sum_below(energy_by_binade, -25 - exponents)
    error = vanished + (lossy - vanishing).clamp(min=0) * STEP_NOISE * 0.25 ** exponents.double()
    energy = energy_by_binade.sum(1)
    return LossTable(lossy.float(), error.float(), energy, amax, weight.numel())


def _histogram_keys(part: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """Return each element's place in a histogram of [_BINS, _REACH]: its binade, shifted, and how many bits below it
    its last bit is, as far as fp16 has bits."""
    if part.dtype not in (torch.bfloat16, torch.float16):
        narrow = part.to(torch.bfloat16)
        if not torch.equal(narrow.to(part.dtype), part):
            return _joined(*_binade_and_reach(part), shift)
        part = narrow
    # Two bytes have few values: looking one up is many times cheaper than working it out.
    pattern = part.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF).view(-1)
    binade, reach, key = _patterns(part.dtype)
    if shift is None:
        return key.index_select(0, pattern).view(part.shape)
    # index_select takes two thirds of the time of indexing.
    binade, reach = (table.index_select(0, pattern).view(part.shape) for table in (binade, reach))
    return _joined(binade, reach, shift)


def _joined(binade: torch.Tensor, reach: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """Return the key of ``_histogram_keys`` from its two parts."""
    if shift is not None:
        binade = binade + shift
    return binade.clamp(_LOWEST, _HIGHEST).sub_(_LOWEST).mul_(_REACH).add_(reach)


def _binade_and_reach(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an element's exponent, 1000 for 0, and how many bits below it the last bit is, at most 10; int32."""
    x = x.to(torch.float32)
    binade = torch.frexp(x).exponent - 1
    reach = (binade - lowest_bit_exponent(x)).clamp_(0, _REACH - 1)
    return torch.where(x == 0, 1000, binade), torch.where(x == 0, 0, reach)


@functools.cache
def _patterns(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the binade, reach and key of every value of a 2-byte dtype, by its bits."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    binade, reach = _binade_and_reach(every)
    return binade, reach, _joined(binade, reach, None)


def sum_below(histogram: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Return for each channel and threshold t the sum of the bins whose exponent is less than t: [channels,
    thresholds]."""
    padded = torch.nn.functional.pad(histogram.cumsum(1), (1, 0))
    return padded[:, (threshold - _LOWEST).clamp(0, _BINS)]


def signal_noise(mean_square: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the relative squared error that fp16's last step adds to a signal: [channels, exponents].

    2⁻⁴⁸/12 over the signal's mean square after scaling by 2^e; 0 for a channel that is always 0.
    """
    scaled = mean_square.double()[:, None] * 4.0 ** exponents.double()
    return torch.where(scaled > 0, STEP_NOISE / scaled.clamp(min=1e-300), torch.zeros_like(scaled))
