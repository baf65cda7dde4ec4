"""Edits: factors on a nonlinearity's input, which change the function little where that input is large.

For large inputs GELU and SiLU are almost ReLU, and 2^k·ReLU(2^-k·x) = ReLU(x). A softmax of large scores is nearly
one-hot before and after an edit. A tanh of a large input is nearly ±1. docs/edits.md proves bounds of the changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..families.layout import Layout, ResolvedTensor, TensorReader, TensorSource
from ..families.resolve import source_weights
from ..families.signals import LOGITS, Kind, signal_of_columns
from ..families.wiring import Attention, Experts
from ..ranges import ModuleRange
from ..results import InexactEntry
from .apply import scale
from .centred import centred, centred_tensors
from .channels import excess_bits, folded, known_points
from .exponents import exponents_of
from .plan import OfChannels, Plan

MOST_FOR_A_PROOF = 2.0
"""Edits may diverge this many times as far as bf16 if the output is proven only with them."""

RUINED = 1.0
"""Divergence (nats, or relative squared error) from which on bf16 is no measure for the cost of edits."""


def edits_of(layout: Layout, plan: Plan) -> Plan:
    """Return the part of a plan that changes the function: exponents of edited signals, and centred keys."""
    priced = {name: e for name, e in plan.exponents.items() if layout.signals[name].kind.has_price}
    return Plan(family=plan.family, exponents=priced, centred_keys=plan.centred_keys)


def without_edits(layout: Layout, plan: Plan) -> Plan:
    priced = edits_of(layout, plan).exponents
    exact = {name: e for name, e in plan.exponents.items() if name not in priced}
    return plan.model_copy(update={"exponents": exact, "centred_keys": []})


def with_edits(plan: Plan, edits: Plan) -> Plan:
    exponents, centred = plan.exponents | edits.exponents, sorted({*plan.centred_keys, *edits.centred_keys})
    return plan.model_copy(update={"exponents": exponents, "centred_keys": centred})


def listed_edits(layout: Layout, plan: Plan, predicted: Mapping[str, float] | None = None) -> dict[str, InexactEntry]:
    sites, known = sites_of(layout), predicted or {}
    exponents = edits_of(layout, plan).exponents.items()

    def cut(name: str, each: OfChannels) -> int:
        if layout.signals[name].kind is not Kind.COLUMNS:
            return 0
        return layout.signals[name].size if isinstance(each, int | float) else sum(map(bool, each))

    return {
        n: InexactEntry(site=sites[n], exponent=least(e), columns=cut(n, e), predicted=known.get(n), measured=None)
        for n, e in exponents
    }


def least(exponents: OfChannels) -> float:
    return exponents if isinstance(exponents, int | float) else min(exponents)


def sites_of(layout: Layout) -> dict[str, str]:
    """Return the site whose largest value decides on an edit, for each signal that an edit can lower."""
    attentions = [sublayer.at for sublayer in layout.topology if isinstance(sublayer, Attention)]
    scores = {f"{path}.scores": f"{path}:scores" for path in attentions}
    priced = {name: signal for name, signal in layout.signals.items() if signal.kind.has_price}
    of = {name: signal_of_columns(name) if s.kind is Kind.COLUMNS else name for name, s in priced.items()}
    return {name: scores.get(of[name]) or priced[of[name]].seen[0].module for name in priced}


def edited(tensor: ResolvedTensor, weight: Tensor, edits: Plan, offset: float = 0.0) -> Tensor:
    """Return a weight as edits scale it, or the same tensor if none does. offset: a number that transformers adds to
    the weight, so that edits scale their sum."""
    exponents = exponents_of(tensor, edits).full(tensor.shape)
    if not bool((exponents != 0).any()):
        return weight
    result = weight.clone()
    scale(result, exponents, offset)
    return result


def changed_by(layout: Layout, edits: Plan) -> set[str]:
    tensors = layout.tensors.items()
    moved = {name for name, tensor in tensors if bool(exponents_of(tensor, edits).full(tensor.shape).any())}
    return moved | set(centred_tensors(layout, edits.centred_keys))


def edited_weights(source: TensorSource, layout: Layout, edits: Plan | None) -> TensorReader:
    read = source_weights(source, layout)
    if edits is None:
        return read
    read = centred(read, layout, edits.centred_keys)
    return lambda name: edited(layout.tensors[name], read(name), edits)


def excess_of_signals(layout: Layout, ranges: Mapping[str, ModuleRange], limit: float) -> dict[str, Tensor]:
    """Return by how many bits each signal that an edit can lower exceeds ``limit``. Each is fp64: one number for the
    signal, or one for each of its channels."""
    excess = {}
    for signal in layout.signals.values():
        if not signal.kind.has_price:
            continue
        seen_at = [excess_bits(reached.amax.double(), limit) for _, reached in known_points(ranges, signal)]
        if seen_at:
            excess[signal.name] = torch.stack([b for b in seen_at if len(b) == len(seen_at[0])]).amax(0)
    for sublayer in layout.topology:
        if isinstance(sublayer, Experts) and (routing := f"{sublayer.classifier}.routing") in excess:
            excess[routing] = excess[routing].amax()  # one exponent for all experts keeps the routing
    for attention in (each for each in layout.topology if isinstance(each, Attention) and each.at in ranges):
        if (seen := ranges[attention.at].scores) is None:
            continue
        if seen.excess_bits is None:
            bits = excess_bits(torch.tensor(seen.largest, dtype=torch.float64), limit)
        elif attention.query_norm and not attention.norms_whole:
            bits = seen.excess_bits.amax()  # all heads share a norm's gains
        else:
            bits = seen.excess_bits.repeat_interleave(layout.head_size(attention))
        excess[f"{attention.at}.scores"] = bits
    if not layout.gives_probabilities:
        excess.pop(LOGITS, None)
    return excess


def exponents_for(bits: Tensor, steps: int = 2) -> OfChannels:
    """Return log2 of a factor for each element b of ``bits``. The factor is the largest number m/``steps``·2^k that is
    at most 2^-b, with a tolerance of 2^-20 in the exponent −b. Here k is a whole number, and m is a whole number from
    steps/2 to steps − 1. So with 2 steps, all factors are powers of two."""
    fractions, powers = torch.frexp(2.0 ** (2.0**-20 - bits.double()))
    return folded((torch.floor(steps * fractions) / steps).log2().view(-1) + powers.view(-1))
