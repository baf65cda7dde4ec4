"""The benchmarks' own logic: what decides which figure is printed, and what is done to data and models."""

import copy
import math
import sys
from typing import Any

import pytest
import torch

from bf16_to_fp16.run.stock import load, load_config

sys.path.insert(0, "benchmarks")

import finetune
import peers
import penalty
from models import DEMO, demo_corpus

T5 = DEMO / "t5-gated-bytes"


@pytest.mark.parametrize("first", [-6, -3, 0, 2])
def test_a_grid_goes_on_until_its_best_has_a_worse_one_on_either_side(first: int) -> None:
    best, tried = finetune.interior(first, lambda power: (True, -abs(power + 1)))
    assert best == -1 and tried == list(range(tried[0], tried[-1] + 1)) and tried[0] < -1 < tried[-1]


def run_of(bits: list[float], loss: float) -> dict[str, Any]:
    return {
        "headroom": [(step, value) for step, value in enumerate(bits, 1)],
        "before": {"held_out_loss": 3.0},
        "after": {"held_out_loss": loss, "held_out_divergence": 0.1},
    }


def test_a_coefficient_that_costs_the_loss_is_worth_less_than_one_that_does_not_get_there() -> None:
    plain = run_of([0.0] * 30, 2.0)
    fast, slow = run_of([1.0] * 2 + [3.5] * 28, 2.05), run_of([1.0] * 9 + [3.5] * 21, 2.0)
    short, costly, broken = run_of([2.0] * 30, 2.0), run_of([3.5] * 30, 2.2), run_of([3.5] * 30, math.nan)
    assert finetune.reached(fast, 3.0) == 2 and finetune.reached(short, 3.0) is None
    worth = [finetune.worth(found, plain) for found in (fast, slow, short, costly)]
    assert worth == sorted(worth, reverse=True) and len(set(worth)) == 4
    assert finetune.worth(broken, plain) == finetune.worth(costly, plain)


def test_the_mean_square_is_its_formula() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4)), torch.randn(6, 3)
    with penalty.MeanSquare(model, targets={"0": 0.1, "1": 0.2}, weight=3.0) as mean_square:
        model(x)
        total = mean_square()
    wanted = 3.0 * (model[0](x).square().mean() + model(x).square().mean()) / 2
    parameters = list(model.parameters())
    for mine, other in zip(*(torch.autograd.grad(t, parameters) for t in (total, wanted)), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)


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
    clamped = load(T5, torch.float16, half=True)
    free = copy.deepcopy(peers.without_clamps(copy.deepcopy(clamped)))
    infinite = {}
    for name, model in (("clamped", clamped), ("free", free)):
        found: list[bool] = []
        for block in model.encoder.block:
            block.register_forward_hook(lambda m, i, out, found=found: found.append(bool(out[0].isinf().any())))
        with torch.no_grad():
            model(**batch.inputs())
        infinite[name] = any(found)
    assert infinite == {"clamped": False, "free": True}
