"""Conversions of what no exact exponent reaches: edited, priced, told, verified, replayed and undone."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import judge, tiny
from support.folders import rewritten
from support.forging import copied
from transformers import ByT5Tokenizer

from bf16_to_fp16 import cli, convert, undo, verify
from bf16_to_fp16.checkpoint.files import sha256_of
from bf16_to_fp16.report.facts import inexactness
from bf16_to_fp16.report.judgement import too_inexact
from bf16_to_fp16.report.schema import CARD, PAGE, REPORT, Report, read
from bf16_to_fp16.report.terminal import print_conversion
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.wording import power, scientific

pytestmark = pytest.mark.usefixtures("first_batches")

TEXTS = Path(__file__).parents[2] / "bf16_to_fp16" / "demo_data" / "held_out.txt"
FLOOR = 1e-9  # divergences under it are the noise of fp32


def saturated_t5(folder: Path, loud: list[int]) -> Path:
    """Write a tiny T5 of which some rows of the tied embedding are 2^13 times louder, and so the logits of these."""
    model = tiny.small("t5", factor=1.0)
    model.shared.weight.data[loud] *= 2.0**13
    return tiny.save(model, folder)


@dataclass(frozen=True)
class Converted:
    source: Path
    out: Path
    report: Any


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    root = tmp_path_factory.mktemp("qwen")
    model = tiny.small("qwen3", factor=1.0)
    model.model.layers[0].self_attn.q_norm.weight.data.mul_(2.0**13)
    source = tiny.save(model, root / "source")
    return Converted(source, root / "out", convert(source, root / "out").report)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A T5 of bytes with nine loud gates and a loud head of queries, as rewarded training leaves them."""
    root = tmp_path_factory.mktemp("demo")
    source = tiny.save(tiny.small("gated", factor=1.0, vocab_size=384), root / "source")
    ByT5Tokenizer(extra_ids=125).save_pretrained(source)
    gate, heads = "encoder.block.1.layer.1.DenseReluDense", "encoder.block.1.layer.0.SelfAttention.q.weight"
    with rewritten(source / "model.safetensors") as weights:
        weights[f"{gate}.wi_0.weight"][:9] *= 2.0**16
        weights[f"{gate}.wo.weight"][:, :9] *= 2.0**-13
        weights[heads][: json.loads((source / "config.json").read_text())["d_kv"]] *= 2.0**12
    return Converted(source, root / "out", convert(source, root / "out").report)


def check_told(report: Any, sites: set[str]) -> None:
    """The report is safe, certified, and lists the edits at these sites with costs that were predicted rightly."""
    assert (report["verdict"], report["proof"]) == ("safe", "certified")
    assert {entry["site"] for entry in report["inexact"]} == sites
    assert sites <= {site["name"] for site in report["certificate"]["sites"]}
    assert all(entry["exponent"] < 0 for entry in report["inexact"])
    for entry in report["inexact"]:
        less, more = sorted((entry["predicted"], entry["measured"]))
        assert more < FLOOR or more <= 3 * less, entry
    assert report["fidelity"]["kl_fp16"] <= report["fidelity"]["kl_bf16"]


def test_gates_and_a_head_past_the_limit_are_edited_proven_and_told(demo: Converted) -> None:
    gate, scores = "encoder.block.1.layer.1.DenseReluDense.wi_0", "encoder.block.1.layer.0.SelfAttention:scores"
    check_told(demo.report, {gate, scores})
    exponents = demo.report["plan"]["exponents"]
    gates = exponents["encoder.block.1.layer.1.DenseReluDense.gate"]
    queries = exponents["encoder.block.1.layer.0.SelfAttention.scores"]
    # Those that were made loud, and no other.
    assert all(e < 0 for e in gates[:9]) and not any(gates[9:])
    size = json.loads((demo.source / "config.json").read_text())["d_kv"]
    assert len(set(queries[:size])) == 1 and queries[0] < 0 and not any(queries[size:])
    said = {entry["site"]: entry["exponent"] for entry in demo.report["inexact"]}
    assert said == {gate: min(gates), scores: queries[0]}
    assert isinstance(said[gate], int)  # of gates only powers of two
    # As stock code alone sees it.
    texts = TEXTS.read_text(encoding="utf-8").splitlines()[:2]
    judged = judge.judge(demo.source, demo.out, texts, 0)
    assert judged.finite and judged.kl_fp16_text < 3 * judged.kl_bf16_text
    assert judged.kl_fp16_random < 3 * judged.kl_bf16_random


