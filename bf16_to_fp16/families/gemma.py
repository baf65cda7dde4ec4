"""Gemma, Gemma 2, Gemma 3's text models and EmbeddingGemma: one stack, as in Llama, with these differences.

Gemma 3 has norms before and after every sublayer, and norms of queries and keys. All norms share one eps. So rescaling
multiplies the input of every norm by the residual stream's power of two. Files hold each gain minus 1, so a gain that
is multiplied must be rounded again. Therefore only the gains that must change are multiplied.

Gemma 2 has no norms of queries and keys, so queries and keys have exponents, as in Llama. Rescaling leaves the scores
unchanged, so their soft cap acts as before.

Gemma has no soft caps, and no norms after sublayers. So its output projections write to the stream directly, and their
weights are multiplied by the stream's power of two. Only gains before a tied head are multiplied, and so rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import llama
from .nested import keys_inside
from .parts import Style, attention, ends, feed_forward, states, table
from .parts import projector as projector_records
from .signals import RESIDUAL, Tensor, multiplied_by
from .types import OLDER_ROTARY, Part
from .wiring import ImageInput, Projector, StackEnds, StockAttributes

STYLE = Style(offset=1.0)
WITHOUT_BIASES = {"attention_bias": (False, "attention biases are not supported; Gemma's own checkpoints have none")}


def block(config: Mapping[str, object], i: int, *, normed: bool = True, cap: str = "") -> Sequence[Part]:
    """Return the declared sublayers of layer ``i``. normed: whether queries and keys have norms. cap: the config key of
    the scores' soft cap."""
    llama.check_window(config)
    at = f"layers.{i}"
    own = {"post_norm": f"{at}.post_attention_layernorm", "scale": "query_pre_attn_scalar", "cap": cap}
    wiring = llama.wired_attention(config, at, **own, **(llama.head_norms(at) if normed else {}))
    gated = llama.wired_feed_forward(at, config["hidden_activation"], **gate_norms(at))
    return attention(wiring, STYLE, llama.shared_values(config)), feed_forward(gated, STYLE)


def gate_norms(at: str) -> dict[str, str]:
    return {"norm": f"{at}.pre_feedforward_layernorm", "post_norm": f"{at}.post_feedforward_layernorm"}


CAP = "final_logit_softcapping"

GEMMA3 = replace(
    llama.LLAMA,
    name="gemma3",
    title="Gemma 3 (text), EmbeddingGemma",
    config_type="gemma3_text",
    classes=llama.classes("Gemma3", STYLE, bare="TextModel", labels=(f"Text{llama.OF_ROWS}",)),
    keys=("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", CAP),
    encoder=llama.layers(block),
    encoder_ends=ends(StackEnds("", "embed_tokens", "norm", scaled_by="module"), table("embed_tokens.weight")),
    encoder_output=states("norm", STYLE),
    **llama.heads(STYLE, cap=CAP),
    norm_site="to#2",
    norm_rounds_once=True,
    alone=WITHOUT_BIASES
    | {"attn_logit_softcapping": (None, "transformers reads this cap on scores and does not apply it")},
    older_rotary={"full_attention": ("rope_theta", "rope_scaling"), "sliding_attention": ("rope_local_base_freq", "")},
    free_keys=(
        "cache_implementation",
        "layer_types",
        "max_position_embeddings",
        "rope_parameters",
        "sliding_window",
        "_sliding_window_pattern",
        "use_bidirectional_attention",
    ),
    attributes=StockAttributes(
        head_size="head_dim", embedding_scale="scalar_embed_scale", groups="num_key_value_groups"
    ),
)


def projector(config: Mapping[str, object]) -> Sequence[Part]:
    """Return the declaration of the projector, whose outputs replace image tokens' scaled embeddings in the stream."""
    at = "multi_modal_projector"
    norm, weight = f"{at}.mm_soft_emb_norm", f"{at}.mm_input_projection_weight"
    wiring = Projector(
        at=at,
        pool=f"{at}.avg_pool:avg_pool2d",
        add=":masked_scatter",
        norm=norm,
        weight=weight,
        gives="image_hidden_states",
        tower="vision_tower",
        image=ImageInput(
            token="image_token_index",
            channels="vision_config.num_channels",
            size="vision_config.image_size",
            tokens="mm_tokens_per_image",
            marks="token_type_ids",
        ),
    )
    written = Tensor(weight, ("vision", "model"), (None, multiplied_by(RESIDUAL)))
    return (projector_records(wiring, at, *STYLE.norm(norm, None, "vision"), written),)


TEXT = keys_inside(replace(GEMMA3, **llama.heads(STYLE, body=llama.INSIDE, cap=CAP)))

GEMMA3_WITH_IMAGES = replace(
    TEXT,
    name="gemma3-images",
    title="Gemma 3 (text and images)",
    config_type="gemma3",
    classes=llama.image_classes("Gemma3ForConditionalGeneration", "Gemma3Model", STYLE),
    sizes={**TEXT.sizes, "vision": ("vision_config.hidden_size",)},
    free_keys=(*TEXT.free_keys, *llama.IMAGE_KEYS),
    brings=projector,
)

WITHOUT_CAP = "transformers 4.57 needs attn_implementation='eager' for the soft cap on scores, also for the source"

GEMMA2 = replace(
    GEMMA3,
    name="gemma2",
    title="Gemma 2",
    config_type="",
    classes=llama.classes("Gemma2", STYLE),
    older_rotary=OLDER_ROTARY,
    older_notes={"attn_logit_softcapping": WITHOUT_CAP},
    encoder=llama.layers(block, normed=False, cap="attn_logit_softcapping"),
    alone=WITHOUT_BIASES,
)

ACTIVATIONS = {"gelu": "gelu_pytorch_tanh"}  # the first releases say gelu and mean its approximation by tanh


def plain_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    at, named = f"layers.{i}", str(config["hidden_act"])
    gated = llama.wired_feed_forward(at, ACTIVATIONS.get(named, named))
    return attention(llama.wired_attention(config, at), STYLE, llama.shared_values(config)), feed_forward(gated, STYLE)


GEMMA = replace(
    GEMMA2,
    name="gemma",
    title="Gemma",
    classes=llama.classes("Gemma", STYLE),
    keys=("hidden_act",),
    encoder=llama.layers(plain_block),
    **llama.heads(STYLE),
    older_notes={},
)
