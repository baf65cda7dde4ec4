"""What a report says that follows from other things it says: verdict, totals, reasons, what is unsafe or not proven.

Each is made again from the rest of the report by the code that wrote it. That the rest is true, other checks show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from ..bounds.kinds import SiteKind, traits
from ..checkpoint.formats import shown
from ..report import remedies
from ..report.build import cost_of, is_exact, other_outputs, too_inexact
from ..report.schema import BoundEntry, CertificateEntry, Report, UnsafeEntry, dump
from .comparing import Problem, compared
from .views import other_release

NEVER_SET = ("train_mode", "attention", "model_class")  # keys of a report that other commands than convert write


def check_claims(report: Report) -> list[Problem]:
    """Return what a report says that does not follow from the rest of it; where another release wrote it, sentences and
    further keys are not looked at."""
    data, ours = dump(report), not other_release(report)
    problems = compared("claims", data, data | concluded(report, data))
    wrong = [*contradictions(report)]
    wrong += [(key, "is no key that convert writes") for key in (unknown_keys(report) if ours else ())]
    problems += [Problem("claims", key, reason) for key, reason in wrong]
    return problems + (check_sentences(report) if ours else [])


def check_sentences(report: Report) -> list[Problem]:
    """Return the reasons and remedies of a report that this release does not write there."""
    return [Problem("claims", key, reason) for key, reason in wrong_sentences(report)]


def concluded(report: Report, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a report that follow from its others, as JSON data.

    data: the report as such.
    """
    certificate = report.certificate
    proven = certificate is not None and all(site.largest <= site.limit for site in certificate.sites)
    clean = not report.unsafe and not report.broken_regimes and (bool(report.regimes) or proven)
    follows: dict[str, Any] = {"verdict": "safe" if clean else "unsafe"}
    if clean:
        follows["proof"] = "certified" if proven else "observed"
    if certificate is not None:
        seen = found_values(report)
        sites = [
            entry | bound_facts(site, seen)
            for entry, site in zip(data["certificate"]["sites"], certificate.sites, strict=True)
        ]
        least = min((site["headroom_bits"] for site in sites), default=math.inf)
        follows["certificate"] = data["certificate"] | {"holds": proven, "headroom_bits": least, "sites": sites}
    if not other_release(report):
        follows["unsafe"] = [dump(entry) for entry in expected_unsafe(report)]
    return follows


def found_values(report: Report) -> dict[str, float]:
    """Return the largest value that was found at each site, by a run in ``half`` or a search."""
    half = report.regimes.get("half")
    seen = {} if half is None else {site.name: site.amax for site in half.sites}
    for site in report.attack.sites if report.attack is not None else ():
        seen[site.name] = max(seen.get(site.name, 0.0), site.worst)
    return seen


def bound_facts(site: BoundEntry, seen: Mapping[str, float]) -> dict[str, Any]:
    """Return what follows from a recorded bound: whether it holds, its headroom, and what was found beside it."""
    largest = site.largest
    bits = site.headroom_bits if not 0 < largest < 1e300 else math.log2(site.limit / largest)
    if largest >= 1e300:  # stands for infinity, and its headroom for less than any
        bits = min(site.headroom_bits, -1e300)
    return {"holds": largest <= site.limit, "headroom_bits": bits, "observed": seen.get(site.name)}


def expected_unsafe(report: Report) -> list[UnsafeEntry]:
    """Return what is unsafe by the rest of a report; limits and goals, which do not follow from it, as they are."""
    entries = [
        *remedies.unsafe_sites(report.regimes, converted=True),
        *(remedies.overflowing(report.attack) if report.attack else ()),
    ]
    if report.fidelity is not None:
        entries += too_inexact(
            report.fidelity,
            exact=is_exact(report.plan, report.weights, report.source, report.inexact),
            ran=bool(report.regimes),
            max_kl=report.max_kl,
            edits=cost_of(report.inexact),
            proven=report.proven,
            eps_held=report.plan is not None and report.plan.eps_held,
        )
    drifts = bool((report.plan and report.plan.drift) or report.inexact)
    if report.max_kl is None:
        entries += other_outputs(report.outputs, drifts=drifts, ran=bool(report.regimes))
    if report.finetune is not None:  # which has a remedy of its own for all
        own = {entry.signal: entry.remedy for entry in report.unsafe}
        entries = [e.model_copy(update={"remedy": own.get(e.signal, e.remedy)}) for e in entries]
    return entries + [entry for entry in report.unsafe if entry.kind in ("limit", "goal")]


