"""The patterns of loss curves that docs/losses.md shows: made, looked at by the detector, and drawn.

All but one are synthetic: a power law with correlated noise, as long runs have, and one thing put in. Grokking is a
real run, a small network that adds two numbers modulo 31 (Power et al., arXiv:2201.02177): ``--train`` runs it again,
which takes a minute, and writes its log. Run:

    python benchmarks/loss_patterns.py docs/patterns
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bf16_to_fp16.losses.detector import events
from bf16_to_fp16.losses.events import Curve
from bf16_to_fp16.losses.report import event_in_words, steps_in_words, write_picture
from bf16_to_fp16.svg import both_schemes

GROKKING = Path(__file__).parents[1] / "tests" / "support" / "logs" / "grokking.jsonl"
SAMPLES = 1200
Losses = np.ndarray


@dataclass(frozen=True)
class Pattern:
    """A pattern: its title, and what makes its losses from those of a calm run and a generator of random numbers."""

    title: str
    put_in: Callable[[Losses, np.random.Generator], Losses]


def spikes(clean: Losses, chance: np.random.Generator) -> Losses:
    """Two spikes: one that is over in 6 losses, and one that takes a hundred."""
    clean[420:426] *= [1.5, 1.8, 1.6, 1.4, 1.2, 1.1]
    clean[800:] += clean[800] * 0.8 * np.exp(-np.arange(SAMPLES - 800) / 25)
    return clean


def divergence(clean: Losses, chance: np.random.Generator) -> Losses:
    """A rise that stays, at once."""
    clean[700:] += clean[700] * 0.9 * np.minimum(1, np.arange(1, SAMPLES - 699) / 12)
    return clean


def slow_rise(clean: Losses, chance: np.random.Generator) -> Losses:
    """A rise of 60% in 600 losses."""
    clean[600:] += clean[600] * 0.6 * np.arange(SAMPLES - 600) / 600
    return clean


def steps(clean: Losses, chance: np.random.Generator) -> Losses:
    """Stairs: a fall of 12% at the start of every epoch of 300 losses, and next to none in between."""
    epoch = np.arange(SAMPLES) // 300
    return np.where(epoch == 0, clean, clean[299] * 0.88**epoch)


def shards(clean: Losses, chance: np.random.Generator) -> Losses:
    """A new shard of the data every 200 losses, of which some are harder by up to 40% until they are over."""
    harder = np.array([0, 0.12, 0.4, 0.0, 0.3, 0.02])
    return clean * (1 + np.repeat(harder, SAMPLES // len(harder)))


def plateau(clean: Losses, chance: np.random.Generator) -> Losses:
    """A standstill, and after 500 losses a fall."""
    clean[400:900] = clean[400]
    clean[900:] = clean[400] * (0.6 + 0.4 * np.exp(-np.arange(SAMPLES - 900) / 60))
    return clean


PATTERNS = {
    "spikes": Pattern("spikes: one that recovers fast, one slowly", spikes),
    "divergence": Pattern("divergence: a rise that stays", divergence),
    "slow-rise": Pattern("a slow rise", slow_rise),
    "plateau": Pattern("a plateau, and what may come after it", plateau),
    "steps": Pattern("stairs, one at each epoch", steps),
    "shards": Pattern("bumps where the data's shards change", shards),
}


def synthetic(name: str, seed: int = 0) -> Curve:
    """Return the curve of a pattern."""
    chance = np.random.default_rng([seed, list(PATTERNS).index(name)])
    time = np.arange(SAMPLES)
    clean = PATTERNS[name].put_in(2.0 + 4.0 * (1 + time / 60) ** -0.6, chance)
    noise = chance.standard_normal(SAMPLES)
    for k in range(1, SAMPLES):
        noise[k] = 0.3 * noise[k - 1] + 0.95 * noise[k]
    losses = clean * (1 + 0.008 * noise)
    return Curve(tuple((10 * (time + 1)).tolist()), tuple(losses.tolist()), (None,) * SAMPLES)


def grokking(modulus: int = 31, count: int = 3000, every: int = 5) -> list[dict[str, float]]:
    """Train a network of one hidden layer on 60% of the sums of two numbers, and return its losses on both parts."""
    torch.manual_seed(0)
    pairs = torch.cartesian_prod(torch.arange(modulus), torch.arange(modulus))
    sums = pairs.sum(1) % modulus
    order = torch.randperm(len(pairs))
    shown, held = order[: int(0.6 * len(order))], order[int(0.6 * len(order)) :]
    width = 128
    embedding = nn.Embedding(modulus, width)
    network = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, modulus))
    parameters = [*embedding.parameters(), *network.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=1.0, betas=(0.9, 0.98))

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(network(embedding(pairs[part]).flatten(1)), sums[part])

    rows = []
    for step in range(1, count + 1):
        optimizer.zero_grad()
        loss = loss_of(shown)
        loss.backward()
        optimizer.step()
        if step % every == 0:
            with torch.no_grad():
                rows.append({"step": step, "training": round(float(loss), 6), "loss": round(float(loss_of(held)), 5)})
    return rows


def real(key: str = "loss") -> Curve:
    """Return the held-out losses of the run that is kept, or its training losses (``training``)."""
    rows = [json.loads(line) for line in GROKKING.read_text().splitlines()]
    return Curve(tuple(row["step"] for row in rows), tuple(row[key] for row in rows), (None,) * len(rows))


def grokking_svg() -> str:
    """Return both losses of the run that is kept as SVG for light and dark."""
    target = io.StringIO()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "losses", "font.size": 9}):
        figure = Figure(figsize=(7.5, 3.2), layout="constrained")
        axes = figure.subplots()
        for key, label, colour in (("loss", "held-out", "#1f77b4"), ("training", "training", "#ff7f0e")):
            curve = real(key)
            axes.plot(curve.steps, curve.losses, linewidth=1.2, color=colour, label=label)
        axes.set_ylim(1e-4, 20)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.set_title("grokking (a real run): what was learnt by heart generalises later")
        axes.legend(loc="upper right", fontsize=7)
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return both_schemes(target.getvalue())


def found_in_words(curve: Curve) -> str:
    """Return what the detector finds in a curve."""
    said = [(event.kind, event.to_json()) for event in events(curve)]
    return "; ".join(f"{kind}, {steps_in_words(e)} ({event_in_words(e)})" for kind, e in said) or "nothing"


def main(arguments: Sequence[str]) -> None:
    """Draw every pattern into a folder, and print what the detector finds in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--train", action="store_true", help="run the network that groks again")
    options = parser.parse_args(arguments)
    if options.train:
        torch.set_num_threads(1)
        GROKKING.write_text("".join(json.dumps(row) + "\n" for row in grokking()))
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "grokking.svg").write_text(grokking_svg(), encoding="utf-8")
    print("| pattern | the detector finds |\n|---|---|")
    for name, pattern in PATTERNS.items():
        curve = synthetic(name)
        write_picture(options.folder / f"{name}.svg", curve, events(curve), pattern.title)
        print(f"| {name} | {found_in_words(curve)} |")
    print(f"| grokking | training: {found_in_words(real('training'))}; held-out: {found_in_words(real())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
