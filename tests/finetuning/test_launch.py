"""Every file of launch/ and recipes/ does what it says: the same command as a user's, on two CPU processes.

Two processes with half the batch each must log the losses and end with the weights of one process with the whole batch.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from support.exhaustive import beyond
from support.launching import ON_CPU, ROOT, command, kill, run
from support.learner import recipe_tree, saved, steps_of, tiny_model
from support.program import refused

from bf16_to_fp16 import verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.cli import main
from bf16_to_fp16.finetuning.distillation import StepLosses
from bf16_to_fp16.finetuning.recipe import parse_recipe, read_recipe, shipped_names
from bf16_to_fp16.finetuning.run import finetune, saying_where_it_stopped, train
from bf16_to_fp16.finetuning.states import RunFolder
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.measuring.texts import texts

ACCELERATE = ROOT / "bf16_to_fp16" / "launch" / "accelerate"
DEEPSPEED = ROOT / "bf16_to_fp16" / "launch" / "deepspeed"
STEPS = 4
IN_TWO_PASSES = ("data.batch_size=2", "data.gradient_accumulation=4")
"""Which two processes divide; together they take the steps of ``alone``."""
ALONE = ("data.batch_size=4", "data.gradient_accumulation=2", "device=cpu")
AS_IT_IS = "from bf16_to_fp16.__main__ import main; exit(main())"
TRAINING_ALONE = """
import sys
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.finetuning.recipe import read_recipe
from bf16_to_fp16.finetuning.run import train

recipe = read_recipe(sys.argv[2], sys.argv[4::2]).settled()
train(recipe, open_checkpoint(recipe.source))
"""
MISSED = 1  # exit status of a run of the recipe, which asks for more headroom than so few steps can give


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe without dropout, which differs between one process and two."""
    folder = tmp_path_factory.mktemp("launch")
    source = saved(folder / "source", 60, dropout=0.0, dtype=torch.bfloat16)
    tree = recipe_tree(source, folder / "out") | {
        "precision": "fp32",
        "optimizer": {"relative": False},  # as DeepSpeed clips, whatever a step's units are
        "schedule": {"steps": STEPS, "learning_rate": 0.003},
        # Past its targets from the first step, so that the penalty pulls.
        "penalty": {"headroom_bits": 14.0, "certify": False},
        "evaluation": {"every": 100, "attack_steps": 0},
        # What comes before and after the training has one process, and its own tests.
        "rescale": False,
    }
    tree["data"]["batch_size"] = 8
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def alone(recipe: Path) -> Path:
    out = recipe.parent / "alone"
    finetune(recipe, overrides=(f"out={out}", *ALONE))
    return out


def logged(out: Path) -> list[dict[str, Any]]:
    return steps_of(out.with_name(f"{out.name}.run"))


def finetuned(out: Path) -> Any:
    return json.loads((out / "fp16_report.json").read_text())["finetune"]


def logits(folder: Path) -> torch.Tensor:
    batch = {"input_ids": torch.arange(60, 90)[None], "decoder_input_ids": torch.arange(60, 70)[None]}
    with torch.no_grad():
        out: torch.Tensor = load(folder, torch.float32)(**batch).logits
    return out


def assert_same_run(out: Path, reference: Path, tolerance: float, *, pulls: bool = True, lost: int = STEPS) -> None:
    """Losses, penalties, gradients and tokens of every step but a lost one, and the function of what was written."""
    assert finetuned(out)["processes"] == 2
    rows, wanted = logged(out), logged(reference)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, want in zip(rows, wanted, strict=True):
        assert row["tokens"] == want["tokens"] and row["skipped"] == want["skipped"] == (row["step"] > lost)
        # The first step only finds out what is over.
        assert (want["penalty"] > 0) is (pulls and row["step"] > 1)
        for key in ("loss", "task_loss", "distillation", "penalty", "gradient_norm"):
            if (row["step"], key) != (lost + 1, "gradient_norm"):  # which is no number
                assert row[key] == pytest.approx(want[key], rel=tolerance, abs=tolerance), (row["step"], key)
    ends = [finetuned(folder)["evaluations"][-1]["held_out_loss"] for folder in (out, reference)]
    assert ends[0] == pytest.approx(ends[1], rel=tolerance)
    start = logits(out.with_name(f"{out.name}.run") / "start")
    # What was written is fp16, so that its last bits may differ.
    change = float((logits(reference) - start).abs().max())
    assert float((logits(out) - logits(reference)).abs().max()) < max(0.01, 5 * tolerance) * change


