"""Every key that stock code knows, and some that nobody does, edited: refused, not certified, or under every bound."""

from collections import Counter
from pathlib import Path

import pytest
from support import config_edits, exhaustive

from bf16_to_fp16.measuring import agreement
from bf16_to_fp16.quiet import quiet

EDITS = {"t5": 300} | dict.fromkeys(("longt5", "switch", "pegasus", "gemma3", "llama-biased"), 200)
EDITS |= dict.fromkeys(("umt5", "mbart", "bigbird_pegasus"), 100)
"""Edits of each kind, one in four together with another: every key of most, fewer of what others repeat."""


@pytest.mark.parametrize(
    ("kind", "number", "seed"),
    [
        *((kind, 12, exhaustive.TODAY) for kind in EDITS),
        *(pytest.param(kind, number, 0, marks=pytest.mark.exhaustive) for kind, number in EDITS.items()),
    ],
)
def test_an_edited_config_is_refused_uncertified_or_agrees(kind: str, number: int, seed: int, tmp_path: Path) -> None:
    case = config_edits.original(kind, tmp_path)
    assert config_edits.judge(case, {}) == "agrees"
    counts, failures = Counter[str](), list[str]()
    with quiet():
        for edit in case.drawn(number, seed):
            try:
                counts[config_edits.judge(case, edit)] += 1
            except Exception as error:
                failures.append(f"{kind} {edit}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    assert not failures, failures
    assert min(counts["refused"], counts["agrees"]) > number / 10


def test_without_the_door_an_edit_passes_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the door keeps out is found by the run."""
    case = config_edits.original("t5", tmp_path)
    monkeypatch.setattr(agreement, "check_agreement", lambda *_: None)
    with pytest.raises(AssertionError, match="DenseReluDense"):
        config_edits.judge(case, {"dense_act_fn": "relu2"})
