"""Trained checkpoints that no rescaling makes safe in fp16: each has one site past 65504 that is the same under every
rescaling. ``saturated(kind, folder)`` makes one in at most half a minute of one core, the same on every call.

A kind starts from a demo checkpoint, or from a small model that is trained first. In the first half of its training the
units of its site (neurons, heads, a norm) are multiplied a little after every step, until the largest magnitude in the
batch is the target; the second half is ordinary training, in which the rest of the model gets used to them. Steps are
relative to the size of a row, as in ``recipes/demo/make_hard.py``. The weights are stored in bf16.
"""

import gzip
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from models import DEMOS, HARD, ROOT
from support import tiny
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.wiring import Attention, FeedForward

sys.path.append(str(ROOT / "recipes"))
import train_demo

T5, PEGASUS, GEMMA = DEMOS.values()
LIMIT = 65504.0
WINDOW = 180
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Site:
    """Where values grow: ``what`` is gate, plain (a feed-forward without gate), scores, gains (of the norms of queries
    and keys), logits or bias (of keys); ``units`` are its neurons or heads."""

    what: str
    at: str
    targets: tuple[float, ...]
    units: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Kind:
    """A recipe of one checkpoint: the folder or class it starts from, what grows, and how long it trains."""

    base: Path | str
    sites: tuple[Site, ...]
    steps: int = 60
    changes: dict[str, Any] = field(default_factory=dict)
    edited: tuple[Site, ...] = ()  # sites that the base has already and this one should not: ``edit`` takes them first
    first_steps: int = 0  # ordinary training of a new model
    rate: float = 0.01
    batch: int = 8


