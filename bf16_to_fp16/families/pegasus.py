"""Pegasus: pre-norm BART with LayerNorm, biases, sinusoidal positions and the embedding as head.

Three deviations from T5 matter. LayerNorm's eps (1e-5) is not in the config, so scaling the residual stream drifts by
about eps/(2·s²·var), and the plan weighs that. The positions are added to the residual stream and must be scaled with
it, so they are written even where a file lacks them. Scores are multiplied by head_dim^-1/2 after the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    import torch


def positions(count: int, width: int) -> torch.Tensor:
    """Return sinusoidal positions as the stock class makes them: fp32 [count, width], sines in the first half.

    Angle of pair k at position p: p / 10000^(2k / width).
    """
    import torch  # slow to load, and a list of the families needs none of it

    pair = torch.arange(width, dtype=torch.float64) // 2
    angles = torch.arange(count, dtype=torch.float64)[:, None] / 10000.0 ** (2 * pair / width)
    return torch.cat([torch.sin(angles[:, 0::2]), torch.cos(angles[:, 1::2])], dim=1).float()


def attention(at: str, module: str, norm: str, size: str = "model", *, memory: bool = False) -> Part:
    """Return the records of one attention sublayer; with ``memory`` keys and values read the encoder's output."""
    norm, m = f"{at}.{norm}", f"{at}.{module}"
    reads = None if memory else divided_by(norm)
    qk, value = f"{m}.query_key", f"{m}.value"
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (input_of(norm), output_of(f"{m}.out_proj"))),
            Signal(norm, Kind.NORM, "model", (output_of(norm),)),
            Signal(qk, Kind.QUERY_KEY, size, (output_of(f"{m}.q_proj"), output_of(f"{m}.k_proj", -1))),
            Signal(value, Kind.VALUE, size, (output_of(f"{m}.v_proj"), input_of(f"{m}.out_proj"))),
        ),
        tensors=(
            Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),)),
            Tensor(f"{norm}.bias", ("model",), (multiplied_by(norm),)),
            Tensor(f"{m}.q_proj.weight", (size, "model"), (multiplied_by(qk), divided_by(norm))),
            Tensor(f"{m}.q_proj.bias", (size,), (multiplied_by(qk),)),
            Tensor(f"{m}.k_proj.weight", (size, "model"), (divided_by(qk), reads)),
            Tensor(f"{m}.k_proj.bias", (size,), (divided_by(qk),)),
            Tensor(f"{m}.v_proj.weight", (size, "model"), (multiplied_by(value), reads)),
            Tensor(f"{m}.v_proj.bias", (size,), (multiplied_by(value),)),
            Tensor(f"{m}.out_proj.weight", ("model", size), (multiplied_by(RESIDUAL), divided_by(value))),
            Tensor(f"{m}.out_proj.bias", ("model",), (multiplied_by(RESIDUAL),)),
        ),
        topology=Attention(
            at=m,
            norm=norm,
            query=f"{m}.q_proj",
            key=f"{m}.k_proj",
            value=f"{m}.v_proj",
            output=f"{m}.out_proj",
            memory=memory,
            bias="",
            heads=f"{at.split('.')[0]}_attention_heads",
            scaled=True,
            add=f"{at}:add#2" if memory else f"{at}:add",
        ),
    )


def feed_forward(at: str, ff: str, config: Mapping[str, object]) -> Part:
    """Return the records of one feed-forward sublayer; its neurons carry a factor only through a ReLU."""
    norm, neuron = f"{at}.final_layer_norm", f"{at}.neuron"
    moves = config["activation_function"] == "relu"
    out, back = (multiplied_by(neuron), divided_by(neuron)) if moves else (None, None)
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (input_of(norm), output_of(f"{at}.fc2"))),
            Signal(norm, Kind.NORM, "model", (output_of(norm),)),
            Signal(neuron, Kind.NEURON if moves else Kind.FIXED, ff, (output_of(f"{at}.fc1"), input_of(f"{at}.fc2"))),
        ),
        tensors=(
            Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),)),
            Tensor(f"{norm}.bias", ("model",), (multiplied_by(norm),)),
            Tensor(f"{at}.fc1.weight", (ff, "model"), (out, divided_by(norm))),
            Tensor(f"{at}.fc1.bias", (ff,), (out,)),
            Tensor(f"{at}.fc2.weight", ("model", ff), (multiplied_by(RESIDUAL), back)),
            Tensor(f"{at}.fc2.bias", ("model",), (multiplied_by(RESIDUAL),)),
        ),
        topology=FeedForward(
            at=at,
            norm=norm,
            gate="",
            linear=f"{at}.fc1",
            output=f"{at}.fc2",
            activation=str(config["activation_function"]),
            act=f"{at}.activation_fn",
            add=f"{at}:add#3" if "decoder" in at else f"{at}:add#2",
        ),
    )


def encoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of encoder layer ``i``."""
    at = f"encoder.layers.{i}"
    return (attention(at, "self_attn", "self_attn_layer_norm"), feed_forward(at, "encoder_ff", config))


def decoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of decoder layer ``i``."""
    at = f"decoder.layers.{i}"
    return (
        attention(at, "self_attn", "self_attn_layer_norm"),
        attention(at, "encoder_attn", "encoder_attn_layer_norm", memory=True),
        feed_forward(at, "decoder_ff", config),
    )


