"""Encoders as other tools build them, and the files that they read: the names are those of the published code.

Wan: ``wan/modules/t5.py`` of https://github.com/Wan-Video/Wan2.1. Written anew from what its parameters are called and
what they compute; nothing of it comes from the package under test.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import tiny
from torch import nn

WAN_EPS = 1e-6  # which Wan cannot be told otherwise
SPIECE = bytes(range(256)) * 5 + b"odd length"  # stands for the bytes of a SentencePiece model
SPIECE_MODEL = {"spiece_model": torch.tensor(list(SPIECE), dtype=torch.uint8)}
SHAPE: dict[str, Any] = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "num_layers": 2}


def encoder(kind: str = "t5-encoder", **changes: Any) -> Any:
    return tiny.build(kind, **SHAPE | changes)


class Gain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + WAN_EPS)).to(self.weight.dtype)


def buckets(length: int, number: int = 32, farthest: int = 128) -> torch.Tensor:
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    half, exact = number // 2, number // 4
    far = exact + (distance.abs().float().clamp(min=1) / exact).log() / math.log(farthest / exact) * (half - exact)
    near = torch.where(distance.abs() < exact, distance.abs(), far.long().clamp(max=half - 1))
    return near + (distance > 0) * half


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, bias: torch.Tensor) -> torch.Tensor:
    """Return attention without a scale, softmax in fp32; q, k and v of shape [rows, length, heads·size]."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.transpose(-1, -2) + bias).float().softmax(-1).to(v.dtype)
    return (weights @ v).transpose(1, 2).flatten(2)


class WanBlock(nn.Module):
    def __init__(self, width: int, inner: int, hidden: int, heads: int) -> None:
        super().__init__()
        linear = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
        self.heads = heads
        self.norm1, self.norm2 = Gain(width), Gain(width)
        self.attn: Any = nn.ModuleDict({x: linear(width, inner) for x in "qkv"} | {"o": linear(inner, width)})
        gate = nn.Sequential(linear(width, hidden), nn.GELU(approximate="tanh"))
        self.ffn: Any = nn.ModuleDict({"gate": gate, "fc1": linear(width, hidden), "fc2": linear(hidden, width)})
        self.pos_embedding: Any = nn.ModuleDict({"embedding": nn.Embedding(32, heads)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.pos_embedding["embedding"](buckets(x.shape[1])).permute(2, 0, 1)
        h = self.norm1(x)
        q, k, v = (self.attn[n](h) for n in "qkv")
        x = x + self.attn["o"](attend(q, k, v, self.heads, bias))
        h = self.norm2(x)
        return x + self.ffn["fc2"](self.ffn["fc1"](h) * self.ffn["gate"](h))


class Wan(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        c = config
        self.token_embedding = nn.Embedding(c.vocab_size, c.d_model)
        block = (c.d_model, c.num_heads * c.d_kv, c.d_ff, c.num_heads)
        self.blocks: Any = nn.ModuleList(WanBlock(*block) for _ in range(c.num_layers))
        self.norm = Gain(c.d_model)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@torch.no_grad()
def as_wan(model: Any) -> Wan:
    """Return a stock UMT5 encoder's weights in Wan's own class, copied module by module."""
    made = Wan(model.config)
    block: Any
    pairs: list[tuple[Any, Any]] = [(made.token_embedding, model.shared), (made.norm, model.encoder.final_layer_norm)]
    for block, stock in zip(made.blocks, model.encoder.block, strict=True):
        attention, dense = stock.layer[0].SelfAttention, stock.layer[1].DenseReluDense
        pairs += [(block.norm1, stock.layer[0].layer_norm), (block.norm2, stock.layer[1].layer_norm)]
        pairs += [(block.attn[x], getattr(attention, x)) for x in "qkvo"]
        pairs += [(block.pos_embedding["embedding"], attention.relative_attention_bias)]
        pairs += [(block.ffn["gate"][0], dense.wi_0), (block.ffn["fc1"], dense.wi_1), (block.ffn["fc2"], dense.wo)]
    for ours, theirs in pairs:
        ours.weight.copy_(theirs.weight)
    return made


def stored(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return the tensors of a model as a file holds them, without the copies of the embedding."""
    return {
        name: tensor.detach().to(dtype).clone()
        for name, tensor in model.state_dict().items()
        if not name.endswith("embed_tokens.weight")
    }


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    if path.suffix == ".pth":
        torch.save(dict(tensors), path)
    else:
        save_file(dict(tensors), path)
    return path
