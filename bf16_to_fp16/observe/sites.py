"""A site: the outputs of one operation of one module, over every call; and the names that observer and tap give it."""

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
    """The outputs of one operation of one module, over every call. ``amax`` is the largest |x| (inf where one
    overflowed or was NaN) without masked positions. ``nonfinite``, ``saturated`` (finite |x| from 64504, fp16 only) and
    ``benign`` count elements; the first two leave out the benign ones, and NaN is never benign. ``order`` is the number
    of the output that first broke it (was not finite), else of its first output. ``limit`` is None where fp16's range
    does not bind: outputs of another dtype, constants, and the cube inside ``gelu_new``. ``elements`` and ``zeros``
    count gradients alone."""

    name: str
    dtype: torch.dtype
    limit: float | None
    amax: float = 0.0
    calls: int = 0
    nonfinite: int = 0
    saturated: int = 0
    benign: int = 0
    reason: str | None = None
    order: int = 0
    elements: int = 0
    zeros: int = 0
    pending_nonfinite: int = 0
    pending_saturated: int = 0

    def take(self, later: Site) -> None:
        if later.nonfinite and not self.nonfinite:
            self.order = later.order
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


_OUTPUTS_OF_A_RUN = 1 << 40  # more than any run has


def sites_of_all(runs: Iterable[Iterable[Site]]) -> list[Site]:
    """Return the sites of forwards by copies of one model as if one observer had seen them one after another, in the
    order in which the forwards show them."""
    sites: dict[tuple[str, torch.dtype], Site] = {}
    for number, run in enumerate(runs):
        for site in run:
            later = replace(site, order=site.order + number * _OUTPUTS_OF_A_RUN)
            before = sites.setdefault((site.name, site.dtype), later)
            if before is not later:
                before.take(later)
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
        """Whether this is an attention that has its scores, but not yet its weights."""
        return "scores" in self.counts and not self.after_softmax

    def product(self, *, sums: bool) -> str:
        """Return the name of a matrix product: of a linear its output's; ``sums``: it chooses and sums positions."""
        if self.linear:
            return ""
        return "sum" if sums else "context" if self.after_softmax else "scores"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear, whose output is the site of its path; a router that holds its weight itself is one
    too."""
    own = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) or (hasattr(module, "top_k") and isinstance(own, nn.Parameter))


def site_name(path: str, name: str, count: int) -> str:
    """Return the full name of a module's operation: ``path:name``, of its second run ``path:name#2``."""
    full = f"{path}:{name}" if name else path
    return f"{full}#{count}" if count > 1 else full
