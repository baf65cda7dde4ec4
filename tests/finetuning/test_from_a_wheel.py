"""The whole path on CPU processes, from a wheel in an empty folder: recipe, launch, a killed process, the same command
again, the certificate, the Hub."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from support.hub_server import WRITER, HubServer
from support.launching import ON_CPU, ROOT, kill
from support.learner import saved

SETTINGS = {
    "schedule.steps": 20,
    "schedule.learning_rate": "1e-3",
    "distillation.weight": 0.5,  # else nothing would be learnt: the conversion alone is certified
    "data.input_length": 48,
    "data.target_length": 24,
    "checkpointing.every": 1,
    "evaluation.attack_steps": 0,
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as its wheel installs it, without what it needs."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "bf16_to_fp16", tree / "bf16_to_fp16", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", tree, "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist"], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    shutil.rmtree(tree)
    return tmp_path / "site"


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return those that work in a folder, whoever began them."""
    there = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(folder):
                there.append(process)
    return there


def test_from_a_wheel_to_the_hub_with_a_process_killed_on_the_way(
    installed: Path, hub: HubServer, warm_python: Path, tmp_path: Path
) -> None:
    source, empty = saved(tmp_path / "source", 1, dtype=torch.bfloat16), tmp_path / "empty"
    empty.mkdir()
    given = {"PYTHONPATH": str(installed), "HF_TOKEN": WRITER, "HF_HOME": str(tmp_path / "home"), **ON_CPU}
    start = {
        "cwd": empty,
        "env": os.environ | given,
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    program = [sys.executable, str(installed / "bin" / "bf16-to-fp16")]

    def run(*words: str, status: int = 0) -> tuple[str, str]:
        done = subprocess.run([*program, *words], timeout=400, **start)  # type: ignore[call-overload]
        assert done.returncode == status, done.stderr
        return done.stdout, done.stderr

    (empty / "recipe.yaml").write_text(run("recipe", "flan-t5-base")[0])
    settings = [word for key, value in {"source": source, **SETTINGS}.items() for word in ("--set", f"{key}={value}")]
    launch = ["launch", "recipe.yaml", "--gpus", "2", "--run", *settings]

    # What is killed needs no wheel.
    first = subprocess.Popen([warm_python, "-m", "bf16_to_fp16", *launch], **start)  # type: ignore[call-overload]
    try:
        for _ in range(6000):
            if list((empty / "flan-t5-base-fp16.run").glob("step-0000000[2-9]")):
                break
            assert first.poll() is None, first.communicate()[1]
            time.sleep(0.02)
        family = processes_in(empty)
        next(process for process in family if process.environ().get("RANK") == "1").kill()
        said, error = first.communicate(timeout=60)
    finally:
        if first.poll() is None:
            kill(first)
    assert first.returncode == 2
    assert (
        error.splitlines()[-1] == "error: process 1 was ended by SIGKILL; the same command goes on from the last state"
    )
    assert "Traceback" not in error and not (empty / "flan-t5-base-fp16").exists()
    assert said.splitlines()[0].startswith("# no GPU is here: 2 CPU processes over gloo, ")
    assert "-m bf16_to_fp16 finetune recipe.yaml --set source=" in said.splitlines()[-1]
    assert not psutil.wait_procs(family, timeout=20)[1]

    said, error = run(*launch)
    assert "Continuing from step " in error and "output: safe: proven for every input" in said
    report = json.loads((empty / "flan-t5-base-fp16" / "fp16_report.json").read_text())
    assert (report["verdict"], report["proof"]) == ("safe", "certified") and report["certificate"]["holds"]
    assert (report["finetune"]["steps"], report["finetune"]["processes"]) == (20, 2)
    run("publish", "flan-t5-base-fp16", "me/mine", "-y", "--endpoint", hub.endpoint)
    assert {"model.safetensors", "fp16_report.json", "README.md", "config.json"} <= set(hub.files("me/mine"))
    assert hub.files("me/mine")["model.safetensors"] == (empty / "flan-t5-base-fp16" / "model.safetensors").read_bytes()


def test_the_status_of_a_launch_is_that_of_the_command(tmp_path: Path, warm_python: Path) -> None:
    """An error of a process is one line, and 2."""
    source = saved(tmp_path / "source", 1)
    (tmp_path / "recipe.yaml").write_text(f"source: {source}\nout: out\ndata: {{path: shipped:held_out.txt}}\n")
    words = ["launch", "recipe.yaml", "--gpus", "2", "--run", "--set", "data.first_sentinel=999"]
    command = [str(warm_python), "-m", "bf16_to_fp16", *words]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | ON_CPU, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("error: ") and "data.first_sentinel is 999" in line
