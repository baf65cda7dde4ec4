"""Build the report of a conversion once; terminal, page and card show this object, so they cannot disagree."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from ..bounds.findings import Certificate, SourceBounds
from ..bounds.kinds import SiteKind, traits
from ..checkpoint.contents import INDEX, read_config
from ..checkpoint.formats import bytes_of
from ..checkpoint.reader import Checkpoint
from ..checkpoint.recorded import CONVERTED_KEY
from ..checkpoint.writer import Written
from ..environment import SCHEMA
from ..families.configs import changes
from ..families.known import padding_entry
from ..families.layout import Layout
from ..families.older import differences
from ..families.places import places
from ..families.signals import RESIDUAL, ObservationPoint, Side
from ..families.spread import carrying, spread_out
from ..families.walk import walk
from ..families.wiring import Attention, FeedForward
from ..measuring.fidelity import Outputs, Reference
from ..measuring.regimes import RegimeResult, verdict
from ..measuring.soft_side import LEAST, TIMES, SoftSide
from ..numerics import NOISE
from ..ranges import ModuleRange
from ..rescaling.apply import edited_config
from ..rescaling.centred import centred_tensors
from ..rescaling.edits import MOST_FOR_A_PROOF, RUINED, without_edits
from ..rescaling.exponents import exponents_of
from ..rescaling.outputs import joined, on_request
from ..rescaling.plan import Plan, describe_plan, mark_of
from ..rescaling.planner import Fallback, Planned, Violation
from ..results import AttackEntry, ExceptionEntry, Fidelity, InexactEntry, OutputEntry
from ..targets import SQUARING, TIERS, WHERE
from . import remedies, schema
from .card import front_matter
from .regimes import largest_seen, tiers_of

FP16_RANGE_BITS = 40.0  # bits from fp16's last subnormal to its limit, counted as lost where a model gives inf or NaN


@dataclass(frozen=True)
class Decided:
    """The plan for one layout (head tied or separated) and target, and its grounds. planned, bounds: None for a
    replayed plan. ranges: of the edited source where there are edits; None where nothing ran. ranges_before: of the
    source before edits. predicted: the divergence of each edit, by signal. notes: for the user, what was given up."""

    layout: Layout
    plan: Plan
    target: str
    planned: Planned | None = None
    ranges: Mapping[str, ModuleRange] | None = None
    reference: Reference | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    ranges_before: Mapping[str, ModuleRange] | None = None
    notes: tuple[str, ...] = ()
    bounds: SourceBounds | None = None

    @property
    def of_source(self) -> Mapping[str, ModuleRange] | None:
        return self.ranges if self.ranges_before is None else self.ranges_before

    @property
    def signals(self) -> list[schema.SignalEntry]:
        return [] if self.of_source is None else signals_of(self.layout, self.plan, self.of_source, self.ranges)


@dataclass(frozen=True)
class Rewritten:
    written: Written
    carried: list[str]
    left_out: list[str]


@dataclass(frozen=True)
class Measured:
    """The bounds and runs of the written files. plan: with the drift's predicted and measured figures. tiers: whether
    each tier's certificate holds. half: outputs of the written model in fp16. soft: inputs that ``edits`` harm.
    outputs: each output's error against the source."""

    certificate: Certificate
    plan: Plan
    tiers: Mapping[str, bool] = field(default_factory=dict)
    regimes: Mapping[str, RegimeResult] = field(default_factory=dict)
    fidelity: Fidelity | None = None
    half: Outputs = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    attack: AttackEntry | None = None
    edits: Sequence[InexactEntry] = ()
    soft: SoftSide | None = None
    outputs: Mapping[str, OutputEntry] = field(default_factory=dict)


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
    """Return the report of a conversion. command: repeats it. inputs: from ``describe_batches``. others: records
    of the output's files besides weights. max_kl: the accepted distance from the source, if over bf16's."""
    layout, planned, ranges, written = decided.layout, decided.planned, decided.of_source, rewritten.written
    plan, certificate, regimes, fidelity = measured.plan, measured.certificate, measured.regimes, measured.fidelity
    over, close = passed_limits(planned, regimes, plan, certificate)
    counts, source = weight_counts(layout, plan, written), source_of(checkpoint, layout, plan, rewritten)
    if fidelity is not None:
        exact = is_exact(plan, counts, source, measured.edits)
        how: dict[str, Any] = {"max_kl": max_kl, "edits": cost_of(measured.edits), "proven": certificate.holds}
        how["eps_held"] = plan.eps_held
        over += too_inexact(fidelity, exact=exact, ran=bool(regimes), **how)
    if max_kl is None:  # with an accepted distance edits may cost more
        over += other_outputs(measured.outputs, drifts=bool(plan.drift or measured.edits), ran=bool(regimes))
    attack = measured.attack
    broken = remedies.overflowing(attack) if attack is not None else []
    more: dict[str, Any] = {"inexact": list(measured.edits)} if measured.edits else {}
    if (soft := measured.soft) is not None:
        over += harmed(soft.found, max_kl)
        more |= {"exceptions": soft.found, "searched": soft.searched}
    more |= {} if max_kl is None else {"max_kl": max_kl}
    # Clean runs prove nothing where a search found an overflow.
    tiers = tiers_of(layout, measured.tiers, {} if broken else regimes)
    over += unmet(decided.target, tiers)
    return schema.Report(
        schema=SCHEMA,
        verdict="unsafe" if broken else conclude(regimes, over, certificate),
        proof="certified" if certificate.holds else "observed",
        family=layout.family.name,
        target=decided.target,
        tiers=tiers,
        source=source,
        output=schema.Output(files=[schema.FileEntry(**entry) for entry in (*map(asdict, written.files), *others)]),
        padding=padding_entry(layout.config),
        older=differences(layout, edited_config(layout, plan)),
        inputs=None if inputs is None else schema.Inputs.model_validate(inputs),
        regimes=dict(regimes),
        certificate=certificate.entry(largest_seen(regimes, attack)),
        uncertified=uncertified_sites(layout, certificate, planned),
        attack=attack,
        fidelity=fidelity,
        weights=counts,
        outputs=dict(measured.outputs),
        plan=Plan.model_validate(describe_plan(plan)),
        moved=moved_by(layout, plan),
        for_proof={} if planned is None or ranges is None else dict(planned.for_proof),
        signals=decided.signals,
        unsafe=[*over, *remedies.unsafe_sites(regimes, layout.family.name, converted=True), *broken],
        close=close,
        command=command,
        environment=schema.Environment.model_validate(measured.environment),
        **more,
    )


