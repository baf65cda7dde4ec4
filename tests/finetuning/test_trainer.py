"""The loop of a finetune: precision, losses, states, and what it does when something goes wrong."""

import math
import resource
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.learner import (
    Fix,
    Killed,
    Make,
    begun_in_bf16,
    killed_at,
    losses_of,
    recipe_for,
    rows_of,
    scaled,
    steps_of,
    tiny_model,
)

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.distillation import arguments, nearest, task_loss
from bf16_to_fp16.finetuning.mixed_precision import FIRST_LOSS_SCALE
from bf16_to_fp16.finetuning.optimizers import make_optimizer
from bf16_to_fp16.finetuning.penalty import Observation
from bf16_to_fp16.finetuning.processes import Processes
from bf16_to_fp16.finetuning.recipe import Recipe, parse_recipe
from bf16_to_fp16.finetuning.states import RunFolder, RunLog, read_state
from bf16_to_fp16.finetuning.trainer import RunPosition, Trainer, check_progress
from bf16_to_fp16.optim.adamw import AdamW

BAD = ord("Z") + 3  # ByT5's id of a letter that no text here has
IN_BF16 = {"name": "bf16_to_fp16.AdamW", "arguments": {"moments": "bfloat16", "weight_decay": 0.0}}


def test_a_full_disk_keeps_the_last_whole_state_and_a_damaged_one_is_named(make: Make, tmp_path: Path) -> None:
    trainer = make()
    trainer._save()
    trainer.position.step = 4
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (1 << 10, 35 << 10):  # the weights do not fit, nor the state beside them
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(UserError, match=r"step-00000004.*free some space; the same command then goes on") as e:
                trainer._save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "\n" not in str(e.value)
        assert trainer.states.steps() == [0] and not list((tmp_path / "run").glob(".step*"))
    weights = trainer.states.of(0) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model.safetensors: cannot be read; remove .*step-00000000 to resume"):
        make().train()


def test_a_state_that_would_run_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (marker.touch, ())

    torch.save({"evil": Evil()}, tmp_path / "state.pt")
    with pytest.raises(UserError):
        read_state(tmp_path)
    assert not marker.exists()


def test_log_takes_back_what_came_after_a_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    for step in range(5):
        log.write(step, {"loss": math.inf if step == 1 else 0.5})
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 1, "lo')
    log.rewind(2)
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2]
    assert rows_of(tmp_path)[1]["loss"] > 1e300


ONE_STEP = {"steps": 1}


def objective(model: Any, teacher: Any, batches: list[TrainingBatch], share: float) -> torch.Tensor:
    """The mean loss of all positions, by its definition."""
    total, positions = torch.zeros(()), 0
    for batch in batches:
        given = arguments(model, batch, torch.device("cpu"))
        assert batch.labels is not None
        mask = batch.labels != -100
        mine, theirs = model(**given).logits[mask], teacher(**given).logits[mask].detach()
        task = -mine.log_softmax(-1).gather(-1, batch.labels[mask][:, None]).sum()
        p, q = theirs.log_softmax(-1), mine.log_softmax(-1)
        total = total + (1 - share) * task + share * (p.exp() * (p - q)).sum()
        positions += int(mask.sum())
    return total / positions


@pytest.mark.parametrize(("share", "clip_norm"), [(0.25, 1e9), (0.25, 0.01), (1.0, 1e9)])
def test_a_step_follows_both_losses(
    share: float, clip_norm: float, folder: Path, make: Make, fix: Fix, tmp_path: Path
) -> None:
    fix("mixed_precision", CLIP_NORM=clip_norm)
    settings = {"data": {"gradient_accumulation": 2}, "schedule": ONE_STEP, "distillation": {"weight": share}}
    trainer = make(model=tiny_model(seed=3, dropout=0.0), precision="fp32", **settings)
    trainer.train()
    got = {name: p.grad for name, p in trainer.stock.named_parameters()}
    model, teacher = tiny_model(seed=3, dropout=0.0), tiny_model(dropout=0.0)
    batches = Corpus(trainer.recipe.data, folder, model.config).training_batches()
    loss = objective(model, teacher, [next(batches) for _ in range(2)], share)
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    norm = float(torch.stack([g.norm() for g in wanted.values() if g is not None]).norm())
    (row,) = steps_of(tmp_path / "run")
    assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert row["gradient_norm"] == pytest.approx(norm, rel=1e-3) and norm > 0.1
    for name, gradient in wanted.items():
        assert gradient is not None and got[name] is not None
        assert torch.allclose(got[name], gradient * min(1.0, clip_norm / norm), rtol=1e-3, atol=1e-5 * norm), name


