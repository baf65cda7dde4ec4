"""How many weights of 16 bits an update moves, at every learning rate at once.

A weight that is rounded to nearest moves where its update reaches half its gap. Gaps are powers of two, so that a
histogram of the learning rates from which weights move has few bins and says which share moves at any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DEFAULT_SHARE = 0.5  # of the weights, that should move
_BINS_PER_DOUBLING = 16  # bins of a histogram in a doubling
_LOWEST_RATE, _HIGHEST_RATE = -200, 140  # binary exponents that are told apart
_RATE_BINS = (_HIGHEST_RATE - _LOWEST_RATE) * _BINS_PER_DOUBLING + 1


@dataclass
class Layer:
    """Elements of a tensor by the learning rate from which they move.

    ``moves``: float64 histogram over log₂ of that rate, 16 bins to a doubling. ``still``: elements without any update,
    which no rate moves. ``lost``: elements that do not move at the rate that was asked for. ``overflow``: elements that
    are not finite, or not finite in the format.
    """

    name: str
    elements: int = 0
    still: int = 0
    lost: int = 0
    overflow: int = 0
    moves: Tensor = field(default_factory=lambda: torch.zeros(_RATE_BINS, dtype=torch.float64))

    def add(self, rates: Tensor, rate: float) -> None:
        """Take in elements by the rate from which each moves, inf where there is none."""
        finite = rates[rates.isfinite()]
        self.elements += rates.numel()
        self.still += rates.numel() - finite.numel()
        self.lost += int((finite > rate).sum())
        place = (
            ((finite.double().log2() - _LOWEST_RATE) * _BINS_PER_DOUBLING)
            .ceil()
            .clamp(0, _RATE_BINS - 1)
            .to(torch.int64)
        )
        self.moves += torch.bincount(place, minlength=_RATE_BINS)

    def join(self, other: Layer) -> None:
        """Add the elements of another one."""
        for name in ("elements", "still", "lost", "overflow"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.moves += other.moves

    def rate_for(self, share: float) -> float | None:
        """Return the least learning rate (to 1/16 of a doubling, from above) at which ``share`` of the elements that
        have updates move; None where none has."""
        if not float(self.moves.sum()):
            return None
        reached = (self.moves.cumsum(0) >= share * self.moves.sum() * (1 - 1e-12)).nonzero()[0]
        return 2.0 ** (int(reached) / _BINS_PER_DOUBLING + _LOWEST_RATE)

    def to_json(self, share: float) -> dict[str, Any]:
        """Return the counts and what follows from them."""
        live = self.elements - self.still
        return {
            "name": self.name,
            "elements": self.elements,
            "no_update": self.still,
            "stalled": self.lost,
            "stalled_fraction": self.lost / live if live else 0.0,
            "overflow": self.overflow,
            "rate_for_share": self.rate_for(share),
        }
