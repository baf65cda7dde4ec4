"""GLM-4-0414, GLM-4 and GLM-4.5: causal language models, as Llama, with these differences.

GLM-4-0414 and GLM-4 have a fused ``gate_up_proj``, the gate's rows first; only the rows of the up projection can be
rescaled exactly. GLM-4-0414 also has a norm after each sublayer. Rotary positions rotate channels 2i and 2i + 1 in the
first half of each head. Exponents and bounds treat the second half of each head as rotated in the same way.

GLM-4.5 has routed experts and a shared one, except in its first layers. The router computes in fp32. The weights of a
token's experts are sigmoids of the router's logits, divided by their sum if the config says so, and multiplied by the
config's factor. Their sum is at most that factor or, without the division, that factor times the number of experts per
token. A correction, in fp32, only affects which experts are chosen. Half of each head is rotated, in Llama's pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import UserError
from . import llama
from .configs import whole_number
from .moe import CHOICE, ROUTER
from .parts import Style, attention, feed_forward
from .types import Part, StoredExperts
from .wiring import Rotary

PARTIAL = "partial_rotary_factor"


def block(config: Mapping[str, object], i: int, *, behind: bool = True) -> Sequence[Part]:
    """Return the declared sublayers of layer ``i``. behind: whether a norm follows each sublayer."""
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
    classes=llama.classes("Glm4"),
    keys=("hidden_act", "attention_bias"),
    encoder=llama.layers(block),
    free_keys=(*llama.LLAMA.free_keys, PARTIAL),
)

GLM = replace(GLM4, name="glm", title="GLM-4", classes=llama.classes("Glm"), encoder=llama.layers(block, behind=False))

UNEVEN = 42  # head_dim of the stock defaults, 4096 / 96, from which only names are read


def rotated_channels(config: Mapping[str, Any]) -> int:
    """Return the number of channels in a head that rotary positions rotate, 0 for all. Raises UserError if these
    channels cannot form pairs."""
    part, size = config["rope_parameters"][PARTIAL], llama.number(config, "head_dim")
    turned = int(size * part)
    if not 0 < turned <= size or (turned % 2 and size != UNEVEN):
        raise UserError(
            f"config.json: {PARTIAL!r} is {part!r}, which rotates {turned} of a head's {size} channels, not an even"
            f" number from 2 to {size}; take it from the original checkpoint"
        )
    return turned % size


def sparse_block(config: Mapping[str, Any], i: int) -> Sequence[Part]:
    at, style = f"layers.{i}", Style(biased=llama.QUERIES_KEYS_VALUES if config["attention_bias"] else ())
    normed = {"norms_by_position": True, **llama.head_norms(at)} if config["use_qk_norm"] else {}
    wiring = llama.wired_attention(
        config, at, **normed, rotary=Rotary("rotary_emb", llama.rotary_factor(config), turned=rotated_channels(config))
    )
    if i < whole_number("first_k_dense_replace", config["first_k_dense_replace"], "a number of layers", least=0):
        last = feed_forward(llama.wired_feed_forward(at, config["hidden_act"]), style)
    else:
        last = llama.sparse(
            at,
            config,
            "n_routed_experts",
            replace(style, ff="expert_ff"),
            sigmoid=True,
            normalised="norm_topk_prob",
            scaling="routed_scaling_factor",
            correction=f"{at}.mlp.gate.e_score_correction_bias",
            shared=llama.placed(llama.wired_feed_forward(at, config["hidden_act"]), f"{at}.mlp.shared_experts"),
            sum=f"{at}.mlp:add",
        )
    return attention(wiring, style, llama.shared_values(config)), last


GLM4_MOE = replace(
    llama.LLAMA,
    name="glm4_moe",
    title="GLM-4.5",
    classes=llama.classes("Glm4Moe", labels=()),
    sizes={
        **llama.LLAMA.sizes,
        "experts": ("n_routed_experts",),
        "expert_ff": ("moe_intermediate_size",),
        "shared_ff": ("moe_intermediate_size", "n_shared_experts"),
    },
    keys=(
        *(
            "hidden_act",
            "attention_bias",
            "first_k_dense_replace",
            "topk_group",
            "routed_scaling_factor",
            "use_qk_norm",
        ),
        *CHOICE,
    ),
    encoder=llama.layers(sparse_block),
    ignorable=("layers.46.*", "layers.92.*"),
    kept_in_fp32=("e_score_correction_bias",),
    # Layers that predict further tokens, which stock classes do not load.
    free_keys=(*llama.LLAMA.free_keys, *ROUTER, PARTIAL, "num_mtp_layers", "num_nextn_predict_layers"),
    alone={"n_group": (1, "transformers 4.57 and 5 choose among groups of experts in different ways")},
    stored_experts=StoredExperts(),
    variants=({"first_k_dense_replace": 0},),
)
