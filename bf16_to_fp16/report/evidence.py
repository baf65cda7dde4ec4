"""What a report is built from: the frozen values that the steps of a conversion return, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..auditing.attack import Attack
from ..auditing.fidelity import Fidelity, Outputs, Reference
from ..auditing.regimes import RegimeResult
from ..bounds.findings import Certificate
from ..checkpoint.writer import Written
from ..families.layout import Layout
from ..ranges import ModuleRange
from ..rescaling.plan import Plan
from ..rescaling.planner import Planned


@dataclass(frozen=True)
class Decided:
    """What will be done: the plan, for a layout with its head tied or apart, and what it was chosen from. target: that
    the plan holds, never "auto". planned: None where a stored plan is replayed. ranges: what was observed, None where
    nothing was. reference: the source's outputs, where it was run."""

    layout: Layout
    plan: Plan
    target: str
    planned: Planned | None = None
    ranges: Mapping[str, ModuleRange] | None = None
    reference: Reference | None = None


@dataclass(frozen=True)
class Rewritten:
    """What was written: the weights, and the names of the other files of the source, carried over or left out.
    side_dtypes: what the tensors of a sentence encoder's other modules were in."""

    written: Written
    carried: list[str]
    left_out: list[str]
    side_dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What the written files are: bounded, run in every regime, and compared with the source (where anything runs).
    plan: with the drift's predicted and measured figures. tiers: by name whether the certificate of each holds. half:
    the outputs of the written model in fp16. environment: what it was all made with. attack: what a search found, where
    one was made."""

    certificate: Certificate
    plan: Plan
    tiers: Mapping[str, bool] = field(default_factory=dict)
    regimes: Mapping[str, RegimeResult] = field(default_factory=dict)
    fidelity: Fidelity | None = None
    half: Outputs = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    attack: Attack | None = None
