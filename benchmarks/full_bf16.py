"""The loss curve of torchao's pull request 1124: training in bf16 alone, rounded to nearest or stochastically, beside
mixed precision with fp32 weights.

    python benchmarks/full_bf16.py

goes on training the shipped T5 demo checkpoint on its own text. Weights, activations and gradients are all bf16 (matrix
products in fp32, rounded once), and the arms differ in how a step is stored: to nearest, stochastically by this
package's AdamW, or by torchao's where it is installed. "AMP" has fp32 weights, bf16 autocast and torch's AdamW. The
same batches in the same order for all, three seeds of the data and of the rounding. Held-out losses are computed in
fp32 from what is stored. Prints a Markdown table and draws benchmarks/full_bf16.svg.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rates
import rounding
import torch
from svg import follow_schemes

from bf16_to_fp16 import AdamW
from bf16_to_fp16.finetuning.corpus import TrainingBatch
from bf16_to_fp16.run.products import FastProducts
from bf16_to_fp16.run.stock import load

ARMS = {
    "bf16, nearest": {"color": "#b3261e", "marker": "x"},
    "bf16, stochastic": {"color": "#1f5fa8", "marker": "o", "markersize": 3.5},
    "bf16, stochastic, torchao": {"color": "#3a7d34", "marker": "s", "markersize": 3, "linestyle": "--"},
    "AMP, fp32 weights": {"color": "#5a626d", "linewidth": 3.5, "alpha": 0.45},
}


def optimizer_of(arm: str, parameters: list[Any], rate: float, seed: int) -> torch.optim.Optimizer:
    """Return an arm's optimizer."""
    options: dict[str, Any] = {"lr": rate, "weight_decay": 0.0}
    if arm.startswith("AMP"):
        return torch.optim.AdamW(parameters, **options)
    if arm.endswith("torchao"):
        from torchao.optim import _AdamW

        made: torch.optim.Optimizer = _AdamW(parameters, bf16_stochastic_round=True, **options)
        return made
    return AdamW(parameters, rounding=arm.split(", ")[1], seed=seed, **options)


def curve(
    arm: str, source: Any, batches: Sequence[TrainingBatch], held: Sequence[TrainingBatch], rate: float, seed: int
) -> list[float]:
    """Return the held-out loss before the first step and after every quarter of the steps."""
    torch.manual_seed(seed)  # torchao's rounding draws from it
    amp = arm.startswith("AMP")
    model = copy.deepcopy(source).to(torch.float32 if amp else torch.bfloat16).train()
    optimizer = optimizer_of(arm, list(model.parameters()), rate, seed)

    def evaluate() -> float:
        plain = copy.deepcopy(model).float().eval()
        with torch.no_grad():
            return statistics.mean(float(plain(**batch.inputs()).loss) for batch in held)

    points, every = [evaluate()], len(batches) // 4
    for step, batch in enumerate(batches, 1):
        with FastProducts():
            with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
                loss = model(**batch.inputs()).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            points.append(evaluate())
    return points


def draw(curves: dict[str, list[list[float]]], steps: int, path: Path) -> None:
    """Draw the mean of the seeds, with their range."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "bf16_to_fp16", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for arm, seeds in curves.items():
        places = [k * steps // 4 for k in range(len(seeds[0]))]
        columns = list(zip(*seeds, strict=True))
        axes.plot(places, [statistics.mean(c) for c in columns], label=arm, **ARMS[arm])
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(places, low, high, color=ARMS[arm]["color"], alpha=0.12, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    follow_schemes(path)


def main() -> None:
    """Run every arm and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4e-6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=rounding.HERE / "full_bf16.svg")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load(rounding.DEMO / "t5-gated-bytes", torch.float32, attention="eager")
    arms = [arm for arm in ARMS if not arm.endswith("torchao") or find_spec("torchao") is not None]
    curves: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    for seed in range(given.seeds):
        corpus = rates.corpus_of(seed, 4)
        stream = corpus.training_batches()
        batches, held = [next(stream) for _ in range(given.steps)], corpus.held_out(32)
        for arm in arms:
            curves[arm].append(curve(arm, model, batches, held, given.rate, seed))
    print("| arm | loss at the start | at the end | fall, share of AMP's |\n|---|---|---|---|")
    whole = [points[0] - points[-1] for points in curves["AMP, fp32 weights"]]
    for arm, seeds in curves.items():
        last = [points[-1] for points in seeds]
        shares = [(points[0] - points[-1]) / fall for points, fall in zip(seeds, whole, strict=True)]
        cells = [arm, f"{statistics.mean(points[0] for points in seeds):.3f}"]
        cells += [f"{statistics.mean(last):.3f} ({min(last):.3f} to {max(last):.3f})"]
        cells += [f"{statistics.mean(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"]
        print(f"| {' | '.join(cells)} |")
    draw(curves, given.steps, given.plot)


if __name__ == "__main__":
    main()
