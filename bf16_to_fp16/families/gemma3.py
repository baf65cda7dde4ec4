"""Gemma 3's text models and EmbeddingGemma: one stack, with norms on both sides of every sublayer.

What T5 has not: a norm between each output projection and the stream, so that no sublayer adds more than that norm's
gain allows, and norms of queries and keys, so that scores are bounded by their gains. All of them read what carries the
stream's factor and share its eps. Gains are stored as gain − 1: a factor on them rounds (``Tensor.offset``), so only
those that must move do, and all others stay. Several query heads read the same keys and values; queries and keys are
turned by rotary positions. The embedding multiplies itself by √d.

With images, what a vision tower gives goes through a norm and a linear into the stream, each in the place of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import UserError
from .configs import looked_up, whole_number
from .types import (
    RESIDUAL,
    Attention,
    Deviation,
    Family,
    FeedForward,
    Head,
    HeadLinear,
    Initialisation,
    Kind,
    OutputScale,
    Part,
    Projector,
    Signal,
    Spread,
    Stack,
    StackEnds,
    StockAttributes,
    StockClass,
    Tensor,
    divided_by,
    input_of,
    keys_inside,
    multiplied_by,
    output_of,
)

WITHOUT_BIASES = {"attention_bias": (False, "biases of its attentions have no place; its own checkpoints have none")}
"""See ``Family.alone``."""


def check_window(config: Mapping[str, object], key: str = "sliding_window") -> None:
    """Raise UserError for a sliding window in which a position does not see itself.

    Where stock code sees both sides it makes half a window, and one more, of the config's number, and writes 0 for one.
    """
    window = looked_up(config, key)
    least = 0 if looked_up(config, "use_bidirectional_attention") else 1
    if window is not None and not (isinstance(window, int) and window >= least):
        raise UserError(
            f"config.json: {key!r} is {window!r}, in which no position sees itself; take it from the original"
            " checkpoint"
        )


def gain(norm: str, size: str = "model") -> Tensor:
    """Return the gain of a norm, stored as gain − 1, that carries nothing."""
    return Tensor(f"{norm}.weight", (size,), (None,), offset=1.0)


def number(config: Mapping[str, object], key: str) -> int:
    """Return the config's number for a key; raise UserError where it is none."""
    return whole_number(key, config[key], "a number")


