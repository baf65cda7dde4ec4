"""Choose edits where no exact plan is enough. Edits do not cancel, so each of them changes the function a little."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.folder import has_tokenizer
from ..checkpoint.reader import Checkpoint
from ..errors import UserError
from ..families.layout import Layout, TensorReader
from ..families.resolve import source_weights
from ..families.signals import LOGITS, columns_of
from ..families.wiring import Attention
from ..measuring import probe
from ..measuring.batch import Batch
from ..measuring.fidelity import (
    Difference,
    Outputs,
    Reference,
    add_differences,
    compared,
    fidelity,
    mean_divergence,
    outputs_on,
    reference_of,
)
from ..measuring.lanes import Lane, Walk
from ..measuring.source_runs import change_by
from ..numerics import FP16_MAX, NOISE, PROOF_LIMIT
from ..progress import Progress
from ..ranges import ModuleRange
from ..rescaling.centred import centrable, centred, shared_biases, tables_of
from ..rescaling.columns import column_exponents, in_step
from ..rescaling.edits import MOST_FOR_A_PROOF, RUINED, excess_of_signals, exponents_for, least
from ..rescaling.plan import OfChannels, Plan, takes_fractions
from ..rescaling.weight_losses import CHANNEL_RANGE
from ..wording import counted

UNIT_FACTOR_ON_TEXT = 1.5  # over 1, since the verdict counts the conversion's own inputs only
TEXT = Path(__file__).parents[1] / "demo_data" / "held_out.txt"

LARGE_BIAS = 1024.0  # from here on fp16 holds no fractions of scores

MANY = 4  # up to so many edits are each tried on all compared batches, more on the two smallest
TOGETHER = 16  # edits tried in one walk; their costs may show that the others need not be tried

DEAR = 0.1  # an edit's ``Cost.share`` above which a cut of columns is tried instead
PRICE_OF_A_PROOF = 1 / 128  # largest share of bf16's divergence for edits that only a proof needs


@dataclass(frozen=True)
class NeededExponents:
    """The exponents that bring one signal under its limit. A signal is what one exponent of a plan scales."""

    proven: OfChannels  # for any input; the same as ``observed`` if no exponents can do that
    observed: OfChannels | None  # for the observed values; None if these are under the limit already


@dataclass(frozen=True)
class Edits:
    plan: Plan
    predicted: Mapping[str, float]
    apart: bool = False


def needed_edits(
    layout: Layout, bounds: Mapping[str, ModuleRange], ranges: Mapping[str, ModuleRange], margin_bits: float
) -> dict[str, NeededExponents]:
    """Return, by signal, the exponents of edits that bring its bound under its limit. If no exponents can do that, the
    returned ones bring only the observed values under the limit. bounds, ranges: the largest values for any input, and
    those observed. margin_bits: the headroom that observed values keep."""
    possible = excess_of_signals(layout, bounds, PROOF_LIMIT)
    seen = excess_of_signals(layout, ranges, FP16_MAX * 2.0**-margin_bits)
    needed = {}
    for name, bits in possible.items():
        passed = torch.minimum(bits, seen[name]) if name in seen else torch.zeros(1)
        proven, observed = (bool((x > 0).any()) and bool((x <= CHANNEL_RANGE).all()) for x in (bits, passed))
        steps = 8 if takes_fractions(name) else 2
        enough = exponents_for(passed, steps) if observed else None
        if proven:
            needed[name] = NeededExponents(exponents_for(bits, steps), enough)
        elif enough is not None:
            needed[name] = NeededExponents(enough, enough)
    return needed


def attentions_to_centre(layout: Layout, weights: TensorReader, bounds: Mapping[str, ModuleRange]) -> list[str]:
    """Return the paths of the attentions to centre. Centring subtracts a part of keys or position biases that softmax
    ignores. It is done where scores can overflow, or where biases have a midpoint of ``LARGE_BIAS`` or more."""
    passed = excess_of_signals(layout, bounds, PROOF_LIMIT)

    def useful(attention: Attention) -> bool:
        if tables := tables_of(attention):
            return float(shared_biases(list(map(weights, tables))).abs().max()) >= LARGE_BIAS
        return bool((passed[f"{attention.at}.scores"] > 0).any())

    return [attention.at for attention in centrable(layout) if useful(attention)]


@dataclass(frozen=True)
class ReferenceOutputs:
    """The outputs of the unedited source on ``inputs``. Outputs of the edited source are compared with them."""

    inputs: Sequence[Batch]
    fp32: Outputs
    bf16: float  # divergence of the source's bf16 outputs from ``fp32``
    unit_factor: float = 1.0

    @classmethod
    def of(cls, layout: Layout, inputs: Sequence[Batch], reference: Reference, factor: float = 1.0) -> ReferenceOutputs:
        own = fidelity(reference.fp32, None, reference.bf16, probabilities=layout.gives_probabilities)
        return cls(inputs, reference.fp32, own.kl_fp16, factor)

    @property
    def unit(self) -> float:
        """The divergence for which ``Cost.share`` is 1: unit_factor · clamp(bf16, NOISE, RUINED)."""
        return self.unit_factor * min(max(self.bf16, NOISE), RUINED)


@dataclass(frozen=True)
class Cost:
    """How far edits move the source's outputs. A ``share`` of 0.5 means about half as far as bf16 moves them."""

    divergence: float  # of the outputs on the conversion's inputs
    share: float  # divergence / ``ReferenceOutputs.unit``: on the conversion's inputs or on text, whichever is larger


