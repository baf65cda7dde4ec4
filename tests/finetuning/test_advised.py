"""The advised pair: the rate that moves half of the 16-bit weights and the batch that goes with it, in a whole run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.learner import recipe_tree, rows_of, saved

from bf16_to_fp16.advise.updates import advise_updates
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.optimizers import with_advised_pair
from bf16_to_fp16.finetuning.recipe import Recipe, parse_recipe, read_recipe
from bf16_to_fp16.finetuning.run import check_recipe, finetune, train
from bf16_to_fp16.finetuning.states import RunFolder
from bf16_to_fp16.progress import Progress


def recipe_with(rate: float, *, relative: bool, weights: str = "bf16", accumulation: int = 2) -> Recipe:
    return parse_recipe(
        {
            "source": "a",
            "out": "b",
            "data": {"path": "c", "gradient_accumulation": accumulation},
            "optimizer": {"weights": weights, "relative": relative},
            "schedule": {"learning_rate": rate, "advised": True},
        }
    )


def some_weights(deviation: float = 0.02) -> torch.Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * deviation


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_the_pair_is_that_of_advise_and_moves_half(weights: str, tmp_path: Path) -> None:
    save_file({"w": some_weights()}, tmp_path / "w.safetensors")
    asked = recipe_with(5e-7, relative=False, weights=weights)
    chosen = with_advised_pair(asked, [some_weights()], Progress(quiet=True))
    advice = advise_updates(tmp_path / "w.safetensors", rate=5e-7, dtype=weights, batch_size=2)["advice"][-1]
    assert chosen.schedule.learning_rate == advice["learning_rate"] > 1e-6
    assert chosen.data.gradient_accumulation == advice["batch_size"] == math.ceil(2 * advice["factor"])
    assert chosen.asked == asked and asked.asked is asked
    # What is advised moves enough.
    assert with_advised_pair(chosen, [some_weights()], Progress(quiet=True)) is chosen
    moves = advise_updates(tmp_path / "w.safetensors", rate=chosen.schedule.learning_rate, dtype=weights)
    assert moves["total"]["stalled_fraction"] <= 0.5


def test_relative_steps_go_with_each_tensors_size() -> None:
    rates = [
        with_advised_pair(recipe_with(1e-4, relative=True), [some_weights(size)], Progress(quiet=True)).schedule
        for size in (0.02, 0.02 * 2.0**8)
    ]
    assert rates[0] == rates[1]
    # Half a gap is from 2⁻⁹ to 2⁻⁸ of a weight, and the median weight has the size of the unit.
    assert 2.0**-9 < rates[0].learning_rate < 2.0**-8


def test_where_there_is_nothing_to_advise_it_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = recipe_with(1e-4, relative=True).describe()
    for change, said in (
        ({"weights": "fp32"}, "with optimizer.weights fp32 no update is lost; leave it out"),
        ({"rounding": "stochastic"}, "with optimizer.rounding stochastic no update is lost; leave it out"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            parse_recipe({**tree, "optimizer": {**tree["optimizer"], **change}})
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no weight of the start is finite in fp16"):
        large = torch.full((5000,), 1e6)
        with_advised_pair(recipe_with(1e-4, relative=False, weights="fp16"), [large.fill_(math.inf)], Progress())
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match="weights of 16 bits that are whole; launch with"):
        check_recipe(recipe_with(1e-4, relative=True))


def test_a_run_takes_the_pair_and_goes_on_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "source", 60, dtype=torch.bfloat16)
    tree: dict[str, Any] = recipe_tree(source, tmp_path / "out") | {
        "device": "cpu",
        "rescale": False,
        "precision": "fp32",
        "penalty": {"form": "none", "certify": False},
        "optimizer": {"weights": "bf16"},
        "schedule": {"steps": 2, "learning_rate": 1e-3, "advised": True},
        "evaluation": {"every": 100, "attack_steps": 0},
        "quality": {"max_kl": None},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    finetune(recipe, progress=Progress())
    said = capsys.readouterr().err
    assert "Advised: at learning rate 0.001" in said and "passes a step instead of 1" in said
    ran = json.loads((tmp_path / "out" / "fp16_report.json").read_text())["finetune"]
    assert ran["recipe"]["schedule"]["learning_rate"] == 1e-3
    rate, passes = (ran["settled"][key] for key in ("schedule.learning_rate", "data.gradient_accumulation"))
    assert passes == math.ceil(rate / 1e-3) > 1
    assert [row["learning_rate"] for row in rows_of(tmp_path / "out.run", "loss")] == [rate, rate]
    # The pair written out is the same run, and a killed one goes on from its state.
    plain = {**tree, "out": str(tmp_path / "plain"), "data": {**tree["data"], "gradient_accumulation": passes}}
    plain["schedule"] = {**tree["schedule"], "learning_rate": rate, "advised": False}
    states: dict[str, Any] = {
        "out": load_file(tmp_path / "out.run" / "step-00000002" / "model.safetensors"),
        "plain": train(parse_recipe(plain), open_checkpoint(source)).weights,
    }
    more = ("schedule.steps=3", f"out={tmp_path / 'more'}", f"checkpointing.folder={tmp_path / 'out.run'}")
    assert RunFolder(tmp_path / "out.run").steps()[-1] == 2
    states["more"] = train(read_recipe(recipe, more), open_checkpoint(source)).weights
    whole = {**plain, "out": str(tmp_path / "whole"), "schedule": {**plain["schedule"], "steps": 3}}
    states["whole"] = train(parse_recipe(whole), open_checkpoint(source)).weights
    for one, other in (("out", "plain"), ("more", "whole")):
        left, right = states[one], states[other]
        assert left and right and all(torch.equal(left[name], right[name]) for name in left)
    assert not torch.equal(states["out"]["shared.weight"], states["more"]["shared.weight"])
    with pytest.raises(UserError, match="holds a run with another schedule; restore the recipe"):
        finetune(
            recipe,
            overrides=("schedule.learning_rate=0.002", f"checkpointing.folder={tmp_path / 'out.run'}"),
            force=True,
        )
