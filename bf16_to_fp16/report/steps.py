"""Results of a conversion's steps, from which its report is built: the plan, the written files, the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..bounds.findings import Certificate, SourceBounds
from ..checkpoint.writer import Written
from ..families.layout import Layout
from ..families.places import places
from ..families.signals import ObservationPoint, Side
from ..families.spread import carrying, spread_out
from ..families.wiring import Attention
from ..measuring.fidelity import Outputs
from ..measuring.regime_results import RegimeResult
from ..measuring.soft_side import SoftSide
from ..measuring.source_runs import Observed
from ..ranges import ModuleRange
from ..rescaling.centred import centred_tensors
from ..rescaling.edits import without_edits
from ..rescaling.plan import Plan
from ..rescaling.planner import Planned
from ..results import AttackEntry, Fidelity, InexactEntry, OutputEntry
from . import schema


@dataclass(frozen=True)
class Decided:
    """The plan for a checkpoint and a target (the arithmetic to be safe in), and the data from which it was chosen."""

    layout: Layout
    plan: Plan
    target: str
    planned: Planned | None = None  # None for a replayed plan
    observed: Observed | None = None  # the run of the source without edits, if any
    ranges_edited: Mapping[str, ModuleRange] | None = None  # in the source with edits, if any
    predicted: Mapping[str, float] = field(default_factory=dict)  # the divergence that each edit causes, by signal
    bounds: SourceBounds | None = None  # None for a replayed plan

    @property
    def signals(self) -> list[schema.SignalEntry]:
        if self.observed is None:
            return []
        return signals_of(self.layout, self.plan, self.observed.ranges, self.ranges_edited)


@dataclass(frozen=True)
class Rewritten:
    written: Written
    carried: list[str]
    left_out: list[str]


@dataclass(frozen=True)
class Measured:
    """The bounds of the written files, and the results of running these files."""

    certificate: Certificate
    plan: Plan  # with its measured drift
    tiers: Mapping[str, bool] = field(default_factory=dict)  # whether each tier's certificate holds
    regimes: Mapping[str, RegimeResult] = field(default_factory=dict)
    fidelity: Fidelity | None = None
    half: Outputs = ()  # of the written model in fp16
    environment: Mapping[str, Any] = field(default_factory=dict)
    attack: AttackEntry | None = None
    edits: Sequence[InexactEntry] = ()
    soft: SoftSide | None = None  # inputs that edits harm
    outputs: Mapping[str, OutputEntry] = field(default_factory=dict)  # with errors against the source


def signals_of(
    layout: Layout, plan: Plan, ranges: Mapping[str, ModuleRange], edited: Mapping[str, ModuleRange] | None = None
) -> list[schema.SignalEntry]:
    """Return the largest |x| of each observed signal and of each attention's scores, in the source and after the plan.
    edited: the ranges of the source with edits. The keys and scores of centred attentions are taken from ``edited`` for
    the values after the plan."""
    replaced, exact = centred_tensors(layout, plan.centred_keys), without_edits(layout, plan)
    attentions = [sublayer for sublayer in layout.topology if isinstance(sublayer, Attention)]
    centred = {
        path
        for each in attentions
        if not replaced.keys().isdisjoint((f"{each.key}.bias", each.bias, each.block_bias))
        for path in (each.key, each.at)
        if edited is not None and path in edited
    }
    after_edits = {**ranges, **{path: edited[path] for path in centred if edited is not None}}
    joined = {(p.module, p.side): (signal.name, p) for signal in layout.signals.values() for p in signal.added_at}
    rows, place = [], places(layout)

    def exponents(name: str, point: ObservationPoint) -> torch.Tensor:
        own = exact if point.module in centred else plan
        exponent = torch.as_tensor(own.exponent(name), dtype=torch.float64)
        return point.sign * (spread_out(exponent, point.spread) if exponent.dim() else exponent)

    def entry(module: str, side: Side, kind: str, before: float, after: float) -> schema.SignalEntry:
        where = place(module).to_json()
        return schema.SignalEntry(module=module, **where, side=side, kind=kind, before=before, after=after)

    for signal in layout.signals.values():
        for point in signal.seen:
            module = ranges.get(point.module)
            if module is None:
                continue
            amax, edited_amax = (
                (each.input if point.side == "input" else each.output).amax.double()
                for each in (module, after_edits[point.module])
            )
            total = exponents(signal.name, point)
            if (point.module, point.side) in joined:
                total = total + exponents(*joined[point.module, point.side])
            before, after = (carrying(x, point.spread) for x in (amax, edited_amax * 2.0**total))
            rows.append(entry(point.module, point.side, str(signal.kind), float(before.amax()), float(after.amax())))
    for path in (sublayer.at for sublayer in attentions):
        if path in ranges and (seen := ranges[path].scores) is not None:
            own, scores = exact if path in centred else plan, after_edits[path].scores or seen
            moved = torch.as_tensor(own.exponent(f"{path}.scores"), dtype=torch.float64)
            rows.append(entry(path, "output", "scores", seen.largest, scores.largest * 2.0 ** float(moved.amin())))
    return rows
