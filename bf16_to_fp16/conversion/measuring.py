"""The step of ``convert`` that measures what was written: certificate, audit, fidelity.

All three read the files as anyone would, so that nothing that is still in memory can stand in for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..auditing.attack import GROUP, Attack, attack
from ..auditing.fidelity import Fidelity, Outputs, Reference, add_outputs, compared, fidelity, outputs
from ..auditing.regimes import ATTENTIONS, REGIMES, RegimeResult, audit_folder, run_regimes
from ..bounds.arithmetic import Arithmetic
from ..bounds.certificate import bound, fp16_weights
from ..bounds.findings import Certificate
from ..bounds.side_modules import with_side_modules
from ..bounds.spectral import Spectra
from ..bounds.tiers import certified_tiers
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.side_modules import read_side_modules
from ..devices import Device, products_on
from ..families.layout import Layout
from ..families.resolve import resolve
from ..progress import Progress
from ..report.evidence import Decided, Measured
from ..report.schema import FidelityEntry
from ..rescaling.plan import Drift, Plan
from ..run import probe
from ..run.agreement import agreed_layout
from ..run.batch import Batch
from ..run.lanes import Walk
from ..run.stock import attentions_of, eps_attribute, load, load_config
from .options import Options
from .planning import Opened, checkpoint_batches, drifted_outputs, reference_of


def measure(opened: Opened, decided: Decided, work: Path, options: Options, progress: Progress) -> Measured:
    """Bound what was written, audit it, and compare it with the source; where nothing is to be audited, compare a few
    short rows alone."""
    device = opened.device
    with products_on(device, "certificate"):
        certificate, tiers = certificate_of(work, decided.target, options.max_length, opened.spectra, progress)
    written = open_checkpoint(work)
    regimes: Mapping[str, RegimeResult]
    if options.run_model:
        inputs, in_fp32 = opened.inputs, in_fp32_too(opened.inputs, decided.plan)
        regimes, half, fp32 = audited(written, inputs, in_fp32, decided, options, device, progress)
    else:
        inputs = in_fp32 = [probe.few_rows(load_config(opened.checkpoint.folder))]
        regimes, half, fp32 = {}, *outputs_of_few(written, inputs, progress)
    with progress.step("Comparing fp16 and bf16 with the fp32 source"):
        reference = decided.reference or reference_of(opened.checkpoint, inputs)
        ran = Ran(inputs, half, in_fp32, fp32)
        closeness, plan = compare(opened.checkpoint, decided.layout, decided.plan, reference, ran)
    return Measured(certificate, plan, tiers, regimes, closeness, half, device.environment())


@dataclass(frozen=True)
class Ran:
    """What a written checkpoint was run on, in fp16 and in fp32, and its outputs there."""

    inputs: Sequence[Batch]
    half: Outputs
    in_fp32: Sequence[Batch]
    fp32: Outputs


def in_fp32_too(inputs: list[Batch], plan: Plan) -> list[Batch]:
    """Return what a written checkpoint is run on in fp32: all for the drift of a plan that has one, else the batch with
    the fewest ids, which shows that the function is the source's."""
    sizes = {id(b): sum(x.numel() for x in b.tensors.values() if x is not None) for b in inputs}
    return inputs if plan.drift is not None else [min(compared(inputs), key=lambda batch: sizes[id(batch)])]


def outputs_of_few(written: Checkpoint, rows: list[Batch], progress: Progress) -> tuple[Outputs, Outputs]:
    """Return what a written checkpoint gives on one batch in fp16 and in fp32, block by block."""
    with progress.step("Running a few short rows of the output") as advance:
        walk = Walk(written)
        lanes = add_outputs(walk, rows, torch.float16, half=True) + add_outputs(walk, rows, torch.float32)
        walk.run(advance)
    half, fp32 = ([lane.result] for lane in lanes)
    return half, fp32


def compare(source: Checkpoint, layout: Layout, plan: Plan, reference: Reference, ran: Ran) -> tuple[Fidelity, Plan]:
    """Return how far a written checkpoint is from its source, and its plan with what a drift was predicted to cost and
    what it does."""

    def distance(expected: Outputs, found: Outputs, bf16: Outputs | None = None) -> Fidelity:
        return fidelity(expected, bf16, found, probabilities=layout.gives_probabilities)

    both = {id(batch) for batch in ran.in_fp32}
    beside = [x for batch, x in zip(compared(ran.inputs), reference.fp32, strict=True) if id(batch) in both]
    function = distance(beside, ran.fp32)
    relative = fidelity(beside, None, ran.fp32, probabilities=False).kl_fp16
    closeness = distance(reference.fp32, ran.half, reference.bf16)
    closeness = replace(closeness, kl_fp32=function.kl_fp16, squared_error_fp32=relative)
    if plan.drift is None:
        return closeness, plan
    predicted = distance(reference.fp32, drifted_outputs(source, layout, plan, list(ran.inputs)))
    drift = Drift(
        relative_error=plan.drift.relative_error,
        predicted_kl=predicted.kl_fp16,
        predicted_max_logit_error=predicted.max_logit_error_fp16,
        measured_kl=function.kl_fp16,
        measured_max_logit_error=function.max_logit_error_fp16,
    )
    return closeness, plan.model_copy(update={"drift": drift})


