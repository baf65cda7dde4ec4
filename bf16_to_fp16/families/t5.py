"""T5 v1.0 and v1.1, Flan-T5, ByT5 and UL2 (``model_type`` t5), mT5, UMT5 and LongT5.

Pre-norm, RMSNorm with its eps in the config, no biases, no scaling of scores. v1.0 has ReLU and a tied head, and
multiplies the head's input by d^-1/2, where d is the width. v1.1 and its descendants have a gate and a separate head.
A stack's blocks share the first one's relative attention bias, except in UMT5.

LongT5 is T5 v1.1 with an encoder that attends locally, which changes only the mask. With ``transient-global`` the
encoder also attends to sums of the norm's output over blocks of positions. A second norm normalises these sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import UserError
from .parts import Style, ends, feed_forward, head, head_linear, states, table, tied_head, untied_head
from .parts import attention as attention_part
from .signals import RESIDUAL, Axis, Kind, Signal, Tensor, input_of, multiplied_by, output_of
from .types import Family, OutputScale, Part, Stack, StockClass
from .wiring import Attention, FeedForward, Head, StackEnds, StockAttributes

STYLE = Style(kv_inner="inner")


def attention(at: str, module: str, *, bias: bool, memory: bool = False, shared: str = "") -> Part:
    """Return an attention's declaration. bias: whether the attention has its own position bias. shared: the path of
    another attention, whose position bias is added if ``bias`` and ``memory`` are false."""
    m = f"{at}.{module}"
    wiring = Attention(
        m,
        f"{at}.layer_norm",
        *(f"{m}.{name}" for name in "qkvo"),
        memory=memory,
        bias="" if memory else f"{m if bias else shared}.relative_attention_bias.weight",
        heads="num_heads",
        scaled=False,
        add=f"{at}:add",
        dropout=f"{at}.dropout",
    )
    return with_table(attention_part(wiring, STYLE), wiring.bias) if bias else attention_part(wiring, STYLE)


def with_table(part: Part, name: str) -> Part:
    return replace(part, tensors=(*part.tensors, Tensor(name, ("buckets", "heads"), (None, None))))


def neurons(at: str, feed_forward_proj: str, module: str = "DenseReluDense") -> Part:
    """Return the declaration of a feed-forward. As in transformers, "gated-gelu" means a gate with gelu_new."""
    m, gated = f"{at}.{module}", feed_forward_proj.startswith("gated-")
    return feed_forward(
        FeedForward(
            at=m,
            norm=f"{at}.layer_norm",
            gate=f"{m}.wi_0" if gated else "",
            linear=f"{m}.wi_1" if gated else f"{m}.wi",
            output=f"{m}.wo",
            activation="gelu_new" if feed_forward_proj == "gated-gelu" else feed_forward_proj.removeprefix("gated-"),
            act=f"{m}.act",
            add=f"{at}:add",
            dropouts=(f"{m}.dropout", f"{at}.dropout"),
        )
    )


def blocks(*, every: bool = False) -> tuple[Stack, Stack]:
    """Return T5's encoder and decoder. every: whether every block has a position bias, not only the first."""

    def attending(stack: str, i: int) -> Part:
        first = f"{stack}.block.0.layer.0.SelfAttention"
        return attention(f"{stack}.block.{i}.layer.0", "SelfAttention", bias=every or i == 0, shared=first)

    def encoder(config: Mapping[str, object], i: int) -> Sequence[Part]:
        return attending("encoder", i), neurons(f"encoder.block.{i}.layer.1", str(config["feed_forward_proj"]))

    def decoder(config: Mapping[str, object], i: int) -> Sequence[Part]:
        at = f"decoder.block.{i}.layer"
        reading = attention(f"{at}.1", "EncDecAttention", bias=False, memory=True)
        return attending("decoder", i), reading, neurons(f"{at}.2", str(config["feed_forward_proj"]))

    return Stack("num_layers", encoder), Stack("num_decoder_layers", decoder)


ENCODER, DECODER = blocks()
ENCODER_NORM, DECODER_NORM = "encoder.final_layer_norm", "decoder.final_layer_norm"


def stack_ends(stack: str, *tensors: Tensor) -> Part:
    wiring = StackEnds(stack, f"{stack}.embed_tokens", f"{stack}.final_layer_norm", dropouts=(f"{stack}.dropout",))
    return ends(wiring, *tensors)


CLASSIFIER = untied_head(
    f"transformer.{DECODER_NORM}",
    Head(
        "classification_head",
        (
            head_linear("classification_head.dense", "classification_head:tanh"),
            head_linear("classification_head.out_proj"),
        ),
        dropout="classification_head.dropout",
    ),
    sizes=("model", "labels"),
)

TOKEN_CLASSIFIER = untied_head(
    f"transformer.{ENCODER_NORM}",
    Head("classifier", (head_linear("classifier"),), dropout="dropout"),
    sizes=("labels",),
)

SPANS = untied_head(DECODER_NORM, Head("qa_outputs", (head_linear("qa_outputs"),)), sizes=("labels",))

ENCODER_OUTPUT = states(ENCODER_NORM)
STATES = ("last_hidden_state",)


