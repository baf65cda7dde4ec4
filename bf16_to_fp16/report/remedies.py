"""Why a site is unsafe or not proven, and what helps: every reason and remedy of a report is worded here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..numerics import FP16_MAX, OVERFLOWED
from ..rescaling.planner import Fallback, Violation
from ..wording import counted, listed, reached
from .schema import AttackEntry, CertificateEntry, RegimeEntry, Report, UnprovenEntry, UnsafeEntry

IMMOVABLE = ("scores", "masked scores", "gate", "activation", "logits", "position bias")
"""Kinds of site that no coupling reaches."""


MASKED = ":masked"
"""How the sites end that say what a mask must add at least."""


OUTPUT = "the output, against bf16's error"
"""Names the violation of an fp16 output that is less accurate than bf16's."""


FINETUNE = "finetune with the activation-magnitude penalty"


CONVERT = "bf16-to-fp16 convert rescales what can be"


PENALTY = f"rescaling cannot lower it; {FINETUNE}"


NOT_CONVERTED = f"{CONVERT}; what cannot, a finetune lowers"


CONVERTED = f"rescaling was not enough; {FINETUNE}"


NO_FAMILY = "stay with bf16, or finetune it with ActivationPenalty in a loop of your own"


OBSERVED = "its observed range with margin decides; finetune with penalty.certify: true to prove it as well"


INEXACT = (
    "fp16 is further from the fp32 source than bf16: the limits leave too few bits;"
    f" {FINETUNE}, or try a smaller --margin"
)


NOT_FINITE = f"its logits are inf or NaN: something inside overflows; {FINETUNE}"


PASSED = "no exponent brings it under its limit with the margin"


OVER = "its bound is over the limit with these weights"


OVER_AT_EVERY_EXPONENT = "its bound is over the limit at every exponent"


CONVERT_AGAIN = "fetch it again, or convert the source again"


REMOVE = "remove it, or keep it elsewhere"


RIGHT_REVISION = "give --original at the revision that the report names"


UNSAFE_BY_REPORT = "finetune it, or stay with bf16"


def passed_limit(violation: Violation) -> UnsafeEntry:
    """Return a limit that the plan cannot hold as an entry of the report."""
    return UnsafeEntry(signal=violation.signal, excess_bits=violation.excess_bits, remedy=PENALTY, reason=PASSED)


def sinks(least: float) -> str:
    """Return why a tier that squares the stream in fp16 does not hold where a token's mean square is so small."""
    return f"the mean square of a token in the stream falls to {least:.2g}, where fp16 squares vanish"


def inexact(excess_bits: float, *, finite: bool) -> UnsafeEntry:
    """Return an output that is less accurate than bf16's, by so many bits, as an entry of the report."""
    return UnsafeEntry(signal=OUTPUT, excess_bits=excess_bits, remedy=INEXACT if finite else NOT_FINITE, reason=PASSED)


def unsafe_sites(
    regimes: Mapping[str, RegimeEntry], *, converted: bool = False, convertible: bool = True
) -> list[UnsafeEntry]:
    """Return the sites that are non-finite or saturated other than by design, in the order they broke, each with its
    regimes, the counts of the worst of them, the reason and the remedy.

    converted: whether rescaling has been tried on these weights already; convertible: whether it can be.
    """
    broken = {name: {site.name: site for site in regime.broken_sites} for name, regime in regimes.items()}
    clean = " or ".join(name for name, sites in broken.items() if not sites)
    remedy = NO_FAMILY if not convertible else CONVERTED if converted else NOT_CONVERTED
    if clean and (converted or not convertible):
        remedy += f", or use {clean}, which is clean"
    rows = []
    for signal in dict.fromkeys(signal for sites in broken.values() for signal in sites):
        found = {name: sites[signal] for name, sites in broken.items() if signal in sites}
        nonfinite, saturated = (max(getattr(s, key) for s in found.values()) for key in ("nonfinite", "saturated"))
        counts = ", ".join(
            f"{count:,} {kind}" for count, kind in ((nonfinite, "inf/NaN"), (saturated, "saturated")) if count
        )
        # Of a mask's own site it counts the masked positions that have a weight.
        reason = f"{saturated:,} masked positions that count" if signal.endswith(MASKED) else counts
        # What overflowed was at least 65536.
        excess = [
            -math.log2(FP16_MAX / OVERFLOWED) if s.headroom_bits is None or s.amax == OVERFLOWED else -s.headroom_bits
            for s in found.values()
        ]
        rows.append(
            UnsafeEntry(
                signal=signal,
                regimes=list(found),
                nonfinite=nonfinite,
                saturated=saturated,
                excess_bits=max(0.0, *excess),
                reason=f"{reason} in {', '.join(found)}",
                remedy=remedy,
            )
        )
    return rows


