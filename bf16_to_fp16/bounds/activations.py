"""Constants of the activations that have bounds. Models with another activation are refused. Imports no torch."""

from __future__ import annotations

from ..errors import UserError
from ..families.layout import Layout

LOWEST = {"relu": 0.0, "gelu": 0.17, "gelu_new": 0.1701, "gelu_pytorch_tanh": 0.1701, "silu": 0.2785, "swish": 0.2785}
"""How far below zero an activation goes, rounded up; all are x·Φ(x) with 0 ≤ Φ ≤ 1."""

STEEPEST = {"relu": 1.0, "gelu": 1.13, "gelu_new": 1.13, "gelu_pytorch_tanh": 1.13, "silu": 1.1, "swish": 1.1}
"""Largest derivative of an activation, rounded up."""


def check_bounded(layout: Layout, folder: str = "") -> None:
    """Raise UserError if a norm's eps is below fp32's smallest normal number or an activation has no bound. folder: the
    folder of config.json, named in the message."""
    where = f"{folder}/config.json".removeprefix("/")
    if layout.eps < 2.0**-126:
        raise UserError(
            f"{where}: the norm eps of {layout.eps:g} is less than fp32's smallest normal number, 1.2e-38, so that a"
            " zero vector gives NaN; write 1e-6 or so"
        )
    for sublayer in layout.feed_forwards:
        if sublayer.activation not in LOWEST:
            raise UserError(
                f"{where}: the bounds do not know activation {sublayer.activation!r}, only {', '.join(LOWEST)}; use"
                " audit without --attack, which needs no bounds"
            )
