"""What weights and signals lose to fp16's rounding when a power of two scales them. Below 2⁻¹⁴ fp16's spacing stays at
2⁻²⁴, and weights under 2⁻²⁵ vanish. Rounding that no exponent avoids, such as that of fp32 weights, is left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch

from ..families.signals import Spread
from ..families.spread import by_channel
from ..numerics import FP16_SIGNIFICANT_BITS, lowest_bit_exponent

GRID = 72  # exponents from −72 to 72 are tabulated: the residual's and those of two axes, 24 each
STEP_NOISE = 2.0**-48 / 12  # mean squared error of rounding to a grid of 2⁻²⁴

_UNIT = FP16_SIGNIFICANT_BITS - 1
"""Significands are counted in 2⁻¹⁰ of their binade, so that fp16's and bf16's are whole numbers below 2¹¹."""

_SQUARES, _PACKED, _PACKABLE = 34, 52, 1 << 18
"""An int64 sums the codes of fewer than 2¹⁸ bf16 numbers. Its lower 34 bits sum their squared significands of 8 bits,
the next 18 count them. The bits above hold a code's place in the histogram; their sum overflows and is not used."""

_CHANNELS, _CHUNK = 1 << 10, 1 << 18
"""Channels and elements that are counted together, so that histograms stay in the cache."""


