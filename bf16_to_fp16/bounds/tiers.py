"""The tiers: arithmetics that runtimes use, from that of PyTorch's kernels to sums in fp16 throughout.

Each holds where its own certificate does, and with it every weaker one: the bounds only grow from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..checkpoint.side_modules import SideModule
from ..families.layout import Layout, TensorReader
from ..targets import TIERS
from .arithmetic import Arithmetic
from .certificate import bound, is_certified
from .side_modules import with_side_modules
from .spectral import Spectra


def certified_tiers(
    layout: Layout,
    weights: TensorReader,
    target: str,
    *,
    holds: bool,
    arithmetic: Arithmetic,
    spectra: Spectra,
    modules: Sequence[SideModule] = (),
) -> dict[str, bool]:
    """Return by tier whether its certificate holds for the given weights.

    holds: whether that for ``target`` does. arithmetic: of the weakest tier. spectra: as ``bound`` takes them. modules:
    what stands behind a sentence encoder.
    """
    holding: dict[str, bool] = {}
    targets = [tier.target for tier in TIERS]
    # What the weakest tier says is part of every target.
    covered = targets.index(target) if target in targets else 0
    for i, tier in enumerate(TIERS):
        if holds and i <= covered:
            holding[tier.name] = True
        elif (not holds and tier.target == target) or not all(holding.values()):
            holding[tier.name] = False
        elif modules:
            whole = bound(layout, weights, arithmetic, target=tier.target, spectra=spectra)
            holding[tier.name] = with_side_modules(whole, layout, modules).holds
        else:
            holding[tier.name] = is_certified(layout, weights, arithmetic, tier.target, spectra)
    return holding
