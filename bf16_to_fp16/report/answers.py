"""What ``verify`` and a pipeline's conversion answer: reports of their own, beside that of a checkpoint."""

from __future__ import annotations

from typing import Literal

from ..results import Count, Flag, ReportObject
from .schema import CertificateEntry, Environment, Output, RegimeEntry, Source, TierEntry, Versioned


class ProblemEntry(ReportObject):
    """Something that does not hold: which check found it, at which file or site, why, and what to do."""

    check: str
    name: str
    reason: str
    remedy: str


class Claim(ReportObject):
    """What the report that is verified says itself."""

    verdict: str | None
    proof: str | None
    family: str | None


class Verification(Versioned):
    """What ``verify`` found: how each check ended, every problem, and what was computed again.

    ``files``: how many the report lists. ``certificate``: without its sites, None where the files failed; ``target``:
    for which it is. ``tiers``: as the files give them, none where they failed. ``padding``: as in a report.
    ``as_reported``: the report is true, and says itself that the checkpoint is unsafe, or short of what was asked.
    ``notes``: what limits the claim, in sentences. ``edits``: sites that the plan edits, which changes the function.
    """

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
    """A sub-folder of a pipeline that was converted, with the verdict and proof of its own report.

    ``same``: the sub-folder that it is another name of. ``files``: those that the source had there. ``texts``: of those
    that a conversion writes anew, config and index, what they held.
    """

    subfolder: str
    same: str | None = None
    verdict: str
    proof: str | None
    files: list[str]
    texts: dict[str, str]


class PipelineReport(Versioned):
    """What a conversion of a whole pipeline says of it: where it comes from, its converted sub-folders, the verdict of
    all of them, and what became of the other files.

    ``pipeline``: the class that ``model_index.json`` names. ``linked`` and ``copied``: how many of them, ``nbytes``:
    their bytes. ``dtype``: in which the largest of them is stored, as torch calls it. ``left_out``: what is not in the
    output. ``output``: all files of it but this one, links without their SHA-256.
    """

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
