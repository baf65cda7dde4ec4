"""How much finetuning it takes: steps and tokens until every activation has 1 and 3 bits of headroom in fp16, and what
that costs in quality, for the activation-magnitude penalty, exact rescaling, both, and the mean-square penalty.

    python benchmarks/finetune.py --steps 300
    python benchmarks/finetune.py --amp 500      # ordinary finetuning under fp16 AMP, before and after convert
    python benchmarks/finetune.py --cost 20      # seconds a step beside a plain loop, over 20 steps

The first trains the shipped demo models from plain text on one thread, evaluates on held-out text, prints a Markdown
table, and draws headroom against steps (benchmarks/finetune.svg). Headroom is log2(65504 / largest |x|) over every site
of one step's training batches and probe, in the run's own mixed precision; a level counts as reached at the first step
from which the next 10 stay there. Quality is the rise of the held-out loss over the original's, and the KL to the
original; since all are trained on the kind of text on which they are judged, "no penalty" is what to compare with.

The second trains without penalty, rescaling or teacher, as anybody would finetune the checkpoint in fp16, and counts
the steps that are skipped because a value or a gradient is not finite. The third finetunes a byte-level T5 of 57
million parameters with random weights, in fp32 (products in fp16 are computed in fp32 on a CPU, which would
hide the rest).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import synthetic
import torch

from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.commands.convert import convert
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.corpus import open_corpus
from bf16_to_fp16.finetuning.distillation import Teacher
from bf16_to_fp16.finetuning.log import RunLog
from bf16_to_fp16.finetuning.recipe import Wandb, parse_recipe
from bf16_to_fp16.finetuning.run import make_accelerator, train
from bf16_to_fp16.finetuning.trainer import Trainer
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.run.stock import load, load_config
from bf16_to_fp16.svg import follow_schemes

HERE = Path(__file__).parent
ROOT = HERE.parent
DEMOS = {"T5": "t5-gated-bytes", "Pegasus": "pegasus-bytes"}
LEVELS = (1.0, 3.0)
STAYS = 10

# A coefficient for the mean square is found by trial: these are tried in runs of a fifth of the steps, and the one with
# the most headroom is shown.
COEFFICIENTS = (1e-9, 1e-7, 1e-5)


def data_of(demo: str) -> dict[str, Any]:
    """Return the data of a recipe: the text and the task on which a demo model was trained."""
    data: dict[str, Any] = {
        "path": str(ROOT / "recipes" / "data" / "python-topics.txt.gz"),
        "held_out_path": str(ROOT / "bf16_to_fp16" / "demo_data" / "held_out.txt"),
        "input_length": 130,
        "target_length": 62,
        "batch_size": 8,
    }
    if demo == "T5":
        data |= {"first_sentinel": 383, "noise_density": 0.3, "mean_span_length": 18.0}
    return data


def recipe_of(demo: str, out: Path, steps: int, *, rescale: bool, penalty: dict[str, Any], rate: float) -> Any:
    """Return the recipe of one run; what fp16 does not hold begins in bf16."""
    return parse_recipe(
        {
            "source": str(ROOT / "bf16_to_fp16" / "demo_data" / DEMOS[demo]),
            "out": str(out),
            "device": "cpu",
            "rescale": rescale,
            "data": data_of(demo),
            "schedule": {"steps": steps, "learning_rate": rate, "warmup": min(10, steps)},
            # The penalty by itself: no bounds are held, and no inputs searched for.
            "penalty": {"certify": False, "search_every": None, **penalty},
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
    run = train(recipe, open_checkpoint(recipe.source), progress=Progress(quiet=True))
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


def amp_recipe(demo: str, source: Path, out: Path, steps: int) -> Any:
    """Return the recipe of an ordinary finetune of ``source`` in fp16: no penalty, no rescaling, no teacher."""
    return parse_recipe(
        {
            "source": str(source),
            "out": str(out),
            "device": "cpu",
            "rescale": False,
            "precision": "fp16",
            "data": data_of(demo),
            "schedule": {"steps": steps, "warmup": 10},
            "penalty": {"form": "none"},
            "distillation": {"weight": 0.0},
            "evaluation": {"every": steps, "examples": 64, "generate": False},
            "checkpointing": {"every": steps, "keep": 1},
            "logging": {"every": 1},
        }
    )


def train_in_amp(demo: str, source: Path, work: Path, steps: int) -> str:
    """Finetune and return one line of a table: steps, skipped, first and last loss scale, held-out loss."""
    shutil.rmtree(work, ignore_errors=True)
    run = work / "run"
    run.mkdir(parents=True)
    recipe = amp_recipe(demo, source, work / "out", steps)
    # Not by train, which refuses a start that overflows.
    corpus = open_corpus(recipe.data, source, load_config(source))
    student = load(source, torch.float32, attention="eager")
    log = RunLog(run / "log.jsonl", recipe.logging.wandb, run, demo, {})
    trainer = Trainer(recipe, student, None, corpus, run, make_accelerator(recipe), log=log)
    try:
        trainer.train()
    except UserError as error:
        print(f"{source.name}: {error}", file=sys.stderr)
    log.close()
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    scales = [row["loss_scale"] for row in rows if "loss_scale" in row]
    skipped = [row["step"] for row in trainer.position.skipped]
    losses = [e["held_out_loss"] for e in trainer.position.evaluations]
    cells = (
        trainer.position.step,
        f"{len(skipped)}" + (f" (the last at step {skipped[-1]})" if skipped else ""),
        f"{scales[0]:g}",
        f"{scales[-1]:g}",
        " to ".join(f"{loss:.3f}" for loss in losses),
    )
    return " | ".join(str(cell) for cell in cells)


def compare_in_amp(demos: list[str], steps: int) -> None:
    """Print the table of the demo models as they are and as convert leaves them."""
    print("| checkpoint | steps | skipped | first loss scale | last | held-out loss |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for demo in demos:
            source = ROOT / "bf16_to_fp16" / "demo_data" / DEMOS[demo]
            converted = Path(scratch) / f"{demo}-converted"
            convert(source, converted)
            for name, folder in (("as trained", source), ("converted", converted)):
                print(f"| {demo}, {name} | {train_in_amp(demo, folder, Path(scratch) / 'run', steps)} |", flush=True)


class Stopwatch(RunLog):
    """A log that keeps only when each step ended."""

    def __init__(self) -> None:
        super().__init__(None, Wandb(), Path(), "", {})
        self.ends: list[float] = []

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Note the time."""
        if "task_loss" in values:
            self.ends.append(time.perf_counter())


