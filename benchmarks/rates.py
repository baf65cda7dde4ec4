"""Learning rate and batch raised together, for weights kept in bf16: what a higher rate, a larger batch by gradient
accumulation, and stochastic rounding each give, and whether their gains add up.

    python benchmarks/rates.py

goes on training the shipped T5 demo checkpoint (forward and backward in fp32 from the 16-bit
weights, so that only the storage differs), every arm on the same number of examples in the same order: with twice the
batch there are half as many steps. Gradients are accumulated over batches of four rows, in the dtype of the weights.
Prints a Markdown table of the fall of the held-out loss, mean and range of the seeds, and draws benchmarks/rates.svg.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rounding
import torch
from svg import follow_schemes

from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.run.stock import load

WAYS = ("nearest", "stochastic", "fp32")
CELLS = ((1, 1), (4, 1), (1, 4), (4, 4), (16, 16))
"""Times the learning rate, and times the batch."""


def corpus_of(seed: int, rows: int) -> Corpus:
    """Return the demo's text in short rows, in the order of a seed."""
    config = load(rounding.DEMO / "t5-gated-bytes", torch.float32).config
    return rounding.demo_corpus(config, rows, input_length=64, target_length=32, seed=seed)


def falls(
    model: Any, way: str, rate: float, batches: Sequence[TrainingBatch], per_step: int, held: Sequence[Any], seed: int
) -> tuple[float, float]:
    """Return by how much the held-out loss fell, in nats a byte, and the share of weights that moved."""
    if way == "fp32":
        weights = rounding.Weights(model, torch.float32, "fp32 master", rate)
    else:
        weights = rounding.Weights(model, torch.bfloat16, way, rate, seed)

    def evaluate() -> float:
        with torch.no_grad():
            return statistics.mean(float(weights.loss(batch)) for batch in held)

    first = evaluate()
    for begin in range(0, len(batches), per_step):
        weights.step(*batches[begin : begin + per_step])
    return first - evaluate(), weights.moved()


def draw(found: dict[tuple[int, int], dict[str, list[float]]], rate: float, path: Path) -> None:
    """Draw the falls of every arm as bars, with the seeds' range."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "bf16_to_fp16", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot as plt

    colours = dict(zip(WAYS, ("#b3261e", "#1f5fa8", "#8a919c"), strict=True))
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for number, way in enumerate(WAYS):
        places = [k + (number - 1) * 0.26 for k in range(len(found))]
        means = [statistics.mean(ways[way]) for ways in found.values()]
        spread = [
            [m - min(ways[way]) for m, ways in zip(means, found.values(), strict=True)],
            [max(ways[way]) - m for m, ways in zip(means, found.values(), strict=True)],
        ]
        axes.bar(places, means, 0.24, yerr=spread, color=colours[way], label=way, ecolor="#5a626d", capsize=2)
    axes.set_xticks(range(len(found)), [f"rate {rate * r:g}\nbatch {4 * b}" for r, b in found])
    axes.set_ylabel("fall of the held-out loss")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    follow_schemes(path)


def main() -> None:
    """Run every arm and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=64, help="of four rows, in every arm")
    parser.add_argument("--rate", type=float, default=2e-6, help="the lowest")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=rounding.HERE / "rates.svg")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load(rounding.DEMO / "t5-gated-bytes", torch.float32, attention="sdpa")
    found: dict[tuple[int, int], dict[str, list[float]]] = {cell: {way: [] for way in WAYS} for cell in CELLS}
    moved: dict[tuple[int, int], dict[str, float]] = {cell: {} for cell in CELLS}
    for seed in range(given.seeds):
        corpus = corpus_of(seed, 4)
        stream = corpus.training_batches()
        batches, held = [next(stream) for _ in range(given.batches)], corpus.held_out(32)
        for (faster, larger), ways in found.items():
            for way in WAYS:
                fall, share = falls(model, way, given.rate * faster, batches, larger, held, seed)
                ways[way].append(fall)
                moved[faster, larger][way] = share
    print(f"| learning rate | batch | steps | {' | '.join(WAYS)} | nearest's share of fp32 | moved by nearest |")
    print("|---|---|---|---|---|---|---|---|")
    for (faster, larger), ways in found.items():
        cells = [f"{given.rate * faster:g}", str(4 * larger), str(given.batches // larger)]
        cells += [
            f"{statistics.mean(v):.3f}" + f" ({min(v):.3f} to {max(v):.3f})" * (len(v) > 1) for v in ways.values()
        ]
        share = statistics.mean(ways["nearest"]) / statistics.mean(ways["fp32"])
        print(f"| {' | '.join(cells)} | {share:.2f} | {moved[faster, larger]['nearest']:.1%} |")
    gains = [
        [found[cell][way][seed] - found[1, 1]["nearest"][seed] for seed in range(given.seeds)]
        for cell, way in (((1, 1), "stochastic"), ((4, 1), "nearest"), ((4, 1), "stochastic"))
    ]
    rounded, faster_alone, both = (statistics.mean(gain) for gain in gains)
    print(f"\nover nearest at {given.rate:g}, batch 4: stochastic {rounded:+.3f}, 4 times the rate", end=" ")
    print(f"{faster_alone:+.3f}, sum {rounded + faster_alone:+.3f}, both together {both:+.3f}")
    draw(found, given.rate, given.plot)


if __name__ == "__main__":
    main()
