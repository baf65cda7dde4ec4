"""Hours, not minutes: 20,000 steps of ordinary finetuning under fp16 AMP from converted weights, on data some of
which is bad, by a process that is killed ten times.

    python benchmarks/long_run.py WORK                   # both arms, then the table and benchmarks/long_run.svg
    python benchmarks/long_run.py WORK --arms fp32       # one arm, or more of it; what there is is drawn
    python benchmarks/long_run.py WORK --draw            # no training

The T5 demo is converted and finetuned on as anybody would (no penalty, no teacher), two short rows a step, once in fp16
(autocast and loss scale) and once in fp32 from the same weights on the same data. Every 1,500 steps of data a batch or
some in a row are spoiled: labels of other places, random ids, or one id repeated. An arm is a process of its own; the
fp16 one is sent SIGKILL at ten scattered steps and begun again, and steps that were logged before a kill and computed
again after it are compared. Headroom is the least of log2(limit / largest |x|) over every site on held-out rows under
fp16 autocast, whatever the arm. All that is under WORK goes on where it stood, this script included.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from svg import follow_schemes

from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.commands.convert import convert
from bf16_to_fp16.finetuning import stability, trainer
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch, TrainingBatches
from bf16_to_fp16.finetuning.log import RunLog
from bf16_to_fp16.finetuning.mixed_precision import MixedPrecision
from bf16_to_fp16.finetuning.recipe import parse_recipe
from bf16_to_fp16.finetuning.run import make_accelerator, write_start, written_trained
from bf16_to_fp16.finetuning.states import RunFolder, read_tensors
from bf16_to_fp16.finetuning.trainer import Trainer
from bf16_to_fp16.observe.observer import SiteObserver
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.run.stock import load, load_config

HERE = Path(__file__).parent
ROOT = HERE.parent
DEMO = ROOT / "bf16_to_fp16" / "demo_data"
ARMS = ("fp16", "fp32")
KILLS = (311, 983, 2442, 3907, 6176, 8408, 10655, 13177, 16041, 18877)
"""Steps at which the fp16 arm is killed, as soon as its log shows them."""

KINDS = ("labels of other places", "random ids", "one id repeated")
LENGTHS = (1, 4, 16)
EVERY, FIRST = 1500, 1000


def spoiled_as(data_step: int) -> str | None:
    """Return how the batches of a step of the data are spoiled: the kinds take turns, each in runs of 1, 4, 16."""
    number, place = divmod(data_step - FIRST, EVERY)
    if number < 0 or place >= LENGTHS[number // len(KINDS) % len(LENGTHS)]:
        return None
    return KINDS[number % len(KINDS)]


def spoiled_runs(data_steps: int) -> list[int]:
    """Return the first step of every spoiled run in so many steps of data, counted from 0."""
    return [step for step in range(FIRST, data_steps) if spoiled_as(step) is not None and spoiled_as(step - 1) is None]


def spoiled(batch: TrainingBatch, kind: str, seed: int, vocabulary: int) -> TrainingBatch:
    """Return a batch of the same shape with wrong labels or meaningless rows, the same for the same seed."""
    chance = torch.Generator().manual_seed(seed)
    assert batch.labels is not None
    ids, labels = batch.input_ids.clone(), batch.labels.clone()
    if kind == KINDS[0]:
        for row in labels:
            kept = row >= 0
            row[kept] = row[kept][torch.randperm(int(kept.sum()), generator=chance)]
    elif kind == KINDS[1]:
        ids = torch.randint(3, vocabulary, ids.shape, generator=chance)
        labels = torch.where(labels >= 0, torch.randint(3, vocabulary, labels.shape, generator=chance), labels)
    else:
        ids.fill_(int(torch.randint(3, vocabulary, (), generator=chance)))
    return replace(batch, input_ids=ids, labels=labels)


class SpoiledBatches(TrainingBatches):
    """Batches of which some are bad: a function of the step of the data, wherever a run begins."""

    def __next__(self) -> TrainingBatch:
        """Return the next batch, spoiled or not."""
        step = self.steps
        batch, kind = super().__next__(), spoiled_as(step)
        return batch if kind is None else spoiled(batch, kind, step, self.corpus.vocabulary)


class SpoiledCorpus(Corpus):
    """A corpus of which some training batches are bad."""

    def training_batches(self, rank: int = 0, world: int = 1) -> TrainingBatches:
        """Return the endless batches from the beginning."""
        return SpoiledBatches(self, rank, world)


class HeadroomLog(RunLog):
    """A log that measures the headroom at every evaluation, under fp16 autocast on the first held-out batches."""

    def __init__(self, path: Path, model: Any, batches: Sequence[TrainingBatch]) -> None:
        """Keep what is to be measured, and on what."""
        super().__init__(path)
        self.model, self.batches = model, batches
        self.fp16 = MixedPrecision("fp16", torch.device("cpu"))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one line, with the headroom in bits where it is an evaluation's."""
        if "evaluation" in values:
            observer = SiteObserver(self.model)
            with torch.no_grad(), self.fp16.whole_step():
                for batch in self.batches:
                    with observer, self.fp16.forward():
                        self.model(**batch.inputs())
            bits = min(site.headroom_bits for site in observer.sites() if site.headroom_bits is not None)
            values = {**values, "headroom_bits": bits}
        super().write(step, values)


