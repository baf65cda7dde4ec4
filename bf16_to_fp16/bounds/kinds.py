"""A table of the kinds of sites in a certificate, and the traits of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ..numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT


class SiteKind(StrEnum):
    """The quantity at a site, as a report names it."""

    EMBEDDING = "embedding"
    RESIDUAL = "residual"
    NORM = "norm"
    NORMALISED = "normalised"
    STATISTIC = "statistic"
    SQUARES = "squares"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ROTATION = "rotation"
    BLOCK_SUM = "block sum"
    SCORES = "scores"
    POSITION_BIAS = "position bias"
    MASKED_SCORES = "masked scores"
    WEIGHTS = "weights"
    CONTEXT = "context"
    GATE = "gate"
    NEURON = "neuron"
    ACTIVATION = "activation"
    PRODUCT = "product"
    ROUTING = "routing"
    OUTPUT = "output"
    LOGITS = "logits"
    WEIGHT = "weight"


class Remedy(StrEnum):
    """How to bring a bound under its limit."""

    RESCALE = "rescale"
    EDIT = "rescale at a price"
    FINETUNE = "finetune"


class Line(StrEnum):
    """A curve in the figures. The values are class names in style sheets."""

    STREAM = "stream"
    ATTENTION = "attention"
    FEED_FORWARD = "added"
    PRODUCT = "product"
    SCORES = "scores"


@dataclass(frozen=True)
class Traits:
    """How sites of one kind are treated. ``remedy``: what lowers its bound. ``line``: its curve in figures, None if not
    drawn. ``limit_in_training``: under 65504 if gelu_new's derivative overflows earlier."""

    remedy: Remedy = Remedy.RESCALE
    line: Line | None = None
    limit_in_training: float = FP16_MAX

    @property
    def movable(self) -> bool:
        """Whether rescaling, which is exact, can lower the site's values."""
        return self.remedy is Remedy.RESCALE


_TRAITS: Mapping[str, Traits] = {
    SiteKind.RESIDUAL: Traits(line=Line.STREAM),
    SiteKind.OUTPUT: Traits(line=Line.ATTENTION),
    SiteKind.PRODUCT: Traits(line=Line.PRODUCT),
    SiteKind.ACTIVATION: Traits(Remedy.EDIT, Line.PRODUCT),
    SiteKind.SCORES: Traits(Remedy.EDIT, Line.SCORES),
    SiteKind.MASKED_SCORES: Traits(Remedy.EDIT, Line.SCORES),
    SiteKind.LOGITS: Traits(Remedy.EDIT, Line.SCORES),
    SiteKind.ROUTING: Traits(Remedy.EDIT),
    SiteKind.POSITION_BIAS: Traits(Remedy.FINETUNE),
    SiteKind.GATE: Traits(Remedy.EDIT, limit_in_training=GELU_CUBE_BACKWARD_LIMIT),
}


def traits(kind: str) -> Traits:
    """Return the traits of a kind, or the default ones for an unknown kind from a report."""
    return _TRAITS.get(kind, Traits())
