"""Bounds of what happens inside the modules of a certificate, by the audit's names: inputs, copies, casts, masks of
dropout, and steps that have no limit. They follow from the certificate and the weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bf16_to_fp16.bounds import certificate as certificates
from bf16_to_fp16.bounds.arithmetic import COMPUTED, UNIT, UNIT32, Arithmetic
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.families.configs import config_value
from bf16_to_fp16.families.layout import Layout, TensorReader
from bf16_to_fp16.families.wiring import Attention, Experts, StackEnds
from bf16_to_fp16.numerics import FP16_MAX

FP16_OVERFLOW = 65520.0  # values from here on are inf in fp16

CARRYING = {"to", "clone", "cat", "where", "embedding", "index", "constant_pad_nd", "repeat", "stack"}
CARRYING |= {"clamp", "mul", "div", "bernoulli", "native_dropout", "add", "neg", "abs"}
"""Operations that only move, choose, limit, mask or negate values of their module, or take their magnitude."""


@dataclass(frozen=True)
class Whole(Certificate):
    """A certificate with ``inner``, bounds of module inputs and weights, which also hold for copies and casts inside
    the module, and ``unlimited``, bounds of operations that may give inf without harm."""

    inner: Mapping[str, float] = field(default_factory=dict)
    unlimited: Mapping[str, float] = field(default_factory=dict)

    def at(self, name: str) -> float | None:
        """Return the bound of a site by the audit's name; None if unknown. Copies, casts, masks, clamps and dropout's
        steps have the bound of their module's values. Of repeated operations the largest bound counts."""
        if name in self.unlimited:
            return self.unlimited[name]
        by_name = {site.name: site.largest for site in self.sites}
        if name in by_name or name in self.inner:
            return max(by_name.get(name, 0.0), self.inner.get(name, 0.0))
        plain = name.split("#")[0]
        same = [v for values in (by_name, self.inner) for n, v in values.items() if n.split("#")[0] == plain]
        if same:
            return max(same)
        path, _, operation = plain.partition(":")
        if operation and operation not in CARRYING:
            return None
        return max(
            (v for values in (by_name, self.inner) for n, v in values.items() if is_inside(n, path)), default=None
        )


def is_inside(name: str, path: str) -> bool:
    return name == path or name.startswith((f"{path}:", f"{path}."))


def bound(layout: Layout, weights: TensorReader, arithmetic: Arithmetic | None = None, **options: Any) -> Whole:
    """Return the certificate that the package's ``bound`` gives, with the bounds inside its modules."""
    certificate = certificates.bound(layout, weights, arithmetic, **options)
    inner: dict[str, float] = {}
    for name, value in inner_bounds(layout, weights, certificate):
        inner[name] = max(value, inner.get(name, 0.0))
    unlimited: dict[str, float] = {}
    sites = {site.name: site.largest for site in certificate.sites}
    for path in (name.removesuffix(":mul#4") for name in sites if name.endswith(":mul#4")):
        if f"{path}:add#2" in sites and f"{path}:tanh" in sites:
            unlimited |= gelu_new_steps(path, 2 * sites[f"{path}:mul"], certificate.arithmetic)
    return Whole(**vars(certificate), inner=inner, unlimited=unlimited)


def inner_bounds(layout: Layout, weights: TensorReader, certificate: Certificate) -> Iterator[tuple[str, float]]:
    for path, ranges in certificate.ranges.items():
        if ranges.input.amax.numel():
            yield f"{path}:input", float(ranges.input.amax.max()) * COMPUTED  # which are rounded to fp32
    for name in layout.tensors:
        yield f"{name.rpartition('.')[0]}:weight", largest(weights(name))
    for projector in layout.projectors:
        if projector.pool:
            yield projector.pool, FP16_MAX
    for part in layout.topology:
        if isinstance(part, StackEnds) and part.rounds_scale and layout.embedding_scale(part) != 1.0:
            scale = layout.embedding_scale(part) * (1 + certificate.arithmetic.unit)
            yield f"{part.scaling.removesuffix(':mul')}:to", scale
        elif isinstance(part, Attention):
            # SDPA's plain path multiplies queries and keys by the root of the scale.
            paths = filter(None, (part.query, part.key, part.query_norm, part.key_norm))
            most = max(float(certificate.ranges[path].output.amax.max()) for path in paths) * COMPUTED
            yield from ((site, most * max(1.0, layout.score_scale(part))) for site in part.scaling)
        elif isinstance(part, Experts):
            yield from router_steps(layout, weights, part)
    if layout.head is not None:
        # The model itself selects positions of the head's input, and splits its output.
        ends = (
            certificate.ranges[layout.head.linears[0].at].input,
            certificate.ranges[layout.head.linears[-1].at].output,
        )
        yield "model:head", max(float(end.amax.max()) for end in ends) * COMPUTED
        for linear in layout.head.linears:
            yield f"{linear.at}:weight", largest(weights(linear.weight))
    if certificate.arithmetic.train:
        rates = [float(str(config_value(layout.family, layout.config, key))) for key in layout.family.dropout.values()]
        least = (1 - max(rates, default=0.0)) / (1 + UNIT)
        for site in certificate.sites if least < 1 else ():
            for operation in ("bernoulli", "div"):
                yield f"{site.name.partition(':')[0]}:{operation}", (1 + UNIT) / least


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def router_steps(layout: Layout, weights: TensorReader, sublayer: Experts) -> Iterator[tuple[str, float]]:
    """Yield the steps from a router's logits to its weights. All steps are in fp32, except for one cast."""
    _, weight, together = layout.experts_together(sublayer)
    number, path = len(sublayer.experts), sublayer.router
    yield f"{path}:topk", 1.0
    if sublayer.chosen:
        yield f"{path}:sum", number * (1 + number * UNIT32)
    if sublayer.scaling:
        yield f"{path}:mul", max(weight, together)
    if sublayer.correction:
        most = 2 * (1.0 + largest(weights(sublayer.correction).double()))
        # The sum: of a group's two best, and of the weights of those that are chosen.
        yield from ((f"{path}:{step}", most) for step in ("add", "topk", "masked_fill", "sum"))


def gelu_new_steps(path: str, x: float, arithmetic: Arithmetic) -> dict[str, float]:
    """Return bounds of gelu_new's operations before its tanh, for an input up to ``x``, by the audit's names. These
    operations have no limit: from |x| = 40.3 on they are inf in fp16, which tanh maps to ±1."""

    def computed(value: float) -> float:
        rounded = value * (1 + arithmetic.unit) * COMPUTED + arithmetic.tiny
        return rounded if rounded < FP16_OVERFLOW else math.inf

    cube = computed(x * x * x)
    multiple = computed(0.044715 * cube)
    total = computed(x + multiple)
    product = computed(math.sqrt(2 / math.pi) * total)
    return {f"{path}:pow": cube, f"{path}:mul#2": multiple, f"{path}:add": total, f"{path}:mul#3": product}