@dataclass(frozen=True)
class Trial:
    """Runs a source in fp32 under candidate edits and compares its outputs with the unedited source's."""

    checkpoint: Checkpoint
    layout: Layout
    references: Sequence[ReferenceOutputs]  # of the unedited source on the conversion's inputs, then on text
    progress: Progress
    centring: Plan  # centres keys in every run

    def alone(self, chosen: Mapping[str, OfChannels], most: float) -> dict[str, Cost] | None:
        names, costs = list(chosen)[::-1], dict[str, Cost]()
        for some in (names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)):
            trials = [{name: chosen[name]} for name in some]
            costs |= zip(some, self.costs(trials, counted(len(some), "edit"), len(names)), strict=True)
            if most < math.inf and not sum(cost.share for cost in costs.values()) <= most:
                return None
        return {name: costs[name] for name in chosen}

    def columns(self, rows: Mapping[str, OfChannels]) -> dict[str, list[int]]:
        read = centred(source_weights(self.checkpoint, self.layout), self.layout, self.centring.centred_keys)
        return column_exponents(self.layout, read, rows)

    def in_step(self, cuts: Mapping[str, list[int]]) -> dict[str, list[int]]:
        return in_step(self.layout, cuts)

    def costs(self, trials: Sequence[Mapping[str, OfChannels]], what: str, number: int | None = None) -> list[Cost]:
        """Return the cost of each trial, in one pass over the weight files. trials: for each trial, the exponents of
        its edits by signal name. what: describes the trials in progress lines. number: how many trials are compared
        over all calls, by default this call's number. If it exceeds ``MANY``, the trials run on fewer inputs."""
        plans = [dict(trial) for trial in trials]
        # Logits without a cap are scaled after the run, as a separated head scales them.
        logits = [plan.pop(LOGITS, 0) if scales_logits(self.layout) else 0 for plan in plans]
        read = centred(source_weights(self.checkpoint, self.layout), self.layout, self.centring.centred_keys)
        edits = [self.centring.model_copy(update={"exponents": exponents}) for exponents in plans]
        changes = [change_by(self.checkpoint, self.layout, each, read) for each in edits]
        scales = [scaled_by(torch.ones(()), exponents) for exponents in logits]
        some = [some_of(each.inputs, number or len(trials)) for each in self.references]
        sources = [outputs_on(few, each.inputs, each.fp32) for few, each in zip(some, self.references, strict=True)]
        how: dict[str, Any] = {"probabilities": self.layout.gives_probabilities}
        walk, lanes = Walk(self.checkpoint), dict[tuple[int, int], list[Lane[Difference]]]()
        for n, plan in enumerate(plans):
            for k, source in enumerate(sources) if plan else ():
                lanes[n, k] = add_differences(walk, some[k], source, change=changes[n], scale=scales[n], **how)
        with self.progress.step(f"Trying {what} on the source") as advance:
            walk.run(advance)

        def divergence(n: int, k: int) -> float:
            if (n, k) in lanes:
                return mean_divergence([lane.result for lane in lanes[n, k]])
            return mean_divergence([Difference().add(x, x * scales[n], **how) for x in sources[k]])

        divergences = [[divergence(n, k) for k in range(len(sources))] for n in range(len(plans))]
        units = [reference.unit for reference in self.references]
        return [Cost(each[0], max(x / unit for x, unit in zip(each, units, strict=True))) for each in divergences]


def some_of(inputs: Sequence[Batch], trials: int) -> list[Batch]:
    batches = compared(inputs)
    few = batches if trials <= MANY else sorted(batches, key=lambda batch: batch.size)[:2]
    return [batch for batch in batches if any(batch is one for one in few)]


