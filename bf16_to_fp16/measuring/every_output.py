"""Compare every output of a stock class with the source's: logits, hidden states, attentions. Both run in fp32 on small
batches. An output may differ by its recorded power of two, and by rounding, whose measure is the source in bf16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rescaling.exponents import OfChannels
from ..rescaling.outputs import LAST
from ..results import OutputEntry
from .batch import Batch, run_batch

EveryOutput = Mapping[str, tuple[Tensor, ...]]
"""The outputs of one batch by name, layer by layer."""

RETURN_ALL: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
INFINITE = 1e300  # JSON has no infinity
SPAN = ("start_logits", "end_logits")  # their common factor has one channel for each


def smallest_batches(batches: Sequence[Batch]) -> list[Batch]:
    images = [batch for batch in batches if batch.has_image]
    smallest = [min(some, key=lambda batch: batch.size) for some in (batches, images) if some]
    return [batch for batch in batches if any(batch is each for each in smallest)]


def run_recording(model: Any, batch: Batch, recorded: Sequence[Batch], outputs: list[EveryOutput]) -> Any:
    index = next((i for i, each in enumerate(recorded) if batch is each), None)
    if index is None:
        return run_batch(model, batch)
    output = run_batch(model, batch, **RETURN_ALL)
    outputs[index] = all_outputs(output)
    return output


def all_outputs(output: Any) -> EveryOutput:
    """Return a stock output's tensors on the CPU; the last of ``hidden_states`` is named as the last state."""
    outputs: dict[str, tuple[Tensor, ...]] = {}
    for name, value in output.items():
        layers = value if isinstance(value, (tuple, list)) else (value,)
        tensors = tuple(each.detach().cpu() for each in layers if isinstance(each, Tensor))
        prefix, states, _ = name.partition("hidden_states")
        if states and name != "image_hidden_states" and len(tensors) > 1:
            outputs.setdefault(f"encoder_{LAST}" if prefix == "encoder_" else LAST, tensors[-1:])
            tensors = tensors[:-1]
        if tensors and name not in outputs:
            outputs[name] = tensors
    return outputs


def output_errors(
    factors: Mapping[str, OfChannels],
    source: Sequence[EveryOutput],
    bf16: Sequence[EveryOutput],
    written: Sequence[EveryOutput],
) -> dict[str, OutputEntry]:
    worst: dict[str, OutputEntry] = {}
    for name, factor in factors.items():
        errors = [
            OutputEntry(
                factor_log2=factor,
                error=relative_error(fp32, unscaled(output, factor, name)),
                error_bf16=relative_error(fp32, rounded),
            )
            for batch in zip(source, bf16, written, strict=True)
            for fp32, rounded, output in zip(*(outputs.get(name, ()) for outputs in batch), strict=True)
        ]
        worst[name] = max(
            errors or [OutputEntry(factor_log2=factor)],
            key=lambda e: (not e.fits(drifts=True), not e.fits(drifts=False), e.ratio),
        )
    return worst


def unscaled(output: Tensor, factor: OfChannels, name: str) -> Tensor:
    exponents = torch.as_tensor(factor, dtype=torch.float64)
    if exponents.dim() and name in SPAN:
        exponents = exponents[SPAN.index(name)]
    return output.double() * 2.0**-exponents


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """Return Σ(actual − expected)² / Σ expected², over the finite elements of ``expected``."""
    finite = expected.isfinite()
    expected, actual = expected[finite].double(), actual[finite].double()
    size, error = float(expected.square().sum()), float((actual - expected).square().sum())
    if not error:
        return 0.0
    return min(error / size, INFINITE) if size and math.isfinite(error) else INFINITE