def test_held_out_losses_are_measured_without_dropout_and_training_goes_on_with_it(folder: Path, make: Make) -> None:
    trainer = make(model=tiny_model(3, dropout=0.5), precision="fp32", schedule=ONE_STEP, evaluation={"every": 1})
    (first, _) = trainer.train().evaluations
    model, teacher = tiny_model(seed=3, dropout=0.5).eval(), tiny_model().eval()
    held = Corpus(trainer.recipe.data, folder, model.config).held_out(256, 0, 1)
    with torch.no_grad():
        task, kl = (float(objective(model, teacher, held, share)) for share in (0.0, 1.0))
    assert first["held_out_loss"] == pytest.approx(task, rel=1e-4)
    assert first["held_out_divergence"] == pytest.approx(kl, rel=1e-3)
    assert trainer.stock.training and all(module.training for module in trainer.stock.modules())


def test_dropout_is_another_in_every_step(make: Make, tmp_path: Path) -> None:
    first: list[TrainingBatch] = []

    def same(step: int, batch: TrainingBatch) -> TrainingBatch:
        first.append(batch)
        return first[0]

    outcome = make(damage=same, precision="fp32", schedule={"steps": 4, "learning_rate": 1e-30}).train()
    assert first[0].labels is not None
    assert outcome.tokens == 4 * int(first[0].attention_mask.sum() + (first[0].labels != -100).sum())
    assert len(set(losses_of(tmp_path / "run").values())) == 4


@pytest.mark.parametrize("named", [{}, IN_BF16])
def test_the_optimizer_is_the_recipes_and_decays_nothing(folder: Path, tmp_path: Path, named: dict[str, Any]) -> None:
    recipe = recipe_for(folder, tmp_path / "out", optimizer=named, seed=7)
    matrix, gain = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(recipe, [gain, matrix])
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, AdamW) is bool(named) and [p.ndim for p in group["params"]] == [2, 1]
    assert group.get("seed", 7) == 7
    assert (group["betas"], group["eps"], group["lr"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.003, 0.0)


def test_a_class_that_cannot_take_steps_is_refused(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_for(folder, tmp_path / "out", optimizer={"name": "torch.nn.Linear"})
    with pytest.raises(UserError, match="is no torch"):
        make_optimizer(recipe, [torch.nn.Parameter(torch.ones(2))])


def test_offload_and_deepspeeds_are_kept_apart(folder: Path, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value="DEEPSPEED"),
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config)),
        device=torch.device("cpu"),
        process_index=0,
        num_processes=2,
        is_main_process=True,
    )
    processes, model = Processes(accelerator), tiny_model()
    assert processes.offloads
    recipe = recipe_for(folder, tmp_path / "out", optimizer=IN_BF16)
    with pytest.raises(UserError, match="DeepSpeed would put plain Adam in the place of this recipe's optimizer; set"):
        processes.prepare(model, make_optimizer(recipe, list(model.parameters())), recipe, 1)
    config["zero_optimization"] = {"stage": 2}
    assert not processes.offloads


def observed(trainer: Trainer) -> dict[str, Observation]:
    assert trainer.penalty is not None
    return trainer.penalty.observations()


def test_the_penalty_is_the_recipes_and_looks_at_new_random_ids_every_other_step(make: Make) -> None:
    penalty = {"form": "smooth-max", "headroom_bits": 20.0}
    trainer = make(precision="fp32", schedule={"steps": 3}, penalty=penalty, target="train")
    ran: list[torch.Tensor] = []
    trainer.stock.register_forward_pre_hook(
        lambda module, args, kwargs: ran.append(kwargs["input_ids"]) if torch.is_grad_enabled() else None,
        with_kwargs=True,
    )
    trainer.train()
    assert len(ran) == 6  # of each step the data, and a batch of the probe
    assert len(ran[1]) == len(ran[5]) == 16 and ran[1].tolist() != ran[5].tolist()
    assert any(name.endswith("act:cubed") for name in observed(trainer))  # whose limit is of training
    trainer = make("one", precision="fp32", schedule=ONE_STEP, penalty=penalty)
    trainer.train()
    over = [seen for seen in observed(trainer).values() if 0 < seen.excess_bits < 16]
    assert over and all(seen.weight == pytest.approx(0.05 * seen.excess_bits) for seen in over)


