"""How much finetuning it takes: steps until every activation has 1 and 3 bits of headroom in fp16, and what that costs
in quality, for the activation-magnitude penalty and the mean square, each from the weights as trained in bf16 and
from rescaled ones.

    python benchmarks/finetune.py --work WORK    # the comparison; what WORK holds is not computed again
    python benchmarks/finetune.py --amp 500      # ordinary finetuning under fp16 AMP, before and after convert

The first trains the shipped demo models from plain text on one thread, evaluates on held-out text, prints Markdown
tables. All runs of a start begin with the same weights:
rescaled as ``convert`` does by default, without asking it for headroom, since on these two models a plan that is asked
for 3 bits gives them by itself. Training is in fp32, where headroom is what it is in fp16 and nothing is skipped, and a
CPU is twice as fast. Headroom is log2(65504 / largest |x|) over every site of one step's training batches and probe; a
level counts as reached at the first step from which the next 10 stay there. Quality is the rise of the held-out loss
over the original's, and the KL to the original; since all are trained on the kind of text on which they are judged, "no
penalty" is what to compare with.

The mean square needs a coefficient, for each start its own. Powers of ten are tried, in runs of all
the steps with the first seed, until the best has a worse one on either side: the best gets to 3 bits in the fewest
steps without raising the held-out loss by more than 5% over that without penalty; where none does, it is the one with
the most headroom among those that keep the loss. The other seeds are run with that one.

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
from pathlib import Path
from typing import Any

import torch
from penalty_forms import MeanSquare

from bf16_to_fp16 import ActivationPenalty
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.commands.convert import convert
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.corpus import Corpus
from bf16_to_fp16.finetuning.log import RunLog
from bf16_to_fp16.finetuning.recipe import parse_recipe
from bf16_to_fp16.finetuning.run import make_accelerator, make_teacher, write_start
from bf16_to_fp16.finetuning.trainer import Trainer
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.run.stock import load, load_config

ROOT = Path(__file__).parents[1]
DEMOS = {"T5": "t5-gated-bytes", "Pegasus": "pegasus-bytes"}
IN_AMP = {**DEMOS, "Gemma 3": "gemma3-bytes"}
LEVELS = (1.0, 3.0)
STAYS = 10

STARTS = {"rescaled": True, "bf16": False}
CALLED = {"rescaled": "rescaled", "bf16": "as trained"}
FORMS = {"smooth-max": "penalty", "mean-square": "mean square"}
IDLE = {"weight": 0.0}

FIRST_COEFFICIENT = {"mean-square": {"rescaled": -3, "bf16": -5}}
"""Powers of ten at which the search for a coefficient begins; rescaling makes the values smaller."""

MOST_LOSS = 1.05
"""Times the held-out loss without penalty that a coefficient may cost."""


def data_of(demo: str) -> dict[str, Any]:
    """Return the data of a recipe: the text and the task on which a demo model was trained."""
    data: dict[str, Any] = {
        "path": str(ROOT / "bf16_to_fp16" / "demo_data" / "python-topics.txt.gz"),
        "held_out_path": str(ROOT / "bf16_to_fp16" / "demo_data" / "held_out.txt"),
        "input_length": 130,
        "target_length": 62,
        "batch_size": 8,
    }
    if demo == "T5":
        data |= {"first_sentinel": 383, "noise_density": 0.3, "mean_span_length": 18.0}
    return data


def recipe_of(demo: str, out: Path, steps: int, *, rescale: bool, penalty: dict[str, Any], seed: int) -> Any:
    """Return the recipe of one run."""
    short = {"input_length": 64, "target_length": 32, "batch_size": 4}
    given = {key: value for key, value in penalty.items() if key not in ("compared", "weight")}
    return parse_recipe(
        {
            "source": str(ROOT / "bf16_to_fp16" / "demo_data" / DEMOS[demo]),
            "out": str(out),
            "device": "cpu",
            "rescale": rescale,
            "precision": "fp32",
            "seed": seed,
            "data": data_of(demo) | short,
            "schedule": {"steps": steps},
            # The penalty by itself: no bounds are held.
            "penalty": {"certify": False, **given},
            # What the tables were measured with: the text's own loss is one of their columns.
            "distillation": {"weight": 0.5},
            "evaluation": {"every": steps},
            "checkpointing": {"every": steps},
        }
    )


class Comparing(Trainer):
    """Trains under the mean square, or under the package's penalty, by a fixed weight where one is given."""

    def __init__(self, penalty: dict[str, Any], *given: Any, **options: Any) -> None:
        self.compared, self.weight = penalty.get("compared"), penalty.get("weight")
        super().__init__(*given, **options)
        self.watch.detector.z = 1e9  # what a penalty costs is what is measured

    def _penalty(self, calls: int) -> ActivationPenalty:
        if self.weight is None:
            return super()._penalty(calls)
        form = ActivationPenalty if self.compared is None else MeanSquare
        return form(self.stock, headroom_bits=self.recipe.penalty.trained_bits, weight=self.weight, accumulation=calls)


