"""The bounds of a classifier's head, where a bias or a dropout decides."""

from __future__ import annotations

from pathlib import Path

import torch
from support import tiny

from bf16_to_fp16 import certify


def head_bounds(folder: Path, target: str, rate: float = 0.0) -> dict[str, float]:
    """Return the bounds of a small classifier's head, of which one output is nearly a bias of 1,000."""
    model = tiny.build("t5-classifier")
    model.config.classifier_dropout = rate
    with torch.no_grad():
        model.classification_head.dense.bias[0] = 50.0
        model.classification_head.out_proj.bias[0] = 1000.0
    tiny.save(model, folder)
    sites = certify(folder, target=target)["certificate"]["sites"]
    return {site["name"]: site["bound"] for site in sites if site["name"].startswith("classification_head")}


def test_a_bias_and_a_dropout_count(tmp_path: Path) -> None:
    plain = head_bounds(tmp_path / "plain", "half")
    dropped = head_bounds(tmp_path / "dropped", "train", 0.5)
    assert plain["classification_head.out_proj"] >= 1000
    assert dropped["classification_head.dropout:mul#2"] >= 2
    # Without dropout of the stream, what the head reads is the same; here that is in it as well.
    read = plain["classification_head.dense"] - 50
    assert dropped["classification_head.dense"] - 50 >= 2 * read
