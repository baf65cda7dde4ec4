"""A run that cannot succeed stops with the site that is to blame."""

import math
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.learner import Fix, Make, scaled, tiny_model

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.penalty import Observation
from bf16_to_fp16.finetuning.recipe import parse_recipe
from bf16_to_fp16.finetuning.stability import RunPosition, check_progress
from bf16_to_fp16.finetuning.states import RunFolder


def test_a_loss_scale_that_collapses_stops_the_run_with_the_site(make: Make, fix: Fix, tmp_path: Path) -> None:
    fix("stability", OVERFLOW_STOP=3)
    model = tiny_model()
    with torch.no_grad():
        model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e7)
    settings: dict[str, Any] = {"penalty": {"form": "smooth-max"}, "distillation": {"weight": 0.0}}
    with pytest.raises(UserError, match=r"3 steps in a row overflow, down to a loss scale of 8") as caught:
        scaled(make(model=model, **settings), 64.0).train()
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in str(caught.value)
    # Each of these steps is computed anew for every scale down to 1.
    trainer = scaled(make("gradients", **settings), 8.0)
    trainer.stock.encoder.final_layer_norm.weight.register_hook(lambda gradient: gradient * math.inf)
    inside = r"3 steps in a row overflow, .* though every activation is inside its target; "
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
    fix: Fix, fall: float, stuck: int | None
) -> None:
    fix("stability", STUCK_STOP=6)
    recipe = parse_recipe({"source": "a", "out": "b", "data": {"path": "c"}})
    position, stopped = RunPosition(), None
    for step in range(1, 13):
        position.step = step
        seen = Observation(1.0, 1.0, 2.0 - fall * step, 1.0)
        penalty: Any = SimpleNamespace(
            observations=lambda seen=seen: {"a.site": seen}, worst=lambda seen=seen: ("a.site", seen)
        )
        with suppress(UserError):
            check_progress(recipe, penalty, position, None)
            continue
        stopped = step
        break
    assert stopped == stuck
