"""Every example runs as it stands, without a network, and does what it says."""

import os
import re
import subprocess
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run(name: str, folder: Path, python: Path) -> str:
    """Return what an example prints, run in an empty folder by an interpreter that has its imports."""
    script = next(path for path in EXAMPLES if path.stem == name)
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, script], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    # A Trainer makes its own folder, whether it saves or not.
    assert {path.name for path in folder.iterdir()} <= {"trainer_output"}
    return shown


def headrooms(shown: str) -> list[float]:
    return [float(bits) for bits in re.findall(r"^step \d+: .*?headroom (-?[\d.]+) bits", shown, re.MULTILINE)]


def test_convert_and_generate(tmp_path: Path, warm_python: Path) -> None:
    shown = run("convert_and_generate", tmp_path, warm_python)
    assert "safe: True, proof: certified" in shown
    fp16, bf16 = map(float, re.findall(r"([\d.e-]+) in (?:fp16|bf16)", shown))
    assert 0 < fp16 < bf16 / 10
    made = re.search(r"generated: '(.+)'", shown)
    # The model was trained on English: it fills the gap with words.
    assert made and re.search(r"[a-z]{2,} [a-z]{2,}", made[1])


def test_a_diffusion_encoder_in_pure_fp16(tmp_path: Path, warm_python: Path) -> None:
    shown = run("diffusion_encoder", tmp_path, warm_python)
    errors = {what: float(error) for what, error in re.findall(r"^(.+): relative error (\S+)", shown, re.MULTILINE)}
    assert errors["converted, fp16"] < errors["source in bf16"] / 4
    assert not errors["source in fp16"] < 1  # NaN, or far off where stock code clamps


@pytest.mark.exhaustive
def test_the_penalty_in_a_plain_loop_brings_headroom(tmp_path: Path, warm_python: Path) -> None:
    bits = headrooms(run("penalty_loop", tmp_path, warm_python))
    assert len(bits) == 8 and bits[-1] > bits[1]


def test_the_penalty_brings_a_model_of_no_family_inside_fp16(tmp_path: Path, warm_python: Path) -> None:
    bits = headrooms(run("penalty_any_model", tmp_path, warm_python))
    assert bits[0] < -2 and bits[-1] > 0


def test_the_penalty_in_a_trainer_is_part_of_its_loss_and_its_log(tmp_path: Path, warm_python: Path) -> None:
    shown = run("trainer_penalty", tmp_path, warm_python)
    assert len(re.findall(r"'headroom_bits': '?\d", shown)) == len(re.findall(r"'penalty': '?\d", shown)) == 4
    assert len(losses(shown)) == 4 and all(0.5 < loss < 5 for loss in losses(shown))


def losses(shown: str) -> list[float]:
    return [float(x) for x in re.findall(r"'loss': '?([\d.]+)", shown)]


@pytest.mark.exhaustive
def test_a_trainer_finetunes_a_model_made_safe_and_it_is_undone(tmp_path: Path, warm_python: Path) -> None:
    shown = run("train_fp16_trainer", tmp_path, warm_python)
    assert "the residual stream is 2^-" in shown and "Certified in training" in shown
    assert len(losses(shown)) == 8 and losses(shown)[-1] < losses(shown)[0] - 0.3
    assert "undone, the same logits: True" in shown


@pytest.mark.exhaustive
def test_lora_on_a_converted_checkpoint_goes_to_the_original(tmp_path: Path, warm_python: Path) -> None:
    pytest.importorskip("peft")
    shown = run("lora_fp16", tmp_path, warm_python)
    assert len(losses(shown)) == 8 and losses(shown)[-1] < losses(shown)[0] - 0.3
    assert re.search(r"^merged: (safe|unsafe)$", shown, re.MULTILINE)
    apart, of = map(float, re.findall(r"of the logits: (\S+) of (\S+)", shown)[0])
    assert apart < 1e-5 * of  # the conversion rounds a few of the smallest weights


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_has_a_test(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60 and f'run("{path.stem}"' in Path(__file__).read_text(encoding="utf-8")
    assert f"python examples/{path.name}" in text
