"""Find the largest values that an audit's runs reached, and so in which tiers of runtimes a checkpoint is safe."""

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
    """Return the largest |x| of each site, by name, in the regime ``half`` (every parameter in fp16) and in the attack.
    It is infinite for a site that overflowed in ``half``. attack: the result of a search for the worst input."""
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
