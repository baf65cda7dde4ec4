"""The reports of ``verify`` and of a pipeline's conversion."""

from __future__ import annotations

from typing import Literal

from ..results import CertificateEntry, Count, Flag, RegimeEntry, ReportObject
from .schema import Environment, Output, Source, TierEntry, Versioned


class ProblemEntry(ReportObject):
    check: str
    name: str
    reason: str
    remedy: str


class Claim(ReportObject):
    verdict: str | None
    proof: str | None
    family: str | None


class Verification(Versioned):
    """The result of ``verify``. ``files``: number of files in the report. ``certificate``: without its sites. If files
    differ, ``certificate`` is None and ``tiers`` empty. ``notes``: limits of the claim. ``edits``: number of sites that
    the plan edits."""

    verdict: Literal["safe", "unsafe"]
    verified: Flag
    padding: Count | None = 0
    source: Source
    report: Claim
    checks: dict[str, str]
    problems: list[ProblemEntry]
    notes: list[str] = []
    files: Count
    target: str | None = None
    certificate: CertificateEntry | None
    tiers: dict[str, TierEntry]
    regimes: dict[str, RegimeEntry]
    edits: Count = 0
    environment: Environment


class PipelineEntry(ReportObject):
    subfolder: str
    verdict: str
    proof: str | None


class PipelineReport(Versioned):
    """The conversion of a whole pipeline. ``pipeline``: the class in ``model_index.json``. ``linked``, ``copied``: how
    many files other than encoders were linked and copied. ``nbytes``: their total size. ``dtype``: of the largest
    safetensors file among them, in torch's spelling. ``left_out``: files of the source that are not in the output.
    ``output``: all files but this report; links have no SHA-256."""

    verdict: Literal["safe", "unsafe"]
    source: Source
    pipeline: str | None = None
    encoders: list[PipelineEntry]
    linked: Count
    copied: Count
    nbytes: Count
    dtype: str | None = None
    left_out: list[str]
    command: str
    environment: Environment
    output: Output = Output()
