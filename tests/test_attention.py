"""Attention with the scale inside: the stock function in fp32, and finite where the stock product overflows in fp16."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from bf16_to_fp16.attention import SCALED, register
from bf16_to_fp16.probe import batches, run


@pytest.fixture(autouse=True)
def registered() -> None:
    register()
    register()


def logits(model: Any, attention: str) -> list[torch.Tensor]:
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return [run(model, b).logits for b in batches(model.config, None, None) if not b.generate and b.head]


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
    from transformers.models.pegasus.modeling_pegasus import eager_attention_forward

    from bf16_to_fp16.attention import scaled_attention

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
    from bf16_to_fp16.attention import scaled_attention

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
