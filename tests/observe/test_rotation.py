"""Queries and keys that the attack turns again are what stock code makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

from bf16_to_fp16.observe.points import rotated


@pytest.mark.parametrize(("stock", "turned"), [(modeling_llama, 12), (modeling_glm4, 12), (modeling_glm4, 6)])
def test_a_rotation_is_stock_codes(stock: Any, turned: int) -> None:
    """Of pairs of halves, of pairs side by side, and of the first channels of a head alone."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 3, 4, 7, 12, generator=generator)
    angles = torch.randn(3, 7, turned // 2, generator=generator).repeat(1, 1, 2)
    wanted = stock.apply_rotary_pos_emb(queries, keys, angles.cos(), angles.sin())
    side_by_side = stock is modeling_glm4
    for x, made in zip((queries, keys), wanted, strict=True):
        assert torch.equal(rotated(x, angles.cos(), angles.sin(), interleaved=side_by_side), made)