def run_by(
    script: str, words: list[str], folder: Path, environment: Mapping[str, str] = ON_CPU, status: int = 0
) -> str:
    (folder / "script.py").write_text(script)
    module = words.index("bf16_to_fp16") - 1
    return run([*words[:module], str(folder / "script.py"), *words[module + 2 :]], environment, status)


def without_autocast(name: str, folder: Path) -> Path:
    tree = json.loads((DEEPSPEED / f"{name}.json").read_text())
    assert tree.pop("torch_autocast") == {"enabled": True, "dtype": "float16"}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(tree))
    return path


# ---- several processes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_two(recipe: Path, warm_python: Path) -> Path:
    out = recipe.parent / "in-two"
    run(command(warm_python, "ddp", 2, recipe, out, settings=IN_TWO_PASSES), status=MISSED)
    return out


def remove_the_last_state(out: Path) -> None:
    *_, before, last = sorted(out.with_name(f"{out.name}.run").glob("step-*"))
    assert before.name == f"step-{STEPS - 2:08d}"
    for folder in (out, last):
        shutil.rmtree(folder)


def assert_in_shares(out: Path) -> None:
    """Each of two processes wrote its own share of the optimizer's state."""
    states = out.with_name(f"{out.name}.run") / f"step-{STEPS:08d}" / "accelerate"
    assert len(list(states.rglob("*optim_states.pt"))) == 2


def test_ddp_takes_the_steps_of_one_process(in_two: Path, alone: Path) -> None:
    assert_same_run(in_two, alone, tolerance=1e-5)


