"""Rare input that edits harm is found, judged beside bf16, and decides or is told; harmless edits have none."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny

from bf16_to_fp16 import convert, verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.measuring import soft_side
from bf16_to_fp16.measuring.soft_side import LENGTH, TIMES, row_of, run_rounded
from bf16_to_fp16.measuring.stock import load_config
from bf16_to_fp16.optim.rounding import stochastic
from bf16_to_fp16.report.judgement import reasons_unsafe
from bf16_to_fp16.report.schema import REPORT, Report, read
from bf16_to_fp16.report.terminal import print_conversion
from bf16_to_fp16.rescaling.plan import Plan

RARE = [380, 381, 382]
LOUD = [5, 6, 7, 8]
VOCABULARY, WIDTH = 512, 32


def llama() -> Any:
    """Return a Llama of one layer with weights of zero but for independent embeddings and a head, and those tables."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, **special, max_position_embeddings=256)
    )
    table, head = model.model.embed_tokens.weight, model.lm_head.weight
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.zero_()
    table.data[:, 8:], head.data[:, 8:] = torch.randn(2, VOCABULARY, WIDTH - 8)
    return model.eval()


@torch.no_grad()
def soft_gate(folder: Path) -> Path:
    """Write a model whose gate is far out on usual ids, overflows on four, and is soft on three for which it counts."""
    model = llama()
    table, mlp = model.model.embed_tokens.weight, model.model.layers[0].mlp
    table[:, 0] = torch.where(torch.rand(VOCABULARY) < 0.5, -0.1, 0.1)
    table[LOUD, 0], table[RARE, 0], table[RARE, 2], table[:, 1] = 30.0, 0.0, 1.0, 1.0
    mlp.gate_proj.weight[0, 0], mlp.gate_proj.weight[0, 2], mlp.gate_proj.weight[1, 1] = 30000.0, -1.28, 1e-3
    mlp.up_proj.weight[0, 1], mlp.up_proj.weight[0, 2], mlp.up_proj.weight[1, 0] = 0.01, 30.0, 60.0
    mlp.down_proj.weight[3, 0] = 1 / 32
    model.lm_head.weight[:, 3] = torch.randn(VOCABULARY) * 20
    return tiny.save(model, folder)


@torch.no_grad()
def soft_head(folder: Path) -> Path:
    """Write a model whose head of attention is one-hot on usual ids, overflows on four, and is soft among three."""
    model = llama()
    table, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    table[:, 0], table[:, 1] = torch.randint(0, 8, (VOCABULARY,)) / 4.0, 2.0
    table[LOUD, 0], table[RARE, 0] = 60.0, torch.arange(3) / 3.0 * 0.0004
    attention.q_proj.weight[7, 1], attention.k_proj.weight[7, 0] = 600.0, 200.0
    attention.v_proj.weight[:8, 8:16] = attention.o_proj.weight[16:24, :8] = torch.eye(8) * 2
    model.lm_head.weight[:, 16:24] = torch.randn(VOCABULARY, 8) * 3
    return tiny.save(model, folder)


HIDDEN, DECOYS = [430, 431, 432], range(300, 312)


@torch.no_grad()
def gate_behind_decoys(folder: Path) -> Path:
    """Write a model with soft gates, of which the larger change feeds a channel that the head does not read."""
    model = llama()
    table, mlp = model.model.embed_tokens.weight, model.model.layers[0].mlp
    table[:, 0] = torch.where(torch.rand(VOCABULARY) < 0.5, -0.1, 0.1)
    table[LOUD, 0], table[HIDDEN, 0], table[DECOYS, 0], table[:, 1] = 30.0, 0.0, 0.0, 1.0
    table[HIDDEN, 2], table[DECOYS, 4] = 1.0, 1.0
    mlp.gate_proj.weight[:3:2, 0], mlp.gate_proj.weight[0, 2], mlp.gate_proj.weight[2, 4] = 30000.0, -1.28, -1.28
    mlp.gate_proj.weight[1, 1], mlp.up_proj.weight[1, 0], mlp.up_proj.weight[:3:2, 1] = 1e-3, 60.0, 0.01
    mlp.up_proj.weight[0, 2], mlp.up_proj.weight[2, 4] = 30.0, 60.0
    mlp.down_proj.weight[3, 0], mlp.down_proj.weight[5, 2] = 1 / 512, 1 / 128
    model.lm_head.weight[:, 3] = torch.randn(VOCABULARY) * 50
    return tiny.save(model, folder)


