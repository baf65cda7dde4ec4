"""The first steps of ``convert``: open the source, bound it, observe it, and choose the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..auditing.fidelity import fidelity
from ..bounds.arithmetic import Arithmetic
from ..bounds.certificate import bound
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..errors import UserError
from ..families.resolve import check_norms, resolve
from ..families.types import RESIDUAL, Layout, TensorSource
from ..observe.meter import observe_ranges
from ..progress import Progress
from ..ranges import ModuleRange
from ..report.evidence import Decided
from ..rescaling.plan import Plan, check_plan_fits
from ..rescaling.planner import PROOF_MARGIN_BITS, RESIDUAL_RANGE, Planned, make_plan
from ..rescaling.weights import source_weights
from ..run import probe
from ..run.agreement import agreed_layout
from ..run.probe import Batch
from ..run.stock import eps_attribute, load, load_config
from .options import Destination, Options

ACCEPTABLE_DRIFT = 1 / 128
"""Largest share of bf16's divergence that the drift of an unscaled eps may cause."""


@dataclass(frozen=True)
class Opened:
    """A source that can be converted: its tensors, what each of them is, and what to run it on (nothing, where the
    certificate alone decides)."""

    checkpoint: Checkpoint
    layout: Layout
    inputs: list[Batch]


def open_source(source: str | Path, options: Options, place: Destination, endpoint: str | None) -> Opened:
    """Open a source (folder or Hub id), classify its tensors, and gather what to run it on."""
    checkpoint = open_checkpoint(source, options.subfolder, endpoint=endpoint)
    place.check(checkpoint.folder)
    layout = agreed_layout(checkpoint)
    check_norms(checkpoint, layout)
    inputs: list[Batch] = []
    if options.run_model:
        inputs = checkpoint_batches(checkpoint, options.data, options.seed, sweep=options.sweep)
    return Opened(checkpoint, layout, inputs)


def replayed(opened: Opened, plan: Plan) -> Decided:
    """Return a stored plan for this source; raise UserError where it does not fit."""
    layout = resolve(opened.checkpoint, untie=plan.untied_head)
    check_plan_fits(layout, plan)
    return Decided(layout, plan)


def decide(opened: Opened, options: Options, progress: Progress) -> Decided:
    """Bound the source's signals, observe them unless nothing is to be run, and choose the plan."""
    checkpoint, inputs = opened.checkpoint, opened.inputs
    grounds = Grounds(
        bounds=bound_source(checkpoint, options.target, options.max_length, progress),
        ranges=observe_source(checkpoint, inputs, progress) if options.run_model else None,
        acceptable=drift_is_acceptable(checkpoint, inputs, progress) if options.run_model else None,
    )
    layout, planned = best_plan(opened, grounds, options, progress)
    return Decided(layout, planned.plan, planned, grounds.ranges)


def checkpoint_batches(checkpoint: Checkpoint, data: str | None, seed: int, *, sweep: bool = False) -> list[Batch]:
    """Return what to run on: the built-in probe, its ids chosen by the source's weights, and the user's text where
    given."""
    config = load_config(checkpoint.folder)
    return probe.audit_batches(config, checkpoint.folder, data, seed=seed, sweep=sweep)


Bounds = Callable[[Layout, int], Mapping[str, ModuleRange]]
"""Gives the bounds of a layout, which depend on whether its head is tied, for a residual exponent."""


@dataclass(frozen=True)
class Grounds:
    """What a plan is chosen on.

    ranges: what was observed; None plans from the bounds alone, which need no margin. acceptable: runs a plan whose
    drift was predicted to cost too much and says whether it may be taken, since the prediction weighs every norm alike.
    """

    ranges: Mapping[str, ModuleRange] | None
    bounds: Bounds | None = None
    acceptable: Callable[[Layout, Plan], bool] | None = None


def bound_source(checkpoint: TensorSource, target: str, max_length: int, progress: Progress) -> Bounds:
    """Return a function that bounds the signals of the unscaled source, in arithmetic without subnormals."""

    def of(layout: Layout, residual_exponent: int) -> Mapping[str, ModuleRange]:
        with progress.step("Bounding every signal of the source") as advance:
            arithmetic = Arithmetic(max_length, planned=residual_exponent)
            found = bound(layout, source_weights(checkpoint, layout), arithmetic, target=target, advance=advance)
        return found.ranges

    return of


