"""Trained checkpoints with a site past 65504 that no exact exponent moves, converted with all defaults and judged by
stock code alone."""

import math
from pathlib import Path

import pytest
from support import exhaustive, judge, saturated

from bf16_to_fp16 import convert

TEXTS = saturated.train_demo.HELD_OUT.read_text(encoding="utf-8").splitlines()[:6]
UNPROVEN = ("gate-rewarded",)  # whose tied head stands in the way of a proof of the stream
UNSAFE = (
    "gate-gemma",  # whose gains less 1 fp16 rounds by more than bf16 does, with the edit or without
    "logits",  # whose edit is wrong where one token stands that no text has
)

pytestmark = pytest.mark.usefixtures("whole_probe")  # whose rows decide what an edit costs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saturated")


@pytest.mark.parametrize("kind", exhaustive.beyond(("hard",), saturated.KINDS))
def test_what_no_exact_exponent_moves_is_edited_proven_and_as_near_as_bf16(kind: str, folder: Path) -> None:
    source = saturated.saturated(kind, folder)
    report = convert(source, folder / f"{kind}-fp16").report
    assert report["verdict"] == ("unsafe" if kind in UNSAFE else "safe")
    assert report["proof"] == ("observed" if kind in UNPROVEN else "certified")
    for edit in report.get("inexact", []):
        ratio = max(edit["measured"], 1e-10) / max(edit["predicted"], 1e-10)
        assert abs(math.log(ratio)) < math.log(3), edit
    judged = judge.judge(source, folder / f"{kind}-fp16", TEXTS, 0)
    assert judged.finite and not judged.loss >= 3.0  # NaN of a classifier
    assert judged.kl_fp16_text < 3 * judged.kl_bf16_text
    assert judged.kl_fp16_random < 3 * judged.kl_bf16_random