@dataclass(frozen=True)
class Bench:
    """Runs on one demo, each of which is kept in ``work`` and not computed again."""

    demo: str
    work: Path
    steps: int

    def start(self, rescale: bool) -> Path:
        """Return the folder of the weights with which runs begin, which is made once."""
        place = self.work / f"{self.demo}-{'rescaled' if rescale else 'bf16'}"
        if not (place / "config.json").is_file():
            recipe = recipe_of(self.demo, place, 1, rescale=rescale, penalty={"form": "none"}, seed=0)
            write_start(open_checkpoint(recipe.source), recipe, place, Progress(quiet=True))
        return place

    def run(self, start: str, penalty: dict[str, Any], seed: int) -> dict[str, Any]:
        """Train once and return headroom by step and the first and last evaluation."""
        form = "-".join(str(value) for value in penalty.values())
        kept = self.work / f"{self.demo}-{start}-{form}-{self.steps}-{seed}.json"
        if kept.is_file():
            found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
            return found
        rescale, run = STARTS[start], self.work / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        recipe = recipe_of(self.demo, run / "out", self.steps, rescale=rescale, penalty=penalty, seed=seed)
        place, source = self.start(rescale), open_checkpoint(recipe.source)
        # Not by train, which would rescale until the plan itself has the headroom that is asked for.
        corpus = Corpus(recipe.data, source.folder, load_config(source.folder), seed=recipe.seed)
        accelerator = make_accelerator(recipe)
        teacher = make_teacher(source, recipe, accelerator)
        student = load(place, torch.float32, attention="eager")
        student.set_input_embeddings(student.get_input_embeddings())
        log = RunLog(run / "log.jsonl")
        trainer = Comparing(penalty, recipe, student, teacher, corpus, run, accelerator, log=log)
        trainer.train()
        log.close()
        rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        evaluations = [row["evaluation"] for row in rows if "evaluation" in row]
        found = {
            "headroom": [(row["step"], min(row["headroom"].values())) for row in rows if "headroom" in row],
            "before": evaluations[0],
            "after": evaluations[-1],
        }
        kept.write_text(json.dumps(found), encoding="utf-8")
        return found


def worth(found: dict[str, Any], plain: dict[str, Any]) -> tuple[bool, float]:
    """Return what coefficients are compared by, more being better; ``plain``: the run without penalty."""
    loss, step = found["after"]["held_out_loss"], reached(found, LEVELS[-1])
    if loss is None or not loss <= MOST_LOSS * plain["after"]["held_out_loss"]:
        return False, -math.inf
    return step is not None, float(found["headroom"][-1][1] if step is None else -step)


def interior(first: int, worth_of: Callable[[int], tuple[bool, float]]) -> tuple[int, list[int]]:
    """Return the best power of ten and all that were tried: from ``first`` on, until both neighbours of the best are
    worse."""
    tried = {first: worth_of(first)}
    while True:
        best = max(tried, key=lambda power: tried[power])
        missing = [power for power in (best + 1, best - 1) if power not in tried]
        if not missing:
            return best, sorted(tried)
        tried[missing[0]] = worth_of(missing[0])


def reached(found: dict[str, Any], level: float) -> int | None:
    """Return the first step from which the headroom stays at ``level`` for ten steps; 0 where the first ten do."""
    bits = [headroom for _, headroom in found["headroom"]]
    for i in range(len(bits) - STAYS + 1):
        if min(bits[i : i + STAYS]) >= level:
            return int(found["headroom"][i][0]) - 1
    return None


def spread(values: Sequence[float], form: str) -> str:
    """Return the median of some seeds, and in brackets their range where they differ as they are shown."""
    shown = [format(value, form) for value in sorted(values)]
    middle = format(statistics.median(values), form)
    return middle if shown[0] == shown[-1] else f"{middle} ({shown[0]} to {shown[-1]})"


