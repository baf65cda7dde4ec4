"""Attention whose scores never pass through an unscaled maximum: the square root of the scale goes into q and into k.

Stock eager attention multiplies q by k first and by 1/√d after, so that in fp16 the product may overflow. In fp32 the
result equals the stock one to rounding; where the scale is 1 (the T5 family) it is the same function to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SCALED = "scaled"
"""Name of the implementation: ``from_pretrained(..., attn_implementation="scaled")`` after ``register()``."""


def scaled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return (context [rows, length, heads, head size], weights [rows, heads, length, keys]) of q, k, v as
    transformers' attention interface hands them over: [rows, heads, length, head size], of which k and v may have
    fewer heads. It has as many parameters as that interface."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if scale != 1.0:
        query, key = query * scale**0.5, key * scale**0.5
    if (group := query.shape[1] // key.shape[1]) > 1:  # several heads of queries share one of keys and values
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.matmul(query, key.transpose(2, 3))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(scores.softmax(-1), p=dropout, training=module.training)
    context = torch.matmul(weights, value).transpose(1, 2).contiguous()
    return context, weights


def register() -> None:
    """Make the implementation known to transformers, with the masks of eager attention; again does nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(SCALED, scaled_attention)
    AttentionMaskInterface.register(SCALED, eager_mask)
