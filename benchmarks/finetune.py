"""How much finetuning it takes: steps until every activation has 1 and 3 bits of headroom in fp16, and what that costs
in quality, for the activation-magnitude penalty and the mean square, from weights as trained in bf16 and rescaled.

    python benchmarks/finetune.py --work WORK    # the comparison; what WORK holds is not computed again
    python benchmarks/finetune.py --amp 500      # ordinary finetuning under fp16 AMP, before and after convert

The first trains the shipped demo models from plain text on one thread. All runs of a start begin with the same weights:
rescaled as ``convert`` does by default, without asking it for headroom, since on these two models a plan that is asked
for 3 bits gives them by itself. Training is in fp32, where headroom is what it is in fp16 and nothing is skipped, and a
CPU is twice as fast. Headroom is log2(65504 / largest |x|) over every site of one step's training batches and probe; a
level counts as reached at the first step from which the next 10 stay there. Quality is the rise of the held-out loss
over the original's, and the KL to the original; as all are trained on the kind of text on which they are judged, "no
penalty" is what to compare with.

The mean square needs a coefficient, for each start its own. Powers of ten are tried with the first seed until the best
has a worse one on either side: it gets to 3 bits in the fewest steps without raising the held-out loss by more than 5%
over that without penalty; where none does, it has the most headroom among those that keep the loss.

The second trains without penalty, rescaling or teacher, as anybody would finetune the checkpoint in fp16, and counts
the steps that are skipped because a value or a gradient is not finite.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import DEMOS, demo_data
from penalty import MeanSquare
from results import print_header, print_row

from bf16_to_fp16 import ActivationPenalty
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.commands.convert import convert
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.corpus import Corpus
from bf16_to_fp16.finetuning.recipe import parse_recipe
from bf16_to_fp16.finetuning.run import make_accelerator, make_teacher, write_start
from bf16_to_fp16.finetuning.trainer import Trainer
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.run.stock import load, load_config

LEVELS, STAYS = (1.0, 3.0), 10

STARTS = {"rescaled": -3, "as trained": -5}
"""Each with the power of ten at which the search for the mean square's coefficient begins; rescaling makes the values
smaller."""
MOST_LOSS = 1.05  # times the held-out loss without penalty that a coefficient may cost


def recipe_of(source: Path, out: Path, steps: int, precision: str, **changes: Any) -> Any:
    every = {"evaluation": {"every": steps}, "checkpointing": {"every": steps}, "schedule": {"steps": steps}}
    place = {"source": str(source), "out": str(out), "device": "cpu", "precision": precision}
    return parse_recipe({**place, **every, "rescale": False, "data": demo_data(source.name), **changes})


class Comparing(Trainer):
    """Trains under the mean square of a coefficient, under none of 0, or of None under the package's penalty."""

    def __init__(self, coefficient: float | None, *given: Any, **options: Any) -> None:
        self.coefficient = coefficient
        super().__init__(*given, **options)

    def _penalty(self, calls: int) -> ActivationPenalty:
        if self.coefficient is None:
            return super()._penalty(calls)
        form = MeanSquare if self.coefficient else ActivationPenalty
        bits = self.recipe.penalty.trained_bits
        return form(self.stock, headroom_bits=bits, weight=self.coefficient, accumulation=calls)


