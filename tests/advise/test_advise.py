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
from bf16_to_fp16.advise.initialisation import advise_init, rules_for
from bf16_to_fp16.advise.losses import advise_losses, read_log
from bf16_to_fp16.advise.updates import advise_updates, half_gap_exponents
from bf16_to_fp16.cli import main
from bf16_to_fp16.errors import UserError
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
    assert found["elements"] == 20_000 and found["overflow"] == 0
    assert abs(found["stalled"] - stalled) <= 5
    assert found["stalled_fraction"] == found["stalled"] / 20_000


def test_the_rate_for_half_moves_half_and_half_of_it_does_not(tmp_path: Path) -> None:
    file = weights(tmp_path, w=normal(20_000, 0.02).bfloat16())
    rate = advise_updates(file)["total"]["rate_for_half"]
    assert advise_updates(file, rate=rate)["total"]["stalled_fraction"] <= 0.5
    assert advise_updates(file, rate=rate * 0.49)["total"]["stalled_fraction"] > 0.5


def test_the_rule_that_a_practitioner_found_by_hand(tmp_path: Path) -> None:
    """At a hidden size of 14336 and the usual initialisation 5e-7 trains next to nothing in bf16, and 1.6e-5 does."""
    file = weights(tmp_path, w=normal(1 << 16, rules_for(14336)["megatron"]).bfloat16())
    found = advise_updates(file, rate=5e-7)
    assert found["total"]["stalled_fraction"] > 0.9
    assert [item["what"] for item in found["advice"]] == ["stochastic-rounding", "fp32-master", "learning-rate"]
    last = found["advice"][2]
    assert 5e-6 < last["learning_rate"] <= 1.6e-5
    assert last["factor"] == pytest.approx(last["learning_rate"] / 5e-7)
    moves = advise_updates(file, rate=1.6e-5)
    assert moves["total"]["stalled_fraction"] < 0.15 and moves["advice"] == []
    assert rules_for(1024)["small"] == math.sqrt(2 / (5 * 1024)) and f"{rules_for(14336)['megatron']:.5f}" == "0.00482"


def test_adafactors_updates_go_with_the_tensor_or_a_thousandth_and_adams_do_not(tmp_path: Path) -> None:
    w = normal(20_000, 0.02).bfloat16()
    file = weights(tmp_path, small=w, large=(w * 1024))

    def stalled(file: Path, **options: Any) -> list[float]:
        return [row["stalled_fraction"] for row in advise_updates(file, **options)["layers"]]

    large, small = stalled(file, rate=2e-3, optimizer="adafactor")
    assert small == large
    large, small = stalled(file, rate=2e-3)
    assert large > 0.9 and small < 0.01
    file = weights(tmp_path, w=normal(20_000, 1e-6))
    adafactor, adam = (stalled(file, rate=r, optimizer=o) for r, o in ((1e-6, "adafactor"), (1e-9, "adamw")))
    assert adafactor == adam and 0.3 < adam[0] < 0.9


def test_an_overflowing_weight_is_counted_apart(tmp_path: Path) -> None:
    file = weights(tmp_path, zero=torch.zeros(50), w=torch.tensor([1.0, 1e6, math.inf]))
    found = advise_updates(file, rate=1e-4, dtype="fp16")
    w, zero = found["layers"]
    assert (w["overflow"], w["stalled"], w["stalled_fraction"]) == (2, 1, 1.0)
    assert (zero["overflow"], zero["stalled"]) == (0, 0) and zero["rate_for_half"] is not None


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


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("t5", {"d_model": 96, "d_ff": 150, "d_kv": 20, "vocab_size": 400}),
        ("gated", {"d_model": 96, "d_ff": 150, "d_kv": 20, "initializer_factor": 0.5}),
        ("umt5", {"d_model": 96, "d_ff": 150, "d_kv": 20}),
        ("switch", {"d_model": 96, "d_ff": 150, "d_kv": 20, "num_experts": 25}),
        ("pegasus", {"d_model": 96, "encoder_ffn_dim": 150, "decoder_ffn_dim": 150, "init_std": 0.07}),
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


