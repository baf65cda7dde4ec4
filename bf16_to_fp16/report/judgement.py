"""Judge a conversion: list the reasons why it is unsafe and the sites without a proof, and conclude the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from ..bounds.findings import Certificate
from ..bounds.kinds import SiteKind, traits
from ..families.layout import Layout, walk
from ..families.signals import RESIDUAL
from ..measuring.regime_results import verdict
from ..measuring.soft_side import LEAST, TIMES
from ..numerics import NOISE
from ..rescaling.edits import MOST_FOR_A_PROOF, RUINED
from ..rescaling.exponents import on_request
from ..rescaling.plan import Plan
from ..rescaling.planner import Planned
from ..results import Fidelity, InexactEntry, OutputEntry, RegimeEntry
from ..targets import SQUARING, TIERS, WHERE
from . import remedies, schema

FP16_RANGE_BITS = 40.0  # bits from fp16's last subnormal to its limit, counted as lost where a model gives inf or NaN


def reasons_unsafe(report: schema.Report, planned: Planned | None = None) -> list[schema.UnsafeEntry]:
    """Return an entry for each reason why a conversion is unsafe, except for sites that broke in a run. report: the
    report before its verdict is set. planned: the planner's result; None for a plan that the user gave."""
    plan, ran, drifts = report.plan, bool(report.regimes), bool(report.inexact)
    over = list[schema.UnsafeEntry]()
    if plan is not None:
        over += passed_limits(planned, report.regimes, plan, proven=report.proven)
        drifts |= plan.drift is not None
    if report.fidelity is not None:
        over += too_inexact(
            report.fidelity,
            exact=is_exact(plan, report.weights, report.source, report.inexact),
            ran=ran,
            max_kl=report.max_kl,
            edits=sum(edit.measured or 0.0 for edit in report.inexact),
            proven=report.proven,
        )
    if report.max_kl is None:
        over += other_outputs(report.outputs, drifts=drifts, ran=ran)
    most = report.max_kl or 0.0
    worst = next((each for each in report.exceptions if len(each.ids) == 1 and each.kl > most), None)
    if worst is not None:  # a single id with which edits harm every text
        why = f"the edits harm texts that contain {remedies.described(worst)}: {remedies.prices(worst)}"
        over.append(inexact(worst.kl, max(TIMES * worst.kl_bf16, LEAST), why, remedies.ACCEPT))
    return over


def unmet(target: str, tiers: Mapping[str, schema.TierEntry]) -> list[schema.UnsafeEntry]:
    name = next((tier.name for tier in TIERS if tier.target == target), "")
    if target not in SQUARING or tiers[name].holds or tiers[name].reason == remedies.SQUARES_UNSEEN:
        return []
    reason = f"not known to hold {WHERE[target]}: {tiers[name].reason}"
    return [schema.UnsafeEntry(signal=name, kind="goal", excess_bits=0.0, reason=reason, remedy=remedies.IN_PYTORCH)]


def other_outputs(outputs: Mapping[str, OutputEntry], *, drifts: bool, ran: bool) -> list[schema.UnsafeEntry]:
    """Return an entry for each output that differs from the source's after division by its factor, a power of two.
    drifts: whether the plan changes the function; then outputs that the class returns only on request are not judged.
    ran: whether the audit ran the model, which decides the remedy."""
    remedy = remedies.A_BUG if not drifts else remedies.INEXACT if ran else remedies.INEXACT_BY_BOUNDS
    return [
        schema.UnsafeEntry(signal=name, kind="inexact", reason=remedies.OTHER_OUTPUT, remedy=remedy)
        for name, entry in outputs.items()
        if not entry.fits(drifts=drifts) and not (drifts and on_request(name, outputs))
    ]


def passed_limits(
    planned: Planned | None, regimes: Mapping[str, RegimeEntry], plan: Plan, *, proven: bool
) -> list[schema.UnsafeEntry]:
    """Return an entry for each signal (an activation that the plan scales) that stays over its limit. The limit
    is lowered by the margin only if the model was not run. A ``proven`` checkpoint that was not run has no entries."""
    return [
        schema.UnsafeEntry(
            signal=each.signal,
            kind="limit",
            excess_bits=each.excess_bits,
            remedy=remedies.PENALTY,
            reason=remedies.PASSED,
        )
        for each in (planned.violations if planned else ())
        if (each.excess_bits > (plan.margin_bits or 0.0) if regimes else not proven)
    ]


def conclude(
    regimes: Mapping[str, RegimeEntry], over: Sequence[schema.UnsafeEntry], *, proven: bool
) -> Literal["safe", "unsafe"]:
    if over or not regimes:
        return "safe" if proven and not over else "unsafe"
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
        why = remedies.OVER_AT_EVERY_EXPONENT, remedies.PENALTY
        if not traits(site.kind).movable:
            why = remedies.UNMOVED, remedies.PENALTY
        elif name in fallbacks and not fallbacks[name].impossible:
            why = remedies.TOO_COSTLY, remedies.OBSERVED
        rows.append(remedies.unproven(site, *why))
    return rows


def is_exact(
    plan: Plan | None, weights: schema.WeightsEntry | None, source: schema.Source, edits: Sequence[InexactEntry] = ()
) -> bool:
    """Return whether the function is unchanged: no weight is rounded, added, replaced or edited; no norm drifts."""
    if plan is None or weights is None or edits or source.made:
        return False
    return plan.exact and weights.lossless_fraction == 1


def too_inexact(
    fidelity: Fidelity,
    *,
    exact: bool = False,
    ran: bool = True,
    max_kl: float | None = None,
    edits: float = 0.0,
    proven: bool = False,
) -> list[schema.UnsafeEntry]:
    """Return an entry if the converted model is too inexact, else []. The fp16 output may diverge from the source as
    far as the bf16 output does, or by ``max_kl`` if that is more. exact: whether the plan is exact; then the fp32
    output must not differ. ran: whether the audit ran the model, which decides the remedy. edits: the divergence that
    edits cause. proven: whether no input can overflow. If so, and edits cause over half of the divergence, it may reach
    ``MOST_FOR_A_PROOF`` times bf16's."""
    bf16, fp32 = fidelity.kl_bf16, fidelity.squared_error_fp32
    fp16 = fidelity.kl_fp16
    if exact and fp32 is not None and fp32 > NOISE:
        return [inexact(fp32, NOISE, remedies.ANOTHER_FUNCTION, remedies.A_BUG)]
    edited = edits > fp16 / 2
    bf16 = min(bf16, RUINED) if bf16 is not None and edited else bf16
    if bf16 is None or not math.isfinite(bf16) or fp16 <= (most := max(bf16, NOISE, max_kl or 0.0)):
        return []
    if edited and proven and fp16 <= bf16 * MOST_FOR_A_PROOF:
        return []
    why = remedies.TOO_FEW_BITS, remedies.INEXACT if ran else remedies.INEXACT_BY_BOUNDS
    if not math.isfinite(fp16):
        why = remedies.NOT_FINITE, remedies.SOMETHING_INSIDE
    elif edited:
        why = remedies.EDITED, remedies.ACCEPT
    return [inexact(fp16, most, *why)]


def inexact(error: float, most: float, reason: str, remedy: str) -> schema.UnsafeEntry:
    """Return the report's entry for an output whose ``error``, a squared error or KL, exceeds ``most``."""
    bits = math.log2(error / most) / 2 if math.isfinite(error) else FP16_RANGE_BITS
    return schema.UnsafeEntry(signal=remedies.OUTPUT, kind="inexact", excess_bits=bits, reason=reason, remedy=remedy)
