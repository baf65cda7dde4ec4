"""Attention with the scale inside: the stock function in fp32, and finite where the stock product overflows in fp16."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny

from bf16_to_fp16 import UserError, audit
from bf16_to_fp16.cli import main
from bf16_to_fp16.run.batch import run_batch
from bf16_to_fp16.run.probe import batches
from bf16_to_fp16.run.scaled_attention import SCALED, register, scaled_attention


@pytest.fixture(autouse=True)
def registered() -> None:
    register()
    register()


def logits(model: Any, attention: str) -> list[torch.Tensor]:
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return [run_batch(model, b).logits for b in batches(model.config, None, None) if not b.generate and b.head]


@pytest.mark.parametrize("kind", ["t5", "mt5", "pegasus"])
def test_it_is_stock_attention_to_rounding_and_for_a_scale_of_1_to_the_bit(kind: str) -> None:
    torch.manual_seed(0)
    model = tiny.build(kind).float().eval()
    for stock, scaled in zip(logits(model, "eager"), logits(model, SCALED), strict=True):
        if kind == "pegasus":
            assert torch.allclose(stock, scaled, rtol=1e-3, atol=1e-4 * float(stock.abs().max()))
        else:
            assert torch.equal(stock, scaled)


def test_masks_bias_and_dropout_are_used() -> None:
    module = torch.nn.Module().eval()
    query, key, value = torch.randn(3, 1, 1, 4, 8).unbind(0)
    mask = torch.zeros(1, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e9)
    _, weights = scaled_attention(module, query, key, value, mask)
    assert float(weights[0, 0].triu(1).abs().max()) == 0
    bias = torch.zeros(1, 1, 4, 4)
    bias[..., 0] = 100.0
    _, weights = scaled_attention(module, query, key, value, None, position_bias=bias)
    assert torch.allclose(weights[..., 0], torch.ones(1))
    module.train()
    _, weights = scaled_attention(module, query, key, value, None, dropout=1.0)
    assert float(weights.abs().max()) == 0


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_the_scale_is_the_heads_unless_given_and_dropout_belongs_to_training(scaling: float | None) -> None:
    torch.manual_seed(0)
    module = torch.nn.Module().eval()
    query, key, value = torch.randn(3, 2, 3, 40, 8).unbind(0)
    wanted = (query @ key.transpose(2, 3) * (8**-0.5 if scaling is None else scaling)).softmax(-1)
    context, weights = scaled_attention(module, query, key, value, None, scaling=scaling, dropout=0.5)
    assert torch.allclose(weights, wanted, atol=1e-6)
    assert torch.allclose(context, (wanted @ value).transpose(1, 2), atol=1e-5)
    _, weights = scaled_attention(module.train(), query, key, value, None, scaling=scaling, dropout=0.5)
    kept = weights != 0
    assert 0.4 < float(kept.float().mean()) < 0.6 and torch.allclose(weights[kept], 2 * wanted[kept], atol=1e-6)


def test_an_audit_shows_a_pegasus_whose_unscaled_scores_overflow_safe_under_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny.pegasus().float().eval()

    def audited(attention: str, status: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what pure half shows under an attention, and what of its scores in one block."""
        folder, report = tiny.save(model, tmp_path / "pegasus", torch.float16), tmp_path / "report.json"
        command = f"audit {folder} --regime half --attention {attention} --json {report}"
        assert main(command.split()) == status
        found = json.loads(report.read_text())
        assert found["attention"] == [attention]
        half = found["regimes"]["half"]
        return half, next(s for s in half["sites"] if s["name"] == "model.encoder.layers.1.self_attn:scores")

    _, scores = audited(SCALED, 0)
    attention = model.model.encoder.layers[1].self_attn
    with torch.no_grad():
        for linear in (attention.q_proj, attention.k_proj):
            for parameter in linear.parameters():  # so that unscaled scores reach 100,000
                parameter.mul_((100_000 / (scores["amax"] * 8**0.5)) ** 0.5)
    _, scores = audited("eager", 1)
    assert scores["nonfinite"]
    half, scores = audited(SCALED, 0)
    assert half["nonfinite"] == half["saturated"] == 0
    assert 65504 / 8**0.5 < scores["amax"] < 65504


def test_an_unknown_attention_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tiny.pegasus(), tmp_path / "pegasus")
    with pytest.raises(UserError, match=r"flash: no such attention; choose from eager, sdpa, scaled"):
        audit(folder, attention=("flash",))
