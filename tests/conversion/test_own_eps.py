"""Whoever reads a converted checkpoint with an eps of their own computes the source all the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import exhaustive, tiny, tools
from support.forging import forge

from bf16_to_fp16 import UserError, convert, undo, verify
from bf16_to_fp16.bounds.arithmetic import full_precision
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion import planning
from bf16_to_fp16.conversion.convert import next_of
from bf16_to_fp16.conversion.options import Options
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.report.remedies import INEXACT, LET_EPS_GO, TOO_FEW_BITS
from bf16_to_fp16.report.schema import Report, read

WIDE = tools.SHAPE | {"d_model": 128, "d_ff": 192, "d_kv": 16, "num_heads": 4, "num_layers": 3}
IDS = torch.arange(2, 90).view(4, 22)


def quiet_at_first(kind: str, eps: float = 1e-6) -> Any:
    """Return an encoder whose stream begins so small, beside what it comes to, that its first norm feels eps."""
    model = tiny.build(f"{kind}-encoder", **WIDE, layer_norm_epsilon=eps)
    with torch.no_grad():
        shared = model.shared.weight
        shared.mul_(0.25 / shared.square().mean().sqrt())
        shared.copy_(shared.bfloat16())
    return model


def read_by_wan(config: Any, file: Path) -> Any:
    made = tools.Wan(config)
    made.load_state_dict(load_file(file), strict=True)
    return made


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).double().square().sum() / wanted.double().square().sum())


def test_wan_with_an_eps_of_its_own_is_at_most_a_sixteenth_as_far_off_as_bf16(tmp_path: Path) -> None:
    model = quiet_at_first("umt5")
    out = tmp_path / "out.safetensors"
    result = convert(tiny.save(model, tmp_path / "source"), out, layout="wan")
    assert result.safe and result.plan.eps_held and result.plan.eps == 1e-6
    with torch.no_grad(), full_precision():
        wanted = model(IDS)[0]
        bf16 = error(model.bfloat16()(IDS)[0].float(), wanted)
        reader = read_by_wan(model.config, out)
        wide = error(reader(IDS), wanted)
        half = error(reader.half()(IDS).float(), wanted)
    assert wide < bf16 / 16 and half < bf16 / 16


def test_a_target_that_costs_more_than_bf16_is_never_safe(tmp_path: Path) -> None:
    source = tiny.save(quiet_at_first("t5"), tmp_path / "source")
    result = convert(source, tmp_path / "out", eps="fixed", target="norm-safe")
    close = result.report["fidelity"]
    assert close["kl_fp16"] > close["kl_bf16"] and not result.safe
    entry, *_ = [entry for entry in result.report["unsafe"] if entry["kind"] == "inexact"]
    assert entry["reason"] == TOO_FEW_BITS and entry["remedy"] == INEXACT


def test_a_config_with_another_eps_than_the_tool_is_planned_for_the_tool_and_comes_back(tmp_path: Path) -> None:
    model, out = quiet_at_first("umt5", eps=3e-6), tmp_path / "out.safetensors"
    result = convert(tiny.save(model, tmp_path / "source"), out, layout="wan")
    assert result.plan.eps == open_checkpoint(out).config["layer_norm_epsilon"] == 1e-6
    with torch.no_grad(), full_precision():
        found = error(read_by_wan(model.config, out)(IDS), model(IDS)[0])
        assert found < error(model.bfloat16()(IDS)[0].float(), model.float()(IDS)[0])
    assert verify(out, original=tmp_path / "source", run_model=False)["problems"] == []
    back = json.loads((undo(out, tmp_path / "back") / "config.json").read_text())
    assert back["layer_norm_epsilon"] == 3e-6


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("held")
    source = tiny.save(tiny.small("llama"), folder / "source")
    return source, convert(source, folder / "out", eps="fixed")


def test_a_folder_for_a_reader_with_a_fixed_eps_keeps_the_configs(held: Any) -> None:
    source, result = held
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, result.out))
    assert before["rms_norm_eps"] == after["rms_norm_eps"] == result.plan.eps
    assert result.safe and result.plan.residual_exponent < 0 and result.report["plan"]["eps_held"] is True
    drift = result.plan.drift
    assert drift.predicted_kl == pytest.approx(drift.measured_kl, rel=0.1, abs=1e-12)
    assert drift.measured_kl < result.report["fidelity"]["kl_bf16"] / 128
    assert result.report["command"].endswith(" --eps fixed")
    # Where it ends unsafe the way out is to let the eps go.
    report = read(Report, result.report)
    assert next_of(Options(eps="fixed"), report, "source", "out").startswith(f"{LET_EPS_GO}; ")
    assert LET_EPS_GO not in next_of(Options(), report, "source", "out")


def test_its_drift_is_that_of_stock_code_with_the_eps_that_the_exponents_ask_for(held: Any) -> None:
    source, result = held
    norms, r = resolve(open_checkpoint(source)).norms, result.plan.residual_exponent
    ours, theirs = load(result.out, torch.float32), load(source, torch.float32)
    for path in norms:
        norm = theirs.get_submodule(path)
        norm.variance_epsilon *= 4.0**-r
    with torch.no_grad(), full_precision():
        assert error(ours(IDS).logits, theirs(IDS).logits) < 1e-12


def test_verify_and_undo_hold_the_eps_too(held: Any, tmp_path: Path) -> None:
    source, result = held
    found = verify(result.out, original=source, run_model=False)
    assert found["problems"] == [] and found["checks"]["replay"] == "passed"
    back = undo(result.out, tmp_path / "back")
    one, other = (load_file(folder / "model.safetensors") for folder in (source, back))
    lost, weights = sum(int((one[name] != other[name]).sum()) for name in other), result.report["weights"]
    assert set(one) == set(other) and lost <= round(weights["elements"] * (1 - weights["lossless_fraction"]))
    assert json.loads((back / "config.json").read_text())["rms_norm_eps"] == result.plan.eps


def test_a_plan_is_replayed_with_its_own_eps_and_refused_for_another_reader(held: Any, tmp_path: Path) -> None:
    source, result = held
    again = convert(source, tmp_path / "again", plan=result.out, run_model=False)
    assert again.out is not None
    assert again.plan.eps_held and again.plan.eps == result.plan.eps
    assert (again.out / "model.safetensors").read_bytes() == (result.out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="all that --eps would choose; leave out one of the two"):
        convert(source, tmp_path / "x", plan=result.out, eps="fixed", run_model=False)
    encoder = tiny.save(tiny.build("umt5-encoder", **WIDE), tmp_path / "encoder")
    rescaled = convert(encoder, tmp_path / "rescaled", run_model=False)
    with pytest.raises(UserError, match=r"the plan is for an eps of .*; leave out --plan"):
        convert(encoder, tmp_path / "x.safetensors", plan=rescaled.out, layout="wan", run_model=False)
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.safetensors").exists()


def test_a_plan_whose_eps_is_not_what_it_says_is_found_out(held: Any, tmp_path: Path) -> None:
    _, result = held
    folder = Path(shutil.copytree(result.out, tmp_path / "out"))
    forge(folder, {"plan": result.report["plan"] | {"eps_held": False}})
    found = verify(folder, run_model=False)["problems"]
    assert any(problem["reason"].startswith(f"has an eps of {result.plan.eps}, and ") for problem in found)


@pytest.mark.parametrize("kind", exhaustive.beyond(["qwen3"], ["qwen3", "t5gemma", "pegasus"]))
def test_other_families_take_it_as_well(kind: str, tmp_path: Path) -> None:
    """Norms of queries and keys, norms behind a sublayer, and norms whose eps no config can say at any rate."""
    source = tiny.save(tiny.small(kind), tmp_path / "source")
    result = convert(source, tmp_path / "out", eps="fixed")
    close = result.report["fidelity"]
    assert result.safe and close["kl_fp16"] < close["kl_bf16"]
    assert result.plan.eps_held == (kind != "pegasus")
    assert verify(tmp_path / "out", original=source, run_model=False)["problems"] == []


def test_gains_stored_less_1_are_corrected_as_was_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "uncorrected", lambda planned: planned)  # which is nearer here
    result = convert(tiny.save(tiny.small("gemma"), tmp_path / "source"), tmp_path / "out", eps="fixed")
    drift = result.plan.drift
    assert result.plan.gain_correction and drift is not None
    assert drift.measured_kl == pytest.approx(drift.predicted_kl, rel=1e-3)