def contradictions(report: Report) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of what cannot be so beside the rest of a report, or is not so of a conversion."""
    for key in NEVER_SET:
        if getattr(report, key):
            yield key, "is set, which convert does not do"
    if report.source.adapter is not None:
        yield "source.adapter", "is set, which convert does not do"
    if report.safe and report.next:
        yield "next", "says how to go on, and the verdict is safe"
    if report.environment.dtype not in (None, "float16"):
        yield "environment.dtype", f"is {shown(report.environment.dtype)}, and all is written in float16"
    listed = {entry.name for entry in report.output.files}
    for name in report.source.carried_over:
        there = "SOURCE_README.md" if name == "README.md" else name
        # An empty folder of a module has no files.
        if there not in listed and not there.endswith("/"):
            yield "source.carried_over", f"names {shown(name)}, which is not in the folder"
    if any(entry.kind == "goal" for entry in report.unsafe) and report.finetune is None:
        yield "unsafe", "names a goal, and nothing was finetuned"
    for entry in report.close:
        if entry.kind != "limit" or entry.regimes or entry.nonfinite or entry.saturated:
            yield f"close.{entry.signal}", "is no limit that was nearly passed"
    if report.certificate is not None:
        yield from unproven(report, report.certificate)


def unproven(report: Report, certificate: CertificateEntry) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) where the sites without a proof are not those whose recorded bound passes its limit."""
    wanted = {site.name: site for site in certificate.sites if not site.largest <= site.limit}
    for entry in report.uncertified:
        site = wanted.pop(entry.name, None)
        same = site is not None and (entry.bound, entry.limit, entry.excess_bits) == (
            site.largest,
            site.limit,
            -site.headroom_bits,
        )
        if not same:
            yield f"uncertified.{entry.name}", "is not what the certificate says of it"
    for name in wanted:
        yield f"uncertified.{name}", "is missing, and its bound passes its limit"


def wrong_sentences(report: Report) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) of reasons and remedies that this release does not write there."""
    other = "is no sentence of this program"
    kinds = {site.name: site.kind for site in report.certificate.sites} if report.certificate is not None else {}
    for each in report.uncertified:
        if kinds.get(each.name) == SiteKind.ZERO_VECTOR:
            if (each.reason, each.remedy) != (remedies.MAY_BE_ZERO, remedies.NORMALISE_IN_FP32):
                yield f"uncertified.{each.name}.reason", other
            continue
        unmoved = not traits(kinds.get(each.name, "")).movable
        costly = each.reason.startswith(remedies.TOO_COSTLY) and not unmoved
        known = (
            remedies.UNMOVED if unmoved else remedies.OVER_AT_EVERY_EXPONENT,
            remedies.NOTHING_MOVES if unmoved else remedies.OVER,
        )
        if not costly and each.reason not in known:
            yield f"uncertified.{each.name}.reason", other
        if report.finetune is None and each.remedy != (remedies.OBSERVED if costly else remedies.PENALTY):
            yield f"uncertified.{each.name}.remedy", other
    for key, entries, reason in (("close", report.close, remedies.THIN), ("unsafe", report.unsafe, remedies.PASSED)):
        for entry in entries:
            if entry.kind == "limit" and entry.reason != reason:
                yield f"{key}.{entry.signal}.reason", other
            if entry.kind == "limit" and report.finetune is None and entry.remedy != remedies.PENALTY:
                yield f"{key}.{entry.signal}.remedy", other
    for name, tier in report.tiers.items():
        said = tier.reason
        if said not in (("",) if tier.holds else (remedies.OVER, remedies.SQUARES_UNSEEN)) and not (
            said.startswith((remedies.SINKING, remedies.SWELLING)) and not tier.holds
        ):
            yield f"tiers.{name}.reason", other


def unknown_keys(part: BaseModel, key: str = "") -> Iterator[str]:
    """Yield the keys of a report that this program does not write."""
    yield from (f"{key}{name}" for name in part.model_extra or ())
    for name in part.model_fields_set:
        value = getattr(part, name, None)
        inside = (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        )
        for each in inside:
            if isinstance(each, BaseModel):
                yield from unknown_keys(each, f"{key}{name}.")
