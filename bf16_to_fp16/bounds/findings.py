"""The certificate as data, and the findings of a walk that it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..families.configs import config_value
from ..families.layout import Layout, TensorReader
from ..families.places import places
from ..families.types import DropoutKind
from ..numerics import FP16_MAX, headroom_bits
from ..ranges import ChannelRange, ModuleRange, NormRange, ScoreRange
from ..results import BoundEntry, CertificateEntry
from .arithmetic import UNIT, Arithmetic, largest
from .kinds import SiteKind

HOPELESS = 2.0**62
"""Weights this large cannot be planned for: an element has three exponents of 24 at most, and squares overflow fp32."""

_PLACING = {"to", "clone", "cat", "where", "embedding", "index", "constant_pad_nd", "repeat", "stack"}
_CHANGING = {"clamp", "mul", "div", "bernoulli", "native_dropout", "add", "neg", "abs"}
CARRYING = _PLACING | _CHANGING
"""Operations that only move, choose, limit, mask or negate values of their module, or take their magnitude."""


@dataclass(frozen=True)
class Certificate:
    """The bounds of every site of a model, and the arithmetic for which they hold. ``ranges``: by module and channel,
    with the mean squares that inputs of random direction give. ``at`` bounds any site that an audit names."""

    sites: tuple[BoundEntry, ...]
    arithmetic: Arithmetic
    ranges: Mapping[str, ModuleRange]
    inner: Mapping[str, float] = field(default_factory=dict)
    """Bounds of module inputs and weights, which copies and casts inside the module carry."""
    unlimited: Mapping[str, float] = field(default_factory=dict)
    """Bounds of operations that may give inf without harm."""

    @property
    def holds(self) -> bool:
        """Whether no site can pass its limit."""
        return all(site.holds for site in self.sites)

    @property
    def headroom_bits(self) -> float:
        """log2(limit / bound) at the tightest site."""
        return min((site.headroom_bits for site in self.sites), default=math.inf)

    def at(self, name: str) -> float | None:
        """Return the bound of a site by the audit's name; None for an unknown one. Copies, casts, masks, clamps and
        dropout's steps have the bound of their module's values; of repeated operations the largest counts."""
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
        """Return the report's ``certificate``. observed: the largest value found at each site."""
        found = observed or {}
        listed = [site.model_copy(update={"observed": found.get(site.name)}) for site in self.sites]
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


@dataclass(eq=False)
class Findings:
    """The bounds found so far, by site and by module, and the weights from which they are computed. limits: of kinds of
    sites, FP16_MAX for others."""

    layout: Layout
    read: TensorReader
    arithmetic: Arithmetic
    limits: Mapping[str, float]

    def __post_init__(self) -> None:
        self.place = places(self.layout)
        self.sites: dict[str, BoundEntry] = {}
        self.inner: dict[str, float] = {}
        self.unlimited: dict[str, float] = {}
        self.inputs: dict[str, tuple[Tensor, Tensor]] = {}
        self.outputs: dict[str, tuple[Tensor, Tensor]] = {}
        self.norms: dict[str, NormRange] = {}
        self.scores: dict[str, ScoreRange] = {}

    def certificate(self) -> Certificate:
        paths = [*self.outputs, *(p for p in self.scores if p not in self.outputs)]
        empty = (torch.zeros(0), torch.zeros(0))
        ranges = {
            path: ModuleRange(
                channels(self.inputs.get(path, empty)),
                channels(self.outputs.get(path, empty)),
                self.norms.get(path),
                self.scores.get(path),
            )
            for path in paths
        }
        return Certificate(tuple(self.sites.values()), self.arithmetic, ranges, self.inner, self.unlimited)

    def note(self, name: str, kind: SiteKind, bound: Tensor | float, partial: Tensor | float | None = None) -> None:
        """Record a site. If it runs twice (dropout at both ends of a stack) the larger bound counts."""
        top = largest(bound)
        sums = top if partial is None else largest(partial)
        before = self.sites.get(name)
        if before is not None:
            top, sums = max(top, before.bound), max(sums, before.partial)
        limit, most = self.limits.get(kind, FP16_MAX), max(top, sums)
        self.sites[name] = BoundEntry(
            name=name,
            kind=str(kind),
            bound=top,
            partial=sums,
            limit=limit,
            headroom_bits=headroom_bits(most, limit),
            observed=None,
            holds=most <= limit,
            **self.place(name).to_json(),
        )

    def record(
        self,
        path: str,
        kind: SiteKind,
        bounds: tuple[Tensor, Tensor],
        expected: Tensor,
        entering: tuple[Tensor, Tensor],
    ) -> None:
        """Record a linear's bounds and mean squares. entering: the same of its input."""
        self.note(path, kind, *bounds)
        self.inputs[path], self.outputs[path] = entering, (torch.maximum(*bounds), expected)

    def dropout(self, path: str, keep: float, kind: SiteKind, bound: Tensor) -> None:
        """Record a dropout's output and its mask, divided by 1 − p. Of several in a module the largest counts."""
        self.note(f"{path}:mul", kind, bound)
        self.mask(path, keep)

    def mask(self, path: str, keep: float) -> None:
        for site in (f"{path}:bernoulli", f"{path}:div"):
            self.inner[site] = max(self.inner.get(site, 0.0), (1 + UNIT) / keep)

    def kept(self, what: DropoutKind) -> float:
        """Return a lower bound of 1 over dropout's factor; 1 outside training."""
        if not self.arithmetic.train:
            return 1.0
        key = self.layout.family.dropout.get(what)
        if key is None:
            return 1.0
        rate = float(str(config_value(self.layout.family, self.layout.config, key)))
        # Kernels may round the factor 1/(1−p) to fp16 first.
        return (1 - rate) / (1 + UNIT) if rate else 1.0

    def tensor(self, name: str) -> Tensor | None:
        if name not in self.layout.tensors:
            return None
        return self.checked(name, self.read(name))

    def checked(self, name: str, weight: Tensor) -> Tensor:
        """Return a tensor and record its largest entry. One that fp16 cannot hold becomes a site that fails."""
        low, high = (float(x) for x in torch.aminmax(weight)) if weight.numel() else (0.0, 0.0)
        self.note_weight(name.rsplit(".", 1)[0], max(-low, high))
        if self.arithmetic.planned is not None and not max(-low, high) < HOPELESS:
            raise UserError(
                f"tensor {name}: weights are NaN or up to {max(-low, high):.3g}, which no exponent brings under 65504;"
                " use another revision of the checkpoint or repair the tensor"
            )
        if not (math.isfinite(low) and math.isfinite(high)):
            self.note(name, SiteKind.WEIGHT, math.inf)
            weight = torch.nan_to_num(weight.float(), 0.0, FP16_MAX, -FP16_MAX)
        return weight

    def note_weight(self, path: str, amax: float) -> None:
        self.inner[f"{path}:weight"] = max(amax, self.inner.get(f"{path}:weight", 0.0))

    def weight(self, path: str) -> tuple[Tensor, Tensor | None]:
        weight = self.tensor(f"{path}.weight")
        assert weight is not None
        return weight, self.tensor(f"{path}.bias")


def channels(pair: tuple[Tensor, Tensor]) -> ChannelRange:
    return ChannelRange(pair[0].float(), pair[1].float(), 1)


@dataclass(frozen=True)
class SourceBounds:
    """Bounds of the source before any exponent. exponents: of the streams, for LayerNorm's eps. unmoved: sites over
    their limit that no exact exponent moves."""

    ranges: Mapping[str, ModuleRange]
    exponents: Mapping[str, int]
    unmoved: frozenset[str]
