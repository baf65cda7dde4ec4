"""What rescaling does to optimizers: the same training of a demo checkpoint as it is and made safe, step by step.

    python benchmarks/training.py

trains the shipped T5 demo checkpoint (1.6 million parameters) on its own text in fp32, once as trained and once after
``make_fp16_safe``, with the same batches in the same order and no dropout. Only the scale of the weights differs, so
what tells the two apart is what the optimizer makes of it. Prints a Markdown table: held-out loss of both after N
steps, the largest difference of a training loss on the way, and how far the weights went apart: the distance between
the two ends, both at the source's scale, over the distance that the original went, in the median tensor and in the one
of which it is most. One thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rounding import DEMO, demo_corpus
from torch import nn
from transformers import Adafactor

from bf16_to_fp16 import MadeSafe, make_fp16_safe
from bf16_to_fp16.commands.make_safe import set_eps
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.finetuning.corpus import TrainingBatch
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.weights import ModelTensors
from bf16_to_fp16.run.stock import load

STREAM = "the residual stream alone rescaled"

Make = Callable[[Any], torch.optim.Optimizer]


def adafactor(rate: float, **options: Any) -> Make:
    """Return what makes an Adafactor as T5 is finetuned with: a rate that is given, no warm-up."""
    return lambda parameters: Adafactor(parameters, lr=rate, relative_step=False, warmup_init=False, **options)


OPTIMIZERS: dict[str, tuple[Make, bool]] = {
    "AdamW, lr 1e-4": (lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.01), False),
    "AdamW, lr 1e-4, follow": (lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.01), True),
    "Adafactor, lr 1e-3, scale_parameter": (adafactor(1e-3, scale_parameter=True), False),
    "the same, eps 1e-9 for RMS": (adafactor(1e-3, scale_parameter=True, eps=(1e-30, 1e-9)), False),
    f"the same, {STREAM}": (adafactor(1e-3, scale_parameter=True), False),
    f"the same, eps 1e-9 for RMS, {STREAM}": (adafactor(1e-3, scale_parameter=True, eps=(1e-30, 1e-9)), False),
    "Adafactor, lr 1e-3, scale_parameter, follow": (adafactor(1e-3, scale_parameter=True), True),
    "Adafactor, lr 1e-4, no scale_parameter": (adafactor(1e-4, scale_parameter=False), False),
    "Adafactor, lr 1e-4, no scale_parameter, follow": (adafactor(1e-4, scale_parameter=False), True),
    "SGD, lr 1e-5": (lambda p: torch.optim.SGD(p, lr=1e-5), False),
    "SGD, lr 1e-5, follow": (lambda p: torch.optim.SGD(p, lr=1e-5), True),
}
"""What makes each, and whether it follows."""


@dataclass(frozen=True)
class Course:
    """One training: its losses, the loss on held-out text at the end, and the weights at the source's scale."""

    losses: list[float]
    held: float
    weights: dict[str, torch.Tensor]


def trained(
    model: nn.Module,
    safe: MadeSafe | None,
    make: Make,
    follows: bool,
    batches: list[TrainingBatch],
    held: list[TrainingBatch],
) -> Course:
    """Train a copy of ``model`` on ``batches`` and return where it went."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    if safe is not None and follows:
        safe.follow(optimizer, model)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch.inputs()).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        end = statistics.fmean(float(model(**batch.inputs()).loss) for batch in held)
    if safe is not None:
        safe.undo(model)
    return Course(losses, end, {name: p.detach().clone() for name, p in model.named_parameters()})


def with_the_stream_alone(model: nn.Module, safe: MadeSafe) -> tuple[nn.Module, MadeSafe]:
    """Return a copy of ``model`` with the residual exponent of a plan and none of its others, and what undoes it."""
    other, plan = copy.deepcopy(model), safe.plan.model_copy(update={"exponents": {}})
    layout = resolve(ModelTensors(other))
    apply(other, layout, plan)
    set_eps(other, layout, safe.eps * 4.0**plan.residual_exponent)
    return other, replace(safe, plan=plan)


def apart(start: nn.Module, one: Course, other: Course) -> tuple[float, float]:
    """Return how far two ends are from each other over how far the first went, in the median tensor and in the one of
    which it is most."""
    found = []
    for name, weight in start.named_parameters():
        went = float((one.weights[name] - weight.detach()).norm())
        if went > 0:
            found.append(float((other.weights[name] - one.weights[name]).norm()) / went)
    return statistics.median(found), max(found)


def main() -> None:
    """Train with every optimizer and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder, begun = DEMO / "t5-gated-bytes", time.process_time()
    model = load(folder, torch.float32, attention="sdpa")
    corpus = demo_corpus(model.config, given.batch_size)
    texts = corpus.training_batches()
    batches, held = [next(texts) for _ in range(given.steps)], corpus.held_out(64)
    rescaled = copy.deepcopy(model)
    safe = make_fp16_safe(rescaled)
    print(f"{safe}\n")
    whole, stream = with_the_stream_alone(model, safe)
    print("| optimizer | held-out loss, original | made safe | largest difference | weights apart: median, most |")
    print("|---|---|---|---|---|")
    for name, (make, follows) in OPTIMIZERS.items():
        one = trained(model, None, make, follows, batches, held)
        scaled, by = (whole, stream) if STREAM in name else (rescaled, safe)
        other = trained(scaled, by, make, follows, batches, held)
        most = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
        distance = "{:.2g}, {:.2g}".format(*apart(model, one, other))
        print(f"| {name} | {one.held:.4f} | {other.held:.4f} | {most:.2g} | {distance} |", flush=True)
    seconds = time.process_time() - begun
    print(f"\n{given.steps} steps of {given.batch_size} windows, {seconds:.0f} s of processor time")


if __name__ == "__main__":
    main()
