"""What was measured, against the same measured again: inputs, regimes, and on the original what fp16 costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..environment import installed
from ..numerics import FP16_TINY
from ..report.schema import Inputs, RegimeEntry, Report, dump
from .comparing import FAINT, HEADROOM, MAGNITUDE, ROOMY, Problem, compared

STACK = ("torch", "transformers")  # Packages whose versions decide how operations are named


def other_stack(report: Report) -> bool:
    """Return whether a report was written with other versions of torch or transformers than those here."""
    versions = report.environment.versions
    return any(versions.get(name) != installed(name) for name in STACK)


def check_inputs(report: Report, again: Mapping[str, Any]) -> list[Problem]:
    """Return where what a report says was run is not what its seed and ids give; again: as ``describe_batches`` says
    it, of the same text."""
    return [] if other_stack(report) else compared("audit", dump(report.inputs or Inputs()), again, "inputs")


def check_regimes(report: Report, reruns: Mapping[str, RegimeEntry], *, same_text: bool) -> list[Problem]:
    """Return where a report's regimes are not those that were run again, up to another machine's arithmetic.

    same_text: whether both ran on the same; else what was found may only be less than what is recorded.
    """
    problems = []
    for name in sorted({*report.regimes, *reruns}):
        said, again = report.regimes.get(name), reruns.get(name)
        if said is None or again is None:
            reason = "was run, and the report has no such regime" if said is None else "is a regime that was not run"
            problems.append(Problem("audit", f"regimes.{name}", reason))
        elif same_text:
            problems += same_regime(f"regimes.{name}", said, again, by_name=other_stack(report))
        else:
            problems += no_better(f"regimes.{name}", said, again)
    return problems


def same_regime(key: str, said: RegimeEntry, rerun: RegimeEntry, *, by_name: bool) -> list[Problem]:
    """Return where a recorded regime is not the one that was run again; by_name: of sites only those whose name both
    have."""
    apart = ("underflow", "gradients")
    claim, truth = ({k: v for k, v in dump(part).items() if k not in apart} for part in (said, rerun))
    if by_name:
        both = {site.name for site in said.sites} & {site.name for site in rerun.sites}
        for part in (claim, truth):
            part["sites"] = [site for site in part["sites"] if site["name"] in both]
    problems = compared("audit", claim, truth, key)
    scales = [0.0 if part.gradients is None else part.gradients.loss_scale or 0.0 for part in (said, rerun)]
    if max(scales) > 2 * min(scales):  # the next power of two may be another machine's rounding
        reason = f"is {scales[0]:g}, and was found to be {scales[1]:g}"
        problems.append(Problem("audit", f"{key}.gradients.loss_scale", reason))
    for one, other, what in (
        (said, rerun, "is not under fp16's normal numbers"),
        (rerun, said, "is under fp16's normal numbers, which the report does not say"),
    ):
        known = {site.name for site in other.underflow}
        low = [site.name for site in one.underflow if site.amax < FP16_TINY / 2 and site.name not in known]
        problems += [Problem("audit", f"{key}.underflow.{name}", what) for name in low if not by_name]
    return problems


def no_better(key: str, said: RegimeEntry, rerun: RegimeEntry) -> list[Problem]:
    """Return the sites of which a report says less than was found on a part of what it ran on."""
    recorded, problems = {site.name: site for site in said.sites}, []
    for site in rerun.sites:
        claim = recorded.get(site.name)
        if claim is None:
            continue
        kept, again = claim.headroom_bits, site.headroom_bits
        less = claim.amax < site.amax * (1 - MAGNITUDE) and site.amax > FAINT
        more = kept is not None and again is not None and kept > again + HEADROOM and again < ROOMY
        if less or more or (site.broken and not claim.broken):
            reason = f"the report says {claim.amax:.6g}, and {site.amax:.6g} was found on a part of what it ran on"
            problems.append(Problem("audit", f"{key}.sites.{site.name}", reason))
    least = rerun.headroom_bits + HEADROOM
    if said.headroom_bits > least and rerun.headroom_bits < ROOMY:
        reason = f"the report says {said.headroom_bits:.6g}, and {rerun.headroom_bits:.6g} was found"
        problems.append(Problem("audit", f"{key}.headroom_bits", reason))
    return problems
