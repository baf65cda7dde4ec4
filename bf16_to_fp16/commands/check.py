"""``check``: a converted checkpoint in another runtime, in fp16, beside its source there and stock code in bf16.

All weights are compared with stock code in fp32 on the same weights, so that what is measured is the arithmetic of the
runtime. The yardstick is bf16 in torch, for which these checkpoints were made: an output is safe if it is finite and
nearer to fp32 than that. A runtime that computed in fp32 all the same has shown nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..environment import SCHEMA, environment
from ..errors import UserError
from ..families.layout import Layout
from ..progress import Progress, shown_by
from ..quiet import quiet
from ..report.answers import ArithmeticEntry, ComparisonEntry, RuntimeCheck
from ..report.page import Result
from ..report.schema import Environment
from ..results import dump
from ..run import probe
from ..run.agreement import agreed_layout
from ..run.batch import Batch
from ..run.runtime import Runtime, in_torch
from ..run.runtimes import runtime_named
from ..run.stock import load_config


@quiet()
def check(
    out: str | Path,
    runtime: str,
    *,
    source: str | Path | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Run ``out`` (folder or Hub id) in ``runtime`` in fp16 and return the verdict, the arithmetic and the comparisons.

    source: what it was converted from, run in the same runtime beside it. seed: of the built-in probe, from which the
    rows are taken. Raises UserError for a runtime that is not installed and a checkpoint that cannot be used.
    """
    progress = shown_by(progress)
    chosen = runtime_named(runtime)
    checkpoint, layout = opened(out)
    origin = None if source is None else opened(source)
    if origin is not None and not alike(layout, origin[1]):
        raise UserError(f"{source} and {out} are models of different shapes; give what {out} was converted from")
    config = load_config(checkpoint.folder)
    inputs = probe.audit_batches(config, checkpoint.folder, None, seed=seed, opened=(checkpoint, layout))
    batch = probe.one_batch(config, inputs)
    with progress.step(f"{checkpoint.name} in {chosen.name}"):
        outcome = chosen.run(checkpoint.folder, layout, batch)
        reference = expected(chosen, checkpoint.folder, torch.float32, batch)
        output = compared(checkpoint.name, outcome.values, reference)
    beside = None
    if origin is not None:
        with progress.step(f"{origin[0].name} in {chosen.name}"):
            values = chosen.run(origin[0].folder, origin[1], batch).values
            reference = expected(chosen, origin[0].folder, torch.float32, batch)
            beside = compared(origin[0].name, values, reference)
    yardstick = origin[0] if origin else checkpoint
    with progress.step(f"{yardstick.name} in torch, in bf16"):
        values, _ = expected(chosen, yardstick.folder, torch.bfloat16, batch)
        bf16 = compared(yardstick.name, values, reference)
    result = RuntimeCheck(
        schema=SCHEMA,
        verdict=verdict(output, bf16, native=outcome.arithmetic.native),
        runtime=chosen.name,
        runtime_version=version(chosen.package),
        device=outcome.device,
        arithmetic=ArithmeticEntry(native=outcome.arithmetic.native, **asdict(outcome.arithmetic)),
        compared=chosen.gives(states=layout.head is None),
        rows=len(batch.input_ids),
        output=output,
        source=beside,
        bf16=bf16,
        environment=Environment.model_validate(environment("cpu", {})),
    )
    return Result(dump(result))


def opened(source: str | Path) -> tuple[Checkpoint, Layout]:
    """Return a checkpoint and its layout, of which stock code builds the very same model."""
    checkpoint = open_checkpoint(source)
    return checkpoint, agreed_layout(checkpoint)


def alike(one: Layout, other: Layout) -> bool:
    """Return whether two layouts are of the same model, up to a head of its own."""
    if one.family.name != other.family.name or one.stock != other.stock:
        return False
    shapes = ({name: tensor.shape for name, tensor in layout.tensors.items()} for layout in (one, other))
    first, second = shapes
    return all(second.get(name, shape) == shape for name, shape in first.items())


def expected(runtime: Runtime, folder: Path, dtype: torch.dtype, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return what a runtime should give of the checkpoint in a folder, from stock code with every parameter in
    ``dtype``, and the 0/1 mask of the positions that count."""
    mask = batch.attention_mask if batch.decoder_attention_mask is None else batch.decoder_attention_mask
    values = in_torch(folder, dtype, batch)
    if values.dim() == 2:  # one output for a row
        mask = torch.ones(len(values), dtype=mask.dtype)
    return (values if runtime.expected is None else runtime.expected(values, batch, load_config(folder))), mask


def compared(name: str, values: Tensor, reference: tuple[Tensor, Tensor]) -> ComparisonEntry:
    """Return how far values are from reference values, at the positions of its mask."""
    wanted, mask = reference
    there, wanted = values[mask.bool()].double(), wanted[mask.bool()].double()
    distance = (there - wanted).abs()
    return ComparisonEntry(
        path=name,
        elements=there.numel(),
        nonfinite=int((~there.isfinite()).sum()),
        zeros=int((there == 0).sum()),
        error=float(distance.square().sum() / wanted.square().sum()),
        largest=float(distance.max() / wanted.abs().max()),
    )


def verdict(output: ComparisonEntry, bf16: ComparisonEntry, *, native: bool) -> Literal["safe", "unsafe"] | None:
    """Return the verdict on an output: None where it is right and nothing is shown by that."""
    if output.nonfinite or not output.error <= bf16.error:
        return "unsafe"
    return "safe" if native else None
