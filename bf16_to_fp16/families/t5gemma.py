"""T5Gemma: two stacks of Gemma 2's layers; the second reads the first's output by cross-attention.

Each stack has its own embedding, widths, heads and depth, from a nested config. One eps and one stream exponent serve
both. Cross-attention has no rotary positions. Each stack multiplies its embeddings by √d, where d is the width; √d is
rounded to the embeddings' dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .gemma import CAP, GEMMA2, STYLE, WITHOUT_BIASES, WITHOUT_CAP, gate_norms
from .llama import BODY, check_window, rotary_factor, shared_values, wired_attention, wired_feed_forward
from .parts import Style, attention, ends, feed_forward, head, states, table, tied_head, untied_head
from .types import Part, Stack, StockClass
from .wiring import Rotary, StackEnds


def style(stack: str) -> Style:
    sizes: dict[str, Any] = {name: f"{stack}_{name}" for name in ("model", "inner", "kv_inner", "ff")}
    return replace(STYLE, memory="encoder_model", **sizes)


def block(config: Mapping[str, Any], i: int, stack: str) -> Sequence[Part]:
    check_window(config, f"{stack}.sliding_window")
    at, inner = f"{stack}.layers.{i}", config[stack]
    dropout, own, share = f"{at}.dropout", style(stack), shared_values(inner)
    wiring = wired_attention(
        inner,
        at,
        norm=f"{at}.pre_self_attn_layernorm",
        post_norm=f"{at}.post_self_attn_layernorm",
        heads=f"{stack}.num_attention_heads",
        kv_heads=f"{stack}.num_key_value_heads",
        scale=f"{stack}.query_pre_attn_scalar",
        cap=f"{stack}.attn_logit_softcapping",
        rotary=Rotary(f"{stack}.rotary_emb", rotary_factor(inner)),
        dropout=dropout,
    )
    parts = [attention(wiring, own, share)]
    if stack == "decoder":
        m = f"{at}.cross_attn"
        linears: dict[str, Any] = {name: f"{m}.{name[0]}_proj" for name in ("query", "key", "value", "output")}
        wiring = replace(
            wiring,
            at=m,
            norm=f"{at}.pre_cross_attn_layernorm",
            post_norm=f"{at}.post_cross_attn_layernorm",
            **linears,
            memory=True,
            rotary=None,
            add=f"{at}:add#2",
        )
        parts.append(attention(wiring, own, share))
    gated = wired_feed_forward(
        at,
        inner["hidden_activation"],
        **gate_norms(at),
        add=f"{at}:add#{len(parts) + 1}",
        dropouts=(f"{at}.mlp.dropout", dropout),
    )
    return *parts, feed_forward(gated, own)


def stack_ends(stack: str) -> Part:
    path, dropout = f"{stack}.embed_tokens", f"{stack}.dropout"
    wiring = StackEnds(
        stack, path, f"{stack}.norm", dropouts=(dropout, dropout), scaled_by="stack", table=f"{path}.weight"
    )
    return ends(wiring, table(wiring.table, f"{stack}_model"), model=f"{stack}_model")


FINAL_NORM = f"{BODY}.decoder.norm"
TIED, OWN = (
    head(weight, "lm_head.out_proj", f"decoder.{CAP}")
    for weight in (f"{BODY}.decoder.embed_tokens.weight", "lm_head.out_proj.weight")
)
STACKS = ("encoder", "decoder")


def in_both(key: str) -> tuple[str, str]:
    return f"encoder.{key}", f"decoder.{key}"


T5GEMMA = replace(
    GEMMA2,
    name="t5gemma",
    title="T5Gemma",
    classes=(StockClass(("T5GemmaForConditionalGeneration",), decodes=True, takes_decoder_ids=True, body=BODY),),
    sizes={"vocab": ("vocab_size",), "model": ("decoder.hidden_size",)}
    | {
        f"{stack}_{name}": tuple(f"{stack}.{key}" for key in keys if isinstance(key, str))
        for stack in STACKS
        for name, keys in GEMMA2.sizes.items()
        if name != "vocab"
    },
    keys=tuple(f"{stack}.{key}" for stack in STACKS for key in (*GEMMA2.keys, "vocab_size")),
    encoder=Stack("encoder.num_hidden_layers", partial(block, stack="encoder")),
    decoder=Stack("decoder.num_hidden_layers", partial(block, stack="decoder")),
    encoder_ends=stack_ends("encoder"),
    encoder_output=states("encoder.norm", style("encoder")),
    decoder_ends=stack_ends("decoder"),
    tied_head=tied_head(FINAL_NORM, TIED, style("decoder")),
    untied_head=untied_head(FINAL_NORM, OWN, style("decoder")),
    embedding="decoder.embed_tokens.weight",
    head="lm_head.out_proj.weight",
    eps_key="encoder.rms_norm_eps",
    eps_copies=("decoder.rms_norm_eps",),
    dropout={"stream": "dropout_rate", "attention": "attention_dropout", "neurons": "dropout_rate"},
    free_keys=(*GEMMA2.free_keys, "classifier_dropout_rate"),
    older_notes=dict.fromkeys(in_both("attn_logit_softcapping"), WITHOUT_CAP)
    | {"encoder.sliding_window": "transformers 4.57 attends otherwise in texts longer than the encoder's window"},
    alone={f"{stack}.{key}": why for stack in STACKS for key, why in WITHOUT_BIASES.items()},
    attributes=replace(GEMMA2.attributes, embedding_scale=""),
)
