"""The certificate as data, and the bounds of a source checkpoint before its plan is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ranges import ModuleRange
from ..results import BoundEntry, CertificateEntry
from .arithmetic import Arithmetic


@dataclass(frozen=True)
class Certificate:
    """The bounds of every site of a model for any input, with the assumptions about arithmetic that they need."""

    sites: tuple[BoundEntry, ...]
    arithmetic: Arithmetic
    ranges: Mapping[str, ModuleRange]  # channels' bounds, and mean squares expected for inputs of random direction

    @property
    def holds(self) -> bool:
        """Whether every bound is within its limit."""
        return all(site.holds for site in self.sites)

    @property
    def headroom_bits(self) -> float:
        """The smallest log2(limit / bound) of all sites."""
        return min((site.headroom_bits for site in self.sites), default=math.inf)

    def entry(self, observed: Mapping[str, float] | None = None, *, sites: bool = True) -> CertificateEntry:
        """Return a report's ``certificate`` entry. observed: each site's largest observed value. sites: whether to list
        them."""
        largest = observed or {}
        listed = [site.model_copy(update={"observed": largest.get(site.name)}) for site in self.sites]
        more: dict[str, Any] = {"sites": listed} if sites else {}
        return CertificateEntry(
            holds=self.holds,
            headroom_bits=self.headroom_bits,
            max_length=self.arithmetic.max_length,
            splits=self.arithmetic.splits,
            train_mode=self.arithmetic.train,
            **more,
        )


@dataclass(frozen=True)
class SourceBounds:
    """Bounds of a source checkpoint whose streams alone are rescaled. ``ranges`` has the bounds of each module.
    ``exponents`` has the exponent of each stream, on which LayerNorms' bounds depend through eps. ``immovable`` names
    the sites over their limit whose values no rescaling lowers."""

    ranges: Mapping[str, ModuleRange]
    exponents: Mapping[str, int]
    immovable: frozenset[str]
