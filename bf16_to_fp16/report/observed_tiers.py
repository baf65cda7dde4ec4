"""The largest values that an audit's regimes reached, and the tiers in which a checkpoint is therefore safe."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..bounds.arithmetic import growth
from ..families.layout import Layout
from ..families.signals import RESIDUAL
from ..measuring.regime_results import RegimeResult, verdict
from ..numerics import OVERFLOWED
from ..ranges import Squares
from ..results import AttackEntry
from . import schema
from .judged_tiers import judged_tiers


def largest_seen(results: Mapping[str, RegimeResult], attack: AttackEntry | None) -> dict[str, float]:
    """Return the largest |x| of each site in ``half`` and in the attack, infinite if it overflowed."""
    sites = results["half"].sites if "half" in results else []
    seen = {site.name: math.inf if site.nonfinite and site.amax == OVERFLOWED else site.amax for site in sites}
    for site in attack.sites if attack is not None else ():
        seen[site.name] = max(seen.get(site.name, 0.0), site.worst)
    return seen


def tiers_of(
    layout: Layout, certified: Mapping[str, bool], regimes: Mapping[str, RegimeResult]
) -> dict[str, schema.TierEntry]:
    if "half" not in regimes:
        return judged_tiers(certified)
    half, squares = regimes["half"], None
    if norms := [half.norms[path] for path in layout.streams_read if path in half.norms]:
        longest, least = max(n.norm_max for n in norms), min(float(n.variances[:, 0].min()) for n in norms)
        squares = Squares(longest**2 * growth(layout.signals[RESIDUAL].size), least)
    return judged_tiers(certified, clean=verdict(regimes) == "safe", squares=squares, pooled=bool(half.vectors))
