"""``launch``: which configuration it takes for how much memory, the line that it prints, and the sum that it says."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from support import exhaustive, tiny
from support.learner import recipe_tree, saved
from support.program import refused
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from bf16_to_fp16.cli import main
from bf16_to_fp16.finetuning import launching
from bf16_to_fp16.finetuning.launching import FILES, KINDS, accelerate_config
from bf16_to_fp16.finetuning.recipe import parse_recipe
from bf16_to_fp16.measuring.stock import load, load_config

Shipped = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("source"), 5, dtype=torch.bfloat16)


@pytest.fixture
def recipe(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of a tiny model, on a machine without cards."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe_tree(source, tmp_path / "out")))
    return tmp_path / "recipe.yaml"


def failed(status: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=status, error_file="")
    return ChildFailedError("", {1: failure})


def told_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    assert main(["launch", *map(str, words), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def launched(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[dict[str, Any], str]:
    told = told_of(capsys, *words)
    assert main(["launch", *map(str, words)]) == 0
    return told, capsys.readouterr().out


def test_the_configurations_of_launch_are_those_that_it_chooses_from() -> None:
    assert {path.stem for path in (FILES / "accelerate").iterdir()} == set(KINDS)
    assert {path.stem for path in (FILES / "deepspeed").iterdir()} == {kind for kind in KINDS if "zero" in kind}
    for file in (FILES / "deepspeed").iterdir():
        zero = json.loads(file.read_text())["zero_optimization"]
        assert zero["reduce_bucket_size"] == launching.BUCKET
        gathered = zero.get("stage3_max_live_parameters", 0) + zero.get("stage3_prefetch_bucket_size", 0)
        assert gathered == (launching.GATHERED if zero["stage"] == 3 else 0)


def test_less_memory_takes_more_sharing_and_the_sum_is_that_of_its_terms(
    recipe: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((source / "config.json").read_text())  # of weights that outweigh the buckets of gradients
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(config | {"vocab_size": 10_000_000}))
    large = (recipe, "--gpus", "4", "--set", f"source={tmp_path / 'large'}", "--memory")
    told, said = launched(capsys, *large, "0.5")
    needed = told["tried"]
    assert list(needed) == [kind for kind in KINDS if kind != "single"]
    assert not told["fits"] and told["memory"]["total"] == min(needed.values())
    assert told["memory"]["total"] == sum(told["memory"]["held"].values())
    assert "this is too much: give a smaller data.batch_size" in said
    assert all(name in said for name in told["memory"]["held"])
    assert needed["ddp"] > needed["zero2"] > needed["zero3"]
    for kind in ("ddp", "zero2", "zero3"):
        told = told_of(capsys, *large, str(needed[kind] / 2**30 / 0.95 + 1e-9))
        assert told["kind"] == kind == list(told["tried"])[-1] and told["fits"]
    # On CPUs accelerate would run DDP instead of FSDP.
    assert needed.keys() - told_of(capsys, *large, "0.5", "--set", "device=cpu")["tried"].keys() == {"fsdp"}


def test_the_last_line_is_the_command_and_all_others_are_comments(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told, said = launched(capsys, recipe, "--gpus", "4", "--set", "schedule.steps=9", "--force")
    *comments, line = said.splitlines()
    assert all(comment.startswith("# ") for comment in comments) and line == told["command"]
    assert "4 cards of 16 GiB each (--memory changes this)" in comments[0]
    config = recipe.parent / "out.launch.yaml"
    wanted = f"accelerate launch --config_file {config} --main_process_port 0 -m bf16_to_fp16 finetune {recipe}"
    assert shlex.split(line) == [*shlex.split(wanted), "--set", "schedule.steps=9", "--force"]
    assert yaml.safe_load(config.read_text()) == accelerate_config("ddp", 4) and told["files"] == [str(config)]
    monkeypatch.setattr(launching, "KINDS", {"zero3": "ZeRO-3"})
    told, _ = launched(capsys, recipe, "--gpus", "4", "--set", "precision=fp32")
    deepspeed = recipe.parent / "out.deepspeed.json"
    assert told["files"] == [str(config), str(deepspeed)]
    assert yaml.safe_load(config.read_text()) == accelerate_config("zero3", 4, deepspeed)
    shipped = json.loads((FILES / "deepspeed" / "zero3.json").read_text())
    assert json.loads(deepspeed.read_text()) | {"torch_autocast": shipped["torch_autocast"]} == shipped
    assert "torch_autocast" not in json.loads(deepspeed.read_text())
    launched(capsys, recipe, "--gpus", "4")
    assert json.loads(deepspeed.read_text()) == shipped


@pytest.mark.parametrize(
    ("card", "mebibytes", "each"), [("Tesla V100-SXM2-32GB, 7.0", 32510, 4), ("NVIDIA A100-SXM4-40GB, 8.0", 40960, 2)]
)
def test_the_drivers_cards_are_counted_with_and_say_what_the_teacher_is(
    card: str,
    mebibytes: int,
    each: int,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\nprintf '{card}, {mebibytes}\\n%.0s' 1 2 3 4\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    told, said = launched(capsys, recipe, "--gpus", "4")
    assert f"# 4 × {card.partition(',')[0]}, {mebibytes / 1024:.3g} GiB each" in said
    held = told["memory"]["held"]
    assert told["memory"]["each"] == mebibytes << 20 and held["teacher"] * 4 == held["weights"] * each
    assert main(["launch", str(recipe), "--gpus", "4", "--set", "device=cpu"]) == 0
    assert capsys.readouterr().out.startswith("# CPU processes over gloo: 4, ")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--set", "source=nowhere/at/all"), "nowhere/at/all does not exist"),
        (("--run", "--memory", "0.000001"), "this is too much"),
        (("--gpus", "0"), "0 is not in the range x>=1"),
        (
            ("--gpus", "3"),
            "does not divide among 3 processes; for 3 examples in a step use --set data.batch_size=1"
            " --set data.gradient_accumulation=3",
        ),
    ],
)
def test_what_cannot_be_launched_is_one_line_and_writes_nothing(
    words: tuple[str, ...], wanted: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(recipe.parent.iterdir())
    assert wanted in refused(capsys, "launch", recipe, "--gpus", 4, *words)
    assert set(recipe.parent.iterdir()) == before


def test_a_file_of_others_is_not_replaced(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = recipe.parent / "out.launch.yaml"
    theirs.write_text("a: b\n")
    ask = ("launch", recipe, "--gpus", 4)
    assert f"{theirs} exists and is not from bf16-to-fp16 launch; rename it" in refused(capsys, *ask)
    said = refused(capsys, *ask, "--set", f"out={theirs}/out")
    assert f"{theirs}: File exists; set another `out`" in said
    assert theirs.read_text() == "a: b\n"


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (SignalException("", signal.SIGINT), 130, ""),  # its first process says so
        (KeyboardInterrupt(), 130, ""),
        (SignalException("", signal.SIGTERM), 128 + signal.SIGTERM, ""),
        (failed(70), 70, ""),
        (failed(1), 1, ""),
        (subprocess.CalledProcessError(1, "finetune"), 1, ""),  # as accelerate ends one process
        (failed(-9), 2, "error: process 1 was ended by SIGKILL; run the same command to go on from the last state\n"),
    ],
)
def test_a_launch_ends_as_what_it_runs_does(
    raised: Exception,
    status: int,
    said: str,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ends(_: Any) -> None:
        raise raised

    monkeypatch.setattr("accelerate.commands.launch.launch_command", ends)
    monkeypatch.setenv("BF16_TO_FP16_BEGUN", "")
    monkeypatch.setenv("PYTHON_EXEC", sys.executable)
    try:
        ended = main(["launch", str(recipe), "--gpus", "2", "--run"])
    except SystemExit as stop:
        ended = int(stop.code or 0)
    assert ended == status and capsys.readouterr().err.lstrip("\n") == said


@pytest.mark.parametrize("kind", exhaustive.beyond(["gemma3-images", "t5gemma"], tiny.KINDS))
def test_the_memory_of_a_step_is_known_where_a_config_inside_has_the_sizes(kind: str) -> None:
    recipe = parse_recipe({"source": "a", "out": "b", "data": {"path": "c"}, "gradient_checkpointing": True})
    config = tiny.config(kind)
    assert launching.Needs(recipe, config, getattr(transformers, config.architectures[0])).activations > 0


def test_parameters_and_blocks_are_counted_without_values(source: Path) -> None:
    recipe, config = parse_recipe(recipe_tree(source, source / "out")), load_config(source)
    needs = launching.Needs(recipe, config, transformers.T5ForConditionalGeneration)
    model = load(source, torch.float32)
    assert needs.parameters == sum(p.numel() for p in model.parameters())
    assert {type(block).__name__ for block in needs.blocks} == {"T5Block"}
    assert needs.largest_block == sum(p.numel() for p in model.decoder.block[0].parameters())


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shipped:
    """Return a function that gives what `launch` tells of a shipped recipe for four cards of so many GiB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def told(name: str, gib: str, *words: str) -> dict[str, Any]:
        assert main(["recipe", name]) == 0
        Path("recipe.yaml").write_text(capsys.readouterr().out)
        return told_of(capsys, "recipe.yaml", "--gpus", "4", "--memory", gib, *words)

    return told


def test_a_shipped_recipe_is_launched_without_a_network(shipped: Shipped) -> None:
    name = "flan-t5-base"
    told = shipped(name, "16")
    assert told["kind"] == "ddp" and told["memory"]["held"]["weights"] == 4 * 247_577_856
    assert told["command"].startswith(f"accelerate launch --config_file {name}-fp16.launch.yaml --main_process_port 0 ")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "gib", "kind", "traced"),
    [("pegasus", "16", "zero2", 13.7), ("flan-t5-xl", "16", "zero3-offload", 6.0), ("flan-t5-xl", "32", "zero3", 16.6)],
)
def test_memory_is_within_8_percent_of_traced(name: str, gib: str, kind: str, traced: float, shipped: Shipped) -> None:
    told = shipped(name, gib, "--set", "data.gradient_accumulation=8")  # whole passes, as they were traced
    assert told["kind"] == kind and told["memory"]["total"] / 2**30 == pytest.approx(traced, rel=0.08)
