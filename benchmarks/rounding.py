"""Nearest, stochastic and Kahan rounding against an fp32 master copy: loss curves of a trained model in bf16 and fp16.

    python benchmarks/rounding.py

goes on training the shipped T5 demo checkpoint (1.6 million parameters) on its own text at a small learning rate, with
the same batches in the same order, and differs only in how the step is stored: in 16-bit weights by this package's
AdamW, or in an fp32 copy by torch's. The forward and backward pass compute in fp32 from the 16-bit weights, so nothing
but the storage differs. Prints a Markdown table and draws benchmarks/rounding.svg. One thread.

Zamirai et al. (arXiv:2010.06192) found that nearest rounding of the weight update stalls, while stochastic rounding and
Kahan summation follow training with fp32 weights. Each format has the learning rate at which an update of a typical
weight is below half its gap; fp16's gaps are 8 times finer, and so is the rate.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from svg import follow_schemes
from torch import Tensor, nn
from torch.func import functional_call

from bf16_to_fp16 import AdamW
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.recipe import Data
from bf16_to_fp16.run.stock import load

HERE = Path(__file__).parent
ROOT = HERE.parent
DEMO = ROOT / "bf16_to_fp16" / "demo_data"
RATES = {"bf16": 4e-6, "fp16": 5e-7}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WAYS = ("nearest", "stochastic", "kahan", "fp32 master")
LOSS_SCALE = 2.0**12
"""Keeps fp16 gradients out of the subnormals; divided out by the optimizer."""


def demo_corpus(config: Any, rows: int, *, input_length: int = 130, target_length: int = 62, seed: int = 0) -> Corpus:
    """Return the T5 demo's text in batches of so many rows, in the order of a seed."""
    data = Data(
        path=str(ROOT / "bf16_to_fp16" / "demo_data" / "python-topics.txt.gz"),
        held_out_path=str(DEMO / "held_out.txt"),
        noise_density=0.3,
        mean_span_length=18.0,
        first_sentinel=383,
        input_length=input_length,
        target_length=target_length,
        batch_size=rows,
    )
    return Corpus(data, DEMO / "t5-gated-bytes", config, seed=seed)


