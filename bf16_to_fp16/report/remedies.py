"""The reasons and remedies of a report: why a site is unsafe or has no proof, and how to mend it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePath
from typing import Any

from ..bounds.kinds import traits
from ..checkpoint.sources import SHIPPED
from ..families.known import named
from ..numerics import FP16_MAX, OVERFLOWED
from ..results import AttackEntry, BoundEntry, CertificateEntry, ExceptionEntry, RegimeEntry
from ..targets import AUTO, TIERS
from ..wording import counted, listed, reached, scientific
from .schema import Report, UnprovenEntry, UnsafeEntry

MASKED = ":masked"  # ending of sites for the least value that a mask must add
OUTPUT = "the output, against bf16's error"  # signal of the entry for an fp16 output less accurate than bf16's
TEXT = "TEXT.txt"  # stands for the user's own text
FINETUNE = "finetune with the activation-magnitude penalty"
CONVERT = "bf16-to-fp16 convert rescales what can be rescaled"
PENALTY = f"rescaling was not enough; {FINETUNE}"
EDITED_BY_CONVERT = "bf16-to-fp16 convert lowers the bound by an edit, if the edit changes outputs less than bf16 does"
NOT_CONVERTED = f"{CONVERT}; a finetune lowers the rest"
STAY = "stay with bf16 (fp32 on a card without it)"
NO_FAMILY = f"{STAY}, or finetune it with ActivationPenalty in a loop of your own"
OBSERVED = (
    "the plan keeps only observed values under the limit; to try for a proof, plan by bounds alone (convert --no-audit)"
    " and convert again by the new plan (convert --plan), or finetune with penalty.certify: true"
)
TOO_FEW_BITS = "fp16 is further from the fp32 source than bf16: the limits leave too few bits"
INEXACT = f"{FINETUNE}, try a smaller --margin, or accept it with --max-kl"
NOT_FINITE = "the output is inf or NaN, since something inside overflows"
SOMETHING_INSIDE = f"{FINETUNE}, which brings down what overflows inside"
PASSED = "no exponent brings it under its limit with the margin"
OVER = "its bound is over the limit with these weights"
SQUARES_UNSEEN = "no value overflows; only an audit in the regime half shows whether squares in a norm underflow"
UNMOVED = "rescaling cannot lower it without an edit, and no edit was made that lowers it enough"
NOTHING_MOVES = "rescaling cannot lower it without an edit"
TOO_COSTLY = "keeping it under the limit for every input would push weights or signals under fp16's smallest numbers"
OVER_AT_EVERY_EXPONENT = "its bound is over the limit at every exponent"
CONVERT_AGAIN = "fetch it again, or convert the source again"
REMOVE = "remove it, or keep it elsewhere"
RIGHT_REVISION = "give --original the source that the report names, at its revision"
UNSAFE_BY_REPORT = f"finetune it, or {STAY}"
SHORT = "use the checkpoint as it is, or make it again with a lower goal"
TOWER_ALONE = "only the vision tower overflows"


def sinks(least: float) -> str:
    return f"the mean square of a token in the stream falls to {least:.2g}, where fp16 squares vanish"


def swells(most: float) -> str:
    return f"the squares of a token in the stream sum to {most:.2g}, which fp16 cannot hold"


ANOTHER_FUNCTION = "every weight was carried over exactly, yet the model's output in fp32 differs from the source's"
A_BUG = "do not use it: this is a mistake of this program; report it with the config and fp16_report.json"
OTHER_OUTPUT = "in fp32, divided by its factor, it differs from the source's output by more than bf16's rounding does"
INEXACT_BY_BOUNDS = "leave out --no-audit: what is observed asks for less shrinking than the bounds do"
EDITED = "fp16 is further from the fp32 source than bf16: the edits cost too much"
ACCEPT = f"{FINETUNE}, or accept it with --max-kl"
IN_PYTORCH = "use it in PyTorch, where it is safe, or keep norms in fp32 in the other runtime"


def described(rare: ExceptionEntry) -> str:
    tokens = [f" {token!r}" for token in rare.tokens]
    names = [f"{i}{token}" for i, token in zip_longest(rare.ids, tokens, fillvalue="")]
    return f"{'token' if len(rare.ids) == 1 else 'tokens'} {listed(names)}"


def prices(rare: ExceptionEntry) -> str:
    return f"KL {scientific(rare.kl)}, bf16 {scientific(rare.kl_bf16)}"


def tower_in_fp32(family: str | None, regimes: Mapping[str, RegimeEntry]) -> list[str]:
    """Return lines of Python that put a vision tower and its projector in fp32, if only the tower overflows. Return []
    otherwise, or if the only regime run was ``amp``."""
    known = named(family)
    projector = None if known is None else known.projector
    broken = [site for regime in regimes.values() for site in regime.broken_sites]
    over = [f".{site.name}" for site in broken if site.limit and site.fp32 and site.fp32 > site.limit]
    if projector is None or not over or {*regimes} == {"amp"}:
        return []
    if not all(f".{projector.tower}." in name for name in over):
        return []
    prefix = over[0][1 : over[0].index(f".{projector.tower}.") + 1]
    paths = [projector.tower] + [projector.at] * (not projector.at.startswith(f"{projector.tower}."))
    return [f'model.get_submodule("{prefix}{path}").float()' for path in paths]


def tower_alone(family: str | None, regimes: Mapping[str, RegimeEntry]) -> str:
    lines = "; ".join(tower_in_fp32(family, regimes))
    return f"{TOWER_ALONE}, which rescaling cannot mend; load the model in fp16, then: {lines}" if lines else ""


def unsafe_sites(
    regimes: Mapping[str, RegimeEntry], family: str | None = None, *, converted: bool = False, convertible: bool = True
) -> list[UnsafeEntry]:
    """Return an entry, with reason and remedy, for each site that broke in a regime (a way of running in fp16).
    converted: whether the weights are already rescaled. convertible: whether the model is of a known family."""
    broken = {name: {site.name: site for site in regime.broken_sites} for name, regime in regimes.items()}
    clean = " or ".join(name for name, sites in broken.items() if not sites)
    remedy = NO_FAMILY if not convertible else PENALTY if converted else NOT_CONVERTED
    if clean and (converted or not convertible):
        remedy += f", or use {clean}, which is clean"
    remedy = tower_alone(family, regimes) or remedy
    rows = []
    for signal in dict.fromkeys(signal for sites in broken.values() for signal in sites):
        where = {name: sites[signal] for name, sites in broken.items() if signal in sites}
        nonfinite, saturated = (max(getattr(s, key) for s in where.values()) for key in ("nonfinite", "saturated"))
        counts = ", ".join(
            f"{count:,} {kind}" for count, kind in ((nonfinite, "inf/NaN"), (saturated, "saturated")) if count
        )
        # A mask's site counts the masked positions that keep a weight.
        reason = f"{saturated:,} masked positions keep an attention weight" if signal.endswith(MASKED) else counts
        # What overflowed was at least 65536.
        excess = [
            -math.log2(FP16_MAX / OVERFLOWED) if s.headroom_bits is None or s.amax == OVERFLOWED else -s.headroom_bits
            for s in where.values()
        ]
        rows.append(
            UnsafeEntry(
                signal=signal,
                kind="broke",
                regimes=list(where),
                nonfinite=nonfinite,
                saturated=saturated,
                excess_bits=max(0.0, *excess),
                reason=f"{reason} in {', '.join(where)}",
                remedy=remedy,
            )
        )
    return rows


def overflowing(attack: AttackEntry, *, converted: bool = True) -> list[UnsafeEntry]:
    """Return an entry for each site that an attack (a search for bad inputs) drove over its limit, worst first. If some
    of them exceed their limits in fp32 too, only those are returned: the others overflow because of them. converted:
    whether the weights are already rescaled."""
    past = [site for site in attack.sites if site.headroom_bits < 0]
    first = [site for site in past if site.fp32 > site.limit]
    steps = counted(attack.steps, "gradient step")
    return [
        UnsafeEntry(
            signal=site.name,
            kind="found",
            excess_bits=math.log2(max(site.limit, site.fp32) / site.limit),
            reason=f"{reached(site.fp32)} on an input that {steps} of search found",
            remedy=PENALTY if converted else NOT_CONVERTED,
        )
        for site in first or past
    ]


def over_limits(certificate: CertificateEntry, *, converted: bool = False) -> list[UnprovenEntry]:
    def why(kind: str) -> tuple[str, str]:
        reason, remedy = (OVER, CONVERT) if traits(kind).movable else (NOTHING_MOVES, EDITED_BY_CONVERT)
        return reason, PENALTY if converted else remedy

    return [unproven(site, *why(site.kind)) for site in certificate.over]


def unproven(site: BoundEntry, reason: str, remedy: str) -> UnprovenEntry:
    return UnprovenEntry(
        name=site.name,
        bound=site.largest,
        limit=site.limit,
        excess_bits=-site.headroom_bits,
        reason=reason,
        remedy=remedy,
    )


def with_next(report: Report, missed: Sequence[UnsafeEntry], remedy: str) -> Report:
    def helped(told: str) -> str:
        return remedy if FINETUNE in told else told

    finetune = report.finetune.model_copy(update={"next": remedy}) if report.finetune is not None else None
    unsafe = [
        *(entry.model_copy(update={"remedy": helped(entry.remedy)}) for entry in report.unsafe),
        *(entry.model_copy(update={"remedy": remedy}) for entry in missed),
    ]
    uncertified = [entry.model_copy(update={"remedy": helped(entry.remedy)}) for entry in report.uncertified]
    changed = {"verdict": "unsafe", "finetune": finetune, "unsafe": unsafe, "uncertified": uncertified, "next": remedy}
    return report.model_copy(update=changed)


def next_command(
    source: str,
    regimes: Mapping[str, RegimeEntry],
    converted: bool,
    subfolder: str | None = None,
    target: str | None = None,
    family: str | None = None,
) -> str:
    if alone := tower_alone(family, regimes):
        return alone
    moved_on = target if target != TIERS[0].target else None
    if converted:
        again = f"convert its source with --target {target}, " if moved_on else ""
        return again + finetuning_of(source, f"{source}-finetuned", regimes, target, subfolder)
    out = f"{PurePath(source.removeprefix(SHIPPED).partition('@')[0]).name}-fp16"
    words = ["bf16-to-fp16", "convert", source, out]
    for flag, value in (("--subfolder", subfolder), ("--target", moved_on)):
        words += [flag, value] if value else []
    return f"convert it: {shlex.join(words)}"


def finetuning_of(
    source: str, out: str, regimes: Mapping[str, RegimeEntry], target: str | None, subfolder: str | None
) -> str:
    """Return a sentence with two remedies. The first needs no training: a regime (a way of using fp16) in which nothing
    broke, or bf16. The second is a minimal finetune, with the commands for it. out: the folder for the finetune's
    result. regimes: the audit's results, by regime; {} if no audit ran."""
    recipe: dict[str, Any] = {"source": source, "out": out, "data": {"path": TEXT}}
    if target not in (None, AUTO, TIERS[0].target):
        recipe["target"] = target
    if subfolder is not None:
        recipe["subfolder"] = subfolder
    if not regimes:
        recipe["penalty"] = {"certify": True}
    # JSON is valid YAML, with any name in it.
    written = f"echo {shlex.quote(json.dumps(recipe, ensure_ascii=False))} > recipe.yaml"
    clean = [name for name, regime in regimes.items() if not regime.broken]
    otherwise = f"use {listed(clean)}, where nothing broke" if 0 < len(clean) < len(regimes) else STAY
    return f"{otherwise}, or finetune it on plain text, here {TEXT}: {written} && bf16-to-fp16 finetune recipe.yaml"