@torch.no_grad()
def head_of_positions(folder: Path) -> Path:
    """Write a model whose head tells only positions apart: sharply on usual ids, softly on three, not on decoys."""
    model = llama()
    table, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    table[:, 1], table[:, 3] = 2.0, 2.0
    table[DECOYS, 1], table[DECOYS, 3], table[HIDDEN, 1] = 0.0, 0.0, 2.0**-15
    attention.q_proj.weight[0, 1], attention.k_proj.weight[0, 3] = 600.0, 200.0
    attention.v_proj.weight[:8, 8:16] = attention.o_proj.weight[16:24, :8] = torch.eye(8) * 2
    model.lm_head.weight[:, 16:24] = torch.randn(VOCABULARY, 8) * 3
    return tiny.save(model, folder)


@torch.no_grad()
def soft_tanh(folder: Path) -> Path:
    """Write a classifier that reads the sign of the last id through a tanh, and three ids near 0."""
    torch.manual_seed(0)
    sizes = {"d_model": WIDTH, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1}
    model = tiny.KINDS["t5-classifier"](vocab_size=VOCABULARY, **sizes).eval()
    for weight in model.parameters():
        weight.fill_(float(weight.dim() == 1))
    table, head = model.transformer.shared.weight, model.classification_head
    table[:, 8:], table[:, 0] = torch.randn(VOCABULARY, WIDTH - 8), torch.where(torch.rand(VOCABULARY) < 0.5, -1.0, 1.0)
    table[HIDDEN, 0], head.dense.weight[0, 0] = 2.0**-17, 1.5e5
    head.dense.bias[:], head.out_proj.bias[:], head.out_proj.weight[:, 0] = 0.0, 0.0, torch.tensor([3.0, -3.0])
    return tiny.save(model, folder)


@pytest.fixture(scope="module", autouse=True)
def few_rows_and_draws() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, number in (("DRAWS", 4), ("LEAST_ROWS", 32), ("MOST_ROWS", 32), ("MOST_AGAIN", 6)):
            patch.setattr(soft_side, name, number)
        yield


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("gate")
    return root, convert(soft_gate(root / "source"), root / "out").report


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root = tmp_path_factory.mktemp("head")
    return root, convert(soft_head(root / "source"), root / "out").report


def test_an_edit_that_is_wrong_on_one_id_in_any_text_is_unsafe_and_names_it(gate: tuple[Path, Any]) -> None:
    _, report = gate
    assert report["fidelity"]["kl_fp16"] < report["fidelity"]["kl_bf16"]  # the probe does not see it
    assert report["verdict"] == "unsafe" and report["searched"]["ids"] == VOCABULARY
    assert report["searched"]["covered"] == pytest.approx(1 - len(RARE) / VOCABULARY)
    worst = next(entry for entry in report["exceptions"] if len(entry["ids"]) == 1)
    assert worst["ids"][0] in RARE and worst["kl"] > 0.1 > TIMES * worst["kl_bf16"]
    [entry] = report["unsafe"]
    assert entry["kind"] == "inexact" and f"token {worst['ids'][0]}:" in entry["reason"]
    accepted, refused = (read(Report, report | {"max_kl": factor * worst["kl"]}) for factor in (2.0, 0.5))
    assert reasons_unsafe(accepted) == [] and reasons_unsafe(refused) == read(Report, report).unsafe


@pytest.mark.parametrize("made", [gate_behind_decoys, head_of_positions, soft_tanh])
def test_an_id_that_one_sublayer_alone_does_not_show_is_found(made: Callable[[Path], Path], tmp_path: Path) -> None:
    report = convert(made(tmp_path / "source"), tmp_path / "out").report
    assert report["inexact"] and report["verdict"] == "unsafe"
    assert any(len(each["ids"]) == 1 and each["ids"][0] in HIDDEN for each in report["exceptions"])
    assert any("harm texts that contain token" in entry["reason"] for entry in report["unsafe"])