def residual_and_positions(at: str) -> tuple[Signal, Tensor]:
    """Return what the embedding and final norm of a stack show of the residual stream, and its positions."""
    seen = (output_of(f"{at}.embed_tokens"), output_of(f"{at}.embed_positions"), input_of(f"{at}.layer_norm"))
    return (
        Signal(RESIDUAL, Kind.RESIDUAL, "model", seen),
        Tensor(
            f"{at}.embed_positions.weight",
            ("positions", "model"),
            (None, multiplied_by(RESIDUAL)),
            absent="stock code makes absent positions, unscaled; they are made, scaled and written",
            generate=positions,
        ),
    )


def stack_ends(at: str) -> StackEnds:
    """Return how a stack begins and ends."""
    return StackEnds(
        at=at,
        embedding=f"{at}.embed_tokens",
        positions=f"{at}.embed_positions.weight",
        scale="scale_embedding",
        norm=f"{at}.layer_norm",
    )


ENCODER_RESIDUAL, ENCODER_POSITIONS = residual_and_positions("encoder")


DECODER_RESIDUAL, DECODER_POSITIONS = residual_and_positions("decoder")


BODY = "model"
"""Where the stacks stand in a model with a head."""


def states(norm: str) -> Part:
    """Return a final norm whose output users read, so that nothing may move it."""
    return Part(
        signals=(Signal(f"{norm.partition('.')[0]}.output", Kind.FIXED, "model", (output_of(norm),)),),
        tensors=(Tensor(f"{norm}.weight", ("model",), (None,)), Tensor(f"{norm}.bias", ("model",), (None,))),
    )


FINAL_NORM = f"{BODY}.decoder.layer_norm"


LOGITS = Signal("logits", Kind.FIXED, "vocab", (output_of("lm_head"),))


LOGITS_BIAS = Tensor("final_logits_bias", ("one", "vocab"), (None, None), absent="stock code takes zeros")


def tied_head(norm: str) -> Part:
    """Return the final norm at ``norm`` and the embedding as the head that reads it."""
    return Part(
        signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", (output_of(norm, -1),)), LOGITS),
        tensors=(
            Tensor(f"{norm}.weight", ("model",), (divided_by(RESIDUAL),)),
            Tensor(f"{norm}.bias", ("model",), (divided_by(RESIDUAL),)),
            LOGITS_BIAS,
        ),
        topology=Head("lm_head", (HeadLinear("lm_head", f"{BODY}.shared.weight"),)),
    )


def untied_head(norm: str) -> Part:
    """Return the final norm at ``norm`` and a head of its own that reads it."""
    return Part(
        signals=(Signal(norm, Kind.NORM, "model", (output_of(norm),)), LOGITS),
        tensors=(
            Tensor(f"{norm}.weight", ("model",), (multiplied_by(norm),)),
            Tensor(f"{norm}.bias", ("model",), (multiplied_by(norm),)),
            Tensor("lm_head.weight", ("vocab", "model"), (None, divided_by(norm))),
            LOGITS_BIAS,
        ),
        topology=Head("lm_head", (HeadLinear("lm_head", "lm_head.weight"),)),
    )


PEGASUS = Family(
    name="pegasus",
    title="Pegasus",
    model_type="pegasus",
    classes=(
        StockClass(("PegasusForConditionalGeneration",), decodes=True, takes_decoder_ids=True, end=None, body=BODY),
    ),
    sizes={
        "vocab": ("vocab_size",),
        "model": ("d_model",),
        "encoder_ff": ("encoder_ffn_dim",),
        "decoder_ff": ("decoder_ffn_dim",),
        "positions": ("max_position_embeddings",),
        "one": (),
    },
    defaults={
        "max_position_embeddings": 1024,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
    },
    encoder=Stack("encoder_layers", encoder_block),
    decoder=Stack("decoder_layers", decoder_block),
    encoder_ends=Part(
        signals=(ENCODER_RESIDUAL,),
        tensors=(Tensor("shared.weight", ("vocab", "model"), (None, multiplied_by(RESIDUAL))), ENCODER_POSITIONS),
        topology=stack_ends("encoder"),
    ),
    encoder_output=states("encoder.layer_norm"),
    decoder_ends=Part(signals=(DECODER_RESIDUAL,), tensors=(DECODER_POSITIONS,), topology=stack_ends("decoder")),
    tied_head=tied_head(FINAL_NORM),
    untied_head=untied_head(FINAL_NORM),
    embedding="shared.weight",
    head="lm_head.weight",
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ignorable=(),
    logits_bias="final_logits_bias",
    output_scale=OutputScale.NEVER,
    output_scale_key="",
    kept_in_fp32=(),
    eps_key=None,
    eps=1e-5,
    centred_norm=True,
    norm_site="layer_norm",
    dropout={"stream": "dropout", "attention": "attention_dropout", "neurons": "activation_dropout"},
    free_keys=("encoder_layerdrop", "decoder_layerdrop"),
    buckets=None,
    attributes=StockAttributes(heads="num_heads", head_size="head_dim", embedding_scale="embed_scale"),
    initialisation=Initialisation(
        title="Pegasus",
        factor="init_std",
        default=0.02,
        modules={
            "embed_positions": None,
            "*layer_norm": Deviation(scaled=False),
            "*layernorm_embedding": Deviation(scaled=False),
            "*": Deviation(),
        },
    ),
    untie="copy",
    ties_all_or_nothing=True,
)
