"""An audit's result for one regime (a way to use fp16): each site's largest value and overflows over all runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from pydantic import ConfigDict, Field

from ..families.places import places_by_name
from ..numerics import FP16_MAX, FP16_STEP, OVERFLOWED, headroom_bits
from ..ranges import NormRange
from ..results import RegimeEntry, RunEntry, SiteEntry
from .batch import Batch
from .sites import Site, sites_of_all

_FP16_RANGE_BITS = math.log2(FP16_MAX / FP16_STEP)


class RegimeResult(RegimeEntry):
    """The report's entry on a regime, with further results that the report leaves out."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    norms: Mapping[str, NormRange] = Field(default_factory=dict, exclude=True)  # of ``half``'s first attention
    vectors: bool = Field(default=False, exclude=True)  # whether the checkpoint makes sentence vectors


def verdict(results: Mapping[str, RegimeEntry]) -> Literal["safe", "unsafe"]:
    return "unsafe" if any(result.broken for result in results.values()) else "safe"


@dataclass(frozen=True)
class Run:
    """The runs of a regime under one attention implementation. ``sites`` has a list for each batch of ``inputs``."""

    attention: str
    inputs: Sequence[Batch]
    sites: Sequence[Sequence[Site]]
    nonfinite_logits: int

    @property
    def entry(self) -> RunEntry:
        kinds = list(dict.fromkeys(batch.kind for batch in self.inputs))
        return RunEntry(attention=self.attention, batches=len(self.inputs), kinds=kinds)


@dataclass(frozen=True)
class _Merged:
    """The measurements of all sites with one name. A site that ran in fp16 once and in fp32 once counts as fp16."""

    sites: Sequence[Site]

    @property
    def largest(self) -> Site:
        return max([site for site in self.sites if site.limit is not None] or self.sites, key=lambda site: site.amax)

    @property
    def tightness(self) -> tuple[float, int]:
        broken, bits = [site.order for site in self.sites if site.nonfinite], self.largest.headroom_bits
        first = min(broken or [site.order for site in self.sites])
        return -math.inf if broken else math.inf if bits is None else bits, first

    def entry(self, place: Mapping[str, Any]) -> SiteEntry:
        largest = self.largest
        return SiteEntry(
            name=largest.name,
            dtype=str(largest.dtype).removeprefix("torch."),
            limit=largest.limit,
            nonfinite=sum(site.nonfinite for site in self.sites),
            saturated=sum(site.saturated for site in self.sites),
            benign=next((site.reason for site in self.sites if site.reason), None),
            **finite(largest.amax, largest.headroom_bits, largest.limit),
            **place,
        )


def regime_result(runs: Sequence[Run], norms: Mapping[str, NormRange], known: Iterable[Site] = ()) -> RegimeResult:
    """Return the result of a regime (a way of running), with the sites nearest to their limits first. norms: the ranges
    of norms' inputs, by path. known: sites added without a run, one for each weight that has inf or NaN."""
    by_name: dict[str, list[Site]] = {}
    for site in chain(known, *(sites_of_all(run.sites) for run in runs)):
        if site.calls:
            by_name.setdefault(site.name, []).append(site)
    merged, place = sorted(map(_Merged, by_name.values()), key=lambda each: each.tightness), places_by_name(by_name)
    sites = [each.entry(place[each.largest.name].to_json()) for each in merged]
    limited = [each.largest for each in merged if each.largest.limit is not None]
    bits, amax = min(((headroom_bits(s.amax, s.limit or FP16_MAX), s.amax) for s in limited), default=(math.inf, 0.0))
    return RegimeResult(
        nonfinite=sum(site.nonfinite for site in sites),
        saturated=sum(site.saturated for site in sites),
        **finite(amax, bits, FP16_MAX),
        nonfinite_logits=sum(run.nonfinite_logits for run in runs),
        runs=[run.entry for run in runs],
        sites=sites,
        norms=norms,
    )


def finite(amax: float, bits: float | None, limit: float | None) -> dict[str, Any]:
    """Return ``amax`` and ``headroom_bits``, made finite: an overflow is 65536, and headroom at most 40 bits."""
    if bits is not None:
        bits = math.log2((limit or FP16_MAX) / OVERFLOWED) if bits == -math.inf else min(bits, _FP16_RANGE_BITS)
    return {"amax": amax if math.isfinite(amax) else OVERFLOWED, "headroom_bits": bits}


def beside_fp32(results: dict[str, RegimeResult], run: Callable[[], Mapping[str, float]]) -> dict[str, RegimeResult]:
    """Return the results with fp32's largest |x| added to each site that overflowed. run: returns these values of all
    sites, by name. It is called only if a site overflowed."""
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
