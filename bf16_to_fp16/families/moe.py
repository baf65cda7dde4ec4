"""Mixtral, Qwen3-MoE and OLMoE: layers as in Llama, with a router that sends each token to several gated experts.

Rescaling keeps every bit of the router's logits in fp32, and so the same experts are chosen. The router computes logits
in the model's dtype and the softmax in fp32. A token's weights sum to at most 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import llama
from .parts import Style, attention, feed_forward
from .types import Part, StoredExperts

TWO_LINEARS = StoredExperts("w1", "w3", "w2", inside="block_sparse_moe")
CHOICE = ("num_experts_per_tok", "norm_topk_prob")  # config keys of a router's choice
ROUTER = ("output_router_logits", "router_aux_loss_coef")  # config keys for a router's further output and for a loss


def mixtral_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    llama.check_window(config)
    at, block = f"layers.{i}", TWO_LINEARS.inside
    attending = attention(llama.wired_attention(config, at), Style(), llama.shared_values(config))
    own = {"noise": "router_jitter_noise"}
    return attending, llama.sparse(at, config, "num_local_experts", Style(), block=block, names=TWO_LINEARS, **own)


def qwen3_moe_block(config: Mapping[str, Any], i: int) -> Sequence[Part]:
    llama.check_window(config)
    at, style = f"layers.{i}", Style(biased=llama.ATTENTION if config["attention_bias"] else ())
    wiring = llama.wired_attention(config, at, norms_by_position=True, **llama.head_norms(at))
    step = llama.number(config, "decoder_sparse_step")
    if i in config["mlp_only_layers"] or step < 1 or (i + 1) % step:
        last = feed_forward(llama.wired_feed_forward(at, config["hidden_act"]), style)
    else:
        last = llama.sparse(at, config, "num_experts", replace(style, ff="expert_ff"), normalised="norm_topk_prob")
    return attention(wiring, style, llama.shared_values(config)), last


def olmoe_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of layer ``i``. Its norms of queries and of keys span all heads together."""
    at, style = f"layers.{i}", Style(biased=llama.ATTENTION if config["attention_bias"] else ())
    wiring = llama.wired_attention(config, at, norms_whole=True, **llama.head_norms(at))
    last = llama.sparse(at, config, "num_experts", style, normalised="norm_topk_prob")
    return attention(wiring, style, llama.shared_values(config)), last


MIXTRAL = replace(
    llama.MISTRAL,
    name="mixtral",
    title="Mixtral",
    classes=llama.classes("Mixtral"),
    sizes={**llama.MISTRAL.sizes, "experts": ("num_local_experts",)},
    keys=("hidden_act", "num_experts_per_tok", "router_jitter_noise"),
    encoder=llama.layers(mixtral_block),
    free_keys=(*llama.MISTRAL.free_keys, *ROUTER),
    stored_experts=TWO_LINEARS,
)

QWEN3_MOE = replace(
    llama.QWEN3,
    name="qwen3_moe",
    title="Qwen3-MoE",
    classes=llama.classes("Qwen3Moe"),
    sizes={**llama.QWEN3.sizes, "experts": ("num_experts",), "expert_ff": ("moe_intermediate_size",)},
    keys=(*llama.QWEN3.keys, *CHOICE, "decoder_sparse_step", "mlp_only_layers"),
    encoder=llama.layers(qwen3_moe_block),
    free_keys=(*llama.QWEN3.free_keys, *ROUTER),
    stored_experts=StoredExperts(),
    aliases={"num_experts": "num_local_experts"},
    variants=({"decoder_sparse_step": 2},),
)

OLMOE = replace(
    llama.LLAMA,
    name="olmoe",
    title="OLMoE",
    classes=llama.classes("Olmoe", labels=()),
    sizes={**llama.LLAMA.sizes, "experts": ("num_experts",)},
    keys=("hidden_act", "attention_bias", *CHOICE),
    encoder=llama.layers(olmoe_block),
    free_keys=(*llama.LLAMA.free_keys, *ROUTER),
    alone={"clip_qkv": (None, "clipped values cannot be rescaled exactly; OLMoE's official checkpoints do not clip")},
    stored_experts=StoredExperts(),
)
