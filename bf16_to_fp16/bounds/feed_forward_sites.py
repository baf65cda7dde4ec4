"""Bound and record the sites of a feed-forward, and of a router with its experts."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..families.wiring import Experts, FeedForward
from .arithmetic import COMPUTED, UNIT32
from .feed_forward import GatedNeurons, Neurons, PlainNeurons, feed_forward_output
from .kinds import SiteKind
from .linear import LinearBound, Projection
from .module_findings import ModuleFindings, Normed, Projected

WEIGHTS = ("weight", "bias")  # of a linear

OPERATIONS = {"swish": "silu", "gelu_pytorch_tanh": "gelu"}
"""The operation that computes an activation, where it has another name."""


def feed_forward_sites(findings: ModuleFindings, sublayer: FeedForward, source: Normed) -> Projected:
    """Record the sites of a feed-forward that reads ``source``; return bounds and mean squares of its output
    projection."""
    linears = filter(None, (sublayer.gate, sublayer.linear, sublayer.output))
    names = frozenset(f"{linear}.{part}" for linear in linears for part in WEIGHTS)
    keep = findings.kept("neurons")
    of = (findings.arithmetic, keep, replace(findings.spectra, about=names))
    neurons: Neurons
    if sublayer.gate:
        reads = ((sublayer.gate, SiteKind.GATE, source), (sublayer.linear, SiteKind.NEURON, source))
        (gate, gate_square), (other, other_square) = findings.linears(sublayer.fused, *reads)
        activation_sites(findings, sublayer, gate)
        neurons = GatedNeurons(gate, other, *of)
        findings.note(f"{sublayer.at}:mul", SiteKind.PRODUCT, neurons.undropped)
        mean_square = (gate_square * other_square + 2 * neurons.products.square()) / 2
    else:
        plain, plain_square = findings.linear(sublayer.linear, SiteKind.NEURON, source)
        activation_sites(findings, sublayer, plain)
        neurons = PlainNeurons(plain, sublayer.activation, *of)
        mean_square = plain_square / 2
    if keep != 1.0:
        path = sublayer.dropouts[0] if sublayer.dropouts else sublayer.at
        findings.note(f"{path}:mul", SiteKind.PRODUCT, neurons.bound)
    weight, bias = findings.weight(sublayer.output)
    projection = feed_forward_output(neurons, weight, bias, findings.refine, findings.arithmetic)
    return findings.project(sublayer.output, weight, projection, neurons.bound, mean_square)


def activation_sites(findings: ModuleFindings, sublayer: FeedForward, before: LinearBound) -> None:
    """Record the sites inside a feed-forward's activation. before: the bounds of the activation's input."""
    # Each value is at most |x|, or a constant because |tanh| ≤ 1. What gelu_new computes before its tanh has no limit:
    # from |x| = 40.3 on it is inf in fp16, which tanh maps to ±1.
    note, after = findings.note, findings.rounded(before.bound)
    if sublayer.activation == "gelu_new":
        note(f"{sublayer.act}:mul", SiteKind.ACTIVATION, findings.rounded(before.bound / 2))
        note(f"{sublayer.act}:tanh", SiteKind.ACTIVATION, 1.0)
        note(f"{sublayer.act}:add#2", SiteKind.ACTIVATION, 2.0)
        note(f"{sublayer.act}:mul#4", SiteKind.ACTIVATION, findings.rounded(after))
    else:
        name = OPERATIONS.get(sublayer.activation, sublayer.activation)
        note(f"{sublayer.act}:{name}", SiteKind.ACTIVATION, after)


def experts_sites(findings: ModuleFindings, sublayer: Experts, source: Normed) -> Projected:
    """Record the sites of a router and its experts. Return bounds and mean squares of their output, the sum of the
    experts that one token uses."""
    (read, square), a, note = source, findings.arithmetic, findings.note
    if a.train and sublayer.noise:
        # Where the norm's output is in fp32 already, stock code multiplies what the experts read as well.
        read = read.scaled(1 + findings.layout.noise(sublayer), a)
        note(f"{sublayer.router}:mul", SiteKind.NORM, read.bound)
    source = read, square
    findings.linear(sublayer.classifier, SiteKind.ROUTING, source)
    number, weight, together = findings.layout.experts_together(sublayer)
    for step in ("softmax", "max", "sigmoid", "gather", "div"):
        note(f"{sublayer.router}:{step}", SiteKind.WEIGHTS, 1.0)
    each = [feed_forward_sites(findings, expert, source) for expert in sublayer.experts]
    bound, length = torch.stack([output.bound for output, _ in each]).amax(0), max(output.length for output, _ in each)
    product, mean_square = bound, torch.stack([expected for _, expected in each]).amax(0) * together**2
    if sublayer.chosen:
        # Weights and their sum are off by the roundings of softmax, sum, quotient and product, in fp32, and by one
        # to fp16. Each product is rounded, and so is each addition, in any order; partial sums are at most the sum
        # of magnitudes. Without rounding this is the convex hull's bound.
        once = (1 + a.unit) * (1 + (len(each) + 8) * UNIT32)
        product = a.rounded(bound * weight * once)
        grown = once * (1 + a.unit) ** (number + 1)
        bound = bound * together * grown + 2 * number * a.tiny
        length = (length * together * grown + 2 * number * a.tiny * math.sqrt(bound.numel())) * COMPUTED
    # A token of Switch has the output of one expert, or of none, times a probability: rounding is monotone, so that
    # a product with at most 1 is at most the number itself, and a sum with zeros is exact.
    note(f"{sublayer.at}:mul", SiteKind.OUTPUT, product)
    note(f"{sublayer.at}:index_add", SiteKind.OUTPUT, bound)
    if sublayer.shared is not None:
        always, own = feed_forward_sites(findings, sublayer.shared, source)
        bound, mean_square = a.rounded(bound + always.bound), mean_square + own
        length = a.rounded_length(length + always.length, bound.numel())
        note(sublayer.sum, SiteKind.OUTPUT, bound)
    return Projection(bound, bound, length), mean_square