def shared_values(config: Mapping[str, object], within: str = "") -> Spread:
    """Return how the heads of queries share those of values; raise UserError where they cannot.

    within: what the config's keys begin with.
    """
    heads, kv_heads, size = (
        number(config, f"{within}{key}") for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads % kv_heads or size % 2:
        raise UserError(
            f"config.json: num_attention_heads is {heads}, which has to be a multiple of num_key_value_heads,"
            f" {kv_heads} (stock code's own where it is missing), and head_dim {size}, which has to be even; take the"
            " keys from the original checkpoint"
        )
    return kv_heads, heads // kv_heads, size


def attention(at: str, config: Mapping[str, object]) -> Part:
    """Return the records of a layer's attention."""
    norm, m, after = f"{at}.input_layernorm", f"{at}.self_attn", f"{at}.post_attention_layernorm"
    value = f"{m}.value"
    group = shared_values(config)
    return Part(
        signals=(
            Signal(
                RESIDUAL,
                Kind.RESIDUAL,
                "model",
                (
                    input_of(norm),
                    output_of(f"{m}.q_proj"),
                    output_of(f"{m}.k_proj"),
                    input_of(f"{m}.q_norm"),
                    input_of(f"{m}.k_norm"),
                    output_of(f"{m}.o_proj"),
                    input_of(after),
                    output_of(after),
                ),
            ),
            Signal(norm, Kind.FIXED, "model", (output_of(norm),)),
            Signal(f"{m}.query", Kind.FIXED, "head", (output_of(f"{m}.q_norm"),)),
            Signal(f"{m}.key", Kind.FIXED, "head", (output_of(f"{m}.k_norm"),)),
            Signal(value, Kind.VALUE, "kv_inner", (output_of(f"{m}.v_proj"), input_of(f"{m}.o_proj", group))),
        ),
        tensors=(
            gain(norm),
            Tensor(f"{m}.q_proj.weight", ("inner", "model"), (multiplied_by(RESIDUAL), None)),
            Tensor(f"{m}.k_proj.weight", ("kv_inner", "model"), (multiplied_by(RESIDUAL), None)),
            gain(f"{m}.q_norm", "head"),
            gain(f"{m}.k_norm", "head"),
            Tensor(f"{m}.v_proj.weight", ("kv_inner", "model"), (multiplied_by(value), None)),
            Tensor(f"{m}.o_proj.weight", ("model", "inner"), (multiplied_by(RESIDUAL), divided_by(value, group))),
            Tensor(f"{after}.weight", ("model",), (multiplied_by(RESIDUAL),), offset=1.0),
        ),
        topology=Attention(
            at=m,
            norm=norm,
            query=f"{m}.q_proj",
            key=f"{m}.k_proj",
            value=f"{m}.v_proj",
            output=f"{m}.o_proj",
            memory=False,
            bias="",
            heads="num_attention_heads",
            scaled=True,
            add=f"{at}:add",
            post_norm=after,
            query_norm=f"{m}.q_norm",
            key_norm=f"{m}.k_norm",
            rotary="rotary_emb",
            kv_heads="num_key_value_heads",
            scale="query_pre_attn_scalar",
        ),
    )


def feed_forward(at: str, config: Mapping[str, object]) -> Part:
    """Return the records of a layer's feed-forward."""
    norm, m, after = f"{at}.pre_feedforward_layernorm", f"{at}.mlp", f"{at}.post_feedforward_layernorm"
    neuron = f"{m}.neuron"
    return Part(
        signals=(
            Signal(
                RESIDUAL,
                Kind.RESIDUAL,
                "model",
                (input_of(norm), output_of(f"{m}.down_proj"), input_of(after), output_of(after)),
            ),
            Signal(norm, Kind.FIXED, "model", (output_of(norm),)),
            Signal(neuron, Kind.NEURON, "ff", (output_of(f"{m}.up_proj"), input_of(f"{m}.down_proj"))),
            Signal(f"{m}.gate", Kind.FIXED, "ff", (output_of(f"{m}.gate_proj"),)),
        ),
        tensors=(
            gain(norm),
            Tensor(f"{m}.gate_proj.weight", ("ff", "model"), (None, None)),
            Tensor(f"{m}.up_proj.weight", ("ff", "model"), (multiplied_by(neuron), None)),
            Tensor(f"{m}.down_proj.weight", ("model", "ff"), (multiplied_by(RESIDUAL), divided_by(neuron))),
            Tensor(f"{after}.weight", ("model",), (multiplied_by(RESIDUAL),), offset=1.0),
        ),
        topology=FeedForward(
            at=m,
            norm=norm,
            gate=f"{m}.gate_proj",
            linear=f"{m}.up_proj",
            output=f"{m}.down_proj",
            activation=str(config["hidden_activation"]),
            act=f"{m}.act_fn",
            add=f"{at}:add#2",
            post_norm=after,
        ),
    )


def block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of layer ``i``; raise UserError for a config with a part that no record states."""
    check_window(config)
    return (attention(f"layers.{i}", config), feed_forward(f"layers.{i}", config))


def final_norm(at: str, *, tied: bool) -> Part:
    """Return a final norm whose output is read as it is, or by the embedding, whose factor it takes out."""
    if not tied:
        return Part((Signal(f"{at}.output", Kind.FIXED, "model", (output_of(at),)),), (gain(at),))
    weight = Tensor(f"{at}.weight", ("model",), (divided_by(RESIDUAL),), offset=1.0)
    return Part((Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(at, -1),)),), (weight,))


BODY = "model"
"""Where the stack stands in a model with a head."""


def with_head(weight: str, *, tied: bool, cap: str = "final_logit_softcapping", body: str = BODY) -> Part:
    """Return the final norm and the head that reads it; cap: config key of the cap on its logits, "" for none. body:
    where the stack stands."""
    norm = final_norm(f"{body}.norm", tied=tied)
    own = () if tied else (Tensor(weight, ("vocab", "model"), (None, None)),)
    return Part(
        (*norm.signals, Signal("logits", Kind.FIXED, "vocab", (output_of("lm_head"),))),
        (*norm.tensors, *own),
        Head("lm_head", (HeadLinear("lm_head", weight),), cap=cap),
    )


STATES = final_norm("norm", tied=False)


def classes(causal: str, bare: str, states: Part) -> tuple[StockClass, ...]:
    """Return the stock classes of a causal family: with a language-modelling head, and without one; states: what its
    last norm gives a user."""
    return (
        StockClass((causal,), decodes=False, takes_decoder_ids=False, end=None, body=BODY),
        StockClass((bare,), decodes=False, takes_decoder_ids=False, end=states, gives=("last_hidden_state",)),
    )


GEMMA3 = Family(
    name="gemma3",
    title="Gemma 3 (text), EmbeddingGemma",
    model_type="gemma3_text",
    classes=classes("Gemma3ForCausalLM", "Gemma3TextModel", STATES),
    sizes={
        "vocab": ("vocab_size",),
        "model": ("hidden_size",),
        "inner": ("num_attention_heads", "head_dim"),
        "kv_inner": ("num_key_value_heads", "head_dim"),
        "head": ("head_dim",),
        "ff": ("intermediate_size",),
    },
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    encoder=Stack("num_hidden_layers", block),
    decoder=None,
    encoder_ends=Part(
        signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of("embed_tokens"), input_of("norm"))),),
        tensors=(Tensor("embed_tokens.weight", ("vocab", "model"), (None, multiplied_by(RESIDUAL))),),
        topology=StackEnds(at="", embedding="embed_tokens", positions="", scale="", norm="norm", scales_itself=True),
    ),
    encoder_output=STATES,
    decoder_ends=None,
    tied_head=with_head(f"{BODY}.embed_tokens.weight", tied=True),
    untied_head=with_head("lm_head.weight", tied=False),
    embedding="embed_tokens.weight",
    head="lm_head.weight",
    copies=(),
    ignorable=(),
    logits_bias="",
    output_scale=OutputScale.NEVER,
    output_scale_key="",
    kept_in_fp32=(),
    eps_key="rms_norm_eps",
    eps=1e-6,
    centred_norm=False,
    norm_site="to#2",
    norm_rounds_once=True,
    nullable=("attn_logit_softcapping", "final_logit_softcapping"),
    alone=WITHOUT_BIASES
    | {"attn_logit_softcapping": (None, "stock code reads this cap on scores and does not apply it")},
    made_in_fp32=True,
    older_rotary={
        "full_attention": ("rope_theta", "rope_scaling"),
        "sliding_attention": ("rope_local_base_freq", ""),
    },
    blind_padding=True,
    dropout={"attention": "attention_dropout"},
    free_keys=(
        "cache_implementation",
        "layer_types",
        "max_position_embeddings",
        "rope_parameters",
        "sliding_window",
        "_sliding_window_pattern",
        "use_bidirectional_attention",
    ),
    buckets=None,
    attributes=StockAttributes(
        heads="", head_size="head_dim", embedding_scale="scalar_embed_scale", groups="num_key_value_groups"
    ),
    initialisation=Initialisation(
        title="Gemma 3",
        factor="initializer_range",
        default=0.02,
        modules={"*norm": None, "*": Deviation()},
    ),
    untie="copy",
)


def projector() -> Part:
    """Return what brings the outputs of a vision tower into the stream: the norm reads what carries nothing, and the
    linear, whose outputs stand in the place of embeddings that have been scaled, writes the stream."""
    at = f"{BODY}.multi_modal_projector"
    norm, weight = f"{at}.mm_soft_emb_norm", f"{at}.mm_input_projection_weight"
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(at),)),
            Signal(norm, Kind.FIXED, "vision", (output_of(norm),)),
        ),
        tensors=(gain(norm, "vision"), Tensor(weight, ("vision", "model"), (None, multiplied_by(RESIDUAL)))),
        topology=Projector(
            at=at,
            pool=f"{at}.avg_pool:avg_pool2d",
            add=f"{BODY}:masked_scatter",
            norm=norm,
            weight=weight,
            tower=f"{BODY}.vision_tower",
            token="image_token_index",
            tokens="mm_tokens_per_image",
            image=("vision_config.num_channels", "vision_config.image_size"),
        ),
    )


INSIDE = f"{BODY}.language_model"
"""Where the stack stands in a model with images."""


TEXT = keys_inside(
    replace(
        GEMMA3,
        tied_head=with_head(f"{INSIDE}.embed_tokens.weight", tied=True, body=INSIDE),
        untied_head=with_head("lm_head.weight", tied=False, body=INSIDE),
    ),
    "text_config",
)
"""Gemma 3's text model under the keys of a config with images."""


GEMMA3_WITH_IMAGES = replace(
    TEXT,
    name="gemma3-images",
    title="Gemma 3 (text and images)",
    model_type="gemma3",
    classes=(
        StockClass(
            ("Gemma3ForConditionalGeneration",),
            decodes=False,
            takes_decoder_ids=False,
            end=None,
            body=INSIDE,
            auto="AutoModelForImageTextToText",
        ),
    ),
    sizes={**TEXT.sizes, "vision": ("vision_config.hidden_size",)},
    defaults={**TEXT.defaults, "vision_config.hidden_size": 768, "tie_word_embeddings": True},
    free_keys=(
        *TEXT.free_keys,
        "vision_config.*",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "mm_tokens_per_image",
    ),
    tie_keys=("tie_word_embeddings", *TEXT.tie_keys),
    projector=projector(),
)
