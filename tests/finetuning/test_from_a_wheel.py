"""The package as its wheel installs it, in an empty folder: recipe, finetune, the certificate."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.launching import ON_CPU, ROOT
from support.learner import saved

SETTINGS = {
    "rescale": "false",  # the start would be converted as the end is
    "schedule.steps": 2,
    "schedule.learning_rate": "1e-3",
    "distillation.weight": 0.5,  # else nothing would be learnt: the conversion alone is certified
    "data.input_length": 48,
    "data.target_length": 24,
    "evaluation.attack_steps": 0,
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "bf16_to_fp16", tree / "bf16_to_fp16", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", tree, "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist"], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--target", tmp_path / "site", wheel], check=True)
    return tmp_path / "site"


def test_a_wheel_has_every_file_and_trains_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    packages = (root / "bf16_to_fp16" for root in (installed, tmp_path / "tree"))
    there, wanted = ({path.relative_to(root) for path in root.rglob("*") if path.is_file()} for root in packages)
    assert there == wanted
    source, empty = saved(tmp_path / "source", 1, dtype=torch.bfloat16), tmp_path / "empty"
    empty.mkdir()

    def run(*words: str) -> str:
        program = [sys.executable, str(installed / "bin" / "bf16-to-fp16"), *words]
        environment = os.environ | {"PYTHONPATH": str(installed), **ON_CPU}
        done = subprocess.run(program, cwd=empty, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (empty / "recipe.yaml").write_text(run("recipe", "flan-t5-base"))
    settings = [word for key, value in {"source": source, **SETTINGS}.items() for word in ("--set", f"{key}={value}")]
    assert "output: safe: proven for every input" in run("finetune", "recipe.yaml", *settings)
    report = json.loads((empty / "flan-t5-base-fp16" / "fp16_report.json").read_text())
    assert (report["verdict"], report["proof"]) == ("safe", "certified") and report["certificate"]["holds"]
    assert report["finetune"]["steps"] == 2 and str(source) not in json.dumps(report)
