"""How much finetuning it takes: steps and tokens until every activation has 1 and 3 bits of headroom in fp16, and what
that costs in quality, for the activation-magnitude penalty, exact rescaling, both, and the mean-square penalty.

    python benchmarks/finetune.py --steps 300

trains the shipped demo models from plain text on one thread, evaluates on held-out text, prints a Markdown table, and
draws headroom against steps (benchmarks/finetune.svg). Headroom is log2(65504 / largest |x|) over every site of the
training batches of one step, in the run's own mixed precision; a level counts as reached at the first step from which
the next 10 stay there. Quality is the rise of the held-out loss over the original's, and the KL to the original.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from bf16_to_fp16.checkpoint import open_checkpoint
from bf16_to_fp16.finetuning import train
from bf16_to_fp16.recipe import parse_recipe
from bf16_to_fp16.talk import Talk

HERE = Path(__file__).parent
ROOT = HERE.parent
DEMOS = {"T5": "t5-gated-bytes", "Pegasus": "pegasus-bytes"}
LEVELS = (1.0, 3.0)
STAYS = 10

# A coefficient for the mean square is found by trial: these are tried, and the best is shown.
COEFFICIENTS = (1e-9, 1e-7, 1e-5)


def recipe_of(demo: str, out: Path, steps: int, *, rescale: bool, penalty: dict[str, Any], rate: float) -> Any:
    """Return the recipe of one run; without rescaling it begins in bf16, which holds what fp16 does not."""
    data: dict[str, Any] = {
        "path": str(ROOT / "recipes" / "data" / "python-topics.txt.gz"),
        "held_out_path": str(ROOT / "bf16_to_fp16" / "demo_data" / "held_out.txt"),
        "input_length": 130,
        "target_length": 62,
        "batch_size": 8,
    }
    if demo == "T5":
        data |= {"first_sentinel": 383, "noise_density": 0.3, "mean_span_length": 18.0}
    return parse_recipe(
        {
            "source": str(ROOT / "bf16_to_fp16" / "demo_data" / DEMOS[demo]),
            "out": str(out),
            "device": "cpu",
            "rescale": rescale,
            "precision": ["fp16"] if rescale else ["bf16", "fp16"],
            "data": data,
            "schedule": {"steps": steps, "learning_rate": rate, "warmup": 10},
            "penalty": penalty,
            "evaluation": {"every": steps, "examples": 64, "generate": False},
            "checkpointing": {"every": steps, "keep": 1},
            "logging": {"every": 1},
            "stability": {"stuck_stop": 100_000, "overflow_stop": 1000, "nonfinite_stop": 1000},
        }
    )


def measure(demo: str, work: Path, steps: int, rescale: bool, penalty: dict[str, Any], rate: float) -> dict[str, Any]:
    """Run once and return headroom by step, tokens by step, and the evaluations."""
    folder = work / "run"
    shutil.rmtree(work, ignore_errors=True)
    folder.mkdir(parents=True)
    recipe = recipe_of(demo, folder / "out", steps, rescale=rescale, penalty=penalty, rate=rate)
    run = train(recipe, open_checkpoint(recipe.source), talk=Talk(quiet=True))
    rows = [json.loads(line) for line in (folder / "out.run" / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "headroom" in row]
    first, last = run.outcome.evaluations[0], run.outcome.evaluations[-1]
    return {
        "headroom": [(row["step"], min(row["headroom"].values())) for row in rows],
        "tokens": {row["step"]: row["tokens"] for row in rows},
        "skipped": len(run.outcome.skipped),
        "before": first,
        "after": last,
    }


def reached(found: dict[str, Any], level: float) -> int | None:
    """Return the first step from which the headroom stays at ``level`` for ten steps; 0 where the first ten do."""
    bits = [headroom for _, headroom in found["headroom"]]
    for i in range(len(bits) - STAYS + 1):
        if min(bits[i : i + STAYS]) >= level:
            return int(found["headroom"][i][0]) - 1
    return None


def lines_of(name: str, found: dict[str, Any], original: float) -> str:
    """Return one line of the table."""
    cells = [name]
    for level in LEVELS:
        step = reached(found, level)
        tokens = found["tokens"].get(step, 0) if step else 0
        cells.append("never" if step is None else f"{step} ({tokens:,} tokens)")
    final = found["headroom"][-1][1]
    rise = found["after"]["held_out_loss"] / original - 1
    cells += [
        f"{final:.1f}",
        f"{100 * rise:+.1f}%",
        f"{found['after']['held_out_divergence']:.3f}",
        str(found["skipped"]),
    ]
    return "| " + " | ".join(cells) + " |"


def draw(curves: dict[str, dict[str, list[tuple[int, float]]]], path: Path) -> None:
    """Draw headroom against steps, one panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "bf16_to_fp16"
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(5.2 * len(curves), 3.6), sharey=True, squeeze=False)
    for panel, (demo, methods) in zip(panels[0], curves.items(), strict=True):
        for name, points in methods.items():
            panel.plot([s for s, _ in points], [max(h, -8) for _, h in points], label=name, linewidth=1.6)
        panel.axhline(0, color="0.3", linewidth=1, linestyle=":")
        panel.set_title(f"{demo} demo")
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("headroom in fp16 (bits)")
    panels[0][-1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Run every method on every demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1e-4, help="highest learning rate")
    parser.add_argument("--models", nargs="+", choices=list(DEMOS), default=list(DEMOS))
    parser.add_argument("--plot", type=Path, default=HERE / "finetune.svg")
    options = parser.parse_args()
    torch.set_num_threads(1)
    goal = {"form": "amax", "headroom_bits": max(LEVELS) + 0.25}
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for demo in options.models:
            runs = {
                "rescale only": measure(demo, Path(scratch), STAYS, True, {"form": "amax", "weight": 0.0}, 1e-12),
                "rescale, then penalty": measure(demo, Path(scratch), options.steps, True, goal, options.rate),
                "penalty only": measure(demo, Path(scratch), options.steps, False, goal, options.rate),
            }
            squares = [
                measure(demo, Path(scratch), options.steps, False, {"form": "mean-square", "weight": w}, options.rate)
                for w in COEFFICIENTS
            ]
            best = max(range(len(squares)), key=lambda i: squares[i]["headroom"][-1][1])
            runs[f"mean square, coefficient {COEFFICIENTS[best]:g}"] = squares[best]
            original = runs["rescale only"]["before"]["held_out_loss"]
            print(f"\n{demo} demo, held-out loss of the original {original:.4f}\n")
            print("| method | steps to 1 bit | steps to 3 bits | bits at the end | held-out loss | KL | skipped |")
            print("|---|---|---|---|---|---|---|")
            for name, found in runs.items():
                print(lines_of(name, found, original), flush=True)
            curves[demo] = {name: found["headroom"] for name, found in runs.items()}
            flat = curves[demo]["rescale only"]
            curves[demo]["rescale only"] = [(s, flat[0][1]) for s in range(1, options.steps + 1, options.steps - 1)]
            assert all(math.isfinite(h) for points in curves[demo].values() for _, h in points)
    draw(curves, options.plot)


if __name__ == "__main__":
    main()
