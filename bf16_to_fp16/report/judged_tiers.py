"""Judge in which tiers a checkpoint is safe. A tier is a group of runtimes with the same arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ..numerics import FP16_MAX, NORM_FLOOR
from ..ranges import Squares
from ..targets import SQUARING, TIERS
from . import remedies, schema


def judged_tiers(
    certified: Mapping[str, bool], *, clean: bool = False, squares: Squares | None = None, pooled: bool = False
) -> dict[str, schema.TierEntry]:
    """Return the report's entry for each tier: whether the checkpoint is safe there, by bounds or in a run, or why not.

    certified: for each tier, whether all bounds hold. clean: whether the model ran with every parameter in fp16 and
    nothing broke. squares: extremes of the squares that norms sum in a run; if None, no tier with norms in fp16 is
    safe. pooled: whether the model returns sentence vectors. If so, only bounds can show that such a tier is safe."""
    unfit = remedies.SQUARES_UNSEEN if squares is None else ""
    if squares is not None and squares.least < NORM_FLOOR:
        unfit = remedies.sinks(squares.least)
    elif squares is not None and squares.largest > FP16_MAX:
        unfit = remedies.swells(squares.largest)
    observed = {"half"} if clean else set()
    if clean and squares is not None and squares.fits and not pooled:  # the squares of sentence vectors are not seen
        observed.add("norm-safe")
    entries: dict[str, schema.TierEntry] = {}
    for tier in TIERS:
        proof: Literal["certified", "observed"] | None = None
        reason = remedies.OVER
        if tier.target in SQUARING and unfit and (certified[tier.name] or squares is not None):
            reason = unfit
        elif certified[tier.name]:
            proof, reason = "certified", ""
        elif tier.target in observed:
            proof, reason = "observed", ""
        entries[tier.name] = schema.TierEntry(
            holds=proof is not None, proof=proof, runtimes=list(tier.runtimes), reason=reason
        )
    return entries
