"""Will my loss be fp32's? One task, one source, the same batches, finetuned in each way that people have in fp16.

    python benchmarks/finetune.py [--steps 200] [--seeds 2]

The source is the T5 demo as it was trained. The task is to give the first sentence of a paragraph from the others, on
the shipped text. AdamW, after a linear rise. fp16 AMP is autocast with torch's loss scale, on a CPU; `penalty` begins
in bf16 autocast and goes on in fp16 while every site is below 65504. Losses are of all held-out rows, in fp32. Each run
has a process and a thread of its own. Times are the processor's, whose fp16 is slower than fp32.
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
WARMUP = 20  # steps
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
    """What one run gave: the held-out loss, steps that were skipped, milliseconds of each step, peak MB."""

    loss: float = math.inf
    skipped: int = 0
    milliseconds: list[float] = field(default_factory=list)
    megabytes: float = 0.0


def write_pairs(text: Path, out: Path) -> None:
    split = (split_sentences(line) for line, _ in texts(str(text)))
    pairs = ((first.strip(), "".join(rest).strip()) for first, *rest in split if rest and 30 <= len(first) <= 100)
    out.write_text("".join(json.dumps({"input": rest, "target": first}) + "\n" for first, rest in pairs))


@torch.no_grad()
def loss_of(model: Any, batches: Sequence[TrainingBatch]) -> float:
    model.eval()
    sums = [(float(model(**b.inputs()).loss), int((b.labels >= 0).sum())) for b in batches if b.labels is not None]
    return sum(loss * tokens for loss, tokens in sums) / sum(tokens for _, tokens in sums)


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
    if penalty is not None:
        penalty.detach()
    run.loss = loss_of(model, held_out)
    return run


@quiet()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
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
                print(f"{name}, seed {seed}: {runs[name][-1].loss}", file=sys.stderr, flush=True)
    print_header("way", "held-out loss", "less fp32's", "skipped steps", "time of a step / fp32's", "peak MB")
    for name, each in runs.items():
        base = runs["LoRA, fp32" if WAYS[name].lora else "fp32"]
        losses = [run.loss for run in each]
        away = [loss - run.loss for loss, run in zip(losses, base, strict=True)]
        times = [statistics.median(run.milliseconds) for run in each], [statistics.median(r.milliseconds) for r in base]
        print_row(
            name,
            ", ".join(f"{loss:.3f}" for loss in losses),
            ", ".join(f"{x:+.4f}" for x in away),
            ", ".join(str(run.skipped) for run in each),
            f"{min(times[0]) / min(times[1]):.1f}",
            f"{max(run.megabytes for run in each) - floor:.0f}",
        )


if __name__ == "__main__":
    main()
