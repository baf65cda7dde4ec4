"""Encoders as other tools build them, and the files that they read: the names are those of the published code.

Wan: ``wan/modules/t5.py`` of https://github.com/Wan-Video/Wan2.1. ComfyUI: ``comfy/text_encoders/t5.py`` of
https://github.com/comfyanonymous/ComfyUI, ``llama.py`` there for decoder-only ones, and ``sd3_clip.py`` for what a
bundle puts before the names. Written anew
from what their parameters are called and what they compute; nothing here comes from the package under test.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

WAN_EPS = COMFY_EPS = 1e-6  # neither tool can be told another
SPIECE = bytes(range(256)) * 5 + b"odd length"  # stands for the bytes of a SentencePiece model


class Gain(nn.Module):
    """A norm's gain, with the root mean square taken in fp32 (Wan) or in the input's dtype (ComfyUI)."""

    def __init__(self, width: int, *, wide: bool) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(width)), wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() if self.wide else x
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + WAN_EPS)).to(self.weight.dtype)


def buckets(length: int, number: int = 32, farthest: int = 128) -> torch.Tensor:
    """Return the bucket of every pair of positions."""
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
    """A block as Wan names it."""

    def __init__(self, width: int, inner: int, hidden: int, heads: int) -> None:
        super().__init__()
        linear = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
        self.heads = heads
        self.norm1, self.norm2 = Gain(width, wide=True), Gain(width, wide=True)
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
    """Wan's encoder."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = config
        self.token_embedding = nn.Embedding(c.vocab_size, c.d_model)
        block = (c.d_model, c.num_heads * c.d_kv, c.d_ff, c.num_heads)
        self.blocks: Any = nn.ModuleList(WanBlock(*block) for _ in range(c.num_layers))
        self.norm = Gain(c.d_model, wide=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class ComfyLayer(nn.Module):
    """One of the two layers of a ComfyUI block."""

    def __init__(self, kind: str, shapes: Mapping[str, tuple[int, int]], width: int, tables: tuple[int, int] | None):
        super().__init__()
        inside: Any = nn.Module()
        for name, (a, b) in shapes.items():
            inside.add_module(name, nn.Linear(a, b, bias=False))
        if tables is not None:
            inside.relative_attention_bias = nn.Embedding(*tables)
        self.add_module(kind, inside)
        self.layer_norm = Gain(width, wide=False)


class Comfy(nn.Module):
    """ComfyUI's T5: one bias table, or with ``umt5`` one in every block."""

    def __init__(self, config: Any, *, umt5: bool) -> None:
        super().__init__()
        c, inner = config, config.num_heads * config.d_kv
        self.heads = c.num_heads
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder: Any = nn.Module()
        self.encoder.final_layer_norm = Gain(c.d_model, wide=False)
        self.encoder.block = nn.ModuleList()
        attention = dict.fromkeys("qkv", (c.d_model, inner)) | {"o": (inner, c.d_model)}
        dense = dict.fromkeys(("wi_0", "wi_1"), (c.d_model, c.d_ff)) | {"wo": (c.d_ff, c.d_model)}
        for i in range(c.num_layers):
            block: Any = nn.Module()
            tables = (32, c.num_heads) if umt5 or i == 0 else None
            block.layer = nn.ModuleList(
                [
                    ComfyLayer("SelfAttention", attention, c.d_model, tables),
                    ComfyLayer("DenseReluDense", dense, c.d_model, None),
                ]
            )
            self.encoder.block.append(block)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, bias = self.shared(ids), torch.zeros(())
        for block in self.encoder.block:
            first, second = block.layer
            a, d = first.SelfAttention, second.DenseReluDense
            if hasattr(a, "relative_attention_bias"):
                bias = a.relative_attention_bias(buckets(x.shape[1])).permute(2, 0, 1)
            h = first.layer_norm(x)
            x = x + a.o(attend(a.q(h), a.k(h), a.v(h), self.heads, bias))
            h = second.layer_norm(x)
            x = x + d.wo(nn.functional.gelu(d.wi_0(h), approximate="tanh") * d.wi_1(h))
        return self.encoder.final_layer_norm(x)


class CastLinear(nn.Linear):
    """A linear that casts its weights to what it reads, as all of ComfyUI's text encoders do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class ComfyNorm(nn.Module):
    """An RMSNorm of ComfyUI's decoder-only encoders: torch's own, with a gain that is cast, and of Gemma has 1 added in
    the dtype of the weights."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.ones(width)), eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.weight + self.offset if self.offset else self.weight
        return nn.functional.rms_norm(x, gain.shape, gain.to(x.dtype), self.eps)


class ComfyBlock(nn.Module):
    """A layer of ComfyUI's decoder-only encoders; normed: queries and keys, heads and channels by the config ``c``."""

    def __init__(self, c: Any, eps: float, *, gemma: bool, normed: bool, biased: bool) -> None:
        super().__init__()
        self.heads, self.shared, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        linear = lambda a, b, bias=False: CastLinear(a, b, bias=bias)  # noqa: E731
        norm = lambda width: ComfyNorm(width, eps, 1.0 if gemma else 0.0)  # noqa: E731
        self.self_attn: Any = nn.ModuleDict(
            {
                f"{x}_proj": linear(c.hidden_size, n * size, biased)
                for x, n in zip("qkv", (self.heads, *[self.shared] * 2), strict=True)
            }
            | {"o_proj": linear(self.heads * size, c.hidden_size)}
            | ({"q_norm": norm(size), "k_norm": norm(size)} if normed else {})
        )
        self.mlp: Any = nn.ModuleDict(
            {f"{x}_proj": linear(c.hidden_size, c.intermediate_size) for x in ("gate", "up")}
            | {"down_proj": linear(c.intermediate_size, c.hidden_size)}
        )
        self.input_layernorm, self.post_attention_layernorm = norm(c.hidden_size), norm(c.hidden_size)
        self.gemma = gemma
        if gemma:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(c.hidden_size), norm(c.hidden_size)

    def attend(self, x: torch.Tensor, turned: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        a, (cos, sin) = self.self_attn, turned
        q, k, v = (a[f"{n}_proj"](x).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2) for n in "qkv")
        if "q_norm" in a:
            q, k = a["q_norm"](q), a["k_norm"](k)
        q, k = ((y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin).to(x.dtype) for y in (q, k))
        k, v = (y.repeat_interleave(self.heads // self.shared, 1) for y in (k, v))
        return a["o_proj"](nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        m = self.mlp
        act = (lambda y: nn.functional.gelu(y, approximate="tanh")) if self.gemma else nn.functional.silu
        return m["down_proj"](act(m["gate_proj"](x)) * m["up_proj"](x))

    def forward(self, x: torch.Tensor, turned: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        y = self.attend(self.input_layernorm(x), turned, mask)
        if not self.gemma:
            x = x + y
            return x + self.feed(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.feed(self.pre_feedforward_layernorm(x)))


class ComfyDecoder(nn.Module):
    """ComfyUI's decoder-only encoder for the text config ``c``: activations in ``dtype``, by default fp32, whatever its
    weights are; positions turn in fp32, in every sixth layer of Gemma 3 by another base."""

    def __init__(self, c: Any, eps: float) -> None:
        super().__init__()
        kind = c.model_type
        self.gemma, self.size = kind.startswith("gemma"), c.head_dim
        made = {"gemma": self.gemma, "normed": kind in ("qwen3", "gemma3_text"), "biased": kind.startswith("qwen2")}
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(ComfyBlock(c, eps, **made) for _ in range(c.num_hidden_layers))
        self.model.norm = ComfyNorm(c.hidden_size, eps, 1.0 if self.gemma else 0.0)
        kinds, turns = [""] * c.num_hidden_layers, {"": c.rope_parameters}
        if kind == "gemma3_text":
            kinds, turns = c.layer_types, c.rope_parameters
        self.bases = [turns[layer]["rope_theta"] for layer in kinds]

    def turned(self, base: float, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(length).float()[:, None] / base ** (torch.arange(0, self.size, 2).float() / self.size)
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

    def forward(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the last states, and what enters each layer."""
        x = self.model.embed_tokens(ids).to(dtype)
        x = x * x.shape[-1] ** 0.5 if self.gemma else x
        mask, inner = torch.full((ids.shape[1],) * 2, float("-inf"), dtype=dtype).triu_(1), []
        for layer, base in zip(self.model.layers, self.bases, strict=True):
            inner.append(x)
            x = layer(x, self.turned(base, ids.shape[1]), mask)
        return self.model.norm(x), inner


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


def stored(model: nn.Module, dtype: torch.dtype = torch.bfloat16, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a model as a file holds them, each with memory of its own and without the copies of the
    embedding."""
    return {
        prefix + name: tensor.detach().to(dtype).clone()
        for name, tensor in model.state_dict().items()
        if not name.endswith("embed_tokens.weight")
    }


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write tensors as their tool does: ``.pth`` by torch, else safetensors."""
    if path.suffix == ".pth":
        torch.save(dict(tensors), path)
    else:
        save_file(dict(tensors), path)
    return path


def spiece() -> torch.Tensor:
    return torch.tensor(list(SPIECE), dtype=torch.uint8)


def in_fp8(tensors: Mapping[str, torch.Tensor], *, ending: str = "scale_weight") -> dict[str, torch.Tensor]:
    """Return tensors as ComfyUI's scaled fp8 files hold them: matrices of linears in e4m3, each with a scale."""
    found: dict[str, torch.Tensor] = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        found[name] = tensor
        if tensor.ndim == 2 and "bias" not in name and "shared" not in name:
            scale = tensor.float().abs().max() / 448
            found[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            found[name.removesuffix("weight") + ending] = scale.reshape(())
            found[name.removesuffix("weight") + "scale_input"] = torch.tensor(1.0)
    return found
