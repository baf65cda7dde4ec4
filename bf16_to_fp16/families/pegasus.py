"""Pegasus: pre-norm BART with LayerNorm, biases, sinusoidal positions and the embedding as head. Three deviations from
T5 matter. LayerNorm's eps (1e-5) is not in the config, so scaling the residual stream drifts by about eps/(2·s²·var),
which the plan weighs. The positions are added to the residual stream and must be scaled with it, so they are written
even where a file lacks them. Scores are multiplied by head_dim^-1/2 after the product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .parts import Style, ends, feed_forward, head, states, table, tied_head, untied_head
from .parts import attention as attention_part
from .signals import LOGITS, RESIDUAL, Tensor, multiplied_by
from .types import Deviation, Family, Initialisation, Part, Stack, StockClass
from .wiring import Attention, FeedForward, StackEnds, StockAttributes

if TYPE_CHECKING:
    import torch


def positions(count: int, width: int) -> torch.Tensor:
    """Return fp32 [count, width] sinusoids, sines first. Angle of pair k at position p: p / 10000^(2k / width)."""
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
    """Return the records of a feed-forward; neurons can carry a factor only with ReLU."""
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
    return StackEnds(at, f"{at}.embed_tokens", f"{at}.{norm}", positions=positions, scale="scale_embedding", **own)


def stack_records(stack: StackEnds, *tensors: Tensor, **own: Any) -> Part:
    carried = Tensor(stack.positions, ("positions", "model"), (None, multiplied_by(RESIDUAL)), **own)
    return ends(stack, *tensors, carried)


MADE = {
    "absent": "stock code makes absent positions, unscaled; they are made, scaled and written",
    "generate": positions,
}
SHARED = table("shared.weight")
BODY = "model"  # where the stacks stand in a model with a head
FINAL_NORM = f"{BODY}.decoder.layer_norm"
HEAD = head(f"{BODY}.shared.weight")
LOGITS_BIAS = Tensor(
    "final_logits_bias", ("one", "vocab"), (None, multiplied_by(LOGITS)), absent="stock code takes zeros"
)

PEGASUS = Family(
    name="pegasus",
    title="Pegasus",
    model_type="pegasus",
    classes=(StockClass(("PegasusForConditionalGeneration",), decodes=True, takes_decoder_ids=True, body=BODY),),
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
    initialisation=Initialisation(
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


def learned_positions() -> Initialisation:
    rules = {name: rule for name, rule in PEGASUS.initialisation.modules.items() if rule is not None}
    return replace(PEGASUS.initialisation, modules=rules)