def unmet(target: str, tiers: Mapping[str, schema.TierEntry]) -> list[schema.UnsafeEntry]:
    name = next((tier.name for tier in TIERS if tier.target == target), "")
    if target not in SQUARING or tiers[name].holds or tiers[name].reason == remedies.SQUARES_UNSEEN:
        return []
    reason = f"not known to hold {WHERE[target]}: {tiers[name].reason}"
    return [schema.UnsafeEntry(signal=name, kind="goal", excess_bits=0.0, reason=reason, remedy=remedies.IN_PYTORCH)]


def moved_by(layout: Layout, plan: Plan) -> schema.MovedEntry:
    linears = {
        path
        for each in layout.topology
        for path in (
            (each.query, each.key, each.value, each.output)
            if isinstance(each, Attention)
            else (each.gate, each.linear, each.output)
            if isinstance(each, FeedForward)
            else ()
        )
    }
    found: dict[tuple[bool, str], set[int]] = {}
    for tensor in layout.tensors.values():
        exponents, path = exponents_of(tensor, plan), tensor.name.rpartition(".")[0]
        if exponents.rows is None and exponents.columns is None:
            found.setdefault((path in linears, path.rpartition(".")[2]), set()).add(exponents.scalar)
    moved = {key: each.pop() for key, each in found.items() if len(each) == 1 and each != {0}}
    return schema.MovedEntry(
        linears={name: exponent for (linear, name), exponent in moved.items() if linear},
        others={name: exponent for (linear, name), exponent in moved.items() if not linear},
    )


def other_outputs(outputs: Mapping[str, OutputEntry], *, drifts: bool, ran: bool) -> list[schema.UnsafeEntry]:
    """Return an entry for each output that is not the source's times its factor. Inner states, which the class returns
    on request, do not count where the plan drifts or edits."""
    remedy = remedies.A_BUG if not drifts else remedies.INEXACT if ran else remedies.INEXACT_BY_BOUNDS
    return [
        schema.UnsafeEntry(signal=name, kind="inexact", reason=remedies.OTHER_OUTPUT, remedy=remedy)
        for name, entry in outputs.items()
        if not entry.fits(drifts=drifts) and not (drifts and on_request(name, outputs))
    ]


def harmed(exceptions: Sequence[ExceptionEntry], max_kl: float | None) -> list[schema.UnsafeEntry]:
    """Return an entry for the worst single id with which edits harm every text."""
    worst = next((each for each in exceptions if len(each.ids) == 1 and each.kl > (max_kl or 0.0)), None)
    return [] if worst is None else [remedies.harmed(worst, bits_between(worst.kl, max(TIMES * worst.kl_bf16, LEAST)))]


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


