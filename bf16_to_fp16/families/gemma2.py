"""Gemma 2: a causal language model with norms on both sides of every sublayer, and soft caps on scores and logits. It
is Gemma 3 without norms of queries and keys. A factor passes a rotation only where both channels of a pair have it, and
one head of keys serves several of queries: queries and keys have one exponent for each pair of channels of each head of
keys. A cap bounds the values behind it, and no exponent moves a score."""

from __future__ import annotations

from dataclasses import replace

from .gemma3 import GEMMA3, STYLE, WITHOUT_BIASES, block
from .llama import classes, layers
from .types import OLDER_ROTARY

WITHOUT_CAP = (
    "transformers 4.57 leaves out the cap on scores, of the source as well, unless attn_implementation is 'eager'"
)

GEMMA2 = replace(
    GEMMA3,
    name="gemma2",
    title="Gemma 2",
    model_type="gemma2",
    classes=classes("Gemma2", STYLE),
    older_rotary=OLDER_ROTARY,
    older_notes={"attn_logit_softcapping": WITHOUT_CAP},
    defaults={
        **GEMMA3.defaults,
        "vocab_size": 256_000,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    encoder=layers(block, normed=False, cap="attn_logit_softcapping"),
    alone=WITHOUT_BIASES,
)