def observe_source(checkpoint: Checkpoint, inputs: list[Batch], progress: Progress) -> Mapping[str, ModuleRange]:
    """Run the source in fp32 on ``inputs`` and return what every module's input and output reach."""
    with progress.step("Observing the source in fp32"):
        ranges = observe_ranges(load(checkpoint.folder, torch.float32), inputs)
    for path, seen in ranges.items():
        if not bool(torch.isfinite(seen.output.amax).all()):
            bad = [n for n in sorted(checkpoint.tensors) if not all_finite(checkpoint, n)]
            because = f"tensor {bad[0]} holds inf or NaN, so that {path}" if bad else path
            raise UserError(
                f"{checkpoint.folder}: {because} gives inf or NaN in fp32 on the source; the checkpoint is damaged,"
                " use another revision of it or repair the tensor"
            )
    return ranges


def all_finite(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor of a checkpoint has neither inf nor NaN."""
    return bool(torch.isfinite(checkpoint.read(name)).all())


def best_plan(opened: Opened, grounds: Grounds, options: Options, progress: Progress) -> tuple[Layout, Planned]:
    """Plan with the head as it is; where the tied head's limit stands in the way and it may be separated, plan with
    it separated."""
    checkpoint, layout, ranges, bounds = opened.checkpoint, opened.layout, grounds.ranges, grounds.bounds
    acceptable = grounds.acceptable

    def plan_at(layout: Layout, possible: Mapping[str, ModuleRange] | None, exponent: int | None = None) -> Planned:
        weights = source_weights(checkpoint, layout)
        if ranges is None:
            assert possible is not None
            return make_plan(layout, weights, possible, target=options.target, margin_bits=PROOF_MARGIN_BITS)
        return make_plan(
            layout,
            weights,
            ranges,
            target=options.target,
            margin_bits=options.margin_bits,
            bounds=possible,
            residual_exponent=exponent,
        )

    def plan_for(layout: Layout) -> Planned:
        exponent = -RESIDUAL_RANGE
        while True:
            possible = bounds(layout, exponent) if bounds is not None else None
            with progress.step("Planning the exponents"):
                planned = plan_at(layout, possible)
            if acceptable is not None and layout.family.eps_key is None:
                stream = next((f for f in planned.fallbacks if f.signal == RESIDUAL), None)
                if stream is not None and stream.exponent is not None:
                    trial = plan_at(layout, possible, stream.exponent)
                    # A corrected gain is no longer carried over exactly, so the plain plan goes first.
                    plain = replace(trial, plan=trial.plan.model_copy(update={"gain_correction": {}}))
                    planned = next((t for t in (plain, trial) if acceptable(layout, t.plan)), planned)
            chosen = planned.plan.residual_exponent
            # LayerNorm's eps stays when the stream is scaled, so its bounds are those of the exponent they were made
            # for or a smaller one. Each round starts from the last one's plan, until that covers itself.
            if bounds is None or not layout.family.centred_norm or chosen <= exponent:
                return planned
            exponent = chosen

    planned = plan_for(layout)
    if not planned.violations or not layout.tied or not layout.family.untie:
        return layout, planned
    apart = resolve(checkpoint, untie=True)
    other = plan_for(apart)
    if sum(v.excess_bits for v in other.violations) < sum(v.excess_bits for v in planned.violations):
        return apart, other
    return layout, planned


def drift_is_acceptable(
    checkpoint: Checkpoint, inputs: list[Batch], progress: Progress
) -> Callable[[Layout, Plan], bool]:
    """Return a function that runs the source with the eps that a plan amounts to, and says whether the drift's
    divergence stays under 1/128 of bf16's: half of what fp16's own rounding may take."""

    def of(layout: Layout, plan: Plan) -> bool:
        with progress.step(f"Trying the drift of eps at 2^{plan.residual_exponent}"):
            source, bf16, drifted = (
                load(checkpoint.folder, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)
            )
            simulate_drift(drifted, layout, plan)
            found = fidelity(source, bf16, drifted, inputs)
        return found.kl_bf16 is not None and found.kl_fp16 <= found.kl_bf16 * ACCEPTABLE_DRIFT

    return of


def simulate_drift(model: torch.nn.Module, layout: Layout, plan: Plan) -> None:
    """Give an fp32 source model the norm eps that its rescaled weights will meet: eps·4^-r, which is the same function.

    Corrected gains are rounded to fp16, as they will be stored.
    """
    for path in layout.norms:
        norm: Any = model.get_submodule(path)
        setattr(norm, eps_attribute(norm), layout.eps * 4.0**-plan.residual_exponent)
        correction = plan.gain_correction.get(f"{path}.weight")
        if correction is not None:
            norm.weight.data.copy_((norm.weight.data * correction).half())
