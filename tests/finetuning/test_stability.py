"""A run that cannot succeed stops with the site that is to blame."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.learner import Fix, Make, scaled, tiny_model

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.penalty import Observation
from bf16_to_fp16.finetuning.stability import check_progress
from bf16_to_fp16.finetuning.states import RunFolder
from bf16_to_fp16.finetuning.trainer import Trainer


def observing(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, excess: Callable[[int], float]) -> None:
    """Let the penalty see one site, so far past its target at a step."""

    def observations() -> dict[str, Observation]:
        return {"a.site": Observation(1.0, 1.0, excess(trainer.position.step), 1.0)}

    assert trainer.penalty is not None
    monkeypatch.setattr(trainer.penalty, "observations", observations)
    monkeypatch.setattr(trainer.penalty, "worst", lambda: next(iter(observations().items())))


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
    with pytest.raises(UserError, match=rf"{inside}set precision: fp32, or lower"):
        trainer.train()
    # What the recipe has already is not advised.
    recipe = trainer.recipe.model_copy(update={"rescale": False})
    with pytest.raises(UserError, match=f"{inside}set rescale: true, or lower"):
        check_progress(recipe, trainer.penalty, trainer.position, 2.0)
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
