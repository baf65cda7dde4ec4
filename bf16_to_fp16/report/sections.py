"""Make the tables and rows of a report that terminal, page and card share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from .. import wording
from ..rescaling.plan import OfChannels
from ..results import Fidelity
from . import facts
from .remedies import unsafe_sites
from .schema import Report
from .screen import Column, Table, names, numbers

MOST_UNSAFE = 12  # broken sites listed; most others only follow from these, and are in the table of all sites
MOST_EDITS = 12  # edits that the plan lists, the dearest


def source_name(report: Report) -> str:
    path, inside = report.source.path or report.family or "checkpoint", report.source.subfolder
    whole = path.removesuffix(f"/{inside}") if inside else path
    name = whole.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1].partition("@")[0] or path
    return f"{name}/{inside}" if inside else name


TIER_COLUMNS = (Column("runtimes", 0), Column("arithmetic", 1), Column("safe", 2), Column("such as", 3))
UNPROVEN_COLUMNS = (
    names("site"),
    numbers("bound", "bound", wording.bound_magnitude),
    numbers("limit", "limit", wording.magnitude),
    numbers("bits over", "excess_bits", wording.excess),
    Column("reason", "reason"),
)


REGIME_COLUMNS = (  # of rows (name, regime)
    Column("regime", lambda row: f"{row[0]} ({facts.REGIME_MEANINGS.get(row[0], '')})"),
    numbers("non-finite", lambda row: row[1].nonfinite),
    numbers("saturated", lambda row: row[1].saturated),
    numbers("max |x|", lambda row: wording.reached(row[1].reached), str),
    numbers("headroom", lambda row: wording.headroom_or_excess(row[1].headroom_bits, row[1].reached), str),
)


def unsafe_tables(report: Report) -> list[Table]:
    broken = unsafe_sites(report.regimes, report.family)
    kinds = {kind: [entry for entry in report.unsafe if entry.kind == kind] for kind in ("found", "limit")}
    in_fp32 = {site.name: site.fp32 for site in (report.attack.sites if report.attack else ())}
    signal, bits = names("signal", "signal"), numbers("bits over", "excess_bits", partial(wording.excess, decimals=2))
    most = numbers("reached", lambda entry: in_fp32.get(entry.signal), wording.reached)
    columns = (
        names("site", "signal"),
        Column("regimes", "regimes", ", ".join),
        numbers("non-finite", "nonfinite"),
        numbers("saturated", "saturated"),
    )
    of = f", {MOST_UNSAFE} of {len(broken):,}" if len(broken) > MOST_UNSAFE else ""
    tables = (
        Table(columns, broken[:MOST_UNSAFE], f"What broke{of}, in order; later ones often only pass it on"),
        Table((signal, most, bits), kinds["found"], "What the search drove past its limit"),
        Table((signal, bits), kinds["limit"], "No exponent brings these under their limit with the margin"),
    )
    return [table for table in tables if table.rows]


def exponent_rows(exponents: Mapping[str, OfChannels]) -> list[tuple[str, str]]:
    channels = [e for entry in exponents.values() if not isinstance(entry, int | float) for e in entry]
    moved = sorted(filter(None, channels))
    whole = Counter(entry for entry in exponents.values() if isinstance(entry, int | float))
    rows = []
    if whole:
        rows.append(("whole signals", ", ".join(f"{n} by {wording.power(e)}" for e, n in sorted(whole.items()))))
    if moved:
        ends = " to ".join(wording.signed(e) for e in dict.fromkeys((moved[0], moved[-1])))
        rows.append(("channels", f"{len(moved):,} of {len(channels):,} moved, by exponents {ends}"))
    return rows


def closeness_table(close: Fidelity | None, reference: str, bf16: str, fp16: str) -> Table | None:
    """Return a table of how far the bf16 and the fp16 model are from ``reference``, or None if ``close`` is None. bf16,
    fp16: the titles of their columns."""
    if close is None:
        return None
    kl = close.measure == "kl"
    what = "KL(fp32 ‖ x), nats per token" if kl else f"{close.measure} of the last states"
    rows = [(what, wording.scientific(close.kl_bf16), wording.scientific(close.kl_fp16))]
    if close.kl_fp32 is not None:
        same = " (the same function, to the bit)" if close.exact else ""
        rows.append((f"the converted weights in fp32{same}", "–", wording.scientific(close.kl_fp32)))
    largest = wording.scientific(close.max_logit_error_bf16), wording.scientific(close.max_logit_error_fp16)
    rows.append((f"largest {'logit error' if kl else 'error of a state'}", *largest))
    if close.kl_bf16 is None and close.max_logit_error_bf16 is None:
        rows = [(what, "–", value) for what, _, value in rows]
    if close.top1_fp16 is not None:
        bf16_share = "–" if close.top1_bf16 is None else wording.percent(close.top1_bf16)
        rows.append(("same best token", bf16_share, wording.percent(close.top1_fp16)))
    return Table((Column(f"against the {reference}", 0), numbers(bf16, 1, str), numbers(fp16, 2, str)), rows)
