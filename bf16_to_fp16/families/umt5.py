"""UMT5: mT5 with a relative attention bias in every block's self-attention.

Its versions disagree about the factor before an untied head: transformers 5 multiplies the decoder's output by
d^-1/2 whatever the config says, transformers 4 only when the config ties. Rescaling preserves what each of them
computes on the source; a tied head is never separated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .t5 import DEFAULTS, T5, attention, classes, feed_forward
from .types import OutputScale, Part, Stack


def encoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of encoder block ``i``."""
    at = f"encoder.block.{i}.layer"
    return (attention(f"{at}.0", "SelfAttention", bias=True), feed_forward(f"{at}.1", config))


def decoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of decoder block ``i``."""
    at = f"decoder.block.{i}.layer"
    return (
        attention(f"{at}.0", "SelfAttention", bias=True),
        attention(f"{at}.1", "EncDecAttention", bias=False, memory=True),
        feed_forward(f"{at}.2", config),
    )


UMT5 = replace(
    T5,
    name="umt5",
    title="UMT5",
    model_type="umt5",
    classes=classes("UMT5"),
    defaults=DEFAULTS | {"feed_forward_proj": "gated-gelu"},
    encoder=Stack("num_layers", encoder_block),
    decoder=Stack("num_decoder_layers", decoder_block),
    ignorable=(),
    output_scale=OutputScale.ALWAYS,
    untie="",
)
