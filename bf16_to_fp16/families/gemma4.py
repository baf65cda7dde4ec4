"""Gemma 4's text model: norms before and after every sublayer as in Gemma 3, with these differences.

Files hold gains without Gemma 3's offset, so every norm's output can be scaled exactly. The values of each head pass a
norm without gains, which removes the stream's factor and limits them to √head_dim. Scores are not divided by √head_dim.
A vision tower's outputs pass a norm without gains and a linear, then replace the image tokens' embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import gemma, llama
from .nested import keys_inside
from .parts import PLAIN, Style, attention, feed_forward, states
from .signals import RESIDUAL, Kind, Signal, Tensor, multiplied_by, output_of
from .types import Part
from .wiring import ImageInput, Projector


def block(config: Mapping[str, Any], i: int) -> Sequence[Part]:
    llama.check_window(config)
    at, whole = f"layers.{i}", config["layer_types"][i] == llama.FULL
    equal = whole and bool(config["attention_k_eq_v"])
    style, kv_heads = PLAIN, "num_global_key_value_heads" if equal else "num_key_value_heads"
    if whole:
        kv_inner = "equal_inner" if equal else "global_kv_inner"
        style = Style(inner="global_inner", kv_inner=kv_inner, head="global_head")
    size = config["global_head_dim" if whole else "head_dim"]
    wiring = llama.wired_attention(
        config,
        at,
        post_norm=f"{at}.post_attention_layernorm",
        value_norm=f"{at}.self_attn.v_norm",
        norms_by_position=True,
        scaled=False,
        kv_heads=kv_heads,
        **llama.head_norms(at),
    )
    if equal:
        wiring = replace(wiring, value=wiring.key)
    share = llama.shared_values({**config, "num_key_value_heads": config[kv_heads], "head_dim": size})
    scalar = Tensor(f"{at}.layer_scalar", ("one",), (None,))
    gated = llama.wired_feed_forward(
        at, config["hidden_activation"], scalar=scalar.name, scaled=f"{at}:mul", **gemma.gate_norms(at)
    )
    last = feed_forward(gated)
    return attention(wiring, style, share), replace(last, tensors=(*last.tensors, scalar))


GEMMA4 = replace(
    gemma.GEMMA3,
    name="gemma4",
    title="Gemma 4 (text)",
    config_type="gemma4_text",
    classes=llama.classes("Gemma4", bare="TextModel", labels=()),
    sizes={
        **gemma.GEMMA3.sizes,
        "global_inner": ("num_attention_heads", "global_head_dim"),
        "global_kv_inner": ("num_key_value_heads", "global_head_dim"),
        "equal_inner": ("num_global_key_value_heads", "global_head_dim"),
        "global_head": ("global_head_dim",),
        "one": (1,),
    },
    keys=("hidden_activation", "attention_k_eq_v", gemma.CAP, "layer_types"),
    encoder=llama.layers(block),
    encoder_output=states("norm"),
    **llama.heads(cap=gemma.CAP),
    alone=gemma.WITHOUT_BIASES
    | {
        "hidden_size_per_layer_input": (0, "per-layer inputs, as in E2B and E4B, have no bound here; run it in bf16"),
        "num_kv_shared_layers": (0, "layers that share keys and values have no bound here; run it in bf16"),
        "enable_moe_block": (False, "experts beside a feed-forward have no bound here; run it in bf16"),
    },
    older_rotary={},
    free_keys=(
        "_heterogeneity_spec",  # sizes of heads by layer, which are compared with stock code's modules
        "is_causal",  # which stock code sets where every token sees all
        "max_position_embeddings",
        "moe_intermediate_size",
        "num_experts",
        "rope_parameters",
        "sliding_window",
        "top_k_experts",
        "use_bidirectional_attention",
        "use_double_wide_mlp",
        "vocab_size_per_layer_input",
    ),
)


def projector(config: Mapping[str, object]) -> Sequence[Part]:
    at = "embed_vision"
    linear = f"{at}.embedding_projection"
    topology = Projector(
        at=at,
        add=":masked_scatter",
        norm=f"{at}.embedding_pre_projection_norm",
        merging=linear,
        gives="image_hidden_states",
        tower="vision_tower",
        image=ImageInput(
            token="image_token_id",
            channels="",
            patch="vision_config.patch_size",
            merged="vision_config.pooling_kernel_size",
            marks="mm_token_type_ids",
            places="image_position_ids",
        ),
    )
    written = PLAIN.linear(linear, "model", "vision", multiplied_by(RESIDUAL), None)
    return (Part((Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(linear),)),), written, topology),)


TEXT = keys_inside(replace(GEMMA4, **llama.heads(body=llama.INSIDE, cap=gemma.CAP)))

GEMMA4_WITH_IMAGES = replace(
    TEXT,
    name="gemma4-images",
    title="Gemma 4 (text and images)",
    config_type="gemma4",
    classes=llama.image_classes("Gemma4ForConditionalGeneration", "Gemma4Model"),
    sizes={**TEXT.sizes, "vision": ("vision_config.hidden_size",)},
    free_keys=(*TEXT.free_keys, *llama.IMAGE_KEYS),
    brings=projector,
)
