"""Measure a written checkpoint's files: the certificate, the audit, and the fidelity (nearness to the source)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch

from ..bounds.arithmetic import Arithmetic
from ..bounds.tiers import bounded
from ..checkpoint.folder import has_tokenizer
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..devices import Device
from ..errors import UserError
from ..families.layout import Layout
from ..families.signals import Kind
from ..measuring import probe
from ..measuring import soft_side as soft
from ..measuring.agreement import agreed_layout
from ..measuring.batch import Batch
from ..measuring.fidelity import (
    EveryOutput,
    Outputs,
    Reference,
    add_differences,
    add_outputs,
    compared,
    fidelity,
    mean_divergence,
    output_errors,
    outputs_on,
    reference_of,
    smallest_batches,
)
from ..measuring.lanes import Change, Walk, results_of
from ..measuring.regime_results import RegimeResult
from ..measuring.regimes import ATTENTIONS, REGIMES, Audited, audit_folder, run_regimes
from ..measuring.source_runs import change_by, drifted_outputs
from ..measuring.stock import attentions_of, load_config
from ..measuring.tokenizer import load_tokenizer, tokenised
from ..progress import Advance, Progress
from ..report.remedies import tower_in_fp32
from ..report.steps import Decided, Measured
from ..rescaling.edits import edits_of, listed_edits
from ..rescaling.exponents import output_factors
from ..rescaling.plan import Drift, Plan, inverse
from ..results import Fidelity, InexactEntry, OutputEntry
from .editing import TEXT, some_of
from .options import Options
from .planning import Opened


def measure(opened: Opened, decided: Decided, work: Path, options: Options, progress: Progress) -> Measured:
    device, written = opened.device, open_checkpoint(work)
    layout, arithmetic = agreed_layout(written), Arithmetic(options.max_length)
    # The source's eigenvalues serve where the written weights are proved to be near enough.
    spectra = opened.spectra.for_others()
    certificate, tiers = bounded(
        written, layout, decided.target, arithmetic, device, progress, " of the output", spectra
    )
    if options.run_model:
        attentions_of(decided.layout.stock.names[0], ATTENTIONS, progress)
        inputs, train = opened.inputs, decided.target == "train"
        in_fp32 = batches_for_fp32(inputs, decided.layout, decided.plan)
        ran = audited(written, inputs, in_fp32, device, progress, train=train)
    else:
        inputs = in_fp32 = [probe.few_rows(load_config(opened.checkpoint.folder))]
        with progress.step("Running the output on a few short rows") as advance:
            ran = outputs_of(Walk(written), inputs, inputs, {}, advance)
    with progress.step("Comparing fp16 and bf16 with the fp32 source"):
        observed = decided.observed
        reference = reference_of(opened.checkpoint, inputs) if observed is None else observed.reference
        closeness, plan = compare(opened.checkpoint, decided.layout, decided.plan, reference, ran, inputs, in_fp32)
        edits = measured_edits(written, decided, in_fp32)
    rare = searched(opened.checkpoint, written, decided.layout, plan, progress) if options.run_model else None
    return Measured(
        certificate,
        plan,
        tiers,
        ran.regimes,
        closeness,
        ran.half,
        device.environment(),
        edits=edits,
        soft=rare,
        outputs=outputs_beside(decided.layout, decided.plan, reference, ran),
    )


def outputs_beside(layout: Layout, plan: Plan, reference: Reference, ran: Audited) -> dict[str, OutputEntry]:
    beside = (reference.every_fp32, reference.every_bf16) if ran.every else ((), ())
    return output_errors(output_factors(layout, plan), *beside, ran.every)


def measured_edits(written: Checkpoint, decided: Decided, inputs: list[Batch]) -> list[InexactEntry]:
    layout, exponents = decided.layout, edits_of(decided.layout, decided.plan).exponents
    edits = listed_edits(layout, decided.plan, decided.predicted)
    if not edits:
        return []

    def undone(names: Iterable[str]) -> Change:
        back = Plan(family=decided.plan.family, exponents={name: exponents[name] for name in names})
        return change_by(written, layout, inverse(back))

    some, walk = some_of(inputs, len(edits)), Walk(written)
    without = add_outputs(walk, some, torch.float32, change=undone(exponents))
    walk.run()
    how: dict[str, Any] = {"probabilities": layout.gives_probabilities, "scale": torch.ones(())}
    source, walk = results_of(without), Walk(written)
    cuts = tuple(name for name in edits if layout.signals[name].kind is Kind.COLUMNS)  # they may be in step
    together = {signal: cuts if signal in cuts else (signal,) for signal in edits}
    lanes = {
        names: add_differences(walk, some, source, change=undone(exponents.keys() - set(names)), **how)
        for names in dict.fromkeys(together.values())
    }
    walk.run()
    costs = {names: mean_divergence(results_of(each)) for names, each in lanes.items()}
    return [edit.model_copy(update={"measured": costs[together[name]]}) for name, edit in edits.items()]


def searched(
    source: Checkpoint, written: Checkpoint, layout: Layout, plan: Plan, progress: Progress
) -> soft.SoftSide | None:
    if not edits_of(layout, plan).exponents:
        return None
    config, text, tokenizer = load_config(source.folder), None, None
    if has_tokenizer(source.folder):
        with suppress(UserError):  # of a tokenizer that nothing else needs
            tokenizer = load_tokenizer(source.folder)
            longest = tokenised(config, source.folder, str(TEXT), seed=0, examples=8, length=soft.LENGTH)[-1]
            text = longest.input_ids[longest.attention_mask.bool().all(1)]
    with progress.step("Looking for rare input that the edits harm"):
        result = soft.soft_side(source, written, layout, plan, config, text)
    if tokenizer is None:
        return result
    named = [
        each.model_copy(update={"tokens": [*map(str, tokenizer.convert_ids_to_tokens(each.ids))]})
        for each in result.exceptions
    ]
    return replace(result, exceptions=named)


def batches_for_fp32(inputs: list[Batch], layout: Layout, plan: Plan) -> list[Batch]:
    """Return the batches to run in fp32 too. They are all of ``inputs``, or only the smallest if the plan is exact."""
    if plan.drift is not None or edits_of(layout, plan).exponents:
        return inputs
    return smallest_batches(compared(inputs))


def outputs_of(
    walk: Walk,
    inputs: list[Batch],
    in_fp32: list[Batch],
    regimes: dict[str, RegimeResult],
    advance: Advance | None = None,
) -> Audited:
    every: list[EveryOutput] = []
    half = add_outputs(walk, inputs, torch.float16, half=True)
    fp32 = add_outputs(walk, in_fp32, torch.float32, every)
    walk.run(advance)
    return Audited(regimes, results_of(half), results_of(fp32), every)


def compare(
    source: Checkpoint,
    layout: Layout,
    plan: Plan,
    reference: Reference,
    ran: Audited,
    inputs: Sequence[Batch],
    in_fp32: Sequence[Batch],
) -> tuple[Fidelity, Plan]:
    """Return a written checkpoint's fidelity to its source, and its plan with the predicted and measured drift, if any.
    ran: the outputs of the checkpoint. inputs, in_fp32: the batches that ran in fp16 and in fp32."""

    def distance(expected: Outputs, outputs: Outputs, bf16: Outputs | None = None) -> Fidelity:
        return fidelity(expected, bf16, outputs, probabilities=layout.gives_probabilities)

    beside = outputs_on(in_fp32, inputs, reference.fp32)
    function = distance(beside, ran.fp32)
    relative = fidelity(beside, None, ran.fp32, probabilities=False).kl_fp16
    sides, of_text = (reference.fp32, ran.half, reference.bf16), [not batch.image for batch in compared(inputs)]
    closeness = distance(*sides)
    if closeness.kl_fp16 == math.inf and any(of_text) and tower_in_fp32(layout.family.name, ran.regimes):
        closeness = distance(*(list(compress(each, of_text)) for each in sides))
        closeness = closeness.model_copy(update={"reference": f"{closeness.reference}, on text alone"})
    closeness = closeness.model_copy(update={"kl_fp32": function.kl_fp16, "squared_error_fp32": relative})
    if plan.drift is None:
        return closeness, plan
    predicted = distance(reference.fp32, drifted_outputs(source, layout, plan, list(inputs)))
    drift = Drift(
        relative_error=plan.drift.relative_error,
        predicted_kl=predicted.kl_fp16,
        predicted_max_logit_error=predicted.max_logit_error_fp16,
        measured_kl=function.kl_fp16,
        measured_max_logit_error=function.max_logit_error_fp16,
    )
    return closeness, plan.model_copy(update={"drift": drift})


def audited(
    checkpoint: Checkpoint,
    inputs: list[Batch],
    in_fp32: list[Batch],
    device: Device,
    progress: Progress,
    *,
    train: bool,
    seed: int = 0,
) -> Audited:
    with progress.step(f"Auditing {', '.join(REGIMES)}") as advance:
        if not train:
            return device.run(
                "audit", lambda place: run_regimes(checkpoint, inputs, device=place, fp32=in_fp32, advance=advance)
            )
        how: dict[str, Any] = {"inputs": inputs, "seed": seed, "advance": advance, "train_mode": True}
        regimes = device.run("audit", lambda place: audit_folder(checkpoint.folder, device=place, **how))
        if not in_fp32:
            return Audited(regimes, [], [])
        return outputs_of(Walk(checkpoint), inputs, in_fp32, regimes)
