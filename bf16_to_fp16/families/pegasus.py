"""Pegasus: pre-norm BART with LayerNorm, biases, sinusoidal positions and the embedding as head.

Three deviations from T5 matter. LayerNorm's eps (1e-5) is not in the config, so scaling the residual stream drifts by
about eps/(2·s²·var), and the plan weighs that. The positions are added to the residual stream and must be scaled with
it, so they are written even where a file lacks them. Scores are multiplied by head_dim^-1/2 after the product.
"""

from collections.abc import Mapping, Sequence

import torch

from .types import RESIDUAL, Attention, Ends, Family, FeedForward, Kind, Part, Signal, Stack, Tensor


def positions(count: int, width: int) -> torch.Tensor:
    """Return sinusoidal positions as the stock class makes them: fp32 [count, width], sines in the first half.

    Angle of pair k at position p: p / 10000^(2k / width).
    """
    pair = torch.arange(width, dtype=torch.float64) // 2
    angles = torch.arange(count, dtype=torch.float64)[:, None] / 10000.0 ** (2 * pair / width)
    return torch.cat([torch.sin(angles[:, 0::2]), torch.cos(angles[:, 1::2])], dim=1).float()


def attention(at: str, module: str, norm: str, size: str = "model", *, memory: bool = False) -> Part:
    """Return the records of one attention sublayer; with ``memory`` keys and values read the encoder's output."""
    norm, m = f"{at}.{norm}", f"{at}.{module}"
    reads = "" if memory else f"-{norm}"
    qk, value = f"{m}.query_key", f"{m}.value"
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (f"+{norm}:input", f"+{m}.out_proj:output")),
            Signal(norm, Kind.NORM, "model", (f"+{norm}:output",)),
            Signal(qk, Kind.QUERY_KEY, size, (f"+{m}.q_proj:output", f"-{m}.k_proj:output")),
            Signal(value, Kind.VALUE, size, (f"+{m}.v_proj:output", f"+{m}.out_proj:input")),
        ),
        tensors=(
            Tensor(f"{norm}.weight", ("model",), (f"+{norm}",)),
            Tensor(f"{norm}.bias", ("model",), (f"+{norm}",)),
            Tensor(f"{m}.q_proj.weight", (size, "model"), (f"+{qk}", f"-{norm}")),
            Tensor(f"{m}.q_proj.bias", (size,), (f"+{qk}",)),
            Tensor(f"{m}.k_proj.weight", (size, "model"), (f"-{qk}", reads)),
            Tensor(f"{m}.k_proj.bias", (size,), (f"-{qk}",)),
            Tensor(f"{m}.v_proj.weight", (size, "model"), (f"+{value}", reads)),
            Tensor(f"{m}.v_proj.bias", (size,), (f"+{value}",)),
            Tensor(f"{m}.out_proj.weight", ("model", size), (f"+{RESIDUAL}", f"-{value}")),
            Tensor(f"{m}.out_proj.bias", ("model",), (f"+{RESIDUAL}",)),
        ),
        wiring=Attention(
            at=m,
            norm=norm,
            query=f"{m}.q_proj",
            key=f"{m}.k_proj",
            value=f"{m}.v_proj",
            output=f"{m}.out_proj",
            memory=memory,
            bias="",
            heads=f"{at.split('.')[1]}_attention_heads",
            scaled=True,
            add=f"{at}:add#2" if memory else f"{at}:add",
        ),
    )


