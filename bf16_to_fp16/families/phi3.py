"""Phi-3 and Phi-4: as Llama, but with queries, keys and values from one matrix, and gate and up projections from
another. Phi-4-mini rotates three quarters of a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import llama
from .glm4 import PARTIAL, rotated_channels
from .parts import attention, feed_forward
from .types import Part
from .wiring import Rotary


def block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    llama.check_window(config)
    at = f"layers.{i}"
    kv_heads, heads, size = llama.shared_values(config)
    joint = f"{at}.self_attn.qkv_proj"
    wiring = llama.wired_attention(
        config,
        at,
        query=joint,
        key=joint,
        value=joint,
        dropout=f"{at}.resid_attn_dropout",
        fused=(kv_heads * heads * size, kv_heads * size, kv_heads * size),
        rotary=Rotary("rotary_emb", llama.rotary_factor(config), turned=rotated_channels(config)),
    )
    gated = llama.wired_fused(config, at, dropouts=(f"{at}.resid_mlp_dropout",))
    return attention(wiring, share=(kv_heads, heads, size)), feed_forward(gated)


PHI3 = replace(
    llama.LLAMA,
    name="phi3",
    title="Phi-3, Phi-4",
    classes=llama.classes("Phi3"),
    keys=("hidden_act",),
    encoder=llama.layers(block),
    dropout={**llama.LLAMA.dropout, "branch": "resid_pdrop"},
    free_keys=(*llama.LLAMA.free_keys, PARTIAL, "embd_pdrop", "original_max_position_embeddings", "sliding_window"),
)
