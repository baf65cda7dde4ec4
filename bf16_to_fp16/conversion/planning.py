"""The first steps of ``convert``: open the source, observe and bound its sites, and choose the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..bounds.arithmetic import Arithmetic
from ..bounds.certificate import bound
from ..bounds.findings import SourceBounds
from ..bounds.kinds import traits
from ..bounds.spectral import Spectra
from ..checkpoint.contents import MODULES
from ..checkpoint.reader import Checkpoint
from ..devices import Device, products_on
from ..errors import UserError
from ..families.known import architectures
from ..families.layout import Layout, TensorReader
from ..families.other_class import headless, read_as
from ..families.resolve import check_norms, resolve
from ..families.signals import LOGITS
from ..measuring.batch import Batch
from ..measuring.fidelity import fidelity
from ..measuring.probe import checkpoint_batches
from ..measuring.source_runs import Observed, change_by, drifted_outputs, observe_source
from ..measuring.stock import load_config
from ..numerics import PROOF_MARGIN_BITS
from ..progress import Advance, Progress
from ..ranges import ModuleRange
from ..report.steps import Decided
from ..rescaling.channels import RESIDUAL_RANGE
from ..rescaling.costs import PROOF_WORTH
from ..rescaling.edits import changed_by, edited_weights, edits_of, with_edits
from ..rescaling.exponents import check_plan_fits
from ..rescaling.plan import Drift, Plan
from ..rescaling.planner import PROOF_FIRST, TRAIN_MARGIN_BITS, Planned, make_plan, with_smaller_gradients
from ..rescaling.rounding_loss import Tables
from ..results import Fidelity
from ..targets import AUTO, TIERS, WHERE
from ..wording import listed
from .editing import (
    Edits,
    NeededExponents,
    ReferenceOutputs,
    Trial,
    attentions_to_centre,
    least_edits,
    needed_edits,
    outputs_on_text,
    scaled_by,
)
from .opening import layout_with_notes, opened_with_notes, say_where_saved_again
from .options import Destination, Options

ACCEPTABLE_DRIFT = 1 / 128  # largest share of bf16's divergence that a fixed eps may cause for a proof: half of fp16's
MANY_TABLES, FEW_TABLES = 1 << 29, 1 << 26
"""How many bytes of loss tables are kept for the next plan. ``MANY_TABLES`` is for models with LayerNorm, whose fixed
eps can take five plans; other models take one or two."""


@dataclass(frozen=True)
class Opened:
    """A source opened for conversion. ``inputs``: the batches to run, none with ``--no-audit``. ``edits``: the edits
    that ``weights`` applies, if any. ``before``: the source without these edits."""

    checkpoint: Checkpoint
    layout: Layout
    inputs: list[Batch]
    device: Device = field(default_factory=Device)
    edits: Plan | None = None
    before: Opened | None = None

    def weights(self, layout: Layout) -> TensorReader:
        return edited_weights(self.checkpoint, layout, self.edits)

    def with_edits_of(self, decided: Decided) -> Opened:
        edits = edits_of(decided.layout, decided.plan)
        if not edits.exponents and not edits.centred_keys:
            return self
        return replace(self, layout=decided.layout, edits=edits, before=self)

    def apart(self) -> Layout:
        return replace(resolve(self.checkpoint, untie=True), held_eps=self.layout.held_eps)

    @cached_property
    def spectra(self) -> Spectra:
        read = self.weights(self.layout)
        if self.before is None or self.edits is None:
            return Spectra(read)
        lacking = self.before.layout.tensors.keys() - self.layout.tensors.keys()
        return self.before.spectra.under(read, changed_by(self.layout, self.edits) | lacking)


def open_source(source: str | Path, options: Options, place: Destination, progress: Progress) -> Opened:
    device = Device(options.device, progress)
    checkpoint = opened_with_notes(source, options.subfolder, progress, as_class=options.as_class)
    place.check(checkpoint.folder)
    say_where_saved_again(checkpoint, progress)
    own, name = architectures(checkpoint.config)[:1], options.as_class
    if name is None and (checkpoint.folder / MODULES).is_file():
        name = headless(checkpoint.config)  # as a sentence encoder's own loader reads it
    if name is not None and name not in own:
        checkpoint = read_as(checkpoint, name)
        progress.say(f"Converting {checkpoint.name} as {name}; config.json has {listed(own) or 'no class'}")
    layout = layout_with_notes(checkpoint, progress, options.max_length)
    options.check_layout(layout, checkpoint.name)
    layout = replace(layout, held_eps=options.held_eps(layout))
    check_norms(checkpoint, layout)
    inputs = checkpoint_batches(checkpoint, layout, options.data, 0) if options.run_model else []
    return Opened(checkpoint, layout, inputs, device)


def replayed(opened: Opened, plan: Plan, target: str, options: Options) -> Decided:
    layout, eps = opened.apart() if plan.untied_head else opened.layout, opened.layout.held_eps
    check_plan_fits(layout, plan)
    if eps is not None and eps != plan.eps:
        own = "the source's eps" if plan.eps is None else f"an eps of {plan.eps}"
        raise UserError(f"the plan is for norms with {own}, but --layout or --eps sets eps to {eps}; leave out --plan")
    edits = edits_of(layout, plan)
    if options.exact and (edits.exponents or edits.centred_keys):
        raise UserError("the plan has edits, which --exact does not allow; leave out --exact or --plan")
    if not options.run_model and edits.exponents:
        raise UserError(
            "the plan has edits, and only running the model shows their cost; leave out --no-audit or --plan"
        )
    return Decided(layout, plan, target)


def decide(opened: Opened, options: Options, progress: Progress) -> Decided:
    """Choose the plan. If no exact plan is enough for the target, choose edits, and a plan for the edited source."""
    tables = Tables(MANY_TABLES if opened.layout.family.centred_norm else FEW_TABLES)
    observed = None
    if options.run_model:
        observed = observe_source(opened.checkpoint, opened.inputs, progress, opened.device)
    search = Search(opened, options, progress, observed, tables=tables)
    decided = search.affordable(search.decided(TIERS[0].target if options.target == AUTO else options.target))
    return decided if observed is None or options.exact else with_needed_edits(search, decided)


def with_needed_edits(source: Search, decided: Decided) -> Decided:
    """Return the decision, with edits where no exact plan is enough. Attention is centred first, which is exact: a part
    of keys or position biases that softmax ignores is subtracted."""
    search, opened, exponents = source, source.opened, bounds_of(decided).exponents
    shared = attentions_to_centre(opened.layout, opened.weights(opened.layout), bounds_of(decided).ranges)
    centring = Plan(family=opened.layout.family.name, centred_keys=shared)
    if shared:
        search = edited_search(source, Edits(centring, {}), exponents)
        decided = search.decided(decided.target)
    assert search.observed is not None
    seen, reference = search.observed.ranges, search.observed.reference
    needed = needed_edits(opened.layout, bounds_of(decided).ranges, seen, search.options.margin_bits)
    if not needed:
        return decided
    known = [ReferenceOutputs.of(opened.layout, opened.inputs, reference)]
    known += outputs_on_text(opened.checkpoint, opened.layout, load_config(opened.checkpoint.folder), search.progress)
    trial = Trial(opened.checkpoint, opened.layout, known, search.progress, centring)
    of_observed = {n: NeededExponents(e.observed, e.observed) for n, e in needed.items() if e.observed is not None}
    # If edits prove nothing, only those for observed ranges are worth a price.
    for wanted in (needed, of_observed):
        if wanted and (edits := least_edits(trial, wanted, search.options.max_kl)) is not None:
            edited = edited_search(source, edits, exponents).decided(decided.target)
            proves = edited.planned is not None and not edited.planned.fallbacks and not bounds_of(edited).immovable
            if wanted == of_observed or proves:
                return replace(edited, predicted=edits.predicted)
    return decided


def bounds_of(decided: Decided) -> SourceBounds:
    assert decided.bounds is not None  # None for a replayed plan alone
    return decided.bounds


@dataclass(frozen=True)
class Search:
    """Chooses plans for one source, which may be an edited one."""

    opened: Opened
    options: Options
    progress: Progress
    observed: Observed | None = None  # the results of running it; None if nothing runs
    unedited: Observed | None = None  # for an edited source, the results of running the unedited one
    start: Mapping[str, int] = field(default_factory=dict)  # for an edited source, stream exponents its bounds assume
    tables: Tables = field(default_factory=Tables)  # loss tables that later plans reuse

    def decided(self, target: str) -> Decided:
        opened, search = self.opened, replace(self, options=replace(self.options, target=target))
        with products_on(opened.device):
            layout, planned, bounds = search.best_plan()
        if self.observed is None or self.unedited is None or opened.edits is None:
            return Decided(layout, planned.plan, target, planned, self.observed, bounds=bounds)
        plan, edited = with_edits(planned.plan, opened.edits), self.observed.ranges
        return Decided(layout, plan, target, planned, self.unedited, ranges_edited=edited, bounds=bounds)

    def bounds(self, layout: Layout, exponents: Mapping[str, int]) -> SourceBounds:
        """Bound every site as if only the streams were rescaled, by ``exponents``, and subnormals were exact."""
        opened, target = self.opened, self.options.target
        name = "source" if opened.edits is None else "edited source"
        with self.progress.step(f"Bounding every site of the {name} {WHERE[target]}") as advance:
            arithmetic, weights = Arithmetic(self.options.max_length, planned=exponents), opened.weights(layout)
            certificate = bound(layout, weights, arithmetic, target=target, spectra=opened.spectra, advance=advance)
        immovable = {site.name for site in certificate.sites if not site.holds and not traits(site.kind).movable}
        return SourceBounds(certificate.ranges, exponents, frozenset(immovable))

    def best_plan(self) -> tuple[Layout, Planned, SourceBounds]:
        """Return the best plan, with the layout and the bounds that it was made from. If values stay over limits or
        lack a proof that ``Options.prove`` asks for, try to untie a tied head too. Return the better plan."""

        def missing(planned: Planned) -> tuple[float, int]:  # bits over the limits, and proofs that were asked for
            fallbacks = len(planned.fallbacks) if self.options.prove else 0
            return sum(v.excess_bits for v in planned.violations), fallbacks

        layout = self.opened.layout
        planned, bounds = self.plan_for(layout)
        if any(missing(planned)) and layout.tied and layout.family.untie:
            apart = self.opened.apart()
            other, its_bounds = self.plan_for(apart)
            if missing(other) < missing(planned):
                return apart, other, its_bounds
        return layout, planned, bounds

    def plan_for(self, layout: Layout) -> tuple[Planned, SourceBounds]:
        """Return the best plan for a layout, and the bounds that it was made from."""
        # LayerNorm's eps does not scale with the stream, so bounds hold only up to the exponents that they assume.
        # Repeat with larger ones, until no stream's new exponent exceeds the assumed one.
        start = self.start if layout.family.centred_norm else {}
        exponents = {**dict.fromkeys(layout.streams, -RESIDUAL_RANGE), **start}
        planned, bounds = self.bounded_and_planned(layout, exponents)
        while layout.family.centred_norm:
            chosen = stream_exponents(layout, planned.plan)
            if all(chosen[stream] <= exponents[stream] for stream in chosen):
                break
            exponents = {stream: max(chosen[stream], exponents[stream]) for stream in chosen}
            planned, bounds = self.bounded_and_planned(layout, exponents)
        if self.observed is not None and planned.plan.gain_correction:
            # A correction takes out the mean over all tokens, and outputs may depend on few.
            planned = min((uncorrected(planned), planned), key=lambda each: self.drift(layout, each.plan).kl_fp16)
        return planned, bounds

    def bounded_and_planned(self, layout: Layout, exponents: Mapping[str, int]) -> tuple[Planned, SourceBounds]:
        """Return a plan and the bounds that it was made from, with the streams rescaled by ``exponents``."""
        options, bounds = self.options, self.bounds(layout, exponents)
        with self.progress.step(f"Planning the exponents for use {WHERE[options.target]}") as advance:
            planned = self.planned(layout, bounds.ranges, advance=advance)
        fallbacks = {f.signal: f.exponent for f in planned.fallbacks if f.signal in layout.streams}
        held = {stream: exponent for stream, exponent in fallbacks.items() if exponent is not None}
        # A fixed eps drifts, so a stream gets the exponent that proves it only if a run shows little drift.
        if self.observed is not None and layout.fixed_eps is not None and held and options.stream is None:
            trial = self.planned(layout, bounds.ranges, held)
            choices = (uncorrected(trial), trial)
            planned = next((each for each in choices if is_acceptable(self.drift(layout, each.plan))), planned)
        # Where rounded gains drift further than bf16, a proven stream needs no margin.
        tried = self.observed is not None and options.target != "train"
        rounds_gains = layout.fixed_eps is None and planned.plan.drift is not None
        if tried and rounds_gains and not is_acceptable(self.drift(layout, planned.plan), 1.0):
            planned = self.planned(layout, bounds.ranges, proof_is_enough=True)
        return planned, bounds

    def planned(
        self,
        layout: Layout,
        possible: Mapping[str, ModuleRange],
        held: Mapping[str, int] | None = None,
        advance: Advance | None = None,
        **how: Any,
    ) -> Planned:
        weights, options, observed = self.opened.weights(layout), self.options, self.observed
        how |= {"target": options.target, "known": self.tables, "advance": advance}
        # Bounds do not show how small a norm's input is, and so how much a fixed eps would change.
        how |= {"drift_free": options.exact or observed is None, "held": held}
        if held is None and options.stream is not None:
            how["held"] = dict.fromkeys(layout.streams, options.stream)
        if observed is None:
            return make_plan(layout, weights, possible, margin_bits=PROOF_MARGIN_BITS, **how)
        how |= {"margin_bits": options.margin_bits, "bounds": possible}
        how["proof_worth"] = PROOF_FIRST if options.prove else PROOF_WORTH
        planned = make_plan(layout, weights, observed.ranges, **how)
        if options.target != "train":
            return planned
        return replace(planned, plan=with_smaller_gradients(planned.plan, layout, weights, observed.ranges, possible))

    def drift(self, layout: Layout, plan: Plan) -> Fidelity:
        assert self.observed is not None
        opened, reference = self.opened, self.observed.reference
        with self.progress.step("Trying how far the function drifts") as advance:
            whole = plan if opened.edits is None else with_edits(plan, opened.edits)
            drifted = drifted_outputs(opened.checkpoint, layout, whole, opened.inputs, advance)
            return fidelity(reference.fp32, reference.bf16, drifted, probabilities=layout.gives_probabilities)

    def affordable(self, decided: Decided) -> Decided:
        """Return ``decided``, except if the target is ``train`` and ``decided.plan`` changes the outputs more than bf16
        does. Then decide again, without the extra margin of ``train``."""
        if decided.target != "train" or self.observed is None or decided.plan.drift is None:
            return decided
        drift = self.drift(decided.layout, decided.plan)
        if is_acceptable(drift, 1.0):
            return decided
        options = replace(self.options, margin_bits=self.options.margin_bits - TRAIN_MARGIN_BITS)
        self.progress.say(
            f"the extra margin of target train is left out: with this margin, the {drift.title} to the source would be"
            f" {drift.kl_fp16:.1e}, but the source in bf16 has only {drift.kl_bf16:.1e}"
        )
        return replace(self, options=options).decided(decided.target)


def edited_search(search: Search, edits: Edits, exponents: Mapping[str, int]) -> Search:
    opened = search.opened
    assert search.observed is not None
    layout = opened.apart() if edits.apart else opened.layout
    change, inputs = change_by(opened.checkpoint, layout, edits.plan), opened.inputs
    observed = observe_source(opened.checkpoint, inputs, search.progress, opened.device, change)
    ranges = observed.ranges
    if edits.apart and layout.head is not None:
        path = layout.head.linears[0].at
        factor, logits = scaled_by(torch.ones(()), edits.plan.exponent(LOGITS)), ranges[path].output
        logits = replace(logits, amax=logits.amax * factor, mean_square=logits.mean_square * factor.square())
        ranges = {**ranges, path: replace(ranges[path], output=logits)}
    edited = replace(opened, layout=layout, edits=edits.plan, before=opened)
    tables = search.tables.without(changed_by(layout, edits.plan))
    observed = Observed(ranges, replace(search.observed.reference, fp32=observed.reference.fp32))
    return Search(edited, search.options, search.progress, observed, search.observed, exponents, tables)


def stream_exponents(layout: Layout, plan: Plan) -> dict[str, int]:
    return {stream: plan.stream_exponent(stream) for stream in layout.streams}


def uncorrected(planned: Planned) -> Planned:
    plan = planned.plan
    if plan.gain_correction and plan.drift is not None:
        error = math.sqrt(plan.drift.relative_error**2 + planned.corrected)
        plan = plan.model_copy(update={"gain_correction": {}, "drift": Drift(relative_error=error)})
    return replace(planned, plan=plan)


def is_acceptable(drift: Fidelity, share: float = ACCEPTABLE_DRIFT) -> bool:
    """Return whether ``drift`` causes at most ``share`` times the divergence that bf16 causes."""
    return drift.kl_bf16 is not None and drift.kl_fp16 <= drift.kl_bf16 * share
