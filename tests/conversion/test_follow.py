"""``MadeSafe.follow``: an optimizer of a rescaled model takes the steps that it would take without the rescaling."""

import shutil
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny
from support.steps import batch, same, trained, weights

from bf16_to_fp16 import UserError, make_fp16_safe
from bf16_to_fp16.conversion.made_safe import MadeSafe
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.rescaling.plan import Plan

DEMO = Path(__file__).parents[2] / "bf16_to_fp16" / "demo_data" / "t5-gated-bytes"
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    # With a floor on the size of a tensor that some of them are under, as small weights are under the usual 1e-3.
    "adafactor": lambda p: transformers.Adafactor(p, lr=1e-4, eps=(1e-30, 50.0), relative_step=False),
}


@pytest.fixture(scope="module")
def start() -> tuple[Any, Any, MadeSafe]:
    model = tiny.small("gated", dropout_rate=0.0, factor=300.0).train()
    rescaled = deepcopy(model)
    return model, rescaled, make_fp16_safe(rescaled)


@pytest.fixture
def made(start: tuple[Any, Any, MadeSafe]) -> tuple[Any, MadeSafe]:
    return deepcopy(start)[1:]


@pytest.mark.parametrize(
    ("name", "clip", "checkpointing"),
    [*((name, 0.0, False) for name in OPTIMIZERS), ("sgd", 1.0, False), ("adamw", 0.0, True)],
)
def test_an_optimizer_that_follows_takes_the_steps_of_the_original(
    name: str, clip: float, checkpointing: bool, start: tuple[Any, Any, MadeSafe]
) -> None:
    paths = {}
    for way in ("original", "safe", "follows"):
        original, rescaled, safe = deepcopy(start)
        model = original if way == "original" else rescaled
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = OPTIMIZERS[name](model.parameters())
        if way == "follows":
            assert safe.follow(optimizer, model, max_grad_norm=clip or None) is optimizer
        losses = trained(model, optimizer, clip if way != "follows" else 0.0)
        paths[way] = losses, weights(model if way == "original" else safe.undo(model))
    assert paths["follows"][0] == paths["original"][0] and same(paths["follows"][1], paths["original"][1])
    assert paths["safe"][0] != paths["original"][0] and not same(paths["safe"][1], paths["original"][1])


def test_an_optimizer_that_follows_steps_gains_that_are_stored_less_1() -> None:
    paths = {}
    for way in ("original", "follows"):
        model = tiny.small("gemma3").train()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        safe = None if way == "original" else make_fp16_safe(model)
        if safe is not None:
            assert safe.plan.residual_exponent <= -4
            safe.follow(optimizer, model)
        losses = trained(model, optimizer, labels=batch()["input_ids"])
        paths[way] = losses, weights(model if safe is None else safe.undo(model))
    (before, original), (after, followed) = paths["original"], paths["follows"]
    assert after == pytest.approx(before, rel=1e-5) and before[-1] < before[0] / 2
    for name, weight in original.items():
        assert torch.allclose(followed[name], weight, rtol=1e-5, atol=2.0**-15), name


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_under_a_loss_scale_is_of_the_gradients_themselves(
    fused: bool, start: tuple[Any, Any, MadeSafe]
) -> None:
    """torch's scaler leaves the gradients of fused optimizers scaled."""
    ends = []
    for follows in (False, True):
        original, rescaled, safe = deepcopy(start)
        model = rescaled if follows else original
        others = [p for n, p in model.named_parameters() if "embed" not in n]
        groups: list[dict[str, Any]] = [{"params": others[::2]}, {"params": others[1::2], "lr": 0.1}]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.05, fused=fused)
        if follows:
            safe.follow(optimizer, model, max_grad_norm=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(**batch()).loss).backward()
            if not follows:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
            scaler.step(optimizer)
            scaler.update()
        ends.append(weights(safe.undo(model) if follows else model))
    before = weights(start[0])
    for name, weight in ends[0].items():
        assert torch.allclose(ends[1][name], weight, rtol=1e-5, atol=1e-6 * float(before[name].abs().max())), name
    assert not same(ends[0], before)


def test_a_norm_to_clip_to_is_positive(made: tuple[Any, MadeSafe]) -> None:
    model, safe = made
    for norm in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="max_grad_norm is"):
            safe.follow(torch.optim.SGD(model.parameters(), lr=1.0), model, max_grad_norm=norm)


def test_clipping_works_where_nothing_was_moved(made: tuple[Any, MadeSafe]) -> None:
    model, safe = made[0], replace(made[1], plan=Plan(family="t5"))
    assert not safe.changed
    optimizer = safe.follow(torch.optim.SGD([model.shared.weight], lr=1.0), model, max_grad_norm=0.5)
    model.shared.weight.grad = torch.ones_like(model.shared.weight)
    before = model.shared.weight.detach().clone()
    optimizer.step()
    assert (model.shared.weight - before).norm().item() == pytest.approx(0.5, rel=1e-3)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise MemoryError


