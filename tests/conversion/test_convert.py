"""The main job from folder to folder, on models that overflow fp16, and what is said of its output and why."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import brief, exhaustive, tiny
from support.folders import compared
from support.forging import plan_file
from support.program import refused
from transformers import AutoModelForSequenceClassification, ByT5Tokenizer

from bf16_to_fp16 import UserError, audit, certify, cli, convert, make_fp16_safe, undo, verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.checkpoint.recorded import CONVERTED_KEY
from bf16_to_fp16.conversion.convert import convert_by, next_of
from bf16_to_fp16.conversion.options import Destination, Options, Provenance
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.finetuning.run import attack_unproven
from bf16_to_fp16.measuring import probe
from bf16_to_fp16.measuring.batch import describe_batches
from bf16_to_fp16.measuring.meter import observe_ranges
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.regimes import audit_folder
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.report.remedies import OUTPUT
from bf16_to_fp16.report.schema import FinetuneEntry, Lineage, Report, Source, read
from bf16_to_fp16.rescaling import exponents
from bf16_to_fp16.rescaling.apply import edited_config
from bf16_to_fp16.rescaling.plan import Plan, mark_of
from bf16_to_fp16.results import dump

HEADS = ("t5-classifier", "t5-token-classifier", "t5-spans", "llama-reward", "qwen3-labels", "gemma2-classifier")
GEMMA = ("gemma3", "embeddinggemma", "gemma2")
LLAMA = ("llama-biased", "qwen3", "glm4", "olmo2")
PEGASUS = ("pegasus", "mbart")
KINDS = ("t5", "gated", "umt5", "t5-encoder", *PEGASUS, *HEADS, *GEMMA, *LLAMA)
"""One kind for each way in which a conversion can go: tied and untied, with eps in the config and without, encoders,
every head, gains less 1, biases and norms behind sublayers. The contract of families draws from all kinds, converts
and undoes; ``test_stock_loading`` compares the outputs of most that are left out here."""

FEW = ("gated", "t5-spans", "pegasus", "gemma2")  # those of which no other shows the same


@pytest.mark.parametrize("kind", exhaustive.beyond(FEW, KINDS))
def test_half_is_broken_before_and_clean_and_close_after(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.save(tiny.small(kind), tmp_path / "source")
    result = convert(source, tmp_path / "out")
    monkeypatch.setattr(probe, "audit_batches", brief.AUDITED)  # of some models random ids alone overflow
    before = audit(source, regimes=("half",), attention=("eager",))
    assert before["verdict"] == "unsafe" and before["regimes"]["half"]["nonfinite"] > 0
    assert result.safe
    report = result.report
    for regime in report["regimes"].values():
        assert regime["nonfinite"] == 0 and regime["saturated"] == 0
    assert report["regimes"]["half"]["headroom_bits"] >= 1
    assert report["proof"] == "certified" and report["certificate"]["holds"] and report["uncertified"] == []
    half = {site["name"]: site["amax"] for site in report["regimes"]["half"]["sites"]}
    for site in report["certificate"]["sites"]:
        assert site["observed"] == half.get(site["name"]) and (site["observed"] or 0) <= site["bound"]
    # Of two or three labels one row can decide the mean: from seed to seed it is 12 to 320 times.
    # Of random models with outliers in the gains behind sublayers it is 11 times, and 30 to 70 with more batches.
    # Gains that are stored less 1 cannot all be carried over, and in so small a model they are many.
    close, weights = report["fidelity"], report["weights"]
    assert close["kl_fp16"] <= close["kl_bf16"] / (4 if kind in HEADS or "gemma" in kind else 16)
    corrected = len(result.plan.gain_correction) * 24  # of a norm that drifts
    assert weights["lossless_fraction"] >= (0.99 if "gemma" in kind else 0.999) - corrected / weights["elements"]
    assert weights["nonfinite"] == 0


def test_a_reward_without_a_padding_token_is_converted_verified_made_safe_and_taken_back(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("llama-reward", pad_token_id=None), tmp_path / "source")
    report = convert(source, tmp_path / "out", run_model=False).report
    assert (report["verdict"], report["proof"]) == ("safe", "certified")
    assert report["fidelity"]["measure"] == "relative squared error"  # one label is no choice
    assert verify(tmp_path / "out", original=source, run_model=False)["verified"]
    undo(tmp_path / "out", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(weight, back[name]) for name, weight in load_file(source / "model.safetensors").items())
    model = AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.arange(3, 20)[None]
    before = model(ids).logits
    make_fp16_safe(model)
    assert torch.equal(model(ids).logits, before) and model.config.pad_token_id is None
    half = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float16).eval()
    torch.testing.assert_close(half(ids).logits.float(), before, rtol=0.02, atol=2e-3)


def test_a_plan_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("pegasus"), tmp_path / "source")
    plan = plan_file(tmp_path / "plan.json", Plan(family="t5", residual_exponent=-4))
    for dry_run in (True, False):
        with pytest.raises(UserError, match="use the plan of this checkpoint"):
            convert(source, tmp_path / "out", plan=plan, dry_run=dry_run)
    plan.write_text(plan.read_text().replace('"half"', '"x"'))
    with pytest.raises(UserError, match="target is not what convert writes"):
        convert(source, tmp_path / "out", plan=plan)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("whole_probe_once")
def test_data_is_run_besides_the_probe_and_from_the_report_the_audit_is_repeated(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5", num_layers=1, num_decoder_layers=1), tmp_path / "source")
    ByT5Tokenizer(extra_ids=0).save_pretrained(source)
    text = tmp_path / "data.txt"
    text.write_text("IN UPPER CASE, OF WHICH EVERY BYTE IS IN THE VOCABULARY OF 97.\n" * 3)
    out = tmp_path / "out"
    assert cli.main(["convert", str(source), str(out), "--data", str(text)]) == 0
    report = json.loads((out / "fp16_report.json").read_text())
    model = load(source, torch.float32)
    plain = probe.audit_batches(model.config, source, None)
    inputs = plain + batches(model.config, source, str(text))

    masks = [b.decoder_attention_mask for b in inputs if b.head and b.decoder_attention_mask is not None]
    assert report["fidelity"]["positions"] == sum(int(mask.sum()) for mask in masks)
    before = {(row["module"], row["side"]): row["before"] for row in report["signals"] if row["kind"] != "scores"}
    reached, less = observe_ranges(model, inputs), observe_ranges(model, plain)
    assert before == {(m, s): float(getattr(reached[m], s).amax.max()) for m, s in before}
    assert before != {(m, s): float(getattr(less[m], s).amax.max()) for m, s in before}
    assert report["regimes"]["half"] != dump(audit_folder(out, regimes=("half",), inputs=plain)["half"])
    # From what the report says the audit is repeated: the same inputs give the same figures.
    listed = report["inputs"]
    assert listed["seed"] == 0 and listed["data"] == {"name": "data.txt", "rows": 3}
    kinds = ["random ids", "long", "repeated", "padded", "short", "vocabulary sweep", "generate", "data", "generate"]
    assert [entry["kind"] for entry in listed["batches"]] == kinds
    assert str(tmp_path) not in json.dumps(listed) and report["command"].endswith("--data data.txt")
    again = audit(out, regimes=("half",), data=str(text), seed=listed["seed"])
    assert again["inputs"] == listed and again["regimes"]["half"] == report["regimes"]["half"]
    others = probe.audit_batches(model.config, source, str(text), seed=8)
    assert describe_batches(others, seed=8)["sha256"] != listed["sha256"]


@pytest.mark.parametrize(
    ("kind", "r", "config", "edits"),
    [
        ("t5", -3, {}, {"layer_norm_epsilon": 1e-6 / 64}),
        ("t5", 0, {}, {}),
        ("t5", -3, {"layer_norm_epsilon": ...}, {"layer_norm_epsilon": 1e-6 / 64}),
        ("t5", 0, {"layer_norm_epsilon": ...}, {}),
        ("t5-encoder", -3, {"pad_token_id": None, "layer_norm_epsilon": 2e-6}, {"layer_norm_epsilon": 2e-6 / 64}),
        ("gated", 2, {"tie_word_embeddings": False}, {"layer_norm_epsilon": 1e-6 * 16}),
        ("gated", 0, {"tie_word_embeddings": True, "scale_decoder_outputs": False}, {"tie_word_embeddings": False}),
        ("gated", 0, {"tie_word_embeddings": True}, {}),  # stock code takes it as "scale the outputs"
        ("mt5", 0, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
        ("umt5", 0, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
        ("pegasus", -3, {}, {}),
        (
            "t5 apart",
            -1,
            {"scale_decoder_outputs": True},
            {"layer_norm_epsilon": 1e-6 / 4, "tie_word_embeddings": False, "scale_decoder_outputs": False},
        ),
        ("pegasus apart", -3, {}, {"tie_word_embeddings": False}),
    ],
)
def test_only_the_plans_config_keys_change(kind: str, r: int, config: dict[str, Any], edits: dict[str, Any]) -> None:
    """Three dots stand for a key that is absent."""
    source = ModelTensors(tiny.small(kind.split()[0]))
    for key in ("dtype", "torch_dtype", "scale_decoder_outputs"):
        source.config.pop(key, None)
    config = source.config | {"tie_word_embeddings": True} | config | {"torch_dtype": "bfloat16"}
    source.config = {key: value for key, value in config.items() if value is not ...}
    layout = resolve(source, untie="apart" in kind)
    plan = Plan(family=layout.family.name, residual_exponent=r)
    told = {CONVERTED_KEY: mark_of(plan)} if r else {}
    assert edited_config(layout, plan) == source.config | edits | {"torch_dtype": "float16"} | told


@pytest.mark.parametrize("keys", [["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"], []])
def test_the_dtype_is_written_under_the_keys_that_a_config_has(keys: list[str]) -> None:
    source = ModelTensors(tiny.small("t5-encoder"))
    for key in ("dtype", "torch_dtype"):
        source.config.pop(key, None)
    source.config |= dict.fromkeys(keys, "bfloat16")
    expected = source.config | dict.fromkeys(keys or ["torch_dtype"], "float16")
    assert edited_config(resolve(source), Plan(family="t5")) == expected


def test_steps_name_target_and_source(tmp_path: Path, capsys: pytest.CaptureFixture[str], first_batch: None) -> None:
    source = tiny.save(tiny.small("t5-encoder", num_layers=1), tmp_path / "source")
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--target", "norm-safe"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(set(said)) == len(said) and "Planning the exponents for use with norms in fp16" in said
    assert "Bounding every site of the source with norms in fp16" in said
    assert cli.main(["certify", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "any input: in PyTorch " in out and out.count("in PyTorch ") == 2  # and in a title


def test_a_disk_that_is_too_small_is_said_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.save(tiny.small("t5-encoder"), tmp_path / "source")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    said = refused(capsys, "convert", source, tmp_path / "out")
    assert " kB and its disk has 1.0 kB; free some space or choose another output path" in said
    assert "Observing" not in said and not (tmp_path / "out").exists()


def test_a_model_shrunk_until_nothing_is_left_is_not_safe(first_batch: None, tmp_path: Path) -> None:
    """Early layers 1e14 times smaller than late ones: fp16 has no room for both, and no overflow check can tell."""
    model = tiny.small("t5-encoder", factor=1.0)
    with torch.no_grad():
        model.shared.weight.mul_(1e-4)
        model.encoder.block[1].layer[1].DenseReluDense.wo.weight.mul_(1e10)
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.bfloat16().float())
    report = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out", target="norm-safe").report
    assert all(r["nonfinite"] == r["saturated"] == 0 for r in report["regimes"].values())
    assert report["verdict"] == "unsafe"
    assert any("bf16" in row["signal"] and "finetune" in row["remedy"] for row in report["unsafe"])
    replayed = convert(tmp_path / "source", tmp_path / "again", plan=tmp_path / "out", run_model=False).report
    assert '"target": "norm-safe"' in replayed["next"]


@pytest.mark.usefixtures("first_batch")
def test_without_an_audit_the_certificate_decides_and_a_few_rows_show_the_same_function(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("gated"), tmp_path / "source")
    usual = convert(source, tmp_path / "usual", dry_run=True)
    with tiny.no_models():  # block by block
        assert cli.main(["convert", str(source), str(tmp_path / "out"), "--no-audit"]) == 0
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    assert (report["verdict"], report["proof"], report["regimes"]) == ("safe", "certified", {})
    few = report["fidelity"]
    assert few["kl_fp32"] == 0 < few["kl_fp16"] < few["kl_bf16"] / 16 and few["positions"] == 8 * 5
    assert report["plan"]["residual_exponent"] == usual.plan.residual_exponent
    assert compared(source, tmp_path / "out") <= 1e-6


@pytest.mark.parametrize(("head", "audited"), [(2.0**-3, True), (2.0**-20, False)])
def test_a_plan_that_changes_the_function_is_not_called_safe(
    first_batch: None, audited: bool, head: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert "output in fp32 differs from the source's" in entry["reason"]


def test_a_drift_above_bf16s_error_is_not_called_safe_though_bounds_hold(first_batch: None, tmp_path: Path) -> None:
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
    model = tiny.small("t5-encoder", factor=1.0)
    # Scores that no coupling moves: their bound passes 65504, what the probe reaches does not.
    attention = model.encoder.block[1].layer[0].SelfAttention
    attention.q.weight.data.mul_(75)
    attention.k.weight.data.mul_(75)
    source = tiny.save(model, tmp_path / "source")
    result = convert(source, tmp_path / "out", exact=True)
    assert (result.report["verdict"], result.report["proof"]) == ("safe", "observed")
    [*sites] = result.report["uncertified"]
    assert {s["name"].split(":")[0] for s in sites} == {"encoder.block.1.layer.0.SelfAttention"}
    assert all("without an edit" in s["reason"] and "finetune" in s["remedy"] and s["excess_bits"] > 0 for s in sites)
    capsys.readouterr()
    assert cli.main(["convert", str(source), str(tmp_path / "blind"), "--no-audit"]) == 1
    assert (tmp_path / "blind" / "model.safetensors").exists()
    # A run is what was not tried: it comes before a finetune, and is not offered where it was made or a plan given.
    assert "next: leave out --no-audit, so that convert can try more plans; stay with bf16" in capsys.readouterr().out
    blind = read(Report, json.loads((tmp_path / "blind" / "fp16_report.json").read_text()))
    unseen = {"run_model": False}
    given: list[dict[str, Any]] = [{"exact": True}, {"exact": True} | unseen, {}, {"plan": "p"} | unseen]
    steps = [next_of(Options(**options), blind, "source", "out").partition(";")[0] for options in given]
    assert [step.partition(",")[0] for step in steps[:2]] == ["leave out --exact", "leave out --exact and --no-audit"]
    assert all(step.startswith("stay with") for step in steps[2:])


@pytest.mark.parametrize("target", ["norm-safe", "fp16-accumulate", "train"])
def test_the_other_targets_are_certified_too(target: str, tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5-encoder"), tmp_path / "source")
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--target", target, "--no-audit"]) == 0
    report = certify(tmp_path / "out", target=target)
    assert report["verdict"] == "safe"
    if target != "train":
        assert any(s["kind"] == "squares" for s in report["certificate"]["sites"])
        assert certify(source, target=target)["verdict"] == "unsafe"


def test_a_runtime_that_is_not_reached_is_short_of_the_goal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.small("t5-encoder", num_layers=1)
    model.shared.weight.data[5] *= 1e-3  # whose squares vanish where the others' fit
    source, out = tiny.save(model, tmp_path / "source"), tmp_path / "out"
    assert cli.main(["convert", str(source), str(out), "--target", "norm-safe"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "output: safe, but short of what was asked: not known to hold with norms in fp16: the mean square of" in said
    assert "next: use it in PyTorch, where it is safe" in said and "finetune" not in said
    report = read(Report, json.loads((out / "fp16_report.json").read_text()))
    assert report.short and report.tiers["torch"].holds and not report.tiers["norm-fp16"].holds
    assert convert(source, tmp_path / "half", run_model=False).safe


def test_for_training_the_output_is_run_as_in_training(first_batch: None, tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5-encoder", num_layers=1), tmp_path / "source")
    regimes = convert(source, tmp_path / "out", target="train").report["regimes"]
    names = {regime: {site["name"] for site in shown["sites"]} for regime, shown in regimes.items()}
    assert set(names) == {"stock", "amp", "half"}
    for sites in names.values():
        assert any(":grad" in name for name in sites) and any("dropout:" in name for name in sites)


@pytest.mark.usefixtures("first_batch")
def test_an_unsafe_conversion_says_what_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.small("t5-encoder", factor=1.0)
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


@pytest.mark.usefixtures("first_batch")
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
    assert [cli.main(["verify", str(tmp_path / f"out-{steps}"), "--no-audit"]) for steps in (0, 8)] == [0, 1]
