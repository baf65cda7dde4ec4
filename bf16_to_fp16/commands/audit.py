"""``audit``: a checkpoint run in its regimes, every site measured, and its worst input searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..auditing.any_model import audit_any, batches_of, open_any
from ..auditing.regimes import ATTENTIONS, REGIMES, RegimeResult, audit_folder, check_names, verdict
from ..bounds.arithmetic import Arithmetic
from ..bounds.certificate import check_bounded
from ..checkpoint.folder import is_converted
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..conversion.measuring import attacked, bounded
from ..conversion.options import shown_in_a_command
from ..conversion.planning import checkpoint_batches, say_what_is_outside
from ..devices import Device
from ..environment import SCHEMA
from ..errors import UserError
from ..families.known import is_known, padding_entry
from ..families.layout import Layout
from ..progress import Progress
from ..quiet import quiet
from ..report.build import speaking_of, tiers_of
from ..report.remedies import NO_FAMILY, going_on_from, over_limits, overflowing, unsafe_sites
from ..report.schema import AttackEntry, CertificateEntry, Environment, Inputs, Report, Source, dump, regimes_of
from ..run.agreement import agreed_layout
from ..run.batch import Batch, describe_batches
from ..run.stock import attentions_of

BOUNDED_FOR = "half"
"""The target that an audit bounds a checkpoint for; of the stricter ones it says whether they hold."""


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
    sweep: bool = False,
    device: str | torch.device = "auto",
    config: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run ``source`` (folder, file of weights or Hub id) in ``regimes`` and return the report: verdict, regimes with
    every site, environment; of a converted folder, certificate and tiers as well.

    Its many parameters are the command's options, as keywords. data: text to run on besides the built-in probe.
    train_mode: with dropout and the backward pass under a loss scale. attention: implementations, of ``ATTENTIONS`` and
    "scaled". attack_steps: gradient steps of a search for every site's worst input, reported beside the certificate's
    bounds. sweep: have the probe run every id of the vocabulary. device: auto, cpu, cuda, cuda:N or mps. config: the
    config.json of one file of weights, else inferred. Raises ``UserError`` for what cannot be used.
    """
    progress = progress or Progress(quiet=True)
    if attack_steps is not None and attack_steps < 1:
        raise UserError(f"{attack_steps} attack steps search nothing; give 1 or more")
    check_names(regimes, attention)
    on = Device(device, progress)
    checkpoint = open_checkpoint(source, subfolder, config=None if config is None else Path(config))
    for note in checkpoint.notes:
        progress.say(note)
    asked = Asked(tuple(r for r in REGIMES if r in regimes), data, train_mode, tuple(attention), seed, sweep)
    if not is_known(checkpoint.config):
        if attack_steps is not None:
            raise UserError(
                f"{checkpoint.name}: the attack needs bounds, and {checkpoint.config.get('model_type')} is of no family"
                " that has them; leave --attack out"
            )
        return dump(audited_without_family(checkpoint, asked, on, progress))
    layout = agreed_layout(checkpoint)
    say_what_is_outside(checkpoint, layout, progress)
    asked = replace(asked, attention=attentions_of(layout.stock.names[0], asked.attention, progress))
    converted = is_converted(checkpoint.folder)
    if converted or attack_steps is not None:
        check_bounded(layout)  # before anything is run
    inputs = checkpoint_batches(checkpoint, layout, data, seed, sweep=sweep, progress=progress)
    with progress.step(f"Auditing {', '.join(regimes)}") as advance:
        results = on.run(
            "audit",
            lambda place: audit_folder(
                checkpoint.folder, inputs=inputs, attention=asked.attention, device=place, advance=advance, **asked.how
            ),
        )
    observed = observation(checkpoint, asked, results, inputs, generates=layout.stock.is_language_model)
    proven: dict[str, Any] = {}
    if converted or attack_steps is not None:
        proven = proof(checkpoint, layout, results, attack_steps, seed, converted, on, progress)
    found = overflowing(proven["attack"], converted=converted) if "attack" in proven else []
    safe = not found and verdict(results) == "safe"
    report = Report(
        schema=SCHEMA,
        verdict="safe" if safe else "unsafe",
        proof="certified" if proven and proven["certificate"].holds else "observed",
        family=layout.family.name,
        target=BOUNDED_FOR if proven else None,
        padding=padding_entry(layout.config),
        **observed,
        unsafe=[*unsafe_sites(observed["regimes"], converted=converted), *found],
        next="" if safe else going_on_from(shown_in_a_command(source), observed["regimes"], converted, subfolder),
        **proven,
        environment=Environment.model_validate(on.environment()),
    )
    return dump(speaking_of(report, layout))