def overflowing(attack: AttackEntry, *, converted: bool = True) -> list[UnsafeEntry]:
    """Return the sites that a search drove past their limits, the worst first, each with what it reached and by how
    many steps, and the remedy; what only overflows in fp16, after something else has, is left out beside it.

    converted: whether rescaling has been tried on these weights already.
    """
    past = [site for site in attack.sites if site.headroom_bits < 0]
    first = [site for site in past if site.fp32 > site.limit]
    steps = counted(attack.steps, "gradient step")
    return [
        UnsafeEntry(
            signal=site.name,
            excess_bits=math.log2(max(site.limit, site.fp32) / site.limit),
            reason=f"{reached(site.fp32)} on an input that {steps} of search found",
            remedy=CONVERTED if converted else NOT_CONVERTED,
        )
        for site in first or past
    ]


def over_limits(certificate: CertificateEntry) -> list[UnprovenEntry]:
    """Return the sites whose bound passes its limit, the worst first, of weights on which no rescaling was tried."""
    return [
        UnprovenEntry(
            name=site.name,
            bound=site.largest,
            limit=site.limit,
            excess_bits=-site.headroom_bits,
            reason="no rescaling moves it" if site.kind in IMMOVABLE else OVER,
            remedy=PENALTY if site.kind in IMMOVABLE else CONVERT,
        )
        for site in certificate.over
    ]


def why_unproven(kind: str, fallback: Fallback | None) -> tuple[str, str]:
    """Return why a kind of site is not proven after rescaling, and the remedy; ``fallback``: of its signal."""
    if kind in IMMOVABLE:
        return "no exponent moves it", PENALTY
    if fallback is not None and not fallback.impossible:
        reason = (
            "holding it for every input would push weights or signals under fp16's smallest numbers"
            f" (predicted squared error {fallback.cost_certified:.1e} instead of {fallback.cost_observed:.1e})"
        )
        return reason, OBSERVED
    return OVER_AT_EVERY_EXPONENT, PENALTY


def going_on(report: Report, missed: Sequence[UnsafeEntry], remedy: str) -> Report:
    """Return the report of a finetune that ended unsafe or without what was asked of it (``missed``), with ``remedy``
    in the place of another finetune."""
    finetune = report.finetune.model_copy(update={"next": remedy}) if report.finetune is not None else None
    unsafe = [
        *(entry.model_copy(update={"remedy": entry.remedy.replace(FINETUNE, remedy)}) for entry in report.unsafe),
        *(entry.model_copy(update={"remedy": remedy}) for entry in missed),
    ]
    uncertified = [
        entry.model_copy(update={"remedy": entry.remedy.replace(FINETUNE, remedy)})
        for entry in report.uncertified or ()
    ]
    changed = {"verdict": "unsafe", "finetune": finetune, "unsafe": unsafe, "uncertified": uncertified}
    return report.model_copy(update=changed)


def missed_goals(report: Report) -> list[UnsafeEntry]:
    """Return what was asked of a finetune and not delivered."""
    return [entry for entry in report.unsafe if entry.regimes is None and entry.reason != PASSED and entry.reason]


def after_breaking(report: Report, clean: Sequence[str]) -> str:
    """Return what to do with a checkpoint that broke, in sentences: convert it, or what is left where that was done.

    clean: the regimes in which nothing broke.
    """
    if report.plan is None:
        return "Convert the checkpoint (bf16-to-fp16 convert SOURCE OUT): rescaling is exact and lowers most of these."
    if report.finetune is not None and report.finetune.next:
        further = report.finetune.next[:1].upper() + report.finetune.next[1:]
    else:
        further = "Finetune it with the activation-magnitude penalty (bf16-to-fp16 finetune RECIPE)"
    if clean:
        return (
            f"Rescaling was not enough here. Nothing broke in {listed(clean)}: use it that way. {further},"
            " or stay with bf16."
        )
    return f"Rescaling was not enough here, and no fp16 regime is clean. {further}, or stay with bf16 or fp32."