def recipe_of(work: Path, arm: str, steps: int) -> Any:
    """Return the recipe of an arm: only the precision is another."""
    return parse_recipe(
        {
            "source": str(work / "converted"),
            "out": str(work / f"{arm}-out"),
            "device": "cpu",
            "precision": arm,
            "data": {
                "path": str(ROOT / "bf16_to_fp16" / "demo_data" / "python-topics.txt.gz"),
                "held_out_path": str(DEMO / "held_out.txt"),
                "first_sentinel": 383,
                "noise_density": 0.3,
                "mean_span_length": 9.0,
                "input_length": 48,
                "target_length": 24,
                "batch_size": 2,
            },
            "schedule": {"steps": steps, "learning_rate": 1e-3},
            "penalty": {"form": "none"},
            "distillation": {"weight": 0.0},
            "evaluation": {"every": 500},
            "checkpointing": {"every": 200, "folder": str(work / arm)},
        }
    )


def train_arm(work: Path, arm: str, steps: int) -> None:
    """Train an arm to its end, from where its folder stands."""
    torch.set_num_threads(1)
    stability.REWINDS = 1000
    # Constant, so that a run goes on to more steps as if it had been asked for them at first.
    trainer.learning_rate = lambda schedule, _: schedule.learning_rate
    recipe, folder = recipe_of(work, arm, steps), work / arm
    if not (folder / "start" / "config.json").is_file():
        write_start(open_checkpoint(recipe.source), recipe, folder / "start", Progress(quiet=True))
    corpus = SpoiledCorpus(recipe.data, Path(recipe.source), load_config(recipe.source), seed=recipe.seed)
    student = load(folder / "start", torch.float32, attention="eager")
    log = HeadroomLog(folder / "log.jsonl", student, corpus.held_out(16))
    Trainer(recipe, student, None, corpus, folder, make_accelerator(recipe), log=log).train(fits=True)


def converted_again(work: Path) -> str:
    """Convert the weights of the fp16 arm's last state and return what that gave."""
    folder = work / "fp16"
    states = RunFolder(folder)
    step = states.steps()[-1]
    with written_trained(folder, read_tensors(states.of(step))) as trained:
        result = convert(trained, work / "fp16-out", data=str(DEMO / "held_out.txt"), force=True)
    bits = {name: round(entry["headroom_bits"], 2) for name, entry in result.report["regimes"].items()}
    return (
        f"the weights of step {step:,} converted: {result.report['verdict']}, {result.report['proof']}, headroom {bits}"
    )