def test_each_edit_is_shown_with_its_price_and_distance(demo: Converted, capsys: pytest.CaptureFixture[str]) -> None:
    print_conversion(read(Report, demo.report), demo.out)
    shown = capsys.readouterr().out
    for entry in demo.report["inexact"]:
        costs = f"predicted {scientific(entry['predicted'])}, measured {scientific(entry['measured'])}"
        assert f"\nedit for {entry['site']}: down to {power(entry['exponent'])}, {costs}\n" in shown
    sentence, close = inexactness(read(Report, demo.report)), demo.report["fidelity"]
    fp16, bf16 = (scientific(close[f"kl_{dtype}"]) for dtype in ("fp16", "bf16"))
    assert sentence == f"edited at 2 sites: fp16 is {fp16} nats from the source; bf16 is {bf16}"
    said = f"{sentence[:1].upper()}{sentence[1:]}."
    card, page = ((demo.out / name).read_text(encoding="utf-8") for name in (CARD, PAGE))
    assert said in " ".join(card.split()) and said in " ".join(re.sub("<[^>]*>", "", page).split())
    assert "outputs keep every bit" not in page and "Safe in fp16" in page


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.clear(),
        lambda entries: entries.pop(),
        lambda entries: entries.append(dict(entries[0])),
        lambda entries: entries[0].update(site="encoder.block.0.layer.1.DenseReluDense.wi_0"),
        lambda entries: entries[1].update(exponent=entries[1]["exponent"] + 1),
    ],
    ids=["none", "missing", "twice", "elsewhere", "smaller"],
)
def test_verify_notices_a_list_of_edits_that_is_not_the_plans(
    demo: Converted, tmp_path: Path, change: Callable[[list[dict[str, Any]]], object]
) -> None:
    def changed(report: dict[str, Any]) -> None:
        change(report["inexact"])
        if not report["inexact"]:
            del report["inexact"]

    found = verify(copied(demo.out, tmp_path / "out", changed), run_model=False)
    assert not found["verified"] and found["checks"]["plan"] == "failed"
    assert {(p["check"], p["name"]) for p in found["problems"] if p["check"] == "plan"} == {("plan", "inexact")}


def test_the_plan_of_an_edited_conversion_is_replayed_to_the_same_bits(qwen: Converted, tmp_path: Path) -> None:
    again = convert(qwen.source, tmp_path / "again", plan=qwen.out / REPORT)
    assert again.safe and again.plan == Plan.model_validate(qwen.report["plan"])
    weights = [sha256_of(folder / "model.safetensors") for folder in (qwen.out, tmp_path / "again")]
    assert weights[0] == weights[1]
    # Nothing was predicted of what was replayed; it was measured all the same.
    told = [(e["site"], e["exponent"], e.get("predicted"), e["measured"]) for e in again.report["inexact"]]
    assert told == [(e["site"], e["exponent"], None, e["measured"]) for e in qwen.report["inexact"]]


def test_undo_takes_edits_back_to_the_bit(demo: Converted, tmp_path: Path) -> None:
    before, after = (load_file(f / "model.safetensors") for f in (demo.source, undo(demo.out, tmp_path / "back")))
    forms = [{name: (t.dtype, t.shape) for name, t in tensors.items()} for tensors in (before, after)]
    assert forms[0] == forms[1]
    lost = {name: int((tensor != after[name]).sum()) for name, tensor in before.items()}
    # What fp16 cannot hold is lost with edits as without.
    total = sum(tensor.numel() for tensor in before.values())
    assert sum(lost.values()) <= round((1 - demo.report["weights"]["lossless_fraction"]) * total)
    for name in ("layer.1.DenseReluDense.wi_0.weight", "layer.0.SelfAttention.q.weight"):
        assert torch.equal(before[f"encoder.block.1.{name}"][:16], after[f"encoder.block.1.{name}"][:16]), name


