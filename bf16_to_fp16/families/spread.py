"""Axes whose elements share the channels of a signal: values that several query heads read, channels that are turned
into one another.

A ``Spread`` lists factors of the axis, outermost first, of which every second one only repeats.
"""

from __future__ import annotations

import math

import torch

from .types import Spread


def channels_along(length: int, spread: Spread) -> int:
    """Return how many channels the elements of an axis of this length have."""
    if not spread:
        return length
    if math.prod(spread) != length:
        raise AssertionError(f"an axis of {length} elements cannot be spread as {spread}")
    return math.prod(spread[::2])


def spread_out(values: torch.Tensor, spread: Spread) -> torch.Tensor:
    """Return for each element of an axis the values of its channel: [elements, ...] from [channels, ...]."""
    if not spread:
        return values
    once = [1 if place % 2 else size for place, size in enumerate(spread)]
    return values.view(*once, *values.shape[1:]).expand(*spread, *values.shape[1:]).flatten(0, len(spread) - 1)


def shared(values: torch.Tensor, spread: Spread) -> torch.Tensor:
    """Return the values of the elements of each channel side by side: [channels, elements of each, ...] from
    [elements, ...]."""
    if not spread:
        return values.unsqueeze(1)
    places = spread_out(torch.arange(math.prod(spread[::2])), spread).argsort(stable=True)
    return values[places].unflatten(0, (math.prod(spread[::2]), -1))
