"""A trained checkpoint that no rescaling makes safe, and the short finetune from plain text that does."""

import json
from pathlib import Path

import pytest
import torch

from bf16_to_fp16.conversion.convert import convert
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.distillation import arguments, counted_positions, task_loss
from bf16_to_fp16.finetuning.recipe import Optimizer, Penalty, read_recipe
from bf16_to_fp16.finetuning.run import finetune
from bf16_to_fp16.measuring.stock import load, load_config
from bf16_to_fp16.numerics import FP16_MAX

ROOT = Path(__file__).resolve().parents[2]
HARD = ROOT / "recipes" / "demo" / "t5-hard-bytes"
SCORES = "encoder.block.1.layer.0.SelfAttention:scores"
GATE = "decoder.block.1.layer.2.DenseReluDense.wi_0"
HEAD = "lm_head"


@torch.no_grad()
def loss_of(folder: Path, dtype: torch.dtype, batches: list[TrainingBatch]) -> float:
    """Mean held-out cross-entropy in nats per target token of stock code with every parameter in ``dtype``."""
    model = load(folder, dtype, attention="eager").to(dtype).eval()
    total = positions = 0.0
    for batch in batches:
        assert batch.labels is not None
        logits = model(**arguments(model, batch, torch.device("cpu"))).logits
        total += float(task_loss(logits, batch.labels))
        positions += float(counted_positions(batch).sum())
    return total / positions


def test_exact_exponents_alone_leave_scores_gate_and_logits_unsafe(tmp_path: Path) -> None:
    assert not convert(HARD, tmp_path / "out", exact=True).safe
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    sites = report["regimes"]["half"]["sites"]
    broken = {s["name"] for s in sites if s["limit"] is not None and (s["nonfinite"] or s["saturated"])}
    # An infinity in one place is soon everywhere: what passes 65504 by itself is seen in fp32.
    reached = {site["name"]: site["observed"] for site in report["certificate"]["sites"]}
    for name in (SCORES, GATE, HEAD):
        assert name in broken and reached[name] > FP16_MAX, (name, reached[name])
    assert {f"{GATE} (output)", f"{HEAD} (output)"} <= {str(entry["signal"]) for entry in report["unsafe"]}


@pytest.mark.exhaustive
def test_a_short_finetune_makes_it_safe_and_keeps_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped recipe, whose settings of the training are the defaults, in half its steps."""
    monkeypatch.chdir(ROOT)  # where its paths begin
    shorter = ("schedule.steps=90", "evaluation.every=1000", "quality.max_kl=null", f"out={tmp_path / 'out'}")
    recipe = read_recipe(ROOT / "recipes" / "demo" / "hard.yaml", shorter)
    assert recipe.optimizer == Optimizer() and recipe.penalty == Penalty()
    result = finetune(recipe)
    assert result is not None and result.safe
    assert result.report["proof"] == "certified" and not result.report["uncertified"]
    # Text that nothing was trained on, with the gaps that the checkpoint was trained to fill.
    data = recipe.data.model_copy(update={"first_sentinel": 383})
    held_out = Corpus(data, HARD, load_config(HARD), seed=recipe.seed).held_out(158, 0, 1)
    original = loss_of(HARD, torch.float32, held_out)
    # Byte frequencies alone cost 3.3 nats: the original has learnt something that could be lost.
    assert original < 2.3
    # 1.4 % over it, and 2.8 % after a quarter of the steps.
    assert loss_of(tmp_path / "out", torch.float16, held_out) <= 1.02 * original
