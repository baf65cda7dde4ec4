"""The saturated checkpoints are what tests of their conversion take them for: stock code is finite in fp32 and not in
fp16, and an edit by hand changes the fp32 outputs by less than bf16 does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import judge, saturated

TEXTS = saturated.train_demo.HELD_OUT.read_text(encoding="utf-8").splitlines()[:6]
ROWS = {"hard": True, "logits": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the checkpoints that this file has made."""
    return tmp_path_factory.mktemp("saturated")


@pytest.mark.parametrize("kind", ["gate-silu", "scores-rewarded", "bias", "hard"])
def test_an_edit_by_hand_costs_less_than_bf16_and_stock_fp16_is_not_finite(kind: str, folder: Path) -> None:
    source = saturated.saturated(kind, folder)
    edited = folder / f"{kind}-edited"
    saturated.edit(kind, source, edited, rows=ROWS.get(kind, False))
    assert not judge.judge(source, source, TEXTS, 0, rows=2).finite
    judged = judge.judge(source, edited, TEXTS, 0)
    assert 1.0 < judged.loss < 3.0
    assert judged.kl_fp32_text < 0.1 * judged.kl_bf16_text
    assert judged.kl_fp32_random < 0.1 * judged.kl_bf16_random


def test_the_judge_gives_infinity_for_one_output_that_is_not_finite_and_zero_for_the_same() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.0]]).double()
    broken = logits.clone()
    broken[1, 0] = torch.inf
    assert judge.divergences([logits], [logits], logits=True).tolist() == [0.0, 0.0]
    assert judge.divergences([logits], [broken], logits=True).tolist() == [0.0, torch.inf]
    assert judge.divergences([logits], [2 * logits], logits=False).tolist() == [1.0, 1.0]


def test_a_kind_is_the_same_on_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(saturated.KINDS, "short", replace(saturated.KINDS["scores"], steps=2))
    first, second = (saturated.saturated("short", tmp_path / name) for name in ("first", "second"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
