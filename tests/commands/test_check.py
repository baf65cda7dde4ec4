"""A checkpoint in another runtime: right, wrong, or computed in fp32 after all, which shows nothing.

The command is tried with torch as the other runtime; the real ones run where ``make runtimes`` has made their
environment.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.runtimes import torch_in

from bf16_to_fp16 import UserError, check, cli, convert
from bf16_to_fp16.demo import CHECKPOINTS
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.report.answers import RuntimeCheck
from bf16_to_fp16.run.batch import Batch
from bf16_to_fp16.run.runtime import Outcome, Runtime
from bf16_to_fp16.run.runtimes import NAMES, onnxruntime, openvino

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "bf16_to_fp16" / "demo_data" / CHECKPOINTS[0]
OF_T5 = [name for name in NAMES if name != "mlx-lm"]  # which tests/clients tries
PYTHON = ROOT / ".venv-runtimes" / "bin" / "python"


@pytest.fixture
def in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "RUNTIME", torch_in(torch.float16))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that fit fp16 and that overflow it, and one of another shape."""
    root = tmp_path_factory.mktemp("checked")
    models = {
        "fits": tiny.build("pegasus", factor=1.0),
        "overflows": tiny.build("pegasus"),
        "encoder": tiny.build("t5-encoder", factor=1.0),
    }
    return {name: tiny.save(model, root / name) for name, model in models.items()}


def test_a_checkpoint_that_fits_is_safe_and_its_source_is_shown_beside_it(
    folders: dict[str, Path], in_fp16: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", str(folders["fits"]), "--source", str(folders["overflows"]), "--runtime", "onnxruntime"]
    assert cli.main([*words, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert RuntimeCheck.model_validate(found).verdict == "safe"
    assert found["output"]["nonfinite"] == 0 < found["output"]["error"] < found["bf16"]["error"]
    assert found["source"]["nonfinite"] > 0 and found["source"]["error"] is None
    assert found["arithmetic"] | {"how": ""} == {
        "native": True,
        "products": {"float16": 2},
        "operations": {"float16": 3},
        "how": "",
    }
    out = capsys.readouterr().out
    assert "safe: finite" in out and "2 in float16" in out and "∞" in out


def test_a_checkpoint_that_overflows_is_unsafe(
    folders: dict[str, Path], in_fp16: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(folders["overflows"]), "--runtime", "onnxruntime"]) == 1
    assert "unsafe: the output gives inf or NaN" in capsys.readouterr().out


def test_zeros_are_no_better_than_infinities(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_in(torch.float16)

    def nothing(folder: Path, layout: Layout, batch: Batch) -> Outcome:
        outcome = right.run(folder, layout, batch)
        return Outcome(torch.zeros_like(outcome.values), outcome.device, outcome.arithmetic)

    monkeypatch.setattr(onnxruntime, "RUNTIME", Runtime("onnxruntime", "torch", nothing))
    found = check(folders["fits"], "onnxruntime")
    assert (found["verdict"], found["output"]["error"]) == ("unsafe", 1.0)
    shown = found._repr_html_()  # type: ignore[attr-defined]
    assert "unsafe: the output is further" in shown and "<td>in torch, bf16</td>" in shown and "<b>error 1</b>" in shown
    assert found["output"]["zeros"] == found["output"]["elements"]


def test_what_was_computed_in_fp32_is_no_evidence(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnxruntime, "RUNTIME", torch_in(torch.float32))
    assert cli.main(["check", str(folders["encoder"]), "--runtime", "onnxruntime"]) == 0
    out = capsys.readouterr().out
    assert "no evidence" in out and "safe:" not in out and "last hidden states" in out
    assert check(folders["overflows"], "onnxruntime")["verdict"] is None


def test_another_model_beside_it_is_refused(folders: dict[str, Path], in_fp16: None) -> None:
    with pytest.raises(UserError, match="different shapes"):
        check(folders["fits"], "onnxruntime", source=folders["encoder"])


def test_a_runtime_that_is_not_installed_is_one_line(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Runtime("openvino", "no_such_module", torch_in(torch.float16).run)
    monkeypatch.setattr(openvino, "RUNTIME", absent)
    assert cli.main(["check", str(folders["fits"]), "--runtime", "openvino"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: openvino is not installed") and said.count("\n") == 1
    assert "in a clone of the repository pip install '.[runtimes]'" in said


# --- the real ones ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every runtime makes of the T5 demo, converted, and of its source, in one process of their environment."""
    if not PYTHON.exists():
        pytest.skip("no .venv-runtimes; make runtimes")
    root = tmp_path_factory.mktemp("runtimes")
    convert(DEMO, root / "out", target="norm-safe", run_model=False)
    code = (
        "import json, sys; from bf16_to_fp16 import check; "
        "json.dump({r: check(sys.argv[1], r, source=sys.argv[2]) for r in sys.argv[4:]}, open(sys.argv[3], 'w'))"
    )
    command = [str(PYTHON), "-c", code, str(root / "out"), str(DEMO), str(root / "found.json"), *OF_T5]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    results: dict[str, Any] = json.loads((root / "found.json").read_text())
    return results


@pytest.mark.parametrize("name", OF_T5)
def test_the_demo_is_finite_and_nearer_to_fp32_than_bf16_in(name: str, found: dict[str, Any]) -> None:
    result = found[name]
    assert result["output"]["nonfinite"] == 0
    assert result["output"]["error"] < result["bf16"]["error"] / 10
    if not result["arithmetic"]["native"]:
        pytest.skip(f"{result['device']} does not compute in fp16: {result['arithmetic']['how']}")
    assert result["verdict"] == "safe"
    assert result["source"]["nonfinite"] or result["source"]["error"] > 0.1


def test_the_reference_evaluator_computes_everything_in_fp16(found: dict[str, Any]) -> None:
    arithmetic = found["onnx-reference"]["arithmetic"]
    assert arithmetic["native"] and set(arithmetic["operations"]) == {"float16"}
