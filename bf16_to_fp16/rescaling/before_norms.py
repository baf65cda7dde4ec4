"""Exponents of signals that only norms read: as large as in the source, where the stream is smaller. A signal times 2^r
has a gradient times 2^-r, so a smaller stream needs a smaller loss scale. Norms cancel factors, but for eps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..families.layout import Layout, ResolvedSignal, TensorReader
from ..families.signals import before
from ..numerics import FP16_MAX, PROOF_LIMIT
from ..ranges import ModuleRange
from .channels import ROUNDING, known_points, whole_log2
from .exponents import exponents_of
from .plan import Drift, Plan


@dataclass(frozen=True)
class Limits:
    plan: Plan
    layout: Layout
    weights: TensorReader
    ranges: Mapping[str, ModuleRange]
    bounds: Mapping[str, ModuleRange]

    def largest_exponent(self, signal: ResolvedSignal, stream: int) -> int:
        """Return the largest exponent at which a norm's input, and the weights that make it, stay under their limits.
        stream: the stream's exponent, which these weights do without."""
        limits = [*self.of_signal(signal), *self.of_weights(signal, stream)]
        return min((whole_log2(limit / largest) for largest, limit in limits if largest > 0), default=0)

    @property
    def limit(self) -> float:
        return FP16_MAX * 2.0 ** -(self.plan.margin_bits or 0.0)

    def of_signal(self, signal: ResolvedSignal) -> Iterator[tuple[float, float]]:
        for ranges, limit in ((self.ranges, self.limit), (self.bounds, PROOF_LIMIT)):
            for _, reached in known_points(ranges, replace(signal, seen=signal.beside)):
                yield float(reached.amax.amax()), limit

    def of_weights(self, signal: ResolvedSignal, stream: int) -> Iterator[tuple[float, float]]:
        for name, tensor in self.layout.tensors.items():
            if any(carried.signal == signal.name for carried in tensor.carries):
                exponents = exponents_of(tensor, self.plan).full(tensor.shape) - stream
                yield float((self.weights(name).abs() * 2.0 ** exponents.float()).amax()), self.limit


def with_smaller_gradients(
    plan: Plan,
    layout: Layout,
    weights: TensorReader,
    ranges: Mapping[str, ModuleRange],
    bounds: Mapping[str, ModuleRange] | None = None,
) -> Plan:
    """Return a plan with exponents before norms that undo the stream's, within limits. No eps may change a norm's
    output by more than one fp16 rounding. weights: before any exponent. ranges: observed on the source, which show how
    small a norm's input is. bounds: of every possible input."""
    if layout.fixed_eps is not None:
        return plan
    limits = Limits(plan, layout, weights, ranges, bounds or {})
    exponents, drift = dict(plan.exponents), 0.0
    for path, stream in layout.streams_read.items():
        signal, r = layout.signals.get(before(path)), plan.stream_exponent(stream)
        if signal is None or r >= 0:
            continue
        exponent = min(0, limits.largest_exponent(signal, r)) - r
        norm = ranges[path].norm if path in ranges else None
        while exponent > 0 and norm is not None and norm.drift(layout.eps, exponent) ** 2 > ROUNDING:
            exponent -= 1
        if exponent > 0:
            exponents[signal.name] = exponent
            drift += 0.0 if norm is None else norm.drift(layout.eps, exponent) ** 2
    if exponents == plan.exponents:
        return plan
    other = 0.0 if plan.drift is None else plan.drift.relative_error
    error = math.sqrt(other**2 + drift / len(layout.norms))
    return plan.model_copy(update={"exponents": exponents, "drift": Drift(relative_error=error)})
