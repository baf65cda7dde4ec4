"""The certificate as data, and the source's bounds before rescaling."""

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
    """The bounds of every site of a model, with the arithmetic that they assume."""

    sites: tuple[BoundEntry, ...]
    arithmetic: Arithmetic
    ranges: Mapping[str, ModuleRange]  # channels' bounds, and mean squares expected for inputs of random direction

    @property
    def holds(self) -> bool:
        """Whether every bound is within its limit."""
        return all(site.holds for site in self.sites)

    @property
    def headroom_bits(self) -> float:
        """log2(limit / bound) at the tightest site."""
        return min((site.headroom_bits for site in self.sites), default=math.inf)

    def entry(self, observed: Mapping[str, float] | None = None, *, sites: bool = True) -> CertificateEntry:
        """Return the report's ``certificate``. observed: each site's largest observed value. sites: list the sites."""
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
    """Bounds of the source when only its streams are rescaled, by ``exponents``; LayerNorms' bounds depend on these
    through eps. immovable: sites over their limit whose values no rescaling lowers."""

    ranges: Mapping[str, ModuleRange]
    exponents: Mapping[str, int]
    immovable: frozenset[str]
