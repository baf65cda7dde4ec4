"""Whether fp16 is the more accurate 16-bit format for a checkpoint: measured, not claimed.

The source in fp32 is the reference. A stock user of it would run bf16; a user of the converted checkpoint runs
fp16. Both are compared with the reference on the same batches, position by position. An encoder-only model
gives states instead of probabilities, so there the relative squared error stands in for the divergence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..observe.observer import SiteObserver
from ..run.probe import Batch, run_batch

_POSITIONS_AT_A_TIME = 64
"""Positions compared at a time: in float64 a large vocabulary takes 2 MB each."""


@dataclass(frozen=True)
class Fidelity:
    """How far the source in bf16 and the output in fp16 are from the source in fp32.

    measure "kl": ``kl_*`` is the mean of KL(fp32 ‖ x) per token, in nats; "relative squared error" (encoders):
    Σ(x − fp32)² / Σ fp32² of the last hidden state. ``max_logit_error_*`` is the largest difference of a logit
    (of a state). ``top1_*`` is the share of tokens with the same best id, None for encoders. The bf16 fields
    are None where no bf16 model was given. Padding is left out. A model that gives inf or NaN has infinite
    divergence and error.
    """

    measure: Literal["kl", "relative squared error"]
    kl_bf16: float | None
    kl_fp16: float
    max_logit_error_bf16: float | None
    max_logit_error_fp16: float
    top1_bf16: float | None
    top1_fp16: float | None
    positions: int
    reference: str = "fp32 source"

    def to_json(self) -> dict[str, Any]:
        """Return the ``fidelity`` entry of the report; what is infinite becomes null."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


class _Difference:
    """Running differences of one model from the reference."""

    def __init__(self) -> None:
        self.divergence = self.error = self.agreeing = self.scale = 0.0
        self.positions = 0

    def add(self, reference: Tensor, other: Tensor, probabilities: bool) -> None:
        """Add [positions, channels] of both."""
        for i in range(0, len(reference), _POSITIONS_AT_A_TIME):
            a, b = reference[i : i + _POSITIONS_AT_A_TIME].double(), other[i : i + _POSITIONS_AT_A_TIME].double()
            error = (a - b).abs().max()
            self.error = max(self.error, float(error) if math.isfinite(error) else math.inf)
            if probabilities:
                p, q = a.log_softmax(-1), b.log_softmax(-1)
                divergence = float((p.exp() * (p - q)).sum())
                self.agreeing += float((a.argmax(-1) == b.argmax(-1)).sum())
                self.scale += len(a)
            else:
                divergence = float((a - b).square().sum())
                self.scale += float(a.square().sum())
            self.divergence += divergence if math.isfinite(divergence) else math.inf
            self.positions += len(a)

    @property
    def mean(self) -> float:
        if not self.scale:
            return 0.0 if not self.divergence else math.inf
        return self.divergence / self.scale


@torch.no_grad()
def fidelity(
    reference: nn.Module,
    bf16: nn.Module | None,
    fp16: nn.Module,
    batches: Iterable[Batch],
) -> Fidelity:
    """Return how far ``bf16`` and ``fp16`` are from ``reference`` on ``batches``.

    Stock models in eval mode, each in its own dtype; batches that generate or have no head are passed over. Raises
    ``ValueError`` where none is left.
    """
    from_bf16, from_fp16 = _Difference(), _Difference()
    probabilities = False
    for batch in batches:
        if batch.generate or (batch.decoder_input_ids is not None and not batch.head):
            continue
        probabilities = batch.decoder_attention_mask is not None
        expected = _outputs(reference, batch)
        from_fp16.add(expected, _outputs(fp16, batch), probabilities)
        if bf16 is not None:
            from_bf16.add(expected, _outputs(bf16, batch), probabilities)
    count = from_fp16.positions
    if not count:
        raise ValueError("no batch to compare on: each generates or has no head")
    return Fidelity(
        measure="kl" if probabilities else "relative squared error",
        kl_bf16=None if bf16 is None else from_bf16.mean,
        kl_fp16=from_fp16.mean,
        max_logit_error_bf16=None if bf16 is None else from_bf16.error,
        max_logit_error_fp16=from_fp16.error,
        top1_bf16=from_bf16.agreeing / count if probabilities and bf16 is not None else None,
        top1_fp16=from_fp16.agreeing / count if probabilities else None,
        positions=count,
    )


def _outputs(model: nn.Module, batch: Batch) -> Tensor:
    """The logits or last hidden states of the positions that are not padding, [positions, channels], on the CPU."""
    with SiteObserver(model):  # for its fp16 products, many times faster on a CPU
        output = run_batch(model, batch)
    if batch.decoder_attention_mask is not None:
        values, mask = output.logits, batch.decoder_attention_mask
    else:
        values, mask = output.last_hidden_state, batch.attention_mask
    return values.detach().cpu()[mask.bool()]
