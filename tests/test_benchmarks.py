"""The benchmarks' own logic: what decides which figure is printed, and what is done to data and models."""

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bf16_to_fp16.run.stock import load, load_config

sys.path.insert(0, "benchmarks")

import finetune
import long_run
import mutate_bounds
import peers
import penalty_forms
import rates
import rounding

T5 = rounding.DEMO / "t5-gated-bytes"


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


@pytest.mark.parametrize("form", penalty_forms.FORMS)
def test_another_form_of_the_penalty_is_its_formula(form: str) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4)), torch.randn(6, 3)
    values, targets = [model[0](x), model(x)], {"0": 0.1, "1": 0.2}
    with penalty_forms.ComparedPenalty(form, model, targets=targets, weight=3.0) as penalty:
        model(x)
        total = penalty()
    each = {
        "amax": lambda v, target: (v.abs().amax() / target).log2(),
        "hinge": lambda v, target: (v.abs() - target).relu().square().sum(),
        "mean-square": lambda v, target: v.square().mean() / 2,
        "lp": lambda v, target: v.flatten().norm(8) / 2,
    }[form]
    wanted = 3.0 * sum(each(v, target) for v, target in zip(values, targets.values(), strict=True))
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    parameters = list(model.parameters())
    for mine, other in zip(*(torch.autograd.grad(t, parameters) for t in (total, wanted)), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)


def test_spoiled_batches_are_a_function_of_the_data_wherever_a_run_begins(tmp_path: Path) -> None:
    recipe = long_run.recipe_of(tmp_path, "fp16", 10)
    corpus = long_run.SpoiledCorpus(recipe.data, T5, load_config(T5), seed=0)
    bad = [step for step in range(long_run.FIRST + 5 * long_run.EVERY) if long_run.spoiled_as(step) is not None]
    runs = [(step - long_run.FIRST) // long_run.EVERY for step in bad]
    assert [runs.count(k) for k in range(5)] == [1, 1, 1, 4, 4]
    assert [long_run.spoiled_as(bad[k]) for k in (0, 1, 2)] == list(long_run.KINDS)
    stream, again = corpus.training_batches(), corpus.training_batches()
    stream.skip(bad[1] - 1)
    before, here = next(stream), next(stream)
    again.load_state_dict({**stream.state_dict(), "steps": bad[1]})
    there = next(again)
    assert torch.equal(here.input_ids, there.input_ids) and torch.equal(here.labels, there.labels)
    text = corpus.tokenizer("plain text", add_special_tokens=False)["input_ids"]
    assert max(text) < 259 < int(here.input_ids.max()) and before.input_ids.shape[0] == 2


def test_a_rewind_counts_for_the_spoiled_data_that_it_left_out_and_replaces_what_a_kill_had_seen() -> None:
    def row(step: int, loss: float) -> dict[str, Any]:
        return {"step": step, "task_loss": loss}

    # Data step 1000 is the batch of step 1001; 20 steps more are left out, so that 2500 is the batch of step 2481.
    first = {"noticed": 1001, "back_to": 1000, "spike": 1001, "steps_of_data_left_out": 20}
    second = {"noticed": 2481, "back_to": 2400, "spike": 2481, "steps_of_data_left_out": 81}
    by_chance = {"noticed": 2700, "back_to": 2600, "spike": 2700, "steps_of_data_left_out": 100}
    kills = [{"at": 311, "rows": [row(310, 1.0), row(311, 2.0)]}, {"at": 2450, "rows": [row(2450, 3.0)]}]
    rows = [row(310, 1.0), row(311, 2.5), row(2450, 3.5), row(3700, 1.0)]
    arm = long_run.Arm("fp16", rows, [], kills, [first, second, by_chance])
    assert arm.spoiled_runs() == (2, 2) and arm.computed_again() == (2, 1)
    assert long_run.Arm("fp16", rows, [], kills, [first]).spoiled_runs() == (2, 1)
    assert long_run.Arm("fp16", rows, [], kills, []).computed_again() == (3, 1)


def test_feed_forwards_out_of_autocast_compute_in_fp32_and_a_copy_of_a_wrapped_model_is_wrapped_too() -> None:
    batch = next(rates.corpus_of(0, 2).training_batches())
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


def test_every_mutant_of_the_bounds_is_made_of_text_that_is_there() -> None:
    for _, function, old, new in mutate_bounds.MUTANTS:
        with mutate_bounds.rewritten(function, old, new):  # raises LookupError where it is not
            pass