@dataclass(frozen=True)
class LossTable:
    """What a weight loses to rounding, by channel and exponent. ``counts`` and ``errors`` are float32 [channels,
    columns], with a column for each exponent; the first and the last also stand for all exponents beyond. ``energy`` is
    the sum of squares and ``amax`` the largest |x|, both float64 [channels], at exponent 0."""

    first: int  # exponent of the first column
    counts: torch.Tensor  # of elements that scaling by 2^e makes inexact
    errors: torch.Tensor  # their squared error divided by 4^e, comparable with ``energy``
    energy: torch.Tensor
    amax: torch.Tensor
    count: int  # of all elements

    def at(self, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start, count = int(exponents[0]) - self.first, len(exponents)
        return columns(self.counts, start, count), columns(self.errors, start, count)

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.errors.nbytes

    @property
    def lossy(self) -> torch.Tensor:
        return self.at(torch.arange(-GRID, GRID + 1))[0]

    @property
    def error(self) -> torch.Tensor:
        return self.at(torch.arange(-GRID, GRID + 1))[1]

    @cached_property
    def total(self) -> LossTable:
        return LossTable(
            -GRID,
            self.lossy.sum(0, keepdim=True),
            self.error.sum(0, keepdim=True),
            self.energy.sum(0, keepdim=True),
            self.amax.amax(0, keepdim=True),
            self.count,
        )


@dataclass
class Tables:
    """A cache of loss tables, of up to ``most`` bytes, which later plans can reuse."""

    most: int = 1 << 29
    kept: dict[tuple[str, Hashable], LossTable] = field(default_factory=dict)
    nbytes: int = 0

    def of(self, name: str, given: Hashable, compute: Callable[[], LossTable]) -> LossTable:
        table = self.kept.get((name, given))
        if table is None:
            table = compute()
            if self.nbytes + table.nbytes <= self.most:
                self.kept[name, given] = table
                self.nbytes += table.nbytes
        return table

    def without(self, changed: Collection[str]) -> Tables:
        kept = {key: table for key, table in self.kept.items() if key[0] not in changed}
        return replace(self, kept=kept, nbytes=sum(table.nbytes for table in kept.values()))


def loss_table(weight: torch.Tensor, axis: int, other: torch.Tensor | None = None) -> LossTable:
    """Return how much each channel of a 1-D or 2-D ``weight`` along ``axis`` loses to rounding, at each exponent.
    other: int32 exponents of the channels along the other axis, which scale the weight first."""
    matrix = weight.detach()
    matrix = matrix.view(-1, 1) if matrix.dim() == 1 else matrix
    matrix = matrix if matrix.dtype in _BITS else matrix.float()
    channels, length = matrix.shape[axis], matrix.shape[1 - axis]
    span = _span(matrix, other)
    size = min(_CHANNELS, channels if axis == 1 else max(1, _CHUNK // max(1, length)))
    parts = [
        _losses(matrix.narrow(axis, start, min(size, channels - start)), axis, other, span)
        for start in range(0, channels, size)
    ]
    counts, errors, energy, amax = (torch.cat(column) for column in zip(*parts, strict=True))
    return LossTable(span.first, counts, errors, energy, amax, weight.numel())


def offset_loss_table(values: torch.Tensor, offset: float) -> LossTable:
    """Return what each element of a 1-D weight loses to rounding, at each exponent. Each element is a channel. values:
    the weight with ``offset`` added, as transformers uses it. What is rounded is the scaled value minus ``offset``."""
    wide = values.detach().double()
    exponents = torch.arange(-GRID, GRID + 1)
    scales = 2.0 ** exponents.double()
    wanted = wide[:, None] * scales - offset
    error = wanted.half().double() - wanted
    energy = wide.square()
    errors = torch.minimum((error / scales).square(), energy[:, None])  # inf beyond fp16
    return LossTable(-GRID, (error != 0).float(), errors.float(), energy, wide.abs(), wide.numel())


def of_channels(table: LossTable, spread: Spread) -> LossTable:
    if not spread:
        return table
    counts, errors, energy = (by_channel(x, spread).sum(1) for x in (table.counts, table.errors, table.energy))
    return replace(table, counts=counts, errors=errors, energy=energy, amax=by_channel(table.amax, spread).amax(1))


@dataclass(frozen=True)
class _Span:
    """A range of the binades ⌊log2|x|⌋ of a weight's elements x, after exponents along one axis have scaled them."""

    low: int  # no binade is lower
    high: int  # no binade is higher
    zero: int  # the least binade before scaling; elements that are not counted, such as zeros, get this index
    narrow: bool  # whether bf16 holds all elements

    @property
    def first(self) -> int:
        """The exponent of a table's first column: the largest at which all scaled elements are 0 in fp16, within
        ±``GRID``."""
        return min(max(-26 - self.high, -GRID), GRID)

    @property
    def last(self) -> int:
        """The exponent of a table's last column: the least at which no element loses a bit, clamped to ±``GRID``."""
        return min(max(-24 - self.low + _UNIT, -GRID), GRID)


_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _span(matrix: torch.Tensor, other: torch.Tensor | None) -> _Span:
    whole, integer = torch.iinfo(_BITS[matrix.dtype]).max, _BITS[matrix.dtype]
    least, largest, narrow = whole, 0, matrix.dtype != torch.float16
    for part in matrix.split(max(1, _CHUNK // max(1, matrix.shape[1]))):
        bits = part.contiguous().view(integer) & whole
        if narrow and integer is torch.int32:
            narrow = not bool((bits & 0xFFFF).any())
        largest = max(largest, int(bits.amax()))
        least = min(least, int(bits.sub_(1).bitwise_and_(whole).amin()))  # zeros become the largest number
    ends = torch.tensor([min(least + 1, largest), largest], dtype=integer).view(matrix.dtype).double()
    low, high = (torch.frexp(ends.nan_to_num()).exponent - 1).tolist() if largest else (0, 0)
    zero = low
    if other is not None:
        low, high = low + int(other.amin()), high + int(other.amax())
    return _Span(low, high, zero, narrow)


def channel_energy(weight: torch.Tensor, axis: int, other: torch.Tensor | None = None) -> torch.Tensor:
    matrix = weight.detach()
    matrix = matrix.view(-1, 1) if matrix.dim() == 1 else matrix
    energy = torch.zeros(matrix.shape[axis], dtype=torch.float64)
    factor = None if other is None else 4.0 ** other.double()
    step = max(1, _CHUNK // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], step):
        here = slice(start, start + step)
        square = matrix[here].double().square()
        if axis == 0:
            energy[here] = square.sum(1) if factor is None else square @ factor
        else:
            energy += square.sum(0) if factor is None else factor[here] @ square
    return energy


def _losses(part: torch.Tensor, axis: int, other: torch.Tensor | None, span: _Span) -> tuple[torch.Tensor, ...]:
    count, energy, amax = _histograms(part, axis, other, span)
    channels, binades, reaches = count.shape
    by_bit = torch.zeros(channels, binades + _UNIT, dtype=torch.float64)
    for reach in range(reaches):
        by_bit[:, _UNIT - reach : _UNIT - reach + binades] += count[:, :, reach]
    energy_by_binade = energy.sum(2) * 4.0 ** torch.arange(span.low - _UNIT, span.high - _UNIT + 1).double()
    exponents = torch.arange(span.first, span.last + 1)
    lossy = sums_below(by_bit, -24 - exponents - (span.low - _UNIT))
    vanishing = sums_below(count.sum(2).double(), -25 - exponents - span.low)
    vanished = sums_below(energy_by_binade, -25 - exponents - span.low)
    error = vanished + (lossy - vanishing).clamp(min=0) * STEP_NOISE * 0.25 ** exponents.double()
    # The histograms leave out inf and NaN.
    energy = torch.where(amax.isfinite(), energy_by_binade.sum(1), amax)
    return lossy.float(), error.float(), energy, amax


def _histograms(
    part: torch.Tensor, axis: int, other: torch.Tensor | None, span: _Span
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two histograms of the channels along ``axis``, [channels, binades, reaches], and each channel's largest
    |x|. The first histogram counts elements; the second sums their squared significands. A binade is ⌊log2|x|⌋; a reach
    is the number of bits from an element's leading bit down to its last set bit."""
    channels, length = part.shape[axis], part.shape[1 - axis]
    packed = span.narrow and length < _PACKABLE
    reaches = 8 if packed else FP16_SIGNIFICANT_BITS
    bins = (span.high - span.low + 1) * reaches
    count = torch.zeros(channels * bins, dtype=torch.int64)
    square = torch.zeros(0 if packed else channels * bins, dtype=torch.float64)
    amax = torch.zeros(channels, dtype=torch.float64)
    place = torch.arange(channels).mul_(bins).sub_(span.low * reaches)
    step = max(1, _CHUNK // max(1, channels))
    for start in range(0, length, step):
        here = part.narrow(1 - axis, start, min(step, length - start)).contiguous()
        shift = None if other is None else other[start : start + step]
        amax = torch.maximum(amax, _amax(here, axis, shift))
        key, number, squared = _coded(here, packed, span.zero * reaches)
        key += place.view(-1, 1) if axis == 0 else place
        if shift is not None:
            shift = shift.long() * reaches
            key += shift if axis == 0 else shift.view(-1, 1)
        count.scatter_add_(0, key.view(-1), number.view(-1))
        if squared is not None:
            square.scatter_add_(0, key.view(-1), squared.view(-1))
    if packed:
        square = count.bitwise_and((1 << _SQUARES) - 1).double().mul_(2.0**6)  # in units of 11 bits, not 8
        count = count.bitwise_and_((1 << _PACKED) - 1).bitwise_right_shift_(_SQUARES)
    shape = (channels, -1, reaches)
    return count.view(shape), square.view(shape), amax


def _amax(part: torch.Tensor, axis: int, shift: torch.Tensor | None) -> torch.Tensor:
    if shift is None:  # magnitudes are ordered as their bits
        integer = _BITS[part.dtype]
        return (part.view(integer) & torch.iinfo(integer).max).amax(1 - axis).view(part.dtype).double()
    factor = 2.0 ** shift.double()
    return part.double().abs_().mul_(factor if axis == 0 else factor.view(-1, 1)).amax(1 - axis)


def _coded(part: torch.Tensor, packed: bool, zero: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return three tensors with a number for each element: its index in a histogram, its count and its squared
    significand. Elements that are 0, inf or NaN have the count 0 and the index ``zero``. All other elements have the
    count 1. With ``packed``, count and squared significand share the second tensor's int64, and the third is None."""
    if not packed:
        binade, reach, number, squared = _parts(part)
        key = binade.mul_(FP16_SIGNIFICANT_BITS).add_(reach)
        return torch.where(number == 0, zero, key), number, squared
    # Two bytes have few values: a lookup is many times cheaper than computing the code.
    pattern = part.bfloat16().view(torch.int16).bitwise_and(0x7FFF).to(torch.int32).view(-1)
    codes = _codes()
    codes = torch.where(codes == 0, zero << _PACKED, codes)
    number = codes.index_select(0, pattern).view(part.shape)
    return number >> _PACKED, number, None


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return each element's binade ⌊log2|x|⌋, reach (bits from leading to last set bit, at most 10), count (all int64)
    and squared significand (float64). The count is 1, or 0 for 0, inf and NaN."""
    x = x.float().nan_to_num(0.0, 0.0, 0.0)
    mantissa, exponent = torch.frexp(x)
    binade = exponent.sub_(1)
    reach = (binade - lowest_bit_exponent(x)).clamp_(0, _UNIT)
    return binade.long(), reach.long(), (x != 0).long(), mantissa.double().mul_(2.0 ** (_UNIT + 1)).square_()


@cache
def _codes() -> torch.Tensor:
    binade, reach, number, squared = _parts(torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16))
    return ((binade * 8 + reach << _PACKED) + (number << _SQUARES) + (squared.long() >> 6)) * number


def sums_below(histogram: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(histogram.cumsum(1), (1, 0))
    return columns(padded, int(bins[-1]), len(bins)).flip(1)


def columns(values: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Return ``count`` columns of ``values`` from ``start``. Beyond its ends the outermost columns repeat. Slices are
    nine times as fast as an index."""
    width = values.shape[1]
    before, after = min(count, max(0, -start)), min(count, max(0, start + count - width))
    inner = values[:, max(0, start) : max(0, start + count)]
    if not before and not after:
        return inner
    return torch.cat([values[:, :1].expand(-1, before), inner, values[:, -1:].expand(-1, after)], 1)


def signal_noise(mean_square: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the relative squared error of rounding to multiples of 2⁻²⁴: 2⁻⁴⁸/12, divided by the scaled mean
    square."""
    scaled = mean_square.double()[:, None] * 4.0 ** exponents.double()
    return torch.where(scaled > 0, STEP_NOISE / scaled.clamp(min=1e-300), torch.zeros_like(scaled))
