"""Advice is checked against what it is about: real steps in 16 bits, stock initialisations, runs that went wrong."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import tiny
from support.program import refused
from torch import Tensor, nn

from bf16_to_fp16 import AdamW
from bf16_to_fp16.advise.detector import events
from bf16_to_fp16.advise.initialisation import advise_init, megatron, rules_for, small
from bf16_to_fp16.advise.losses import advise_losses, read_log
from bf16_to_fp16.advise.updates import advise_updates, half_gap_exponents
from bf16_to_fp16.cli import main
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.known import FAMILIES
from bf16_to_fp16.optim import rounding

DEMO = Path(__file__).parents[2] / "bf16_to_fp16" / "demo_data"
T5 = DEMO / "t5-gated-bytes"
LOGS = Path(__file__).parents[1] / "support" / "logs"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOTH = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


def weights(path: Path, **tensors: Tensor) -> Path:
    file = path / "weights.safetensors"
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, file)
    return file


def normal(count: int, deviation: float, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * deviation


# ---- updates that vanish --------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("rate", [1e-6, 3e-5, 1e-3])
def test_as_many_weights_stall_as_a_real_step_leaves(tmp_path: Path, dtype: str, rate: float) -> None:
    target = DTYPES[dtype]
    w = rounding.nearest(normal(20_000, 0.02), target)
    w[:10] = 0
    found = advise_updates(weights(tmp_path, w=w), rate=rate, dtype=dtype)["total"]
    parameter = nn.Parameter(w.to(target))
    parameter.grad = -torch.sign(w + 1e-30).to(target)  # away from zero, where the gap is the one above
    AdamW([parameter], lr=rate, weight_decay=0, eps=0, rounding="nearest").step()
    stalled = int((parameter.detach().float() == w).sum())
    assert found["elements"] == 20_000 and found["no_update"] == 0
    assert abs(found["stalled"] - stalled) <= 5
    assert found["stalled_fraction"] == found["stalled"] / 20_000


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99, 1.0])
def test_the_rate_for_a_share_moves_that_share_and_half_of_it_does_not(tmp_path: Path, share: float) -> None:
    file = weights(tmp_path, w=normal(20_000, 0.02).bfloat16())
    rate = advise_updates(file, share=share)["total"]["rate_for_share"]
    assert 1 - advise_updates(file, rate=rate)["total"]["stalled_fraction"] >= share
    assert 1 - advise_updates(file, rate=rate * 0.49)["total"]["stalled_fraction"] < share


def test_the_rule_that_a_practitioner_found_by_hand(tmp_path: Path) -> None:
    """At a hidden size of 14336 and the usual initialisation 5e-7 trains next to nothing in bf16, and 1.6e-5 does."""
    file = weights(tmp_path, w=normal(1 << 16, megatron(14336)).bfloat16())
    found = advise_updates(file, rate=5e-7, batch_size=16)
    assert found["total"]["stalled_fraction"] > 0.9
    assert [item["what"] for item in found["advice"]] == ["stochastic-rounding", "fp32-master", "learning-rate"]
    last = found["advice"][2]
    assert 5e-6 < last["learning_rate"] <= 1.6e-5
    assert last["factor"] == pytest.approx(last["learning_rate"] / 5e-7)
    assert last["batch_size"] == math.ceil(16 * last["factor"])  # linearly
    moves = advise_updates(file, rate=1.6e-5)
    assert moves["total"]["stalled_fraction"] < 0.15 and moves["advice"] == []


def test_adafactors_updates_go_with_the_tensor_and_adams_do_not(tmp_path: Path) -> None:
    w = normal(20_000, 0.02).bfloat16()
    file = weights(tmp_path, small=w, large=(w * 1024))
    small_, large = (
        row["stalled_fraction"] for row in advise_updates(file, rate=2e-3, optimizer="adafactor")["tensors"]
    )
    assert small_ == large
    stated = advise_updates(file, rate=2e-3, relative_update=2e-3)["total"]
    assert stated["stalled_fraction"] == pytest.approx(large, abs=0.01)
    large, small_ = (row["stalled_fraction"] for row in advise_updates(file, rate=2e-3)["tensors"])
    assert large > 0.9 and small_ < 0.01


def test_an_overflowing_weight_and_one_of_zeros_are_told_apart(tmp_path: Path) -> None:
    file = weights(tmp_path, zero=torch.zeros(50), w=torch.tensor([1.0, 1e6, math.inf]))
    found = advise_updates(file, rate=1e-4, dtype="fp16")
    assert found["total"]["overflow"] == 2 and found["total"]["no_update"] == 2
    w, zero = found["tensors"]
    assert (w["stalled"], zero["stalled"]) == (1, 0)
    relative = advise_updates(file, relative_update=1e-3, tensors=["zero"])["total"]
    assert (relative["no_update"], relative["rate_for_share"]) == (50, None)


def test_layers_are_summed(tmp_path: Path) -> None:
    w = normal(64, 0.02)
    file = weights(tmp_path, encoder__block__0__a=w, encoder__block__0__b=w * 2, encoder__block__1__a=w * 3, head=w * 4)
    found = advise_updates(file)
    assert [(row["name"], row["elements"]) for row in found["layers"]] == [
        ("encoder.block.0", 128),
        ("encoder.block.1", 64),
        ("head", 64),
    ]
    assert found["total"]["elements"] == 256


@BOTH
def test_half_a_gap_is_what_must_be_added_to_move(dtype: str) -> None:
    """All positive values of a format: half a gap reaches the next one, the next smaller fp32 number does not."""
    bits = torch.arange(0, 0x7BFF if dtype == "fp16" else 0x7F7F, dtype=torch.int16)
    values = bits.view(DTYPES[dtype])
    exponents = half_gap_exponents(values.float(), dtype)
    gaps = (bits + 1).view(DTYPES[dtype]).double() - values.double()
    assert torch.equal(torch.ldexp(torch.ones_like(gaps), exponents.int() + 1), gaps)


def test_adafactor_takes_small_tensors_for_a_thousandth(tmp_path: Path) -> None:
    file = weights(tmp_path, w=normal(20_000, 1e-6))
    adafactor, adam = (
        advise_updates(file, rate=rate, optimizer=optimizer)["total"]["stalled_fraction"]
        for rate, optimizer in ((1e-6, "adafactor"), (1e-9, "adamw"))
    )
    assert adafactor == adam and 0.3 < adam < 0.9


# ---- initialisation -------------------------------------------------------------------------------------------------


def test_the_rules_are_the_published_ones() -> None:
    assert small(1024) == math.sqrt(2 / (5 * 1024))
    assert f"{megatron(14336):.5f}" == "0.00482"
    assert rules_for(512)["t5"]["q"] == (512 * 64) ** -0.5 and rules_for(512)["t5"]["wo"] == 2048**-0.5
    assert rules_for(1024)["pegasus"] == 0.02


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("t5", {"d_model": 96, "d_ff": 150, "d_kv": 20, "vocab_size": 400}),
        ("gated", {"d_model": 96, "d_ff": 150, "d_kv": 20, "initializer_factor": 0.5}),
        ("umt5", {"d_model": 96, "d_ff": 150, "d_kv": 20}),
        ("switch", {"d_model": 96, "d_ff": 150, "d_kv": 20, "num_experts": 25}),
        ("pegasus", {"d_model": 96, "encoder_ffn_dim": 150, "decoder_ffn_dim": 150}),
    ],
)
def test_what_stock_code_draws_follows_its_own_rule(tmp_path: Path, kind: str, shape: dict[str, Any]) -> None:
    torch.manual_seed(0)
    folder = tiny.save(tiny.KINDS[kind](**shape), tmp_path / kind)
    found = advise_init(folder)
    rows = {row["name"]: row for row in found["tensors"] if row["elements"] > 2000 and row["own_rule"] is not None}
    own_head = "lm_head.weight"  # the helper gives it values of its own
    assert len(rows) > 15
    assert {n: r["times"] for n, r in rows.items() if not 0.9 < r["times"] < 1.1 and n != own_head} == {}
    assert [name for name in found["far"] if "relative_attention_bias" not in name and name != own_head] == []


def test_what_is_far_is_flagged_and_nothing_else(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny.t5(d_model=96)
    block = model.encoder.block[1].layer
    with torch.no_grad():
        block[0].SelfAttention.o.weight.mul_(5)
        block[1].DenseReluDense.wi.weight.mul_(0.2)
        block[1].layer_norm.weight.mul_(3)
    found = advise_init(tiny.save(model, tmp_path / "model"), tensors=["encoder.block.1.*"])
    assert found["far"] == [
        "encoder.block.1.layer.0.SelfAttention.o.weight",
        "encoder.block.1.layer.1.DenseReluDense.wi.weight",
    ]
    wide = next(row for row in found["tensors"] if row["name"].endswith("o.weight"))
    assert wide["times"] == pytest.approx(5, rel=0.1)
    assert wide["times_small"] == pytest.approx(wide["rms"] / math.sqrt(2 / (5 * 96)))


def test_position_biases_heads_norms_and_other_deviations_have_their_own_rules(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": 96, "num_heads": 12, "d_kv": 8, "relative_attention_num_buckets": 80}
    shape |= {"relative_attention_max_distance": 400, "initializer_factor": 0.5}
    t5 = tiny.save(tiny.t5(**shape), tmp_path / "t5")
    rows = {row["name"]: row for row in advise_init(t5)["tensors"]}
    biases = [row for name, row in rows.items() if "relative_attention_bias" in name]
    assert len(biases) == 2 and all(0.85 < row["times"] < 1.15 for row in biases)
    norms = [row for name, row in rows.items() if name.endswith("layer_norm.weight")]
    assert len(norms) > 10 and {(row["times"], row["times_small"]) for row in norms} == {(1.0, None)}
    head = next(r for r in advise_init(tiny.save(tiny.gated(), tmp_path / "v1.1"))["tensors"] if "lm_head" in r["name"])
    assert head["own_rule"] == 1.0 and 0.9 < head["times"] < 1.1
    pegasus = advise_init(tiny.save(tiny.pegasus(d_model=96, init_std=0.07), tmp_path / "pegasus"))["tensors"]
    drawn = [row for row in pegasus if row["name"].endswith(("proj.weight", "fc1.weight"))]
    assert len(drawn) > 10 and all(row["own_rule"] == 0.07 and 0.9 < row["times"] < 1.1 for row in drawn)


def test_far_is_more_than_four_times_either_way(tmp_path: Path) -> None:
    model = tiny.t5()
    for stack, times in (("encoder", (4.0, 4.125, 1.0)), ("decoder", (0.25, 0.24))):
        for i, factor in enumerate(times):
            model.get_submodule(f"{stack}.block.{i}.layer.0.layer_norm").weight.data.fill_(factor)
    found = advise_init(tiny.save(model, tmp_path / "model"), tensors=["*.layer.0.layer_norm.weight"])
    assert found["far"] == ["decoder.block.1.layer.0.layer_norm.weight", "encoder.block.1.layer.0.layer_norm.weight"]


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"model_type": "bloom", "hidden_size": 14336, "initializer_range": 0.02}, ("initializer_range", 4.147, True)),
        (
            {"model_type": "bloom", "hidden_size": 14336, "initializer_range": 0.00482},
            ("initializer_range", 1.0, False),
        ),
        ({"model_type": "llama", "hidden_size": 4096}, ("initializer_range", 2.217, False)),  # the class's 0.02
        ({"model_type": "gpt2", "n_embd": 768, "initializer_range": 0.02}, ("initializer_range", 0.96, False)),
        ({"model_type": "pegasus", "d_model": 1024, "init_std": 0.1}, ("init_std", 5.543, True)),
        ({"model_type": "t5", "d_model": 512}, ("initializer_factor", 3**0.5, False)),
        ({"model_type": "mt5", "d_model": 4096, "initializer_factor": 1.0}, ("initializer_factor", 3**0.5, False)),
        ({"model_type": "umt5", "d_model": 512, "initializer_factor": 5}, ("initializer_factor", 5 * 3**0.5, True)),
        ({"model_type": "udop", "d_model": 512, "initializer_factor": 1.0}, ("initializer_factor", 3**0.5, False)),
        ({"model_type": "a", "text_config": {"hidden_size": 833, "init_std": 0.02}}, ("init_std", 1.0, False)),
    ],
)
def test_a_config_is_judged_by_its_width(
    config: dict[str, Any], wanted: tuple[str, float, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    key, times, far = wanted
    for source in (tmp_path, tmp_path / "config.json"):
        found = advise_init(source)["config"]
        assert (found["key"], found["far"]) == (key, far)
        assert found["times_megatron"] == pytest.approx(times, rel=2e-3)
        assert found["stated"] is (key in config or "text_config" in config)
    out = " ".join(advise(capsys, "init", tmp_path).split())
    assert (f"for new weights set {key} to" in out) is far
    if not key.endswith("factor"):
        # What it asks for has the rule's deviation.
        assert found["wanted"] == pytest.approx(found["value"] / found["times_megatron"])
        assert found["fits"] == pytest.approx(found["hidden_size"] / times**2, rel=0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no hidden_size, d_model, n_embd; give the config of a transformer"),
        ('{"d_model": -1}', "d_model is -1; it must be a positive whole number"),
        ('{"d_model": 8}', "neither it nor its class names initializer_range, init_std"),
        ('{"d_model": 8, "init_std": "x"}', "init_std is 'x'; it must be a positive number"),
        ("[]", "not a config; give a config.json or a folder with one"),
        ("nothing", "not JSON; give a config.json or a folder with one"),
    ],
)
def test_a_config_that_cannot_be_judged_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        advise_init(tmp_path / "some.json")
    assert "\n" not in str(caught.value)


def test_what_only_a_checkpoint_has_is_refused_of_a_hidden_size() -> None:
    with pytest.raises(UserError, match="--subfolder"):
        advise_init("512", subfolder="x")
    with pytest.raises(UserError, match="--tensor"):
        advise_init("512", tensors=["x"])


def test_the_deviation_of_a_t5s_config_is_that_of_its_weights(tmp_path: Path) -> None:
    folder = tiny.save(tiny.gated(d_model=96, initializer_factor=0.5), tmp_path / "model")
    found = advise_init(folder, tensors=["*.k.weight"])
    for row in found["tensors"]:
        assert row["rms"] == pytest.approx(found["config"]["deviation"], rel=0.1)


def test_an_infinite_weight_is_flagged_and_left_out_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bf16_to_fp16.advise.weights.PIECE", 100)  # a real piece holds the whole tensor
    model = tiny.t5()
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    w = model.get_parameter(name).data
    w[1, 2] = math.inf
    (row,) = advise_init(tiny.save(model, tmp_path / "model"), tensors=[name])["tensors"]
    finite = w.bfloat16().double()[w.isfinite()]
    assert (row["nonfinite"], row["elements"], row["far"]) == (1, w.numel(), True)
    assert row["rms"] == pytest.approx(float(finite.square().mean().sqrt()))
    assert row["times_megatron"] == pytest.approx(row["rms"] / math.sqrt(1 / (3 * 24)))


# ---- loss curves ----------------------------------------------------------------------------------------------------


def log_of(path: Path, losses: Any, scales: Any = None) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "loss_scale"])
        for step, loss in enumerate(losses, 1):
            writer.writerow([step, loss, "" if scales is None else scales[step - 1]])
    return path


def spiked() -> np.ndarray:
    losses = np.linspace(3, 2, 300) * (1 + 0.01 * np.random.default_rng(0).standard_normal(300))
    losses[200:203] += [1.0, 3.0, 2.0]
    return losses


def test_a_log_is_reported_with_its_events_and_causes(tmp_path: Path) -> None:
    found = advise_losses(log_of(tmp_path / "log.csv", spiked()))
    assert found["counts"] == {"Spike": 1, "Divergence": 0, "Plateau": 0}
    (event,) = found["events"]
    assert (event["start"], event["recovery"], event["size"]) == (201, "fast", pytest.approx(3, abs=0.15))
    assert "rewind" in event["cause"]
    assert (found["losses"], found["first_step"], found["last_step"]) == (300, 1, 300)


def test_threshold_and_window_are_the_callers_and_half_a_window_is_enough(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log.csv", spiked())
    assert advise_losses(log, z=1e4)["events"] == [] and advise_losses(log, window=32)["window"] == 32
    assert advise_losses(log_of(tmp_path / "half.csv", [2.0] * 32))["losses"] == 32
    with pytest.raises(UserError, match=r"31 losses are too few .* --window from 16 to 62"):
        advise_losses(log_of(tmp_path / "less.csv", [2.0] * 31))


def test_the_projects_own_finetunes() -> None:
    """Logs of two finetunes of the shipped T5: one that went well, and one whose learning rate rose until it broke."""
    assert events(read_log(LOGS / "finetune-calm.jsonl")) == []
    found = events(read_log(LOGS / "finetune-hot.jsonl"))
    assert [event.kind for event in found] == ["Spike", "Divergence"]
    assert found[1].start == 77 and found[1].end is None  # from there on the forward pass overflows


# ---- the command line -----------------------------------------------------------------------------------------------


def advise(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["advise", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_every_mode_prints_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = advise(capsys, "updates", T5, "--lr", "5e-7", "--batch-size", 32)
    assert "encoder.block.3" in out and "1,616,512" in out and "the batch size to 15,680" in " ".join(out.split())
    assert re.search(r"1\. bf16_to_fp16\.AdamW.*2\. an fp32 copy.*3\. a learning rate of 0\.000245", out, re.S)
    assert "nothing to do" in advise(capsys, "updates", T5, "--lr", "0.01")
    out = advise(capsys, "init", T5)
    assert "0.0559" in out and re.search(r"DenseReluDense\.wo\.weight\W+23\.4\W+418 !", out)
    wide = advise(capsys, "init", 14336)
    others = [int(count) for count in re.findall(r" and (\d+) others", wide)]
    assert "0.00482" in wide and sum(others) + len(others) == len(FAMILIES)
    out = advise(capsys, "losses", log_of(tmp_path / "a.csv", spiked()))
    assert "201 to 20" in out and "fast recovery" in out
    assert "no spike" in advise(capsys, "losses", log_of(tmp_path / "b.csv", spiked()[:190]))


def test_the_farthest_tensor_is_named_with_how_far_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny.t5(d_model=96)
    for i, factor in ((0, 6.0), (1, 60.0), (2, 0.1)):
        model.encoder.block[i].layer[0].SelfAttention.o.weight.data.mul_(factor)
    model.encoder.block[0].layer[0].SelfAttention.v.weight.data.mul_(0.01)
    out = " ".join(advise(capsys, "init", tiny.save(model, tmp_path / "model")).split())
    said = re.findall(r"(\d+) tensors over 4 times (\w+) than drawn, most (\S+): ([\d.]+) times", out)
    assert [(n, word, name) for n, word, name, _ in said] == [
        ("2", "larger", "encoder.block.1.layer.0.SelfAttention.o.weight"),
        ("2", "smaller", "encoder.block.0.layer.0.SelfAttention.v.weight"),
    ]
    assert [float(times) for *_, times in said] == [pytest.approx(60, rel=0.1), pytest.approx(100, rel=0.1)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("t5", "encoder.block.0.layer.0.SelfAttention.q.weight"), ("pegasus", "model.encoder.layers.0.fc1.bias")],
)
def test_an_infinite_weight_is_named_as_that_and_not_as_large(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, name: str
) -> None:
    torch.manual_seed(0)
    model = tiny.KINDS[kind](d_model=96)
    model.get_parameter(name).data.view(-1)[1] = math.inf
    out = " ".join(advise(capsys, "init", tiny.save(model, tmp_path / "model")).split())
    assert out.endswith(f"1 tensor with inf or NaN, most {name}: 1 weight") and "than drawn" not in out


def test_reports_are_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = log_of(tmp_path / "log.csv", [*[2.0, 2.1] * 50, *[math.nan] * 20])
    modes: dict[str, list[object]] = {
        "updates": ["updates", T5],
        "init": ["init", T5],
        "losses": ["losses", log],
    }
    for mode, arguments in modes.items():
        found = json.loads(advise(capsys, *arguments, "--json", "-"))
        assert (found["schema"], found["mode"]) == (1, mode)
        advise(capsys, *arguments, "--json", tmp_path / "out.json")
        assert json.loads((tmp_path / "out.json").read_text()) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["guess"], "No such command 'guess'"),
        (["updates"], "Missing argument 'SOURCE'"),
        (["updates", "{t5}", "--optimizer", "muon"], "'muon' is not one of 'adamw', 'adam', 'adafactor'"),
        (["updates", "{t5}", "--lr", "-1"], "the learning rate is -1; give a positive number"),
        (["updates", "{t5}", "--dtype", "fp8"], "'fp8' is not one of 'bf16', 'fp16'"),
        (["updates", "{t5}", "--lr", "0"], "the learning rate is 0; give a positive number"),
        (["updates", "{t5}", "--lr", "nan"], "the learning rate is nan; give a positive number"),
        (["updates", "{t5}", "--share", "1.5"], "the share is 1.5; give one above 0, up to 1"),
        (["updates", "{t5}", "--tensor", "x.*"], "no tensor x.*; it has "),
        (["updates", "{ids}"], "tensor w is I64, whole numbers"),
        (["init", "{ids}"], "a file alone does not say what its tensors are"),
        (["updates", "{tmp}/none"], "none does not exist"),
        (["updates", "{tmp}/empty.csv"], "is not a checkpoint; give its folder, a .safetensors file or a Hub id"),
        (["init", "0"], "the hidden size is 0; give a positive number"),
        (["init", "{tmp}/none.json"], "none.json does not exist"),
        (["losses", "{tmp}/empty.csv"], "empty.csv: the log is empty"),
        (["losses", "{tmp}/short.csv"], "10 losses are too few to compare"),
        (["losses", "{tmp}/long.csv", "--window", "3"], "a window of 3 and a z of 6 compare nothing"),
        (["init", "512", "--lr", "1e-4"], "No such option '--lr'"),
        (["losses", "{tmp}/long.csv", "--tensor", "a"], "No such option '--tensor'"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    ids = weights(tmp_path, w=torch.arange(3))
    (tmp_path / "empty.csv").write_text("")
    log_of(tmp_path / "short.csv", [2.0] * 10)
    log_of(tmp_path / "long.csv", spiked())
    assert message in refused(capsys, "advise", *(a.format(t5=T5, tmp=tmp_path, ids=ids) for a in arguments))
