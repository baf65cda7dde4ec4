"""Measure how far the source in bf16 and the converted checkpoint in fp16 are from the source in fp32. Logits are
compared by KL, an encoder's states by relative squared error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reader import Checkpoint
from ..progress import Advance
from ..rescaling.exponents import LAST
from ..rescaling.plan import OfChannels
from ..results import Fidelity, OutputEntry
from .batch import Batch, run_batch, values_of
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
    """Return the logits or last states of a stock output as rows to compare. Most models give one row for each unpadded
    position. A classifier gives one row for each row of the batch. A head with start and end logits gives two rows for
    each row of the batch: one with the start logits, one with the end logits."""
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
    """Add one run of the model on each of ``compared(batches)`` to ``walk``, and return the runs (lanes), which will
    hold the outputs. every: a list that the runs on the ``smallest_batches`` fill. For each of these batches it gets
    all outputs of stock code, hidden states included. options: arguments of ``Walk.add``."""
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
    """Add one fp32 run of the model on each of ``compared(batches)`` to ``walk``, and return the runs, which will hold
    the differences. A difference is between the model's output times ``scale`` and that in ``expected``. probabilities:
    compare by KL, else by squared error."""

    def run(batch: Batch, source: Tensor, model: Any) -> Difference:
        with FastProducts():
            output = run_batch(model, batch)
        return Difference().add(source, output_on(batch, output) * scale, probabilities=probabilities)

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

    @torch.no_grad()
    def add(self, expected: Tensor, actual: Tensor, *, probabilities: bool) -> Difference:
        """Add the difference of two outputs, [positions, channels], to the totals, and return self. probabilities:
        compare by KL, else by squared error."""
        positions = max(1, _ELEMENTS_AT_A_TIME // expected.shape[1])
        for start in range(0, len(expected), positions):
            a, b = (output[start : start + positions].double() for output in (expected, actual))
            error = (a - b).abs_().max()
            self.error = max(self.error, float(error) if math.isfinite(error) else math.inf)
            if probabilities:
                self.agreeing += float((a.argmax(-1) == b.argmax(-1)).sum())
                self.scale += len(a)
                p = a.log_softmax(-1)
                divergence = float(b.log_softmax(-1).sub_(p).mul_(p.exp()).sum().neg())
            else:
                self.scale += float(a.square().sum())
                divergence = float((a - b).square_().sum())
            self.divergence += divergence if math.isfinite(divergence) else math.inf
            self.positions += len(a)
        return self

    @property
    def mean(self) -> float:
        if not self.scale:
            return 0.0 if not self.divergence else math.inf
        return self.divergence / self.scale


def mean_divergence(differences: Sequence[Difference]) -> float:
    total = Difference()
    # Rounding may make the sum of nearly equal outputs negative.
    total.divergence = max(0.0, sum(each.divergence for each in differences))
    total.scale = sum(each.scale for each in differences)
    return total.mean


def fidelity(reference: Outputs, bf16: Outputs | None, fp16: Outputs, *, probabilities: bool) -> Fidelity:
    """Return the report's entry on how far the outputs ``bf16`` and ``fp16`` are from ``reference`` on the same
    batches. probabilities: compare by KL, else by relative squared error. Raises ValueError if there is no batch."""
    from_bf16, from_fp16 = Difference(), Difference()
    for i, expected in enumerate(reference):
        from_fp16.add(expected, fp16[i], probabilities=probabilities)
        if bf16 is not None:
            from_bf16.add(expected, bf16[i], probabilities=probabilities)
    count = from_fp16.positions
    if not count:
        raise ValueError("no batch to compare: each generates text, lacks logits or has padding that attends nowhere")
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


# ---- every output ---------------------------------------------------------------------------------------------------

EveryOutput = Mapping[str, tuple[Tensor, ...]]
"""All outputs of stock code on one batch, by name. Each has one tensor for each layer."""

RETURN_ALL: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
INFINITE = 1e300  # JSON has no infinity
SPAN = ("start_logits", "end_logits")  # their common factor has one channel for each


def smallest_batches(batches: Sequence[Batch]) -> list[Batch]:
    images = [batch for batch in batches if batch.image]
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
    """Return a stock output's tensors by name, on CPU. The last of ``hidden_states`` becomes ``last_hidden_state``."""
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
