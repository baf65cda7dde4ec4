"""UMT5: mT5 with a relative attention bias in every block's self-attention.

Its versions disagree about the factor before an untied head: transformers 5 multiplies the decoder's output by
d^-1/2 whatever the config says, transformers 4 only when the config ties. Rescaling preserves what each of them
computes on the source; a tied head is never separated.
"""

from __future__ import annotations

from dataclasses import replace

from .mt5 import MT5
from .t5 import blocks, classes
from .types import OutputScale

ENCODER, DECODER = blocks(every=True)

UMT5 = replace(
    MT5,
    name="umt5",
    title="UMT5",
    model_type="umt5",
    classes=classes("UMT5"),
    encoder=ENCODER,
    decoder=DECODER,
    ignorable=(),
    output_scale=OutputScale.ALWAYS,
)
