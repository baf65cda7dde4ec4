"""The kinds of sites in a certificate, and how each kind is treated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class SiteKind(StrEnum):
    """The kind of quantity at a site, as a report names it."""

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
    """A curve in a report's figures. The values are the curves' class names in style sheets."""

    STREAM = "stream"
    ATTENTION = "attention"
    FEED_FORWARD = "added"
    PRODUCT = "product"
    SCORES = "scores"


@dataclass(frozen=True)
class Traits:
    """How sites of one kind are treated. ``line`` is their curve in figures, None if they are not drawn. ``movable``
    tells whether rescaling can lower their values without a change of the function."""

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
    """Return the traits of a kind of site. A kind without an entry has the default ones."""
    return _TRAITS.get(kind, Traits())