@dataclass(frozen=True)
class Asked:
    """What an audit is to run: the command's options of these names."""

    regimes: tuple[str, ...]
    data: str | None
    train_mode: bool
    attention: tuple[str, ...]
    seed: int
    sweep: bool

    @property
    def how(self) -> dict[str, Any]:
        """What a run of any model takes of them."""
        return {"regimes": self.regimes, "train_mode": self.train_mode, "seed": self.seed}


def observation(
    checkpoint: Checkpoint,
    asked: Asked,
    results: Mapping[str, RegimeResult],
    inputs: Sequence[Batch],
    *,
    generates: bool,
) -> dict[str, Any]:
    """Return what every audit reports: what was run, on what, and what it showed; generates: whether the class can."""
    described = describe_batches(inputs, seed=asked.seed, data=asked.data, generates=generates)
    return {
        "source": Source.of(checkpoint),
        "train_mode": asked.train_mode,
        "attention": list(asked.attention),
        "inputs": Inputs.model_validate(described),
        "regimes": regimes_of(results),
    }


def audited_without_family(checkpoint: Checkpoint, asked: Asked, on: Device, progress: Progress) -> Report:
    """Return the report of a checkpoint of no known family: what its regimes show, and no certificate.

    Raises ``UserError`` as ``audit`` does.
    """
    model = open_any(checkpoint.folder, asked.attention, progress)
    inputs = batches_of(model, asked.data, asked.seed, sweep=asked.sweep)
    with progress.step(f"Auditing {', '.join(asked.regimes)}") as advance:
        results = on.run(
            "audit",
            lambda place: audit_any(model, inputs, device=place, advance=advance, **asked.how),
        )
    asked = replace(asked, attention=model.attention)
    observed = observation(checkpoint, asked, results, inputs, generates=model.generates)
    said = verdict(results)
    return Report(
        schema=SCHEMA,
        verdict=said,
        proof="observed",
        family=model.name,
        **observed,
        unsafe=unsafe_sites(observed["regimes"], convertible=False),
        next="" if said == "safe" else NO_FAMILY,
        environment=Environment.model_validate(on.environment()),
    )


def proof(
    checkpoint: Checkpoint,
    layout: Layout,
    results: Mapping[str, RegimeResult],
    attack_steps: int | None,
    seed: int,
    converted: bool,
    device: Device,
    progress: Progress,
) -> dict[str, Any]:
    """Return what an audit reports beside its regimes: ``certificate`` and ``uncertified``, with ``attack_steps`` the
    ``attack``, and of a ``converted`` folder ``tiers``."""
    seen, proven, broken = dict[str, float](), dict[str, Any](), False
    certificate, tiers = bounded(checkpoint, layout, BOUNDED_FOR, Arithmetic(), device, progress, tiers=converted)
    if attack_steps is not None:
        adversary = attacked(checkpoint.folder, layout, certificate, attack_steps, seed, device, progress)
        seen = dict(adversary.worst)
        proven["attack"] = AttackEntry.model_validate(adversary.to_json())
        broken = adversary.worst_headroom_bits < 0
    for site in results["half"].sites if "half" in results else ():
        seen[site.name] = max(seen.get(site.name, 0.0), site.amax)
    if converted:
        proven["tiers"] = tiers_of(layout, tiers, {} if broken else results)
    proven["certificate"] = CertificateEntry.model_validate(certificate.to_json(seen))
    proven["uncertified"] = over_limits(proven["certificate"], converted=converted)
    return proven
