"""The ranges of a signal's channels, and arithmetic on exponents. A signal is an activation that a plan scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from ..families.layout import ResolvedSignal
from ..families.signals import ObservationPoint
from ..families.spread import by_channel
from ..ranges import ChannelRange, ModuleRange
from .plan import OfChannels

RESIDUAL_RANGE = 24  # residual exponents are searched from −24 to 24

ROUNDING = 2.0**-24
"""Scale of one unavoidable fp16 rounding, (2⁻¹¹)²/4, in relative squared error; costs well under it do not matter."""


def known_points(
    ranges: Mapping[str, ModuleRange], signal: ResolvedSignal
) -> Iterator[tuple[ObservationPoint, ChannelRange]]:
    for point in signal.seen:
        if (module := ranges.get(point.module)) is None:
            continue
        reached = module.input if point.side == "input" else module.output
        if point.spread:
            amax, square = (by_channel(x, point.spread) for x in (reached.amax, reached.mean_square))
            reached = ChannelRange(amax.amax(1), square.mean(1), reached.rows)
        yield point, reached


def excess_bits(amax: torch.Tensor, limit: torch.Tensor | float) -> torch.Tensor:
    return torch.log2((amax / limit).clamp(min=1.0))


def as_shares(values: torch.Tensor) -> torch.Tensor:
    total = values.sum()
    return values / total if float(total) > 0 else torch.full_like(values, 1 / values.numel())


def whole_log2(x: float) -> int:
    """Return ⌊log2 x⌋; ``RESIDUAL_RANGE`` for inf, and ``-RESIDUAL_RANGE`` for 0 and NaN."""
    if x == math.inf:
        return RESIDUAL_RANGE
    return math.floor(math.log2(x)) if x > 0 else -RESIDUAL_RANGE


def largest_sums(signal: ResolvedSignal, limits: Iterable[tuple[Mapping[str, ModuleRange], float]]) -> Iterator[int]:
    """Yield, for each activation that two exponents rescale, the largest sum of both that keeps it within a limit. One
    exponent is of ``signal``, the other of a second signal. limits: pairs (ranges by module, limit of |x| in them)."""
    for ranges, limit in limits:
        for _, reached in known_points(ranges, replace(signal, seen=signal.added_at)):
            if (largest := float(reached.amax.amax())) > 0:
                yield whole_log2(limit / largest)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        given = one if one is not None else other
        return given is None or not bool((given != 0).any())
    return bool((one == other).all())


def folded(values: torch.Tensor) -> OfChannels:
    items = [int(v) if v == int(v) else v for v in values.flatten().tolist()]
    return items[0] if len(set(items)) == 1 else items
