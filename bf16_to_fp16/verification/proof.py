"""Recorded certificate, audit and tiers against those that were computed again."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..auditing.regimes import RegimeResult
from ..bounds.findings import Certificate
from ..bounds.spectral import CARRIED
from ..checkpoint.formats import shown
from ..report.remedies import unsafe_sites
from ..report.schema import BoundEntry, Report, TierEntry, regimes_of
from .comparing import Problem

BOUND_TOLERANCE = 1e-3  # relative difference of a recomputed bound that another machine's arithmetic may make


def check_certificate(certificate: Certificate, report: Report) -> list[Problem]:
    """Return where the recorded certificate says another thing than the recomputed one."""
    assert report.certificate is not None  # ``locating.NEEDED`` asks for it
    recorded = {site.name: site for site in report.certificate.sites}
    problems = []
    for site in certificate.sites:
        claim = recorded.pop(site.name, None)
        if claim is None:
            problems.append(Problem("certificate", site.name, "the report has no bound for it"))
        elif not agree(claim, site.bound, site.partial):
            reason = f"its bound is {site.largest:.6g} and the report says {claim.bound}"
            problems.append(Problem("certificate", site.name, reason))
        elif (claim.stack, claim.block, claim.role) != (site.place.stack, site.place.block, site.place.role):
            problems.append(Problem("certificate", site.name, "the report puts it in another place"))
        elif (claim.kind, claim.limit) != (site.kind, site.limit):
            reason = f"is {site.kind}, up to {site.limit:g}, and the report says {shown(claim.kind)}, {claim.limit:g}"
            problems.append(Problem("certificate", site.name, reason))
    problems += [
        Problem("certificate", name, "the report bounds it, and the checkpoint has no such site") for name in recorded
    ]
    if report.certificate.train_mode != certificate.arithmetic.train:
        reason = (
            f"the report says that it {'covers' if report.certificate.train_mode else 'leaves out'} training, wrongly"
        )
        problems.append(Problem("certificate", "certificate", reason))
    if report.certificate.holds != certificate.holds and not problems:
        reason = f"the report says that it {'holds' if not certificate.holds else 'does not hold'}, wrongly"
        problems.append(Problem("certificate", "certificate", reason))
    return problems + check_proof(certificate, report)


def check_proof(certificate: Certificate, report: Report) -> list[Problem]:
    """Return the worst site of a certificate that a report says to hold and that does not."""
    if report.proof != "certified" or certificate.holds:
        return []
    worst = min(certificate.sites, key=lambda site: site.headroom_bits)
    reason = f"its bound is {worst.largest:.6g}, over its limit, and the report says certified"
    return [Problem("certificate", worst.name, reason)]


def agree(claim: BoundEntry, bound: float, partial: float) -> bool:
    """Return whether recorded bounds are the recomputed ones, up to another machine's arithmetic and what carrying
    eigenvalues over from the source may add, which is twice as much where rounding has made the matrix smaller."""
    for said, again in ((claim.bound, bound), (claim.partial, partial)):
        if math.isnan(said):
            return False
        # JSON has no infinity; reports write the largest double in its place.
        if math.isinf(again) or abs(said) > 1e300:
            if not (math.isinf(again) and abs(said) > 1e300):
                return False
        elif not again * (1 - BOUND_TOLERANCE) <= said <= again * (1 + 4 * CARRIED + BOUND_TOLERANCE):
            return False
    return True


def check_tiers(
    tiers: Mapping[str, TierEntry], certified: Mapping[str, bool], report: Report, *, ran: bool
) -> list[Problem]:
    """Return the tiers of which the report says more than the files give; certified: by tier whether its bounds hold.
    ``ran``: whether the audit was repeated, without which nothing is known of what was observed."""
    problems = []
    for name, claim in report.tiers.items():
        computed = tiers.get(name)
        if computed is None:
            reason = "is no tier of this program"
        elif claim.holds != (claim.proof is not None):
            reason = f"the report says that it holds: {claim.holds}, and by what: {claim.proof}"
        elif claim.proof == "certified" and computed.proof != "certified" and (ran or not certified[name]):
            reason = f"the report says that it is certified, and {computed.reason or 'it is only observed'}"
        elif claim.proof == "observed" and ran and not computed.holds:
            reason = f"the report says that it was observed to hold, and {computed.reason}"
        elif other := sorted({*claim.runtimes} - {*computed.runtimes}):
            reason = f"the report says that it stands for {shown(other[0])}, which it does not"
        else:
            continue
        problems.append(Problem("tiers", name, reason))
    return problems


def check_audit(regimes: Mapping[str, RegimeResult]) -> list[Problem]:
    """Return the sites that break when the checkpoint is run."""
    broken = unsafe_sites(regimes_of(regimes), converted=True)
    return [Problem("audit", site.signal, site.reason, site.remedy) for site in broken]
