"""Whether fp16 is the more accurate 16-bit format for a checkpoint. The source in bf16 and the output in fp16 are
compared with the fp32 source: logits by KL, an encoder's states by relative squared error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import Checkpoint
from ..progress import Advance
from ..results import Fidelity
from .batch import Batch, run_batch, values_of
from .every_output import EveryOutput, run_recording, smallest_batches
from .lanes import Lane, Walk, results_of
from .products import FastProducts

NO_CHOICE = -1e9  # the logit of a position that cannot be chosen
_ELEMENTS_AT_A_TIME = 1 << 18  # logits compared at a time: 2 MB in float64, which a cache holds


Outputs = Sequence[Tensor]
"""A model's output on each compared batch: [positions, channels] without padding, on the CPU."""


@dataclass(frozen=True)
class Reference:
    fp32: Outputs
    bf16: Outputs
    every_fp32: Sequence[EveryOutput]
    every_bf16: Sequence[EveryOutput]


def compared(batches: Sequence[Batch]) -> list[Batch]:
    return [b for b in batches if b.head and not b.generate and not b.blind]


def output_on(batch: Batch, output: Any) -> Tensor:
    """Return a stock output's logits or last states, [choices, channels]. A class with one answer a row gives its
    logits, a span head the logits of every position, any other class its values at unpadded positions."""
    values = values_of(output).detach().cpu()
    mask = (batch.attention_mask if batch.decoder_attention_mask is None else batch.decoder_attention_mask).bool()
    if values.dim() == 2:
        return values
    if "start_logits" in output:
        # −∞ would give NaN where it is subtracted, and no fp16 number is low enough.
        return values.float().transpose(1, 2).masked_fill(~mask[:, None], NO_CHOICE).flatten(0, 1)
    return values[mask]


def add_outputs(
    walk: Walk, batches: Sequence[Batch], dtype: torch.dtype, every: list[EveryOutput] | None = None, **options: Any
) -> list[Lane[Tensor]]:
    """Add a lane to a walk for each compared batch, whose result is its output by ``FastProducts``. every: receives all
    stock outputs on ``smallest_batches``, in order. options: for ``Walk.add``."""
    shown = [] if every is None else smallest_batches(compared(batches))
    put = [] if every is None else every
    put.extend({} for _ in shown)

    def run(batch: Batch, model: Any) -> Tensor:
        with FastProducts():
            return output_on(batch, run_recording(model, batch, shown, put))

    return [walk.add(partial(run, batch), dtype, **options) for batch in compared(batches)]


def outputs_on(some: Sequence[Batch], batches: Sequence[Batch], known: Outputs) -> list[Tensor]:
    chosen = {id(batch) for batch in some}
    return [output for batch, output in zip(compared(batches), known, strict=True) if id(batch) in chosen]


def add_differences(
    walk: Walk, batches: Sequence[Batch], expected: Outputs, *, probabilities: bool, scale: Tensor, **options: Any
) -> list[Lane[Difference]]:
    """Add fp32 lanes that compare their outputs, times ``scale``, with ``expected``. Their results are the differences
    alone: outputs of many runs would fill the memory."""

    def run(batch: Batch, source: Tensor, model: Any) -> Difference:
        with FastProducts():
            output = run_batch(model, batch)
        return difference(source, output_on(batch, output) * scale, probabilities=probabilities)

    pairs = zip(compared(batches), expected, strict=True)
    return [walk.add(partial(run, batch, source), torch.float32, **options) for batch, source in pairs]


def reference_of(checkpoint: Checkpoint, inputs: Sequence[Batch], advance: Advance | None = None) -> Reference:
    walk, every_fp32, every_bf16 = Walk(checkpoint), list[EveryOutput](), list[EveryOutput]()
    fp32 = add_outputs(walk, inputs, torch.float32, every_fp32)
    bf16 = add_outputs(walk, inputs, torch.bfloat16, every_bf16)
    walk.run(advance)
    return Reference(results_of(fp32), results_of(bf16), every_fp32, every_bf16)


class Difference:
    def __init__(self) -> None:
        self.divergence = self.error = self.agreeing = self.scale = 0.0
        self.positions = 0

    def add(self, a: Tensor, p: Tensor | None, other: Tensor) -> None:
        b = other.double()
        error = (a - b).abs_().max()
        self.error = max(self.error, float(error) if math.isfinite(error) else math.inf)
        if p is not None:
            self.agreeing += float((a.argmax(-1) == b.argmax(-1)).sum())
            self.scale += len(a)
            divergence = float(b.log_softmax(-1).sub_(p).mul_(p.exp()).sum().neg())
        else:
            self.scale += float(a.square().sum())
            divergence = float((a - b).square_().sum())
        self.divergence += divergence if math.isfinite(divergence) else math.inf
        self.positions += len(a)

    @property
    def mean(self) -> float:
        if not self.scale:
            return 0.0 if not self.divergence else math.inf
        return self.divergence / self.scale


def parts_of(expected: Tensor, *, probabilities: bool) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    positions = max(1, _ELEMENTS_AT_A_TIME // expected.shape[1])
    for start in range(0, len(expected), positions):
        part = slice(start, start + positions)
        a = expected[part].double()
        yield part, a, a.log_softmax(-1) if probabilities else None


@torch.no_grad()
def difference(expected: Tensor, found: Tensor, *, probabilities: bool) -> Difference:
    made = Difference()
    for part, a, p in parts_of(expected, probabilities=probabilities):
        made.add(a, p, found[part])
    return made


def mean_divergence(differences: Sequence[Difference]) -> float:
    total = Difference()
    # Rounding may make the sum of nearly equal outputs negative.
    total.divergence = max(0.0, sum(each.divergence for each in differences))
    total.scale = sum(each.scale for each in differences)
    return total.mean


@torch.no_grad()
def fidelity(reference: Outputs, bf16: Outputs | None, fp16: Outputs, *, probabilities: bool) -> Fidelity:
    """Return how far ``bf16`` and ``fp16`` are from ``reference``. Raises ValueError without batches."""
    from_bf16, from_fp16 = Difference(), Difference()
    for i, expected in enumerate(reference):
        for part, a, p in parts_of(expected, probabilities=probabilities):
            from_fp16.add(a, p, fp16[i][part])
            if bf16 is not None:
                from_bf16.add(a, p, bf16[i][part])
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
        kl_fp32=None,
        squared_error_fp32=None,
        reference="fp32 source",
    )
