"""What a mask must add at least and what a ceiling leaves out, beside plain loops and for every shape of a mask."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

from bf16_to_fp16.measuring.origins import MASKED_REACH, ceiling, masked_span
from bf16_to_fp16.measuring.points import rotated

WHOLE, SHARED = (torch.rand(2, n, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.5 for n in (3, 1))
MASKS = {
    "whole": WHOLE,
    "one for all heads": SHARED,
    "expanded over heads": SHARED.flip(0).expand(2, 3, 4, 5),
    "fewer dimensions": torch.ones(4, 5).triu(1).bool(),
    "keys alone": torch.arange(5) > 2,
    "expanded keys": (torch.arange(5) > 2).expand(2, 3, 4, 5),
    "a row for each query": (torch.arange(4)[:, None] > 1).expand(4, 5),
    "everything": torch.tensor(True),
    "nothing": torch.tensor(False).expand(2, 1, 1, 1),
    "one text": (torch.arange(5) > 2)[None, None, None].expand(1, 1, 4, 5),
}


def span_of(scores: Tensor, masked: Tensor) -> float:
    """Return it for one row, in plain Python."""
    hidden = [x for x, hides in zip(scores.tolist(), masked.tolist(), strict=True) if hides]
    seen = [x for x, hides in zip(scores.tolist(), masked.tolist(), strict=True) if not hides and x > -math.inf]
    return max(0.0, max(hidden) - max(seen) + MASKED_REACH) if hidden and seen else 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", MASKS)
def test_what_a_mask_must_add_is_that_of_each_row(shape: str, dtype: torch.dtype) -> None:
    scores = (20 * torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(3))).to(dtype)
    scores[0, 1, 2] = -math.inf
    scores[1, 2, 3, :3] = 60000.0
    found = masked_span(scores, MASKS[shape])
    rows = zip(scores.reshape(-1, 5), MASKS[shape].expand(scores.shape).reshape(-1, 5), strict=True)
    assert found.dtype == torch.float32 and found.shape == (2, 3, 4)
    assert found.flatten().tolist() == pytest.approx([span_of(*row) for row in rows], rel=1e-6)


@pytest.mark.parametrize("shape", MASKS)
def test_a_ceiling_leaves_out_what_is_masked_and_nothing_else(shape: str) -> None:
    masked = MASKS[shape]
    before, scores = masked.clone(), torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(4))
    most = ceiling(masked, 0.0, torch.float16)
    assert most.dtype == torch.float16 and torch.equal(masked, before)
    assert torch.equal(scores.clamp(-most, most), scores.masked_fill(masked, 0.0))
    assert most.numel() <= masked.numel() and 0 not in most.stride()  # of its own memory, once


def test_no_gradient_goes_through_what_a_mask_leaves_out() -> None:
    scores = torch.tensor([[3.0, 1.0, 7.0, 2.0], [3.0, 1.0, 7.0, 2.0]], requires_grad=True)
    masked_span(scores, torch.tensor([[False, False, True, True], [True] * 4])).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[-1.0, 0.0, 1.0, 0.0], [0.0] * 4]


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
