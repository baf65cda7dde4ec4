"""Compare a section of a report with the same section computed again, within the rounding of another machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..bounds.spectral import CARRIED
from ..numerics import FP16_MAX

MAGNITUDES = ("amax", "fp32", "before", "after", "observed")
COUNTS = ("nonfinite", "saturated", "nonfinite_logits")
BOUNDS = ("bound", "partial")
DISTANCES = ("kl_bf16", "kl_fp16", "kl_fp32", "squared_error_fp32", "max_logit_error_bf16", "max_logit_error_fp16",
             "error", "error_bf16", "measured", "predicted_kl", "predicted_max_logit_error", "measured_kl",
             "measured_max_logit_error")  # fmt: skip
NAMED_BY = ("name", "module", "side", "kind", "signal", "attention")


def near(key: str, said: float, again: float) -> bool:
    """Return whether two numbers agree within their key's tolerance, 1e-9 by default."""
    if math.isnan(said) or math.isnan(again):
        return math.isnan(said) and math.isnan(again)
    said, again = (max(-1e300, min(value, 1e300)) for value in (said, again))  # JSON has no infinity
    low, high = sorted((said, again))
    if key in COUNTS:  # kernels differ in the number of elements that overflow
        return (said > 0) == (again > 0)
    if key in BOUNDS:  # reused eigenvalues loosen a bound by CARRIED; rounding the matrix doubles that
        return again * (1 - 1e-3) <= said <= again * (1 + 4 * CARRIED + 1e-3)
    if key in MAGNITUDES:  # 2^-6 is 22 bits under the limit
        return low > FP16_MAX or high - low <= abs(high) / 8 or max(abs(low), abs(high)) <= 2.0**-6
    if key == "headroom_bits":
        return high - low <= 0.2 or low >= 20
    if key in DISTANCES:  # 1e-9 is the noise of fp32 logits
        return high <= 1e-9 or high <= 2 * low
    return high - low <= {"top1_bf16": 0.05, "top1_fp16": 0.05}.get(key, 1e-9 * max(abs(low), abs(high)))


def differences(said: Any, again: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, reason) of every difference. Rows of tables are matched by name."""
    if is_table(said) and is_table(again):
        said, again = by_name(said), by_name(again)
    if isinstance(said, Mapping) and isinstance(again, Mapping):
        for name in {**again, **said}:
            yield from differences(said.get(name), again.get(name), f"{key}.{name}")
        return
    number = all(isinstance(value, (int, float)) and type(value) is not bool for value in (said, again))
    same = near(key.rpartition(".")[2], said, again) if number else said == again and type(said) is type(again)
    if not same:
        yield key, f"the report says {said!r}, and {again!r} was computed"


def is_table(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, Mapping) for v in value)


def by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for row in rows:
        name = str(row.get("name") or " ".join(str(row[part]) for part in NAMED_BY if row.get(part) is not None))
        named[name if name not in named else f"{name} #{len(named)}"] = row
    return named
