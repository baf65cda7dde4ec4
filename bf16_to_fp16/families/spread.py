"""Map values between the channels of a signal and the elements of a tensor's axis. One channel can have several
elements, and some elements have no channel: see ``Spread``."""

from __future__ import annotations

import math

import torch

from .signals import Spread


def split_ends(spread: Spread) -> tuple[int, Spread, int]:
    """Split a ``Spread`` into (elements before, inner factors, elements after): (-3, 8, 2) becomes (3, (8, 2), 0). The
    elements before and after are not rescaled."""
    before = -spread[0] if spread and spread[0] < 0 else 0
    after = -spread[-1] if spread and spread[-1] < 0 else 0
    return before, tuple(factor for factor in spread if factor > 0), after


def channels_along(length: int, spread: Spread) -> int:
    if not spread:
        return length
    before, factors, after = split_ends(spread)
    if before + math.prod(factors) + after != length:
        raise AssertionError(f"the spread {spread} does not make up an axis of {length} elements")
    return math.prod(factors[::2])


def carrying(values: torch.Tensor, spread: Spread) -> torch.Tensor:
    before, _, after = split_ends(spread)
    return values[before : len(values) - after]


def spread_out(values: torch.Tensor, spread: Spread) -> torch.Tensor:
    """Repeat values [channels, ...] as [elements, ...]: each element gets its channel's value, or 0 if it has none."""
    if not spread:
        return values
    before, factors, after = split_ends(spread)
    once = [1 if place % 2 else size for place, size in enumerate(factors)]
    rows = values.view(*once, *values.shape[1:]).expand(*factors, *values.shape[1:]).flatten(0, len(factors) - 1)
    if not before and not after:
        return rows
    return torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows, rows.new_zeros(after, *rows.shape[1:])])


def by_channel(values: torch.Tensor, spread: Spread) -> torch.Tensor:
    """Group values [elements, ...] as [channels, elements per channel, ...]; omit elements that have no channel."""
    if not spread:
        return values.unsqueeze(1)
    _, factors, _ = split_ends(spread)
    places = spread_out(torch.arange(math.prod(factors[::2])), factors).argsort(stable=True)
    return carrying(values, spread)[places].unflatten(0, (math.prod(factors[::2]), -1))
