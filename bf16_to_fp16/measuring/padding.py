"""Rows of mixed lengths as one batch, padded as far as stock code allows in fp16. A family says how much padding a row
needs (``spare_padding``), and whether padding may attend to nothing (``blind_padding``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..families.configs import BOTH_WAYS
from ..families.known import of_model_type, spare_padding
from .batch import PADDED, Batch, stack
from .interface import decoder_start, pad_id, takes_decoder_ids
from .stock import setting

CAUSAL = "attends_causally"  # a config attribute that the audit of an unknown family sets


def padded(
    config: Any,
    encoder: Sequence[Tensor],
    decoder: Sequence[Tensor],
    description: str = "padded, mixed lengths",
    kind: str = PADDED,
) -> Batch:
    """Return rows as one batch, padded on the right. Decoder rows get a start token and lose their last id; a model
    without a decoder ignores them."""
    ids, mask = stack(encoder, pad_id(config))
    if not takes_decoder_ids(config):
        return Batch(description, ids, mask, kind=kind)
    start = torch.tensor([decoder_start(config)])
    shifted = [torch.cat([start, row[:-1]]) for row in decoder]
    return Batch(description, ids, mask, *stack(shifted, pad_id(config)), kind=kind)


def padded_left(config: Any, right: Batch) -> Batch:
    ids = torch.full_like(right.input_ids, pad_id(config))
    mask = right.attention_mask.flip(1)
    ids[mask.bool()] = right.input_ids[right.attention_mask.bool()]
    return replace(right, description=f"{right.description}, padded on the left", input_ids=ids, attention_mask=mask)


def bearable(config: Any, batch: Batch) -> list[Batch]:
    """Return the batch as stock code can run it in fp16: with the padding that it needs, or as one unpadded batch per
    length. A batch padded on the left gives none: its rows are another's."""
    if _is_borne(config, batch):
        return [batch]
    if not bool(batch.attention_mask[:, 0].all()):  # on the left: the same rows again
        return []
    if spare_padding(config.to_dict()) < math.inf:
        return [spared(config, batch)]
    lengths = batch.attention_mask.sum(1)
    parts = [(n, (lengths == n).nonzero()[:, 0]) for n in lengths.unique(sorted=True).tolist()]
    return [
        replace(part, input_ids=part.input_ids[:, :n], attention_mask=part.attention_mask[:, :n])
        for n, rows in parts
        for part in [batch.rows(rows)]
    ]


def spared(config: Any, batch: Batch) -> Batch:
    """Return the batch with the padding that stock code needs in fp16; a backward pass needs it in every batch."""
    spare = spare_padding(config.to_dict())
    if not 0 < spare < math.inf:
        return batch
    ids = functional.pad(batch.input_ids, (0, int(spare)), value=pad_id(config))
    return replace(batch, input_ids=ids, attention_mask=functional.pad(batch.attention_mask, (0, int(spare))))


def bearable_as_one(config: Any, batch: Batch) -> Batch:
    """Return one batch that stock code can run in fp16: with the padding that it needs or, where it can run none, with
    rows repeated to the full length."""
    if _is_borne(config, batch):
        return batch
    if spare_padding(config.to_dict()) < math.inf:
        return spared(config, batch)
    places = torch.arange(batch.input_ids.shape[1]) % batch.attention_mask.sum(1, keepdim=True)
    ids = batch.input_ids.gather(1, places)
    return replace(batch, input_ids=ids, attention_mask=torch.ones_like(batch.attention_mask))


def _is_borne(config: Any, batch: Batch) -> bool:
    return spare_padding(config.to_dict()) == 0 or bool(batch.attention_mask.all())


def is_blind(config: Any, batch: Batch) -> bool:
    """Return whether some padding attends to no position: left of a row under a causal mask, or outside a window. For
    an unknown family ``CAUSAL`` says whether the mask is causal."""
    family = of_model_type(config.model_type)
    if family is not None and not family.blind_padding:
        return False
    sides = [(getattr(config, "encoder", config), batch.attention_mask)]
    if batch.decoder_attention_mask is not None:
        sides.append((getattr(config, "decoder", config), batch.decoder_attention_mask))
    causal = not takes_decoder_ids(config) and setting(config, "use_bidirectional_attention") not in BOTH_WAYS
    causal = causal and (family is not None or getattr(config, CAUSAL, False))
    return any(_is_blind(own, mask, causal or i > 0) for i, (own, mask) in enumerate(sides))


def _is_blind(config: Any, mask: Tensor, causal: bool) -> bool:
    empty = mask == 0
    before, behind = (int(padding.cumprod(1).sum(1).amax()) for padding in (empty.long(), empty.flip(1).long()))
    window = setting(config, "sliding_window")
    return (causal and before > 0) or 2 * max(before, behind) >= (math.inf if window is None else window)
