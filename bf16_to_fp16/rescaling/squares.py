"""What a stream's squares would be in fp16: both ends of what norms read, for runtimes whose norms square it there."""

from __future__ import annotations

from collections.abc import Mapping

from ..bounds.arithmetic import growth
from ..families.layout import Layout
from ..families.types import RESIDUAL
from ..ranges import NormRange, Squares
from .exponents import norm_exponents
from .plan import Plan


def squares_of(layout: Layout, norms: Mapping[str, NormRange], plan: Plan | None = None) -> Squares | None:
    """Return the squares of the stream that norms read, by module path, after its rescaling; None where none was
    seen."""
    seen = [
        (norms[path], 4.0**exponent)
        for path, exponent in norm_exponents(layout, plan or Plan(family=layout.family.name)).items()
        if path in norms
    ]
    if not seen:
        return None
    return Squares(
        max(norm.norm_max**2 * power for norm, power in seen) * growth(layout.signals[RESIDUAL].size),
        min(float(norm.variances[:, 0].min()) * power for norm, power in seen),
    )