def trained(recipe: Any, start: Path, run: Path, kind: Callable[..., Trainer] = Trainer) -> tuple[Any, list[Any]]:
    """Return the trainer and the lines of its log. Not by ``train``, which refuses a start that overflows and rescales
    until the plan itself has the headroom that is asked for."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    source = open_checkpoint(recipe.source)
    corpus = Corpus(recipe.data, source.folder, load_config(source.folder), seed=recipe.seed)
    accelerator = make_accelerator(recipe)
    teacher = make_teacher(source, recipe, accelerator)
    student = load(start, torch.float32, attention="eager")
    student.set_input_embeddings(student.get_input_embeddings())
    trainer = kind(recipe, student, teacher, corpus, run, accelerator)
    try:
        trainer.train()
    except UserError as error:
        print(f"{start.name}: {error}", file=sys.stderr)
    return trainer, [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Bench:
    """Runs on one demo, each of which is kept in ``work`` and not computed again."""

    demo: str
    work: Path
    steps: int

    def start(self, start: str) -> Path:
        """Return the folder of the weights with which runs begin, which is made once."""
        place = self.work / f"{self.demo}-{start}"
        if not (place / "config.json").is_file():
            changes = {"rescale": start == "rescaled", "penalty": {"form": "none"}}
            recipe = recipe_of(DEMOS[self.demo], place, 1, "fp32", **changes)
            write_start(open_checkpoint(recipe.source), recipe, place, Progress(quiet=True))
        return place

    def run(self, start: str, coefficient: float | None, seed: int) -> dict[str, Any]:
        """Train once and return headroom by step and the first and last evaluation; coefficient: as ``Comparing`` has
        it."""
        kept = self.work / f"{self.demo}-{start}-{coefficient}-{self.steps}-{seed}.json"
        if kept.is_file():
            return dict(json.loads(kept.read_text(encoding="utf-8")))
        run, short = self.work / "run", {"input_length": 64, "target_length": 32, "batch_size": 4}
        # The penalty by itself: no bounds are held.
        penalty = {"certify": False} | ({"headroom_bits": max(LEVELS) + 0.25} if coefficient is None else {})
        changes = {"data": demo_data(DEMOS[self.demo].name) | short, "seed": seed, "penalty": penalty}
        # What the tables were measured with: the text's own loss is one of their columns.
        changes |= {"rescale": start == "rescaled", "distillation": {"weight": 0.5}}
        recipe = recipe_of(DEMOS[self.demo], run / "out", self.steps, "fp32", **changes)
        trainer, rows = trained(recipe, self.start(start), run, partial(Comparing, coefficient))
        assert trainer.position.step == self.steps
        evaluations = [row["evaluation"] for row in rows if "evaluation" in row]
        headroom = [(row["step"], row["worst_headroom_bits"]) for row in rows if "worst_headroom_bits" in row]
        found = {"headroom": headroom, "before": evaluations[0], "after": evaluations[-1]}
        kept.write_text(json.dumps(found), encoding="utf-8")
        return found


def worth(found: dict[str, Any], plain: dict[str, Any]) -> tuple[bool, float]:
    """Return what coefficients are compared by, more being better; ``plain``: the run without penalty."""
    loss, step = found["after"]["held_out_loss"], reached(found, LEVELS[-1])
    if loss is None or not loss <= MOST_LOSS * plain["after"]["held_out_loss"]:
        return False, -math.inf
    return step is not None, float(found["headroom"][-1][1] if step is None else -step)


def interior(first: int, worth_of: Callable[[int], tuple[bool, float]]) -> tuple[int, list[int]]:
    """Return the best power of ten, whose neighbours are both worse, and all that were tried, from ``first`` on."""
    tried = {first: worth_of(first)}
    while True:
        best = max(tried, key=lambda power: tried[power])
        missing = [power for power in (best + 1, best - 1) if power not in tried]
        if not missing:
            return best, sorted(tried)
        tried[missing[0]] = worth_of(missing[0])


def reached(found: dict[str, Any], level: float) -> int | None:
    """Return the first step from which the headroom stays at ``level`` for ten steps; 0 where the first ten do."""
    rows = found["headroom"]
    stays = (i for i in range(len(rows) - STAYS + 1) if min(bits for _, bits in rows[i : i + STAYS]) >= level)
    return next((int(rows[i][0]) - 1 for i in stays), None)


def spread(values: Sequence[float], form: str) -> str:
    """Return the median of some seeds, and in brackets their range where they differ as they are shown."""
    shown = [format(value, form) for value in sorted(values)]
    middle = format(statistics.median(values), form)
    return middle if shown[0] == shown[-1] else f"{middle} ({shown[0]} to {shown[-1]})"


COLUMNS = ("steps to 1 bit", "steps to 3 bits", "bits at the end", "held-out loss, %", "KL")


def print_runs(name: str, runs: Sequence[dict[str, Any]]) -> None:
    cells = []
    for level in LEVELS:
        steps = [step for found in runs if (step := reached(found, level)) is not None]
        never = len(runs) - len(steps)
        cells.append("never" if not steps else spread(steps, ".0f") + (f", {never} never" if never else ""))
    rises = [100 * (r["after"]["held_out_loss"] / r["before"]["held_out_loss"] - 1) for r in runs]
    bits, kl = [r["headroom"][-1][1] for r in runs], [r["after"]["held_out_divergence"] for r in runs]
    print_row(name, *cells, spread(bits, ".1f"), spread(rises, "+.1f"), spread(kl, ".3f"))


def coefficient_of(bench: Bench, start: str, seed: int, plain: dict[str, Any]) -> int:
    best, tried = interior(STARTS[start], lambda power: worth(bench.run(start, 10.0**power, seed), plain))
    print(f"\n{bench.demo}, mean square, {start}\n")
    print_header("coefficient", *COLUMNS)
    for power in tried:
        mark = "**" if power == best else ""
        print_runs(f"{mark}1e{power}{mark}", [bench.run(start, 10.0**power, seed)])
    return best


def compare(bench: Bench, seeds: Sequence[int]) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for start in STARTS:
        plain = found[f"{start}, no penalty"] = [bench.run(start, 0.0, seed) for seed in seeds]
        found[f"{start}, penalty"] = [bench.run(start, None, seed) for seed in seeds]
        power = coefficient_of(bench, start, seeds[0], plain[0])
        found[f"{start}, mean square, 1e{power}"] = [bench.run(start, 10.0**power, seed) for seed in seeds]
    original = spread([run["before"]["held_out_loss"] for run in found["as trained, no penalty"]], ".3f")
    print(f"\n{bench.demo} demo, {bench.steps} steps, {len(seeds)} seeds, held-out loss of the original {original}\n")
    print_header("method", *COLUMNS)
    for name, runs in found.items():
        print_runs(name, runs)


def compare_in_amp(demos: Sequence[str], steps: int, scratch: Path) -> None:
    print_header("checkpoint", "steps", "skipped", "first loss scale", "last", "held-out loss")
    for demo in demos:
        source = DEMOS[demo]
        converted, for_training = scratch / f"{demo}-converted", scratch / f"{demo}-for-training"
        convert(source, converted)
        convert(source, for_training, target="train")
        for name, folder, precision in (
            ("as trained", source, "fp16"),
            ("converted", converted, "fp16"),
            ("converted with --target train", for_training, "fp16"),
            ("converted, in fp32", converted, "fp32"),
        ):
            print_row(f"{demo}, {name}", *amp_cells(demo, folder, scratch / "run", steps, precision))


def amp_cells(demo: str, source: Path, run: Path, steps: int, precision: str) -> list[object]:
    """Finetune, without penalty, rescaling or teacher; return steps, skipped, first and last loss scale, losses."""
    changes = {"penalty": {"form": "none"}, "distillation": {"weight": 0.0}, "data": demo_data(DEMOS[demo].name)}
    trainer, rows = trained(recipe_of(source, run / "out", steps, precision, **changes), source, run)
    scales = [row["loss_scale"] for row in rows if row.get("loss_scale") is not None] or [1.0]
    skipped = [row["step"] for row in trainer.position.skipped]
    last = f" (the last at step {skipped[-1]})" if skipped else ""
    losses = " to ".join(f"{each['held_out_loss']:.3f}" for each in trainer.position.evaluations)
    return [trainer.position.step, f"{len(skipped)}{last}", f"{scales[0]:g}", f"{scales[-1]:g}", losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder of the runs, else one that is removed")
    parser.add_argument("--amp", type=int, metavar="STEPS", help="finetune under fp16 AMP instead, for so many steps")
    models = {"choices": DEMOS, "default": ["T5", "Pegasus"], "help": "Gemma 3 for --amp alone"}
    parser.add_argument("--models", nargs="+", **models)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        if options.amp:
            return compare_in_amp(options.models, options.amp, Path(scratch))
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for demo in options.models:
            compare(Bench(demo, work, options.steps), range(options.seeds))


if __name__ == "__main__":
    main()
