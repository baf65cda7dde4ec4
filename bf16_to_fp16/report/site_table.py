"""The page's table of sites, each in its tightest regime."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..results import SiteEntry
from ..wording import headroom, headroom_by_bound, headroom_or_excess, infinite, magnitude, reached, tightness
from .facts import by_design
from .schema import Report

MOST_ROWS = 3_000  # rows of the table, by least headroom, so that the page stays under 2 MB


@dataclass(frozen=True)
class SiteRow:
    """A site in its tightest ``regime``, if anything was run. ``tightness``: bound over the worst value found."""

    site: SiteEntry
    regime: str
    bound: float | None
    tightness: float | None

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key: broken rows first, then by headroom, rows without a limit last."""
        bits = self.site.headroom_bits
        return not self.site.broken, math.inf if bits is None or math.isnan(bits) else bits

    @property
    def headroom(self) -> str:
        bits = self.site.headroom_bits
        return headroom_by_bound(bits) if bits is not None and not self.regime else headroom_at(self.site)


def reached_at(site: SiteEntry) -> str:
    return reached(site.reached) if site.limit is not None or site.nonfinite else magnitude(site.reached)


def headroom_at(site: SiteEntry) -> str:
    if site.headroom_bits is None or site.limit is None:
        return headroom(site.headroom_bits)
    return headroom_or_excess(site.headroom_bits, site.reached, site.limit)


@dataclass(frozen=True)
class SiteColumn:
    """``key``: the number by which the column is sorted; None for text."""

    title: str
    write: Callable[[SiteRow], str]
    key: Callable[[SiteRow], Any] | None = None

    def sorted_by(self, row: SiteRow) -> str:
        value = None if self.key is None else self.key(row)
        if value is None or math.isnan(value):
            return ""
        return f"{math.copysign(1e308, value):g}" if infinite(value) else f"{value:.6g}"


def _or_dash(value: float | None) -> str:
    return "–" if value is None else magnitude(value)


_NAME = SiteColumn("site", lambda row: row.site.name)
_REGIME = SiteColumn("regime", lambda row: row.regime)
_AMAX = SiteColumn("max |x|", lambda row: reached_at(row.site), lambda row: row.site.reached)
_HEADROOM = SiteColumn("headroom", lambda row: row.headroom, lambda row: row.site.headroom_bits)
_BOUND = SiteColumn("bound", lambda row: _or_dash(row.bound), lambda row: row.bound)
_TIGHTNESS = SiteColumn("bound / worst found", lambda row: _or_dash(row.tightness), lambda row: row.tightness)
_REST = (
    SiteColumn("non-finite", lambda row: f"{row.site.nonfinite:,}", lambda row: row.site.nonfinite),
    SiteColumn("saturated", lambda row: f"{row.site.saturated:,}", lambda row: row.site.saturated),
    SiteColumn("dtype", lambda row: row.site.dtype or ""),
    SiteColumn("by design", lambda row: by_design(row.site)),
)


def site_rows(report: Report) -> list[SiteRow]:
    bounds = {site.name: site for site in (report.certificate.sites if report.certificate else ())}
    least: dict[str, SiteRow] = {}
    for name, regime in report.regimes.items():
        for site in regime.sites:
            # A site in fp32 needs no bound.
            bound = bounds.get(site.name) if site.limit is not None else None
            ratio = None if bound is None else tightness(bound.bound, bound.observed)
            row = SiteRow(site, name, None if bound is None else bound.bound, ratio)
            if site.name not in least or row.order < least[site.name].order:
                least[site.name] = row
    rows = list(least.values())
    if not report.regimes:
        nothing: dict[str, Any] = {"amax": math.nan, "nonfinite": 0, "saturated": 0, "benign": None}
        rows = [
            SiteRow(SiteEntry(name=s.name, limit=s.limit, headroom_bits=s.headroom_bits, **nothing), "", s.bound, None)
            for s in bounds.values()
        ]
    return sorted(rows, key=lambda row: row.order)


def site_columns(report: Report) -> list[SiteColumn]:
    if not report.regimes:
        return [_NAME, _HEADROOM, _BOUND]
    bounds = [_BOUND, _TIGHTNESS] if report.certificate is not None else []
    return [_NAME, _REGIME, _AMAX, _HEADROOM, *bounds, *_REST]
