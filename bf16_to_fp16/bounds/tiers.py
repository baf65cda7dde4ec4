"""Certificates for each tier. A tier is a group of runtimes with the same arithmetic. The first tier has PyTorch's
kernels, and the last makes every sum in fp16. A tier's certificate implies those of the tiers before it."""

from __future__ import annotations

from ..checkpoint.reader import Checkpoint
from ..devices import Device, products_on
from ..families.layout import Layout, TensorReader
from ..progress import Progress
from ..targets import TIERS, WHERE
from .arithmetic import Arithmetic
from .certificate import bound, fp16_weights, is_certified
from .findings import Certificate
from .spectral import Spectra


def certified_tiers(
    layout: Layout, weights: TensorReader, target: str, *, holds: bool, arithmetic: Arithmetic, spectra: Spectra
) -> dict[str, bool]:
    """Return for each tier, by name, whether its certificate holds. holds: whether the certificate for ``target``
    holds. arithmetic: the assumptions that all tiers have in common; each tier's own assumptions are added to them."""
    holding: dict[str, bool] = {}
    targets = [tier.target for tier in TIERS]
    # Every target covers the weakest tier.
    covered = targets.index(target) if target in targets else 0
    for i, tier in enumerate(TIERS):
        if holds and i <= covered:
            holding[tier.name] = True
        elif (not holds and tier.target == target) or not all(holding.values()):
            holding[tier.name] = False
        else:
            holding[tier.name] = is_certified(layout, weights, arithmetic, tier.target, spectra)
    return holding


def bounded(
    checkpoint: Checkpoint,
    layout: Layout,
    target: str,
    arithmetic: Arithmetic,
    device: Device,
    progress: Progress,
    whose: str = "",
    spectra: Spectra | None = None,
    *,
    tiers: bool = True,
) -> tuple[Certificate, dict[str, bool]]:
    """Return the certificate of a checkpoint's weights in fp16, and whether the certificate of each tier holds, by
    name. The latter is empty unless ``tiers``. whose: words in the progress step that say which weights are bounded."""
    # Several commands share this function, so it has many parameters.
    weights = fp16_weights(checkpoint, layout)
    spectra, by_tier = spectra or Spectra(weights), dict[str, bool]()
    with products_on(device):
        with progress.step(f"Bounding every site{whose} {WHERE[target]}") as advance:
            certificate = bound(layout, weights, arithmetic, target=target, spectra=spectra, advance=advance)
        if tiers:
            holds = certificate.holds
            with progress.step("Bounding every site in stricter arithmetic"):
                by_tier = certified_tiers(layout, weights, target, holds=holds, arithmetic=arithmetic, spectra=spectra)
    return certificate, by_tier
