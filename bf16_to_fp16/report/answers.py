"""What ``verify`` and a pipeline's conversion answer: reports of their own, beside that of a checkpoint."""

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
    """What ``verify`` found. ``files``: how many the report lists. ``certificate``: without its sites; None, as
    ``tiers`` is empty, where the files failed. ``as_reported``: a true report of a checkpoint that is unsafe or short
    of what was asked. ``notes``: what limits the claim. ``edits``: sites that the plan edits."""

    verdict: Literal["safe", "unsafe"]
    verified: Flag
    as_reported: Flag = False
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
    """A converted sub-folder. ``same``: the sub-folder that it is another name of."""

    subfolder: str
    same: str | None = None
    verdict: str
    proof: str | None


class PipelineReport(Versioned):
    """The conversion of a whole pipeline. ``pipeline``: the class in ``model_index.json``. ``linked``, ``copied``:
    numbers of files. ``dtype``: of the largest encoder, as torch calls it. ``left_out``: files that are not in the
    output. ``output``: its files but this one, links without SHA-256."""

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