def test_the_loss_scale_rises_and_the_oldest_states_go(make: Make, fix: Fix, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fix("mixed_precision", CALM_STEPS=3)
    fix("states", KEPT=2)
    trainer = scaled(make(schedule={"steps": 7}, checkpointing={"every": 2}), 64.0)
    trainer.train()
    assert [row["loss_scale"] for row in steps_of(run)] == [64.0, 64.0, 128.0, 128.0, 128.0, 256.0, 256.0]
    assert RunFolder(run).steps() == [6, 7]
    assert {tensor.dtype for tensor in trainer.weights().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "end", "precisions"),
    [
        # Before the first periodic state, whose precision the start decided: nobody looks at it again.
        ({"optimizer": {"relative": True} | IN_BF16}, 1, ["fp16"] * 4),
        ({"penalty": {"form": "smooth-max"}}, 3, ["bf16"] + ["fp16"] * 3),
        pytest.param(  # compiles
            {"optimizer": {"name": "torchao.optim.AdamW8bit"}}, 3, ["fp16"] * 4, marks=pytest.mark.exhaustive
        ),
    ],
    ids=["optimizer", "precisions", "torchao"],
)
def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(
    make: Make, fix: Fix, tmp_path: Path, settings: dict[str, Any], end: int, precisions: list[str]
) -> None:
    fix("trainer", FITTING_STEPS=1)
    settings = {"schedule": {"steps": 4}, "checkpointing": {"every": 2}} | settings
    begun = begun_in_bf16 if "bf16" in precisions else partial(scaled, scale=64.0)
    whole = begun(make("whole", **settings))
    outcome = whole.train()
    with pytest.raises(Killed):
        begun(make("cut", damage=killed_at(end), **settings)).train()
    assert RunFolder(tmp_path / "cut").steps() == ([0, 2] if end > 2 else [0])
    again = begun_in_bf16(make("cut", model=tiny_model(seed=9), **settings))  # what the state has is another
    assert again.train() == outcome
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name
    assert (tmp_path / "cut" / "log.jsonl").read_text() == (tmp_path / "whole" / "log.jsonl").read_text()
    states = [load_file(tmp_path / run / "step-00000004" / "model.safetensors") for run in ("whole", "cut")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert [row["precision"] for row in steps_of(tmp_path / "cut")] == precisions


def test_another_recipe_or_other_parts_are_not_continued_but_more_steps_are(make: Make, tmp_path: Path) -> None:
    def run(**changes: Any) -> int:
        return make(**changes).train().steps

    assert run(schedule={"steps": 2}) == 2
    for other in ({"steps": 2, "learning_rate": 0.1}, {"steps": 3, "learning_rate": 0.1}, {"steps": 1}):
        with pytest.raises(UserError, match="holds a run with another schedule; set it back"):
            run(schedule=other)
    sharded = make(schedule={"steps": 2})
    sharded.processes.sharded = True
    with pytest.raises(UserError, match="weights sharded otherwise; launch as before, or give another"):
        sharded.train()
    assert run(schedule={"steps": 2}, wandb="off", checkpointing={"every": 7}) == 2
    assert run(schedule={"steps": 3}, checkpointing={"every": 1}) == 3
    assert 3 in losses_of(tmp_path / "run")


def test_a_bad_batch_is_skipped_counted_and_named(make: Make, tmp_path: Path) -> None:
    model = tiny_model()
    model.shared.weight.data[BAD] = math.inf
    bad: list[tuple[tuple[int, int], ...]] = []

    def plant(step: int, batch: TrainingBatch) -> TrainingBatch:
        if step not in (2, 5):
            return batch
        bad.append(batch.examples)
        ids = batch.input_ids.clone()
        ids[1, 3] = BAD
        return replace(batch, input_ids=ids)

    # The tied head would give inf logits for the letter in every batch.
    model.lm_head.weight = torch.nn.Parameter(tiny_model().lm_head.weight.detach().clone())
    outcome = make(model=model, damage=plant, data={"held_out": 0.0}).train()
    assert [row["step"] for row in outcome.skipped] == [3, 6]
    assert [row["examples"] for row in outcome.skipped] == [[list(e) for e in examples] for examples in bad]
    assert outcome.steps == 8
    rows = {row["step"]: row for row in steps_of(tmp_path / "run")}
    assert rows[3]["skipped_examples"] == outcome.skipped[0]["examples"] and rows[8]["skipped"] == 2
    assert rows[8]["loss_scale"] == FIRST_LOSS_SCALE / 4
    assert all(math.isfinite(row["loss"]) for step, row in rows.items() if step not in (3, 6))


def test_a_pass_for_which_no_row_of_the_probe_is_left_counts_nothing(make: Make) -> None:
    passes = {"batch_size": 1, "gradient_accumulation": 40}
    trainer = make(penalty={"form": "smooth-max", "headroom_bits": 14.0}, data=passes)
    assert trainer.penalty is not None and len(trainer.losses.drawn(0).input_ids) < 40
    noted = {}
    with trainer.penalty:
        for index in (0, 39):
            assert (float(trainer.losses.of_probe(0, index)) > 0) == (index == 0)
            noted[index] = len(trainer.penalty._reached)
            trainer.penalty()
    assert noted[0] > 9 and noted[39] == 0


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_a_probe_that_overflows_skips_no_step(weight: float, make: Make, tmp_path: Path) -> None:
    """What the penalty is there for: ids that no text has overflow inside the model."""
    penalty = {"form": "smooth-max", "certify": False}
    trainer = make(penalty=penalty, distillation={"weight": weight}, schedule={"steps": 2})
    model = trainer.stock
    feed_forward = model.encoder.block[0].layer[1].DenseReluDense
    with torch.no_grad():
        table = model.shared.weight
        table[:, 0] = 0
        table[200:340, 0] = 20 * table[200:340].norm(dim=-1)
        for linear in (feed_forward.wi_0, feed_forward.wi_1):
            linear.weight[:, 0] = linear.weight[0] = 0
            linear.weight[0, 0] = 40.0
        feed_forward.wo.weight[0, 0] = 20.0
    scaled(trainer, 1.0).train()
    rows = steps_of(tmp_path / "run")
    assert len(rows) == 2 and not any(row.get("skipped") or row.get("skipped_examples") for row in rows)
    assert trainer.penalty is not None and trainer.penalty.skipped > 0  # infinities were seen


def test_a_loss_scale_that_collapses_stops_the_run_with_the_site(make: Make, fix: Fix, tmp_path: Path) -> None:
    fix("trainer", OVERFLOW_STOP=3)
    model = tiny_model()
    model.encoder.block[0].layer[1].DenseReluDense.wo.weight.data.mul_(1e7)
    settings: dict[str, Any] = {"penalty": {"form": "smooth-max"}, "distillation": {"weight": 0.0}}
    with pytest.raises(UserError, match="3 steps in a row overflow") as caught:
        scaled(make(model=model, **settings), 64.0).train()
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in str(caught.value)
    trainer = scaled(make("gradients", **settings), 8.0)
    trainer.stock.encoder.final_layer_norm.weight.register_hook(lambda gradient: gradient * math.inf)
    inside = r"3 steps in a row overflow, though every activation is inside its target; "
    with pytest.raises(UserError, match=rf"{inside}set precision: fp32, or lower"):
        trainer.train()
    # What the recipe has already is not advised.
    recipe = trainer.recipe.model_copy(update={"rescale": False})
    with pytest.raises(UserError, match=f"{inside}set rescale: true, or lower"):
        check_progress(recipe, trainer.penalty, trainer.position)
    assert RunFolder(tmp_path / "run").steps()


@pytest.mark.parametrize(("fall", "stuck"), [(0.005, None), (-0.005, 7), (0.0001, 7)])
def test_a_penalty_that_does_not_come_down_stops_a_run(fix: Fix, fall: float, stuck: int | None) -> None:
    fix("trainer", STUCK_STOP=6)
    recipe = parse_recipe({"source": "a", "out": "b", "data": {"path": "c"}})
    position = RunPosition()

    def advance() -> None:
        position.step += 1
        seen = Observation(8.0, 2.0, 2.0 - fall * position.step, 1.0)
        penalty: Any = SimpleNamespace(observations=lambda: {"a.site": seen}, worst=lambda: ("a.site", seen))
        check_progress(recipe, penalty, position)

    for _ in range(12 if stuck is None else stuck - 1):
        advance()
    if stuck is None:
        return
    with pytest.raises(UserError, match=r"not come down for 6 steps, worst at a\.site with 8 where 2 is wanted; raise"):
        advance()


def test_so_many_bad_batches_stop_a_run(make: Make, fix: Fix) -> None:
    fix("trainer", NONFINITE_STOP=2)
    trainer = make(penalty={"form": "smooth-max"})
    trainer.stock.encoder.final_layer_norm.weight.register_hook(
        lambda gradient: gradient * (math.nan if trainer.position.step in (1, 4) else 1.0)
    )
    with pytest.raises(UserError, match=r"^2 steps had no finite gradient.*; look at their examples in log\.jsonl"):
        trainer.train()
    assert [row["step"] for row in trainer.position.skipped] == [2, 5]


def test_a_phase_in_bf16_is_judged_in_fp16_for_which_the_result_is(make: Make) -> None:
    one, other = (make(name, penalty={"form": "smooth-max"}) for name in ("fp16", "bf16"))
    for trainer in (one, begun_in_bf16(other)):
        trainer._evaluate()
    assert one.mixed_precision.precision == "fp16" and other.mixed_precision.precision == "bf16"
    assert one.position.evaluations == other.position.evaluations


def test_training_aims_half_a_bit_below_the_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"form": "smooth-max", "headroom_bits": 14.0}
    trainer = begun_in_bf16(make(schedule=ONE_STEP, penalty=held))
    trainer.train()
    assert trainer.penalty is not None
    name, seen = trainer.penalty.worst()
    assert seen.target == pytest.approx(65504 * 2.0**-14.5)
    told = trainer.position.evaluations[-1]
    assert told["worst_site"] == name and told["worst_headroom_bits"] == pytest.approx(math.log2(65504 / seen.amax))
    for amax, fitting in ((64000.0, 1), (67000.0, 0)):
        reached = replace(seen, amax=amax, excess_bits=math.log2(amax / seen.target))
        monkeypatch.setattr(trainer.penalty, "observations", lambda reached=reached: {name: reached})
        trainer.position.fitting = 0
        trainer._choose_precision()
        assert trainer.position.fitting == fitting


