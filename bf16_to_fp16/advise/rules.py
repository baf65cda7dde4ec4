"""The published rules for the standard deviation of a transformer's weights at the start."""

from __future__ import annotations

import math

FAR = 4.0
"""Times a rule, either way, from which a weight or a config is flagged."""


def small(hidden: int) -> float:
    """Return √(2/(5h)), the "small init" of Transformers without Tears."""
    return math.sqrt(2 / (5 * hidden))


def megatron(hidden: int) -> float:
    """Return √(1/(3h)), the initialisation of MT-NLG 530B."""
    return math.sqrt(1 / (3 * hidden))
