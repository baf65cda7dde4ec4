"""Run the source checkpoint, as it is or as a plan changes it, to measure ranges of activations and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..bounds.arithmetic import full_precision
from ..checkpoint.reader import Checkpoint
from ..devices import Device
from ..errors import UserError
from ..families.layout import Layout, TensorReader, TensorSource
from ..families.resolve import eps_attribute, source_weights
from ..progress import Advance, Progress
from ..ranges import ModuleRange
from ..rescaling.apply import through_fp16
from ..rescaling.centred import centred, centred_tensors
from ..rescaling.edits import edited, edits_of, without_edits
from ..rescaling.exponents import exponents_of, norm_exponents
from ..rescaling.plan import Plan
from .batch import Batch
from .fidelity import EveryOutput, Outputs, Reference, add_outputs, compared, output_on, run_recording, smallest_batches
from .lanes import Change, Walk, results_of
from .meter import RangeObserver


@dataclass(frozen=True)
class Observed:
    """The results of running the source: fp32 ranges by module, and the reference outputs to compare others with."""

    ranges: Mapping[str, ModuleRange]
    reference: Reference


def observe_source(
    checkpoint: Checkpoint, inputs: list[Batch], progress: Progress, device: Device, change: Change | None = None
) -> Observed:
    """Run the source in fp32, and in bf16 on inputs whose outputs are compared; return ranges and outputs. change:
    applies edits to a weight; the source then runs only in fp32. Raises UserError for an inf or NaN in fp32."""

    def observed(place: torch.device) -> Observed:
        walk = Walk(checkpoint, place)
        unchanged = inputs if change is None else []
        shown = smallest_batches(compared(unchanged))
        every_fp32: list[EveryOutput] = [{} for _ in shown]
        every_bf16: list[EveryOutput] = []

        observer = RangeObserver()

        def run(batch: Batch, model: Any) -> Tensor | None:
            with observer.watching(model):
                output = run_recording(model, batch, shown, every_fp32)
            return output_on(batch, output) if compared([batch]) else None

        fp32 = [walk.add(partial(run, batch), torch.float32, change=change) for batch in inputs]
        bf16 = add_outputs(walk, unchanged, torch.bfloat16, every_bf16)
        walk.run(advance)
        kept = [output for output in results_of(fp32) if output is not None]
        return Observed(observer.ranges(), Reference(kept, results_of(bf16), every_fp32, every_bf16))

    what = "source" if change is None else "edited source"
    with full_precision(), progress.step(f"Observing the {what} in fp32") as advance:
        seen = device.run("observation", observed, wide=True)
    check_finite(checkpoint, seen.ranges)
    return seen


def check_finite(checkpoint: Checkpoint, ranges: Mapping[str, ModuleRange]) -> None:
    for path, seen in ranges.items():
        if not bool(torch.isfinite(seen.output.amax).all()):
            bad = [n for n in sorted(checkpoint.tensors) if not bool(checkpoint.read(n).isfinite().all())]
            because = f"tensor {bad[0]} holds inf or NaN, so that {path}" if bad else path
            raise UserError(
                f"{checkpoint.folder}: {because} gives inf or NaN in fp32, so the checkpoint is damaged; use another"
                " revision of it or repair the tensor"
            )


def change_by(source: TensorSource, layout: Layout, edits: Plan, read: TensorReader | None = None) -> Change:
    """Return a function that takes a weight's name and stored values, and returns these with a plan's edits. read: the
    result of ``centred`` for this plan, if several calls share it. By default it is made again."""
    biases = centred_tensors(layout, edits.centred_keys)
    read = read or centred(source_weights(source, layout), layout, edits.centred_keys)

    def changed(name: str, weight: Tensor) -> Tensor:
        if (tensor := layout.tensors.get(name)) is None:
            return weight
        return edited(tensor, read(name).to(weight) if name in biases else weight, edits, tensor.offset)

    return changed


def drifted_outputs(
    checkpoint: Checkpoint, layout: Layout, plan: Plan, inputs: list[Batch], advance: Advance | None = None
) -> Outputs:
    """Return the outputs of the fp32 source with a plan's edits and drift. Drift is the change of the function that
    comes from rounding norms' gains, and from an eps that is not scaled with the norm's input."""
    # Gains that are stored minus an offset may round when rescaled. Then every weight is rounded as in a conversion.
    rounds = any(tensor.offset for tensor in layout.tensors.values())
    edit, exact = change_by(checkpoint, layout, edits_of(layout, plan)), without_edits(layout, plan)

    def corrected(name: str, weight: Tensor) -> Tensor:
        tensor, weight, correction = layout.tensors.get(name), edit(name, weight), plan.gain_correction.get(name)
        if tensor is not None and rounds:
            exponents = exponents_of(tensor, exact).full(tensor.shape)
            return through_fp16(weight, exponents, tensor.offset, correction or 1.0)
        return weight if correction is None else (weight * correction).half().float()

    walk = Walk(checkpoint)
    lanes = add_outputs(walk, inputs, torch.float32, change=corrected)
    fixed = plan.eps if plan.eps_held else layout.fixed_eps
    eps = layout.eps * 4.0**plan.residual_exponent if fixed is None else fixed
    # A norm gives the same output for an input scaled by 2^r as for the unscaled input with eps times 4^-r.
    norms = {
        path: eps * 4.0**-exponent
        for path, exponent in norm_exponents(layout, plan).items()
        if fixed is not None or exponent != plan.residual_exponent
    }
    for projector in layout.projectors:
        if projector.shares_eps:
            norms[projector.norm] = layout.eps * 4.0**plan.residual_exponent
    for lane, (path, value) in product(lanes, norms.items()):
        norm = lane.model.get_submodule(path)
        setattr(norm, eps_attribute(norm), value)
    walk.run(advance)
    return results_of(lanes)
