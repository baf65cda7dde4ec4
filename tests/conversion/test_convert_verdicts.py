"""What convert says of its output: safe, proven, inexact or unsafe, and why."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.folders import compared

from bf16_to_fp16 import audit, certify, cli, convert
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.convert import convert_by, next_of
from bf16_to_fp16.conversion.options import Destination, Options, Provenance
from bf16_to_fp16.finetuning.run import attack_unproven
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.report.remedies import OUTPUT, WITHOUT_AUDIT, WITHOUT_EXACT
from bf16_to_fp16.report.schema import FinetuneEntry, Lineage, Report, Source, read
from bf16_to_fp16.rescaling import exponents
from bf16_to_fp16.results import dump


@pytest.mark.usefixtures("first_batch")
def test_a_model_shrunk_until_nothing_is_left_is_not_safe(tmp_path: Path) -> None:
    """Early layers 1e14 times smaller than late ones: fp16 has no room for both, and no overflow check can tell."""
    model = tiny.small("gated", factor=1.0)
    with torch.no_grad():
        model.shared.weight.mul_(1e-4)
        model.encoder.block[1].layer[1].DenseReluDense.wo.weight.mul_(1e10)
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.bfloat16().float())
    report = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out", target="norm-safe").report
    assert all(r["nonfinite"] == r["saturated"] == 0 for r in report["regimes"].values())
    assert report["verdict"] == "unsafe"
    assert any("bf16" in row["signal"] and "finetune" in row["remedy"] for row in report["unsafe"])
    assert report["next"].startswith("a smaller --margin shrinks less and can be enough")
    replayed = convert(tmp_path / "source", tmp_path / "again", plan=tmp_path / "out").report
    assert "--margin" not in replayed["next"] and '"target": "norm-safe"' in replayed["next"]


@pytest.mark.usefixtures("first_batch")
def test_without_an_audit_the_certificate_decides_and_a_few_rows_show_the_same_function(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("gated"), tmp_path / "source")
    usual = convert(source, tmp_path / "usual")
    with tiny.no_models():  # block by block
        assert cli.main(["convert", str(source), str(tmp_path / "out"), "--no-audit"]) == 0
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    assert (report["verdict"], report["proof"], report["regimes"]) == ("safe", "certified", {})
    few, whole = report["fidelity"], usual.report["fidelity"]
    assert few["kl_fp32"] == whole["kl_fp32"] == 0  # every bit
    assert 0 < few["kl_fp16"] < few["kl_bf16"] / 16 and few["positions"] == 8 * 5
    assert report["plan"]["residual_exponent"] == usual.plan.residual_exponent
    assert compared(source, tmp_path / "out") <= 1e-6


@pytest.mark.usefixtures("first_batch")
@pytest.mark.parametrize(("audited", "head"), [(False, 2.0**-3), (True, 2.0**-3), (False, 2.0**-20)])
def test_a_plan_that_changes_the_function_is_not_called_safe(
    audited: bool, head: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact weights and bounds that hold; a small head makes all probabilities alike, and no divergence shows it."""
    model = tiny.small("glm4")
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.sign(model.lm_head.weight) * head)
        for layer in model.model.layers:
            joint, down = layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight
            joint[len(joint) // 2 :] = torch.sign(joint[len(joint) // 2 :]) * 2.0**-26
            down.copy_(torch.sign(down) * 512)
    source = tiny.save(model, tmp_path / "source")
    right = convert(source, tmp_path / "right", run_model=False)
    folded = [e for name, e in right.plan.exponents.items() if name.endswith(".mlp.neuron")]
    assert right.safe and folded and all(isinstance(e, int) and e for e in folded)
    assert right.report["fidelity"]["kl_fp32"] < 1e-9
    monkeypatch.setattr(exponents, "all", lambda _: True, raising=False)  # of the factors of an axis
    wrong = convert(source, tmp_path / "wrong", run_model=audited, plan=right.out)
    assert wrong.report["weights"]["lossless_fraction"] == 1 and wrong.report["certificate"]["holds"]
    entry, *others = [entry for entry in wrong.report["unsafe"] if entry["kind"] == "inexact"]
    assert "hidden_states" in [each["signal"] for each in others]
    assert not wrong.safe and wrong.report["fidelity"]["squared_error_fp32"] > 1e-3
    assert "output in fp32 is not the source's" in entry["reason"]


@pytest.mark.usefixtures("first_batch")
def test_a_drift_above_bf16s_error_is_not_called_safe_though_bounds_hold(tmp_path: Path) -> None:
    """Gains of a hundredth beside one of 300,000 are lost in what fp16 stores of them less 1."""
    model = tiny.small("embeddinggemma", factor=1e-3)
    with torch.no_grad():
        for name, gains in model.named_parameters():
            if ".post_" in name:
                gains.copy_((0.01 * (torch.rand_like(gains) + 0.5)).bfloat16() - 1)
        model.layers[1].post_feedforward_layernorm.weight[0] = 300000 - 1
    result = convert(tiny.save(model, tmp_path / "source", torch.float32), tmp_path / "out", run_model=False)
    drift = result.plan.drift
    assert drift is not None and drift.relative_error > 0.2 and drift.measured_kl is not None
    assert drift.measured_kl == pytest.approx(drift.predicted_kl, rel=1e-3)
    assert drift.measured_max_logit_error == pytest.approx(drift.predicted_max_logit_error, rel=1e-2)
    assert result.report["certificate"]["holds"] and not result.safe
    entries = {entry["signal"]: entry for entry in result.report["unsafe"]}
    assert {"last_hidden_state", OUTPUT} <= entries.keys()
    assert all(e["kind"] == "inexact" and "--no-audit" in e["remedy"] for e in entries.values())
    assert drift.measured_kl == result.report["fidelity"]["kl_fp32"] > result.report["fidelity"]["kl_bf16"]


@pytest.mark.usefixtures("first_batch")
def test_what_is_unproven_decides_only_without_an_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.small("gated", factor=1.0)
    # Scores that no coupling moves: their bound passes 65504, what the probe reaches does not.
    attention = model.encoder.block[1].layer[0].SelfAttention
    attention.q.weight.data.mul_(75)
    attention.k.weight.data.mul_(75)
    source = tiny.save(model, tmp_path / "source")
    result = convert(source, tmp_path / "out", exact=True)
    assert (result.report["verdict"], result.report["proof"]) == ("safe", "observed")
    [*sites] = result.report["uncertified"]
    assert {s["name"].split(":")[0] for s in sites} == {"encoder.block.1.layer.0.SelfAttention"}
    assert all("no exact exponent" in s["reason"] and "finetune" in s["remedy"] and s["excess_bits"] > 0 for s in sites)
    capsys.readouterr()
    assert cli.main(["convert", str(source), str(tmp_path / "blind"), "--no-audit"]) == 1
    assert (tmp_path / "blind" / "model.safetensors").exists()
    # A run is what was not tried: it comes before a finetune, and is not offered where it was made or a plan given.
    assert f"next: {WITHOUT_AUDIT}; stay with bf16" in capsys.readouterr().out
    blind = read(Report, json.loads((tmp_path / "blind" / "fp16_report.json").read_text()))
    unseen = {"run_model": False}
    given: list[dict[str, Any]] = [{"exact": True}, {"exact": True} | unseen, {}, {"plan": "p"} | unseen]
    steps = [next_of(Options(**options), blind, "source", "out").partition(";")[0] for options in given]
    assert steps[:2] == [WITHOUT_EXACT, WITHOUT_EXACT] and all(step.startswith("stay with") for step in steps[2:])


@pytest.mark.parametrize("target", ["norm-safe", "fp16-accumulate", "train"])
def test_the_other_targets_are_certified_too(target: str, tmp_path: Path) -> None:
    source = tiny.save(tiny.small("gated"), tmp_path / "source")
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--target", target, "--no-audit"]) == 0
    report = certify(tmp_path / "out", target=target)
    assert report["verdict"] == "safe"
    if target != "train":
        assert any(s["kind"] == "squares" for s in report["certificate"]["sites"])
        assert certify(source, target=target)["verdict"] == "unsafe"


def test_a_runtime_that_is_not_reached_is_short_of_the_goal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.small("t5-encoder")
    model.shared.weight.data[5] *= 1e-3  # whose squares vanish where the others' fit
    source, out = tiny.save(model, tmp_path / "source"), tmp_path / "out"
    assert cli.main(["convert", str(source), str(out), "--target", "norm-safe"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "output: safe, but short of what was asked: not known to hold with norms in fp16: the mean square of" in said
    assert "next: use it in PyTorch, where it is safe" in said and "finetune" not in said
    report = read(Report, json.loads((out / "fp16_report.json").read_text()))
    assert report.short and report.tiers["torch"].holds and not report.tiers["norm-fp16"].holds
    assert convert(source, tmp_path / "half").safe


@pytest.mark.usefixtures("first_batch")
def test_for_training_the_output_is_run_as_in_training(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5-encoder", num_layers=1), tmp_path / "source")
    regimes = convert(source, tmp_path / "out", target="train").report["regimes"]
    names = {regime: {site["name"] for site in shown["sites"]} for regime, shown in regimes.items()}
    assert set(names) == {"stock", "amp", "half"}
    for sites in names.values():
        assert any(":grad" in name for name in sites) and any("dropout:" in name for name in sites)


@pytest.mark.usefixtures("first_batch")
def test_an_unsafe_conversion_says_what_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.small("gated", factor=1.0)
    model.encoder.block[1].layer[1].DenseReluDense.wi_0.weight.data.mul_(1e5)
    source = tiny.save(model, tmp_path / "source")
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--exact"]) == 1
    printed = capsys.readouterr().out
    assert "output: unsafe: overflows in " in printed and "next: " in printed
    assert "fp16_report.html" in printed and "wi_0" in printed
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    assert report["verdict"] == "unsafe" and "inexact" not in report and "--exact" in report["command"]
    assert all(v["reason"] and v["remedy"] and v["excess_bits"] < 100 for v in report["unsafe"])
    remedies = [v["remedy"] for v in report["unsafe"] if "wi_0" in v["signal"]]
    assert remedies and all("rescaling was not enough" in remedy and "finetune" in remedy for remedy in remedies)
    # A regime is offered as a way out only if nothing broke in it.
    broken = [v for v in report["unsafe"] if "regimes" in v]
    regimes = {regime for v in broken for regime in v["regimes"]}
    for offered in (v["remedy"].partition(", or use ")[2] for v in broken):
        assert all((name in offered) is (name not in regimes) for name in ("stock", "amp", "half"))


def test_what_a_search_breaks_of_a_finetunes_result_is_unsafe_and_holds_in_no_tier(tmp_path: Path) -> None:
    """Scores that the probe leaves just under the limit: no run is unclean, and 8 steps find an input past it."""
    torch.manual_seed(0)
    model, name = tiny.t5_encoder(num_layers=1), "encoder.block.0.layer.0.SelfAttention:scores"
    probed = audit(tiny.save(model, tmp_path / "small", torch.float32), regimes=("half",), attention=("eager",))
    most = next(site["amax"] for site in probed["regimes"]["half"]["sites"] if site["name"] == name)
    attention = model.encoder.block[0].layer[0].SelfAttention
    for linear in (attention.q, attention.k):
        linear.weight.data.mul_((0.93 * FP16_MAX / most) ** 0.5)
    source = open_checkpoint(tiny.save(model, tmp_path / "source", torch.float32))
    lineage = Lineage(source=Source.of(source), finetune=FinetuneEntry())
    reports, options = [], Options(target="half", exact=True)
    for steps in (0, 8):
        search = partial(attack_unproven, steps, Progress(quiet=True))
        provenance = Provenance("bf16-to-fp16 finetune recipe.yaml", lineage, source, search=search)
        place = Destination(tmp_path / f"out-{steps}")
        reports.append(convert_by(options, source.folder, place, provenance=provenance).report)
    unsearched, searched = reports
    assert unsearched["verdict"] == "safe" and unsearched["attack"] is None
    assert unsearched["tiers"]["torch"]["proof"] == "observed"
    assert all(not regime["nonfinite"] + regime["saturated"] for regime in searched["regimes"].values())
    assert searched["verdict"] == "unsafe" and searched["attack"]["steps"] == 8
    broken = {entry["signal"]: entry["reason"] for entry in searched["unsafe"]}
    assert "on an input that 8 gradient steps of search found" in broken[name]
    assert not any(tier["holds"] for tier in searched["tiers"].values())
    observed = {site["name"]: site["observed"] for site in searched["certificate"]["sites"]}
    assert observed[name] > FP16_MAX
    stored = json.loads((tmp_path / "out-8" / "fp16_report.json").read_text())
    assert json.loads(json.dumps(dump(read(Report, stored)))) == stored
    assert cli.main(["verify", str(tmp_path / "out-0")]) == 0 and cli.main(["verify", str(tmp_path / "out-8")]) == 1
