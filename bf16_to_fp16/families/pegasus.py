"""Pegasus, mBART and BigBird-Pegasus.

Pegasus is pre-norm BART with LayerNorm, biases, sinusoidal positions and the embedding as head. LayerNorm's eps (1e-5)
is not in the config. So scaling the residual stream by s changes a norm's output by a share of about eps/(2·s²·var),
which the plan weighs. Positions are scaled with the stream, so they are written even if a file lacks them.

In mBART a norm reads the sum of embedding and learned positions, and its output begins the residual stream. So its gain
and bias are rescaled, but embedding, positions and a tied head are not, and its eps need not change. Each stack's
stream has its own exponent.

For BigBird-Pegasus only ``attention_type: original_full`` is supported, not block-sparse attention. With a
block-sparse config, transformers still uses full attention for inputs of up to (5 + 2·num_random_blocks)·block_size
positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .nested import renamed_signals
from .parts import Style, ends, feed_forward, head, logits, states, table, tied_head, untied_head
from .parts import attention as attention_part
from .signals import LOGITS, RESIDUAL, Kind, Signal, Tensor, input_of, multiplied_by, output_of
from .types import Family, Part, Stack, StockClass
from .wiring import Attention, FeedForward, StackEnds, StockAttributes

if TYPE_CHECKING:
    import torch


def positions(count: int, width: int) -> torch.Tensor:
    """Return fp32 sinusoids [count, width], sines first; the angle of pair k at position p is p / 10000^(2k /
    width)."""
    import torch  # slow to load, and the list of families does not need it

    pair = torch.arange(width, dtype=torch.float64) // 2
    angles = torch.arange(count, dtype=torch.float64)[:, None] / 10000.0 ** (2 * pair / width)
    return torch.cat([torch.sin(angles[:, 0::2]), torch.cos(angles[:, 1::2])], dim=1).float()


LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj")
STYLE = Style(biased=(*LINEARS, "fc1", "fc2"), shifts=True, inner="model", kv_inner="model")


def attention(at: str, module: str, *, memory: bool = False, style: Style = STYLE) -> Part:
    m = f"{at}.{module}"
    wiring = Attention(
        m,
        f"{m}_layer_norm",
        *(f"{m}.{name}" for name in LINEARS),
        memory=memory,
        heads=f"{at.split('.')[0]}_attention_heads",
        add=f"{at}:add#2" if memory else f"{at}:add",
    )
    return attention_part(wiring, style)


def neurons(at: str, config: Mapping[str, object]) -> Part:
    """Return the declaration of a feed-forward; its neurons can be rescaled exactly only with ReLU."""
    stack = at.split(".")[0]
    wiring = FeedForward(
        at=at,
        norm=f"{at}.final_layer_norm",
        gate="",
        linear=f"{at}.fc1",
        output=f"{at}.fc2",
        activation=str(config["activation_function"]),
        act=f"{at}.activation_fn",
        add=f"{at}:add#3" if stack == "decoder" else f"{at}:add#2",
    )
    return feed_forward(wiring, replace(STYLE, ff=f"{stack}_ff"))


def encoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    at = f"encoder.layers.{i}"
    return attention(at, "self_attn"), neurons(at, config)


def decoder_block(config: Mapping[str, object], i: int, style: Style = STYLE) -> Sequence[Part]:
    at = f"decoder.layers.{i}"
    reading = attention(at, "encoder_attn", memory=True, style=style)
    return attention(at, "self_attn", style=style), reading, neurons(at, config)


def stack_ends(at: str, *, norm: str = "layer_norm", **own: Any) -> StackEnds:
    positions = f"{at}.embed_positions.weight"
    how: dict[str, Any] = {"scaled_by": "stack", "switch": "scale_embedding", "positions": positions} | own
    return StackEnds(at, f"{at}.embed_tokens", f"{at}.{norm}", **how)


def stack_records(stack: StackEnds, *tensors: Tensor, **own: Any) -> Part:
    carried = Tensor(stack.positions, ("positions", "model"), (None, multiplied_by(RESIDUAL)), **own)
    return ends(stack, *tensors, carried)


MADE = {
    "absent": "transformers computes missing position embeddings unscaled; convert computes, scales and writes them",
    "generate": positions,
}
SHARED = table("shared.weight")
BODY = "model"  # where the stacks stand in a model with a head
FINAL_NORM = f"{BODY}.decoder.layer_norm"
HEAD = head(f"{BODY}.shared.weight")
LOGITS_BIAS = Tensor(
    "final_logits_bias", ("one", "vocab"), (None, multiplied_by(LOGITS)), absent="transformers uses zeros instead"
)

PEGASUS = Family(
    name="pegasus",
    title="Pegasus",
    classes=(StockClass(("PegasusForConditionalGeneration",), decodes=True, takes_decoder_ids=True, body=BODY),),
    sizes={
        "vocab": ("vocab_size",),
        "model": ("d_model",),
        "encoder_ff": ("encoder_ffn_dim",),
        "decoder_ff": ("decoder_ffn_dim",),
        "positions": ("max_position_embeddings",),
        "one": (),
    },
    keys=("encoder_attention_heads", "decoder_attention_heads", "activation_function", "scale_embedding"),
    encoder=Stack("encoder_layers", encoder_block),
    decoder=Stack("decoder_layers", decoder_block),
    encoder_ends=stack_records(stack_ends("encoder"), SHARED, **MADE),
    encoder_output=states("encoder.layer_norm", STYLE),
    decoder_ends=stack_records(stack_ends("decoder"), **MADE),
    tied_head=tied_head(FINAL_NORM, HEAD, STYLE, LOGITS_BIAS),
    untied_head=untied_head(FINAL_NORM, head("lm_head.weight"), STYLE, LOGITS_BIAS),
    embedding="shared.weight",
    head="lm_head.weight",
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    logits_bias="final_logits_bias",
    eps=1e-5,
    centred_norm=True,
    norm_site="layer_norm",
    dropout={"stream": "dropout", "attention": "attention_dropout", "neurons": "activation_dropout"},
    free_keys=("encoder_layerdrop", "decoder_layerdrop"),
    attributes=StockAttributes(heads="num_heads", head_size="head_dim", embedding_scale="embed_scale"),
    untie="copy",
    ties_all_or_nothing=True,
)


def mbart_ends(at: str, *tensors: Tensor) -> Part:
    norm, positions = f"{at}.layernorm_embedding", f"{at}.embed_positions"
    return Part(
        signals=(
            Signal(f"{at}.embedding", Kind.FIXED, "model", (output_of(f"{at}.embed_tokens"), output_of(positions))),
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(norm), input_of(f"{at}.layer_norm"))),
        ),
        tensors=(
            *tensors,
            Tensor(f"{positions}.weight", ("positions", "model"), (None, None), ahead=2),
            *STYLE.norm(norm, multiplied_by(RESIDUAL)),
        ),
        topology=stack_ends(at, scaled_by="module", first_norm=norm),
    )


DECODER_RESIDUAL = "decoder.residual"  # the decoder's stream, which nothing ties to the encoder's


def of_decoder(part: Part) -> Part:
    return renamed_signals(part, lambda name: DECODER_RESIDUAL if name == RESIDUAL else name)


def mbart_decoder(config: Mapping[str, object], i: int) -> Sequence[Part]:
    return [of_decoder(part) for part in decoder_block(config, i)]


FINAL_STATES = states(FINAL_NORM, STYLE)

MBART = replace(
    PEGASUS,
    name="mbart",
    title="mBART, mBART-50",
    classes=(
        StockClass(("MBartForConditionalGeneration",), decodes=True, takes_decoder_ids=True, body=BODY),
        StockClass(
            ("MBartModel",),
            decodes=True,
            takes_decoder_ids=True,
            end=states("decoder.layer_norm", STYLE),
            gives=("last_hidden_state",),
        ),
    ),
    encoder_ends=mbart_ends("encoder", Tensor("shared.weight", ("vocab", "model"), (None, None))),
    decoder=Stack("decoder_layers", mbart_decoder),
    decoder_ends=of_decoder(mbart_ends("decoder")),
    tied_head=Part(
        (*FINAL_STATES.signals, logits(HEAD)), (*STYLE.norm(FINAL_NORM, multiplied_by(LOGITS)), LOGITS_BIAS), HEAD
    ),
)

BLOCKS = (
    'attention over blocks has no bound yet; write "original_full" there: the weights stay the same, and long'
    " inputs then get full attention, as short inputs already do in transformers"
)


def bigbird_style(config: Mapping[str, object]) -> Style:
    return replace(STYLE, biased=("query", "key", "value", "output", *LINEARS) if config["use_bias"] else ())


def bigbird_encoder(config: Mapping[str, object], i: int) -> Sequence[Part]:
    at = f"encoder.layers.{i}"
    m = f"{at}.self_attn.self"
    wiring = Attention(
        m,
        f"{at}.self_attn_layer_norm",
        f"{m}.query",
        f"{m}.key",
        f"{m}.value",
        f"{at}.self_attn.output",
        heads="encoder_attention_heads",
        add=f"{at}:add",
        divides=True,
        weights_dropout=f"{m}.dropout",
        attributes=StockAttributes(heads="num_attention_heads", head_size="attention_head_size"),
    )
    return attention_part(wiring, bigbird_style(config)), neurons(at, config)


def bigbird_decoder(config: Mapping[str, object], i: int) -> Sequence[Part]:
    return decoder_block(config, i, bigbird_style(config))


FINAL = "layernorm_embedding"
BIGBIRD_NORM = f"{BODY}.decoder.{FINAL}"

BIGBIRD_PEGASUS = replace(
    PEGASUS,
    name="bigbird_pegasus",
    title="BigBird-Pegasus",
    classes=(StockClass(("BigBirdPegasusForConditionalGeneration",), decodes=True, takes_decoder_ids=True, body=BODY),),
    keys=(*PEGASUS.keys, "use_bias"),
    alone={"attention_type": ("original_full", BLOCKS)},
    encoder=Stack("encoder_layers", bigbird_encoder),
    decoder=Stack("decoder_layers", bigbird_decoder),
    encoder_ends=stack_records(stack_ends("encoder", norm=FINAL, scaled_by="module"), SHARED),
    encoder_output=states(f"encoder.{FINAL}", STYLE),
    decoder_ends=stack_records(stack_ends("decoder", norm=FINAL, scaled_by="module")),
    tied_head=tied_head(BIGBIRD_NORM, HEAD, STYLE, LOGITS_BIAS),
    untied_head=untied_head(BIGBIRD_NORM, head("lm_head.weight"), STYLE, LOGITS_BIAS),
    free_keys=(*PEGASUS.free_keys, "block_size", "num_random_blocks"),
)
