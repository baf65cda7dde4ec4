"""The least edit: what no exact exponent brings under its limit gets one at a price, which is tried before it is
taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..auditing.fidelity import Outputs, Reference, add_outputs, compared, fidelity
from ..checkpoint.reader import Checkpoint
from ..families.layout import Layout, TensorSource
from ..families.types import LOGITS
from ..numerics import FP16_MAX, PROOF_MARGIN_BITS
from ..progress import Progress
from ..ranges import ModuleRange
from ..rescaling.centred import centrable, centred, key_biases
from ..rescaling.edits import edited, excess_bits, exponents_for
from ..rescaling.plan import Plan
from ..rescaling.planner import CHANNEL_RANGE
from ..rescaling.weights import source_weights
from ..run.batch import Batch
from ..run.lanes import Change, Lane, Walk
from ..wording import counted

MANY = 4  # edits that are tried one by one on all that outputs are compared on; more are on little of it

Exponents = int | list[int]  # of all channels of a signal, or of each

PRICE_OF_A_PROOF = 1 / 128  # largest share of bf16's divergence that edits may cost which nothing but a proof needs


@dataclass(frozen=True)
class Needed:
    """What a signal would have to fall by: exponents for every input, and for what was observed alone, None where that
    fits already."""

    proven: Exponents
    observed: Exponents | None


@dataclass(frozen=True)
class Edits:
    """Edits that were chosen, the divergence that each alone makes of the source in fp32, by signal, and whether the
    head is to be separated for them."""

    plan: Plan
    predicted: Mapping[str, float]
    apart: bool = False


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


def needlessly_shared(layout: Layout, bounds: Mapping[str, ModuleRange]) -> list[str]:
    """Return the paths of the attentions whose scores pass their limits, by ``bounds``, and whose keys may be
    centred."""
    passed = excess_bits(layout, bounds, FP16_MAX * 2.0**-PROOF_MARGIN_BITS)
    return [w.at for w in centrable(layout) if bool((passed[f"{w.at}.scores"] > 0).any())]


@dataclass(frozen=True)
class Trial:
    """Runs of a source under edits, in fp32, and how far they are from its own outputs; made: edits of every run."""

    checkpoint: Checkpoint
    layout: Layout
    reference: Reference
    inputs: Sequence[Batch]
    progress: Progress
    made: Plan

    @property
    def bf16(self) -> float:
        """The divergence of the source in bf16."""
        return self.divergence(self.reference.fp32, self.reference.bf16)

    def divergence(self, source: Outputs, outputs: Outputs) -> float:
        """Return how far outputs are from the source's."""
        return fidelity(source, None, outputs, probabilities=self.layout.gives_probabilities).kl_fp16

    def cost(self, chosen: Mapping[str, Exponents], alone: Mapping[str, float]) -> float:
        """Return the divergence that edits make together; alone: what each makes."""
        if len(chosen) < 2:
            return sum(alone.values())
        return self.costs([chosen], "them together")[0]

    def costs(self, trials: Sequence[Mapping[str, Exponents]], what: str) -> list[float]:
        """Return the divergence that each of several edits makes, all run in one walk, on less where there are many;
        what: are tried, in words."""
        plans = [dict(trial) for trial in trials]
        # What a head without a cap makes of the last states is scaled after the run, as a head of its own would.
        logits = [plan.pop(LOGITS, 0) if scales_logits(self.layout) else 0 for plan in plans]
        lanes: list[list[Lane[Tensor]] | None] = []
        inputs = some_of(self.inputs, len(trials))
        chosen = {id(batch) for batch in inputs}
        source = [x for b, x in zip(compared(self.inputs), self.reference.fp32, strict=True) if id(b) in chosen]
        with self.progress.step(f"Trying {what} on the source") as advance:
            walk = Walk(self.checkpoint)
            for exponents in plans:
                edits = self.made.model_copy(update={"exponents": exponents})
                change = change_by(self.checkpoint, self.layout, edits)
                lanes.append(add_outputs(walk, inputs, torch.float32, change=change) if exponents else None)
            walk.run(advance)
        found = [source if each is None else [lane.result for lane in each] for each in lanes]
        scaled = [[scaled_by(x, e) for x in outputs] for outputs, e in zip(found, logits, strict=True)]
        return [self.divergence(source, outputs) for outputs in scaled]