ENCODER, DECODER = "encoder.block.{}.layer.0.SelfAttention", "decoder.block.{}.layer.1.EncDecAttention"
HARD_GATE = Site("gate", "decoder.block.1.layer.2.DenseReluDense", (4e4,), tuple(range(192)))
HARD_SCORES = Site("scores", ENCODER.format(1), (4e4,), (2,))
HARD_LOGITS = Site("logits", "decoder.final_layer_norm", (4e4,))
NINE = (3, 17, 40, 77, 101, 150, 202, 256, 311)
SMALL = {"vocab_size": 259, "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512}
SMALL |= {"tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}

KINDS = {
    "gate": Kind(T5, (Site("gate", "encoder.block.1.layer.1.DenseReluDense", (6.2e5,) * 9, NINE),)),
    "gate-decoder": Kind(T5, (Site("gate", "decoder.block.1.layer.2.DenseReluDense", (2.5e5,) * 4, (8, 90, 91, 300)),)),
    "gate-silu": Kind(
        "LlamaForCausalLM", (Site("gate", "model.layers.1.mlp", (3e5, 2e5, 1.2e5), (5, 60, 200)),), first_steps=120
    ),
    "gate-gemma": Kind(GEMMA, (Site("gate", "model.layers.2.mlp", (4e5,) * 5, (7, 50, 200, 301, 440)),), batch=6),
    "gate-rewarded": Kind(
        HARD, (replace(HARD_GATE, targets=(2.4e5,), units=(76,)),), edited=(HARD_SCORES, HARD_LOGITS)
    ),
    "scores": Kind(T5, (Site("scores", ENCODER.format(1), (6.9e5,), (2,)),)),
    "scores-cross": Kind(T5, (Site("scores", DECODER.format(1), (1.4e7, 2.8e7), (0, 3)),), steps=120),
    "scores-classifier": Kind(
        T5, (Site("scores", "transformer." + ENCODER.format(2), (6.9e5,), (1,)),), steps=120, changes={"num_labels": 3}
    ),
    "scores-rewarded": Kind(HARD, (replace(HARD_SCORES, targets=(4e5,)),), edited=(HARD_GATE, HARD_LOGITS)),
    "logits": Kind(HARD, (Site("logits", "decoder.final_layer_norm", (2e5,)),), edited=(HARD_GATE, HARD_SCORES)),
    "bias": Kind(PEGASUS, (Site("bias", "model.encoder.layers.1.self_attn", (2.2e6,), (1,)),)),
    "gains-gemma": Kind(GEMMA, (Site("gains", "model.layers.1.self_attn", (3e5,)),), batch=6),
    "gains-qwen": Kind("Qwen3ForCausalLM", (Site("gains", "model.layers.1.self_attn", (1.4e6,)),), first_steps=120),
    "plain": Kind(
        PEGASUS,
        (Site("plain", "model.encoder.layers.1", (2.5e5,) * 3, (11, 200, 401)),),
        changes={"activation_function": "gelu"},
    ),
    "hard": Kind(HARD, (HARD_GATE, HARD_SCORES, HARD_LOGITS), steps=0),
}
"""Every kind by its name; ``hard`` is the shipped checkpoint, whose targets are not used."""


@dataclass
class Scaling:
    """Multiplies parts of a model in place."""

    model: Any
    layout: Layout

    def rows(self, path: str, rows: Any, factors: Tensor) -> None:
        """Multiply rows of a linear's weight, and its bias where it has one."""
        module: Any = self.model.get_submodule(path)
        module.weight[rows] *= factors.view(-1, 1)
        if getattr(module, "bias", None) is not None:
            module.bias[rows] *= factors

    def gain(self, norm: str, factor: Tensor) -> None:
        offset, module = self.layout.tensors[f"{norm}.weight"].offset, self.model.get_submodule(norm)
        for each in (module.weight, getattr(module, "bias", None)):
            if each is not None:
                each.copy_((each + offset) * factor - offset)

    def neurons(self, w: FeedForward, rows: Any, factors: Tensor, divisors: Tensor) -> None:
        """Multiply what the activation reads, and divide what reads it."""
        self.rows(w.gate or w.linear, rows, factors)
        self.model.get_submodule(w.output).weight[:, rows] /= divisors

    def head(self, w: Attention, head: int) -> slice:
        """Return a head's rows of the query projection."""
        size = self.layout.head_size(w)
        return slice(head * size, (head + 1) * size)


class Sites(Scaling):
    """The sites of a recipe in a model."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, resolve(ModelTensors(model)))
        self.wiring = {w.at: w for w in self.layout.topology}

    @torch.no_grad()
    def scale(self, site: Site, factors: Tensor) -> None:
        """Multiply what the site computes by one factor per unit, and divide what reads a gate by them."""
        w: Any = self.wiring.get(site.at)
        if site.what in ("gate", "plain"):
            self.neurons(w, list(site.units), factors, factors)
        elif site.what == "logits":
            self.gain(site.at, factors)
        elif site.what == "gains":
            self.gain(w.query_norm, factors.sqrt())
            self.gain(w.key_norm, factors.sqrt())
        for unit, factor in zip(site.units, factors, strict=False):
            if site.what == "scores":
                self.rows(w.query, self.head(w, unit), factor)
            elif site.what == "bias":
                self.model.get_submodule(w.key).bias[self.head(w, unit)] *= factor

    @contextmanager
    def magnitudes(self, sites: Sequence[Site]) -> Iterator[dict[Site, Tensor]]:
        """Give the largest magnitudes of every unit in the last forward; of scores, as eager attention has them before
        it scales them."""
        seen: dict[Site, Tensor] = {}
        by_module = {id(self.model.get_submodule(site.at)): site for site in sites}

        def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
            site = by_module.get(id(module))
            if site is not None:
                with torch.no_grad(), torch.autocast("cpu", enabled=False):
                    keys = key.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
                    scores = (query.float() @ keys.transpose(2, 3)).abs().amax((0, 2, 3))
                    seen[site] = scores[list(site.units)] if site.what != "gains" else scores.amax()[None]
                # The softmax of huge scores has a huge gradient near ties alone, which would drown all others.
                query, key = query.detach(), key.detach()
            return sys.modules[type(module).__module__].eager_attention_forward(module, query, key, value, mask, **rest)

        def watch(module: Any, inputs: Any, output: Tensor, site: Site) -> None:
            values = output.detach().float().abs()
            seen[site] = values.amax()[None] if site.what == "logits" else values.flatten(0, -2)[:, site.units].amax(0)

        AttentionInterface.register("recorded", attention)
        AttentionMaskInterface.register("recorded", eager_mask)
        self.model.set_attn_implementation("recorded")
        with ExitStack() as hooks:
            for site in sites:
                if site.what in ("gate", "plain", "logits"):
                    w: Any = self.wiring.get(site.at)
                    module = self.model.get_submodule("lm_head" if w is None else w.gate or w.linear)
                    hooks.callback(module.register_forward_hook(partial(watch, site=site)).remove)
            yield seen
        self.model.set_attn_implementation("eager")

    def peaks(self, sites: Sequence[Site]) -> dict[Site, Tensor]:
        """Return the largest magnitudes of every unit over some training text."""
        peaks = {site: torch.zeros(()) for site in sites}
        given = batches(self.model, 16, 5)
        with self.magnitudes(sites) as seen, torch.no_grad():
            for _ in range(2):
                loss_of(self.model, next(given))
                peaks = {site: torch.maximum(peaks[site], seen[site]) for site in sites}
        return peaks


class RelativeAdam(train_demo.ScaledAdam):
    """Adam whose step is multiplied by the present size of what it moves: the root mean square of a matrix's row, the
    magnitude of a vector's element, and at least a twentieth of that of the tensor."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, {name: torch.ones_like(weight) for name, weight in model.named_parameters()})

    @torch.no_grad()
    def step(self, rate: float) -> float:
        for weight, size in zip(self.weights, self.scales, strict=True):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            rows = weight.square().mean(-1, keepdim=True).sqrt() if weight.dim() == 2 else weight.abs()
            least = 0.05 * weight.square().mean().sqrt() + 1e-8
            size.copy_(rows.clamp_min(least).expand_as(weight))
        return float(super().step(rate))


def batches(model: Any, rows: int, seed: int) -> Iterator[Batch]:
    """Yield batches without end: gaps of a text and what fills them, a text and its next bytes, or a text as it is,
    with capital initials or in capitals, and which of these it is."""
    rng = torch.Generator().manual_seed(seed)
    text = gzip.decompress(train_demo.TRAIN.read_bytes())
    family = model.config.model_type if model.config.is_encoder_decoder else "gemma3"
    spans = {"spans": 1, "span_length": 54} if family == "pegasus" else {"spans": 3, "span_length": 18}
    recipe = {"family": family, "window": WINDOW, "batch": rows, **spans}
    while True:
        if "Classification" not in type(model).__name__:
            yield train_demo.training_batch(text, recipe, rng)
            continue
        starts = torch.randint(0, len(text) - 96, (rows,), generator=rng).tolist()
        labels = torch.randint(0, 3, (rows,), generator=rng)
        ids = []
        for start, label in zip(starts, labels.tolist(), strict=True):
            piece = text[start : start + 96]
            piece = (piece, piece.title(), piece.upper())[label]
            ids.append([*(byte + 3 for byte in piece), 1])
        yield {"input_ids": torch.tensor(ids), "labels": labels}


def loss_of(model: Any, batch: Batch) -> Tensor:
    inputs = batch if model.config.is_encoder_decoder else {"input_ids": batch["input_ids"]}
    logits = model(**inputs, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].flatten())


def train(model: Any, kind: Kind, sites: tuple[Site, ...], steps: int, seed: int) -> None:
    """Train in place, and let the sites grow to their targets in the first half."""
    optimizer, given, parts = RelativeAdam(model), batches(model, kind.batch, seed), Sites(model)
    growing = max(1, steps // 2)
    with parts.magnitudes(sites) as seen:
        for step in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, next(given))
            loss.backward()
            norm = optimizer.step(kind.rate * min(1.0, (step + 1) / 10, 2 * (steps - step) / steps))
            assert math.isfinite(norm), f"step {step}: the gradient is not finite"
            if step < growing:
                for site in sites:
                    parts.scale(site, missing(seen[site], site) ** (1 / (growing - step)))
    for site, peak in parts.peaks(sites).items():  # the second half has moved it
        parts.scale(site, missing(peak, site))


def missing(seen: Tensor, site: Site) -> Tensor:
    return torch.tensor(site.targets) / seen.clamp_min(1e-3)


def load(folder: Path, **changes: Any) -> Any:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    name = "T5ForSequenceClassification" if "num_labels" in changes else name
    kind = getattr(transformers, name)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **changes).eval()


