"""Gemma 2: a causal language model with norms on both sides of every sublayer, and soft caps on scores and logits.

As Gemma 3 without norms of queries and keys: a factor passes a rotation where both channels of a pair have it, and one
head of keys serves several of queries, so queries and keys have one exponent for each pair of channels of each head of
keys. A cap bounds what follows it, and no exponent moves a score. The parts of a sublayer are made from how it is
wired, for the families that share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .gemma3 import BODY, GEMMA3, STATES, WITHOUT_BIASES, check_window, classes, gain, shared_values, with_head
from .types import (
    OLDER_ROTARY,
    RESIDUAL,
    Attention,
    FeedForward,
    Kind,
    Part,
    Signal,
    Spread,
    Stack,
    Tensor,
    divided_by,
    input_of,
    multiplied_by,
    output_of,
)


def stream_and_norms(w: Attention | FeedForward, model: str = "model") -> tuple[tuple[Signal, ...], tuple[Tensor, ...]]:
    """Return what a sublayer shows of the residual stream and of its norms, and the gains of those; model: the width.

    Gains are stored less 1, so that a factor on them rounds: only that of a norm behind the sublayer moves.
    """
    seen, tensors = [input_of(w.norm), output_of(w.output)], [gain(w.norm, model)]
    if w.post_norm:
        seen += [input_of(w.post_norm), output_of(w.post_norm)]
        tensors.append(Tensor(f"{w.post_norm}.weight", (model,), (multiplied_by(RESIDUAL),), offset=1.0))
    signals = (
        Signal(RESIDUAL, Kind.RESIDUAL, model, tuple(seen)),
        Signal(w.norm, Kind.FIXED, model, (output_of(w.norm),)),
    )
    return signals, tuple(tensors)


def attention(w: Attention, config: Mapping[str, object], stack: str = "", memory: str = "") -> Part:
    """Return the records of an attention that is wired as ``w``: several heads of queries share those of keys and
    values, without norms of either.

    stack: what the names of its sizes begin with, and config keys inside the config of that name. memory: size of what
    keys and values read, "" for the stream's.
    """
    model, inner, kv_inner = (f"{stack}_{name}".removeprefix("_") for name in ("model", "inner", "kv_inner"))
    kv_heads, heads, size = group = shared_values(config, f"{stack}." if stack else "")
    query_key, value = f"{w.at}.query_key", f"{w.at}.value"
    read: Spread = group
    of_keys: Spread = ()
    if w.rotary:
        read, of_keys = (kv_heads, 2 * heads, size // 2), (kv_heads, 2, size // 2)
    stream, gains = stream_and_norms(w, model)
    memory = memory or model
    return Part(
        signals=(
            *stream,
            Signal(
                query_key,
                Kind.QUERY_KEY,
                kv_inner,
                (output_of(w.query, spread=read), output_of(w.key, -1, of_keys)),
                of_keys,
            ),
            Signal(value, Kind.VALUE, kv_inner, (output_of(w.value), input_of(w.output, group))),
        ),
        tensors=(
            *gains,
            Tensor(f"{w.query}.weight", (inner, model), (multiplied_by(query_key, read), None)),
            Tensor(f"{w.key}.weight", (kv_inner, memory), (divided_by(query_key, of_keys), None)),
            Tensor(f"{w.value}.weight", (kv_inner, memory), (multiplied_by(value), None)),
            Tensor(f"{w.output}.weight", (model, inner), (multiplied_by(RESIDUAL), divided_by(value, group))),
        ),
        topology=w,
    )


def feed_forward(w: FeedForward, stack: str = "") -> Part:
    """Return the records of a gated feed-forward that is wired as ``w``; stack: as in ``attention``."""
    neuron = f"{w.at}.neuron"
    model, ff = (f"{stack}_{name}".removeprefix("_") for name in ("model", "ff"))
    stream, gains = stream_and_norms(w, model)
    return Part(
        signals=(
            *stream,
            Signal(neuron, Kind.NEURON, ff, (output_of(w.linear), input_of(w.output))),
            Signal(f"{w.at}.gate", Kind.FIXED, ff, (output_of(w.gate),)),
        ),
        tensors=(
            *gains,
            Tensor(f"{w.gate}.weight", (ff, model), (None, None)),
            Tensor(f"{w.linear}.weight", (ff, model), (multiplied_by(neuron), None)),
            Tensor(f"{w.output}.weight", (model, ff), (multiplied_by(RESIDUAL), divided_by(neuron))),
        ),
        topology=w,
    )


def wired_attention(at: str) -> Attention:
    """Return how the attention of a layer without a norm behind it is wired."""
    m = f"{at}.self_attn"
    return Attention(
        at=m,
        norm=f"{at}.input_layernorm",
        query=f"{m}.q_proj",
        key=f"{m}.k_proj",
        value=f"{m}.v_proj",
        output=f"{m}.o_proj",
        memory=False,
        bias="",
        heads="num_attention_heads",
        scaled=True,
        add=f"{at}:add",
        rotary="rotary_emb",
        kv_heads="num_key_value_heads",
    )


def wired_feed_forward(at: str, norm: str, activation: object) -> FeedForward:
    """Return how the feed-forward of a layer without a norm behind it is wired."""
    m = f"{at}.mlp"
    return FeedForward(
        at=m,
        norm=f"{at}.{norm}",
        gate=f"{m}.gate_proj",
        linear=f"{m}.up_proj",
        output=f"{m}.down_proj",
        activation=str(activation),
        act=f"{m}.act_fn",
        add=f"{at}:add#2",
    )


def block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of layer ``i``; raise UserError for a config with a part that no record states."""
    check_window(config)
    at = f"layers.{i}"
    w = replace(
        wired_attention(at),
        post_norm=f"{at}.post_attention_layernorm",
        scale="query_pre_attn_scalar",
        cap="attn_logit_softcapping",
    )
    f = wired_feed_forward(at, "pre_feedforward_layernorm", config["hidden_activation"])
    return attention(w, config), feed_forward(replace(f, post_norm=f"{at}.post_feedforward_layernorm"))


WITHOUT_CAP = (
    "transformers 4.57 leaves out the cap on scores, of the source as well, unless attn_implementation is 'eager'"
)

GEMMA2 = replace(
    GEMMA3,
    name="gemma2",
    title="Gemma 2",
    model_type="gemma2",
    classes=classes("Gemma2ForCausalLM", "Gemma2Model", STATES),
    older_rotary=OLDER_ROTARY,
    older_notes={"attn_logit_softcapping": WITHOUT_CAP},
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    encoder=Stack("num_hidden_layers", block),
    tied_head=with_head(f"{BODY}.embed_tokens.weight", tied=True),
    untied_head=with_head("lm_head.weight", tied=False),
    nullable=("attn_logit_softcapping", "final_logit_softcapping"),
    alone=WITHOUT_BIASES,
    initialisation=replace(GEMMA3.initialisation, title="Gemma 2"),
)
