"""Checkpoints of published shapes with random weights, for benchmarks of what depends on the shapes alone."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """The widths of a gated T5 with untied head, and the layers of its stacks; ``decoder_layers`` 0: encoder only."""

    d_model: int
    d_ff: int
    heads: int
    vocabulary: int
    layers: int
    decoder_layers: int
    model_type: str = "t5"
    d_kv: int = 64

    def with_layers(self, layers: int) -> Shape:
        """Return the same with so many layers in each stack that it has."""
        return replace(self, layers=layers, decoder_layers=layers if self.decoder_layers else 0)

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(math.prod(s) for s in self.tensors().values())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its name."""
        inner, d = self.heads * self.d_kv, self.d_model
        attention = {"q": (inner, d), "k": (inner, d), "v": (inner, d), "o": (d, inner)}
        feed_forward = {"wi_0": (self.d_ff, d), "wi_1": (self.d_ff, d), "wo": (d, self.d_ff)}
        result: dict[str, tuple[int, ...]] = {"shared.weight": (self.vocabulary, d)}
        if self.decoder_layers:
            result["lm_head.weight"] = (self.vocabulary, d)
        for stack, layers, kinds in (
            ("encoder", self.layers, ("SelfAttention",)),
            ("decoder", self.decoder_layers, ("SelfAttention", "EncDecAttention")),
        ):
            for i in range(layers):
                for number, kind in enumerate((*kinds, "DenseReluDense")):
                    at = f"{stack}.block.{i}.layer.{number}"
                    inside = feed_forward if kind == "DenseReluDense" else attention
                    result |= {f"{at}.{kind}.{n}.weight": s for n, s in inside.items()}
                    result[f"{at}.layer_norm.weight"] = (d,)
            if layers:
                result[f"{stack}.final_layer_norm.weight"] = (d,)
            for i in range(layers if self.model_type == "umt5" else min(layers, 1)):
                result[f"{stack}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"] = (32, self.heads)
        return result

    def config(self) -> dict[str, object]:
        """Return what goes into config.json."""
        kind = "ForConditionalGeneration" if self.decoder_layers else "EncoderModel"
        return {
            "architectures": [self.model_type.upper() + kind],
            "model_type": self.model_type,
            "d_model": self.d_model,
            "d_kv": self.d_kv,
            "d_ff": self.d_ff,
            "num_heads": self.heads,
            "num_layers": self.layers,
            "num_decoder_layers": self.decoder_layers or self.layers,
            "vocab_size": self.vocabulary,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-6,
            "torch_dtype": "bfloat16",
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }


@dataclass(frozen=True)
class PegasusShape:
    """The widths of a Pegasus, and the layers of each of its stacks."""

    d_model: int
    d_ff: int
    heads: int
    vocabulary: int
    layers: int
    positions: int = 512

    @property
    def decoder_layers(self) -> int:
        """The layers of its decoder."""
        return self.layers

    def with_layers(self, layers: int) -> PegasusShape:
        """Return the same with so many layers in each stack."""
        return replace(self, layers=layers)

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(math.prod(s) for s in self.tensors().values())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its name."""
        d = self.d_model
        result: dict[str, tuple[int, ...]] = {
            "model.shared.weight": (self.vocabulary, d),
            "final_logits_bias": (1, self.vocabulary),
        }
        for stack, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
            linears = {f"{a}.{n}_proj": (d, d) for a in attentions for n in ("q", "k", "v", "out")}
            linears |= {"fc1": (self.d_ff, d), "fc2": (d, self.d_ff)}
            norms = [f"{a}_layer_norm" for a in attentions] + ["final_layer_norm"]
            at = f"model.{stack}"
            result |= {f"{at}.{POSITIONS}": (self.positions, d)}
            result |= {f"{at}.layer_norm.{what}": (d,) for what in ("weight", "bias")}
            for i in range(self.layers):
                for name, size in linears.items():
                    result |= {f"{at}.layers.{i}.{name}.weight": size, f"{at}.layers.{i}.{name}.bias": size[:1]}
                result |= {f"{at}.layers.{i}.{n}.{what}": (d,) for n in norms for what in ("weight", "bias")}
        return result

    def config(self) -> dict[str, object]:
        """Return what goes into config.json."""
        both = {"layers": self.layers, "attention_heads": self.heads, "ffn_dim": self.d_ff}
        return {
            "architectures": ["PegasusForConditionalGeneration"],
            "model_type": "pegasus",
            "d_model": self.d_model,
            **{f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in both.items()},
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "activation_function": "relu",
            "scale_embedding": True,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }


@dataclass(frozen=True)
class StockShape:
    """A model of one stack as transformers' own class makes it from a config, such as a causal language model."""

    name: str
    values: tuple[tuple[str, object], ...]
    decoder_layers: int = 0

    @property
    def layers(self) -> int:
        """The layers of its stack, of a model that reads images those of its text model."""
        values = dict(self.values)
        own: Any = values.get("text_config", values)
        return int(own["num_hidden_layers"])

    def with_layers(self, layers: int) -> StockShape:
        """Return the same with so many layers, in configs inside its own too."""

        def fewer(values: dict[str, Any]) -> dict[str, Any]:
            inner = {key: fewer(value) if isinstance(value, dict) else value for key, value in values.items()}
            return inner | ({"num_hidden_layers": layers} if "num_hidden_layers" in values else {})

        return replace(self, values=tuple(fewer(dict(self.values)).items()))

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(math.prod(s) for s in self.tensors().values())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by its name."""
        kind: Any = getattr(transformers, self.name)
        with torch.device("meta"):
            model = kind(kind.config_class(**dict(self.values)))
        return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}

    def config(self) -> dict[str, object]:
        """Return what goes into config.json."""
        kind: Any = getattr(transformers, self.name)
        made: dict[str, object] = kind.config_class(**dict(self.values)).to_dict()
        return made | {"architectures": [self.name], "dtype": "bfloat16"}


def stock_shape(name: str, **values: object) -> StockShape:
    """Return a shape of the class ``name`` with these values of its config."""
    return StockShape(name, tuple(values.items()))


POSITIONS = "embed_positions.weight"
"""The end of the name of a table of fixed positions."""


AnyShape = Shape | PegasusShape | StockShape


SHAPES: dict[str, AnyShape] = {
    "mt5-small": Shape(512, 1024, 6, 250112, 8, 8, "mt5"),
    "pegasus-large": PegasusShape(1024, 4096, 16, 96103, 16),
    "umt5-xxl-encoder": Shape(4096, 10240, 64, 256384, 24, 0, "umt5"),
    "t5-v1_1-small": Shape(512, 1024, 6, 32128, 8, 8),
    "t5-v1_1-base": Shape(768, 2048, 12, 32128, 12, 12),
    "t5-v1_1-large": Shape(1024, 2816, 16, 32128, 24, 24),
    "flan-t5-xl": Shape(2048, 5120, 32, 32128, 24, 24),
    "mt5-xl": Shape(2048, 5120, 32, 250112, 24, 24, "mt5"),
    "t5-v1_1-xxl": Shape(4096, 10240, 64, 32128, 24, 24),
    "t5-v1_1-xxl-encoder": Shape(4096, 10240, 64, 32128, 24, 0),
    "gemma-3-270m": stock_shape(
        "Gemma3ForCausalLM",
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
    ),
    "gemma-3-1b": stock_shape(
        "Gemma3ForCausalLM",
        vocab_size=262_144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
    ),
    "gemma-3-4b": stock_shape(
        "Gemma3ForConditionalGeneration",
        text_config={
            "vocab_size": 262_208,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
        },
        vision_config={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
        mm_tokens_per_image=256,
    ),
    "qwen2.5-0.5b": stock_shape(
        "Qwen2ForCausalLM",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": stock_shape(
        "LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}

NORMALS = 1 << 24
"""How many different normal numbers weights are made of; more of them are repeated."""


ENTERING = (".wi_0.weight", ".wi_1.weight", ".fc1.weight", ".gate_proj.weight", ".up_proj.weight")
LEAVING = (".wo.weight", ".fc2.weight", ".down_proj.weight")
"""The ends of the names of feed-forward weights, by whether their neurons are rows or columns."""


OUTLIERS, IN, OUT = 3, 8.0, 64.0
"""Neurons of every feed-forward that stand out, and the factors of their rows and of their output columns."""


def write(folder: Path, shape: AnyShape, shards: int = 1, *, outliers: bool = False) -> int:
    """Write a bf16 checkpoint, flushed to the disk, and return its size in bytes.

    Matrices are normal with standard deviation 1/√columns, norms about 1. Shards have about the same size. outliers:
    with neurons that stand out, as published checkpoints have them.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config()))
    table = shape.tensors()
    total = sum(math.prod(s) for s in table.values())
    groups: list[list[str]] = [[] for _ in range(shards)]
    seen = 0
    for name in sorted(table):
        groups[min(shards - 1, seen * shards // total)].append(name)
        seen += math.prod(table[name])
    torch.manual_seed(0)
    normals = torch.randn(NORMALS)
    placed: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        tensors = {name: tensor(name, table[name], normals) for name in group}
        for name, made in tensors.items() if outliers else ():
            stand_out(name, made)
        save_file(tensors, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(group, file)
    if shards > 1:
        index = {"metadata": {"total_size": 2 * total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sync(folder)
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def stand_out(name: str, weight: torch.Tensor) -> None:
    """Make some neurons of a feed-forward's weight stand out, in place."""
    if name.endswith(ENTERING):
        weight[:OUTLIERS] *= IN
    elif name.endswith(LEAVING):
        weight[:, :OUTLIERS] *= OUT


def tensor(name: str, size: tuple[int, ...], normals: torch.Tensor) -> torch.Tensor:
    """Return what a checkpoint holds under a name: biases near 0, fixed positions as stock code makes them."""
    if name.endswith(POSITIONS):
        count, width = size
        angles = torch.arange(count)[:, None] / 10000 ** (torch.arange(width // 2) * 2 / width)
        return torch.cat([angles.sin(), angles.cos()], 1).bfloat16()
    if name.endswith("bias"):
        return weight(size, normals) - 1 if len(size) == 1 else torch.zeros(size, dtype=torch.bfloat16)
    return weight(size, normals)


def weight(size: tuple[int, ...], normals: torch.Tensor) -> torch.Tensor:
    """Return a weight of this shape, made of the given numbers from a random place on."""
    values = torch.empty(math.prod(size), dtype=torch.bfloat16)
    shift = int(torch.randint(len(normals), ()))
    for part in values.split(len(normals) // 4):
        shift = shift if shift + len(part) <= len(normals) else 0
        scaled = normals[shift : shift + len(part)] * (0.1 if len(size) == 1 else size[-1] ** -0.5)
        part.copy_(scaled + 1 if len(size) == 1 else scaled)
        shift += len(part)
    return values.view(size)


def sync(folder: Path) -> None:
    """Flush every file of a folder to the disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
