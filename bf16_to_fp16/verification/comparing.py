"""What a report records against what was found again, key by key, up to what another machine's arithmetic may change.

Fp16 runs differ between machines by a few roundings; a claim that is off by more than the tolerances here would mislead
a reader.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint.formats import shown
from ..numerics import FP16_MAX
from ..report.remedies import CONVERT_AGAIN

MAGNITUDE, FAINT = 1 / 8, 2.0**-6
"""Relative difference of a largest |x|, and the size under which none matters, 22 bits from the limit."""

HEADROOM, ROOMY = 0.2, 20.0  # bits by which a headroom may differ, and from which on it does not matter

DISTANCE, NOISE = 2.0, 1e-9  # factor of a KL or an error, and the noise of fp32 logits

SHARE, KEPT_BITS = 0.05, 0.1  # difference of a share of tokens, and of the bits that are kept

EXACT = 1e-9  # relative difference of numbers that are computed from the same others

MAGNITUDES = ("amax", "fp32", "before", "after", "observed")

COUNTS = ("nonfinite", "saturated", "nonfinite_logits")
"""Of which only matters whether there are any: how many differs between kernels."""

DRIFTS = ("predicted_kl", "predicted_max_logit_error", "measured_kl", "measured_max_logit_error", "measured")

DISTANCES = ("kl_bf16", "kl_fp16", "kl_fp32", "squared_error_fp32", "max_logit_error_bf16", "max_logit_error_fp16",
             "error", "error_bf16", *DRIFTS)  # fmt: skip

NAMED_BY = ("module", "side", "kind", "signal", "attention")
"""Keys that tell the entries of a list apart that have no name."""


@dataclass(frozen=True)
class Problem:
    """Something that does not hold: which check found it, at which file or site, why, and what to do."""

    check: str
    name: str
    reason: str
    remedy: str = CONVERT_AGAIN

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.name}: {self.reason}; {self.remedy}"


def near(key: str, said: float, again: float) -> bool:
    """Return whether two numbers are the same under the last part of a key."""
    if math.isnan(said) or math.isnan(again):
        return math.isnan(said) and math.isnan(again)
    if key in COUNTS:
        return (said > 0) == (again > 0)
    low, high = sorted((said, again))
    if key in MAGNITUDES:
        overflowed = low > FP16_MAX
        return overflowed or high - low <= MAGNITUDE * abs(high) or max(abs(low), abs(high)) <= FAINT
    if key == "headroom_bits":
        return high - low <= HEADROOM or low >= ROOMY
    if key in DISTANCES:
        return high <= NOISE or high <= DISTANCE * low
    if key.startswith("top1"):
        return high - low <= SHARE
    if key == "bits":
        return high - low <= KEPT_BITS
    return high == low or high - low <= EXACT * max(abs(low), abs(high))


def differences(said: Any, again: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, recorded, again) of everything that differs: keys by their dotted names, entries of a list by what
    tells them apart, in whatever order they are."""
    if isinstance(said, Mapping) and isinstance(again, Mapping):
        for name in {**again, **said}:
            yield from differences(said.get(name), again.get(name), f"{key}.{name}" if key else str(name))
    elif is_table(said) and is_table(again):
        rows, others = by_name(said), by_name(again)
        for name in {**others, **rows}:
            yield from differences(rows.get(name), others.get(name), f"{key}.{name}")
    elif isinstance(said, (int, float)) and isinstance(again, (int, float)) and type(said) is not bool:
        if not near(key.rpartition(".")[2], said, again):
            yield key, said, again
    elif isinstance(said, (list, tuple)) and isinstance(again, (list, tuple)):
        if list(said) != list(again):
            yield key, said, again
    elif said != again or type(said) is not type(again):
        yield key, said, again


def is_table(value: object) -> bool:
    """Return whether a value is a list of objects, empty ones included."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, Mapping) for v in value)


def by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return rows by what tells them apart; of those that nothing does, by their number as well."""
    result: dict[str, Mapping[str, Any]] = {}
    count: Counter[str] = Counter()
    for row in rows:
        own = row.get("name")
        name = str(own) if own else " ".join(str(row[part]) for part in NAMED_BY if row.get(part) is not None)
        count[name] += 1
        result[name if count[name] == 1 else f"{name} #{count[name]}"] = row
    return result


def compared(check: str, said: Any, again: Any, key: str = "") -> list[Problem]:
    """Return a problem of a check for every key under which a report says something else than what was found."""
    return [
        Problem(check, name, f"the report says {in_words(claim)}, and {in_words(truth)} was found")
        for name, claim, truth in differences(said, again, key)
    ]


def in_words(value: object) -> str:
    """Return a value of a report on one line, cut where it is long."""
    if value is None:
        return "nothing"
    return f"{value:.6g}" if isinstance(value, float) else shown(value)