def rows_of(log: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; one that a kill cut short is left out."""
    found = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def last_step(log: Path) -> int:
    """Return the step of the last whole line of a log, −1 without one."""
    if not log.is_file():
        return -1
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - (1 << 16)))
        lines = file.read().decode("utf-8", errors="replace").splitlines(keepends=True)
    whole = [line for line in lines[-2:] if line.endswith("\n")]
    return int(json.loads(whole[-1])["step"]) if whole else -1


def drive(work: Path, arm: str, steps: int) -> None:
    """Run an arm's process to its end, and kill it on the way if it is the fp16 one."""
    folder = work / arm
    folder.mkdir(exist_ok=True)
    log, noted = folder / "log.jsonl", work / f"{arm}-kills.json"
    kills: list[dict[str, Any]] = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else []
    while True:
        left = [k for k in KILLS if arm == "fp16" and k < steps and k not in [kill["due"] for kill in kills]]
        due = min(left, default=None)
        command = [sys.executable, __file__, str(work), "--train", arm, "--steps", str(steps)]
        with subprocess.Popen(command) as process:
            try:
                while process.poll() is None and (due is None or last_step(log) < due):
                    time.sleep(0.5)
                if process.poll() is None and due is not None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
            except BaseException:
                process.kill()
                raise
        if process.returncode == 0:
            return
        if process.returncode != -signal.SIGKILL or due is None:
            raise SystemExit(process.returncode)
        state = (RunFolder(folder).steps() or [0])[-1]
        after = [row for row in rows_of(log) if row["step"] > state and "task_loss" in row]
        kills.append({"due": due, "at": last_step(log), "state": state, "rows": after})
        noted.write_text(json.dumps(kills), encoding="utf-8")


HEADER = (
    "arm",
    "steps",
    "killed; steps computed again, the same",
    "skipped",
    "loss scale: first, range, last",
    "bad runs of data, noticed; gone back",
    "headroom, bits: first, least, last",
    "held-out loss: first, least, last",
)


@dataclass(frozen=True)
class Arm:
    """What an arm has done so far: the lines of its steps and evaluations, its kills and rewinds."""

    name: str
    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    kills: list[dict[str, Any]]
    rewinds: list[dict[str, Any]]

    @classmethod
    def read(cls, work: Path, name: str) -> Arm:
        """Read it from the log and from the parent's notes."""
        noted, rows = work / f"{name}-kills.json", rows_of(work / name / "log.jsonl")
        return cls(
            name,
            [row for row in rows if "task_loss" in row],
            [row for row in rows if "evaluation" in row],
            json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else [],
            [row["rewind"] for row in rows if "rewind" in row],
        )

    def computed_again(self) -> tuple[int, int]:
        """Return how many steps a kill made be computed again, but for those that a rewind then replaced by others, and
        how many of those are the same to the last bit of every figure."""
        now = {row["step"]: row for row in self.rows}
        pairs = [
            (row, now[row["step"]])
            for kill in self.kills
            for row in kill["rows"]
            if row["step"] in now
            and not any(
                r["back_to"] < row["step"] and r["noticed"] > kill["at"] for r in self.rewinds_near(row["step"])
            )
        ]
        return len(pairs), sum(before == after for before, after in pairs)

    def rewinds_near(self, step: int) -> list[dict[str, Any]]:
        """Return the rewinds that were noticed at this step or after it."""
        return [note for note in self.rewinds if note["noticed"] >= step]

    def scales(self) -> list[tuple[int, float]]:
        """Return the steps at which the loss scale is another than before, with the first."""
        found: list[tuple[int, float]] = []
        for row in self.rows:
            scale = row["loss_scale"]
            if scale is not None and (not found or scale != found[-1][1]):
                found.append((row["step"], scale))
        return found

    def spoiled_runs(self) -> tuple[int, int]:
        """Return how many spoiled runs of data came up, and at how many of them the run went back."""
        shift, noticed = 0, set()
        for note in self.rewinds:
            noticed |= {begin for begin in spoiled_runs(note["noticed"] + shift) if begin >= note["back_to"] + shift}
            shift += note["steps_of_data_left_out"]  # counted from the state
        return len(spoiled_runs(self.rows[-1]["step"] + shift)), len(noticed)

    def line(self) -> str:
        """Return its line of the table."""
        again, same = self.computed_again()
        came, noticed = self.spoiled_runs()
        scales = [scale for _, scale in self.scales()]
        losses = [row["evaluation"]["held_out_loss"] for row in self.evaluations]
        bits = [row["headroom_bits"] for row in self.evaluations]
        cells = [
            self.name,
            f"{self.rows[-1]['step']:,}",
            f"{len(self.kills)}; {again:,}, {same:,}",
            str(self.rows[-1]["skipped"]),
            f"{scales[0]:,.0f}, {min(scales):,.0f} to {max(scales):,.0f}, {scales[-1]:,.0f}" if scales else "none",
            f"{came}, {noticed}; {len(self.rewinds)}",
            f"{bits[0]:.2f}, {min(bits):.2f}, {bits[-1]:.2f}",
            f"{losses[0]:.3f}, {min(losses):.3f}, {losses[-1]:.3f}",
        ]
        return "| " + " | ".join(cells) + " |"


def draw(arms: Sequence[Arm], path: Path) -> None:
    """Draw losses, loss scale and headroom against steps."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "bf16_to_fp16", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot as plt

    look: dict[str, dict[str, Any]] = {
        "fp16": {"color": "#1f5fa8", "linewidth": 1.6},
        "fp32": {"color": "#b25c00", "linewidth": 1.6, "linestyle": "--"},
    }
    figure, panels = plt.subplots(3, 1, figsize=(9, 7), sharex=True, layout="constrained", height_ratios=(3, 2, 2))
    losses, scales, headroom = panels
    for arm in arms:
        steps = [row["step"] for row in arm.evaluations]
        held = [row["evaluation"]["held_out_loss"] for row in arm.evaluations]
        losses.plot(steps, held, label=f"held-out, {arm.name}", **look[arm.name])
        headroom.plot(steps, [row["headroom_bits"] for row in arm.evaluations], label=arm.name, **look[arm.name])
    first = arms[0]
    chunks = [first.rows[k : k + 100] for k in range(0, len(first.rows), 100)]
    medians = [statistics.median(row["task_loss"] for row in chunk) for chunk in chunks]
    losses.plot(
        [c[-1]["step"] for c in chunks], medians, color="#5a626d", linewidth=0.8, label=f"training, {first.name}"
    )
    points = [*first.scales(), (first.rows[-1]["step"], first.scales()[-1][1])]
    scales.step(*zip(*points, strict=True), where="post", **look["fp16"])
    scales.set_yscale("log", base=2)
    for axes in panels:
        for kill in first.kills:
            axes.axvline(kill["at"], color="#5a626d", linewidth=0.7, linestyle=":")
        axes.grid(alpha=0.3)
    for note in first.rewinds:
        place = {"transform": losses.get_xaxis_transform(), "clip_on": False}
        losses.plot(note["spike"], 1.02, marker="v", color="#b3261e", markersize=5, **place)
    losses.set_ylabel("loss, nats a byte")
    scales.set_ylabel("loss scale")
    headroom.set_ylabel("headroom in fp16, bits")
    headroom.set_xlabel("step (dotted: killed; red: a spike, gone back from)")
    losses.legend(ncols=3)
    headroom.legend()
    figure.savefig(path, metadata={"Date": None})
    follow_schemes(path)


def main() -> None:
    """Train what is asked for, then print the table and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="folder of the runs; one that exists goes on")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--convert", action="store_true", help="convert what the fp16 arm has learnt as well")
    parser.add_argument("--train", choices=ARMS, help="be the process of one arm")
    parser.add_argument("--plot", type=Path, default=HERE / "long_run.svg")
    given = parser.parse_args()
    work = given.work
    if given.train:
        train_arm(work, given.train, given.steps)
        return
    if not given.draw:
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "converted").exists():
            convert(DEMO / "t5-gated-bytes", work / "converted")
        for arm in given.arms:
            drive(work, arm, given.steps)
    arms = [Arm.read(work, name) for name in ARMS if (work / name / "log.jsonl").is_file()]
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for arm in arms:
        print(arm.line())
    if given.convert:
        print(f"\n{converted_again(work)}")
    if len(arms) == 2:
        apart = paired(arms)
        print(f"\nheld-out loss, fp16 less fp32 at {len(apart)} steps: mean {statistics.mean(apart):+.4f},", end=" ")
        print(f"largest {max(apart, key=abs):+.4f}")
    assert all(math.isfinite(row["task_loss"]) for arm in arms for row in arm.rows if row["gradient_norm"] is not None)
    draw(arms, given.plot)


def paired(arms: Sequence[Arm]) -> list[float]:
    """Return the difference of the two arms' held-out losses at the steps that both have."""
    first, second = ({r["step"]: r["evaluation"]["held_out_loss"] for r in arm.evaluations} for arm in arms)
    return [first[step] - second[step] for step in sorted({*first} & {*second})]


if __name__ == "__main__":
    main()