def test_a_mixtures_harm_is_told_beside_safe(head: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    root, report = head
    assert report["verdict"] == "safe" and report["exceptions"] and 0.99 < report["searched"]["covered"] < 1
    for entry in report["exceptions"]:
        assert len(entry["ids"]) > 1 and set(entry["ids"]) & set(RARE) and entry["kl"] > TIMES * entry["kl_bf16"]
    divergences = [entry["kl"] for entry in report["exceptions"]]
    assert divergences == sorted(divergences, reverse=True) and divergences[0] > 1.0
    print_conversion(read(Report, report), root / "out")
    ids = report["exceptions"][0]["ids"]
    for shown in (capsys.readouterr().out, (root / "out" / "README.md").read_text(encoding="utf-8")):
        assert all(str(i) in shown for i in ids) and "exception" in shown


def forge(folder: Path, report: Any, **changes: Any) -> Path:
    (folder / REPORT).write_text(json.dumps(report | changes), encoding="utf-8")
    return folder


def test_verify_finds_the_same_and_misses_what_a_report_leaves_out(head: tuple[Path, Any]) -> None:
    root, report = head
    assert verify(root / "out", original=root / "source")["verified"]
    text = report["inputs"] | {"sha256": "0" * 64, "data": {"name": "x.txt"}}
    forged = forge(root / "out", report, exceptions=[], searched=None, inputs=text)
    answer = verify(forged, original=root / "source")
    names = {each["name"] for each in answer["problems"] if each["check"] == "fidelity"}
    assert not answer["verified"] and names == {"exceptions", "searched.ids"}


def test_verify_misses_the_single_id_where_worse_mixtures_stand(gate: tuple[Path, Any]) -> None:
    root, report = gate
    told = [{"ids": [380, 7], "kl": 9.0, "kl_bf16": 1e-3, "kl_run": 1e-3, "tokens": []}]
    forged = forge(root / "out", report, exceptions=told, verdict="safe", unsafe=[])
    answer = verify(forged, original=root / "source")
    assert not answer["verified"] and [each["name"] for each in answer["problems"]] == ["exceptions"]
    forge(root / "out", report)


def test_a_plan_with_edits_is_not_replayed_without_a_run(gate: tuple[Path, Any], tmp_path: Path) -> None:
    root, _ = gate
    with pytest.raises(UserError, match="leave out --no-audit"):
        convert(root / "source", tmp_path / "out", plan=root / "out", run_model=False)
    assert not (tmp_path / "out").exists()


def test_verify_reads_in_the_exceptions_that_a_safe_verdict_is_forged(gate: tuple[Path, Any]) -> None:
    root, report = gate
    forged = forge(root / "out", report, verdict="safe", unsafe=[])
    problems = json.dumps(verify(forged, run_model=False)["problems"])
    assert "the report says safe, and also the edits harm texts that contain token" in problems


def test_an_edit_far_out_everywhere_harms_nothing(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        table, mlp = model.model.embed_tokens.weight, model.model.layers[0].mlp
        table[:, 0] = torch.where(torch.rand(VOCABULARY) < 0.5, -30.0, 30.0)
        mlp.gate_proj.weight[0, 0] = 30000.0
        mlp.up_proj.weight[0, 8:], mlp.down_proj.weight[3, 0] = torch.randn(WIDTH - 8), 1e-5
        model.lm_head.weight[:, 3] = torch.randn(VOCABULARY)
    report = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out").report
    assert report["inexact"] and report["verdict"] == "safe" and report["exceptions"] == []
    assert report["searched"]["ids"] == VOCABULARY and report["searched"]["covered"] == 1.0


def test_a_cross_attention_may_read_a_wider_encoder(tmp_path: Path) -> None:
    source = open_checkpoint(tiny.save(tiny.build("t5gemma"), tmp_path / "source"))
    plan = Plan(family="t5gemma", exponents={"model.decoder.layers.1.cross_attn.scores": -3})
    assert any(len(ids) > 1 for ids in soft_side.suspected(source, resolve(source), plan, torch.arange(50))[0])


def test_a_text_of_few_tokens_is_repeated(gate: tuple[Path, Any]) -> None:
    root, report = gate
    source, written = (open_checkpoint(root / name) for name in ("source", "out"))
    plan, text = Plan.model_validate(report["plan"]), torch.tensor([[1, 50, 51]])
    found = soft_side.soft_side(source, written, resolve(source), plan, load_config(source.folder), text).exceptions
    assert any(len(entry.ids) == 1 and entry.ids[0] in RARE for entry in found)


def test_rows_are_a_text_with_one_id_in_it_or_drawn_from_several() -> None:
    generator, line = torch.Generator().manual_seed(0), torch.arange(LENGTH)
    row = row_of((500,), line, generator)
    assert (row == 500).sum() == LENGTH // 4 and row[0] == 0 and torch.equal(row[row != 500], line[row != 500])
    assert set(row_of((3, 4), line, generator).tolist()) == {3, 4}


def test_a_run_is_rounded_to_bf16_stochastically(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.randn(4000, 4)
    monkeypatch.setattr(soft_side, "run_batch", lambda model, batch: model(x))
    monkeypatch.setattr(soft_side, "output_on", lambda batch, output: output)
    with torch.no_grad():
        exact, rounded = model(x), run_rounded(None, 1, model)  # type: ignore[arg-type]
    bits = torch.randint(1 << 16, exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    assert torch.equal(rounded, stochastic(exact, torch.bfloat16, bits))
    assert torch.equal(rounded, rounded.bfloat16().float())


@pytest.mark.parametrize(
    ("again", "bf16", "listed"),
    [
        ([1.0] * 8, [1e-3] * 8, 2),
        ([0.005] * 8, [1e-5] * 8, 0),
        ([1.0] * 8, [1e3] + [1e-3] * 7, 2),  # bf16 ruins one row, the edit all
        ([1.0] * 5 + [1e-3] * 3, [1e3] * 3 + [1e-3] * 5, 2),  # the edit ruins most, bf16 three
        ([1.0] + [1e-3] * 7, [1e-3] * 8, 2),  # the edit ruins one, bf16 none
        ([1.0] + [1e-3] * 7, [0.16] + [1e-3] * 7, 0),  # both ruin one
    ],
)
def test_what_harms_one_row_counts_if_it_harms_others(
    again: list[float], bf16: list[float], listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def values(of_eight: list[float], of_one: float, rows: torch.Tensor) -> torch.Tensor:
        return torch.tensor(of_eight * 2 if len(rows) > 2 else [of_one] * 2, dtype=torch.float64)

    monkeypatch.setattr(
        soft_side.Rows, "divergences", lambda self, rows: (values(again, 1.0, rows), torch.zeros(len(rows)))
    )
    monkeypatch.setattr(soft_side.Rows, "bf16", lambda self, rows: values(bf16, 1e-3, rows))
    nothing: Any = None
    rows = soft_side.Rows(nothing, nothing, nothing, nothing, torch.zeros(3, LENGTH).long(), torch.Generator())
    found, kl, run = rows.harmed([(3,), (5, 4)])
    assert [each.ids for each in found] == [[3], [4, 5]][:listed] and bool((kl > run).all())


def test_the_ids_of_the_worst_rows_are_tried_beside_others(
    gate: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One random pair in 256 holds id 7; what harms it together with one id in four is found."""
    root, report = gate
    source, written = (open_checkpoint(root / name) for name in ("source", "out"))

    def divergences(self: soft_side.Rows, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        beside, zeros = (rows % 4 == 1).any(1), torch.zeros(len(rows), dtype=torch.float64)
        return torch.where((rows == 7).any(1), torch.where(beside, 1.0, 1e-3), zeros), zeros

    monkeypatch.setattr(soft_side.Rows, "divergences", divergences)
    monkeypatch.setattr(soft_side.Rows, "bf16", lambda self, rows: torch.zeros(len(rows)))
    monkeypatch.setattr(soft_side, "suspected", lambda *_: ([(7, 8)], None))
    monkeypatch.setattr(soft_side, "MOST_ROWS", 64)
    plan, text = Plan.model_validate(report["plan"]), torch.full((1, LENGTH), 50)
    found = soft_side.soft_side(source, written, resolve(source), plan, load_config(source.folder), text).exceptions
    ids = [tuple(each.ids) for each in found]
    pairs = [each for each in ids if len(each) == 2]
    assert pairs and all(7 in each for each in ids) and len({*ids}) == len(ids)
