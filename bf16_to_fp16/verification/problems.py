"""What a check of a converted checkpoint finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something that does not hold: which check found it, at which file or site, why, and what to do."""

    check: str
    name: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.name}: {self.reason}; {self.remedy}"
