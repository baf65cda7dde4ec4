"""A run that spikes goes back, and one that cannot succeed stops with the site that is to blame."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.learner import Damage, Fix, Killed, Make, killed_at, losses_of, scaled, tiny_model

from bf16_to_fp16.advise.detector import Detector
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.corpus import TrainingBatch
from bf16_to_fp16.finetuning.distillation import arguments
from bf16_to_fp16.finetuning.penalty import Observation
from bf16_to_fp16.finetuning.stability import PULLED_STEPS
from bf16_to_fp16.finetuning.states import RunFolder
from bf16_to_fp16.finetuning.trainer import Trainer


def spiking(model: Any, *steps: int) -> Damage:
    """Labels that the model thinks least likely, in some steps of data."""

    def plant(step: int, batch: TrainingBatch) -> TrainingBatch:
        if step not in steps:
            return batch
        assert batch.labels is not None
        with torch.no_grad():
            least = model(**arguments(model, batch, torch.device("cpu"))).logits.argmin(-1)
        return replace(batch, labels=torch.where(batch.labels >= 0, least, batch.labels))

    return plant


@pytest.fixture
def make_spiky(make: Make, fix: Fix) -> Make:
    """A trainer of a run that meets the labels of ``spiking`` in some steps of data, and leaves out few of them."""
    fix("stability", Detector=partial(Detector, window=16))
    fix("trainer", LEFT_OUT=4)

    def made(run: str, *spikes: int, end: int | None = None, steps: int = 32, **changes: Any) -> Trainer:
        model = tiny_model()
        plant = spiking(model, *spikes)
        settings: dict[str, Any] = {
            "schedule": {"steps": steps, "learning_rate": 0.01},
            "distillation": {"weight": 0.0},
            "checkpointing": {"every": 10},
        }
        return make(run, model=model, damage=plant if end is None else killed_at(end, plant), **settings, **changes)

    return made


def test_a_spike_sends_the_run_back_past_the_batches_around_it(make_spiky: Make, fix: Fix, tmp_path: Path) -> None:
    fix("trainer", LEFT_OUT=12)
    trainer = make_spiky("run", 22, 23, 24, 25)
    seen: list[int] = []
    batches = type(trainer.training_batches)
    advance = batches.__next__

    def note(self: Any) -> TrainingBatch:
        seen.append(self.steps)
        return advance(self)

    batches.__next__ = note  # type: ignore[method-assign]
    outcome = trainer.train()
    assert outcome.rewinds == ({"spike": 23, "noticed": 23, "back_to": 20, "steps_of_data_left_out": 12},)
    # Steps 20 to 31 of the data are left out, of which 20 to 22 had been seen.
    assert seen == [*range(23), *range(32, 44)]
    losses = losses_of(tmp_path / "run")
    assert outcome.steps == 32 and sorted(losses) == list(range(1, 33))
    assert max(losses[step] for step in range(21, 33)) < losses[1]


def test_only_what_the_threshold_calls_a_spike_sends_a_run_back_and_past_all_that_it_saw(
    make_spiky: Make, fix: Fix
) -> None:
    fix("trainer", LEFT_OUT=1)
    rewinds = []
    for name, z in (("low", 6.0), ("high", 1e6)):
        trainer = make_spiky(name, 23, steps=26)
        trainer.watch.detector.z = z
        broken = iter([math.nan])  # once, in the step before the spike
        trainer.stock.encoder.final_layer_norm.weight.register_hook(
            lambda g, p=trainer, bad=broken: g * next(bad, 1.0) if p.position.step == 22 else g
        )
        outcome = trainer.train()
        rewinds.append(outcome.rewinds)
        assert [row["step"] for row in outcome.skipped] == [23]  # though the run went back to the time before
    # Steps 20 to 23 of the data were seen after the state, and not one of them comes again.
    assert rewinds == [({"spike": 24, "noticed": 24, "back_to": 20, "steps_of_data_left_out": 4},), ()]


def observing(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, excess: Callable[[int], float]) -> None:
    """Let the penalty see one site, so far past its target at a step."""

    def observations() -> dict[str, Observation]:
        return {"a.site": Observation(1.0, 1.0, excess(trainer.position.step), 1.0)}

    assert trainer.penalty is not None
    monkeypatch.setattr(trainer.penalty, "observations", observations)
    monkeypatch.setattr(trainer.penalty, "worst", lambda: next(iter(observations().items())))


@pytest.mark.parametrize(("steps", "rewinds"), [(PULLED_STEPS, 0), (PULLED_STEPS + 1, 1)])
def test_a_spike_is_laid_to_the_penalty_for_some_steps_only(
    make_spiky: Make, monkeypatch: pytest.MonkeyPatch, steps: int, rewinds: int
) -> None:
    """The same spike, so many steps after the last one with a site past its target."""
    trainer = make_spiky("run", 22, steps=26, penalty={"form": "smooth-max", "headroom_bits": 0.0})
    observing(trainer, monkeypatch, lambda step: 1.0 if step == 23 - steps else -1.0)
    assert len(trainer.train().rewinds) == rewinds


def test_spikes_send_a_run_back_only_so_often(make_spiky: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bf16_to_fp16.finetuning.stability.REWINDS", 1)
    outcome = make_spiky("run", 22, 30).train()
    assert len(outcome.rewinds) == 1 and outcome.steps == 32


def test_a_run_that_went_back_and_is_killed_ends_with_the_same_bits(make: Make, make_spiky: Make) -> None:
    whole = make_spiky("whole", 22)
    outcome = whole.train()
    assert len(outcome.rewinds) == 1
    with pytest.raises(Killed):
        make_spiky("cut", 22, end=27).train()
    again = make_spiky("cut")
    assert again.train() == outcome
    assert all(torch.equal(tensor, again.weights()[name]) for name, tensor in whole.weights().items())


def test_a_loss_scale_that_collapses_stops_the_run_with_the_site(make: Make, fix: Fix, tmp_path: Path) -> None:
    fix("stability", OVERFLOW_STOP=5)
    model = tiny_model()
    with torch.no_grad():
        model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e7)
    settings: dict[str, Any] = {"penalty": {"form": "smooth-max"}, "distillation": {"weight": 0.0}}
    with pytest.raises(UserError, match=r"5 steps in a row overflow, down to a loss scale of 2048") as caught:
        make(model=model, **settings).train()
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in str(caught.value)
    # Each of these steps is computed anew for every scale down to 1.
    trainer = scaled(make("gradients", **settings), 64.0)
    trainer.stock.encoder.final_layer_norm.weight.register_hook(lambda gradient: gradient * math.inf)
    inside = r"5 steps in a row overflow, .* though every activation is inside its target; "
    with pytest.raises(UserError, match=rf"{inside}set precision: \[bf16, fp16\], or lower"):
        trainer.train()
    # What the recipe has already is not advised.
    recipe, seen = trainer.recipe, {"loss_scale": 2.0}
    for changes, advised in (
        ({"rescale": False}, "rescale: true"),
        ({"precision": ("bf16", "fp16")}, "precision: fp32"),
    ):
        trainer.watch.recipe = recipe.model_copy(update=changes)
        with pytest.raises(UserError, match=f"{inside}set {advised}, or lower"):
            trainer.watch.check(trainer.position, seen)
    assert RunFolder(tmp_path / "run").steps()


def test_a_penalty_that_does_not_come_down_stops_the_run_with_the_site(make: Make, fix: Fix) -> None:
    fix("stability", STUCK_STOP=6)
    trainer = make(
        model=tiny_model(dropout=0.0),
        schedule={"steps": 60, "learning_rate": 1e-12},
        penalty={"form": "smooth-max", "headroom_bits": 20.0},
        precision="fp32",
    )
    with pytest.raises(UserError, match=r"the penalty has not come down for 6 steps, worst at \S+ with .* is wanted"):
        trainer.train()


@pytest.mark.parametrize(("fall", "stuck"), [(0.005, None), (-0.005, 7), (0.0001, 7)])
def test_a_penalty_that_comes_down_slowly_is_not_stuck_and_noise_is_no_progress(
    make: Make, fix: Fix, monkeypatch: pytest.MonkeyPatch, fall: float, stuck: int | None
) -> None:
    fix("stability", STUCK_STOP=6)
    trainer = make(schedule={"steps": 12}, penalty={"form": "smooth-max"})
    observing(trainer, monkeypatch, lambda step: 2.0 - fall * step)
    if stuck is None:
        assert trainer.train().steps == 12
        return
    with pytest.raises(UserError, match="the penalty has not come down for 6 steps"):
        trainer.train()
    assert trainer.position.step == stuck
