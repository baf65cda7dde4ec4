"""The benchmarks' own logic: what decides which figure is printed, and what is done to data and models."""

import sys

import torch

from bf16_to_fp16.measuring.stock import load, load_config

sys.path.insert(0, "benchmarks")

import peers
from models import DEMO, demo_corpus

T5 = DEMO / "t5-gated-bytes"


def test_feed_forwards_out_of_autocast_compute_in_fp32_and_a_copy_of_a_wrapped_model_is_wrapped_too() -> None:
    batch = next(demo_corpus(T5, load_config(T5), 2, input_length=64, target_length=32).training_batches())
    seen: dict[str, set[torch.dtype]] = {}
    model = peers.under_autocast(peers.without_feed_forwards(load(T5, torch.float32)))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            kind = "wo" if ".wo" in name or ".wi" in name else "other"
            module.register_forward_hook(lambda m, i, out, kind=kind: seen.setdefault(kind, set()).add(out.dtype))
    with torch.no_grad():
        model(**batch.inputs())
    assert seen == {"wo": {torch.float32}, "other": {torch.float16}}


def test_every_line_of_the_held_out_text_is_a_row() -> None:
    lines = (DEMO / "held_out.txt").read_text(encoding="utf-8").splitlines()
    rows = [row for batch in demo_corpus(T5, load_config(T5)).held_out(None) for _, row in batch.examples]
    assert sorted(rows) == list(range(len(lines))) and len(rows) > 100
