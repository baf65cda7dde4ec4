"""The certificate put to the test: is it sound, what does it cost, how loose is it.

    python benchmarks/certify.py --soundness 500
    python benchmarks/certify.py --cost
    python benchmarks/certify.py --width

``--soundness`` makes random models of every family, whose norms read inputs found by gradient ascent on the signals
behind them, and looks for a value beyond its bound in fp64, fp32, fp16, fp16 with split sums, training, and partial
sums; it exits with 1 where it finds one. ``--cost`` times the certificate at the layer shapes of large checkpoints
beside reading their files. ``--width`` shows how far the bounds lie above what the ascent reaches, for random and
trained weights, and draws it.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import synthetic
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bf16_to_fp16.certificate import Arithmetic, Certificate, bound, stacks
from bf16_to_fp16.conversion import ModelTensors, weights_of
from bf16_to_fp16.families import resolve
from bf16_to_fp16.families.types import Attention, FeedForward, Layout, value
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.observe import SiteObserver
from bf16_to_fp16.rescaling import Plan, apply

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "bf16_to_fp16" / "demo_data"
PICTURE = ROOT / "benchmarks" / "certify_width.svg"
FREE = ("residual", "embedding", "statistic")
"""Kinds of sites that depend on what enters the stream, which an adversary at the norms does not move."""


# ---- random models -------------------------------------------------------------------------------------------------


def t5_config(r: random.Random, kind: str) -> Any:
    """Return a random small configuration of a T5 family."""
    plain = r.choice(["relu", "gelu", "silu", "gelu_new"])
    gate = r.choice(["gated-gelu", "gated-silu", "gated-relu"])
    shape: dict[str, Any] = {
        "d_model": r.choice([1, 2, 3, 5, 8, 13, 24, 40, 64]),
        "d_kv": r.choice([1, 2, 3, 5, 8, 12]),
        "num_heads": r.choice([1, 2, 3, 5]),
        "d_ff": r.choice([1, 2, 7, 37, 96]),
        "num_layers": r.choice([1, 2, 3]),
        "num_decoder_layers": r.choice([1, 2]),
        "vocab_size": r.choice([5, 31, 97]),
        "relative_attention_num_buckets": r.choice([4, 9, 32]),
        "relative_attention_max_distance": 128,
        "decoder_start_token_id": 0,
        "dropout_rate": r.choice([0.05, 0.1, 0.15, 0.3, 0.5]),
        "feed_forward_proj": plain if kind == "t5" else gate,
    }
    if kind == "v1.1":
        shape["tie_word_embeddings"] = False
    config = {"mt5": transformers.MT5Config, "umt5": transformers.UMT5Config}.get(kind, transformers.T5Config)
    return config(**shape)


def pegasus_config(r: random.Random) -> Any:
    """Return a random small configuration of Pegasus."""
    heads, other = r.choice([(1, 1), (2, 1), (3, 2), (4, 4)])
    return transformers.PegasusConfig(
        d_model=2 * heads * other * r.choice([1, 2, 3, 5]),
        encoder_attention_heads=heads,
        decoder_attention_heads=other,
        encoder_layers=r.choice([1, 2]),
        decoder_layers=r.choice([1, 2]),
        encoder_ffn_dim=r.choice([1, 7, 37]),
        decoder_ffn_dim=r.choice([2, 29]),
        vocab_size=r.choice([5, 31, 97]),
        max_position_embeddings=512,
        activation_function=r.choice(["relu", "gelu", "silu", "gelu_new"]),
        scale_embedding=r.choice([True, False]),
        dropout=r.choice([0.1, 0.3]),
        attention_dropout=r.choice([0.0, 0.15]),
        activation_dropout=r.choice([0.0, 0.2]),
        decoder_start_token_id=0,
    )


KINDS = ("t5", "v1.1", "mt5", "umt5", "pegasus", "t5-encoder", "mt5-encoder", "umt5-encoder", "pegasus", "demo")


def random_model(seed: int) -> tuple[str, Any]:
    """Return the kind and a random fp32 model in eval mode, every weight of which fp16 can hold."""
    r = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    torch.manual_seed(seed)
    if kind == "demo":
        return kind, demo_model(r)
    if kind == "pegasus":
        model: Any = transformers.PegasusForConditionalGeneration(pegasus_config(r))
    else:
        family, _, encoder = kind.partition("-")
        prefix = {"mt5": "MT5", "umt5": "UMT5"}.get(family, "T5")
        name = f"{prefix}EncoderModel" if encoder else f"{prefix}ForConditionalGeneration"
        model = getattr(transformers, name)(t5_config(r, family))
        if hasattr(model, "lm_head") and kind != "t5" and r.random() < 0.7:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    randomise(model, r)
    return kind, model.eval()


def demo_model(r: random.Random) -> Any:
    """Return a demo checkpoint's trained weights with its residual stream scaled into fp16's range."""
    from bf16_to_fp16.auditing import load

    model = load(DEMO / r.choice(["t5-gated-bytes", "pegasus-bytes"]), torch.float32)
    layout = resolve(ModelTensors(model))
    apply(model, layout, Plan(family=layout.family.name, residual_exponent=-r.choice([4, 6, 8])))
    for tensor in model.state_dict().values():
        tensor.copy_(tensor.half().float())
    for name in ("dropout_rate", "dropout"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.1)
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
    for wiring in layout.wiring:
        if isinstance(wiring, Attention):
            cancel_attention(state, wiring, int(str(value(layout.family, layout.config, wiring.heads))), r)
            if r.random() < 0.2:
                # Steps of the last subnormals, whose partial sums round by their own size.
                tiny = state[f"{r.choice([wiring.query, wiring.key, wiring.value])}.weight"]
                tiny.copy_(tiny.sign() * 2.0**-24 * r.choice([1, 1, 2, 3]))
        elif r.random() < 0.3 and isinstance(wiring, FeedForward):
            cancel_neurons(state, wiring)
        elif r.random() < 0.3 and isinstance(wiring, FeedForward):
            sink_neurons(state, wiring)
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
    """Return a random bias."""
    return torch.randn(size) * r.choice([0.0, 0.1, 1.0, 50.0])


def gains(r: random.Random, size: int) -> Tensor:
    """Return random gains of a norm."""
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
    inner = state[f"{w.value}.weight"].shape[0]
    size = inner // heads
    if size < 2:
        return
    pairs = [(h * size + j, h * size + j + 1) for h in range(heads) for j in range(0, size - 1, 2)]
    for read, write in (((w.value, 0), (w.output, 1)), ((w.query, 0), (w.key, 0))):
        if r.random() < 0.3:
            for a, b in pairs:
                for path, axis in (read, write):
                    tensor = state[f"{path}.weight"]
                    rows = tensor if axis == 0 else tensor.t()
                    rows[b] = rows[a] * (1 if (path, axis) == read else -1)
                    bias = state.get(f"{path}.bias") if axis == 0 else None
                    if bias is not None:
                        bias[b] = bias[a] * (1 if (path, axis) == read else -1)
                state[f"{read[0]}.weight"][b, 0] *= 1 + 2.0**-10


def cancel_neurons(state: Mapping[str, Tensor], w: FeedForward) -> None:
    """Make neurons come in equal pairs that the output weighs with opposite signs."""
    out = state[f"{w.output}.weight"]
    for j in range(0, out.shape[1] - 1, 2):
        for path in (w.linear, w.gate):
            for part in ("weight", "bias"):
                tensor = state.get(f"{path}.{part}")
                if tensor is not None:
                    tensor[j + 1] = tensor[j]
        out[:, j + 1] = -out[:, j] * (1 + 2.0**-10)


def sink_neurons(state: Mapping[str, Tensor], w: FeedForward) -> None:
    """Make all neurons of a plain feed-forward alike, with negative output weights: together they reach the least that
    an activation gives."""
    if w.gate:
        return
    linear, out = state[f"{w.linear}.weight"], state[f"{w.output}.weight"]
    linear.copy_(linear[:1] / linear[:1].norm().clamp(min=1e-6) * 2)
    out.copy_(-out.abs())
    if f"{w.linear}.bias" in state:
        state[f"{w.linear}.bias"].zero_()


def cancel_biases(state: Mapping[str, Tensor], layout: Layout) -> None:
    """Make every bias behind a norm take out what the norm's shift gives."""
    for wiring in layout.wiring:
        paths = (
            [wiring.query, wiring.key, wiring.value]
            if isinstance(wiring, Attention) and not wiring.memory
            else [wiring.linear]
            if isinstance(wiring, FeedForward)
            else []
        )
        for path in paths:
            state[f"{path}.bias"].copy_(-state[f"{path}.weight"] @ state[f"{wiring.norm}.bias"])


