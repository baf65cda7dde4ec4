"""mT5: T5 v1.1 with a gate by default and, in every published checkpoint, a head of its own.

Its stock class differs from T5's in the head alone: transformers 5 never multiplies the decoder's output before it,
transformers 4 does when the config ties. A tied mT5 therefore stays tied, since no stored head suits both.
"""

from __future__ import annotations

from dataclasses import replace

from .t5 import DEFAULTS, T5, classes
from .types import OutputScale

MT5 = replace(
    T5,
    name="mt5",
    title="mT5",
    model_type="mt5",
    classes=classes("MT5"),
    defaults=DEFAULTS | {"feed_forward_proj": "gated-gelu"},
    output_scale=OutputScale.NEVER,
    untie="",
)
