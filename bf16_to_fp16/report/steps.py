"""What the steps of a conversion hand to its report: the decision, the written files, the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..bounds.findings import Certificate, SourceBounds
from ..checkpoint.writer import Written
from ..families.layout import Layout
from ..measuring.fidelity import Outputs
from ..measuring.observing import Observed
from ..measuring.regime_results import RegimeResult
from ..measuring.soft_side import SoftSide
from ..ranges import ModuleRange
from ..rescaling.plan import Plan
from ..rescaling.planner import Planned
from ..results import AttackEntry, Fidelity, InexactEntry, OutputEntry
from . import schema
from .signal_entries import signals_of


@dataclass(frozen=True)
class Decided:
    """The plan for one layout (head tied or separated) and target, and its grounds. planned, bounds: None for a
    replayed plan. observed: of the source without edits; None where nothing ran. ranges_edited: of the edited source,
    where there are edits. predicted: the divergence of each edit, by signal. notes: for the user, what was given up."""

    layout: Layout
    plan: Plan
    target: str
    planned: Planned | None = None
    observed: Observed | None = None
    ranges_edited: Mapping[str, ModuleRange] | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bounds: SourceBounds | None = None

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
    """The bounds and runs of the written files. plan: with the drift's predicted and measured figures. tiers: whether
    each tier's certificate holds. half: outputs of the written model in fp16. soft: inputs that ``edits`` harm.
    outputs: each output's error against the source."""

    certificate: Certificate
    plan: Plan
    tiers: Mapping[str, bool] = field(default_factory=dict)
    regimes: Mapping[str, RegimeResult] = field(default_factory=dict)
    fidelity: Fidelity | None = None
    half: Outputs = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    attack: AttackEntry | None = None
    edits: Sequence[InexactEntry] = ()
    soft: SoftSide | None = None
    outputs: Mapping[str, OutputEntry] = field(default_factory=dict)
