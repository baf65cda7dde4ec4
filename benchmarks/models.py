"""Random models of every family, of shapes and weights that a certificate may find hard, and the demo checkpoints
brought into fp16's range."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.wiring import Attention, FeedForward
from bf16_to_fp16.finetuning.corpus import Corpus
from bf16_to_fp16.finetuning.recipe import Data
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "bf16_to_fp16" / "demo_data"
DEMOS = {"T5": DEMO / "t5-gated-bytes", "Pegasus": DEMO / "pegasus-bytes", "Gemma 3": DEMO / "gemma3-bytes"}
HARD = ROOT / "recipes" / "demo" / "t5-hard-bytes"

KINDS = ("t5", "v1.1", "mt5", "umt5", "pegasus", "t5-encoder", "mt5-encoder", "umt5-encoder", "pegasus", "demo")
IDS = [5, 31, 97]


def t5_config(r: random.Random, kind: str) -> Any:
    plain = r.choice(["relu", "gelu", "silu", "gelu_new"])
    gate = r.choice(["gated-gelu", "gated-silu", "gated-relu"])
    shape: dict[str, Any] = {
        "d_model": r.choice([1, 2, 3, 5, 8, 13, 24, 40, 64]),
        "d_kv": r.choice([1, 2, 3, 5, 8, 12]),
    }
    shape |= {"num_heads": r.choice([1, 2, 3, 5]), "d_ff": r.choice([1, 2, 7, 37, 96])}
    shape |= {"num_layers": r.choice([1, 2, 3]), "num_decoder_layers": r.choice([1, 2]), "vocab_size": r.choice(IDS)}
    shape |= {"relative_attention_num_buckets": r.choice([4, 9, 32]), "relative_attention_max_distance": 128}
    shape |= {"decoder_start_token_id": 0, "dropout_rate": r.choice([0.05, 0.1, 0.15, 0.3, 0.5])}
    shape |= {"feed_forward_proj": plain if kind == "t5" else gate}
    shape |= {"tie_word_embeddings": False} if kind == "v1.1" else {}
    config = {"mt5": transformers.MT5Config, "umt5": transformers.UMT5Config}.get(kind, transformers.T5Config)
    return config(**shape)


def pegasus_config(r: random.Random) -> Any:
    heads, other = r.choice([(1, 1), (2, 1), (3, 2), (4, 4)])
    shape: dict[str, Any] = {"encoder_attention_heads": heads, "decoder_attention_heads": other}
    shape |= {"d_model": 2 * heads * other * r.choice([1, 2, 3, 5])}
    shape |= {"encoder_layers": r.choice([1, 2]), "decoder_layers": r.choice([1, 2])}
    shape |= {"encoder_ffn_dim": r.choice([1, 7, 37]), "decoder_ffn_dim": r.choice([2, 29])}
    shape |= {"vocab_size": r.choice(IDS), "max_position_embeddings": 512, "decoder_start_token_id": 0}
    shape |= {"activation_function": r.choice(["relu", "gelu", "silu", "gelu_new"])}
    shape |= {"scale_embedding": r.choice([True, False]), "dropout": r.choice([0.1, 0.3])}
    shape |= {"attention_dropout": r.choice([0.0, 0.15]), "activation_dropout": r.choice([0.0, 0.2])}
    return transformers.PegasusConfig(**shape)


def random_model(seed: int) -> tuple[str, Any]:
    """Return the kind and a random fp32 model in eval mode, every weight of which fp16 can hold."""
    r = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    torch.manual_seed(seed)
    if kind == "demo":
        model = demo(r.choice(["t5-gated-bytes", "pegasus-bytes"]), -r.choice([4, 6, 8]))
        model.config.dropout_rate = model.config.dropout = 0.1
        return kind, model.requires_grad_()
    config = pegasus_config(r) if kind == "pegasus" else t5_config(r, kind.removesuffix("-encoder"))
    name = "EncoderModel" if kind.endswith("encoder") else "ForConditionalGeneration"
    model = getattr(transformers, type(config).__name__.replace("Config", name))(config)
    if hasattr(model, "lm_head") and kind not in ("t5", "pegasus") and r.random() < 0.7:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    randomise(model, r)
    return kind, model.eval()


def demo_data(name: str) -> dict[str, Any]:
    """Return the data of a recipe: the text and the task on which a demo checkpoint was trained."""
    files = {"path": str(DEMO / "python-topics.txt.gz"), "held_out_path": str(DEMO / "held_out.txt")}
    spans = {"first_sentinel": 383, "noise_density": 0.3, "mean_span_length": 18.0} if name.startswith("t5") else {}
    return {**files, "input_length": 130, "target_length": 62, "batch_size": 8, **spans}


def demo_corpus(folder: Path, config: Any, rows: int = 8, **changes: Any) -> Corpus:
    data = demo_data(folder.name) | {"batch_size": rows} | changes
    return Corpus(Data.model_validate(data), folder, config)


@torch.no_grad()
def demo(name: str, exponent: int) -> Any:
    """Return a demo checkpoint's trained weights with its residual stream multiplied by 2^``exponent``, in fp16's
    values."""
    model = load(DEMO / name, torch.float32)
    layout = resolve(ModelTensors(model))
    model = apply(model, layout, Plan(family=layout.family.name, residual_exponent=exponent))
    for tensor in model.state_dict().values():
        tensor.copy_(tensor.half().float())
    return model.eval()


@torch.no_grad()
def randomise(model: Any, r: random.Random) -> None:
    """Fill a model with weights of many shapes: heavy tails, imbalances by powers of two, zeros, pairs that cancel."""
    power, wild = r.randint(-12, 8), r.random() < 0.5
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "norm" in name:
            weight.copy_(gains(r, weight.numel()) if name.endswith("weight") else vector(r, weight.numel()))
        elif weight.dim() == 1:
            weight.copy_(vector(r, weight.numel()))
        elif not name.endswith("embed_positions.weight"):
            weight.copy_(matrix(r, weight.shape[0], weight.shape[1], wild))
            if name.endswith(("shared.weight", "o.weight", "wo.weight", "out_proj.weight", "fc2.weight")):
                weight.mul_(2.0**power)
    layout = resolve(ModelTensors(model))
    state = dict(model.named_parameters())
    for topology in layout.topology:
        if isinstance(topology, Attention):
            cancel_attention(state, topology, layout.heads(topology), r)
            if r.random() < 0.2:
                # Steps of the last subnormals, whose partial sums round by their own size.
                tiny = state[f"{r.choice([topology.query, topology.key, topology.value])}.weight"]
                tiny.copy_(tiny.sign() * 2.0**-24 * r.choice([1, 1, 2, 3]))
        elif r.random() < 0.3 and isinstance(topology, FeedForward):
            cancel_neurons(state, topology)
        elif r.random() < 0.3 and isinstance(topology, FeedForward) and not topology.gate:
            sink_neurons(state, topology)
    if r.random() < 0.25:
        # One magnitude everywhere, so that the largest entry meets whatever its mantissa does to a rounding.
        table = state[layout.family.embedding]
        table.copy_(torch.randn_like(table).sign() * (1 + r.random()) * 2.0 ** r.randint(-4, 8))
    if layout.family.centred_norm and r.random() < 0.3:
        cancel_biases(state, layout)
    if "final_logits_bias" in model.state_dict():
        model.final_logits_bias.copy_(vector(r, model.config.vocab_size))
    for tensor in model.state_dict().values():
        tensor.copy_(tensor.clamp(-6e4, 6e4).half().float())


def vector(r: random.Random, size: int) -> Tensor:
    return torch.randn(size) * r.choice([0.0, 0.1, 1.0, 50.0])


def gains(r: random.Random, size: int) -> Tensor:
    style = r.randrange(6)
    if style == 0:
        return torch.zeros(size)
    if style == 1:
        return torch.randn(size) * (torch.rand(size) < 0.7)
    if style == 2:
        return 2.0 ** torch.randint(-12, 5, (size,)).float()
    return torch.rand(size) + 0.5


def matrix(r: random.Random, rows: int, columns: int, wild: bool) -> Tensor:
    """Return a random matrix whose rows have length about 1, or anything where ``wild``."""
    style = r.randrange(7)
    x = torch.randn(rows, columns)
    if style == 0:
        x = x * x.abs() ** 3
    elif style == 1:
        x = x * (torch.rand(rows, columns) < 0.1)
    elif style == 2:
        x = torch.randn(rows, 1) * torch.randn(1, columns) + x * 2.0 ** -r.randint(0, 12)
    elif style == 3:
        x = x.sign()
    elif style == 4:
        x = x.abs()
    x = x / math.sqrt(columns)
    if wild:
        if r.random() < 0.08:
            return torch.zeros(rows, columns)
        x = x * 2.0 ** r.randint(-8, 4)
        if r.random() < 0.6:
            x = x * 2.0 ** torch.randint(-9, 3, (rows, 1)).float()
        if r.random() < 0.3:
            x = x * 2.0 ** torch.randint(-9, 3, (columns,)).float()
    return x


def cancel_attention(state: Mapping[str, Tensor], w: Attention, heads: int, r: random.Random) -> None:
    """Make channels of an attention come in pairs whose contributions cancel all but exactly."""
    if len(state[f"{w.value}.weight"]) < 2 * heads:
        return
    for read, write, side in ((w.value, w.output, 1), (w.query, w.key, 0)):
        if r.random() < 0.3:
            for path, axis, sign in ((read, 0, 1), (write, side, -1)):
                pair_up(state[f"{path}.weight"].transpose(0, axis).unflatten(0, (heads, -1)), sign)
                if axis == 0 and f"{path}.bias" in state:
                    pair_up(state[f"{path}.bias"].unflatten(0, (heads, -1)), sign)
            state[f"{read}.weight"].unflatten(0, (heads, -1))[:, 1::2, 0] *= 1 + 2.0**-10


def pair_up(channels: Tensor, factor: float) -> None:
    """Make every second entry along the second axis its neighbour times a factor."""
    odd = channels[:, 1::2]
    odd.copy_(factor * channels[:, ::2][:, : odd.shape[1]])


def cancel_neurons(state: Mapping[str, Tensor], w: FeedForward) -> None:
    """Make neurons come in equal pairs that the output weighs with opposite signs."""
    for name in (f"{path}.{part}" for path in (w.linear, w.gate) for part in ("weight", "bias")):
        if name in state:
            pair_up(state[name][None], 1)
    pair_up(state[f"{w.output}.weight"], -1 - 2.0**-10)


def sink_neurons(state: Mapping[str, Tensor], w: FeedForward) -> None:
    """Make all neurons of a plain feed-forward alike, with negative output weights: together they reach the least that
    an activation gives."""
    linear, out = state[f"{w.linear}.weight"], state[f"{w.output}.weight"]
    linear.copy_(linear[:1] / linear[:1].norm().clamp(min=1e-6) * 2)
    out.copy_(-out.abs())
    if f"{w.linear}.bias" in state:
        state[f"{w.linear}.bias"].zero_()


def cancel_biases(state: Mapping[str, Tensor], layout: Layout) -> None:
    """Make every bias behind a norm take out what the norm's shift gives."""
    behind = [(w.norm, w.linear) for w in layout.topology if isinstance(w, FeedForward)]
    attentions = [w for w in layout.topology if isinstance(w, Attention) and not w.memory]
    behind += [(w.norm, path) for w in attentions for path in (w.query, w.key, w.value)]
    for norm, path in behind:
        state[f"{path}.bias"].copy_(-state[f"{path}.weight"] @ state[f"{norm}.bias"])
