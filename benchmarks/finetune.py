"""Will my loss be fp32's? One task, one source, the same batches, finetuned in each way that people have in fp16.

    python benchmarks/finetune.py [--steps 200] [--seeds 2] [--picture loss.svg]

The source is the T5 demo as it was trained. The task is to give the first sentence of a paragraph from the others, on
the shipped text. AdamW, after a linear rise. fp16 AMP is autocast with torch's loss scale, on a CPU; `penalty` begins
in bf16 autocast and goes on in fp16 while every site is below 65504. Losses are of all held-out rows, in fp32. Each run
has a process and a thread of its own. Times are the processor's, whose fp16 is slower than fp32. It needs the package
`rouge-score`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from convert import apart, peak_megabytes
from models import DEMO, DEMOS
from results import print_header, print_row

from bf16_to_fp16 import ActivationPenalty, convert, make_fp16_safe
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.objectives import split_sentences
from bf16_to_fp16.finetuning.recipe import Data
from bf16_to_fp16.measuring.stock import load, load_config
from bf16_to_fp16.measuring.texts import texts
from bf16_to_fp16.quiet import quiet

SOURCE = DEMOS["T5"]
WARMUP, EVERY, SHOWN = 20, 40, 16  # steps, steps between evaluations, rows for which text is generated
RATES = {False: 1e-3, True: 3e-3}  # whether adapters alone are trained: AdamW's rate


@dataclass(frozen=True)
class Way:
    """A way to finetune: the precision of its forward passes, from which folder, and by which means."""

    precision: torch.dtype
    converted: bool = False
    safe: bool = False
    penalty: bool = False
    lora: bool = False


HALF = torch.float16
WAYS = {
    "fp32": Way(torch.float32),
    "bf16 AMP": Way(torch.bfloat16),
    "fp16 AMP": Way(HALF),
    "fp16 AMP, `make_fp16_safe`": Way(HALF, safe=True),
    "fp16 AMP, converted": Way(HALF, converted=True, safe=True),
    "fp16 AMP, penalty alone": Way(HALF, penalty=True),
    "LoRA, fp32": Way(torch.float32, lora=True),
    "LoRA, fp16 AMP": Way(HALF, lora=True),
    "LoRA, fp16 AMP, `make_fp16_safe`": Way(HALF, safe=True, lora=True),
    "LoRA, fp16 AMP, converted": Way(HALF, converted=True, lora=True),
}


@dataclass
class Run:
    """What one run gave: held-out losses by step, steps that were skipped, milliseconds of each step, peak MB."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0
    milliseconds: list[float] = field(default_factory=list)
    megabytes: float = 0.0
    rouge: float = 0.0


def write_pairs(text: Path, out: Path) -> None:
    split = (split_sentences(line) for line, _ in texts(str(text)))
    pairs = ((first.strip(), "".join(rest).strip()) for first, *rest in split if rest and 30 <= len(first) <= 100)
    out.write_text("".join(json.dumps({"input": rest, "target": first}) + "\n" for first, rest in pairs))


@torch.no_grad()
def loss_of(model: Any, batches: Sequence[TrainingBatch], penalty: ActivationPenalty | None) -> float:
    model.eval()
    if penalty is not None:
        penalty.watches = False
    sums = [(float(model(**b.inputs()).loss), int((b.labels >= 0).sum())) for b in batches if b.labels is not None]
    model.train()
    if penalty is not None:
        penalty.watches = True
    return sum(loss * tokens for loss, tokens in sums) / sum(tokens for _, tokens in sums)