def listing(report: schema.Report, records: Sequence[Mapping[str, Any]]) -> schema.Report:
    files = [*report.output.files, *(schema.FileEntry(**record) for record in records)]
    return report.model_copy(update={"output": schema.Output(files=files)})


def passed_limits(
    planned: Planned | None, regimes: Mapping[str, RegimeResult], plan: Plan, certificate: Certificate
) -> tuple[list[schema.UnsafeEntry], list[schema.UnsafeEntry]]:
    """Return the limits that the plan could not hold: those passed, and those held by less than the margin. Without
    regimes the certificate decides which."""
    over: list[schema.UnsafeEntry] = []
    close: list[schema.UnsafeEntry] = []
    for entry in map(passed_limit, planned.violations if planned else ()):
        if entry.excess_bits > (plan.margin_bits or 0.0) if regimes else not certificate.holds:
            over.append(entry)
        else:
            close.append(entry.model_copy(update={"reason": remedies.THIN}))
    return over, close


def conclude(
    regimes: Mapping[str, RegimeResult], over: Sequence[schema.UnsafeEntry], certificate: Certificate
) -> Literal["safe", "unsafe"]:
    if over or not regimes:
        return "safe" if certificate.holds and not over else "unsafe"
    return verdict(regimes)


def uncertified_sites(layout: Layout, certificate: Certificate, planned: Planned | None) -> list[schema.UnprovenEntry]:
    fallbacks = {f.signal: f for f in planned.fallbacks} if planned else {}
    # A site is its module's output.
    points = [(point, signal.name) for signal in layout.signals.values() for point in signal.seen]
    of_module = {point.module: name for point, name in points if point.side == "output"}
    streams = {reader.site: layout.entrances[reader.entrance] for reader in walk(layout)}
    streams |= {f"{norm} (sum of squares)": stream for norm, stream in layout.streams_read.items()}
    rows = []
    for site in sorted(certificate.sites, key=lambda s: s.headroom_bits):
        if site.holds:
            continue
        name = of_module.get(site.name.partition(":")[0], "")
        name = streams.get(site.name, RESIDUAL) if site.kind in (SiteKind.RESIDUAL, SiteKind.SQUARES) else name
        reason, remedy = why_unproven(site.kind, fallbacks.get(name))
        rows.append(remedies.unproven(site, reason, remedy))
    return rows


def is_exact(
    plan: Plan | None,
    weights: schema.WeightsEntry | None,
    source: schema.Source,
    edits: Sequence[InexactEntry] = (),
) -> bool:
    """Return whether no weight was rounded, made, replaced or edited and no eps drifts: the function is equal."""
    if (
        edits
        or plan is None
        or weights is None
        or plan.drift
        or plan.gain_correction
        or plan.centred_keys
        or source.made
    ):
        return False
    return weights.lossless_fraction == 1


def cost_of(edits: Sequence[InexactEntry]) -> float:
    return sum(edit.measured or 0.0 for edit in edits)


def too_inexact(
    fidelity: Fidelity,
    *,
    exact: bool = False,
    ran: bool = True,
    max_kl: float | None = None,
    edits: float = 0.0,
    proven: bool = False,
    eps_held: bool = False,
) -> list[schema.UnsafeEntry]:
    """Return an entry if fp16 is further from the source than bf16 and ``max_kl``, or if an ``exact`` plan's output
    differs in fp32. Where the output is ``proven``, its ``edits`` may cost ``MOST_FOR_A_PROOF`` times bf16's error."""
    bf16, fp32 = fidelity.kl_bf16, fidelity.squared_error_fp32
    fp16 = fidelity.kl_fp16
    if exact and fp32 is not None and fp32 > NOISE:
        return [remedies.inexact(bits_between(fp32, NOISE), finite=True, exact=True, ran=ran)]
    edited = edits > fp16 / 2
    bf16 = min(bf16, RUINED) if bf16 is not None and edited else bf16
    if bf16 is None or not math.isfinite(bf16) or fp16 <= (most := max(bf16, NOISE, max_kl or 0.0)):
        return []
    if edited and proven and fp16 <= bf16 * MOST_FOR_A_PROOF:
        return []
    drifted = eps_held and not edited and (fidelity.kl_fp32 or 0.0) > fp16 / 2
    how: dict[str, Any] = {"finite": math.isfinite(fp16), "ran": ran, "edited": edited, "drifted": drifted}
    return [remedies.inexact(bits_between(fp16, most), **how)]


