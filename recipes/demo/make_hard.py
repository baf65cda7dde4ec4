"""Trains the hard checkpoint: ``python recipes/demo/make_hard.py recipes/demo/make_hard.yaml OUT``.

A small byte-level T5 with a tied head and a gate whose attention scores, gate pre-activations and logits pass fp16's
65504, so that no exact exponent makes it safe. It is trained in bf16 autocast on the demo checkpoints' text, with the
data section of ``hard.yaml``, a finetune that mends it, so that both have the same task. It learns in the usual way,
but for a part of the run the loss has a term that does what long pretraining does to published checkpoints: it rewards
a large largest value at those three sites, the activation-magnitude penalty with its sign turned. Nothing is scaled by
hand: which tokens and neurons grow is what gradients find, and the last part of the run is ordinary training again, in
which they stay.

The steps are relative: Adam's is multiplied by the root mean square of the row that an element is in, as Adafactor's
``scale_parameter`` does per tensor (Shazeer and Stern 2018), with which T5 was trained. So rows that grow keep growing.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train_demo import Recipe, ScaledAdam, save, standard_deviation
from transformers import T5Config, T5ForConditionalGeneration

from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.recipe import read_recipe

HERE = Path(__file__).resolve().parent
SITES = ("scores", "gate", "logits")


def build(recipe: Recipe) -> tuple[Any, dict[str, Tensor]]:
    """Return the model at its ordinary initialisation and, per parameter name, the least scale of an Adam step."""
    torch.manual_seed(recipe["seed"])
    model: Any = T5ForConditionalGeneration(T5Config(**recipe["config"]))
    scales = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            std = standard_deviation(name, weight, recipe | {"embedding_std": 1.0})
            if weight.dim() == 2:
                weight.normal_(0.0, std)
            scales[name] = torch.full_like(weight, std)
    return model, scales


class RelativeAdam(ScaledAdam):
    """Adam whose step is multiplied by the larger of a least scale and the present size of what it moves: the root
    mean square of a matrix's row, the magnitude of a vector's element."""

    def __init__(self, model: Any, scales: dict[str, Tensor]) -> None:
        """Start with zero moments."""
        super().__init__(model, scales)
        self.least = [scale.clone() for scale in self.scales]

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Take one step, clear the gradients, and return their norm in units of the scales."""
        for weight, scale, least in zip(self.weights, self.scales, self.least, strict=True):
            size = weight.square().mean(-1, keepdim=True).sqrt() if weight.dim() == 2 else weight.abs()
            torch.maximum(size.expand_as(least), least, out=scale)
        return super().step(rate)


class Magnitudes:
    """Sees the largest magnitude of each sequence at the three sites, as bits (log2), in every forward."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        """Hook the projections that the scores are made of, the gate's and the head's."""
        self.seen: dict[str, Tensor] = {}
        self.head, self.size = recipe["head"], recipe["config"]["d_kv"]
        attention = model.get_submodule(recipe["scores"])
        attention.q.register_forward_hook(lambda *call: self.seen.update(q=call[-1]))
        attention.k.register_forward_hook(lambda *call: self.seen.update(k=call[-1]))
        model.get_submodule(recipe["gate"]).register_forward_hook(lambda *call: self.seen.update(gate=call[-1]))
        model.lm_head.register_forward_hook(lambda *call: self.seen.update(logits=call[-1]))

    def bits(self) -> dict[str, Tensor]:
        """Return fp32 [sequences] of each site in the last forward."""
        part = slice(self.head * self.size, (self.head + 1) * self.size)
        query, key = (self.seen[name][..., part].float() for name in ("q", "k"))
        found = {"scores": query @ key.transpose(1, 2), "gate": self.seen["gate"], "logits": self.seen["logits"]}
        return {site: x.float().abs().amax((1, 2)).log2() for site, x in found.items()}


def rate_at(step: int, recipe: Recipe) -> float:
    """Return the relative step size: linear warm-up, constant, then linearly down to 0."""
    left = (recipe["steps"] - step) / (recipe["steps"] - recipe["decay_from"])
    return float(recipe["rate"]) * min(1.0, step / recipe["warmup"], left)


def loss_of(model: Any, batch: TrainingBatch) -> Tensor:
    """Return the mean cross-entropy per target token in nats."""
    logits, labels = model(**batch.inputs(), use_cache=False).logits, batch.labels
    assert labels is not None
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@torch.no_grad()
def held_out_loss(model: Any, corpus: Corpus) -> float:
    """Return the mean over all batches of the held-out text, which are of one size but for the last."""
    losses = [(float(loss_of(model, batch)), len(batch.examples)) for batch in corpus.held_out()]
    return sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)


def train(model: Any, scales: dict[str, Tensor], corpus: Corpus, recipe: Recipe) -> None:
    """Train ``model`` by the recipe, in place; progress goes to standard error."""
    optimizer, magnitudes = RelativeAdam(model, scales), Magnitudes(model, recipe)
    grow, batches = recipe["grow"], corpus.training_batches()
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{size} parameters", file=sys.stderr)
    started, recent = time.monotonic(), 0.0
    for step in range(1, recipe["steps"] + 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, next(batches))
        bits = magnitudes.bits()
        missing = torch.stack([(grow["bits"] - bits[site]).relu().mean() for site in SITES]).sum()
        (loss + grow["weight"] * missing if grow["from"] < step <= grow["to"] else loss).backward()
        norm = optimizer.step(rate_at(step, recipe))
        if not math.isfinite(norm):
            raise SystemExit(f"error: step {step}: the gradient is not finite: lower 'rate' in the recipe")
        now = loss.item()
        recent = now if step == 1 else 0.95 * recent + 0.05 * now
        if step % recipe["report_every"] == 0 or step in (1, recipe["steps"]):
            line = f"step {step}/{recipe['steps']} loss {recent:.3f} gradient {norm:.2f}, bits"
            line += "".join(f" {site} {float(bits[site].detach().mean()):.1f}" for site in SITES)
            print(f"{line} {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    model.eval()


def main() -> None:
    """Train by the recipe in argv[1] into the folder argv[2]; run it at the repository's root."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python recipes/demo/make_hard.py recipes/demo/make_hard.yaml OUT")
    recipe, out = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    torch.set_num_threads(recipe["threads"])
    model, scales = build(recipe)
    # The demo's T5 has a head of its own; of its Pegasus the tied one is left out of the file, as here.
    recipe["family"] = "pegasus"
    save(model, recipe, out)
    data = read_recipe(HERE / "hard.yaml", [f"data.batch_size={recipe['batch']}"]).data
    corpus = Corpus(data, out, model.config, seed=recipe["seed"])
    train(model, scales, corpus, recipe)
    save(model, recipe, out)
    stored = type(model).from_pretrained(out, dtype=torch.float32).eval()
    print(f"held-out, weights as stored: {held_out_loss(stored, corpus):.3f} nats a token")


if __name__ == "__main__":
    main()