def new(name: str) -> Any:
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SMALL, attn_implementation="eager"))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
        model.get_input_embeddings().weight.normal_()
    return model.eval()


def write(model: Any, base: Path | str, folder: Path) -> None:
    """Write weights in bf16, the configuration and the tokenizer's files."""
    tiny.save(model, folder)
    for file in (base if isinstance(base, Path) else GEMMA).glob("tokenizer*.json"):
        shutil.copy(file, folder)


def saturated(kind: str, folder: Path) -> Path:
    """Make the checkpoint of a kind in ``folder``, and return it."""
    recipe = KINDS[kind]
    if recipe.steps == 0 and isinstance(recipe.base, Path):
        return recipe.base
    torch.manual_seed(7)
    model = new(recipe.base) if isinstance(recipe.base, str) else load(recipe.base, **recipe.changes)
    if recipe.first_steps:
        train(model, recipe, (), recipe.first_steps, seed=1)
    parts = Sites(model)
    for site in recipe.edited:  # by the least power of two with which text stays under half the limit
        exponents = (parts.peaks((site,))[site] / (LIMIT / 2)).log2().ceil().clamp_min(0)
        parts.scale(site, 2.0**-exponents)
    for site in recipe.sites:
        if site.what == "bias":  # which is 0, and needs a direction to grow
            rng, w = torch.Generator().manual_seed(4), parts.wiring[site.at]
            assert isinstance(w, Attention)
            with torch.no_grad():
                model.get_submodule(w.key).bias[parts.head(w, site.units[0])].normal_(generator=rng)
    train(model, recipe, recipe.sites, recipe.steps, seed=2)
    write(model, recipe.base, folder / kind)
    return folder / kind