def test_a_step_that_fails_half_way_is_told_by_the_next_and_by_undo(made: tuple[Any, MadeSafe]) -> None:
    model, safe = made
    optimizer = safe.follow(Failing(model.parameters(), lr=1.0), model)
    model(**batch()).loss.backward()
    with pytest.raises(MemoryError):
        optimizer.step()
    for again in (optimizer.step, lambda: safe.undo(model)):
        with pytest.raises(UserError, match="failed half-way"):
            again()


def test_parameters_that_were_not_rescaled_are_stepped_as_they_are(made: tuple[Any, MadeSafe]) -> None:
    model, safe = made
    for own in ([], [*model.parameters()]):
        extra = torch.nn.Parameter(torch.ones(3))
        optimizer = safe.follow(torch.optim.SGD([*own, extra], lr=1.0), model)
        extra.grad = torch.ones(3)
        kept = weights(model)
        optimizer.step()
        assert torch.equal(extra, torch.zeros(3)) and same(kept, weights(model))


def test_a_parameter_in_shards_cannot_be_followed(made: tuple[Any, MadeSafe]) -> None:
    model, safe = made
    optimizer = safe.follow(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model.shared.weight.data = model.shared.weight.data[:5].clone()
    model.shared.weight.grad = torch.zeros_like(model.shared.weight)
    with pytest.raises(UserError, match="parameter is sharded"):
        optimizer.step()


def test_an_optimizer_whose_weights_deepspeed_copied_cannot_follow(made: tuple[Any, MadeSafe]) -> None:
    model, safe = made
    optimizer = safe.follow(torch.optim.SGD(model.parameters(), lr=1.0), model)
    flat = torch.nn.Parameter(torch.zeros(3))
    flat.grad = torch.ones(3)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(UserError, match="copies instead of the model's weights"):
        optimizer.step()
    assert torch.equal(flat, torch.zeros(3))


def test_a_step_with_a_closure_cannot_be_followed(made: tuple[Any, MadeSafe]) -> None:
    """Its gradients come after the hook that scales them, so that weights alone would be moved."""
    model, safe = made
    before = weights(model)
    optimizer = safe.follow(torch.optim.SGD(model.parameters(), lr=1.0), model)

    def closure() -> float:
        loss = model(**batch()).loss
        loss.backward()
        return float(loss)

    for step in (partial(optimizer.step, closure), partial(optimizer.step, closure=closure)):
        with pytest.raises(UserError, match="closure"):
            step()
        assert same(before, weights(model))


@pytest.mark.parametrize("make", [False, True], ids=["as trained", "made safe"])
def test_under_fp16_autocast_and_a_loss_scale_only_the_safe_model_trains(make: bool) -> None:
    """Real fp16 products, on the CPU: as it is the demo's every step is skipped, made safe none is."""
    model = load(DEMO, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if make:
        make_fp16_safe(model).follow(optimizer, model)
    scaler, before, losses = torch.amp.GradScaler("cpu", init_scale=1024.0), weights(model), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(**batch()).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    if make:
        assert scaler.get_scale() == 1024.0 and losses[0] > losses[1] > losses[2]
    else:
        assert scaler.get_scale() == 1024.0 / 8 and same(before, weights(model))


def test_a_trainers_checkpoints_are_safe_ones_from_which_a_run_resumes(tmp_path: Path) -> None:
    rows = [{"input_ids": ids, "labels": ids.flip(0)} for ids in batch()["input_ids"]]

    def run(steps: int, resume: bool = False) -> tuple[Any, Any]:
        model = tiny.small("gated", dropout_rate=0.0, num_layers=1)
        model.config.tie_word_embeddings = False
        safe = make_fp16_safe(model)
        optimizer = safe.follow(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        options: dict[str, Any] = {"max_steps": steps, "save_steps": 2, "save_total_limit": None, "max_grad_norm": 0.0}
        options |= {"per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
        options |= {"lr_scheduler_type": "constant", "logging_strategy": "no"}
        arguments = transformers.TrainingArguments(str(tmp_path / "runs"), **options)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume or None)
        return safe, safe.undo(model)

    _, whole = run(4)
    shutil.rmtree(tmp_path / "runs")
    run(2)
    saved = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "runs" / "checkpoint-2")
    assert saved.config.layer_norm_epsilon < 1e-6
    safe, resumed = run(4, resume=True)
    assert same(weights(whole), weights(resumed))
    last = load(tmp_path / "runs" / "checkpoint-4", torch.float32)
    assert same(weights(safe.undo(last)), weights(whole))