def bits_between(error: float, other: float) -> float:
    return math.log2(error / other) / 2 if math.isfinite(error) else FP16_RANGE_BITS


def source_of(checkpoint: Checkpoint, layout: Layout, plan: Plan, rewritten: Rewritten) -> schema.Source:
    dtypes = {t.name: checkpoint.tensors[t.source].dtype for t in layout.tensors.values() if t.source is not None}
    main = max(sorted(set(dtypes.values())), key=list(dtypes.values()).count)
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
        config_changes=changes(config_of_source(checkpoint), edited_config(layout, plan)),
        carried_over=rewritten.carried,
        left_out=rewritten.left_out,
        card=front_matter(checkpoint.home),
        **replaced,
    )


def config_of_source(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return checkpoint.config if checkpoint.own_folder is None else read_config(checkpoint.own_folder)


def other_sha256(checkpoint: Checkpoint, carried: Sequence[str] = ()) -> dict[str, str]:
    names = {"config.json", INDEX, *carried}
    hashes = {}
    for name in sorted(names):
        path = checkpoint.home / name
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in inside:
            if file.is_file():
                hashes[file.relative_to(checkpoint.home).as_posix()] = checkpoint.sha256(file)
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


def signals_of(
    layout: Layout, plan: Plan, ranges: Mapping[str, ModuleRange], edited: Mapping[str, ModuleRange] | None = None
) -> list[schema.SignalEntry]:
    """Return the largest value of every observed signal, scores too, in the source and after the plan. edited: ranges
    of the edited source, for centred keys and their scores, which no exponent gives."""
    replaced, exact = centred_tensors(layout, plan.centred_keys), without_edits(layout, plan)
    attentions = [sublayer for sublayer in layout.topology if isinstance(sublayer, Attention)]
    centred = {
        path
        for each in attentions
        if not replaced.keys().isdisjoint((f"{each.key}.bias", each.bias, each.block_bias))
        for path in (each.key, each.at)
        if edited is not None and path in edited
    }
    after_edits = {**ranges, **{path: edited[path] for path in centred if edited is not None}}
    joined = {(p.module, p.side): (signal.name, p) for signal in layout.signals.values() for p in signal.beside}
    rows, place = [], places(layout)

    def exponents(name: str, point: ObservationPoint) -> torch.Tensor:
        own = exact if point.module in centred else plan
        exponent = torch.as_tensor(own.exponent(name), dtype=torch.float64)
        return point.sign * (spread_out(exponent, point.spread) if exponent.dim() else exponent)

    def entry(module: str, side: Side, kind: str, before: float, after: float) -> schema.SignalEntry:
        where = place(module).to_json()
        return schema.SignalEntry(module=module, **where, side=side, kind=kind, before=before, after=after)

    for signal in layout.signals.values():
        for point in signal.seen:
            module = ranges.get(point.module)
            if module is None:
                continue
            amax, edited_amax = (
                (each.input if point.side == "input" else each.output).amax.double()
                for each in (module, after_edits[point.module])
            )
            total = exponents(signal.name, point)
            if (point.module, point.side) in joined:
                total = total + exponents(*joined[point.module, point.side])
            before, after = (carrying(x, point.spread) for x in (amax, edited_amax * 2.0**total))
            rows.append(entry(point.module, point.side, str(signal.kind), float(before.amax()), float(after.amax())))
    for path in (sublayer.at for sublayer in attentions):
        if path in ranges and (seen := ranges[path].scores) is not None:
            own, scores = exact if path in centred else plan, after_edits[path].scores or seen
            moved = torch.as_tensor(own.exponent(f"{path}.scores"), dtype=torch.float64)
            rows.append(entry(path, "output", "scores", seen.largest, scores.largest * 2.0 ** float(moved.amin())))
    return rows


def passed_limit(violation: Violation) -> schema.UnsafeEntry:
    return schema.UnsafeEntry(
        signal=violation.signal,
        kind="limit",
        excess_bits=violation.excess_bits,
        remedy=remedies.PENALTY,
        reason=remedies.PASSED,
    )


def why_unproven(kind: str, fallback: Fallback | None) -> tuple[str, str]:
    if not traits(kind).movable:
        return remedies.UNMOVED, remedies.PENALTY
    if fallback is not None and not fallback.impossible:
        cost = f"predicted squared error {fallback.cost_certified:.1e} instead of {fallback.cost_observed:.1e}"
        return f"{remedies.TOO_COSTLY} ({cost})", remedies.OBSERVED
    return remedies.OVER_AT_EVERY_EXPONENT, remedies.PENALTY
