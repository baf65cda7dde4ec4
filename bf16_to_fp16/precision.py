"""What a power of two costs: weights pushed below fp16's normal range, signals drowned in its last step.

Scaling up risks overflow, scaling down loses low bits: below 2⁻¹⁴ fp16's spacing stays at 2⁻²⁴, so a weight with
bits under that is rounded, and under 2⁻²⁵ it vanishes. These tables say for every channel of a weight and every
exponent how many elements would be rounded and how much energy the rounding errors carry, from one histogram pass
over the weight. Rounding that no exponent can avoid (an fp32 weight has more bits than fp16 at any scale) is left
out, since it cannot inform a choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .numerics import FP16_SIGNIFICANT_BITS, lowest_bit_exponent

GRID = 72
"""Exponents from −72 to 72 are tabulated: the residual's and those of two axes, 24 each."""

STEP_NOISE = 2.0**-48 / 12
"""Mean squared error of rounding to a grid of 2⁻²⁴."""

_LOWEST, _HIGHEST = -120, 60
_BINS = _HIGHEST - _LOWEST + 1
_CHUNK = 1 << 22


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
    by_bit = torch.zeros(channels * _BINS, dtype=torch.float64)
    by_binade = torch.zeros(channels * _BINS, dtype=torch.float64)
    energy_by_binade = torch.zeros(channels * _BINS, dtype=torch.float64)
    amax = torch.zeros(channels, dtype=torch.float64)
    rows = max(1, _CHUNK // max(1, width))
    shift = other.to(torch.int64) if other is not None else None
    for start in range(0, channels, rows):
        part = matrix[start : start + rows].to(torch.float32).contiguous()
        binade = torch.frexp(part).exponent.to(torch.int64) - 1
        bit = torch.maximum(lowest_bit_exponent(part).to(torch.int64), binade - (FP16_SIGNIFICANT_BITS - 1))
        square = part.double().square_()
        magnitude = part.abs().double()
        if shift is not None:
            binade, bit = binade + shift, bit + shift
            factor = torch.ldexp(torch.ones(width, dtype=torch.float64), shift)
            square, magnitude = square * factor * factor, magnitude * factor
        amax[start : start + rows] = magnitude.amax(1)
        channel = (torch.arange(part.shape[0]) + start).view(-1, 1) * _BINS
        used = part != 0
        at_bit = (bit.clamp(_LOWEST, _HIGHEST) - _LOWEST + channel)[used]
        at_binade = (binade.clamp(_LOWEST, _HIGHEST) - _LOWEST + channel)[used]
        size = channels * _BINS
        by_bit += torch.bincount(at_bit, minlength=size)
        by_binade += torch.bincount(at_binade, minlength=size)
        energy_by_binade += torch.bincount(at_binade, weights=square[used], minlength=size)

    exponents = torch.arange(-GRID, GRID + 1)
    lossy = below(by_bit.view(channels, _BINS), -24 - exponents)
    vanishing = below(by_binade.view(channels, _BINS), -25 - exponents)
    vanished = below(energy_by_binade.view(channels, _BINS), -25 - exponents)
    error = vanished + (lossy - vanishing).clamp(min=0) * STEP_NOISE * 0.25 ** exponents.double()
    energy = energy_by_binade.view(channels, _BINS).sum(1)
    return LossTable(lossy.float(), error.float(), energy, amax, weight.numel())


def below(histogram: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
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
