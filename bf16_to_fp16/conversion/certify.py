"""The command ``certify``: bound every site of a checkpoint from its weights, and report it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bounds.arithmetic import MAX_LENGTH, Arithmetic
from ..bounds.tiers import bounded
from ..checkpoint.contents import is_converted
from ..devices import Device
from ..environment import SCHEMA
from ..families.known import padding_entry
from ..progress import Progress, progress_of
from ..quiet import quiet
from ..report.judged_tiers import judged_tiers
from ..report.remedies import next_command, over_limits
from ..report.schema import Environment, Report, Source
from ..results import dump
from .opening import layout_with_notes, opened_with_notes

if TYPE_CHECKING:
    import torch


@quiet()
def certify(
    source: str | Path,
    *,
    max_length: int = MAX_LENGTH,
    target: str = "half",
    subfolder: str | None = None,
    device: str | torch.device = "auto",
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Bound every site of ``source`` (a folder, a file of weights or a Hub id) for any input, and return the report.

    The bounds follow from the weights in fp16; nothing is run. max_length: the most positions for which they hold.
    target: ``half``, ``norm-safe`` (norms square the stream in fp16), ``fp16-accumulate`` (every sum in fp16) or
    ``train`` (dropout, and the derivative of the cube in tanh-GELU). device: where large matrix products are computed.
    Raises UserError for unusable input."""
    progress = progress_of(progress)
    arithmetic = Arithmetic(max_length)  # refuses an impossible length
    on = Device(device, progress)
    checkpoint = opened_with_notes(source, subfolder, progress)
    layout = layout_with_notes(checkpoint, progress, max_length)
    certificate, tiers = bounded(checkpoint, layout, target, arithmetic, on, progress)
    described, converted = certificate.entry(), is_converted(checkpoint.folder)
    then = next_command(str(source), {}, converted, subfolder, target)
    unproven = over_limits(described, converted=converted)
    alone: dict[str, Any] = {} if layout.only_class is None else {"model_class": layout.only_class}
    report = Report(
        schema=SCHEMA,
        verdict="safe" if certificate.holds else "unsafe",
        proof="certified" if certificate.holds else "observed",
        family=layout.family.name,
        source=Source.of(checkpoint).model_copy(update={"dropped": layout.of_other_classes}),
        target=target,
        padding=padding_entry(layout.config),
        tiers=judged_tiers(tiers),
        certificate=described,
        uncertified=unproven,
        next="" if certificate.holds else then,
        environment=Environment.model_validate(on.environment()),
        **alone,
    )
    return dump(report)
