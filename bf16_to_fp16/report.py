"""The report: one JSON object that holds the verdict and all the evidence for it.

Every other view (terminal, page, model card) is made from this object, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .auditing import RegimeResult, verdict
from .checkpoint import Checkpoint
from .environment import SCHEMA, environment
from .families.types import Layout
from .fidelity import Fidelity
from .observe import ModuleRange
from .planner import Violation
from .rescaling import Plan, describe
from .writer import Written

NOISE = 1e-9
"""Divergences under it are the noise of fp32 logits."""

OUTPUT = "the output, against bf16's error"
"""Names the violation of an fp16 output that is less accurate than bf16's."""

INEXACT = (
    "fp16 is further from the fp32 source than bf16: the limits leave too few bits;"
    " finetune with the activation-magnitude penalty, or try a smaller --margin"
)


def build(
    *,
    checkpoint: Checkpoint,
    layout: Layout,
    plan: Plan,
    written: Written,
    regimes: Mapping[str, RegimeResult],
    fidelity: Fidelity,
    violations: Sequence[Violation],
    ranges: Mapping[str, ModuleRange] | None,
    config_changes: Mapping[str, Any],
    carried: Sequence[str],
    left_out: Sequence[str],
    command: str | None,
) -> dict[str, Any]:
    """Return the report of a conversion as JSON data; its keys are described in the README."""
    short = [*violations, *too_inexact(fidelity)]
    return {
        "schema": SCHEMA,
        "verdict": conclude(regimes, short, plan),
        "proof": "observed",
        "family": layout.family.name,
        "source": source_of(checkpoint, layout, written, config_changes, carried, left_out),
        "output": {"files": [asdict(f) for f in written.files]},
        "regimes": {name: result.to_json() for name, result in regimes.items()},
        "fidelity": fidelity.to_json(),
        "weights": weights_of(layout, written),
        "plan": describe(plan),
        "signals": signals_of(layout, plan, ranges) if ranges is not None else [],
        "unsafe": [asdict(v) for v in short],
        "command": command or f"bf16_to_fp16.convert({checkpoint.source!r}, ...)",
        "environment": environment(),
    }


def conclude(regimes: Mapping[str, RegimeResult], violations: Sequence[Violation], plan: Plan) -> str:
    """Return "safe" if the regimes are, and nothing passes its limit by more than the margin that was asked for."""
    margin = plan.margin_bits or 0.0
    passed = any(v.signal == OUTPUT or v.excess_bits > margin for v in violations)
    return "unsafe" if passed else verdict(regimes)


def too_inexact(fidelity: Fidelity) -> list[Violation]:
    """Return a violation if fp16 is further from the fp32 source than bf16 is: then too much has become too small.

    A stream shrunk until nothing of it is left passes every check for overflow.
    """
    bf16, fp16 = fidelity.kl_bf16, fidelity.kl_fp16
    if bf16 is None or not math.isfinite(bf16) or fp16 <= max(bf16, NOISE):
        return []
    lost = math.log2(fp16 / max(bf16, NOISE)) / 2 if math.isfinite(fp16) else math.inf
    return [Violation(OUTPUT, lost, INEXACT)]


def source_of(
    checkpoint: Checkpoint,
    layout: Layout,
    written: Written,
    config_changes: Mapping[str, Any],
    carried: Sequence[str],
    left_out: Sequence[str],
) -> dict[str, Any]:
    """Return where the weights came from and what ``undo`` needs to bring them back."""
    dtypes = {t.name: checkpoint.tensors[t.source].dtype for t in layout.tensors.values() if t.source is not None}
    main = max(sorted(set(dtypes.values())), key=list(dtypes.values()).count)
    made = [
        t.name for t in layout.tensors.values() if t.source is None or t.source not in (t.name, *layout.family.copies)
    ]
    if layout.tied is False and layout.family.head in made:
        made += [name for name in layout.family.copies if name in layout.tensors]
    return {
        "path": checkpoint.source,
        "revision": checkpoint.revision,
        "sha256": written.source_sha256,
        "dtype": main,
        "dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != main},
        "made": sorted(set(made)),
        "dropped": dict(layout.dropped),
        "config_changes": config_changes,
        "carried_over": list(carried),
        "left_out": list(left_out),
    }


def weights_of(layout: Layout, written: Written) -> dict[str, Any]:
    """Return how the weights came through, counted over the tensors that the source stores."""
    stats = [s for name, s in written.stats.items() if layout.tensors[name].source is not None]
    elements, nonzero = sum(s.elements for s in stats), sum(s.nonzero for s in stats)
    return {
        "elements": elements,
        "lossless_fraction": sum(s.lossless for s in stats) / max(1, elements),
        "normal_fraction": sum(s.normal for s in stats) / max(1, nonzero),
        "flushed_to_zero": sum(s.flushed_to_zero for s in stats),
        "nonfinite": sum(s.nonfinite for s in stats),
        "amax": max((s.amax for s in written.stats.values()), default=0.0),
    }


def signals_of(layout: Layout, plan: Plan, ranges: Mapping[str, ModuleRange]) -> list[dict[str, Any]]:
    """Return for every observed signal what it reached in the source and what it reaches after the plan."""
    rows = []
    for signal in layout.signals.values():
        exponent = torch.as_tensor(plan.exponent(signal.name), dtype=torch.float64)
        for sighting in signal.seen:
            module = ranges.get(sighting.module)
            if module is not None:
                amax = (module.input if sighting.side == "input" else module.output).amax.double()
                rows.append(
                    {
                        "module": sighting.module,
                        "side": sighting.side,
                        "kind": str(signal.kind),
                        "before": float(amax.amax()),
                        "after": float((amax * 2.0 ** (sighting.sign * exponent)).amax()),
                    }
                )
    return rows