@pytest.mark.parametrize("stage", beyond(["zero3"], ["zero3", "zero3-offload"]))
def test_zero_takes_the_steps_of_one_process(
    stage: str, recipe: Path, alone: Path, warm_python: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """In two passes; plain ZeRO-2, and in ``make test`` a run that goes on, are those of a test below."""
    config = ("--deepspeed_config_file", str(without_autocast(stage, tmp_path)))
    words = command(warm_python, stage, 2, recipe, tmp_path / "out", *config, settings=IN_TWO_PASSES)
    run_by(AS_IT_IS, words, tmp_path, status=MISSED)
    assert_same_run(tmp_path / "out", alone, tolerance=1e-5)
    assert_in_shares(tmp_path / "out")
    # What DeepSpeed did to torch is undone before the last audit.
    assert [problem["check"] for problem in verify(tmp_path / "out")["problems"]] == ["report"]
    if pytestconfig.getoption("--exhaustive"):
        whole = logged(tmp_path / "out")
        remove_the_last_state(tmp_path / "out")
        run_by(TRAINING_ALONE, words, tmp_path)
        assert logged(tmp_path / "out") == whole


@pytest.fixture(scope="module")
def uncertified(recipe: Path) -> Path:
    """The recipe, of a model whose scores and gates no rescaling brings under their limits, to end with a proof."""
    model = tiny_model(dropout=0.0)
    model.encoder.block[0].layer[0].SelfAttention.q.weight.data[:8] *= 3e3
    model.encoder.block[0].layer[1].DenseReluDense.wi_0.weight.data[:3] *= 3e5
    model.encoder.block[0].layer[1].DenseReluDense.wi_1.weight.data[:3] /= 3e5
    folder = recipe.parent / "uncertified"
    saved(folder, 60)
    model.to(torch.bfloat16).save_pretrained(folder)
    tree = yaml.safe_load(recipe.read_text()) | {"source": str(folder), "rescale": False}
    path = recipe.parent / "uncertified.yaml"
    tree |= {"penalty": {"certify": True, "headroom_bits": 0.0}, "quality": {"max_kl": None}}
    # So that the bounds' own moves are nearly all: Adam's first steps turn with the sign of a gradient that is noise.
    tree["schedule"] = {"steps": STEPS, "learning_rate": 1e-6}
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("kind", beyond(["zero3"], ["zero2", "zero3", "zero3-offload", "fsdp"]))
def test_parts_are_held_to_the_bounds_of_all(kind: str, uncertified: Path, warm_python: Path, tmp_path: Path) -> None:
    """Each process changes its part, and that of the optimizer's copies."""
    alone, relative = tmp_path / "alone", ("optimizer.relative=true",) if kind == "fsdp" else ()
    overrides = (f"out={alone}", "device=cpu", *relative)
    train(read_recipe(uncertified, overrides).settled(), open_checkpoint(uncertified.with_suffix("")), progress=False)
    if kind == "fsdp":
        under_fsdp(warm_python, uncertified, tmp_path, 0, *relative)
    else:
        config = ["--deepspeed_config_file", str(without_autocast(kind, tmp_path))]
        run(command(warm_python, kind, 2, uncertified, tmp_path / "out", *config))
    rows, wanted = logged(tmp_path / "out"), logged(alone)
    assert wanted[0]["bound_bits"] < -2 and wanted[-1]["bound_bits"] > 0
    for row, want in zip(rows, wanted, strict=True):
        for key in ("loss", "gradient_norm", "bound_bits"):
            assert row[key] == pytest.approx(want[key], rel=1e-3, abs=1e-3), (row["step"], key)
    assert json.loads((tmp_path / "out" / "fp16_report.json").read_text())["proof"] == "certified"


AS_ON_CARDS = """
import deepspeed.runtime.engine as runtime
import torch

def autocast_if_enabled(engine):
    return torch.autocast("cpu", engine.torch_autocast_dtype(), enabled=engine.torch_autocast_enabled())

# DeepSpeed knows of CUDA's autocast alone, and takes off one around its own.
runtime.autocast_if_enabled = autocast_if_enabled
"""
INFINITE = """
from bf16_to_fp16.finetuning.distillation import StepLosses

reach = StepLosses.of_probe

def infinite(self, step, index):
    far = reach(self, step, index)
    return far if step != 2 else far * float("inf")

StepLosses.of_probe = infinite
"""


@pytest.mark.parametrize("kind", beyond(["zero2"], ["zero2", "zero3", "zero3-offload"]))
def test_zero_takes_the_steps_of_amp_and_one_that_it_breaks_off_leaves_no_gradient_behind(
    kind: str, recipe: Path, warm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped JSON as it is; the probe of the third step turns out infinite after the text's backward."""
    # Where rounding decides which value is the largest, the penalty would pull at another.
    settings = ("penalty.headroom_bits=1", "precision=fp16")
    words = command(warm_python, kind, 2, recipe, tmp_path / "zero", settings=settings)
    run_by(AS_ON_CARDS + INFINITE + AS_IT_IS, words, tmp_path)
    monkeypatch.setattr(StepLosses, "of_probe", StepLosses.of_probe)  # and back at the end
    exec(INFINITE, {})
    finetune(recipe, overrides=(f"out={tmp_path / 'amp'}", "device=cpu", *settings))
    assert_in_shares(tmp_path / "zero")
    assert_same_run(tmp_path / "zero", tmp_path / "amp", tolerance=3e-3, pulls=False, lost=2)
    # At the first step all of it is the precision's.
    first, wanted = (logged(tmp_path / name)[0]["distillation"] for name in ("zero", "amp"))
    assert 0 < first == pytest.approx(wanted, rel=1e-3)
    for name in ("zero", "amp"):
        scales = [(row["precision"], row["loss_scale"]) for row in logged(tmp_path / name)]
        assert scales == [("fp16", 65536.0)] * 2 + [("fp16", 32768.0)] * 2
    if kind == "zero2":  # with ZeRO-3's own autocast a run that goes on differs in the fifth digit
        whole = logged(tmp_path / "zero")
        remove_the_last_state(tmp_path / "zero")
        run_by(AS_ON_CARDS + INFINITE + TRAINING_ALONE, words, tmp_path)
        assert logged(tmp_path / "zero") == whole


def launched(python: Path, recipe: Path, folder: Path, *settings: str, count: int = 2) -> "subprocess.Popen[str]":
    words = ["launch", recipe, "--gpus", count, "--run", *(word for each in settings for word in ("--set", each))]
    return subprocess.Popen(
        [str(part) for part in (python, "-m", "bf16_to_fp16", *words, "--set", "device=cpu")],
        cwd=folder,
        env={**os.environ, **ON_CPU},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_of(process: "subprocess.Popen[str]", states: Path, pattern: str, how: Callable[[], None]) -> tuple[str, str]:
    try:
        for _ in range(6000):
            if list(states.glob(pattern)):
                break
            assert process.poll() is None
            time.sleep(0.02)
        how()
        return process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            kill(process)


def test_a_run_that_loses_a_process_goes_on(recipe: Path, in_two: Path, warm_python: Path, tmp_path: Path) -> None:
    settings = ("out=out", "checkpointing.every=1", *IN_TWO_PASSES)
    process = launched(warm_python, recipe, tmp_path, *settings)
    family: list[psutil.Process] = []

    def kill_one() -> None:
        family.extend(each for each in psutil.process_iter() if is_in(each, tmp_path))
        next(each for each in family if each.environ().get("RANK") == "1").kill()

    said, error = end_of(process, tmp_path / "out.run", "step-0000000[1-3]", kill_one)
    assert process.returncode == 2 and not (tmp_path / "out").exists() and "Traceback" not in error
    assert error.splitlines()[-1] == (
        "error: process 1 was ended by SIGKILL; run the same command to go on from the last state"
    )
    first, *_, last = said.splitlines()
    assert first.startswith("# CPU processes over gloo: 2, ")
    assert f"-m bf16_to_fp16 finetune {recipe} --set out=out" in last
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert not (tmp_path / "out.run" / f"step-{STEPS:08d}").exists()
    _, error = (again := launched(warm_python, recipe, tmp_path, *settings)).communicate(timeout=400)
    assert again.returncode == MISSED and "Continuing from step" in error
    for name in ("out/model.safetensors", "out.run/log.jsonl"):
        whole = in_two.parent / name.replace("out", in_two.name, 1)
        assert (tmp_path / name).read_bytes() == whole.read_bytes(), name


def is_in(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.Error):
        return process.cwd() == str(folder)
    return False


def test_an_interrupt_is_told_once_with_the_step(recipe: Path, warm_python: Path, tmp_path: Path) -> None:
    process = launched(warm_python, recipe, tmp_path, "out=out", "schedule.steps=5000")
    as_a_terminal_does = partial(os.killpg, process.pid, signal.SIGINT)
    _, said = end_of(process, tmp_path / "out.run", "step-0000000[2-8]", as_a_terminal_does)
    assert process.returncode == 130, said
    (line,) = (line for line in said.splitlines() if "interrupted" in line)
    last = RunFolder(tmp_path / "out.run").steps()[-1]
    assert line == f"interrupted; the same command goes on from step {last}"


def test_an_interrupt_before_the_first_state_says_that_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match="no state is saved yet"), saying_where_it_stopped(tmp_path):
        raise KeyboardInterrupt


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_processes_is_one_line(count: int, recipe: Path, warm_python: Path, tmp_path: Path) -> None:
    process = launched(warm_python, recipe, tmp_path, "out=out", "data.first_sentinel=999", count=count)
    _, error = process.communicate(timeout=200)
    (line,) = [line for line in error.splitlines() if line]
    assert process.returncode == 2 and line.startswith("error: ") and "data.first_sentinel is 999" in line


AS_FSDP = """
import sys
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

made = Accelerator.__init__

def make(self, *given, **options):
    made(self, *given, **options)
    assert self.num_processes == 2
    AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP

Accelerator.__init__ = make
"""


def under_fsdp(python: Path, recipe: Path, folder: Path, status: int, *settings: str) -> None:
    """Run in two processes of FSDP2 with the shipped settings; on CPUs accelerate would take FSDP for DDP."""
    shipped = yaml.safe_load((ACCELERATE / "fsdp.yaml").read_text())["fsdp_config"]
    environment = {key.upper(): str(value) for key, value in shipped.items()} | ON_CPU
    words = command(python, "ddp", 2, recipe, folder / "out", settings=(*IN_TWO_PASSES, *settings))
    run_by(AS_FSDP + AS_IT_IS, words, folder, environment, status)


def test_fsdp_steps_as_one_process(recipe: Path, alone: Path, warm_python: Path, tmp_path: Path) -> None:
    under_fsdp(warm_python, recipe, tmp_path, MISSED)
    assert_same_run(tmp_path / "out", alone, tolerance=1e-5)


# ---- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["single", "fsdp", "zero2", "zero3", "zero3-offload"])
def test_fp16_on_gpus_follows_fp32(config: str, recipe: Path, alone: Path, tmp_path: Path) -> None:
    """CUDA AMP, FSDP2 and DeepSpeed, on two GPUs where there are two; half precision moves losses a little."""
    if config.startswith("zero"):
        pytest.importorskip("deepspeed")
    processes = 1 if config == "single" else min(2, torch.cuda.device_count())
    settings = ("precision=fp16", "device=cuda")
    environment = {"OMP_NUM_THREADS": "1"}
    said = run(
        command(Path(sys.executable), config, processes, recipe, tmp_path / "out", settings=settings),
        environment,
        MISSED,
    )
    assert "error: " not in said
    assert finetuned(tmp_path / "out")["processes"] == processes
    # Only where each process has parts does each write its own.
    assert any((tmp_path / "out.run").glob("step-*/accelerate")) is (config != "single")
    rows, wanted = logged(tmp_path / "out"), logged(alone)
    for row, want in zip(rows, wanted, strict=True):
        assert (row["precision"], row["skipped"], row["tokens"]) == ("fp16", 0, want["tokens"])
        assert row["loss"] == pytest.approx(want["loss"], rel=0.02), row["step"]
        assert row["gradient_norm"] == pytest.approx(want["gradient_norm"], rel=0.05), row["step"]
    assert rows[0]["loss"] != wanted[0]["loss"]  # else it was fp32


# ---- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_names())
def test_a_recipe_is_printed_and_its_data_ship(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["recipe", name]) == 0
    text = capsys.readouterr().out
    assert text.encode() == (ROOT / "bf16_to_fp16" / "recipes" / f"{name}.yaml").read_bytes()
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = read_recipe(tmp_path / "recipe.yaml")
    for path in filter(None, (recipe.data.path, recipe.data.held_out_path)):
        assert path.startswith("shipped:") and next(texts(path))[0].strip()
    assert main(["recipe", name, "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["text"] == text and parse_recipe(printed["recipe"]) == recipe


def test_unknown_recipes_and_data_are_told_what_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (["recipe"], ["recipe", "flan-t5-bse"]):
        assert refused(capsys, *words).endswith("choose demo, flan-t5-base, flan-t5-xl, mt5, pegasus")
    said = refused(capsys, "audit", "shipped:t5", "--data", "shipped:held_out.txt")
    assert "shipped:t5 is not shipped; choose shipped:gemma3-bytes, shipped:" in said
