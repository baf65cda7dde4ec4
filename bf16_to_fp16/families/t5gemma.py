"""T5Gemma: two stacks of Gemma 2's layers, the second of which reads the first through an attention of its own.

Each stack has its own embedding, widths, heads and depth, from a config inside the config; the norms of both share one
eps, as they share the stream's exponent. The attention between them has no positions, so its queries and keys move
channel by channel. The embeddings are multiplied by √d in the stack, rounded to their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .gemma2 import GEMMA2, WITHOUT_CAP, attention, feed_forward, wired_attention, wired_feed_forward
from .gemma3 import BODY, WITHOUT_BIASES, check_window, gain
from .types import (
    RESIDUAL,
    Head,
    HeadLinear,
    Kind,
    Part,
    SameAs,
    Signal,
    Stack,
    StackEnds,
    StockClass,
    Tensor,
    divided_by,
    input_of,
    multiplied_by,
    output_of,
)


def block(config: Mapping[str, object], i: int, stack: str) -> Sequence[Part]:
    """Return the parts of layer ``i`` of a stack; raise UserError for a config with a part that no record states."""
    check_window(config, f"{stack}.sliding_window")
    at = f"{stack}.layers.{i}"
    dropout = f"{at}.dropout"
    own = replace(
        wired_attention(at),
        norm=f"{at}.pre_self_attn_layernorm",
        post_norm=f"{at}.post_self_attn_layernorm",
        heads=f"{stack}.num_attention_heads",
        kv_heads=f"{stack}.num_key_value_heads",
        scale=f"{stack}.query_pre_attn_scalar",
        cap=f"{stack}.attn_logit_softcapping",
        rotary=f"{stack}.rotary_emb",
        dropout=dropout,
    )
    m = f"{at}.cross_attn"
    cross = replace(
        own,
        at=m,
        norm=f"{at}.pre_cross_attn_layernorm",
        post_norm=f"{at}.post_cross_attn_layernorm",
        query=f"{m}.q_proj",
        key=f"{m}.k_proj",
        value=f"{m}.v_proj",
        output=f"{m}.o_proj",
        memory=True,
        rotary="",
        add=f"{at}:add#2",
    )
    decodes = stack == "decoder"
    gated = replace(
        wired_feed_forward(at, "pre_feedforward_layernorm", config[f"{stack}.hidden_activation"]),
        post_norm=f"{at}.post_feedforward_layernorm",
        add=f"{at}:add#3" if decodes else f"{at}:add#2",
        dropouts=(f"{at}.mlp.dropout", dropout),
    )
    between = (attention(cross, config, stack, "encoder_model"),) if decodes else ()
    return (attention(own, config, stack), *between, feed_forward(gated, stack))


def encoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of encoder layer ``i``."""
    return block(config, i, "encoder")


def decoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of decoder layer ``i``."""
    return block(config, i, "decoder")


def ends(stack: str) -> Part:
    """Return where a stack begins and ends, with an embedding of its own."""
    table, norm = f"{stack}.embed_tokens", f"{stack}.norm"
    return Part(
        (Signal(RESIDUAL, Kind.RESIDUAL, f"{stack}_model", (output_of(table), input_of(norm))),),
        (Tensor(f"{table}.weight", ("vocab", f"{stack}_model"), (None, multiplied_by(RESIDUAL))),),
        StackEnds(
            at=stack,
            embedding=table,
            positions="",
            scale="",
            norm=norm,
            dropouts=(f"{stack}.dropout", f"{stack}.dropout"),
            scales=True,
            table=f"{table}.weight",
        ),
    )


def with_head(weight: str, *, tied: bool) -> Part:
    """Return the decoder's final norm and the head that reads it."""
    norm = f"{BODY}.decoder.norm"
    seen = Signal(f"{norm}.output", Kind.FIXED, "decoder_model", (output_of(norm),))
    gains = gain(norm, "decoder_model")
    if tied:
        seen = Signal(RESIDUAL, Kind.RESIDUAL, "decoder_model", (output_of(norm, -1),))
        gains = replace(gains, axes=(divided_by(RESIDUAL),))
    own = () if tied else (Tensor(weight, ("vocab", "decoder_model"), (None, None)),)
    return Part(
        (seen, Signal("logits", Kind.FIXED, "vocab", (output_of("lm_head.out_proj"),))),
        (gains, *own),
        Head("lm_head", (HeadLinear("lm_head.out_proj", weight),), cap="decoder.final_logit_softcapping"),
    )


STACKS = ("encoder", "decoder")


def in_both(key: str) -> tuple[str, str]:
    """Return a config key inside the configs of both stacks."""
    return f"encoder.{key}", f"decoder.{key}"


T5GEMMA = replace(
    GEMMA2,
    name="t5gemma",
    title="T5Gemma",
    model_type="t5gemma",
    classes=(
        StockClass(("T5GemmaForConditionalGeneration",), decodes=True, takes_decoder_ids=True, end=None, body=BODY),
    ),
    sizes={"vocab": ("vocab_size",), "model": ("decoder.hidden_size",)}
    | {
        f"{stack}_{name}": tuple(f"{stack}.{key}" for key in keys if isinstance(key, str))
        for stack in STACKS
        for name, keys in GEMMA2.sizes.items()
        if name != "vocab"
    },
    defaults={
        "vocab_size": 256_000,
        "dropout_rate": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        **{
            f"{stack}.{key}": SameAs("vocab_size") if key == "vocab_size" else value
            for stack in STACKS
            for key, value in GEMMA2.defaults.items()
            if key not in ("attention_dropout", "tie_word_embeddings")
        },
    },
    encoder=Stack("encoder.num_hidden_layers", encoder_block),
    decoder=Stack("decoder.num_hidden_layers", decoder_block),
    encoder_ends=ends("encoder"),
    encoder_output=Part(
        (Signal("encoder.output", Kind.FIXED, "encoder_model", (output_of("encoder.norm"),)),),
        (gain("encoder.norm", "encoder_model"),),
    ),
    decoder_ends=ends("decoder"),
    tied_head=with_head(f"{BODY}.decoder.embed_tokens.weight", tied=True),
    untied_head=with_head("lm_head.out_proj.weight", tied=False),
    embedding="decoder.embed_tokens.weight",
    head="lm_head.out_proj.weight",
    eps_key="encoder.rms_norm_eps",
    eps_copies=("decoder.rms_norm_eps",),
    dropout={"stream": "dropout_rate", "attention": "attention_dropout", "neurons": "dropout_rate"},
    free_keys=(*GEMMA2.free_keys, "classifier_dropout_rate"),
    older_notes=dict.fromkeys(in_both("attn_logit_softcapping"), WITHOUT_CAP)
    | {"encoder.sliding_window": "transformers 4.57 attends otherwise in texts longer than the encoder's window"},
    nullable=(*in_both("attn_logit_softcapping"), *in_both("final_logit_softcapping")),
    alone={f"{stack}.{key}": why for stack in STACKS for key, why in WITHOUT_BIASES.items()},
    attributes=replace(GEMMA2.attributes, embedding_scale=""),
    initialisation=replace(GEMMA2.initialisation, title="T5Gemma"),
)