def classes(prefix: str, *older: str) -> tuple[StockClass, ...]:
    def named(name: str, end: Part | None, **own: Any) -> StockClass:
        return StockClass((f"{prefix}{name}",), end=end, **own)

    return (
        StockClass((f"{prefix}ForConditionalGeneration", *older), decodes=True, takes_decoder_ids=True),
        named("EncoderModel", ENCODER_OUTPUT, gives=STATES),
        named("Model", states(DECODER_NORM), decodes=True, takes_decoder_ids=True, gives=STATES),
        named("ForSequenceClassification", CLASSIFIER, decodes=True, body="transformer", reads_end_token=True),
        named("ForTokenClassification", TOKEN_CLASSIFIER, body="transformer"),
        named("ForQuestionAnswering", SPANS, decodes=True, gives=("start_logits", "end_logits")),
    )


SIZES = {
    "vocab": ("vocab_size",),
    "model": ("d_model",),
    "inner": ("num_heads", "d_kv"),
    "ff": ("d_ff",),
    "heads": ("num_heads",),
    "buckets": ("relative_attention_num_buckets",),
    "labels": ("id2label",),
}

T5 = Family(
    name="t5",
    title="T5 v1.0, T5 v1.1, Flan-T5, ByT5, UL2",
    # t5-3b and t5-11b on the Hub still carry the class name of 2020.
    classes=classes("T5", "T5WithLMHeadModel"),
    sizes=SIZES,
    keys=("feed_forward_proj", "relative_attention_max_distance"),
    encoder=ENCODER,
    decoder=DECODER,
    encoder_ends=stack_ends("encoder", table("shared.weight")),
    encoder_output=ENCODER_OUTPUT,
    decoder_ends=stack_ends("decoder"),
    tied_head=tied_head(DECODER_NORM, head("shared.weight")),
    untied_head=untied_head(DECODER_NORM, head("lm_head.weight")),
    embedding="shared.weight",
    head="lm_head.weight",
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ignorable=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    # T5Config reads tie_word_embeddings as "scale the outputs", unless an explicit key overrides it.
    output_scale=OutputScale.CONFIG,
    output_scale_key="scale_decoder_outputs",
    kept_in_fp32=("wo",),
    eps_key="layer_norm_epsilon",
    dropout={**dict.fromkeys(("stream", "attention", "neurons"), "dropout_rate"), "head": "classifier_dropout"},
    attributes=StockAttributes(heads="n_heads", head_size="key_value_proj_dim"),
    untie="scaled",
    older_scales_tied=True,
)

MT5 = replace(T5, name="mt5", title="mT5", classes=classes("MT5"), output_scale=OutputScale.NEVER, untie="")
"""mT5 has T5 v1.1's tensors. Transformers 5 never multiplies the decoder's output before the head; transformers 4 does
if the config ties the head. So a tied mT5 stays tied: no stored head suits both versions."""

UMT5_ENCODER, UMT5_DECODER = blocks(every=True)

UMT5 = replace(
    MT5,
    name="umt5",
    title="UMT5",
    classes=classes("UMT5"),
    encoder=UMT5_ENCODER,
    decoder=UMT5_DECODER,
    ignorable=(),
    output_scale=OutputScale.ALWAYS,
)
"""UMT5 is mT5 with a position bias in every block. Before an untied head, transformers 5 always multiplies the
decoder's output by d^-1/2, and transformers 4 only if the config says tied. Rescaling keeps what each version computes
on the source."""

TYPE = "encoder_attention_type"
LOCAL, GLOBAL = "local", "transient-global"
MODULES = {LOCAL: "LocalSelfAttention", GLOBAL: "TransientGlobalSelfAttention"}


def long_attention(at: str, config: Mapping[str, object], i: int) -> Part:
    module = MODULES.get(str(config[TYPE]))
    if module is None:
        raise UserError(
            f"config.json: {TYPE!r} is {config[TYPE]!r}, which transformers does not know; set it to"
            f" {' or '.join(map(repr, MODULES))}"
        )
    first = f"encoder.block.0.layer.0.{module}"
    part = attention(at, module, bias=i == 0, shared=first)
    wiring = part.topology
    assert isinstance(wiring, Attention)
    wiring = replace(wiring, radius="local_radius")
    if module != MODULES[GLOBAL]:
        return replace(part, topology=wiring)
    norm, inner = wiring.norm, f"{wiring.at}.global_input_layer_norm"
    bias = f"{first}.global_relative_attention_bias.weight"

    # All norms share one eps, and ``inner`` reads sums of the output of ``norm``. So this output must have the residual
    # stream's factor in every channel.
    def of_the_stream(axis: Axis | None) -> Axis | None:
        return replace(axis, signal=RESIDUAL) if axis is not None and axis.signal == norm else axis

    tensors = [replace(t, axes=tuple(map(of_the_stream, t.axes))) for t in part.tensors]
    tensors.append(Tensor(f"{inner}.weight", ("model",), (multiplied_by(RESIDUAL),)))
    carried = Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(norm), input_of(inner), output_of(inner)))
    signals = tuple(carried if signal.name == norm else signal for signal in part.signals)
    wiring = replace(wiring, block="global_block_size", block_norm=inner, block_bias=bias)
    full = Part(signals, tuple(tensors), wiring)
    return with_table(full, bias) if i == 0 else full


def long_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    at = f"encoder.block.{i}.layer"
    return long_attention(f"{at}.0", config, i), neurons(f"{at}.1", str(config["feed_forward_proj"]))


LONGT5 = replace(
    T5,
    name="longt5",
    title="LongT5",
    classes=classes("LongT5")[:3],
    keys=(*T5.keys, TYPE, "local_radius", "global_block_size"),
    encoder=Stack("num_layers", long_block),
    kept_in_fp32=(),
    variants=({TYPE: GLOBAL},),
)
