"""T5 v1.0 and v1.1, Flan-T5, ByT5 and UL2 (``model_type`` t5), and mT5, whose tensors are the same.

Pre-norm, RMSNorm with its eps in the config, no biases, no scaling of scores. v1.0 has ReLU and uses the embedding as
head after multiplying by d^-1/2; v1.1 and its descendants have a gate and a head of their own. The relative attention
bias lives in the first block of each stack and is shared by the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .types import (
    RESIDUAL,
    Attention,
    Axis,
    Deviation,
    DropoutKind,
    Family,
    FeedForward,
    Head,
    HeadLinear,
    Initialisation,
    Kind,
    OutputScale,
    Part,
    SameAs,
    Signal,
    Stack,
    StackEnds,
    StockAttributes,
    StockClass,
    Tensor,
    divided_by,
    input_of,
    multiplied_by,
    output_of,
)


def attention(at: str, module: str, *, bias: bool, memory: bool = False, shared: str = "") -> Part:
    """Return the records of one attention sublayer at ``at``; with ``memory`` keys and values read the encoder's
    output.

    ``shared``: the attention whose position bias it uses, where it has none of its own.
    """
    norm, m = f"{at}.layer_norm", f"{at}.{module}"
    reads = None if memory else divided_by(norm)
    tensors = [
        Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),)),
        Tensor(f"{m}.q.weight", ("inner", "model"), (multiplied_by(f"{m}.query_key"), divided_by(norm))),
        Tensor(f"{m}.k.weight", ("inner", "model"), (divided_by(f"{m}.query_key"), reads)),
        Tensor(f"{m}.v.weight", ("inner", "model"), (multiplied_by(f"{m}.value"), reads)),
        Tensor(f"{m}.o.weight", ("model", "inner"), (multiplied_by(RESIDUAL), divided_by(f"{m}.value"))),
    ]
    if bias:
        tensors.append(Tensor(f"{m}.relative_attention_bias.weight", ("buckets", "heads"), (None, None)))
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (input_of(norm), output_of(f"{m}.o"))),
            Signal(norm, Kind.NORM, "model", (output_of(norm),)),
            Signal(f"{m}.query_key", Kind.QUERY_KEY, "inner", (output_of(f"{m}.q"), output_of(f"{m}.k", -1))),
            Signal(f"{m}.value", Kind.VALUE, "inner", (output_of(f"{m}.v"), input_of(f"{m}.o"))),
        ),
        tensors=tuple(tensors),
        topology=Attention(
            at=m,
            norm=norm,
            query=f"{m}.q",
            key=f"{m}.k",
            value=f"{m}.v",
            output=f"{m}.o",
            memory=memory,
            bias="" if memory else f"{m if bias else shared}.relative_attention_bias.weight",
            heads="num_heads",
            scaled=False,
            add=f"{at}:add",
            dropout=f"{at}.dropout",
        ),
    )


def feed_forward(at: str, config: Mapping[str, object]) -> Part:
    """Return the records of one feed-forward sublayer at ``at``, gated or plain as ``feed_forward_proj`` says."""
    return neurons(at, "DenseReluDense", str(config["feed_forward_proj"]))


def neurons(at: str, module: str, projection: str) -> Part:
    """Return the records of a feed-forward, gated or plain as ``projection`` says, whose linears are in ``module``."""
    norm, m = f"{at}.layer_norm", f"{at}.{module}"
    # Only the linear branch of a gate, or a ReLU, passes a factor through; GELU and SiLU do not.
    linear = "wi_1" if projection.startswith("gated-") else "wi"
    moves = linear == "wi_1" or projection == "relu"
    neuron = f"{m}.neuron"
    out, back = (multiplied_by(neuron), divided_by(neuron)) if moves else (None, None)
    tensors = [
        Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),)),
        Tensor(f"{m}.{linear}.weight", ("ff", "model"), (out, divided_by(norm))),
        Tensor(f"{m}.wo.weight", ("model", "ff"), (multiplied_by(RESIDUAL), back)),
    ]
    signals = [
        Signal(RESIDUAL, Kind.RESIDUAL, "model", (input_of(norm), output_of(f"{m}.wo"))),
        Signal(norm, Kind.NORM, "model", (output_of(norm),)),
        Signal(neuron, Kind.NEURON if moves else Kind.FIXED, "ff", (output_of(f"{m}.{linear}"), input_of(f"{m}.wo"))),
    ]
    if linear == "wi_1":
        tensors.append(Tensor(f"{m}.wi_0.weight", ("ff", "model"), (None, divided_by(norm))))
        signals.append(Signal(f"{m}.gate", Kind.FIXED, "ff", (output_of(f"{m}.wi_0"),)))
    topology = FeedForward(
        at=m,
        norm=norm,
        gate=f"{m}.wi_0" if linear == "wi_1" else "",
        linear=f"{m}.{linear}",
        output=f"{m}.wo",
        activation=activation_of(projection),
        act=f"{m}.act",
        add=f"{at}:add",
        dropouts=(f"{m}.dropout", f"{at}.dropout"),
    )
    return Part(tuple(signals), tuple(tensors), topology)


def activation_of(projection: str) -> str:
    """Return the activation that ``feed_forward_proj`` means; stock code reads "gated-gelu" as gelu_new."""
    name = projection.removeprefix("gated-")
    return "gelu_new" if projection == "gated-gelu" else name


def encoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of encoder block ``i``; the bias of later blocks is absent and shared from the first."""
    at = f"encoder.block.{i}.layer"
    return (
        attention(f"{at}.0", "SelfAttention", bias=i == 0, shared="encoder.block.0.layer.0.SelfAttention"),
        feed_forward(f"{at}.1", config),
    )


def decoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of decoder block ``i``."""
    at = f"decoder.block.{i}.layer"
    return (
        attention(f"{at}.0", "SelfAttention", bias=i == 0, shared="decoder.block.0.layer.0.SelfAttention"),
        attention(f"{at}.1", "EncDecAttention", bias=False, memory=True),
        feed_forward(f"{at}.2", config),
    )


def stack_ends(stack: str) -> StackEnds:
    """Return how a stack begins and ends."""
    return StackEnds(
        at=stack,
        embedding=f"{stack}.embed_tokens",
        positions="",
        scale="",
        norm=f"{stack}.final_layer_norm",
        dropouts=(f"{stack}.dropout",),
    )


ENCODER_NORM, DECODER_NORM = "encoder.final_layer_norm", "decoder.final_layer_norm"


ENCODER_ENDS = Part(
    signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of("encoder.embed_tokens"), input_of(ENCODER_NORM))),),
    tensors=(Tensor("shared.weight", ("vocab", "model"), (None, multiplied_by(RESIDUAL))),),
    topology=stack_ends("encoder"),
)


DECODER_ENDS = Part(
    signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of("decoder.embed_tokens"), input_of(DECODER_NORM))),),
    topology=stack_ends("decoder"),
)


def states(norm: str) -> Part:
    """Return a final norm whose output users read, so that nothing may move it."""
    return Part(
        signals=(Signal(f"{norm.partition('.')[0]}.output", Kind.FIXED, "model", (output_of(norm),)),),
        tensors=(Tensor(f"{norm}.weight", ("model",), (None,)),),
    )


ENCODER_OUTPUT = states(ENCODER_NORM)


LOGITS = Signal("logits", Kind.FIXED, "vocab", (output_of("lm_head"),))


TIED_HEAD = Part(
    signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(DECODER_NORM, -1),)), LOGITS),
    tensors=(Tensor(f"{DECODER_NORM}.weight", ("model",), (divided_by(RESIDUAL),)),),
    topology=Head("lm_head", (HeadLinear("lm_head", "shared.weight"),)),
)


UNTIED_HEAD = Part(
    signals=(Signal(DECODER_NORM, Kind.NORM, "model", (output_of(DECODER_NORM),)), LOGITS),
    tensors=(
        Tensor(f"{DECODER_NORM}.weight", ("model",), (multiplied_by(DECODER_NORM),)),
        Tensor("lm_head.weight", ("vocab", "model"), (None, divided_by(DECODER_NORM))),
    ),
    topology=Head("lm_head", (HeadLinear("lm_head", "lm_head.weight"),)),
)


def head(norm: str, topology: Head, *sizes: str) -> Part:
    """Return a final norm and the head of its own that reads it: linears with biases, whose outputs have these sizes.

    Behind the first of them nothing moves: a tanh passes no factor on, and logits are read.
    """
    tensors = [Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),))]
    signals = [Signal(norm, Kind.NORM, "model", (output_of(norm),))]
    reads: Axis | None = divided_by(norm)
    width = "model"
    for linear, size in zip(topology.linears, sizes, strict=True):
        tensors.append(Tensor(linear.weight, (size, width), (None, reads)))
        tensors.append(Tensor(linear.bias, (size,), (None,)))
        signals.append(Signal(linear.at, Kind.FIXED, size, (output_of(linear.at),)))
        reads, width = None, size
    return Part(tuple(signals), tuple(tensors), topology)


def head_linear(at: str, tanh: str = "") -> HeadLinear:
    """Return a linear of a head with a bias."""
    return HeadLinear(at, f"{at}.weight", f"{at}.bias", tanh)


CLASSIFIER = head(
    f"transformer.{DECODER_NORM}",
    Head(
        "classification_head",
        (
            head_linear("classification_head.dense", "classification_head:tanh"),
            head_linear("classification_head.out_proj"),
        ),
        dropout="classification_head.dropout",
    ),
    "model",
    "labels",
)


TOKEN_CLASSIFIER = head(
    f"transformer.{ENCODER_NORM}", Head("classifier", (head_linear("classifier"),), dropout="dropout"), "labels"
)


SPANS = head(DECODER_NORM, Head("qa_outputs", (head_linear("qa_outputs"),)), "labels")


STATES = ("last_hidden_state",)


def classes(prefix: str, *older: str) -> tuple[StockClass, ...]:
    """Return the stock classes whose names begin with ``prefix``; older: other names of the language model."""
    return (
        StockClass((f"{prefix}ForConditionalGeneration", *older), decodes=True, takes_decoder_ids=True, end=None),
        StockClass(
            (f"{prefix}EncoderModel",), decodes=False, takes_decoder_ids=False, end=ENCODER_OUTPUT, gives=STATES
        ),
        StockClass((f"{prefix}Model",), decodes=True, takes_decoder_ids=True, end=states(DECODER_NORM), gives=STATES),
        StockClass(
            (f"{prefix}ForSequenceClassification",),
            decodes=True,
            takes_decoder_ids=False,
            end=CLASSIFIER,
            body="transformer",
            reads_end_token=True,
        ),
        StockClass(
            (f"{prefix}ForTokenClassification",),
            decodes=False,
            takes_decoder_ids=False,
            end=TOKEN_CLASSIFIER,
            body="transformer",
        ),
        StockClass(
            (f"{prefix}ForQuestionAnswering",),
            decodes=True,
            takes_decoder_ids=False,
            end=SPANS,
            gives=("start_logits", "end_logits"),
        ),
    )


SIZES = {
    "vocab": ("vocab_size",),
    "model": ("d_model",),
    "inner": ("num_heads", "d_kv"),
    "ff": ("d_ff",),
    "heads": ("num_heads",),
    "head": ("d_kv",),
    "buckets": ("relative_attention_num_buckets",),
    "labels": ("id2label",),
}


COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


IGNORABLE = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


DEFAULTS = {
    "num_decoder_layers": SameAs("num_layers"),
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "tie_word_embeddings": True,
    "dropout_rate": 0.1,
    "classifier_dropout": 0.0,
    "id2label": SameAs("num_labels"),
    "num_labels": 2,
}


DROPOUT: Mapping[DropoutKind, str] = {
    "stream": "dropout_rate",
    "attention": "dropout_rate",
    "neurons": "dropout_rate",
    "head": "classifier_dropout",
}


# Scores are not scaled: queries begin smaller by 1/√d_kv instead.
QUERIES, INPUTS = Deviation(("model", "head")), Deviation(("model",))


INITIALISATION = Initialisation(
    title="T5",
    factor="initializer_factor",
    default=1.0,
    modules={
        "shared": Deviation(),
        "embed_tokens": Deviation(),
        "lm_head": Deviation(),
        "q": QUERIES,
        "k": INPUTS,
        "v": INPUTS,
        "o": Deviation(("inner",)),
        "relative_attention_bias": INPUTS,
        "wi": INPUTS,
        "wi_0": INPUTS,
        "wi_1": INPUTS,
        "wo": Deviation(("ff",)),
        "layer_norm": Deviation(),
        "final_layer_norm": Deviation(),
    },
    shown=("shared", "q", "k", "v", "o", "wi", "wo"),
    alike=("udop", "pop2piano"),
)


T5 = Family(
    name="t5",
    title="T5 v1.0, T5 v1.1, Flan-T5, ByT5, UL2",
    model_type="t5",
    # t5-3b and t5-11b on the Hub still carry the class name of 2020.
    classes=classes("T5", "T5WithLMHeadModel"),
    sizes=SIZES,
    defaults=DEFAULTS | {"feed_forward_proj": "relu"},
    encoder=Stack("num_layers", encoder_block),
    decoder=Stack("num_decoder_layers", decoder_block),
    encoder_ends=ENCODER_ENDS,
    encoder_output=ENCODER_OUTPUT,
    decoder_ends=DECODER_ENDS,
    tied_head=TIED_HEAD,
    untied_head=UNTIED_HEAD,
    embedding="shared.weight",
    head="lm_head.weight",
    copies=COPIES,
    ignorable=IGNORABLE,
    logits_bias="",
    # T5Config reads tie_word_embeddings as "scale the outputs", unless an explicit key overrides that.
    output_scale=OutputScale.CONFIG,
    output_scale_key="scale_decoder_outputs",
    kept_in_fp32=("wo",),
    eps_key="layer_norm_epsilon",
    eps=1e-6,
    centred_norm=False,
    norm_site="mul#2",
    dropout=DROPOUT,
    free_keys=(),
    buckets=("relative_attention_num_buckets", "relative_attention_max_distance"),
    attributes=StockAttributes(heads="n_heads", head_size="key_value_proj_dim"),
    initialisation=INITIALISATION,
    untie="scaled",
    older_scales_tied=True,
)