def some_of(inputs: Sequence[Batch], trials: int) -> list[Batch]:
    """Return what so many edits are tried on, one by one: all that outputs are compared on, or where there are many
    the two batches with the fewest ids."""
    batches = compared(inputs)
    few = batches if trials <= MANY else sorted(batches, key=lambda batch: batch.size)[:2]
    return [batch for batch in batches if any(batch is one for one in few)]


def least_edits(trial: Trial, needed: Mapping[str, Needed], max_kl: float | None) -> Edits | None:
    """Return the edits that are worth their price, as running the source with them shows; None for none.

    Where something that was observed passes its limit, they may cost what bf16 costs, or ``max_kl``; where only a proof
    asks for them, 1/128 of that. As long as they cost more, the dearest falls back to what was observed, and after that
    stays away unless it is needed.
    """
    bf16 = trial.bf16
    must = any(each.observed is not None for each in needed.values())
    allowed = max(bf16, max_kl or 0.0) if must else bf16 * PRICE_OF_A_PROOF
    needed, apart = with_logits(trial, needed, bf16 * PRICE_OF_A_PROOF)
    chosen = {name: each.proven for name, each in needed.items()}
    of_each = f"{counted(len(chosen), 'edit')} of what no exact exponent reaches"
    predicted = dict(zip(chosen, trial.costs([{n: e} for n, e in chosen.items()], of_each), strict=True))
    while not (within(predicted, allowed) and trial.cost(chosen, predicted) <= allowed):
        if not (dearer := [name for name, exponents in chosen.items() if exponents != needed[name].observed]):
            break
        dearest = max(dearer, key=lambda name: predicted[name])
        observed = needed[dearest].observed
        del chosen[dearest], predicted[dearest]
        if observed is not None:
            chosen[dearest] = observed
            predicted[dearest] = trial.costs([{dearest: observed}], "less of the dearest")[0]
    if not chosen:
        return None
    plan = trial.made.model_copy(update={"exponents": chosen})
    return Edits(plan, predicted, apart and LOGITS in chosen)


def with_logits(trial: Trial, needed: Mapping[str, Needed], little: float) -> tuple[Mapping[str, Needed], bool]:
    """Return what is needed with the exponents of logits as the head can carry them, and whether it must be separated
    for that: it is where one exponent for all choices costs more than ``little`` and than one for each."""
    layout = trial.layout
    if LOGITS not in needed or not layout.tied:
        return needed, False
    each = needed[LOGITS]
    one = Needed(least(each.proven), None if each.observed is None else least(each.observed))
    if layout.family.untie and scales_logits(layout):
        together, apart = trial.costs(
            [{LOGITS: one.proven}, {LOGITS: each.proven}], "logits with one exponent and more"
        )
        if not together <= max(little, apart):
            return needed, True
    return {**needed, LOGITS: one}, False


def least(exponents: Exponents) -> int:
    """Return the least of several exponents."""
    return min(exponents) if isinstance(exponents, list) else exponents


def scales_logits(layout: Layout) -> bool:
    """Return whether exponents of logits scale what a language model gives, and nothing stands between."""
    return layout.stock.is_language_model and layout.head is not None and layout.cap(layout.head) is None


def scaled_by(logits: Tensor, exponents: Exponents) -> Tensor:
    """Return logits times 2 to the exponents: [positions, choices]."""
    return logits * 2.0 ** torch.as_tensor(exponents, dtype=logits.dtype)


def within(costs: Mapping[str, float], allowed: float) -> bool:
    """Return whether edits cost little enough together where each adds its own; none do, whatever is allowed."""
    return not costs or sum(costs.values()) <= allowed


def change_by(source: TensorSource, layout: Layout, edits: Plan) -> Change:
    """Return the change that edits make of the stored weights of ``source``."""
    biases = key_biases(layout, edits.centred_keys)
    read = centred(source_weights(source, layout), layout, edits.centred_keys)

    def changed(name: str, weight: Tensor) -> Tensor:
        if (tensor := layout.tensors.get(name)) is None:
            return weight
        return edited(tensor, read(name).to(weight) if name in biases else weight, edits, tensor.offset)

    return changed
