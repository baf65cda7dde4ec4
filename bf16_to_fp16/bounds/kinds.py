"""The kinds of sites in a certificate."""

from __future__ import annotations

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


UNMOVABLE = {
    *(SiteKind.ACTIVATION, SiteKind.SCORES, SiteKind.MASKED_SCORES, SiteKind.POSITION_BIAS),
    *(SiteKind.GATE, SiteKind.LOGITS, SiteKind.ROUTING),
}
"""Kinds of sites whose values no rescaling, which is exact, can lower."""