def test_gains_of_queries_are_edited_for_all_heads_at_once(qwen: Converted) -> None:
    check_told(qwen.report, {"model.layers.0.self_attn:scores"})
    exponent = qwen.report["plan"]["exponents"]["model.layers.0.self_attn.scores"]
    factor = 2.0**exponent  # m/8·2^-1
    assert round(16 * factor) in (5, 6, 7, 8) and 16 * factor == pytest.approx(round(16 * factor), rel=1e-12)
    before, after = (load_file(folder / "model.safetensors") for folder in (qwen.source, qwen.out))
    name = "model.layers.0.self_attn.q_norm.weight"
    assert torch.equal(after[name].float(), before[name].float() * factor)


def test_logits_of_one_choice_take_a_tied_head_apart(tmp_path: Path) -> None:
    source = saturated_t5(tmp_path / "source", [5])
    result = convert(source, tmp_path / "out")
    check_told(result.report, {"lm_head"})
    each = result.report["plan"]["exponents"]["logits"]
    assert result.plan.untied_head and isinstance(each, list)
    assert [number for number, e in enumerate(each) if e] == [5] and each[5] < 0
    found = verify(tmp_path / "out", original=source, run_model=False)
    assert found["verified"] and found["verdict"] == "safe", found["problems"]


def test_max_kl_accepts_what_costs_more_than_bf16(tmp_path: Path) -> None:
    """Of two loud choices the second best counts: no exponent of theirs is worth it, unless it is accepted."""
    source = saturated_t5(tmp_path / "source", [5, 6])
    plain = convert(source, tmp_path / "plain").report
    kl = plain["fidelity"]["kl_fp16"]
    assert [entry["site"] for entry in plain["inexact"]] == ["lm_head"] and "max_kl" not in plain
    assert kl > plain["fidelity"]["kl_bf16"] and plain["verdict"] == "unsafe" and plain["certificate"]["holds"]
    assert all(entry["kind"] == "inexact" and "--max-kl" in entry["remedy"] for entry in plain["unsafe"])
    close = read(Report, plain).fidelity
    assert close and too_inexact(close, max_kl=kl / 2) and not too_inexact(close, max_kl=2 * kl)
    kl = max([kl, *(entry["kl"] for entry in plain["exceptions"] if len(entry["ids"]) == 1)])  # accepted as well
    most, out, plan = f"{2 * kl:.2g}", tmp_path / "out", tmp_path / "plain"
    assert cli.main(["convert", str(source), str(out), "--max-kl", most, "--plan", str(plan)]) == 0
    report = json.loads((out / REPORT).read_bytes())
    assert report["verdict"] == "safe" and report["max_kl"] == float(most)
    assert f"--max-kl {float(most):g}" in report["command"]


def test_one_token_with_a_channel_of_its_own_costs_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.small("llama", factor=1.0)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 3] = 0.0
        model.model.embed_tokens.weight[5, 3] = 8.0
        for layer in model.model.layers:  # nothing writes the channel
            layer.self_attn.o_proj.weight[3] = layer.mlp.down_proj.weight[3] = 0.0
        model.model.layers[0].self_attn.q_proj.weight[:, 3] = 2.0**15
    source, out = tiny.save(model, tmp_path / "source"), tmp_path / "out"
    report = convert(source, out).report
    assert (report["verdict"], report["proof"]) == ("safe", "certified")
    [edit] = report["inexact"]
    assert edit["columns"] == 1 and edit["site"] == "model.layers.0.self_attn:scores" and edit["measured"] < 1e-6
    print_conversion(read(Report, report), out)
    assert f"{edit['site']}: 1 column down to {power(edit['exponent'])}" in capsys.readouterr().out
    assert verify(out, original=source, run_model=False)["verified"]
    before, after = (load_file(folder / "model.safetensors") for folder in (source, undo(out, tmp_path / "back")))
    queries = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(before[queries], after[queries])
