"""Checkpoints of published shapes with random weights, for benchmarks of what depends on the shapes alone."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
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
                bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
                result |= {bias: (32, self.heads), f"{stack}.final_layer_norm.weight": (d,)}
        return result

    def config(self) -> dict[str, object]:
        """Return what goes into config.json."""
        kind = "ForConditionalGeneration" if self.decoder_layers else "EncoderModel"
        return {
            "architectures": [("MT5" if self.model_type == "mt5" else "T5") + kind],
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


SHAPES = {
    "t5-v1_1-small": Shape(512, 1024, 6, 32128, 8, 8),
    "t5-v1_1-base": Shape(768, 2048, 12, 32128, 12, 12),
    "t5-v1_1-large": Shape(1024, 2816, 16, 32128, 24, 24),
    "flan-t5-xl": Shape(2048, 5120, 32, 32128, 24, 24),
    "mt5-xl": Shape(2048, 5120, 32, 250112, 24, 24, "mt5"),
    "t5-v1_1-xxl": Shape(4096, 10240, 64, 32128, 24, 24),
    "t5-v1_1-xxl-encoder": Shape(4096, 10240, 64, 32128, 24, 0),
}

NORMALS = 1 << 24
"""How many different normal numbers weights are made of; more of them are repeated."""


OUTLIERS, IN, OUT = 3, 8.0, 64.0
"""Neurons of every feed-forward that stand out, and the factors of their rows and of their output columns."""


def write(folder: Path, shape: Shape, shards: int = 1, *, outliers: bool = False) -> int:
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
        tensors = {name: weight(table[name], normals) for name in group}
        for name, tensor in tensors.items() if outliers else ():
            if name.endswith((".wi_0.weight", ".wi_1.weight")):
                tensor[:OUTLIERS] *= IN
            elif name.endswith(".wo.weight"):
                tensor[:, :OUTLIERS] *= OUT
        save_file(tensors, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(group, file)
    if shards > 1:
        index = {"metadata": {"total_size": 2 * total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sync(folder)
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


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