def line_of(name: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return one line of a table: the median and the range of the seeds' runs."""
    cells = [name]
    for level in LEVELS:
        steps = [step for found in runs if (step := reached(found, level)) is not None]
        never = len(runs) - len(steps)
        cells.append("never" if not steps else spread(steps, ".0f") + (f", {never} never" if never else ""))
    rises = [100 * (r["after"]["held_out_loss"] / r["before"]["held_out_loss"] - 1) for r in runs]
    cells += [
        spread([r["headroom"][-1][1] for r in runs], ".1f"),
        spread(rises, "+.1f"),
        spread([r["after"]["held_out_divergence"] for r in runs], ".3f"),
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = """| {} | steps to 1 bit | steps to 3 bits | bits at the end | held-out loss, % | KL |
|---|---|---|---|---|---|"""


def coefficient_of(bench: Bench, form: str, start: str, seed: int, plain: dict[str, Any]) -> int:
    """Search for the power of ten that suits a form, print what each is worth, and return the best."""

    def run(power: int) -> dict[str, Any]:
        return bench.run(start, {"compared": form, "weight": 10.0**power}, seed)

    best, tried = interior(FIRST_COEFFICIENT[form][start], lambda power: worth(run(power), plain))
    print(f"\n{bench.demo}, {FORMS[form]}, {CALLED[start]}\n\n" + HEADER.format("coefficient"))
    for power in tried:
        mark = "**" if power == best else ""
        print(line_of(f"{mark}1e{power}{mark}", [run(power)]), flush=True)
    return best


def compare(bench: Bench, seeds: Sequence[int], forms: Sequence[str]) -> None:
    """Print the tables of one demo."""
    runs = {(start, "no penalty"): [bench.run(start, IDLE, seed) for seed in seeds] for start in STARTS}
    for form in forms:
        for start in STARTS:
            compared = {} if form == "smooth-max" else {"compared": form}
            penalty: dict[str, Any] = {**compared, "headroom_bits": max(LEVELS) + 0.25}
            name = FORMS[form]
            if form in FIRST_COEFFICIENT:
                power = coefficient_of(bench, form, start, seeds[0], runs[start, "no penalty"][0])
                penalty, name = {"compared": form, "weight": 10.0**power}, f"{name}, 1e{power}"
            runs[start, name] = [bench.run(start, penalty, seed) for seed in seeds]
    original = spread([r["before"]["held_out_loss"] for r in runs["bf16", "no penalty"]], ".3f")
    print(f"\n{bench.demo} demo, {bench.steps} steps, {len(seeds)} seeds, held-out loss of the original {original}\n")
    print(HEADER.format("method"))
    for (start, name), found in sorted(runs.items(), key=lambda item: list(STARTS).index(item[0][0])):
        print(line_of(f"{CALLED[start]}, {name}", found), flush=True)


def amp_recipe(demo: str, source: Path, out: Path, steps: int, precision: str = "fp16") -> Any:
    """Return the recipe of an ordinary finetune of ``source``: no penalty, no rescaling, no teacher."""
    return parse_recipe(
        {
            "source": str(source),
            "out": str(out),
            "device": "cpu",
            "rescale": False,
            "precision": precision,
            "data": data_of(demo),
            "schedule": {"steps": steps},
            "penalty": {"form": "none"},
            "distillation": {"weight": 0.0},
            "evaluation": {"every": steps},
            "checkpointing": {"every": steps},
        }
    )


def train_in_amp(demo: str, source: Path, work: Path, steps: int, precision: str = "fp16") -> str:
    """Finetune and return one line of a table: steps, skipped, first and last loss scale, held-out loss."""
    shutil.rmtree(work, ignore_errors=True)
    run = work / "run"
    run.mkdir(parents=True)
    recipe = amp_recipe(demo, source, work / "out", steps, precision)
    # Not by train, which refuses a start that overflows.
    corpus = Corpus(recipe.data, source, load_config(source))
    student = load(source, torch.float32, attention="eager")
    log = RunLog(run / "log.jsonl")
    trainer = Trainer(recipe, student, None, corpus, run, make_accelerator(recipe), log=log)
    try:
        trainer.train()
    except UserError as error:
        print(f"{source.name}: {error}", file=sys.stderr)
    log.close()
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    scales = [row["loss_scale"] for row in rows if row.get("loss_scale") is not None] or [1.0]
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
            source = ROOT / "bf16_to_fp16" / "demo_data" / IN_AMP[demo]
            converted, run = Path(scratch) / f"{demo}-converted", Path(scratch) / "run"
            for_training = Path(scratch) / f"{demo}-for-training"
            convert(source, converted)
            convert(source, for_training, target="train")
            for name, folder, precision in (
                ("as trained", source, "fp16"),
                ("converted", converted, "fp16"),
                ("converted with --target train", for_training, "fp16"),
                ("converted, in fp32", converted, "fp32"),
            ):
                print(f"| {demo}, {name} | {train_in_amp(demo, folder, run, steps, precision)} |", flush=True)


def main() -> None:
    """Run every method on every demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="folder of the runs, else one that is removed")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="of the penalty")
    parser.add_argument("--amp", type=int, metavar="STEPS", help="finetune under fp16 AMP instead, for so many steps")
    models: dict[str, Any] = {"choices": list(IN_AMP), "default": list(DEMOS), "help": "Gemma 3 for --amp alone"}
    parser.add_argument("--models", nargs="+", **models)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.amp:
        compare_in_amp(options.models, options.amp)
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        seeds = range(options.seeds)
        for demo in options.models:
            compare(Bench(demo, work, options.steps), seeds, options.forms)


if __name__ == "__main__":
    main()
