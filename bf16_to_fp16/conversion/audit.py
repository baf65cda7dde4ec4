"""The command ``audit``: run a checkpoint in fp16, measure every operation's output, and search for the worst input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..bounds.activations import check_bounded
from ..bounds.arithmetic import Arithmetic
from ..bounds.tiers import bounded
from ..checkpoint.contents import is_converted
from ..checkpoint.reader import Checkpoint
from ..devices import Device
from ..environment import SCHEMA
from ..errors import UserError
from ..families.known import is_known, padding_entry
from ..families.layout import Layout
from ..families.older_versions import differences
from ..measuring.any_model import AnyModel
from ..measuring.attack import attacked
from ..measuring.batch import Batch, describe_batches
from ..measuring.probe import checkpoint_batches
from ..measuring.regime_results import RegimeResult, verdict
from ..measuring.regimes import ATTENTIONS, REGIMES, audit_folder, check_names
from ..measuring.stock import attentions_of
from ..progress import Progress, progress_of
from ..quiet import quiet
from ..report.observed_tiers import largest_seen, tiers_of
from ..report.remedies import NO_FAMILY, next_command, over_limits, overflowing, unsafe_sites
from ..report.schema import Environment, Inputs, Report, Source
from ..results import dump
from .opening import layout_with_notes, opened_with_notes
from .options import check_data

BOUNDED_FOR = "half"  # the certificate's target; of stricter tiers only whether they hold is reported


@dataclass(frozen=True)
class Subject:
    """A model to audit. ``run``: returns each regime's results. ``converted``: whether ``convert`` wrote the model."""

    family: str
    attention: Sequence[str]
    inputs: list[Batch]
    run: Callable[..., Mapping[str, RegimeResult]]
    layout: Layout | None = None  # None for a model of no known family, which has no bounds
    converted: bool = False
    known: Mapping[str, Any] = field(default_factory=dict)  # the entries of the report that need no run


def subject_of(
    checkpoint: Checkpoint, attention: Sequence[str], attacks: bool, progress: Progress, data: str | None, seed: int
) -> Subject:
    if not is_known(checkpoint.config):
        if attacks:
            raise UserError(
                f"{checkpoint.name}: the attack needs bounds, and model_type {checkpoint.config.get('model_type')} has"
                " none; leave out --attack"
            )
        model = AnyModel.open(checkpoint.folder, attention, progress)
        inputs = model.batches(data, seed)
        return Subject(model.name, model.attention, inputs, partial(model.audit, inputs))
    layout = layout_with_notes(checkpoint, progress)
    attention = attentions_of(layout.stock.names[0], attention, progress)
    converted = is_converted(checkpoint.folder)
    known: dict[str, Any] = {"target": None, "padding": padding_entry(layout.config)}
    if converted or attacks:
        check_bounded(layout, checkpoint.source)  # before anything is run
        known |= {"target": BOUNDED_FOR, "older": differences(layout, checkpoint.config) if converted else []}
    if layout.only_class is not None:
        known["model_class"] = layout.only_class
    inputs = checkpoint_batches(checkpoint, layout, data, seed)
    run = partial(audit_folder, checkpoint.folder, inputs=inputs, attention=attention)
    return Subject(layout.family.name, attention, inputs, run, layout, converted, known)


@quiet()
def audit(
    source: str | Path,
    *,
    regimes: Sequence[str] = REGIMES,
    data: str | None = None,
    train_mode: bool = False,
    attention: Sequence[str] = ATTENTIONS,
    attack_steps: int | None = None,
    subfolder: str | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Run ``source`` (a folder, a file of weights or a Hub id) in fp16 and return the report.

    regimes: the ways to run: ``stock`` (loaded in fp16), ``amp`` (fp32 weights under autocast) and ``half`` (every
    parameter in fp16). data: text to run besides the built-in probe. train_mode: run with dropout, and a backward pass
    under a loss scale. attention: the implementations to run. attack_steps: the gradient steps of a search for each
    site's worst input. seed: the seed of the probe. device: auto, cpu, cuda, cuda:N or mps. Raises UserError for
    unusable input."""
    # As many parameters as the command has options.
    progress = progress_of(progress)
    if attack_steps is not None and attack_steps < 1:
        raise UserError(f"{attack_steps} attack steps search nothing; give 1 or more")
    check_names(regimes, attention)
    check_data(data)
    on = Device(device, progress)
    checkpoint = opened_with_notes(source, subfolder, progress, proof=False)
    regimes = tuple(regime for regime in REGIMES if regime in regimes)
    attacks = attack_steps is not None
    subject = subject_of(checkpoint, tuple(attention), attacks, progress, data, seed)
    family, layout, converted = subject.family, subject.layout, subject.converted
    how: dict[str, Any] = {"regimes": regimes, "train_mode": train_mode, "seed": seed}
    with progress.step(f"Auditing {', '.join(regimes)}") as advance:
        results = on.run("audit", lambda place: subject.run(device=place, advance=advance, **how))
    proven = dict[str, Any]()
    if layout is not None and (converted or attacks):
        proven = proof_entries(checkpoint, layout, results, attack_steps, seed, converted, on, progress)
    attacked_sites = overflowing(proven["attack"], converted=converted) if attacks else []
    safe = not attacked_sites and verdict(results) == "safe"
    then = next_command(str(source), results, converted, subfolder, family=family)
    report = Report(
        schema=SCHEMA,
        verdict="safe" if safe else "unsafe",
        proof="certified" if proven and proven["certificate"].holds else "observed",
        family=family,
        source=Source.of(checkpoint),
        train_mode=train_mode,
        attention=list(subject.attention),
        inputs=Inputs.model_validate(describe_batches(subject.inputs, seed=seed, data=data)),
        regimes=dict(results),
        unsafe=[*unsafe_sites(results, family, converted=converted, convertible=layout is not None), *attacked_sites],
        next="" if safe else NO_FAMILY if layout is None else then,
        environment=Environment.model_validate(on.environment()),
        **subject.known,
        **proven,
    )
    return dump(report)


def proof_entries(
    checkpoint: Checkpoint,
    layout: Layout,
    results: Mapping[str, RegimeResult],
    attack_steps: int | None,
    seed: int,
    converted: bool,
    device: Device,
    progress: Progress,
) -> dict[str, Any]:
    """Bound every site and, given ``attack_steps``, search for its worst input; return the report's entries on both."""
    proven, adversary = dict[str, Any](), None
    certificate, tiers = bounded(checkpoint, layout, BOUNDED_FOR, Arithmetic(), device, progress, tiers=converted)
    if attack_steps is not None:
        adversary = attacked(checkpoint.folder, layout, attack_steps, seed, device, progress)
        proven["attack"] = adversary
    broken = adversary is not None and adversary.worst_headroom_bits < 0
    if converted:
        proven["tiers"] = tiers_of(layout, tiers, {} if broken else results)
    proven["certificate"] = certificate.entry(largest_seen(results, adversary))
    proven["uncertified"] = over_limits(proven["certificate"], converted=converted)
    return proven
