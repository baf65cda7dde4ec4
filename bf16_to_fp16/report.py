"""The report: one JSON object that holds the verdict and all the evidence for it.

Every other view (terminal, page, model card) is made from this object, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .auditing import RegimeResult, broken_sites, verdict
from .certificate import Certificate
from .checkpoint import Checkpoint
from .environment import SCHEMA, environment
from .families.types import RESIDUAL, Layout
from .fidelity import Fidelity
from .observe import ModuleRange
from .planner import ROUNDING, STEP_NOISE, Planned, Violation
from .proof import IMMOVABLE, PENALTY
from .rescaling import Plan, describe
from .writer import INDEX, Written

NOISE = 1e-9
"""Divergences under it are the noise of fp32 logits."""

ALL_BITS = 40.0
"""Bits between fp16's last subnormal and its limit: what a model loses that gives inf or NaN."""

OUTPUT = "the output, against bf16's error"
"""Names the violation of an fp16 output that is less accurate than bf16's."""

PASSED = "no exponent brings it under its limit with the margin"

ONE_ROUNDING = 0.541 * 2.0**-20 / 12
"""Mean squared relative error of rounding to 11 significant bits: (2⁻¹⁰)²/12 times the mean of 1/x² over x in [1, 2),
log-uniform."""

INEXACT = (
    "fp16 is further from the fp32 source than bf16: the limits leave too few bits;"
    " finetune with the activation-magnitude penalty, or try a smaller --margin"
)

NOT_FINITE = "its logits are inf or NaN: something inside overflows; finetune with the activation-magnitude penalty"


def build(
    *,
    checkpoint: Checkpoint,
    layout: Layout,
    plan: Plan,
    planned: Planned | None,
    target: str,
    written: Written,
    regimes: Mapping[str, RegimeResult],
    certificate: Certificate,
    fidelity: Fidelity | None,
    ranges: Mapping[str, ModuleRange] | None,
    inputs: Mapping[str, Any] | None,
    config_changes: Mapping[str, Any],
    carried: Sequence[str],
    left_out: Sequence[str],
    others: Sequence[Mapping[str, Any]] = (),
    command: str,
) -> dict[str, Any]:
    """Return the report of a conversion as JSON data; its keys are described in the README.

    others: records of the files in the output besides its weights, as ``folder.records`` returns them.
    """
    short = [*(planned.violations if planned else ()), *(too_inexact(fidelity) if fidelity else ())]
    half = regimes.get("half")
    seen = {site.name: site.amax for site in half.sites} if half is not None else {}
    cost = None if planned is None or ranges is None else bits_lost(planned, layout)
    return {
        "schema": SCHEMA,
        "verdict": conclude(regimes, short, plan, certificate),
        "proof": "certified" if certificate.holds else "observed",
        "family": layout.family.name,
        "target": target,
        "source": source_of(checkpoint, layout, written, config_changes, carried, left_out),
        "output": {"files": [*(asdict(f) for f in written.files), *others]},
        "inputs": inputs,
        "regimes": {name: result.to_json() for name, result in regimes.items()},
        "certificate": certificate.to_json(seen) | {"cost_bits": cost},
        "uncertified": unproven(layout, certificate, planned),
        "fidelity": fidelity.to_json() if fidelity else None,
        "weights": weights_of(layout, written),
        "plan": describe(plan),
        "signals": signals_of(layout, plan, ranges) if ranges is not None else [],
        "precision": precision_of(layout, plan, ranges) if ranges is not None else [],
        "unsafe": [*(asdict(v) | {"reason": PASSED} for v in short), *broken_sites(regimes, converted=True)],
        "command": command,
        "environment": environment(),
    }


def conclude(
    regimes: Mapping[str, RegimeResult], violations: Sequence[Violation], plan: Plan, certificate: Certificate
) -> str:
    """Return "safe" if the regimes are, and nothing passes its limit by more than the margin that was asked for.

    Without regimes nothing was run, and the certificate alone decides.
    """
    if not regimes:
        return "safe" if certificate.holds else "unsafe"
    margin = plan.margin_bits or 0.0
    passed = any(v.signal == OUTPUT or v.excess_bits > margin for v in violations)
    return "unsafe" if passed else verdict(regimes)