def test_what_is_more_than_four_times_as_large_or_small_is_flagged_and_nothing_else(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny.t5(d_model=96, num_layers=3, num_decoder_layers=2)
    block = model.encoder.block[1].layer
    block[0].SelfAttention.o.weight.data.mul_(5)
    block[1].DenseReluDense.wi.weight.data.mul_(0.2)
    block[1].layer_norm.weight.data.mul_(3)
    for stack, times in (("encoder", (4.0, 4.125, 1.0)), ("decoder", (0.25, 0.24))):
        for i, factor in enumerate(times):
            model.get_submodule(f"{stack}.block.{i}.layer.0.layer_norm").weight.data.fill_(factor)
    found = advise_init(tiny.save(model, tmp_path / "model"))
    found["far"] = [name for name in found["far"] if "relative_attention_bias" not in name]
    norms = [f"{stack}.block.1.layer.0.layer_norm.weight" for stack in ("decoder", "encoder")]
    o, wi = (f"encoder.block.1.layer.{name}.weight" for name in ("0.SelfAttention.o", "1.DenseReluDense.wi"))
    assert found["far"] == [norms[0], o, norms[1], wi]
    wide = next(row for row in found["tensors"] if row["name"] == o)
    assert wide["times"] == pytest.approx(5, rel=0.1)


def test_position_biases_heads_and_norms_have_their_own_rules(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": 96, "num_heads": 12, "d_kv": 8, "relative_attention_num_buckets": 80}
    shape |= {"relative_attention_max_distance": 400, "initializer_factor": 0.5}
    t5 = tiny.save(tiny.t5(**shape), tmp_path / "t5")
    rows = {row["name"]: row for row in advise_init(t5)["tensors"]}
    biases = [row for name, row in rows.items() if "relative_attention_bias" in name]
    assert len(biases) == 2 and all(0.85 < row["times"] < 1.15 for row in biases)
    norms = [row for name, row in rows.items() if name.endswith("layer_norm.weight")]
    assert len(norms) > 8 and {row["times"] for row in norms} == {1.0}
    head = next(r for r in advise_init(tiny.save(tiny.gated(), tmp_path / "v1.1"))["tensors"] if "lm_head" in r["name"])
    assert head["own_rule"] == 1.0 and 0.9 < head["times"] < 1.1


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
    (event,) = found["events"]
    assert (event["kind"], event["start"], event["size"]) == ("Spike", 201, pytest.approx(3, abs=0.15))
    assert "rewind" in event["cause"]
    assert (found["losses"], found["first_step"], found["last_step"]) == (300, 1, 300)


def test_half_a_window_is_enough(tmp_path: Path) -> None:
    assert advise_losses(log_of(tmp_path / "half.csv", [2.0] * 32))["losses"] == 32
    with pytest.raises(UserError, match=r"31 losses, but 32 are needed"):
        advise_losses(log_of(tmp_path / "less.csv", [2.0] * 31))
    (tmp_path / "index.csv").write_text(",epoch,Loss\n" + "".join(f"{i},{i},2.0\n" for i in range(99)))
    with pytest.raises(UserError):  # an index is no loss
        advise_losses(tmp_path / "index.csv")
    (tmp_path / "blank.csv").write_text("step,loss\n0, \n" + "".join(f"{i},2.0\n" for i in range(1, 99)))
    assert advise_losses(tmp_path / "blank.csv")["losses"] == 98


def test_the_projects_own_finetunes() -> None:
    """Logs of two finetunes of the shipped T5: one that went well, and one whose learning rate rose until it broke."""
    assert events(read_log(LOGS / "finetune-calm.jsonl")) == []
    found = events(read_log(LOGS / "finetune-hot.jsonl"))
    assert [event.kind for event in found] == ["Spike", "Divergence"]
    assert found[1].start == 77 and found[1].end is None  # from there on the forward pass overflows


def advise(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["advise", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_every_mode_prints_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = advise(capsys, "updates", T5, "--lr", "5e-7")
    assert "encoder.block.3" in out and "1,616,512" in out
    assert re.search(r"1\. bf16_to_fp16\.AdamW.*2\. an fp32 copy.*3\. at a learning rate of 0\.000245", out, re.S)
    assert "nothing to do" in advise(capsys, "updates", T5, "--lr", "0.01")
    out = advise(capsys, "init", T5)
    assert "0.0559" in out and re.search(r"DenseReluDense\.wo\.weight\W+23\.4\W+418 !", out)
    assert "0.00482" in advise(capsys, "init", 14336)
    out = advise(capsys, "losses", log_of(tmp_path / "a.csv", spiked()))
    assert "201 to 20" in out and "up by" in out
    assert "no spike" in advise(capsys, "losses", log_of(tmp_path / "b.csv", spiked()[:190]))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("t5", "encoder.block.0.layer.0.SelfAttention.q.weight"), ("pegasus", "model.encoder.layers.0.fc1.bias")],
)
def test_an_infinite_weight_is_named_flagged_and_left_out(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bf16_to_fp16.advise.weight_statistics.PIECE", 100)  # a real piece holds the whole tensor
    torch.manual_seed(0)
    model = tiny.KINDS[kind](d_model=96)
    w = model.get_parameter(name).data
    w.view(-1)[1] = math.inf
    source = tiny.save(model, tmp_path / "model")
    (row,) = (row for row in advise_init(source)["tensors"] if row["name"] == name)
    finite = w.bfloat16().double()[w.isfinite()]
    assert (row["nonfinite"], row["elements"], row["far"]) == (1, w.numel(), True)
    assert row["rms"] == pytest.approx(float(finite.square().mean().sqrt()))
    out = " ".join(advise(capsys, "init", source).split())
    assert out.endswith(f"inf or NaN in {name}: 1 weight")


def test_reports_are_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = log_of(tmp_path / "log.csv", [*[2.0, 2.1] * 50, *[math.nan] * 20])
    modes: dict[str, list[object]] = {"updates": ["updates", T5], "init": ["init", T5], "losses": ["losses", log]}
    for mode, arguments in modes.items():
        found = json.loads(advise(capsys, *arguments, "--json", "-"))
        assert (found["schema"], found["mode"]) == (1, mode)
        advise(capsys, *arguments, "--json", tmp_path / "out.json")
        assert json.loads((tmp_path / "out.json").read_text()) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["updates", "{t5}", "--lr", "-1"], "the learning rate is -1; give a positive number"),
        (["updates", "{ids}"], "it holds no floating tensors"),
        (["init", "{ids}"], "a weight file does not name its model"),
        (["updates", "{tmp}/none"], "none does not exist"),
        (["updates", "{tmp}/empty.csv"], "is not a checkpoint; give its folder, a .safetensors file or a Hub id"),
        (["init", "0"], "the hidden size is 0; give a positive number"),
        (["init", "{tmp}/other"], "other/config.json: transformers cannot make the model ('zzz'); take config"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    ids = weights(tmp_path, w=torch.arange(3))
    (tmp_path / "empty.csv").write_text("")
    rotation = {"rope_type": "zzz"}
    other = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_parameters": rotation}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    save_file({"a": torch.zeros(1)}, tmp_path / "other" / "model.safetensors")
    assert message in refused(capsys, "advise", *(a.format(t5=T5, tmp=tmp_path, ids=ids) for a in arguments))


@pytest.mark.parametrize("wrong", ["dtype", "optimizer"])
def test_an_unknown_format_or_optimizer_is_refused(wrong: str) -> None:
    with pytest.raises(UserError, match=f"{wrong} 'x' is unknown; choose"):
        advise_updates(T5, **{wrong: "x"})  # type: ignore[arg-type]