def test_gradient_checkpointing_gives_the_same_bits_in_fp16_past_what_a_gates_cube_holds(make: Make) -> None:
    weights = []
    for name, on in (("plain", False), ("recomputed", True)):
        model = tiny_model()
        model.encoder.block[0].layer[1].DenseReluDense.wi_0.weight.data.mul_(100)
        penalty = {"form": "smooth-max", "headroom_bits": 8.0, "certify": False}
        trainer = scaled(make(name, model=model, gradient_checkpointing=on, penalty=penalty), 16.0)
        assert trainer.penalty is not None
        with trainer.penalty:
            for _ in range(2):
                trainer._step()
        assert not trainer.position.skipped
        assert observed(trainer)["encoder.block.0.layer.1.DenseReluDense.wi_0"].amax > 148
        weights.append(trainer.weights())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.exhaustive
def test_a_wandb_run_is_written_offline_with_every_step(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    trainer = make(wandb="offline", schedule={"steps": 3})
    trainer.train()
    trainer.processes.accelerator.end_training()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    losses = losses_of(tmp_path / "run")
    for _ in range(100):  # its own process writes the file, and on a busy machine is behind
        if file.read_bytes().count(b"loss_scale") >= len(losses):
            break
        time.sleep(0.1)
    assert file.read_bytes().count(b"loss_scale") >= len(losses) > 0


def test_arguments_shift_the_labels_as_the_model_does(folder: Path, tmp_path: Path) -> None:
    corpus = Corpus(recipe_for(folder, tmp_path / "out").data, folder, tiny_model().config)
    batch, model = next(corpus.training_batches()), tiny_model().eval()
    assert batch.labels is not None
    with torch.no_grad():
        stock = model(**batch.inputs(), use_cache=False)
        mine = model(**arguments(model, batch, torch.device("cpu")))
    assert torch.equal(stock.logits, mine.logits)
    count = int((batch.labels != -100).sum())
    assert float(task_loss(mine.logits, batch.labels)) / count == pytest.approx(float(stock.loss), rel=1e-5)


def evaluation(step: int, *divergences: float | None, over: int | None = 0, bits: float | None = 2.0) -> dict[str, Any]:
    kinds = zip(("held_out", "audit", "unlike"), divergences, strict=False)
    return {"step": step, "bounds_over": over, "worst_headroom_bits": bits} | {
        f"{kind}_divergence": value for kind, value in kinds
    }


def test_the_step_that_is_kept_is_the_nearest_to_the_original_of_those_at_which_all_holds() -> None:
    def kept_of(*evaluations: dict[str, Any], **changes: Any) -> int | None:
        tree = {"source": "a", "out": "b", "data": {"path": "c"}, "penalty": {"headroom_bits": 1.0}}
        return nearest(parse_recipe(tree | changes), evaluations)

    early, near, last = evaluation(1, 0.5, 9.0, 1.0), evaluation(2, 0.1, 4.0, 0.5), evaluation(3, 0.1, 5.0, 0.5)
    assert kept_of(early, near, last) == 2
    start = evaluation(0, 1e-7, 0.0, 1e-6, bits=None)
    assert kept_of(start, early, near) == 0
    # Bounds that are over, and headroom that is short of what was asked.
    assert kept_of(start | {"bounds_over": 2}, early, near | {"bounds_over": 1}) == 1
    assert kept_of(early, near | {"worst_headroom_bits": 1.2}) == 1
    assert kept_of(early, near, penalty={"headroom_bits": 3.0}) is None
    # Nothing says that an ordinary finetune is safe, and one that learns a task wants what it has learnt.
    assert kept_of(evaluation(0, 0.0, over=None, bits=None)) is None and kept_of() is None
    assert kept_of(start, distillation={"weight": 0.9}) is None and kept_of(start, quality={"max_kl": None}) is None
    for far in (math.inf, math.nan):
        assert kept_of(evaluation(1, far, 1.0), last) == 3 and kept_of(evaluation(1, 0.0, far)) is None


def test_a_run_returns_the_step_that_it_keeps_also_if_killed(make: Make, fix: Fix, tmp_path: Path) -> None:
    def keeps_two(recipe: Recipe, evaluations: Any) -> int | None:
        return min((row["step"] for row in evaluations if row["step"] >= 2), default=None)

    fix("trainer", nearest=keeps_two)
    fix("states", KEPT=2)
    settings: dict[str, Any] = {"evaluation": {"every": 1}, "checkpointing": {"every": 1}, "schedule": {"steps": 4}}
    with pytest.raises(Killed):
        make(damage=killed_at(3), **settings).train()
    trainer = make(**settings)
    outcome = trainer.train()
    assert (outcome.steps, outcome.kept) == (4, 2)
    assert [place.name for place in (tmp_path / "run").glob("best-*")] == ["best-00000002"]
    short = make("short", **settings)
    for _ in range(2):
        short._step()
    assert torch.equal(trainer.weights()["shared.weight"], short.stock.shared.weight)
    assert not torch.equal(trainer.stock.shared.weight, short.stock.shared.weight)


def test_every_kind_of_input_is_measured_and_a_student_that_is_its_teacher_is_no_way_from_it(make: Make) -> None:
    (first, _) = make(precision="fp32", schedule=ONE_STEP).train().evaluations
    for kind in ("held_out", "audit", "unlike"):
        assert first[f"{kind}_divergence"] == pytest.approx(0.0, abs=1e-6) and first[f"{kind}_agreement"] == 1.0
    (first, _) = make("other", model=tiny_model(3), precision="fp32", schedule=ONE_STEP).train().evaluations
    for kind in ("held_out", "audit", "unlike"):
        assert first[f"{kind}_divergence"] > 0.1 and first[f"{kind}_agreement"] < 0.5
