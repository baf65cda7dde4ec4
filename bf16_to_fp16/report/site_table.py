"""The page's table of all sites: numbers as its script gets them, and how they are written where no script runs.

Up to thousands of rows travel as JSON: strings once, rows of numbers that point at them. JSON has no infinity and no
NaN: ±1e308 and null stand for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..wording import (
    headroom,
    headroom_by_bound,
    headroom_or_excess,
    infinite,
    magnitude,
    reached,
    rounded_down,
    rounded_up,
    shown_bound,
)
from .facts import bound_rows, bounds_by_name, by_design
from .schema import Report, SiteEntry
from .tables import Column, names, numbers

MOST_SITE_BYTES = 1_500_000
"""Bytes of the table's JSON; past it sites with most headroom are left out, so that the page stays under 2 MB."""
ROWS_WITHOUT_SCRIPT = 60  # rows that stand in the HTML itself


class SiteRow(NamedTuple):
    """A site of a regime, of none where nothing was run; ``tightness``: bound over the worst value found. The script
    reads the fields by their order."""

    name: str
    regime: str
    amax: float | None
    bits: float | None
    nonfinite: int
    saturated: int
    limit: float | None
    dtype: str | None
    benign: str
    bound: float | None
    tightness: float | None

    @classmethod
    def of(cls, site: SiteEntry, regime: str, bounds: Mapping[str, tuple[float, float | None]]) -> SiteRow:
        """Return the row of a site, with its bound where one is known; what is computed in fp32 needs none."""
        bound, ratio = bounds.get(site.name, (None, None)) if site.limit is not None else (None, None)
        bits = site.headroom_bits
        return cls(
            name=site.name,
            regime=regime,
            amax=json_number(site.reached),
            bits=json_number(bits) if bits is None or math.isnan(bits) or infinite(bits) else rounded_down(bits, 4),
            nonfinite=site.nonfinite,
            saturated=site.saturated,
            limit=json_number(site.limit),
            dtype=site.dtype,
            benign=by_design(site),
            bound=json_number(bound) if bound is None or infinite(bound) else shown_bound(bound),
            tightness=None if ratio is None else rounded_up(ratio, 3),
        )

    @property
    def broken(self) -> bool:
        return bool(self.nonfinite or self.saturated)

    @property
    def reached(self) -> str:
        """The largest |x|; a value of fp32 has no limit here, but may be inf or NaN as well."""
        return reached(self.amax) if self.limit is not None or self.nonfinite else magnitude(self.amax)

    @property
    def headroom(self) -> str:
        """The headroom: by the largest |x| that was run, by the bound where nothing was run."""
        if self.bits is None or self.limit is None:
            return headroom(self.bits)
        return headroom_or_excess(self.bits, self.amax, self.limit) if self.regime else headroom_by_bound(self.bits)


def _or_dash(value: float | None) -> str:
    return "–" if value is None else magnitude(value)


_COLUMNS = {
    "name": names("site"),
    "regime": Column("regime", "regime"),
    "amax": numbers("max |x|", "reached", str),
    "bits": numbers("headroom", "headroom", str),
    "bound": numbers("bound", "bound", _or_dash),
    "tightness": numbers("bound / worst found", "tightness", _or_dash),
    "nonfinite": numbers("non-finite", "nonfinite"),
    "saturated": numbers("saturated", "saturated"),
    "limit": numbers("limit", "limit", _or_dash),
    "dtype": Column("dtype", "dtype", lambda dtype: dtype or ""),
}
"""By the field that the script sorts by."""
_POINTERS = ("name", "regime", "dtype", "benign")  # fields of text


def tables(report: Report) -> Mapping[str, Sequence[SiteEntry]]:
    """Return the sites of each regime; where nothing was run, the certificate's sites under the name ""."""
    if report.regimes or report.certificate is None:
        return {name: regime.sites for name, regime in report.regimes.items()}
    nothing: dict[str, Any] = {"amax": math.nan, "nonfinite": 0, "saturated": 0, "benign": None}
    sites = bound_rows(report.certificate, None)
    return {"": [SiteEntry(name=s.name, limit=s.limit, headroom_bits=s.headroom_bits, **nothing) for s in sites]}


def site_table(report: Report) -> dict[str, Any]:
    """Return what the template needs: ``data`` for the script, ``columns`` with the numbers of their fields, the
    tightest ``rows`` of the regime shown first, and how many sites were ``hidden`` for want of room."""
    sites, bounds = tables(report), bounds_by_name(report)
    regimes = [name for name in sites if name]
    absent: tuple[str, ...] = ("limit",) if bounds else ("limit", "bound", "tightness")
    if sites and not regimes:
        absent = ("regime", "amax", "tightness", "nonfinite", "saturated", "dtype")
    columns = {SiteRow._fields.index(name): column for name, column in _COLUMNS.items() if name not in absent}
    shown = "half" if "half" in regimes else next(iter(regimes), "")
    most = max(map(len, sites.values()), default=0)
    while True:
        rows = [SiteRow.of(site, name, bounds) for name, each in sites.items() for site in each[:most]]
        data = compact(rows) | {"regimes": regimes, "shown": shown, "columns": list(columns)}
        if len(json.dumps(data)) <= MOST_SITE_BYTES:
            break
        most = most * 3 // 4
    return {
        "data": data,
        "columns": columns,
        "rows": [row for row in rows if row.regime == shown][:ROWS_WITHOUT_SCRIPT],
        "hidden": sum(map(len, sites.values())) - len(rows),
    }


def compact(rows: Sequence[SiteRow]) -> dict[str, list[Any]]:
    """Return rows with their texts as numbers of ``strings``, null for none."""
    strings: dict[str, int] = {}
    pointers = [SiteRow._fields.index(name) for name in _POINTERS]
    numbered = []
    for row in rows:
        values: list[Any] = list(row)
        for i in pointers:
            values[i] = strings.setdefault(values[i], len(strings)) if values[i] else None
        numbered.append(values)
    return {"strings": list(strings), "rows": numbered}


def json_number(value: float | None) -> float | None:
    """Return a number that JSON can hold with the digits that ``magnitude`` shows, which scripts round otherwise."""
    if value is None or math.isnan(value):
        return None
    if infinite(value):
        return math.copysign(1e308, value)
    if 1000 <= abs(value) < 1e7:
        return float(round(value))
    return float(f"{value:.4g}" if 0.01 <= abs(value) < 1000 else f"{value:.2e}")
