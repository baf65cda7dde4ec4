"""Attention with the scale inside: the stock function in fp32, and finite where the stock product overflows in fp16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from transformers.models.pegasus.modeling_pegasus import eager_attention_forward

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


def test_it_stays_finite_where_an_unscaled_product_overflows() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, 6, 64) * 60
    key = query.clone()
    assert float((query @ key.transpose(2, 3)).max()) > 65504
    module = torch.nn.Module().eval()
    value = torch.randn(1, 2, 6, 64)
    q, k, v = query.half(), key.half(), value.half()
    stock, _ = eager_attention_forward(module, q, k, v, None, scaling=64**-0.5)
    scaled, weights = scaled_attention(module, q, k, v, None, scaling=64**-0.5)
    assert not bool(torch.isfinite(stock).all())
    assert bool(torch.isfinite(scaled).all()) and torch.allclose(weights.float().sum(-1), torch.ones(1), atol=1e-2)
    exact, _ = scaled_attention(module, query, key, value, None, scaling=64**-0.5)
    assert torch.allclose(scaled.float(), exact, atol=2e-2)


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
    attention = model.model.encoder.layers[1].self_attn
    seen: list[torch.Tensor] = []
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).register_forward_hook(lambda module, given, out: seen.append(out.detach()))

    def largest() -> float:
        """Return the largest unscaled score of that attention, on what an audit runs."""
        top = 0.0
        for batch in batches(model.config, None, None):
            seen.clear()
            with torch.no_grad():
                run_batch(model, batch)
            for query, key in zip(seen[::2], seen[1::2], strict=True):
                q, k = (x.view(*x.shape[:2], 3, 8).transpose(1, 2) for x in (query, key))
                top = max(top, float((q @ k.transpose(2, 3)).abs().max()))
        return top

    with torch.no_grad():
        factor = (100_000 / largest()) ** 0.5
        for name in ("q_proj", "k_proj"):
            getattr(attention, name).weight.mul_(factor)
            getattr(attention, name).bias.mul_(factor)
    assert 65504 < largest() < 65504 * 8**0.5
    folder = tiny.save(model, tmp_path / "pegasus", torch.float16)
    found = {}
    for name, status in (("eager", 1), (SCALED, 0)):
        command = f"audit {folder} --regime half --attention {name} --json {tmp_path / 'report.json'}"
        assert main(command.split()) == status
        found[name] = json.loads((tmp_path / "report.json").read_text())
        assert found[name]["attention"] == [name]
    broken = [site["name"] for site in found["eager"]["regimes"]["half"]["sites"] if site["nonfinite"]]
    assert "model.encoder.layers.1.self_attn:scores" in broken
    half = found[SCALED]["regimes"]["half"]
    scores = next(site for site in half["sites"] if site["name"] == "model.encoder.layers.1.self_attn:scores")
    assert half["nonfinite"] == half["saturated"] == 0
    assert 65504 / 8**0.5 < scores["amax"] < 65504


def test_an_unknown_attention_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tiny.pegasus(), tmp_path / "pegasus")
    with pytest.raises(UserError, match=r"flash: no such attention; choose from eager, sdpa, scaled"):
        audit(folder, attention=("flash",))