def feed_forward(at: str, ff: str, config: Mapping[str, object]) -> Part:
    """Return the records of one feed-forward sublayer; its neurons carry a factor only through a ReLU."""
    norm, neuron = f"{at}.final_layer_norm", f"{at}.neuron"
    moves = config["activation_function"] == "relu"
    out, back = (f"+{neuron}", f"-{neuron}") if moves else ("", "")
    return Part(
        signals=(
            Signal(RESIDUAL, Kind.RESIDUAL, "model", (f"+{norm}:input", f"+{at}.fc2:output")),
            Signal(norm, Kind.NORM, "model", (f"+{norm}:output",)),
            Signal(neuron, Kind.NEURON if moves else Kind.FIXED, ff, (f"+{at}.fc1:output", f"+{at}.fc2:input")),
        ),
        tensors=(
            Tensor(f"{norm}.weight", ("model",), (f"+{norm}",)),
            Tensor(f"{norm}.bias", ("model",), (f"+{norm}",)),
            Tensor(f"{at}.fc1.weight", (ff, "model"), (out, f"-{norm}")),
            Tensor(f"{at}.fc1.bias", (ff,), (out,)),
            Tensor(f"{at}.fc2.weight", ("model", ff), (f"+{RESIDUAL}", back)),
            Tensor(f"{at}.fc2.bias", ("model",), (f"+{RESIDUAL}",)),
        ),
        wiring=FeedForward(
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
    at = f"model.encoder.layers.{i}"
    return (attention(at, "self_attn", "self_attn_layer_norm"), feed_forward(at, "encoder_ff", config))


def decoder_block(config: Mapping[str, object], i: int) -> Sequence[Part]:
    """Return the parts of decoder layer ``i``."""
    at = f"model.decoder.layers.{i}"
    return (
        attention(at, "self_attn", "self_attn_layer_norm"),
        attention(at, "encoder_attn", "encoder_attn_layer_norm", memory=True),
        feed_forward(at, "decoder_ff", config),
    )


def ends(stack: str) -> tuple[Signal, Tensor]:
    """Return what the embedding and final norm of a stack show of the residual stream, and its positions."""
    at = f"model.{stack}"
    seen = (f"+{at}.embed_tokens:output", f"+{at}.embed_positions:output", f"+{at}.layer_norm:input")
    return (
        Signal(RESIDUAL, Kind.RESIDUAL, "model", seen),
        Tensor(
            f"{at}.embed_positions.weight",
            ("positions", "model"),
            ("", f"+{RESIDUAL}"),
            absent="stock code makes absent positions, unscaled; they are made, scaled and written",
            generate=positions,
        ),
    )


def wiring(stack: str) -> Ends:
    """Return how a stack begins and ends."""
    at = f"model.{stack}"
    return Ends(
        at=at,
        embedding=f"{at}.embed_tokens",
        positions=f"{at}.embed_positions.weight",
        scale="scale_embedding",
        norm=f"{at}.layer_norm",
    )


ENCODER_RESIDUAL, ENCODER_POSITIONS = ends("encoder")
DECODER_RESIDUAL, DECODER_POSITIONS = ends("decoder")
FINAL_NORM = "model.decoder.layer_norm"

PEGASUS = Family(
    name="pegasus",
    title="Pegasus",
    model_type="pegasus",
    seq2seq=("PegasusForConditionalGeneration",),
    encoder_only=(),
    sizes={
        "vocab": "vocab_size",
        "model": "d_model",
        "encoder_ff": "encoder_ffn_dim",
        "decoder_ff": "decoder_ffn_dim",
        "positions": "max_position_embeddings",
        "one": "1",
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
        signals=(
            ENCODER_RESIDUAL,
            Signal("encoder.output", Kind.FIXED, "model", ("+model.encoder.layer_norm:output",)),
        ),
        tensors=(
            Tensor("model.shared.weight", ("vocab", "model"), ("", f"+{RESIDUAL}")),
            ENCODER_POSITIONS,
            Tensor("model.encoder.layer_norm.weight", ("model",), ("",)),
            Tensor("model.encoder.layer_norm.bias", ("model",), ("",)),
        ),
        wiring=wiring("encoder"),
    ),
    decoder_ends=Part(
        signals=(DECODER_RESIDUAL, Signal("logits", Kind.FIXED, "vocab", ("+lm_head:output",))),
        tensors=(
            DECODER_POSITIONS,
            Tensor("final_logits_bias", ("one", "vocab"), ("", ""), absent="stock code takes zeros"),
        ),
        wiring=wiring("decoder"),
    ),
    tied_head=Part(
        signals=(Signal(RESIDUAL, Kind.RESIDUAL, "model", (f"-{FINAL_NORM}:output",)),),
        tensors=(
            Tensor(f"{FINAL_NORM}.weight", ("model",), (f"-{RESIDUAL}",)),
            Tensor(f"{FINAL_NORM}.bias", ("model",), (f"-{RESIDUAL}",)),
        ),
    ),
    untied_head=Part(
        signals=(Signal(FINAL_NORM, Kind.NORM, "model", (f"+{FINAL_NORM}:output",)),),
        tensors=(
            Tensor(f"{FINAL_NORM}.weight", ("model",), (f"+{FINAL_NORM}",)),
            Tensor(f"{FINAL_NORM}.bias", ("model",), (f"+{FINAL_NORM}",)),
            Tensor("lm_head.weight", ("vocab", "model"), ("", f"-{FINAL_NORM}")),
        ),
    ),
    embedding="model.shared.weight",
    head="lm_head.weight",
    copies=("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
    ignorable=(),
    eps_key=None,
    eps=1e-5,
    centred_norm=True,
    norm_site="layer_norm",
    dropout={"stream": "dropout", "attention": "attention_dropout", "neurons": "activation_dropout"},
    untie="copy",
)
