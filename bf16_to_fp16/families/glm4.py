"""GLM-4-0414 and GLM-4: causal language models with one matrix for gate and neurons; GLM-4-0414 has norms on both sides
of every sublayer, GLM-4 before it only. As Llama, with these differences. Gains behind a sublayer are stored as they
are, so the stream's factor on them rounds nothing. Rotary positions turn channels 2i and 2i + 1 of each head's first
half; the other channels are not turned, and count as pairs too. ``gate_up_proj`` has the gate's rows first, then the
neurons', which alone carry a factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import llama
from .parts import Style, attention, feed_forward
from .types import Part
from .wiring import Rotary


def block(config: Mapping[str, object], i: int, *, behind: bool = True) -> Sequence[Part]:
    """Return the parts of layer ``i``. behind: whether there are norms behind its sublayers."""
    at = f"layers.{i}"
    style = Style(biased=llama.QUERIES_KEYS_VALUES if config["attention_bias"] else ())
    wiring = llama.wired_attention(
        config,
        at,
        post_norm=f"{at}.post_self_attn_layernorm" if behind else "",
        rotary=Rotary("rotary_emb", llama.rotary_factor(config), interleaved=True),
    )
    gated = llama.wired_fused(config, at, post_norm=f"{at}.post_mlp_layernorm" if behind else "")
    return attention(wiring, style, llama.shared_values(config)), feed_forward(gated, style)


GLM4 = replace(
    llama.LLAMA,
    name="glm4",
    title="GLM-4-0414",
    model_type="glm4",
    classes=llama.classes("Glm4"),
    sizes={**llama.LLAMA.sizes, "gate_and_ff": ("intermediate_size", 2)},
    defaults={
        **llama.WITHOUT_MLP_BIAS,
        "vocab_size": 151_552,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
    },
    encoder=llama.layers(block),
    eps=1.5625e-7,
    free_keys=(*llama.LLAMA.free_keys, "partial_rotary_factor"),
)

GLM = replace(
    GLM4,
    name="glm",
    title="GLM-4",
    model_type="glm",
    classes=llama.classes("Glm"),
    encoder=llama.layers(block, behind=False),
)
