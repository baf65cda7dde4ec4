"""Gemma: as Gemma 2, but with a norm before each sublayer only, and without soft caps. With no norm behind them, the
output projections carry the stream's factor themselves. So no gain is moved and rounded (gains are stored less 1),
except a tied head's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .gemma2 import GEMMA2
from .gemma3 import STYLE
from .llama import classes, heads, layers, shared_values, wired_attention, wired_feed_forward
from .parts import attention, feed_forward
from .types import Part

ACTIVATIONS = {"gelu": "gelu_pytorch_tanh"}  # the first releases say gelu and mean its approximation by tanh


def block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    at, named = f"layers.{i}", str(config["hidden_act"])
    gated = wired_feed_forward(at, ACTIVATIONS.get(named, named))
    return attention(wired_attention(config, at), STYLE, shared_values(config)), feed_forward(gated, STYLE)


OTHERS = ("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
"""Config keys of Gemma 2 that Gemma lacks."""

GEMMA = replace(
    GEMMA2,
    name="gemma",
    title="Gemma",
    model_type="gemma",
    classes=classes("Gemma", STYLE),
    defaults={key: value for key, value in GEMMA2.defaults.items() if key not in OTHERS}
    | {
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
    encoder=layers(block),
    **heads(STYLE),
    nullable=(),
    older_notes={},
)
