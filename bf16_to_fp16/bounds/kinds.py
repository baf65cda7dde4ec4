"""A table of the kinds of sites in a certificate, and the traits of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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


class Line(StrEnum):
    """A curve in the figures. The values are class names in style sheets."""

    STREAM = "stream"
    ATTENTION = "attention"
    FEED_FORWARD = "added"
    PRODUCT = "product"
    SCORES = "scores"


@dataclass(frozen=True)
class Traits:
    """How sites of one kind are treated. ``line``: its curve in figures, None if not drawn. ``movable``: whether
    rescaling, which is exact, can lower its values."""

    line: Line | None = None
    movable: bool = True


_TRAITS: Mapping[str, Traits] = {
    SiteKind.RESIDUAL: Traits(line=Line.STREAM),
    SiteKind.OUTPUT: Traits(line=Line.ATTENTION),
    SiteKind.PRODUCT: Traits(line=Line.PRODUCT),
    SiteKind.ACTIVATION: Traits(Line.PRODUCT, movable=False),
    SiteKind.SCORES: Traits(Line.SCORES, movable=False),
    SiteKind.MASKED_SCORES: Traits(Line.SCORES, movable=False),
    SiteKind.LOGITS: Traits(Line.SCORES, movable=False),
    SiteKind.ROUTING: Traits(movable=False),
    SiteKind.POSITION_BIAS: Traits(movable=False),
    SiteKind.GATE: Traits(movable=False),
}


def traits(kind: str) -> Traits:
    """Return the traits of a kind, or the default ones for an unknown kind from a report."""
    return _TRAITS.get(kind, Traits())
