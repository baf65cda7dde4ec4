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
    """The result of ``verify``, which checks a converted folder against its report. ``report``: what that report
    claims. If files differ from it, ``certificate`` is None and ``tiers`` is empty."""

    verdict: Literal["safe", "unsafe"]
    verified: Flag
    padding: Count | None = 0
    source: Source
    report: Claim
    checks: dict[str, str]
    problems: list[ProblemEntry]
    notes: list[str] = []  # limits of the claim
    files: Count  # in the report
    target: str | None = None
    certificate: CertificateEntry | None  # without its sites
    tiers: dict[str, TierEntry]
    regimes: dict[str, RegimeEntry]
    edits: Count = 0  # sites that the plan edits
    environment: Environment


class PipelineEntry(ReportObject):
    subfolder: str
    verdict: str
    proof: str | None


class PipelineReport(Versioned):
    """The report on a diffusers pipeline, whose encoders are converted and whose other files are linked or copied."""

    verdict: Literal["safe", "unsafe"]
    source: Source
    pipeline: str | None = None  # the class in ``model_index.json``
    encoders: list[PipelineEntry]
    linked: Count  # files other than encoders
    copied: Count  # the same
    nbytes: Count  # of linked and copied files
    dtype: str | None = None  # of the largest safetensors file among them, in torch's spelling
    left_out: list[str]  # files of the source
    command: str
    environment: Environment
    output: Output = Output()  # all files but this report; links have no SHA-256
