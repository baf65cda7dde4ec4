"""Build the report of a conversion once. Terminal, page and card show this object, so they cannot disagree."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..checkpoint.contents import INDEX, read_config
from ..checkpoint.files import sha256_of
from ..checkpoint.formats import bytes_of
from ..checkpoint.reader import Checkpoint
from ..checkpoint.recorded import CONVERTED_KEY
from ..checkpoint.writer import Written
from ..environment import SCHEMA
from ..families.configs import changes
from ..families.known import padding_entry
from ..families.layout import Layout
from ..families.older_versions import differences
from ..rescaling.apply import edited_config
from ..rescaling.centred import centred_tensors
from ..rescaling.exponents import joined
from ..rescaling.plan import Plan, describe_plan, mark_of
from ..results import Fidelity
from . import remedies, schema
from .card import front_matter
from .judgement import conclude, reasons_unsafe, uncertified_sites, unmet
from .observed_tiers import largest_seen, tiers_of
from .steps import Decided, Measured, Rewritten


def build(
    checkpoint: Checkpoint,
    decided: Decided,
    rewritten: Rewritten,
    measured: Measured,
    *,
    command: str,
    inputs: Mapping[str, Any] | None = None,
    others: Sequence[Mapping[str, Any]] = (),
    max_kl: float | None = None,
) -> schema.Report:
    """Return the report of a conversion. checkpoint: the source. command: the command line that repeats the conversion.
    inputs: the description of the inputs that were run, from ``describe_batches``. others: an entry for each output
    file that holds no weights. max_kl: the divergence from the source that the user accepts."""
    layout, planned, written = decided.layout, decided.planned, rewritten.written
    plan, certificate, regimes, attack = measured.plan, measured.certificate, measured.regimes, measured.attack
    broken = remedies.overflowing(attack) if attack is not None else []
    more: dict[str, Any] = {"inexact": list(measured.edits)} if measured.edits else {}
    if (soft := measured.soft) is not None:
        more |= {"exceptions": soft.exceptions, "searched": soft.searched}
    more |= {} if max_kl is None else {"max_kl": max_kl}
    more |= {} if decided.observed is None else {"signals": decided.signals}
    # Clean runs prove nothing where a search found an overflow.
    tiers = tiers_of(layout, measured.tiers, {} if broken else regimes)
    report = schema.Report(
        schema=SCHEMA,
        proof="certified" if certificate.holds else "observed",
        family=layout.family.name,
        target=decided.target,
        tiers=tiers,
        source=source_of(checkpoint, layout, plan, rewritten),
        output=schema.Output(files=[schema.FileEntry(**entry) for entry in (*map(asdict, written.files), *others)]),
        padding=padding_entry(layout.config),
        older=differences(layout, edited_config(layout, plan)),
        inputs=None if inputs is None else schema.Inputs.model_validate(inputs),
        regimes=dict(regimes),
        certificate=certificate.entry(largest_seen(regimes, attack)),
        uncertified=uncertified_sites(layout, certificate, planned),
        attack=attack,
        fidelity=measured.fidelity,
        weights=weight_counts(layout, plan, written),
        outputs=dict(measured.outputs),
        plan=Plan.model_validate(describe_plan(plan)),
        for_proof={} if planned is None or decided.observed is None else dict(planned.for_proof),
        command=command,
        environment=schema.Environment.model_validate(measured.environment),
        **more,
    )
    over = reasons_unsafe(report, planned) + unmet(decided.target, tiers)
    verdict = "unsafe" if broken else conclude(regimes, over, proven=certificate.holds)
    unsafe = [*over, *remedies.unsafe_sites(regimes, layout.family.name, converted=True), *broken]
    return report.model_copy(update={"verdict": verdict, "unsafe": unsafe})


def descended(report: schema.Report, lineage: schema.Lineage, kept: Fidelity | None) -> schema.Report:
    given = {name: getattr(lineage.source, name) for name in lineage.source.model_fields_set}
    assert report.plan is not None  # of a conversion
    after = {"after": mark_of(report.plan)} if report.plan.moves or lineage.finetune.start is not None else {}
    mark = lineage.source.config_changes.get(CONVERTED_KEY, {}) | after
    given["config_changes"] = report.source.config_changes | ({CONVERTED_KEY: mark} if mark else {})
    source = report.source.model_copy(update=given)
    run = lineage.finetune if kept is None else lineage.finetune.model_copy(update={"fidelity": kept})
    outputs = {
        name: entry.model_copy(update={"factor_log2": joined(entry.factor_log2, run.start_outputs.get(name, 0))})
        for name, entry in report.outputs.items()
    }
    return report.model_copy(update={"source": source, "finetune": run, "outputs": outputs})


def source_of(checkpoint: Checkpoint, layout: Layout, plan: Plan, rewritten: Rewritten) -> schema.Source:
    dtypes = {t.name: checkpoint.tensors[t.source].dtype for t in layout.tensors.values() if t.source is not None}
    main = max(sorted(set(dtypes.values())), key=list(dtypes.values()).count)
    config = checkpoint.config if checkpoint.own_folder is None else read_config(checkpoint.own_folder)
    created = made_of(layout)
    if layout.tied is False and layout.family.head in created:
        created += [name for name in layout.family.copies if name in layout.tensors]
    replaced: dict[str, Any] = {"replaced": tensors} if (tensors := replaced_by(layout, plan, checkpoint)) else {}
    return schema.Source(
        **schema.Source.place_of(checkpoint),
        sha256=rewritten.written.source_sha256,
        other_sha256=other_sha256(checkpoint, rewritten.carried),
        dtype=main,
        dtypes={name: dtype for name, dtype in dtypes.items() if dtype != main},
        made=sorted(set(created)),
        dropped=dict(layout.dropped),
        config_changes=changes(config, edited_config(layout, plan)),
        carried_over=rewritten.carried,
        left_out=rewritten.left_out,
        card=front_matter(checkpoint.home),
        **replaced,
    )


def other_sha256(checkpoint: Checkpoint, carried: Sequence[str] = ()) -> dict[str, str]:
    names = {"config.json", INDEX, *carried}
    hashes = {}
    for name in sorted(names):
        path = checkpoint.home / name
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in inside:
            if file.is_file():
                hashes[file.relative_to(checkpoint.home).as_posix()] = sha256_of(file)
    return hashes


def replaced_by(layout: Layout, plan: Plan, checkpoint: Checkpoint) -> dict[str, schema.Original]:
    originals = {}
    for name in centred_tensors(layout, plan.centred_keys):
        values = bytes_of(checkpoint.read(str(layout.tensors[name].source)))
        digest = hashlib.sha256(values).hexdigest()
        originals[name] = schema.Original(values=base64.b64encode(values).decode(), sha256=digest)
    return originals


def made_of(layout: Layout) -> list[str]:
    return [t.name for t in layout.tensors.values() if t.source not in (t.name, *layout.family.copies)]


def weight_counts(layout: Layout, plan: Plan, written: Written) -> schema.WeightsEntry:
    left_out = {*made_of(layout), *centred_tensors(layout, plan.centred_keys)}
    stats = [s for name, s in written.stats.items() if name not in left_out]
    elements, nonzero = sum(s.elements for s in stats), sum(s.nonzero for s in stats)
    return schema.WeightsEntry(
        elements=elements,
        lossless_fraction=sum(s.lossless for s in stats) / max(1, elements),
        normal_fraction=sum(s.normal for s in stats) / max(1, nonzero),
        flushed_to_zero=sum(s.flushed_to_zero for s in stats),
        nonfinite=sum(s.nonfinite for s in stats),
        amax=max((s.amax for s in written.stats.values()), default=0.0),
    )
