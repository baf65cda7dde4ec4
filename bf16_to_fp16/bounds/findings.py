"""The certificate as data, and the source's bounds before rescaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ranges import ModuleRange
from ..results import BoundEntry, CertificateEntry
from .arithmetic import Arithmetic

CARRYING = {"to", "clone", "cat", "where", "embedding", "index", "constant_pad_nd", "repeat", "stack"}
CARRYING |= {"clamp", "mul", "div", "bernoulli", "native_dropout", "add", "neg", "abs"}
"""Operations that only move, choose, limit, mask or negate values of their module, or take their magnitude."""


@dataclass(frozen=True)
class Certificate:
    """The bounds of every site of a model, with the arithmetic that they assume. ``ranges``: bounds of each module's
    channels, and their expected mean squares for inputs of random direction."""

    sites: tuple[BoundEntry, ...]
    arithmetic: Arithmetic
    ranges: Mapping[str, ModuleRange]
    inner: Mapping[str, float] = field(default_factory=dict)
    """Bounds of module inputs and weights, which also hold for copies and casts inside the module."""
    unlimited: Mapping[str, float] = field(default_factory=dict)
    """Bounds of operations that may give inf without harm."""

    @property
    def holds(self) -> bool:
        """Whether every bound is within its limit."""
        return all(site.holds for site in self.sites)

    @property
    def headroom_bits(self) -> float:
        """log2(limit / bound) at the tightest site."""
        return min((site.headroom_bits for site in self.sites), default=math.inf)

    def at(self, name: str) -> float | None:
        """Return the bound of a site by the audit's name; None if unknown. Copies, casts, masks, clamps and dropout's
        steps have the bound of their module's values. Of repeated operations the largest bound counts."""
        if name in self.unlimited:
            return self.unlimited[name]
        by_name = {site.name: site.largest for site in self.sites}
        if name in by_name or name in self.inner:
            return max(by_name.get(name, 0.0), self.inner.get(name, 0.0))
        plain = name.split("#")[0]
        same = [v for values in (by_name, self.inner) for n, v in values.items() if n.split("#")[0] == plain]
        if same:
            return max(same)
        path, _, operation = plain.partition(":")
        if operation and operation not in CARRYING:
            return None
        inside = [v for n, v in by_name.items() if is_inside(n, path)]
        inside += [v for n, v in self.inner.items() if is_inside(n, path)]
        return max(inside, default=None)

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


def is_inside(name: str, path: str) -> bool:
    return name == path or name.startswith((f"{path}:", f"{path}."))


@dataclass(frozen=True)
class SourceBounds:
    """Bounds of the source with its streams rescaled and nothing else. exponents: of the streams; LayerNorms' bounds
    depend on these through eps. unmoved: sites over their limit whose values no exact exponent scales."""

    ranges: Mapping[str, ModuleRange]
    exponents: Mapping[str, int]
    unmoved: frozenset[str]