class Weights:
    """The parameters of a model as one way keeps them, and the optimizer that changes them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, way: str, rate: float, seed: int = 0) -> None:
        """Take the model's values, rounded to ``dtype``; seed: of stochastic rounding."""
        self.model, self.dtype, self.scale = model, dtype, LOSS_SCALE if dtype == torch.float16 else 1.0
        stored = torch.float32 if way == "fp32 master" else dtype
        self.kept = {n: nn.Parameter(p.detach().to(dtype).to(stored, copy=True)) for n, p in model.named_parameters()}
        self.start = {n: p.detach().clone() for n, p in self.kept.items()}
        options: dict[str, Any] = {"lr": rate, "weight_decay": 0.0}
        self.optimizer: torch.optim.Optimizer
        if way == "fp32 master":
            self.optimizer = torch.optim.AdamW(self.kept.values(), **options)
        else:
            self.optimizer = AdamW(self.kept.values(), rounding=way, seed=seed, **options)
        self.master = way == "fp32 master"

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Return the mean loss, computed in fp32 from the values that the format holds."""
        values = {n: p.to(self.dtype).float() for n, p in self.kept.items()}
        found: Tensor = functional_call(self.model, values, kwargs=batch.inputs()).loss
        return found

    def step(self, *batches: TrainingBatch) -> None:
        """Take one step, of gradients accumulated over some batches in the dtype of what is kept."""
        self.optimizer.zero_grad()
        for batch in batches:
            (self.loss(batch) * (self.scale / len(batches))).backward()
        if self.master:
            for parameter in self.kept.values():
                if parameter.grad is not None:
                    parameter.grad.div_(self.scale)
        else:
            self.optimizer.grad_scale = torch.tensor(self.scale)  # type: ignore[attr-defined]
        self.optimizer.step()

    def moved(self) -> float:
        """Return the share of the weights, as the forward pass reads them, that are no longer what they were."""
        changed = sum(int((p.to(self.dtype) != self.start[n].to(self.dtype)).sum()) for n, p in self.kept.items())
        return changed / sum(p.numel() for p in self.kept.values())


def curve(
    model: nn.Module,
    dtype: str,
    way: str,
    rate: float,
    batches: list[TrainingBatch],
    held: list[TrainingBatch],
    every: int,
) -> tuple[list[tuple[int, float]], float]:
    """Return the held-out loss by step and the share of the weights that moved in the end."""
    weights = Weights(model, DTYPES[dtype], way, rate)

    def evaluate() -> float:
        with torch.no_grad():
            return sum(float(weights.loss(batch)) for batch in held) / len(held)

    points = [(0, evaluate())]
    for step, batch in enumerate(batches, 1):
        weights.step(batch)
        if step % every == 0:
            points.append((step, evaluate()))
    return points, weights.moved()


def draw(curves: dict[str, dict[str, list[tuple[int, float]]]], rates: dict[str, float], path: Path) -> None:
    """Draw held-out loss against steps, one panel for each format."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "bf16_to_fp16", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot as plt

    look: dict[str, dict[str, Any]] = {
        "nearest": {"color": "#b3261e", "marker": "x"},
        "stochastic": {"color": "#1f5fa8", "marker": "o", "markersize": 3.5},
        "kahan": {"color": "#b25c00", "marker": "s", "markersize": 3, "linestyle": "--"},
        "fp32 master": {"color": "#5a626d", "linewidth": 3.5, "alpha": 0.45},
    }
    figure, panels = plt.subplots(1, len(curves), figsize=(9, 3.4), layout="constrained")
    for axes, (dtype, ways) in zip(panels, curves.items(), strict=True):
        for way, points in ways.items():
            axes.plot(*zip(*points, strict=True), label=way, **look[way])
        axes.set_title(f"{dtype} weights, learning rate {rates[dtype]:g}")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss, nats a byte")
    panels[0].legend()
    figure.savefig(path, metadata={"Date": None})
    follow_schemes(path)


def main() -> None:
    """Run every way in both formats and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rate", type=float, action="append", help="of bf16, and once more of fp16")
    parser.add_argument("--out", type=Path, default=HERE / "rounding.svg")
    given = parser.parse_args()
    rates = dict(zip(RATES, given.rate, strict=True)) if given.rate else RATES
    torch.set_num_threads(1)
    folder = DEMO / "t5-gated-bytes"
    model = load(folder, torch.float32, attention="sdpa")
    corpus = demo_corpus(model.config, given.batch_size)
    training_batches = corpus.training_batches()
    batches = [next(training_batches) for _ in range(given.steps)]
    held = corpus.held_out(64)
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    print(
        "| weights | learning rate | rounding | loss at the start | at the end | fall, share of the master's | moved |"
    )
    print("|---|---|---|---|---|---|---|")
    started = time.process_time()
    for dtype, rate in rates.items():
        curves[dtype] = {}
        fall = math.nan
        for way in reversed(WAYS):
            points, moved = curve(model, dtype, way, rate, batches, held, given.every)
            curves[dtype][way] = points
            first, last = points[0][1], points[-1][1]
            fall = first - last if way == "fp32 master" else fall
            cells = (
                dtype,
                f"{rate:g}",
                way,
                f"{first:.4f}",
                f"{last:.4f}",
                f"{(first - last) / fall:.2f}",
                f"{moved:.1%}",
            )
            print(f"| {' | '.join(cells)} |", flush=True)
    print(
        f"\n{given.steps} steps of {given.batch_size} windows, {time.process_time() - started:.0f} s of processor time"
    )
    draw(curves, rates, given.out)


if __name__ == "__main__":
    main()
