"""The step of ``convert`` that measures what was written: certificate, audit, fidelity.

All three read the files as anyone would, so that nothing that is still in memory can stand in for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..auditing.fidelity import Fidelity, fidelity
from ..auditing.regimes import REGIMES, audit_folder
from ..bounds.arithmetic import Arithmetic
from ..bounds.certificate import Certificate, bound, fp16_weights
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..families.types import Layout
from ..progress import Progress
from ..report.evidence import Decided, Measured
from ..report.schema import FidelityEntry
from ..rescaling.plan import Drift, Plan
from ..run.agreement import agreed_layout
from ..run.probe import Batch
from ..run.stock import load
from .options import Options
from .planning import Opened, simulate_drift


def measure(opened: Opened, decided: Decided, work: Path, options: Options, progress: Progress) -> Measured:
    """Bound what was written and, unless nothing is to be run, audit it and compare it with the source."""
    certificate = certificate_of(work, options.target, options.max_length, progress)
    if not options.run_model:
        return Measured(certificate, decided.plan)
    regimes = audit_regimes(work, opened.inputs, options.seed, progress, train_mode=options.target == "train")
    with progress.step("Comparing fp16 and bf16 with the fp32 source"):
        closeness, plan = compare(opened.checkpoint, decided.layout, decided.plan, work, opened.inputs)
    return Measured(certificate, plan, regimes, closeness)


def audit_regimes(
    folder: Path, inputs: list[Batch], seed: int, progress: Progress, *, train_mode: bool = False
) -> Mapping[str, Any]:
    """Audit a folder in every regime, with progress."""
    with progress.step(f"Auditing {', '.join(REGIMES)}, eager and SDPA") as advance:
        return audit_folder(folder, inputs=inputs, seed=seed, advance=advance, train_mode=train_mode)


def certificate_of(folder: Path, target: str, max_length: int, progress: Progress) -> Certificate:
    """Return the certificate of what was written."""
    checkpoint = open_checkpoint(folder)
    layout = agreed_layout(checkpoint)
    with progress.step("Bounding every signal of the output") as advance:
        return bound(layout, fp16_weights(checkpoint, layout), Arithmetic(max_length), target=target, advance=advance)


def compare(
    checkpoint: Checkpoint, layout: Layout, plan: Plan, work: Path, inputs: list[Batch]
) -> tuple[Fidelity, Plan]:
    """Measure the written fp16 model and the source in bf16 against the source in fp32; complete the plan's drift
    figures."""
    source = load(checkpoint.folder, torch.float32)
    output = load(work, torch.float16, half=True)
    closeness = fidelity(source, load(checkpoint.folder, torch.bfloat16), output, inputs)
    if plan.drift is None:
        return closeness, plan
    drifted = load(checkpoint.folder, torch.float32)
    simulate_drift(drifted, layout, plan)
    predicted = fidelity(source, None, drifted, inputs)
    measured = fidelity(source, None, load(work, torch.float32), inputs)
    drift = Drift(
        relative_error=plan.drift.relative_error,
        predicted_kl=predicted.kl_fp16,
        predicted_max_logit_error=predicted.max_logit_error_fp16,
        measured_kl=measured.kl_fp16,
        measured_max_logit_error=measured.max_logit_error_fp16,
    )
    return closeness, plan.model_copy(update={"drift": drift})


def fidelity_to_original(original: Checkpoint, work: Path, inputs: list[Batch]) -> FidelityEntry:
    """Return how far the written fp16 model and the original in bf16 are from the original in fp32."""
    source, bf16 = (load(original.folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    found = fidelity(source, bf16, load(work, torch.float16, half=True), inputs)
    return FidelityEntry.model_validate(found.to_json())
