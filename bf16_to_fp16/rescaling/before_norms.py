"""Exponents of signals that only norms read: as large as in the source, where the stream is smaller. A signal times 2^r
has a gradient times 2^-r, so a smaller stream needs a smaller loss scale. Norms cancel factors, but for eps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ..families.layout import Layout, ResolvedSignal, TensorReader
from ..families.signals import before
from ..numerics import FP16_MAX, PROOF_LIMIT
from ..ranges import ModuleRange
from .channels import ROUNDING, rooms_beside, whole_log2
from .exponents import exponents_of
from .plan import Drift, Plan


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
    limit = FP16_MAX * 2.0 ** -(plan.margin_bits or 0.0)
    exponents, drift = dict(plan.exponents), 0.0
    for path, stream in layout.streams_read.items():
        signal, r = layout.signals.get(before(path)), plan.stream_exponent(stream)
        if signal is None or r >= 0:
            continue
        written = largest_weights(signal, plan, layout, weights, r)
        rooms = [whole_log2(limit / largest) for largest in written if largest > 0]
        exponent = min(0, *rooms_beside(signal, ((ranges, limit), (bounds or {}, PROOF_LIMIT))), *rooms) - r
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


def largest_weights(
    signal: ResolvedSignal, plan: Plan, layout: Layout, weights: TensorReader, stream: int
) -> Iterator[float]:
    """Yield the largest weight of each tensor that makes a norm's input, without the stream's exponent."""
    for name, tensor in layout.tensors.items():
        if any(carried.signal == signal.name for carried in tensor.carries):
            exponents = exponents_of(tensor, plan).full(tensor.shape) - stream
            yield float((weights(name).abs() * 2.0 ** exponents.float()).amax())
