"""Llama, Mistral, Qwen2, Qwen3, Seed-OSS, SmolLM3 and ERNIE 4.5: causal language models of one stack, with rotary
positions and a SiLU gate. Other families are built from these parts.

A power of two commutes with a rotation only if both channels of a pair have it. So queries and keys have one exponent
for each pair of each key head. Qwen3 has norms of queries and keys. The config has one eps for all norms, so one power
of two scales the inputs of all norms. Gains are stored directly, not minus 1, so norms' outputs can be scaled."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from ..errors import UserError, first_line
from . import parts
from .configs import BOTH_WAYS, is_nested, kind_of, looked_up, whole_number
from .signals import Spread, Tensor
from .types import Family, Part, Stack, StockClass, StoredExperts
from .wiring import Attention, Experts, FeedForward, Head, Rotary, StackEnds, StockAttributes

Biases = Mapping[str, Collection[str]]  # linears with a bias, by the config key that switches it on, "" for always
STORED = StoredExperts()
UNTURNED = Rotary("")
BODY = "model"  # path of the stack in a model with a head
STACK = "language_model"  # the same in a model with images and no head
INSIDE = f"{BODY}.{STACK}"  # and in one with a head


def check_window(config: Mapping[str, object], key: str = "sliding_window") -> None:
    """Raise UserError for a sliding window too small for a position to attend to itself: under 1 or, if attention is
    bidirectional, under 0."""
    window = looked_up(config, key)
    least = 0 if looked_up(config, "use_bidirectional_attention") in BOTH_WAYS else 1
    if window is not None and not (isinstance(window, int) and window >= least):
        raise UserError(
            f"config.json: {key!r} is {window!r}, and must be a whole number of at least {least}, so that a position"
            " attends to itself; take it from the original checkpoint"
        )


FULL, SLIDING = "full_attention", "sliding_attention"


def number(config: Mapping[str, object], key: str) -> int:
    return whole_number(key, config[key], "a number")


def shared_values(config: Mapping[str, object]) -> Spread:
    """Return the ``Spread`` by which query heads share values: (value heads, query heads for each value head, size of a
    head). Raises UserError for numbers in the config that do not fit."""
    heads, kv_heads, size = (number(config, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads % kv_heads or size % 2:
        raise UserError(
            f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads}), and"
            f" head_dim ({size}) even; take all three keys from the original checkpoint"
        )
    return kv_heads, heads // kv_heads, size


def rotary_factor(config: Mapping[str, Any]) -> float:
    """Return the largest factor on rotary cosines and sines, at least 1; raise UserError if it is unknown."""
    rotation = config.get("rope_parameters") or {}
    by_layer = rotation.values() if is_nested(rotation) else [rotation]
    return max(1.0, *(factor_of(config, each) for each in by_layer if isinstance(each, Mapping)))


def factor_of(config: Mapping[str, Any], rotation: Mapping[str, Any]) -> float:
    """Return the factor by which transformers multiplies rotary cosines and sines. rotation: the config's
    ``rope_parameters``, or its entry for one kind of layer. Raises UserError if the factor cannot be computed."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # slow to load

    kind, factor = kind_of(rotation), rotation.get("attention_factor")
    if kind in ("default", "mrope"):
        return 1.0
    if kind in ROPE_INIT_FUNCTIONS:
        shape = SimpleNamespace(**{**config, "rope_parameters": rotation}, standardize_rope_params=lambda: None)
        try:
            _, factor = ROPE_INIT_FUNCTIONS[kind](shape, "cpu")
        except Exception as error:  # of whatever the numbers lead to
            raise UserError(
                f"config.json: transformers cannot compute rotary positions of the kind {kind!r} ({first_line(error)});"
                " take 'rope_parameters' from the original checkpoint"
            ) from error
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise UserError(
            f"config.json: attention_factor in 'rope_parameters' is {factor!r} for rope_type {kind!r}; give a positive"
            f" number, or another rope_type: default, mrope, {', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    return float(factor)


def wired_attention(config: Mapping[str, object], at: str, **own: Any) -> Attention:
    m = f"{at}.self_attn"
    wiring = Attention(
        m,
        f"{at}.input_layernorm",
        *(f"{m}.{name}_proj" for name in "qkvo"),
        heads="num_attention_heads",
        add=f"{at}:add",
        rotary=Rotary("rotary_emb", rotary_factor(config)),
        kv_heads="num_key_value_heads",
    )
    return replace(wiring, **own)


def wired_feed_forward(at: str, activation: object, **own: Any) -> FeedForward:
    m = f"{at}.mlp"
    wiring = FeedForward(
        at=m,
        norm=f"{at}.post_attention_layernorm",
        gate=f"{m}.gate_proj",
        linear=f"{m}.up_proj",
        output=f"{m}.down_proj",
        activation=str(activation),
        act=f"{m}.act_fn",
        add=f"{at}:add#2",
    )
    return replace(wiring, **own)


def wired_fused(config: Mapping[str, object], at: str, **own: Any) -> FeedForward:
    """Return the wiring of a feed-forward whose gate and up projections are rows of one matrix."""
    both, count = f"{at}.mlp.gate_up_proj", number(config, "intermediate_size")
    joined = {"gate": both, "linear": both, "fused": (count, count), "act": f"{at}.mlp.activation_fn"}
    return wired_feed_forward(at, config["hidden_act"], **joined, **own)


def placed(wiring: FeedForward, path: str, names: StoredExperts = STORED) -> FeedForward:
    gate, linear, output = (f"{path}.{name}" for name in (names.gate, names.linear, names.output))
    return replace(wiring, at=path, act=f"{path}.act_fn", gate=gate, linear=linear, output=output)


def sparse(
    at: str,
    config: Mapping[str, object],
    count_key: str,
    style: parts.Style,
    *,
    block: str = "mlp",
    names: StoredExperts = STORED,
    **own: Any,
) -> Part:
    """Return the declaration of a layer's router and gated experts. count_key: config key of the number of experts.
    block: the name of the module that contains router and experts. own: fields of ``Experts`` to set."""
    inside, plain = f"{at}.{block}", wired_feed_forward(at, config["hidden_act"])
    each = tuple(placed(plain, f"{inside}.experts.{i}", names) for i in range(number(config, count_key)))
    wiring = Experts(
        at=f"{inside}.experts",
        norm=each[0].norm,
        router=f"{inside}.gate",
        classifier=f"{inside}.gate",
        noise="",
        experts=each,
        add=each[0].add,
        chosen="num_experts_per_tok",
    )
    wiring = replace(wiring, **own)
    shared = () if wiring.shared is None else (parts.feed_forward(wiring.shared, replace(style, ff="shared_ff")),)
    correction = (Tensor(wiring.correction, ("experts",), (None,), in_fp32=True),) if wiring.correction else ()
    return parts.experts(wiring, (*(parts.feed_forward(expert, style) for expert in each), *shared), *correction)


def head_norms(at: str) -> dict[str, str]:
    return {"query_norm": f"{at}.self_attn.q_norm", "key_norm": f"{at}.self_attn.k_norm"}


def block(
    config: Mapping[str, object],
    i: int,
    *,
    biases: Biases,
    normed: bool = False,
    dropped: bool = False,
    turned: bool = True,
    interleaved: bool = False,
) -> Sequence[Part]:
    """Return the parts of layer ``i``. biases: the linears that have a bias. normed: whether queries and keys have
    norms. dropped: whether sublayers' outputs have dropout. turned: whether positions are rotary. interleaved: whether
    a rotation mixes neighbouring channels."""
    check_window(config)
    style = parts.Style(biased=[name for key, names in biases.items() if not key or config[key] for name in names])
    at = f"layers.{i}"
    rotary = Rotary("rotary_emb", rotary_factor(config), interleaved=interleaved) if turned else UNTURNED
    norms = {"norms_by_position": True, **head_norms(at)} if normed else {}
    wiring = wired_attention(config, at, rotary=rotary, **norms)
    gated = wired_feed_forward(at, config["hidden_act"])
    if dropped:
        wiring, gated = replace(wiring, dropout=wiring.at), replace(gated, dropouts=(gated.at,))
    return parts.attention(wiring, style, shared_values(config)), parts.feed_forward(gated, style)


def layers(parts_of: Any, **own: Any) -> Stack:
    return Stack("num_hidden_layers", partial(parts_of, **own))


def heads(style: parts.Style = parts.PLAIN, *, body: str = BODY, cap: str = "") -> dict[str, Any]:
    tied, own = (parts.head(weight, cap=cap) for weight in (f"{body}.embed_tokens.weight", "lm_head.weight"))
    norm = f"{body}.norm"
    return {"tied_head": parts.tied_head(norm, tied, style), "untied_head": parts.untied_head(norm, own, style)}


OF_ROWS, OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"
LABELS = (OF_ROWS, OF_TOKENS)


def classes(
    prefix: str, style: parts.Style = parts.PLAIN, *, bare: str = "Model", labels: Sequence[str] = LABELS
) -> tuple[StockClass, ...]:
    """Return a family's transformers classes: with a language-modelling head, without a head, and with classification
    heads. bare: what ends the name of the class without a head. labels: what ends the names of the classifiers."""

    def labelled(name: str) -> StockClass:
        rows = name.endswith(OF_ROWS)
        score = Head("score", (parts.head_linear("score", biased=not rows),), dropout="" if rows else "dropout")
        end = parts.untied_head(f"{BODY}.norm", score, style, sizes=("labels",))
        return StockClass((f"{prefix}{name}",), body=BODY, end=end, reads_last_token=rows)

    return (
        StockClass((f"{prefix}ForCausalLM",), body=BODY),
        StockClass((f"{prefix}{bare}",), end=parts.states("norm", style), gives=("last_hidden_state",)),
        *map(labelled, labels),
    )


IMAGE_KEYS = (  # config keys of the tower and of ids around images, on which no bound depends
    *("vision_config.*", "mm_tokens_per_image", "vision_feature_layer", "vision_token_id"),
    *(f"{kind}_token_id" for kind in ("audio", "boa", "boi", "eoi", "image", "video", "vision_end", "vision_start")),
    *(f"{kind}_token_index" for kind in ("boi", "eoa", "eoi", "image")),
)


def image_classes(conditional: str, bare: str, style: parts.Style = parts.PLAIN) -> tuple[StockClass, ...]:
    return (
        StockClass((conditional,), body=INSIDE, auto="AutoModelForImageTextToText"),
        StockClass((bare,), end=parts.states(f"{STACK}.norm", style), gives=("last_hidden_state",), body=STACK),
    )


QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
ATTENTION = (*QUERIES_KEYS_VALUES, "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
EMBEDDING = "embed_tokens"

LLAMA = Family(
    name="llama",
    title="Llama",
    classes=classes("Llama"),
    sizes={
        "vocab": ("vocab_size",),
        "model": ("hidden_size",),
        "inner": ("num_attention_heads", "head_dim"),
        "kv_inner": ("num_key_value_heads", "head_dim"),
        "head": ("head_dim",),
        "ff": ("intermediate_size",),
        "labels": ("id2label",),
    },
    keys=("hidden_act", "attention_bias", "mlp_bias"),
    encoder=layers(block, biases={"attention_bias": ATTENTION, "mlp_bias": FEED_FORWARD}),
    encoder_ends=parts.ends(StackEnds("", EMBEDDING, "norm"), parts.table(f"{EMBEDDING}.weight")),
    encoder_output=parts.states("norm"),
    **heads(),
    embedding="embed_tokens.weight",
    head="lm_head.weight",
    eps_key="rms_norm_eps",
    made_in_fp32=True,
    blind_padding=True,
    dropout={"attention": "attention_dropout", "head": "classifier_dropout"},
    # `pretraining_tp` cut products in slices in older versions, which changes no product.
    free_keys=("max_position_embeddings", "pretraining_tp", "rope_parameters", "rope_scaling", "rope_theta"),
    attributes=StockAttributes(head_size="head_dim", groups="num_key_value_groups"),
    untie="copy",
)

MISTRAL = replace(
    LLAMA,
    name="mistral",
    title="Mistral",
    classes=classes("Mistral"),
    keys=("hidden_act",),
    encoder=layers(block, biases={}),
    free_keys=(*LLAMA.free_keys, "sliding_window"),
)

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    title="Qwen2",
    classes=classes("Qwen2"),
    keys=("hidden_act",),
    encoder=layers(block, biases={"": QUERIES_KEYS_VALUES}),
    free_keys=(*LLAMA.free_keys, "layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
)

QWEN3 = replace(
    QWEN2,
    name="qwen3",
    title="Qwen3",
    classes=classes("Qwen3"),
    keys=("hidden_act", "attention_bias"),
    encoder=layers(block, biases={"attention_bias": ATTENTION}, normed=True),
)

SEED_OSS = replace(
    LLAMA,
    name="seed_oss",
    title="Seed-OSS",
    classes=classes("SeedOss"),
    keys=(*LLAMA.keys, "attention_out_bias"),
    encoder=layers(
        block,
        biases={"attention_bias": QUERIES_KEYS_VALUES, "attention_out_bias": ("o_proj",), "mlp_bias": FEED_FORWARD},
        dropped=True,
    ),
    dropout={**LLAMA.dropout, "branch": "residual_dropout"},
)


def every_fourth_unturned(config: Mapping[str, Any], i: int) -> Sequence[Part]:
    """Return the parts of SmolLM3's layer ``i``. By default, every fourth layer has no rotary positions."""
    biases = {"attention_bias": ATTENTION, "mlp_bias": FEED_FORWARD}
    return block(config, i, biases=biases, turned=bool(config["no_rope_layers"][i]))


SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    title="SmolLM3",
    classes=classes("SmolLM3"),
    keys=(*LLAMA.keys, "no_rope_layer_interval"),
    encoder=Stack("num_hidden_layers", every_fourth_unturned),
    free_keys=(*QWEN2.free_keys, "no_rope_layers"),
)

ERNIE4_5 = replace(
    LLAMA,
    name="ernie4_5",
    title="ERNIE 4.5",
    classes=classes("Ernie4_5", labels=()),
    keys=("hidden_act", "use_bias"),
    encoder=layers(block, biases={"use_bias": (*ATTENTION, *FEED_FORWARD)}, interleaved=True),
    dropout={},
)
