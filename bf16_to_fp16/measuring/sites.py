"""A site: the outputs of one operation of one module over all calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..numerics import headroom_bits

MASK_REASON = "attention mask: these positions are excluded"
CONSTANT_REASON = "constant: no activation enters it"
CUBE_REASON = "cube inside gelu_new: tanh takes its infinity to 1"


@dataclass(slots=True)
class Site:
    """The measurements of a site, an operation's outputs in one dtype."""

    name: str
    dtype: torch.dtype
    limit: float | None  # None where fp16's range does not bind: other dtypes, constants, ``gelu_new``'s cube
    amax: float = 0.0  # largest |x| without masked positions; inf for an overflow or NaN
    calls: int = 0
    nonfinite: int = 0  # number of elements
    saturated: int = 0  # number of finite fp16 elements from 64504
    benign: int = 0  # number of intended elements, as in a mask
    reason: str | None = None
    order: int = 0  # running number of the site's first non-finite output; if all are finite, of its first output
    elements: int = 0  # counted for gradients only
    zeros: int = 0  # counted for gradients only

    def take(self, later: Site, offset: int) -> None:
        """Add the measurements of a later run. offset: a number to add to that run's ``order``, which begins anew."""
        if later.nonfinite and not self.nonfinite:
            self.order = later.order + offset
        self.amax = max(self.amax, later.amax)
        self.calls += later.calls
        self.nonfinite += later.nonfinite
        self.saturated += later.saturated
        self.benign += later.benign
        self.reason = self.reason or later.reason
        if later.limit is None:
            self.limit = None

    @property
    def headroom_bits(self) -> float | None:
        return None if self.limit is None else headroom_bits(self.amax, self.limit)


def sites_of_all(runs: Iterable[Iterable[Site]]) -> list[Site]:
    """Return the sites of several runs of one model, as if one observer had measured the runs in order."""
    sites: dict[tuple[str, torch.dtype], Site] = {}
    for number, run in enumerate(runs):
        offset = number << 40  # no run has more outputs
        for site in run:
            key = site.name, site.dtype
            if key in sites:
                sites[key].take(site, offset)
            else:
                sites[key] = replace(site, order=site.order + offset)
    return list(sites.values())


@dataclass(slots=True)
class Call:
    path: str
    linear: bool
    counts: dict[str, int] = field(default_factory=dict)
    after_softmax: bool = False

    def count(self, name: str) -> int:
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts[name]

    @property
    def before_softmax(self) -> bool:
        return "scores" in self.counts and not self.after_softmax

    def product(self, *, sums: bool) -> str:
        if self.linear:
            return ""
        return "sum" if sums else "context" if self.after_softmax else "scores"


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear, or a router of experts with a weight."""
    own = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) or (hasattr(module, "top_k") and isinstance(own, nn.Parameter))


def site_name(path: str, name: str, count: int) -> str:
    full = f"{path}:{name}" if name else path
    return f"{full}#{count}" if count > 1 else full
