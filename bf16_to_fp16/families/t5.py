"""T5 v1.0 and v1.1, Flan-T5, ByT5 and UL2 (``model_type`` t5), and mT5, whose tensors are the same.

Pre-norm, RMSNorm with its eps in the config, no biases, no scaling of scores. v1.0 has ReLU and uses the embedding as
head after multiplying by d^-1/2; v1.1 and its descendants have a gate and a head of their own. The relative attention
bias lives in the first block of each stack and is shared by the others.
"""

from collections.abc import Mapping, Sequence

from .types import RESIDUAL, Attention, Ends, Family, FeedForward, Kind, Part, Signal, Stack, Tensor


def attention(at: str, module: str, *, bias: bool, memory: bool = False, shared: str = "") -> Part:
    """Return the records of one attention sublayer at ``at``; with ``memory`` keys and values read the encoder's
    output.

    ``shared``: the attention whose position bias it uses, where it has none of its own.
    """
    norm, m = f"{at}.layer_norm", f"{at}.{module}"
    reads = "" if memory else f"-{norm}"
    tensors = [
        Tensor(f"{norm}.weight", ("model",), (f"+{norm}",)),
        Tensor(f"{m}.q.weight", ("inner", "model"), (f"+{m}.query_key", f"-{norm}")),
        Tensor(f"{m}.k.weight", ("inner", "model"), (f"-{m}.query_key", reads)),
        Tensor(f"{m}.v.weight", ("inner", "model"), (f"+{m}.value", reads)),
        Tensor(f"{m}.o.weight", ("model", "inner"), (f"+{RESIDUAL}", f"-{m}.value")),
    ]
    if bias:
        tensors.append(Tensor(f"{m}.relative_attention_bias.weight", ("buckets", "heads"), ("", "")))
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (f"+{norm}:input", f"+{m}.o:output")),
            Signal(norm, Kind.NORM, "model", (f"+{norm}:output",)),
            Signal(f"{m}.query_key", Kind.QUERY_KEY, "inner", (f"+{m}.q:output", f"-{m}.k:output")),
            Signal(f"{m}.value", Kind.VALUE, "inner", (f"+{m}.v:output", f"+{m}.o:input")),
        ),
        tensors=tuple(tensors),
        wiring=Attention(
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
    norm, m = f"{at}.layer_norm", f"{at}.DenseReluDense"
    projection = str(config["feed_forward_proj"])
    # Only the linear branch of a gate, or a ReLU, passes a factor through; GELU and SiLU do not.
    linear = "wi_1" if projection.startswith("gated-") else "wi"
    moves = linear == "wi_1" or projection == "relu"
    neuron = f"{m}.neuron"
    out, back = (f"+{neuron}", f"-{neuron}") if moves else ("", "")
    tensors = [
        Tensor(f"{norm}.weight", ("model",), (f"+{norm}",)),
        Tensor(f"{m}.{linear}.weight", ("ff", "model"), (out, f"-{norm}")),
        Tensor(f"{m}.wo.weight", ("model", "ff"), (f"+{RESIDUAL}", back)),
    ]
    signals = [
        Signal(RESIDUAL, Kind.RESIDUAL, "model", (f"+{norm}:input", f"+{m}.wo:output")),
        Signal(norm, Kind.NORM, "model", (f"+{norm}:output",)),
        Signal(neuron, Kind.NEURON if moves else Kind.FIXED, "ff", (f"+{m}.{linear}:output", f"+{m}.wo:input")),
    ]
    if linear == "wi_1":
        tensors.append(Tensor(f"{m}.wi_0.weight", ("ff", "model"), ("", f"-{norm}")))
        signals.append(Signal(f"{m}.gate", Kind.FIXED, "ff", (f"+{m}.wi_0:output",)))
    wiring = FeedForward(
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
    return Part(tuple(signals), tuple(tensors), wiring)


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


def ends(stack: str) -> Ends:
    """Return how a stack begins and ends."""
    return Ends(
        at=stack,
        embedding=f"{stack}.embed_tokens",
        positions="",
        scale="",
        norm=f"{stack}.final_layer_norm",
        dropouts=(f"{stack}.dropout",),
    )


ENCODER_ENDS = Part(
    signals=(
        Signal(RESIDUAL, Kind.RESIDUAL, "model", ("+encoder.embed_tokens:output", "+encoder.final_layer_norm:input")),
        # Users of the encoder read this output, so nothing may move it.
        Signal("encoder.output", Kind.FIXED, "model", ("+encoder.final_layer_norm:output",)),
    ),
    tensors=(
        Tensor("shared.weight", ("vocab", "model"), ("", f"+{RESIDUAL}")),
        Tensor("encoder.final_layer_norm.weight", ("model",), ("",)),
    ),
    wiring=ends("encoder"),
)
DECODER_ENDS = Part(
    signals=(
        Signal(RESIDUAL, Kind.RESIDUAL, "model", ("+decoder.embed_tokens:output", "+decoder.final_layer_norm:input")),
        Signal("logits", Kind.FIXED, "vocab", ("+lm_head:output",)),
    ),
    wiring=ends("decoder"),
)
TIED_HEAD = Part(
    signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", ("-decoder.final_layer_norm:output",)),),
    tensors=(Tensor("decoder.final_layer_norm.weight", ("model",), (f"-{RESIDUAL}",)),),
)
UNTIED_HEAD = Part(
    signals=(Signal("decoder.final_layer_norm", Kind.NORM, "model", ("+decoder.final_layer_norm:output",)),),
    tensors=(
        Tensor("decoder.final_layer_norm.weight", ("model",), ("+decoder.final_layer_norm",)),
        Tensor("lm_head.weight", ("vocab", "model"), ("", "-decoder.final_layer_norm")),
    ),
)
SIZES = {
    "vocab": "vocab_size",
    "model": "d_model",
    "inner": "num_heads*d_kv",
    "ff": "d_ff",
    "heads": "num_heads",
    "buckets": "relative_attention_num_buckets",
}
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
IGNORABLE = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
DEFAULTS = {
    "num_decoder_layers": "=num_layers",
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": True,
    "dropout_rate": 0.1,
}
DROPOUT = {"stream": "dropout_rate", "attention": "dropout_rate", "neurons": "dropout_rate"}

T5 = Family(
    name="t5",
    title="T5 v1.0, T5 v1.1, Flan-T5, ByT5, UL2",
    model_type="t5",
    # t5-3b and t5-11b on the Hub still carry the class name of 2020.
    seq2seq=("T5ForConditionalGeneration", "T5WithLMHeadModel"),
    encoder_only=("T5EncoderModel",),
    sizes=SIZES,
    defaults=DEFAULTS | {"feed_forward_proj": "relu"},
    encoder=Stack("num_layers", encoder_block),
    decoder=Stack("num_decoder_layers", decoder_block),
    encoder_ends=ENCODER_ENDS,
    decoder_ends=DECODER_ENDS,
    tied_head=TIED_HEAD,
    untied_head=UNTIED_HEAD,
    embedding="shared.weight",
    head="lm_head.weight",
    copies=COPIES,
    ignorable=IGNORABLE,
    eps_key="layer_norm_epsilon",
    eps=1e-6,
    centred_norm=False,
    norm_site="mul#2",
    dropout=DROPOUT,
    untie="scaled",
)