def least_edits(trial: Trial, needed: Mapping[str, NeededExponents], max_kl: float | None) -> Edits | None:
    """Return cheap edits that bring all signals under their limits, or None if the edits cost too much. max_kl: the
    divergence that the user accepts, which may allow edits to cost more. It is ignored if no observed value is over a
    limit. In this case the edits serve only a proof, and must be almost free."""
    observed = [each.observed is not None for each in needed.values()]
    needed, apart = with_logits(trial, needed)
    # No limit if the observed values need the same edits as the bounds.
    allowed = math.inf if all(each.proven == each.observed for each in needed.values()) else PRICE_OF_A_PROOF
    if allowed < math.inf and any(observed):
        # An eighth is left for fp16's rounding.
        allowed = max(MOST_FOR_A_PROOF * 7 / 8, (max_kl or 0.0) / trial.references[0].unit)
    chosen, predicted = rows_or_columns(trial, {name: each.proven for name, each in needed.items()}, allowed)
    if predicted is None:
        return None
    if allowed < math.inf:
        total = trial.costs([chosen], "all edits together") if len(chosen) > 1 else predicted.values()
        if not sum(cost.share for cost in total) <= allowed:
            return None
    plan = trial.centring.model_copy(update={"exponents": chosen})
    return Edits(plan, {name: cost.divergence for name, cost in predicted.items()}, apart)


def rows_or_columns(
    trial: Trial, rows: Mapping[str, OfChannels], allowed: float
) -> tuple[Mapping[str, OfChannels], dict[str, Cost] | None]:
    """Return the edits of weights and the cost of each edit, both by signal. If an edit of rows costs over ``DEAR``,
    edits scale columns instead where that costs less. allowed: a limit on the sum of ``Cost.share`` over the edits that
    can only scale rows. If the sum is over the limit, None is returned instead of the costs."""
    costs = trial.alone(rows, allowed)
    if costs is not None and all(cost.share <= DEAR for cost in costs.values()):
        return rows, costs
    columns = trial.columns(rows)
    if not columns:
        return rows, costs
    trials: list[Mapping[str, OfChannels]] = [{name: e} for name, e in columns.items()]
    deeper = trial.in_step(columns)
    if deeper != columns:
        trials.append(deeper)
    cuts = trial.costs(trials, counted(len(trials), "cut"))
    of_columns = dict(zip(columns, cuts, strict=False))
    others = {name: e for name, e in rows.items() if columns_of(name) not in columns}
    of_rows = trial.alone(others, allowed) if costs is None else costs
    chosen: dict[str, OfChannels] = {}
    for name, exponents in rows.items():
        cut = columns_of(name)
        if cut in columns and (costs is None or of_columns[cut].share < costs[name].share):
            chosen[cut] = columns[cut]
        else:
            chosen[name] = exponents
    if of_rows is None:
        return chosen, None
    predicted = {name: (of_rows | of_columns)[name] for name in chosen}
    if deeper != columns and cuts[-1].share < sum(predicted[name].share for name in chosen if name not in others):
        chosen = {**others, **deeper}
        predicted = {name: predicted[name] if name in others else cuts[-1] for name in chosen}  # one cost for all cuts
    return chosen, predicted


def with_logits(trial: Trial, needed: Mapping[str, NeededExponents]) -> tuple[Mapping[str, NeededExponents], bool]:
    """Return ``needed`` with the exponents of logits settled, and whether these untie a tied head. Each logit gets its
    own exponent only if the head is or can be untied, and ``trial`` shows that one exponent for all costs more."""
    layout = trial.layout
    if LOGITS not in needed:
        return needed, False
    each = needed[LOGITS]
    one = NeededExponents(least(each.proven), None if each.observed is None else least(each.observed))
    may_differ = not layout.tied or bool(layout.family.untie and scales_logits(layout))
    if one != each and may_differ:  # one for all keeps the order of logits, and a tied head tied
        together, apart = trial.costs(
            [{LOGITS: one.proven}, {LOGITS: each.proven}], "one exponent for all logits and one for each logit"
        )
        if not together.share <= max(PRICE_OF_A_PROOF if layout.tied else 0.0, apart.share):
            return needed, bool(layout.tied)
    return {**needed, LOGITS: one}, False


def scales_logits(layout: Layout) -> bool:
    return layout.stock.is_language_model and layout.head is not None and layout.cap(layout.head) is None


def scaled_by(logits: Tensor, exponents: OfChannels) -> Tensor:
    return logits * 2.0 ** torch.as_tensor(exponents, dtype=logits.dtype)


def outputs_on_text(checkpoint: Checkpoint, layout: Layout, config: Any, progress: Progress) -> list[ReferenceOutputs]:
    """Run the source on the packaged text and return the outputs, or [] if it has no usable tokenizer."""
    if not has_tokenizer(checkpoint.folder):
        return []
    try:
        inputs = compared(probe.batches(config, checkpoint.folder, str(TEXT)))
    except UserError as error:  # of a tokenizer that nothing else needs
        progress.say(f"edits are not tried on text: {error}")
        return []
    if not inputs:
        return []
    with progress.step("Running the source on text") as advance:
        reference = reference_of(checkpoint, inputs, advance)
    return [ReferenceOutputs.of(layout, inputs, reference, UNIT_FACTOR_ON_TEXT)]
