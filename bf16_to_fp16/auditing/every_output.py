"""Every output of a stock class beside the source's: logits, states between layers, attentions, each with its factor.

A plan multiplies some of them by powers of two, which a report tells. Here it is tried: both models run in fp32 on the
same small batches, and what differs by more than that factor is told from what differs by rounding, of which the source
in bf16 is the measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..rescaling.edits import OfChannels
from ..rescaling.outputs import LAST
from ..run.batch import Batch, run_batch

EveryOutput = Mapping[str, tuple[Tensor, ...]]
"""What a stock class gives on one batch, by the names of ``output_factors``: one tensor, or one for each layer."""

SHOWN: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}

BESIDE_BF16 = 4.0
"""How many times the source's own relative squared error in bf16 an output's may be: an edit is worth 1.75 times its
divergence, and a factor of 2 that no report tells is an error of 1/4 at least."""

HALF_A_FACTOR = 1 / 8  # relative squared error under that of a factor of 2 or 1/2, which is 1/4 at least

NOTHING = 2.0**-20  # relative squared error that counts as none, where bf16 happens to be exact

WITHOUT_END = 1e300  # stands for infinity, which JSON has not

ENDS = ("start_logits", "end_logits")  # outputs that are one of two choices each


@dataclass(frozen=True)
class OutputError:
    """How far an output, divided by its factor, is from the source's in fp32, and how far the source in bf16 is:
    relative squared errors, of the layer that fits least."""

    error: float
    error_bf16: float

    @property
    def beside_bf16(self) -> float:
        """How many times the source's own error in bf16 it is, or what counts as none."""
        return self.error / max(NOTHING, self.error_bf16)

    def fits(self, *, drifts: bool) -> bool:
        """Return whether the output is the source's times its factor, but for rounding, and with ``drifts`` for edits
        and a drift; without, however far bf16 is, not by a factor of 2."""
        return self.beside_bf16 <= BESIDE_BF16 and (drifts or self.error <= HALF_A_FACTOR)

    def badness(self) -> tuple[bool, bool, float]:
        """Return what orders layers: one that fits in no plan is worse than one that a drift may explain."""
        return not self.fits(drifts=True), not self.fits(drifts=False), self.beside_bf16


def batches_shown(compared: Sequence[Batch]) -> list[Batch]:
    """Return on which of the compared batches, in their order, every output is looked at: the smallest, and the
    smallest with images."""
    images = [batch for batch in compared if batch.has_image]
    smallest = [min(some, key=lambda batch: batch.size) for some in (compared, images) if some]
    return [batch for batch in compared if any(batch is each for each in smallest)]


def run_shown(model: Any, batch: Batch, shown: Sequence[Batch], every: list[EveryOutput]) -> Any:
    """Return what ``run_batch`` does, and put all that stock code gives on one of the batches ``shown`` into
    ``every``, in the batch's place."""
    place = next((n for n, each in enumerate(shown) if batch is each), None)
    if place is None:
        return run_batch(model, batch)
    output = run_batch(model, batch, **SHOWN)
    every[place] = every_of(output)
    return output


def every_of(output: Any) -> EveryOutput:
    """Return all that is in a stock output, [rows, positions, …] each, on the CPU; the last of ``hidden_states`` is the
    last state."""
    outputs: dict[str, tuple[Tensor, ...]] = {}
    for name, value in output.items():
        layers = value if isinstance(value, (tuple, list)) else (value,)
        tensors = tuple(each.detach().cpu() for each in layers if isinstance(each, Tensor))
        whose, states, _ = name.partition("hidden_states")
        if states and name != "image_hidden_states" and len(tensors) > 1:
            outputs.setdefault(f"encoder_{LAST}" if whose == "encoder_" else LAST, tensors[-1:])
            tensors = tensors[:-1]
        if tensors and name not in outputs:
            outputs[name] = tensors
    return outputs


def output_errors(
    factors: Mapping[str, OfChannels],
    expected: Sequence[EveryOutput],
    bf16: Sequence[EveryOutput],
    written: Sequence[EveryOutput],
) -> dict[str, OutputError]:
    """Return by name how far what was written is from the source on the same batches; factors: log2 of what its outputs
    are multiplied by. What a class does not give on these batches is left out."""
    found: dict[str, OutputError] = {}
    for name, factor in factors.items():
        layers = list(layers_of(name, expected, bf16, written))
        errors = [
            OutputError(relative_error(source, unscaled(other, factor, name)), relative_error(source, rounded))
            for source, rounded, other in layers
        ]
        if errors:
            found[name] = max(errors, key=OutputError.badness)
    return found


def layers_of(name: str, *runs: Sequence[EveryOutput]) -> Iterator[tuple[Tensor, ...]]:
    """Yield an output of several runs, layer by layer, on every batch."""
    for batch in zip(*runs, strict=True):
        yield from zip(*(shown.get(name, ()) for shown in batch), strict=True)


def unscaled(output: Tensor, factor: OfChannels, name: str) -> Tensor:
    """Return an output divided by its factor, in float64."""
    exponents = torch.as_tensor(factor, dtype=torch.float64)
    if exponents.dim() and name in ENDS:  # one choice of the two of a span
        exponents = exponents[ENDS.index(name)]
    return output.double() * 2.0**-exponents


def relative_error(expected: Tensor, found: Tensor) -> float:
    """Return Σ(found − expected)² / Σ expected² over what is finite in the expected, ``WITHOUT_END`` at most."""
    kept = expected.isfinite()
    source, other = expected[kept].double(), found[kept].double()
    size, error = float(source.square().sum()), float((other - source).square().sum())
    if not error:
        return 0.0
    return min(error / size, WITHOUT_END) if size and math.isfinite(error) else WITHOUT_END
