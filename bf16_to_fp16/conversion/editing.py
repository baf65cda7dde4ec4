"""The least edit: what no exact exponent brings under its limit gets one at a price, which is tried before it is
taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..auditing.fidelity import Outputs, Reference, add_outputs, fidelity
from ..checkpoint.reader import Checkpoint
from ..families.layout import Layout
from ..numerics import FP16_MAX, PROOF_MARGIN_BITS
from ..progress import Progress
from ..ranges import ModuleRange
from ..rescaling.edits import edited, excess_bits, exponents_for
from ..rescaling.plan import Plan
from ..rescaling.planner import CHANNEL_RANGE
from ..run.batch import Batch
from ..run.lanes import Change, Walk
from ..wording import counted

PRICE_OF_A_PROOF = 1 / 128  # largest share of bf16's divergence that edits may cost which nothing but a proof needs


@dataclass(frozen=True)
class Needed:
    """What a signal would have to fall by: exponents for every input, and for what was observed alone, None where that
    fits already."""

    proven: int | list[int]
    observed: int | list[int] | None


@dataclass(frozen=True)
class Edits:
    """Edits that were chosen, and the divergence that each alone makes of the source in fp32, by signal."""

    plan: Plan
    predicted: Mapping[str, float]


def needed_edits(
    layout: Layout, bounds: Mapping[str, ModuleRange], ranges: Mapping[str, ModuleRange], margin_bits: float
) -> dict[str, Needed]:
    """Return by signal what would bring it under its limit, where something would; bounds, ranges: what modules can
    reach and what they were seen to. margin_bits: kept by what was observed."""
    possible = excess_bits(layout, bounds, FP16_MAX * 2.0**-PROOF_MARGIN_BITS)
    seen = excess_bits(layout, ranges, FP16_MAX * 2.0**-margin_bits)
    found = {}
    for name, bits in possible.items():
        if not bool((bits > 0).any()) or not bool((bits <= CHANNEL_RANGE).all()):
            continue
        passed = torch.minimum(bits, seen[name]) if name in seen else torch.zeros(1)
        found[name] = Needed(exponents_for(bits), exponents_for(passed) if bool((passed > 0).any()) else None)
    return found


def least_edits(
    checkpoint: Checkpoint,
    layout: Layout,
    reference: Reference,
    inputs: Sequence[Batch],
    needed: Mapping[str, Needed],
    max_kl: float | None,
    progress: Progress,
) -> Edits | None:
    """Return the edits that are worth their price, as running the source with them shows; None for none.

    Where something that was observed passes its limit, they may cost what bf16 costs, or ``max_kl``; where only a proof
    asks for them, 1/128 of that. As long as they cost more, the dearest falls back to what was observed, and after that
    stays away unless it is needed.
    """

    def cost(found: Outputs) -> float:
        return fidelity(reference.fp32, None, found, probabilities=layout.gives_probabilities).kl_fp16

    def plan_of(chosen: Mapping[str, int | list[int]]) -> Plan:
        return Plan(family=layout.family.name, exponents=dict(chosen))

    def costs_of(trials: Sequence[Mapping[str, int | list[int]]], what: str) -> list[float]:
        with progress.step(f"Trying {what} on the source") as advance:
            walk = Walk(checkpoint)
            lanes = [add_outputs(walk, inputs, torch.float32, change=change_by(layout, plan_of(t))) for t in trials]
            walk.run(advance)
        return [cost([lane.result for lane in each]) for each in lanes]

    bf16 = fidelity(reference.fp32, None, reference.bf16, probabilities=layout.gives_probabilities).kl_fp16
    must = any(each.observed is not None for each in needed.values())
    allowed = max(bf16, max_kl or 0.0) if must else bf16 * PRICE_OF_A_PROOF
    chosen = {name: each.proven for name, each in needed.items()}
    alone = [{name: exponents} for name, exponents in chosen.items()]
    own = costs_of(alone, f"{counted(len(alone), 'edit')} of what no exact exponent reaches")
    predicted = dict(zip(chosen, own, strict=True))
    total = predicted[next(iter(chosen))] if len(chosen) == 1 else costs_of([chosen], "them together")[0]
    while not total <= allowed and (dearer := reducible(chosen, needed)):
        dearest = max(dearer, key=lambda name: predicted[name])
        observed = needed[dearest].observed
        del chosen[dearest], predicted[dearest]
        if observed is not None:
            chosen[dearest] = observed
            predicted[dearest] = costs_of([{dearest: observed}], "less of the dearest")[0]
        if not chosen:
            return None
        total = costs_of([chosen], "what is left")[0]
    return Edits(plan_of(chosen), predicted)


def reducible(chosen: Mapping[str, int | list[int]], needed: Mapping[str, Needed]) -> list[str]:
    """Return the signals of which less than what was chosen would do."""
    return [name for name, exponents in chosen.items() if exponents != needed[name].observed]


def change_by(layout: Layout, edits: Plan) -> Change:
    """Return the change that edits make of a source's stored weights."""

    def changed(name: str, weight: Tensor) -> Tensor:
        tensor = layout.tensors.get(name)
        return weight if tensor is None else edited(tensor, weight, edits, tensor.offset)

    return changed
