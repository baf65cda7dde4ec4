"""What a card computes in decides the precision of a finetune, and one that torch cannot use is not passed over."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from support.learner import recipe_tree, rows_of, saved
from support.program import refused

from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.devices import Card, cards, check_torch_uses_cards, computes_in_bf16
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning import processes, run
from bf16_to_fp16.finetuning.recipe import Recipe, parse_recipe
from bf16_to_fp16.progress import Progress

CUDA = torch.device("cuda", 0)
FOUR_V100 = "Tesla V100-SXM2-16GB, 7.0, 16160\n" * 4


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that shows four V100, and a torch that sees none."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nprintf '{FOUR_V100}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)


def on_a(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


@pytest.mark.parametrize(
    ("capability", "bf16"), [((6, 1), False), ((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 1), True)]
)
def test_no_bf16_before_ampere(capability: tuple[int, int], bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Card("a card", capability, 1 << 30).has_bf16 is bf16
    on_a(capability, monkeypatch)
    assert computes_in_bf16(CUDA) is bf16
    assert computes_in_bf16(torch.device("cpu")) and computes_in_bf16(torch.device("mps"))


def accelerator(device: torch.device, **deepspeed: Any) -> Any:
    kind = "DEEPSPEED" if deepspeed else "NO"
    plugin = SimpleNamespace(deepspeed_config=deepspeed, zero_stage=2)
    state = SimpleNamespace(deepspeed_plugin=plugin)
    return SimpleNamespace(distributed_type=SimpleNamespace(value=kind), device=device, state=state, num_processes=1)


RECIPE: dict[str, Any] = {"source": "s", "out": "o", "data": {"path": "t.txt"}}


@pytest.mark.parametrize(("capability", "first"), [((7, 0), "fp32"), ((7, 5), "fp32"), ((8, 0), "bf16")])
def test_without_bf16_it_is_fp32(capability: tuple[int, int], first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a(capability, monkeypatch)
    assert processes.precisions_of(parse_recipe(RECIPE), accelerator(CUDA)) == (first, "fp16")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, None),
        ({"bf16": {"enabled": True}}, "put torch_autocast with dtype float16 in their place"),
        (
            {"torch_autocast": {"enabled": False}},
            "recipe's precision is fp16 and DeepSpeed's configuration is for float32",
        ),
    ],
)
def test_deepspeed_computes_in_the_recipes_precision(config: dict[str, Any], wanted: str | None) -> None:
    if wanted is None:
        assert processes.precisions_of(parse_recipe(RECIPE), accelerator(CUDA, **config)) == ("fp16", "fp16")
        return
    with pytest.raises(UserError, match=wanted):
        processes.precisions_of(parse_recipe(RECIPE), accelerator(CUDA, **config))


@pytest.mark.parametrize(("capability", "dtype"), [((7, 0), torch.float32), ((9, 0), torch.bfloat16)])
def test_the_teacher_of_a_bf16_checkpoint_is_fp32_where_the_card_has_none(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_a(capability, monkeypatch)
    loaded: list[torch.dtype] = []
    monkeypatch.setattr(run, "load", lambda folder, dtype, **_: loaded.append(dtype))
    monkeypatch.setattr(run, "Teacher", lambda *_, **__: None)
    checkpoint = open_checkpoint(saved(tmp_path / "source", 1, dtype=torch.bfloat16))
    run.make_teacher(checkpoint, parse_recipe(RECIPE), accelerator(CUDA))
    assert loaded == [dtype]


def test_a_run_on_a_card_without_bf16_says_so_and_never_uses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (run, processes):
        monkeypatch.setattr(module, "computes_in_bf16", lambda device: False)
    on_a((7, 0), monkeypatch)
    source = saved(tmp_path / "source", 30, dtype=torch.bfloat16)
    monkeypatch.setattr(run, "check_start", lambda *_: False)
    monkeypatch.setattr("bf16_to_fp16.finetuning.trainer.FITTING_STEPS", 2)
    tree = recipe_tree(source, tmp_path / "out") | {"device": "cpu", "schedule": {"steps": 3}}
    recipe = Recipe.model_validate(tree | {"evaluation": {"every": 100}})
    run.train(recipe.settled(), open_checkpoint(source), progress=Progress())
    assert [row["precision"] for row in rows_of(tmp_path / "out.run", "precision")] == ["fp32", "fp32", "fp16"]
    said = "cpu has no bf16: the teacher is fp32, and the steps before fp16 holds are in fp32 too\n"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.usefixtures("driver")
def test_the_drivers_cards_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cards() == [Card("Tesla V100-SXM2-16GB", (7, 0), 16160 << 20)] * 4
    for visible, count in (("0,2", 2), ("", 0), ("-1", 0), ("GPU-4f3", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(cards()) == count


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("build", "reason"), [(None, "a build without CUDA"), ("13.0", "built for CUDA 13.0, cannot")])
def test_a_card_that_torch_cannot_use_ends_a_finetune_with_the_line_that_mends_it(
    build: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE | {"source": "shipped:t5-gated-bytes", "out": str(tmp_path / "out")}))
    words = ["finetune", str(recipe), "--set", "data.path=shipped:held_out.txt"]
    said = refused(capsys, *words)
    assert said.startswith("error: there is a Tesla V100-SXM2-16GB and torch ")
    assert reason in said and "; pip install --force-reinstall torch==2.7.1 (" in said
    assert not (tmp_path / "out.run").exists()
    monkeypatch.setattr(run, "open_checkpoint", lambda *_, **__: (_ for _ in ()).throw(UserError("it went on")))
    assert "it went on" in refused(capsys, *words, "--set", "device=cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_torch_uses_cards()
