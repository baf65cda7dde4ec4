"""What a report is built from: the frozen values that the steps of a conversion return, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..auditing.fidelity import Fidelity
from ..auditing.regimes import RegimeResult
from ..bounds.certificate import Certificate
from ..checkpoint.writer import Written
from ..families.types import Layout
from ..ranges import ModuleRange
from ..rescaling.plan import Plan
from ..rescaling.planner import Planned


@dataclass(frozen=True)
class Decided:
    """What will be done: the plan, for a layout with its head tied or apart, and what it was chosen from.

    planned: None where a stored plan is replayed. ranges: what was observed, None where nothing was.
    """

    layout: Layout
    plan: Plan
    planned: Planned | None = None
    ranges: Mapping[str, ModuleRange] | None = None


@dataclass(frozen=True)
class Rewritten:
    """What was written: the weights, and the names of the other files of the source, carried over or left out."""

    written: Written
    carried: list[str]
    left_out: list[str]


@dataclass(frozen=True)
class Measured:
    """What the written files are: bounded, run in every regime, and compared with the source (where anything runs).

    plan: with the drift's predicted and measured figures.
    """

    certificate: Certificate
    plan: Plan
    regimes: Mapping[str, RegimeResult] = field(default_factory=dict)
    fidelity: Fidelity | None = None