# ---- the adversary -------------------------------------------------------------------------------------------------


def readers(layout: Layout) -> Iterator[tuple[str, Any, bool]]:
    """Yield every norm with the sublayer behind it (None: a stack's end), and whether it is the encoder's."""
    for i, (ends, sublayers) in enumerate(stacks(layout)):
        for wiring in sublayers:
            yield wiring.norm, wiring, i == 0
        yield ends.norm, None, i == 0


@contextmanager
def reading(model: Any, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Let every norm read ``inputs``, [batch, positions, d], in place of the residual stream."""

    def replace(path: str) -> Any:
        return lambda module, args: (ready[path],)

    with ExitStack() as stack:
        # Cast here: inside, the cast would be an operation of the norm.
        ready = {p: x.to(model.get_submodule(p).weight.dtype) for p, x in inputs.items()}
        for path in inputs:
            stack.callback(model.get_submodule(path).register_forward_pre_hook(replace(path)).remove)
        yield


@contextmanager
def capturing(model: Any, layout: Layout) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Give input and output of every linear that the wiring names, by path."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[path] = (args[0], output)

        return hook

    with ExitStack() as stack:
        for path in linears(layout):
            stack.callback(model.get_submodule(path).register_forward_hook(keep(path)).remove)
        yield seen


def linears(layout: Layout) -> list[str]:
    """Return the module paths of all linears."""
    paths: list[str] = []
    for wiring in layout.wiring:
        if isinstance(wiring, Attention):
            paths += [wiring.query, wiring.key, wiring.value, wiring.output]
        elif isinstance(wiring, FeedForward):
            paths += [p for p in (wiring.gate, wiring.linear, wiring.output) if p]
    return paths if layout.encoder_only else [*paths, layout.family.head.removesuffix(".weight")]


def forward(model: Any, layout: Layout, batch: int, lengths: tuple[int, int]) -> None:
    """Run a model on fixed ids, which are of no account where its norms read something else."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, lengths[0]), generator=generator)
    if layout.encoder_only:
        model(input_ids=ids)
    else:
        decoder = torch.randint(model.config.vocab_size, (batch, lengths[1]), generator=generator)
        model(input_ids=ids, decoder_input_ids=decoder, use_cache=False)


@dataclass
class Aim:
    """What one batch entry makes large: ``path`` and the signal there, a channel or head, and two positions."""

    what: str
    wiring: Any
    path: str
    index: int
    at: int
    other: int
    sign: int

    def of(self, seen: Mapping[str, tuple[Tensor, Tensor]], b: int, heads: int) -> Tensor:
        """Return the signal, signed."""
        if self.what == "scores":
            size = seen[self.wiring.query][1].shape[-1] // heads
            part = slice(self.index * size, (self.index + 1) * size)
            query, key = seen[self.wiring.query][1][b, self.at, part], seen[self.wiring.key][1][b, self.other, part]
            return self.sign * (query * key).sum()
        return self.sign * seen[self.path][self.what == "output"][b, self.at, self.index]


def aims(
    layout: Layout, certificate: Certificate, batch: int, lengths: tuple[int, int], r: random.Random, tall: float
) -> list[list[Aim]]:
    """Return for every batch entry one aim per norm, the kinds of signal in turn.

    tall: how often it is the channel with the largest bound; else any.
    """

    def channel(path: str, side: str) -> int:
        bounds = getattr(certificate.ranges[path], side).amax
        return int(bounds.argmax()) if r.random() < tall else r.randrange(bounds.numel())

    result = []
    for b in range(batch):
        entry = []
        for _norm, wiring, encoder in readers(layout):
            length, behind = lengths[0 if encoder else 1], lengths[0]
            at, other, sign = r.randrange(length), r.randrange(length), r.choice([1, -1])
            if isinstance(wiring, Attention):
                choices = [
                    ("output", p) for p in (wiring.output, wiring.query, wiring.key, wiring.value, wiring.output)
                ]
                what, path = (*choices, ("scores", ""), ("input", wiring.output), ("scores", ""))[b % 8]
                if path == wiring.output and r.random() < 0.5:
                    at = length - 1  # the one position of a decoder that sees all
                other = r.randrange(behind) if wiring.memory else other
                if wiring.memory and path in (wiring.key, wiring.value):
                    at = other
                heads = int(str(value(layout.family, layout.config, wiring.heads)))
                index = r.randrange(heads) if what == "scores" else channel(path, what)
                entry.append(Aim(what, wiring, path, index, at, other, sign))
            elif isinstance(wiring, FeedForward):
                choices = [("output", p) for p in (wiring.output, wiring.gate or wiring.linear, wiring.linear)]
                what, path = (*choices, ("input", wiring.output), *choices[:1])[b % 5]
                sign = (1, -1)[b // 5 % 2]
                entry.append(Aim(what, wiring, path, channel(path, what), at, other, sign))
            elif not encoder:
                path = layout.family.head.removesuffix(".weight")
                entry.append(Aim("output", None, path, channel(path, "output"), at, other, sign))
        result.append(entry)
    return result


@torch.no_grad()
def start(model: Any, aim: Aim, generator: torch.Generator) -> Tensor | None:
    """Return a direction from which an aim behind a feed-forward's activation can be climbed, [d]; None where any can.

    A closed gate has no gradient. For a neuron: where its two rows agree. For an output: the leading eigenvector of
    the squares that bound the gated products (a few power iterations), or for plain neurons the sum of the open ones.
    """
    w = aim.wiring
    if not isinstance(w, FeedForward) or aim.path != w.output:
        return None
    norm = model.get_submodule(w.norm).weight
    linear = model.get_submodule(w.linear).weight * norm
    gate = model.get_submodule(w.gate).weight * norm if w.gate else linear
    if aim.what == "input":
        one, other = (torch.nn.functional.normalize(x[aim.index], dim=0) for x in (gate, linear))
        return one + aim.sign * other if w.gate else linear[aim.index]
    row = aim.sign * model.get_submodule(w.output).weight[aim.index]
    if not w.gate:
        return row.clamp(min=0) @ linear
    sizes = (row.abs() * gate.norm(dim=1) * linear.norm(dim=1))[:, None]
    rows = torch.nn.functional.normalize(gate, dim=1) + row.sign()[:, None] * torch.nn.functional.normalize(
        linear, dim=1
    )
    n = torch.randn(rows.shape[1], generator=generator, dtype=rows.dtype)
    for _ in range(12):
        n = torch.nn.functional.normalize(rows.t() @ (sizes[:, 0] * (rows @ n)), dim=0)
    # Both ends of the axis give the same squares, but only one opens the gates that matter.
    reached = [(row * model.get_submodule(w.act)(gate @ v * 1e3) * (linear @ v)).sum() for v in (n, -n)]
    return n if reached[0] > reached[1] else -n


def ascend(
    model: Any,
    layout: Layout,
    targets: list[list[Aim]],
    lengths: tuple[int, int],
    seed: int,
    steps: int,
    size: float = 300.0,
) -> dict[str, Tensor]:
    """Return inputs of every norm, of length ``size`` and [batch, positions, d], found by gradient ascent on the
    targets' logarithms.

    Each step turns every vector towards its gradient, by less and less: the first steps are all but power iteration.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    inputs, pace = {}, {}
    for path, _wiring, encoder in readers(layout):
        width = model.get_submodule(path).weight.numel()
        shape = (len(targets), lengths[0 if encoder else 1], width)
        inputs[path] = torch.randn(shape, generator=generator, dtype=dtype)
        pace[path] = torch.ones(*shape[:2], 1, dtype=dtype)
    for b, entry in enumerate(targets):
        for aim in entry:
            direction = start(model, aim, generator)
            if direction is not None:
                inputs[aim.wiring.norm][b, aim.at] = direction
                pace[aim.wiring.norm][b, aim.at] = 0.1
    inputs = {p: (size * torch.nn.functional.normalize(x, dim=-1)).requires_grad_() for p, x in inputs.items()}
    heads = {
        w.at: int(str(value(layout.family, layout.config, w.heads))) for w in layout.wiring if isinstance(w, Attention)
    }
    with reading(model, inputs), capturing(model, layout) as seen:
        for step in range(steps):
            forward(model, layout, len(targets), lengths)
            total = torch.zeros((), dtype=dtype)
            for b, entry in enumerate(targets):
                for aim in entry:
                    reached = aim.of(seen, b, heads[aim.wiring.at] if isinstance(aim.wiring, Attention) else 1)
                    if step == 0 and float(reached.detach()) < 0 and aim.what != "input":
                        aim.sign *= -1
                        reached = -reached
                    # A logarithm weighs all alike; below zero the value itself is raised.
                    at = float(reached.detach())
                    total = total + (reached.log() if at > 0 else reached / max(-at, 1e-30))
            gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
            turn = 3.0 * (0.9**step)
            with torch.no_grad():
                for (path, x), gradient in zip(inputs.items(), gradients, strict=True):
                    if gradient is not None:
                        step_ = turn * pace[path] * torch.nn.functional.normalize(gradient.nan_to_num(), dim=-1)
                        x.copy_(size * torch.nn.functional.normalize(x / size + step_, dim=-1))
    return {path: x.detach() for path, x in inputs.items()}


# ---- soundness -----------------------------------------------------------------------------------------------------


class SplitSums(TorchDispatchMode):
    """Computes every fp16 matrix product as up to ``splits`` partial sums over random parts of the terms, each rounded
    to fp16 and added in fp16, as kernels that split a reduction do."""

    def __init__(self, splits: int, seed: int) -> None:
        super().__init__()
        self.splits, self.generator = splits, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in ("mm", "bmm", "addmm") or args[0].dtype != torch.float16:
            return func(*args, **(kwargs or {}))
        left, right = (a.float() for a in args[-2:])
        terms = left.shape[-1]
        part = torch.randint(self.splits, (terms,), generator=self.generator)
        total = torch.zeros(())
        for k in range(self.splits):
            kept = (part == k).nonzero().flatten()
            total = total.half() + (left[..., kept] @ right[..., kept, :]).half() if len(kept) else total
        return total + args[0] if name == "addmm" else total.half().expand(*left.shape[:-1], right.shape[-1])


def unscreened(site: Any, skip: frozenset[str]) -> bool:
    """Return whether a site's name means the same in every kernel."""
    path, _, operation = site.name.partition(":")
    return "constant" not in site.name and not (path in skip and operation != "context")


def watch(
    model: Any, run: Callable[[], None], attention: str, *, fast: bool = True, split: int = 0
) -> dict[str, float]:
    """Return the largest |x| at every site while ``run`` runs."""
    model.set_attn_implementation(attention)
    observer = SiteObserver(model, fast_products=fast and not split)
    with ExitStack() as stack:
        if not model.training:
            stack.enter_context(torch.no_grad())
        if split:
            stack.enter_context(SplitSums(8, split))
        stack.enter_context(observer)
        run()
    # Kernels of SDPA multiply queries and keys under the names that eager attention gives to scores and weights.
    skip = frozenset(
        name for name, m in model.named_modules() if attention == "sdpa" and type(m).__name__.endswith("Attention")
    )
    found: dict[str, float] = {}
    for site in observer.sites():
        if unscreened(site, skip):
            found[site.name] = max(found.get(site.name, 0.0), site.amax)
    return found


def prefix(name: str) -> str:
    """Return the sublayer or layer of a site."""
    parts = name.partition(":")[0].split(".")
    for word, length in (("block", 5), ("layers", 4)):
        if word in parts:
            return ".".join(parts[:length])
    return name


@dataclass
class Tally:
    """What was compared: values per way of computing, the largest share of a bound per kind, and violations."""

    values: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    largest: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    violations: list[str] = field(default_factory=list)

    def compare(
        self,
        way: str,
        label: str,
        certificate: Certificate,
        seen: Mapping[str, float],
        kinds: tuple[str, ...] = (),
        slack: float = 0.0,
        partial: bool = False,
    ) -> None:
        """Compare what was seen with the bounds; ``kinds`` are left out."""
        spoiled = {prefix(s.name) for s in certificate.sites if not s.largest <= FP16_MAX}
        everywhere = any(s.kind == "norm" and not s.largest <= FP16_MAX for s in certificate.sites)
        for site in certificate.sites:
            if site.kind in kinds or site.name not in seen:
                continue
            amax = seen[site.name]
            # An overflow proves nothing behind a bound that lies beyond fp16 as well.
            if amax == math.inf and (everywhere or prefix(site.name) in spoiled):
                continue
            limit = site.partial if partial else site.bound
            self.values[way] += 1
            share = amax / limit if limit > 0 else (math.inf if amax > 0 else 0.0)
            key = (way, site.kind)
            if math.isfinite(limit):
                self.largest[key] = max(self.largest[key], share)
            if not amax <= limit * (1 + slack):
                self.violations.append(f"{label} {way} {site.kind} {site.name}: {amax!r} > {limit!r} ({share:.6f})")


def subset_sums(model: Any, layout: Layout, inputs: Mapping[str, Tensor], run: Callable[[], None]) -> dict[str, float]:
    """Return, for every linear and every attention's scores, the largest sum of some of its products, in fp64: all
    positive or all negative ones, rounded to fp16."""
    found: dict[str, float] = {}

    def sums(left: Tensor, right: Tensor) -> float:
        up = left.clamp(min=0) @ right.clamp(min=0) + left.clamp(max=0) @ right.clamp(max=0)
        down = left.clamp(min=0) @ right.clamp(max=0) + left.clamp(max=0) @ right.clamp(min=0)
        return max(float(up.max().half()), float(-down.min().half()))

    model.set_attn_implementation("eager")
    with torch.no_grad(), reading(model, inputs), capturing(model, layout) as seen:
        run()
    for path, (x, _) in seen.items():
        if bool(x.isfinite().all()):
            found[path] = sums(x.double().flatten(0, 1), model.get_submodule(path).weight.double().t())
    for w in layout.wiring:
        if isinstance(w, Attention):
            heads = int(str(value(layout.family, layout.config, w.heads)))
            q, k = (seen[p][1].double().unflatten(-1, (heads, -1)).transpose(1, 2) for p in (w.query, w.key))
            if bool(q.isfinite().all() and k.isfinite().all()):
                found[f"{w.at}:scores"] = sums(q, k.transpose(2, 3))
    return found


def certified(model: Any, arithmetic: Arithmetic, target: str = "half") -> Certificate:
    """Return a model's certificate."""
    source = ModelTensors(model)
    layout = resolve(source)
    return bound(layout, weights_of(source, layout), arithmetic, target=target)


def nearly_constant(inputs: dict[str, Tensor], certificate: Certificate, r: random.Random) -> dict[str, Tensor]:
    """Return inputs of LayerNorms with a mean as large as the stream allows beside a small deviation."""
    changed = {}
    for path, x in inputs.items():
        stream = certificate.ranges[path].input.amax.double()
        least = min(float(stream.min()), FP16_MAX / 2)
        spread = least * 2.0 ** -r.randint(2, 14)
        changed[path] = torch.nn.functional.normalize(x, dim=-1) * spread + (least - spread) * r.choice([-1, 1])
    return changed


def one_case(seed: int, tally: Tally, steps: int) -> str:
    """Look for a violation in one random model; return its label."""
    r = random.Random(seed * 7919 + 1)
    kind, wide = random_model(seed)
    label = f"seed {seed} {kind}"
    lengths = r.choice([(9, 7)] * 6 + [(1, 1), (1, 5), (80, 50), (400, 2)])
    places = getattr(wide.config, "max_position_embeddings", max(lengths))
    lengths = (min(lengths[0], places), min(lengths[1], places))
    batch = 12 if max(lengths) < 50 else 3
    longest = max(lengths)
    half, double = copy.deepcopy(wide).half(), copy.deepcopy(wide).double()
    layout = resolve(ModelTensors(half))
    default = certified(half, Arithmetic(longest))
    strict = certified(half, Arithmetic(longest, splits=0))
    double.set_attn_implementation("eager")
    double.requires_grad_(False)
    targets = aims(layout, default, batch, lengths, r, 0.5)
    inputs = ascend(double, layout, targets, lengths, seed, steps)
    noise = torch.Generator().manual_seed(seed)
    # Copies that round differently.
    inputs = {
        p: torch.cat([x, x * (1 + 2.0**-9 * torch.randn(x.shape, generator=noise, dtype=x.dtype))])
        for p, x in inputs.items()
    }

    def free(model: Any, chosen: Mapping[str, Tensor]) -> Callable[[], None]:
        def run() -> None:
            with reading(model, chosen):
                forward(model, layout, 2 * batch, lengths)

        return run

    exact = certified(half, Arithmetic(longest, exact=True))
    seen = watch(double, free(double, inputs), "eager")
    tally.compare("exact", label, exact, seen, (*FREE, "normalised"), slack=1e-5)
    seen = watch(wide, free(wide, inputs), r.choice(["eager", "sdpa"]))
    tally.compare("fp32", label, strict, seen, (*FREE, "normalised"))
    choices = [("fp16", "eager", True, 0), ("fp16 SDPA", "sdpa", True, 0), ("fp16 split", "eager", False, seed + 1)]
    if seed % 3 == 0:
        choices[0] = ("fp16 native", "eager", False, 0)
    for way, attention, fast, split in choices:
        chosen = inputs
        if layout.family.centred_norm and r.random() < 0.4:
            chosen = nearly_constant(inputs, strict, r)
        seen = watch(half, free(half, chosen), attention, fast=fast, split=split)
        tally.compare(way, label, default if split else strict, seen, FREE)
    seen = subset_sums(half, layout, inputs, free(half, inputs))
    tally.compare("partial sums", label, strict, seen, FREE, partial=True)
    trained = certified(half, Arithmetic(longest, train=True, splits=0))
    half.train()
    torch.manual_seed(seed)
    seen = watch(half, free(half, inputs), "eager")
    half.eval()
    tally.compare("training", label, trained, seen, FREE)
    whole(seed, tally, label, half, layout, strict, trained, lengths)
    return label


def whole(
    seed: int,
    tally: Tally,
    label: str,
    half: Any,
    layout: Layout,
    strict: Certificate,
    trained: Certificate,
    lengths: tuple[int, int],
) -> None:
    """Run a model on random ids, and compare every site, the stream's too, and the squares of what enters a norm."""
    if not strict.holds:
        return
    squares: dict[str, float] = {}

    def look(path: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            x = args[0].detach()
            total = torch.zeros(x.shape[:-1], dtype=x.dtype)
            for channel in (x * x).unbind(-1):
                total = total + channel
            name = f"{path} (sum of squares)"
            squares[name] = max(squares.get(name, 0.0), float(total.max()))

        return hook

    generator = torch.Generator().manual_seed(seed)

    def run() -> None:
        for _ in range(2):
            ids = torch.randint(half.config.vocab_size, (6, lengths[0]), generator=generator)
            ids[0] = ids[0, 0]
            # Rows padded to different lengths.
            mask = (torch.arange(lengths[0]) < torch.randint(1, lengths[0] + 1, (6, 1), generator=generator)).long()
            if layout.encoder_only:
                half(input_ids=ids, attention_mask=mask)
            else:
                decoder = torch.randint(half.config.vocab_size, (6, lengths[1]), generator=generator)
                half(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder, use_cache=False)

    for attention in ("eager", "sdpa"):
        tally.compare("whole model", label, strict, watch(half, run, attention))
    safe = certified(half, Arithmetic(max(lengths), splits=0), "norm-safe")
    if max(s.bound for s in safe.sites if s.kind == "squares") <= FP16_MAX:
        with ExitStack() as stack, torch.no_grad():
            for path, _wiring, _encoder in readers(layout):
                stack.callback(half.get_submodule(path).register_forward_pre_hook(look(path)).remove)
            run()
        tally.compare("whole model", label, safe, squares)
    if trained.holds:
        half.train()
        torch.manual_seed(seed)
        tally.compare("training", label, trained, watch(half, run, "eager"))
        half.eval()


def soundness(cases: int, first: int, steps: int) -> bool:
    """Look for violations in ``cases`` random models; return whether there is none."""
    torch.set_num_threads(1)
    tally, begin = Tally(), time.monotonic()
    for seed in range(first, first + cases):
        known = len(tally.violations)
        try:
            one_case(seed, tally, steps)
        except Exception as error:
            raise RuntimeError(f"seed {seed}") from error
        for line in tally.violations[known : known + 3]:
            print(f"VIOLATION {line}", file=sys.stderr, flush=True)
    ways = list(tally.values)
    kinds = sorted({kind for _, kind in tally.largest})
    print(
        f"{cases} models, {sum(tally.values.values())} sites compared, {len(tally.violations)} violations,"
        f" {time.monotonic() - begin:.0f} s, load {os.getloadavg()[0]:.1f}; largest share of its bound:\n"
    )
    print(f"| kind | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}")
    for kind in kinds:
        cells = [f"{tally.largest[w, kind]:.4f}" if (w, kind) in tally.largest else "" for w in ways]
        print(f"| {kind} | {' | '.join(cells)} |")
    print(f"| sites | {' | '.join(str(tally.values[w]) for w in ways)} |\n")
    return not tally.violations


# ---- cost ----------------------------------------------------------------------------------------------------------


WHOLE = [name for name, shape in synthetic.SHAPES.items() if shape.decoder_layers]
PRODUCTS = {"mm", "bmm", "addmm", "mv", "dot", "addmv", "baddbmm"}
FACTORISATIONS = {"linalg_cholesky_ex", "_linalg_eigh", "linalg_eigh", "linalg_qr", "_linalg_eigvals", "geqrf"}


class Clock(TorchDispatchMode):
    """Sums the seconds and multiplications of matrix products, and the seconds of factorisations and of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self.multiplications: dict[torch.dtype, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        begin = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        spent = time.perf_counter() - begin
        if name in PRODUCTS:
            self.seconds["products"] += spent
            self.multiplications[out.dtype] += out.numel() * args[-2].shape[-1]
        else:
            self.seconds["factorisations" if name in FACTORISATIONS else name] += spent
        return out


def read_once(folder: Path) -> float:
    """Return the seconds of reading a folder's weights once, in pieces of 16 MB."""
    buffer = bytearray(1 << 24)
    begin = time.perf_counter()
    with open(folder / "model.safetensors", "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def peak_megabytes() -> float:
    """Return the peak resident size of this process in MB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def cost_of(folder: Path, threads: int) -> dict[str, Any]:
    """Certify a folder in this process and return its figures."""
    import cProfile
    import pstats

    from bf16_to_fp16.certificate import served
    from bf16_to_fp16.checkpoint import open_checkpoint

    torch.set_num_threads(threads)
    with Clock():  # the first of all operations under a dispatch mode imports much of torch
        torch.linalg.eigvalsh(torch.eye(8, dtype=torch.float64))
    floor = peak_megabytes()
    read_once(folder)
    reading_seconds = min(read_once(folder) for _ in range(3))
    checkpoint = open_checkpoint(folder)
    layout = resolve(checkpoint)
    begin = time.perf_counter()
    bound(layout, served(checkpoint, layout))
    seconds = time.perf_counter() - begin
    # Once more under the instruments, which cost something themselves, for its parts.
    marks = [time.perf_counter()]
    profiler, clock = cProfile.Profile(), Clock()
    with profiler, clock:
        found = bound(
            layout, served(checkpoint, layout), progress=lambda done, total: marks.append(time.perf_counter())
        )
        marks.append(time.perf_counter())
    slower = (marks[-1] - marks[0]) / seconds
    functions: dict[str, float] = {}
    stats: Any = pstats.Stats(profiler)
    for (file, line, name), (_, _, _, cumulative, _) in stats.stats.items():
        if file.endswith(("certificate.py", "spectral.py", "checkpoint.py")):
            functions[f"{Path(file).stem}:{line} {name}"] = cumulative / slower
    return {
        "reading": reading_seconds,
        "seconds": seconds,
        "sublayers": [(b - a) / slower for a, b in itertools.pairwise(marks)],
        "parts": dict(clock.seconds),
        "multiplications": {str(k).removeprefix("torch."): v for k, v in clock.multiplications.items()},
        "megabytes": peak_megabytes() - floor,
        "headroom": found.headroom_bits,
        "functions": functions,
    }


def cost(names: list[str], threads: int, profile: bool) -> None:
    """Print what certifying costs at the layer shapes of ``names``."""
    print(
        f"one encoder and one decoder layer and both ends, bf16, {threads} thread(s); load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| shapes | GB | read s | certify s | / read | products s | TFLOP | factorisations s |"
        " / (read + products) | / all three |"
        " encoder layer s | decoder layer s | ends s | whole model s (extrapolated) | peak MB |\n|" + "---|" * 15
    )
    profiles = {}
    for name in names:
        shape = synthetic.SHAPES[name]
        with tempfile.TemporaryDirectory(prefix="bf16_to_fp16-bench-") as work:
            folder = Path(work) / "source"
            size = synthetic.write(folder, shape.with_layers(1))
            command = [sys.executable, __file__, "--child", str(folder), "--threads", str(threads)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result = json.loads(output.splitlines()[-1])
        profiles[name] = result
        times, parts = result["sublayers"], result["parts"]
        # Each stack's first sublayer was counted with its embedding, the last mark is the head's.
        begin = sum(v for k, v in result["functions"].items() if k.endswith(" begin"))
        encoder, decoder, ends = sum(times[:2]) - begin / 2, sum(times[2:5]) - begin / 2, times[5] + begin
        whole = ends + shape.layers * (encoder + decoder)
        both = result["reading"] + parts["products"]
        flops = 2 * sum(result["multiplications"].values()) / 1e12
        print(
            f"| {name} | {size / 1e9:.2f} | {result['reading']:.2f} | {result['seconds']:.1f} |"
            f" {result['seconds'] / result['reading']:.0f} | {parts['products']:.1f} | {flops:.2f} |"
            f" {parts.get('factorisations', 0.0):.1f} | {result['seconds'] / both:.2f} |"
            f" {result['seconds'] / (both + parts.get('factorisations', 0.0)):.2f} | {encoder:.1f} |"
            f" {decoder:.1f} |"
            f" {ends:.1f} | {whole:.0f} | {result['megabytes']:.0f} |",
            flush=True,
        )
    if profile:
        for name, result in profiles.items():
            print(f"\n{name}: operations", sorted(result["parts"].items(), key=lambda x: -x[1])[:12])
            print("TFLOP by dtype", {k: 2 * v / 1e12 for k, v in result["multiplications"].items()})
            for function, seconds in sorted(result["functions"].items(), key=lambda x: -x[1])[:30]:
                print(f"  {seconds:8.2f} {function}")


# ---- width ---------------------------------------------------------------------------------------------------------

LINEAR = ("query", "key", "value", "gate", "neuron", "logits")
SIGNALS = ("linears", "scores", "context", "attention output", "product", "feed-forward output", "residual")
"""What the sites of a model are summed up as."""


def signal_of(site: Any, layout: Layout) -> str | None:
    """Return which of ``SIGNALS`` a site is, None for the rest."""
    outputs = {w.output: isinstance(w, Attention) for w in layout.wiring if isinstance(w, Attention | FeedForward)}
    if site.name in outputs:
        return "attention output" if outputs[site.name] else "feed-forward output"
    if site.kind in LINEAR:
        return "linears"
    if site.kind == "scores" and site.name.endswith(":scores"):
        return "scores"
    if site.kind == "residual" and ":add" in site.name:
        return "residual"
    return site.kind if site.kind in ("context", "product") else None


def random_width(family: str, d: int, seed: int) -> Any:
    """Return a random model of one layer a side with usual shapes: heads of 64, 2.5 or 4 times as many neurons."""
    torch.manual_seed(seed)
    size = min(64, d // 2)
    if family == "pegasus":
        config: Any = transformers.PegasusConfig(
            d_model=d,
            encoder_attention_heads=d // size,
            decoder_attention_heads=d // size,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=4 * d,
            decoder_ffn_dim=4 * d,
            vocab_size=512,
            max_position_embeddings=128,
            activation_function="relu",
            scale_embedding=True,
            decoder_start_token_id=0,
            init_std=d**-0.5,
        )
        model: Any = transformers.PegasusForConditionalGeneration(config)
    else:
        config = transformers.T5Config(
            d_model=d,
            d_kv=size,
            num_heads=d // size,
            d_ff=5 * d // 2,
            num_layers=1,
            num_decoder_layers=1,
            vocab_size=512,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            decoder_start_token_id=0,
        )
        model = transformers.T5ForConditionalGeneration(config)
        model.lm_head.weight = torch.nn.Parameter(torch.randn(512, d) * d**-0.5)
    return rounded(model)


@torch.no_grad()
def rounded(model: Any) -> Any:
    """Return a model in eval mode with every weight rounded to fp16."""
    for tensor in model.state_dict().values():
        tensor.copy_(tensor.half().float())
    return model.eval().requires_grad_(False)


def recipes() -> Any:
    """Return the module that trains the demo checkpoints."""
    if str(ROOT / "recipes") not in sys.path:
        sys.path.insert(0, str(ROOT / "recipes"))
    return importlib.import_module("train_demo")


def trained_width(family: str, d: int, steps: int) -> Any:
    """Return a model trained for ``steps`` on the demo's text with an ordinary initialisation.

    Wider than 256 it has one layer a side and is trained on 4 windows a step instead of 16, or it would take hours.
    """
    import yaml

    train_demo = recipes()
    recipe = yaml.safe_load((ROOT / "recipes" / f"demo_{family}.yaml").read_text(encoding="utf-8"))
    recipe |= {"steps": steps, "inflate": [], "align": [], "report_every": 10**9, "embedding_std": 1.0}
    heads, few = d // 32, d > 256
    recipe |= {"batch": 4} if few else {}
    if family == "pegasus":
        recipe["config"] |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
        recipe["config"] |= {"d_model": d, "encoder_ffn_dim": 7 * d // 2, "decoder_ffn_dim": 7 * d // 2}
        recipe["config"] |= {"encoder_layers": 1, "decoder_layers": 1} if few else {}
    else:
        recipe["config"] |= {"d_model": d, "num_heads": heads, "d_ff": 5 * d // 2}
        recipe["config"] |= {"num_layers": 1, "num_decoder_layers": 1} if few else {}
    return rounded(train_demo.train(recipe).float())


def demo_width(family: str) -> Any:
    """Return a demo checkpoint with its residual stream scaled into fp16's range."""
    from bf16_to_fp16.auditing import load

    model = load(DEMO / ("t5-gated-bytes" if family == "t5" else "pegasus-bytes"), torch.float32)
    layout = resolve(ModelTensors(model))
    return rounded(apply(model, layout, Plan(family=family, residual_exponent=-8)))


def tightness(model: Any, texts: list[dict[str, Tensor]], seed: int, steps: int) -> dict[str, Any]:
    """Return bound / worst found of every site by signal: by gradient ascent at every norm, and by whole inputs.

    Sequences are long enough for every head to look at a position of its own.
    """
    layout = resolve(ModelTensors(model))
    certificate = certified(model, Arithmetic(512))
    r = random.Random(seed)
    heads = max(
        int(str(value(layout.family, layout.config, w.heads))) for w in layout.wiring if isinstance(w, Attention)
    )
    lengths, wide = (max(6, heads), max(6, heads)), heads > 8
    batch = 10 if wide else 24
    worst: dict[str, float] = {}
    model.set_attn_implementation("eager")
    for round_ in range(1 if wide else 2):
        targets = aims(layout, certificate, batch, lengths, r, 1.0)
        inputs = ascend(model, layout, targets, lengths, seed + round_, steps)

        def free(chosen: Mapping[str, Tensor] = inputs) -> None:
            with reading(model, chosen):
                forward(model, layout, batch, lengths)

        for name, amax in watch(model, free, "eager").items():
            worst[name] = max(worst.get(name, 0.0), amax)

    def whole() -> None:
        for text in texts:
            model(**text, use_cache=False)

    seen = watch(model, whole, "eager")
    result: dict[str, Any] = {"free": defaultdict(list), "whole": defaultdict(list)}
    for site in certificate.sites:
        signal = signal_of(site, layout)
        if signal is None:
            continue
        if signal != "residual" and worst.get(site.name, 0.0) > 0:
            result["free"][signal].append(site.bound / worst[site.name])
        if seen.get(site.name, 0.0) > 0:
            result["whole"][signal].append(site.bound / seen[site.name])
    return result


def random_texts(vocabulary: int, seed: int) -> list[dict[str, Tensor]]:
    """Return 64 sequences of 48 random ids on each side, the first ones of a single id."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(4):
        ids = torch.randint(vocabulary, (2, 16, 48), generator=generator)
        ids[:, :4] = ids[:, :4, :1]
        found.append({"input_ids": ids[0], "decoder_input_ids": ids[1]})
    return found


def width(largest: int, trained: int, steps: int, training_steps: int, keep: Path | None) -> None:
    """Print and draw how far the bounds lie above the worst that was found, by width.

    keep: a file of rows; those that are there are not computed again, so that a run may be stopped and gone on with.
    """
    torch.set_num_threads(1)
    known: dict[str, Any] = {}
    if keep is not None and keep.exists():
        known = dict(json.loads(line) for line in keep.read_text(encoding="utf-8").splitlines())
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    print(f"bound / worst found: median, largest over the sites of each signal; load {os.getloadavg()[0]:.1f}\n")
    print(f"| weights | found by | {' | '.join(SIGNALS)} | s |\n|" + "---|" * (len(SIGNALS) + 3))
    limits = {"random": largest, "trained": trained, "demo": 128}
    for weights in limits:
        for family in ("t5", "pegasus"):
            for d in (64, 128, 256, 512, 1024, 2048):
                if d > limits[weights] or (weights == "demo" and d != 128):
                    continue
                begin, name = time.monotonic(), f"{family} {d} {weights}"
                if name in known:
                    result = known[name]
                else:
                    if weights == "random":
                        model, texts = random_width(family, d, d), random_texts(512, d)
                    else:
                        model = demo_width(family) if weights == "demo" else trained_width(family, d, training_steps)
                        texts = trained_texts(family)
                    result = {way: dict(found) for way, found in tightness(model, texts, d, steps).items()}
                    if keep is not None:
                        with open(keep, "a", encoding="utf-8") as file:
                            file.write(json.dumps([name, result]) + "\n")
                rows[weights, family, d] = result
                for way, label in (("free", "any norm input"), ("whole", "whole inputs")):
                    cells = [
                        f"{middle(result[way][s]):.2f}, {max(result[way][s]):.2f}" if result[way].get(s) else ""
                        for s in SIGNALS
                    ]
                    spent = f"{time.monotonic() - begin:.0f}" if way == "free" else ""
                    print(f"| {family} {d} {weights} | {label} | {' | '.join(cells)} | {spent} |", flush=True)
    draw(rows)


def middle(values: list[float]) -> float:
    """Return the median."""
    return sorted(values)[len(values) // 2]


def trained_texts(family: str) -> list[dict[str, Tensor]]:
    """Return the demo's held-out text and random bytes."""
    import yaml

    train_demo = recipes()
    recipe = yaml.safe_load((ROOT / "recipes" / f"demo_{family}.yaml").read_text(encoding="utf-8"))
    held_out = [
        {"input_ids": b["input_ids"], "decoder_input_ids": b["labels"]} for b in train_demo.held_out_batches(recipe)
    ]
    return held_out[:4] + random_texts(384, 0)


def draw(rows: Mapping[tuple[str, str, int], Mapping[str, Any]]) -> None:
    """Draw the medians by width: random weights as lines, trained ones as dots."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "certify"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for axis, way, title in (
        (axes[0], "free", "worst found by ascent at every norm"),
        (axes[1], "whole", "worst found by whole inputs"),
    ):
        for number, signal in enumerate(SIGNALS):
            for weights, style in (("random", "-"), ("trained", "o"), ("demo", "*")):
                for family in ("t5", "pegasus"):
                    points = sorted(
                        (d, middle(found[way][signal]))
                        for (w, f, d), found in rows.items()
                        if w == weights and f == family and found[way].get(signal)
                    )
                    if points:
                        fill = "none" if family == "pegasus" else f"C{number}"
                        dashed = "--" if family == "pegasus" and weights == "random" else style
                        axis.plot(
                            *zip(*points, strict=True),
                            dashed,
                            color=f"C{number}",
                            mfc=fill,
                            ms=9 if style == "*" else 5,
                            lw=1.3,
                        )
        axis.set(xscale="log", yscale="log", xlabel="d_model", title=f"bound / {title}")
        axis.title.set_fontsize(10)
        ticks = sorted({d for _, _, d in rows})
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.minorticks_off()
        axis.set_yticks([1, 2, 4, 8, 16, 32, 64, 128, 256], ["1", "2", "4", "8", "16", "32", "64", "128", "256"])
        axis.grid(alpha=0.3)
    handles = [plt.Line2D([], [], color=f"C{n}", label=s) for n, s in enumerate(SIGNALS)]
    handles += [
        plt.Line2D([], [], color="k", ls="-", label="T5, random"),
        plt.Line2D([], [], color="k", ls="--", label="Pegasus, random"),
        plt.Line2D([], [], color="k", marker="o", ls="", label="trained (Pegasus open)"),
        plt.Line2D([], [], color="k", marker="*", ls="", label="demo checkpoints"),
    ]
    figure.legend(handles=handles, loc="center right", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 0.8, 1))
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--soundness", type=int, default=0, metavar="N", help="random models to attack")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--steps", type=int, default=25, help="steps of the ascent")
    parser.add_argument("--cost", nargs="*", metavar="SHAPE", help=f"of {', '.join(WHOLE)}; all by default")
    parser.add_argument("--threads", type=int, default=1, help="for --cost")
    parser.add_argument("--profile", action="store_true", help="with --cost: where the time goes")
    parser.add_argument("--width", action="store_true")
    parser.add_argument("--largest", type=int, default=2048, help="with --width: widest random model")
    parser.add_argument("--trained", type=int, default=2048, help="with --width: widest trained model")
    parser.add_argument("--training-steps", type=int, default=300, help="with --width")
    parser.add_argument("--keep", type=Path, help="with --width: a file for rows, to go on with after a break")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(cost_of(Path(options.child), options.threads)))
        return
    if options.cost is not None:
        cost(options.cost or list(WHOLE), options.threads, options.profile)
    if options.width:
        width(options.largest, options.trained, 2 * options.steps, options.training_steps, options.keep)
    if options.soundness and not soundness(options.soundness, options.first, options.steps):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
