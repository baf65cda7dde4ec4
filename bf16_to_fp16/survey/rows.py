"""A row of a survey: what the reports say of one checkpoint, before and after, as the page and the CSV have it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..numerics import FP16_MAX, OVERFLOWED
from ..report.schema import Report, SiteEntry
from ..wording import infinite, known


class Row(BaseModel):
    """One checkpoint of a survey; the fields are the columns of the CSV, in this order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(description="Hub id; of a local path the last part")
    subfolder: str | None = Field(default=None, description="folder inside the source")
    revision: str | None = Field(default=None, description="commit of a Hub id, else what the list has")
    status: Literal["done", "audit only", "failed", "waiting"] = Field(
        default="waiting", description="`done`, `audit only` (of no known family), `failed` or `waiting`"
    )
    error: str | None = Field(default=None, description="why it failed, in one line")
    architecture: str | None = Field(default=None, description="class in its config.json")
    family: str | None = Field(default=None, description="family, of one that is audited only its class")
    parameters: int | None = Field(default=None, description="elements of the tensors in its files")
    source_verdict: str | None = Field(default=None, description="`safe` or `unsafe` as published, by the audit")
    source_broken: list[str] = Field(default=[], description="regimes in which it overflows or saturates as published")
    source_largest: float | None = Field(
        default=None, description="value that comes nearest to its limit or passes it furthest; in fp32 past the limit"
    )
    source_site: str | None = Field(default=None, description="site of that value")
    source_proven: bool | None = Field(default=None, description="whether `certify` proves it as published")
    verdict: str | None = Field(default=None, description="`safe` or `unsafe` after conversion")
    proof: str | None = Field(default=None, description="`certified` or `observed`")
    target: str | None = Field(default=None, description="target of the conversion")
    headroom_bits: float | None = Field(default=None, description="of the largest value run after conversion")
    bound_bits: float | None = Field(default=None, description="headroom of the certificate; below 0: not proven")
    tiers: dict[str, str] = Field(default={}, description="tiers that hold, each with `:certified` or `:observed`")
    fidelity: str | None = Field(default=None, description="what the next two are: `kl` or a relative squared error")
    error_bf16: float | None = Field(default=None, description="of the source in bf16, to fp32")
    error_fp16: float | None = Field(default=None, description="of the output in fp16, to fp32")
    seconds: float | None = Field(default=None, description="of audit, certificate and conversion; no download")
    peak_bytes: int | None = Field(default=None, description="most memory that its process held")

    @property
    def ended(self) -> bool:
        """Whether all was done for it that can be."""
        return self.status in ("done", "audit only")


HEADER = tuple(Row.model_fields)
"""The first line of the CSV."""


# --- from the reports ------------------------------------------------------------------------------------------------


def of_audit(report: Report) -> dict[str, Any]:
    """Return what an audit says of a checkpoint as published."""
    site = worst(report)
    return {
        "family": report.family,
        "source_verdict": report.verdict,
        "source_broken": report.broken_regimes,
        "source_largest": None if site is None else site.reached,
        "source_site": None if site is None else site.name,
    }


def worst(report: Report) -> SiteEntry | None:
    """Return the site of an audit that came nearest to its limit, or passed it furthest; None where nothing ran.

    What is computed in fp32 has no limit, and is left out.
    """
    sites = [site for regime in report.regimes.values() for site in regime.sites if site.limit and not site.benign]

    def reached(site: SiteEntry) -> float:
        value = known(site.reached)
        return (OVERFLOWED if value is None else value) / (site.limit or FP16_MAX)

    return max(sites, key=reached, default=None)


def of_certificate(report: Report) -> dict[str, Any]:
    """Return what a certificate says of a checkpoint as published."""
    return {"source_proven": report.proven}


def of_conversion(report: Report) -> dict[str, Any]:
    """Return what a conversion says of what it wrote."""
    close, headrooms = report.fidelity, [regime.headroom_bits for regime in report.regimes.values()]
    return {
        "verdict": report.verdict,
        "proof": report.proof,
        "target": report.target,
        "headroom_bits": min(headrooms, default=None),
        "bound_bits": None if report.certificate is None else report.certificate.headroom_bits,
        "tiers": {name: str(tier.proof) for name, tier in report.tiers.items() if tier.holds},
        "fidelity": None if close is None else close.measure,
        "error_bf16": None if close is None else close.kl_bf16,
        "error_fp16": None if close is None else close.kl_fp16,
    }


# --- CSV -------------------------------------------------------------------------------------------------------------


def as_csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV with the line ``HEADER`` above them; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for row in rows:
        writer.writerow(as_cell(getattr(row, name)) for name in HEADER)
    return text.getvalue()


def as_cell(value: Any) -> str:
    """Return a value as a cell of the CSV: numbers with all their digits, entries of a list behind each other."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{each}" for key, each in value.items())
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(math.copysign(math.inf, value)) if infinite(value) else repr(value)
    return str(value)