def audited(
    written: Checkpoint,
    inputs: list[Batch],
    in_fp32: list[Batch],
    decided: Decided,
    options: Options,
    device: Device,
    progress: Progress,
) -> tuple[Mapping[str, RegimeResult], Outputs, Outputs]:
    """Run what was written in every regime, and on some batches in fp32; return the regimes and the outputs in fp16 and
    fp32."""
    attentions_of(decided.layout.stock.names[0], ATTENTIONS, progress)
    with progress.step(f"Auditing {', '.join(REGIMES)}") as advance:
        if decided.target != "train":
            found = device.run(
                "audit", lambda place: run_regimes(written, inputs, device=place, fp32=in_fp32, advance=advance)
            )
            return found.regimes, found.half, found.fp32
        regimes = device.run(
            "audit",
            lambda place: audit_folder(
                written.folder, inputs=inputs, seed=options.seed, device=place, advance=advance, train_mode=True
            ),
        )
        half = outputs(written, inputs, torch.float16, half=True)
        return regimes, half, outputs(written, in_fp32, torch.float32)


def certificate_of(
    folder: Path, target: str, max_length: int, spectra: Spectra, progress: Progress
) -> tuple[Certificate, dict[str, bool]]:
    """Return the certificate of what was written, and by tier whether its own holds; spectra: eigenvalues of the
    source's products, each of which is taken over as far as the written weights, read beside the source's, are proved
    to be near enough to them."""
    checkpoint = open_checkpoint(folder)
    layout = agreed_layout(checkpoint)
    weights, arithmetic, known = fp16_weights(checkpoint, layout), Arithmetic(max_length), replace(spectra, fixed=True)
    with progress.step(f"Bounding every site of the output for {target}") as advance:
        found = bound(layout, weights, arithmetic, target=target, spectra=known, advance=advance)
    modules = read_side_modules(folder)
    found = with_side_modules(found, layout, modules)
    with progress.step("Bounding every site in stricter arithmetic"):
        tiers = certified_tiers(
            layout, weights, target, holds=found.holds, arithmetic=arithmetic, spectra=known, modules=modules
        )
    return found, tiers


def attacked(
    folder: Path,
    layout: Layout,
    certificate: Certificate,
    steps: int,
    seed: int,
    device: Device,
    progress: Progress,
    *,
    sites: Sequence[str] | None = None,
) -> Attack:
    """Return what ``attack`` finds at ``sites`` of a checkpoint in fp16, on the device; certificate: its bounds."""
    with progress.step("Searching for the worst inputs") as advance:
        model = load(folder, torch.float16, half=True)
        return device.run(
            "attack",
            lambda place: attack(
                model.to(place), layout, steps=steps, seed=seed, sites=sites, certificate=certificate, advance=advance
            ),
        )


def attack_unproven(work: Path, measured: Measured, steps: int, opened: Opened, progress: Progress) -> Measured:
    """Return what was measured with a search for inputs that break what the certificate does not prove, where there is
    anything and ``steps`` are not 0."""
    unproven = [site.name for site in measured.certificate.sites if not site.holds]
    if not unproven or not steps:
        return measured
    rows = unproven * max(1, GROUP // len(unproven))
    layout = agreed_layout(open_checkpoint(work))
    found = attacked(work, layout, measured.certificate, steps, 0, opened.device, progress, sites=rows)
    return replace(measured, attack=found)


def drift_of_eps(folder: Path, eps: float, options: Options, progress: Progress) -> float:
    """Return how far a converted encoder, in fp32, goes from itself where its norms have another eps, as a relative
    squared error of its last states on what the conversion ran on."""
    checkpoint = open_checkpoint(folder)
    layout = resolve(checkpoint)
    inputs = checkpoint_batches(checkpoint, layout, options.data, options.seed, sweep=options.sweep)
    with progress.step(f"Running it with eps fixed at {eps:g}") as advance:
        walk = Walk(checkpoint)
        right, other = (add_outputs(walk, inputs, torch.float32) for _ in range(2))
        for lane in other:
            for path in layout.norms:
                norm: Any = lane.model.get_submodule(path)
                setattr(norm, eps_attribute(norm), eps)
        walk.run(advance)
    outputs = [[lane.result for lane in lanes] for lanes in (right, other)]
    return fidelity(outputs[0], outputs[0], outputs[1], probabilities=False).kl_fp16


def fidelity_to_original(original: Checkpoint, half: Outputs, inputs: list[Batch]) -> FidelityEntry:
    """Return how far the written fp16 model, whose outputs are given, and the original in bf16 are from the original
    in fp32."""
    reference = reference_of(original, inputs)
    probabilities = resolve(original).gives_probabilities
    found = fidelity(reference.fp32, reference.bf16, half, probabilities=probabilities)
    return FidelityEntry.model_validate(found.to_json())
