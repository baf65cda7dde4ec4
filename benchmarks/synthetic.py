"""Checkpoints of published shapes with random weights, for benchmarks of what depends on the shapes alone."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """A model as the class ``name`` of transformers makes it from these values of its config."""

    name: str
    values: dict[str, Any]

    @property
    def layers(self) -> int:
        """The layers of its stack, or of each of two."""
        return int(next(self.values[key] for key in LAYERS if key in self.values))

    def with_layers(self, layers: int) -> Shape:
        """Return the same with so many layers in each stack."""
        return Shape(self.name, self.values | dict.fromkeys(LAYERS & self.values.keys(), layers))

    @property
    def made_of(self) -> Any:
        return getattr(transformers, self.name).config_class(**self.values)

    @property
    def decodes(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return self.made_of.is_encoder_decoder and "Encoder" not in self.name

    def tensors(self) -> dict[str, tuple[int, ...]]:
        with torch.device("meta"):
            model = getattr(transformers, self.name)(self.made_of)
        # transformers 5 ties the head of every T5; published ones have their own.
        own = BUFFERS | ({"lm_head.weight"} if self.values.get("tie_word_embeddings") is False else set())
        kept = {name: tensor for name, tensor in model.state_dict().items() if name in own}
        return {name: tuple(tensor.shape) for name, tensor in (dict(model.named_parameters()) | kept).items()}

    def config(self) -> dict[str, Any]:
        return self.made_of.to_dict() | self.values | {"architectures": [self.name], "dtype": "bfloat16"}


# Keys of configs for how many layers a stack has.
LAYERS = {"num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"}
BUFFERS = {"final_logits_bias"}  # that published files hold


def t5(name: str, d_model: int, d_ff: int, heads: int, vocabulary: int, layers: int, d_kv: int = 64) -> Shape:
    """Return a gated T5 with an untied head."""
    values: dict[str, Any] = {"d_model": d_model, "d_kv": d_kv, "d_ff": d_ff, "num_heads": heads, "num_layers": layers}
    values |= {} if "Encoder" in name else {"num_decoder_layers": layers}
    values |= {"vocab_size": vocabulary, "feed_forward_proj": "gated-gelu"}
    return Shape(name, values | {"tie_word_embeddings": False, "decoder_start_token_id": 0})


T5, MT5 = "T5ForConditionalGeneration", "MT5ForConditionalGeneration"
PEGASUS_STACK = {"layers": 16, "attention_heads": 16, "ffn_dim": 4096}
PEGASUS = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in PEGASUS_STACK.items()}
PEGASUS |= {"d_model": 1024, "vocab_size": 96103, "max_position_embeddings": 512, "decoder_start_token_id": 0}

SHAPES: dict[str, Shape] = {
    "mt5-small": t5(MT5, 512, 1024, 6, 250112, 8),
    "pegasus-large": Shape(
        "PegasusForConditionalGeneration", {**PEGASUS, "activation_function": "relu", "scale_embedding": True}
    ),
    "t5-v1_1-small": t5(T5, 512, 1024, 6, 32128, 8),
    "t5-v1_1-base": t5(T5, 768, 2048, 12, 32128, 12),
    "t5-v1_1-large": t5(T5, 1024, 2816, 16, 32128, 24),
    "flan-t5-xl": t5(T5, 2048, 5120, 32, 32128, 24),
    "t5-v1_1-xxl-encoder": t5("T5EncoderModel", 4096, 10240, 64, 32128, 24),
}

NORMALS = 1 << 24  # how many different normal numbers weights are made of; more of them are repeated
ENTERING = (".wi_0.weight", ".wi_1.weight", ".fc1.weight")
LEAVING = (".wo.weight", ".fc2.weight")
"""The ends of the names of feed-forward weights, by whether their neurons are rows or columns."""

OUTLIERS, IN, OUT = 3, 8.0, 64.0  # neurons that stand out, the factors of their rows and of their output columns


def write(folder: Path, shape: Shape, *, outliers: bool = False) -> int:
    """Write a bf16 checkpoint, flushed to the disk, and return its size in bytes.

    Matrices are normal with standard deviation 1/√columns, norms about 1. Shards have about the same size, at most 5
    GB. outliers: with neurons that stand out, as published checkpoints have them.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config()))
    table = shape.tensors()
    total = sum(math.prod(s) for s in table.values())
    shards = math.ceil(2 * total / 5e9)
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
            if name.endswith(ENTERING):
                made[:OUTLIERS] *= IN
            elif name.endswith(LEAVING):
                made[:, :OUTLIERS] *= OUT
        save_file(tensors, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(group, file)
    if shards > 1:
        index = {"metadata": {"total_size": 2 * total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sync(folder)
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def tensor(name: str, size: tuple[int, ...], normals: torch.Tensor) -> torch.Tensor:
    """Return what a checkpoint holds under a name: biases near 0, fixed positions as stock code makes them."""
    if name.endswith("embed_positions.weight"):
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
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