def bits_lost(planned: Planned, layout: Layout) -> float:
    """Return the bits of precision that holding the bounds costs: half the logarithm of how much the predicted squared
    error grows, over one unavoidable rounding for each norm."""
    base = ROUNDING * max(1, len(layout.norms))
    return 0.5 * math.log2((base + planned.cost) / (base + planned.cost - planned.cost_of_proof))


def unproven(layout: Layout, certificate: Certificate, planned: Planned | None) -> list[dict[str, Any]]:
    """Return the sites whose bound passes its limit, the worst first, each with the reason and the remedy."""
    fallbacks = {f.signal: f for f in planned.fallbacks} if planned else {}
    of_module = {
        sighting.module: signal.name for signal in layout.signals.values() for sighting in signal.seen
    }  # fmt: skip
    rows = []
    for site in sorted(certificate.sites, key=lambda s: s.headroom_bits):
        if site.holds:
            continue
        name = RESIDUAL if site.kind in ("residual", "squares") else of_module.get(site.name.partition(":")[0], "")
        fallback = fallbacks.get(name)
        if site.kind in IMMOVABLE:
            reason, remedy = "no exponent moves it", PENALTY
        elif fallback is not None and not fallback.impossible:
            reason = (
                "holding it for every input would push weights or signals under fp16's smallest numbers"
                f" (predicted squared error {fallback.cost_certified:.1e} instead of {fallback.cost_observed:.1e})"
            )
            remedy = "its observed range with margin decides; finetune with the penalty to prove it as well"
        else:
            reason, remedy = "its bound is over the limit at every exponent", PENALTY
        rows.append(
            {
                "name": site.name,
                "bound": site.largest,
                "limit": site.limit,
                "excess_bits": -site.headroom_bits,
                "reason": reason,
                "remedy": remedy,
            }
        )
    return rows


def precision_of(layout: Layout, plan: Plan, ranges: Mapping[str, ModuleRange]) -> list[dict[str, Any]]:
    """Return how many significant bits the residual stream keeps where each norm reads it.

    fp16 has 11. A channel that falls under 2⁻¹⁴ keeps fewer; the channels count by their mean square.
    """
    rows = []
    for path in layout.norms:
        module = ranges.get(path)
        if module is None:
            continue
        square = module.input.mean_square.double() * 4.0**plan.residual_exponent
        noise = STEP_NOISE * square.numel() / max(float(square.sum()), 1e-300)
        rows.append({"module": path, "bits": 11 - 0.5 * math.log2(1 + noise / ONE_ROUNDING)})
    return rows


def too_inexact(fidelity: Fidelity) -> list[Violation]:
    """Return a violation if fp16 is further from the fp32 source than bf16 is: then too much has become too small.

    A stream shrunk until nothing of it is left passes every check for overflow.
    """
    bf16, fp16 = fidelity.kl_bf16, fidelity.kl_fp16
    if bf16 is None or not math.isfinite(bf16) or fp16 <= max(bf16, NOISE):
        return []
    lost = math.log2(fp16 / max(bf16, NOISE)) / 2 if math.isfinite(fp16) else ALL_BITS
    return [Violation(OUTPUT, lost, INEXACT if math.isfinite(fp16) else NOT_FINITE)]


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
        "path": checkpoint.name,
        "revision": checkpoint.revision,
        "sha256": written.source_sha256,
        "other_sha256": other_sha256(checkpoint, carried),
        "dtype": main,
        "dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != main},
        "made": sorted(set(made)),
        "dropped": dict(layout.dropped),
        "config_changes": config_changes,
        "carried_over": list(carried),
        "left_out": list(left_out),
    }


def other_sha256(checkpoint: Checkpoint, carried: Sequence[str] = ()) -> dict[str, str]:
    """Return the SHA-256 of the source's files besides its weights: config, index, and what was carried over."""
    names = {"config.json", INDEX, *carried}
    found = {}
    for name in sorted(names):
        path = checkpoint.folder / name
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in inside:
            if file.is_file():
                found[str(file.relative_to(checkpoint.folder))] = checkpoint.sha256(file)
    return found


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