def rouge(model: Any, corpus: Corpus) -> float:
    """Return the mean ROUGE-L (Lin 2004) of greedy text, in percent."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer, scores = RougeScorer(["rougeL"]), []
    for batch in corpus.held_out(SHOWN):
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        made = model.eval().generate(**inputs, max_new_tokens=corpus.target_length, do_sample=False)
        assert batch.labels is not None
        for pair in zip(batch.labels.clamp(min=0), made, strict=True):
            wanted, written = (corpus.tokenizer.decode(ids, skip_special_tokens=True) for ids in pair)
            scores.append(scorer.score(wanted, written)["rougeL"].fmeasure)
    return 100 * statistics.fmean(scores)


def train(way: Way, folder: Path, data: Data, seed: int, steps: int) -> Run:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    corpus, run = Corpus(data, SOURCE, load_config(SOURCE), seed=seed), Run()
    held_out, stream = corpus.held_out(), corpus.training_batches()
    model = load(folder, torch.float32, attention="eager" if way.penalty else "sdpa")
    safe = make_fp16_safe(model) if way.safe else None
    if way.lora:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=8, target_modules=["q", "v"]))
    rate = RATES[way.lora]
    optimizer: Any = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate)
    if safe is not None and not way.lora:
        optimizer = safe.follow(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", enabled=way.precision is HALF)
    penalty = ActivationPenalty(model, headroom_bits=1.0).attach() if way.penalty else None
    precision = torch.bfloat16 if way.penalty else way.precision
    model.train()
    for step in range(steps):
        if step % EVERY == 0:
            run.losses.append((step, loss_of(model, held_out, penalty)))
        batch, begin = next(stream), time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARMUP)
        with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
            loss = model(**batch.inputs()).loss
            loss = loss if penalty is None else loss + penalty()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        run.skipped += scaler.get_scale() < scale or scale == 0.0
        if penalty is not None:
            observed = penalty.observations().values()
            inside = max((each.excess_bits for each in observed), default=math.inf) < 1.0
            precision = HALF if inside else torch.bfloat16
        run.milliseconds.append(1e3 * (time.process_time() - begin))
    run.megabytes = peak_megabytes()
    run.losses.append((steps, loss_of(model, held_out, penalty)))
    if penalty is not None:
        penalty.detach()
    run.rouge = rouge(model, corpus)
    return run


def draw(runs: dict[str, list[Run]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "finetune", "font.size": 10}
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, marker in zip([name for name in runs if "LoRA" not in name], "os^x+d", strict=True):
        steps = [step for step, _ in runs[name][0].losses]
        means = [statistics.fmean(run.losses[i][1] for run in runs[name]) for i in range(len(steps))]
        axis.plot(steps, means, label=name.replace("`", ""), marker=marker, markersize=9, fillstyle="none", linewidth=1)
    title = f"The T5 demo on one task, mean of {len(runs['fp32'])} seeds"
    axis.set(xlabel="step", ylabel="held-out loss, nats a token", title=title)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(picture, metadata={"Date": None}, facecolor="white")


@quiet()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="draw loss against step into this SVG")
    asked = parser.parse_args()
    runs: dict[str, list[Run]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        write_pairs(DEMO / "python-topics.txt.gz", rows := work / "train.jsonl")
        write_pairs(DEMO / "held_out.txt", held_out := work / "held_out.jsonl")
        paths = {"path": str(rows), "held_out_path": str(held_out)}
        data = Data.model_validate(paths | {"input_length": 96, "target_length": 48, "batch_size": 2})
        folder = convert(SOURCE, work / "converted", target="train").out
        floor = apart(peak_megabytes)
        for seed in range(asked.seeds):
            for name, way in WAYS.items():
                start = folder if way.converted else SOURCE
                runs[name].append(apart(train, way, start, data, seed, asked.steps))
                print(f"{name}, seed {seed}: {runs[name][-1].losses}", file=sys.stderr, flush=True)
    print_header(
        "way", "held-out loss", "less fp32's", "ROUGE-L", "skipped steps", "time of a step / fp32's", "peak MB"
    )
    for name, each in runs.items():
        base = runs["LoRA, fp32" if WAYS[name].lora else "fp32"]
        losses = [run.losses[-1][1] for run in each]
        away = [loss - run.losses[-1][1] for loss, run in zip(losses, base, strict=True)]
        times = [statistics.median(run.milliseconds) for run in each], [statistics.median(r.milliseconds) for r in base]
        print_row(
            name,
            ", ".join(f"{loss:.3f}" for loss in losses),
            ", ".join(f"{x:+.4f}" for x in away),
            ", ".join(f"{run.rouge:.1f}" for run in each),
            ", ".join(str(run.skipped) for run in each),
            f"{min(times[0]) / min(times[1]):.1f}",
            f"{max(run.megabytes for run in each) - floor:.0f}",
        )
    if asked.picture:
        draw(runs, asked.picture)


if __name__ == "__main__":
    main()