def seconds_of(ends: list[float]) -> float:
    """Return the median time between steps, without the first ones."""
    return statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))


def plain_loop(source: Path, steps: int) -> float:
    """Return the seconds of a step that anybody would write: fused AdamW, batches of the same shape."""
    model = load(source, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    ids, labels = torch.randint(3, 250, (8, 130)), torch.randint(3, 250, (8, 62))
    ends = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return seconds_of(ends)


def cost(steps: int) -> None:
    """Print the seconds of a step, without and with what a finetune adds."""
    shape = synthetic.Shape(512, 2048, 8, 384, 6, 6)
    demo = ROOT / "bf16_to_fp16" / "demo_data" / DEMOS["T5"]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        synthetic.write(source, shape)
        for name in ("tokenizer_config.json", "generation_config.json"):
            shutil.copy(demo / name, source)
        changes: dict[str, dict[str, Any]] = {
            "finetune, no penalty, no teacher": {"penalty": {"form": "none"}, "distillation": {"weight": 0.0}},
            "with penalty": {"distillation": {"weight": 0.0}},
            "with teacher": {"penalty": {"form": "none"}},
            "with both, as by default": {},
        }
        print(f"{shape.parameters / 1e6:.0f} million parameters, batches of 8, fp32, 1 thread\n")
        plain = plain_loop(source, steps)
        print(f"| step | seconds | times the plain loop |\n|---|---|---|\n| plain loop | {plain:.2f} | 1.00 |")
        for name, change in changes.items():
            settings = {
                "source": str(source),
                "out": str(Path(scratch) / "out"),
                "device": "cpu",
                "rescale": False,
                "precision": "fp32",
                "data": data_of("T5"),
                "schedule": {"steps": steps, "warmup": 1},
                "evaluation": {"every": steps, "examples": 1, "generate": False},
                "checkpointing": {"every": steps, "keep": 1},
                "logging": {"every": 1},
                **change,
            }
            recipe = parse_recipe(settings)
            corpus = open_corpus(recipe.data, source, load_config(source))
            student = load(source, torch.float32, attention="eager")
            watch = Stopwatch()
            teacher = None
            if recipe.distillation.weight:
                teacher = Teacher(load(source, torch.float32), torch.device("cpu"), temperature=1.0)
            run = Path(scratch) / "run"
            Trainer(recipe, student, teacher, corpus, run, make_accelerator(recipe), log=watch).train()
            shutil.rmtree(run, ignore_errors=True)
            seconds = seconds_of(watch.ends)
            print(f"| {name} | {seconds:.2f} | {seconds / plain:.2f} |", flush=True)


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
    follow_schemes(path)


def main() -> None:
    """Run every method on every demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--amp", type=int, metavar="STEPS", help="finetune under fp16 AMP instead, for so many steps")
    parser.add_argument(
        "--rate", type=float, default=4e-3, help="highest learning rate, relative to each tensor's size"
    )
    parser.add_argument("--cost", type=int, metavar="STEPS", help="time a step instead, over so many steps")
    parser.add_argument("--models", nargs="+", choices=list(DEMOS), default=list(DEMOS))
    parser.add_argument("--plot", type=Path, default=HERE / "finetune.svg")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cost:
        cost(options.cost)
        return
    if options.amp:
        compare_in_amp(options.models, options.amp)
        return
    goal = {"form": "smooth-max", "headroom_bits": max(LEVELS) + 0.25}
    idle = {"form": "amax", "weight": 0.0}
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for demo in options.models:

            def run(steps: int, rescale: bool, penalty: dict[str, Any], rate: float) -> dict[str, Any]:
                return measure(demo, Path(scratch), steps, rescale, penalty, rate)  # noqa: B023  (called in the loop)

            short = max(STAYS, options.steps // 5)
            squares = {w: {"form": "mean-square", "weight": w} for w in COEFFICIENTS}
            tried = {w: run(short, False, p, options.rate)["headroom"][-1][1] for w, p in squares.items()}
            best = max(tried, key=lambda w: tried[w])
            runs = {
                "rescale only": run(STAYS, True, idle, 1e-12),
                "no penalty": run(options.steps, True, idle, options.rate),
                "rescale, then penalty": run(options.steps, True, goal, options.rate),
                "penalty only": run(options.steps, False, goal, options.rate),
                f"mean square, coefficient {best:g}": run(options.steps, False, squares[best], options.rate),
            }
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
