"""A regime's result: its sites over all runs, each with its largest value and whether it broke."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field

from ..families.places import places_by_name
from ..numerics import FP16_MAX, FP16_STEP, OVERFLOWED, headroom_bits
from ..ranges import NormRange
from ..results import RegimeEntry, RunEntry, SiteEntry
from .batch import Batch
from .sites import Site

_FP16_RANGE_BITS = math.log2(FP16_MAX / FP16_STEP)


class RegimeResult(RegimeEntry):
    """A regime's report entry, with further results of its run. ``norms``: ranges of norms' inputs, in ``half`` under
    the first attention. ``vectors``: whether a sentence encoder's further modules ran."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    norms: Mapping[str, NormRange] = Field(default_factory=dict, exclude=True)
    vectors: bool = Field(default=False, exclude=True)


def verdict(results: Mapping[str, RegimeEntry]) -> Literal["safe", "unsafe"]:
    return "unsafe" if any(result.broken for result in results.values()) else "safe"


def merge(merged: dict[str, tuple[int, SiteEntry]], sites: Iterable[Site]) -> None:
    """Add ``sites`` to ``merged``, by name. A site that runs in fp16 once and in fp32 once counts as fp16."""
    for site in sites:
        if not site.calls:
            continue
        order = site.order
        result = SiteEntry(
            name=site.name,
            dtype=str(site.dtype).removeprefix("torch."),
            benign=site.reason,
            **{key: getattr(site, key) for key in ("amax", "limit", "headroom_bits", "nonfinite", "saturated")},
        )
        if site.name in merged:
            before, old = merged[site.name]
            shown = old if result.limit is None else result
            amax = max(r.amax for r in (old, result) if (r.limit is None) == (shown.limit is None))
            # If only one of the two broke, its order counts.
            if bool(old.nonfinite) == bool(site.nonfinite):
                order = min(order, before)
            elif old.nonfinite:
                order = before
            both = {
                "amax": amax,
                "headroom_bits": None if shown.limit is None else headroom_bits(amax, shown.limit),
                "nonfinite": old.nonfinite + result.nonfinite,
                "saturated": old.saturated + result.saturated,
                "benign": old.benign or result.benign,
            }
            result = shown.model_copy(update=both)
        merged[site.name] = (order, result)


def run_of(attention: str, batches: Sequence[Batch]) -> RunEntry:
    return RunEntry(attention=attention, batches=len(batches), kinds=list(dict.fromkeys(b.kind for b in batches)))


def regime_result(
    merged: dict[str, tuple[int, SiteEntry]],
    nonfinite_logits: int,
    runs: list[RunEntry],
    norms: Mapping[str, NormRange],
) -> RegimeResult:
    def tightness(item: tuple[int, SiteEntry]) -> tuple[float, int]:
        order, site = item
        bits = math.inf if site.headroom_bits is None else site.headroom_bits
        return (-math.inf if site.nonfinite else bits, order)

    placed = places_by_name(merged)
    ordered = [site for _, site in sorted(merged.values(), key=tightness)]
    limited = [(headroom_bits(site.amax, site.limit), site.amax) for site in ordered if site.limit is not None]
    bits, amax = min(limited, key=lambda pair: pair[0], default=(math.inf, 0.0))
    return RegimeResult(
        nonfinite=sum(site.nonfinite for site in ordered),
        saturated=sum(site.saturated for site in ordered),
        **finite(amax, bits, FP16_MAX),
        nonfinite_logits=nonfinite_logits,
        runs=runs,
        same_as=None,
        sites=[
            s.model_copy(update=placed[s.name].to_json() | finite(s.amax, s.headroom_bits, s.limit)) for s in ordered
        ],
        norms=norms,
    )


def finite(amax: float, bits: float | None, limit: float | None) -> dict[str, Any]:
    """Return a site's numbers, made finite: 65536 for an overflow, at most 40 bits of headroom."""
    if bits is not None:
        bits = math.log2((limit or FP16_MAX) / OVERFLOWED) if bits == -math.inf else min(bits, _FP16_RANGE_BITS)
    return {"amax": amax if math.isfinite(amax) else OVERFLOWED, "headroom_bits": bits}


def beside_fp32(results: dict[str, RegimeResult], run: Callable[[], Mapping[str, float]]) -> dict[str, RegimeResult]:
    """Add the fp32 values of sites that broke. run: returns every site's largest fp32 |x|; called if a site broke."""
    if verdict(results) == "safe":
        return results
    fp32 = run()
    shown = {}
    for regime, result in results.items():
        sites = [
            s.model_copy(update={"fp32": fp32[s.name]}) if s.broken and s.name in fp32 else s for s in result.sites
        ]
        shown[regime] = result.model_copy(update={"sites": sites})
    return shown
