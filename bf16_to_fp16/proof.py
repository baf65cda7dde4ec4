"""The certificate in words and tables: what it covers, its tightest sites, those it does not prove; and precision.

Made from the report's dict alone, for terminal, page and card. A bracket is [worst found, bound, limit]; what was found
comes from the probe, and from a gradient search where an attack ran.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .display import counted, infinite, tightness

TIGHTEST = 8
"""Sites of the certificate named below its picture."""

MOST_UNCERTIFIED = 400
"""Sites without a proof that a page lists, the worst; the report has all."""

UNCERTIFIED_SHOWN = 12
"""Of them, those that a page shows at once; the others unfold."""

OVER = "its bound is over the limit with these weights"

PENALTY = "rescaling cannot lower it; finetune with the activation-magnitude penalty"

IMMOVABLE = ("scores", "gate", "activation", "logits", "position bias")
"""Kinds of site that no coupling reaches."""

BF16_BITS = 8
"""Significant bits of bf16, under which a conversion would have lost what the source had."""

_BLOCK = re.compile(r"(?:^|\.)(?:block|layers)\.(\d+)\.")
_STACK = re.compile(r"(?:^|\.)(encoder|decoder)\.")
_NORMS = {2: ("attention", "feed-forward"), 3: ("self-attention", "cross-attention", "feed-forward")}


def is_proven(report: Mapping[str, Any]) -> bool:
    """Return whether the report holds a certificate that no input can pass."""
    certificate = report.get("certificate")
    return bool(certificate and certificate["holds"])


def bound_rows(certificate: Mapping[str, Any], count: int | None = TIGHTEST) -> list[dict[str, Any]]:
    """Return the sites with least headroom by their bound, tightest first, each with its ``tightness``."""
    ranked = sorted(certificate["sites"], key=lambda site: site["headroom_bits"])
    return [dict(site) | {"tightness": tightness(site["bound"], site["observed"])} for site in ranked[:count]]


def bounds_by_name(report: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return (bound, tightness) of every site that the certificate knows; empty without a certificate."""
    sites = (report.get("certificate") or {}).get("sites") or ()
    return {site["name"]: (site["bound"], tightness(site["bound"], site["observed"])) for site in sites}


def uncertified_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sites whose bound passes its limit, the worst first, with reason and remedy.

    The report of a conversion gives both; an audit knows only that rescaling has not been tried on these weights.
    """
    if "uncertified" in report:
        return [dict(row) for row in report["uncertified"]]
    certificate = report.get("certificate") or {"sites": ()}
    over = sorted((s for s in certificate["sites"] if not s["holds"]), key=lambda s: s["headroom_bits"])
    return [
        {
            "name": site["name"],
            "bound": max(site["bound"], site["partial"]),
            "limit": site["limit"],
            "excess_bits": -site["headroom_bits"],
            "reason": "no rescaling moves it" if site.get("kind") in IMMOVABLE else OVER,
            "remedy": PENALTY if site.get("kind") in IMMOVABLE else "bf16-to-fp16 convert rescales what can be",
        }
        for site in over
    ]


def found_by(report: Mapping[str, Any]) -> str:
    """Return what the worst values were found by, in words; empty where nothing was run."""
    attack, half = report.get("attack"), "half" in (report.get("regimes") or {})
    if attack:
        return f"{counted(attack['steps'], 'step')} of gradient search" + (" and the probe" if half else "")
    return "the inputs that were run, in half" if half else ""


def coverage(report: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return what the bounds hold for, and what they say nothing about with the option that would cover it or "".

    Both are empty without a certificate.
    """
    certificate = report.get("certificate")
    if not certificate:
        return [], []
    train = certificate.get("train_mode", False)
    squares = any(site["kind"] == "squares" for site in certificate["sites"])
    positions = counted(certificate["max_length"], "position")
    sums = counted(certificate["splits"], "partial sum")
    covers = [
        "every operation of the forward pass, in pure fp16, under AMP and as stock code loads it",
        f"every input of up to {positions}: any tokens, and embeddings anywhere in the hull of the table",
        f"kernels that accumulate in fp32 in any order, or in up to {sums} rounded to fp16 and added in fp16",
    ]
    leaves = [
        ("kernels that accumulate everything in fp16, or a LayerNorm that computes E[x²] − E[x]²", ""),
        ("the loss and the backward pass", ""),
        ("rows of attention that see no position at all", ""),
        ("other weights than those in the files: adapters, quantisation", ""),
        ("precision: it says that nothing overflows, not that nothing is lost", ""),
    ]
    if squares:
        covers.append("squares of the residual stream, summed in fp16 by a norm")
    else:
        leaves.insert(1, ("kernels that sum squares of the residual stream in fp16", "--target norm-safe"))
    if train:
        covers.append("training mode: dropout at the config's rates")
    else:
        leaves.insert(1, ("training mode, with dropout", "--target train"))
    return covers, leaves


# --- precision -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """The significant bits that one stack's residual stream keeps: a row per block, a column per norm.

    ``rows``: the block's number, or "end" for the final norm, and the bits at each norm, None where there is none.
    """

    stack: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]


def precision_tables(report: Mapping[str, Any]) -> list[Precision]:
    """Return the precision of each stack, in the order of the model; empty where the report has none."""
    result = []
    for stack in ("encoder", "decoder"):
        blocks: dict[str, list[float]] = {}
        for row in report.get("precision") or ():
            within, block = _STACK.search(row["module"]), _BLOCK.search(row["module"])
            if within is not None and within[1] == stack:
                blocks.setdefault(block[1] if block else "end", []).append(row["bits"])
        if not blocks:
            continue
        end = {"end": blocks.pop("end")} if "end" in blocks else {}
        norms = max((len(kept) for kept in blocks.values()), default=1)
        columns = _NORMS.get(norms, tuple(f"norm {i + 1}" for i in range(norms)))
        rows = [(name, padded(kept, norms)) for name, kept in (blocks | end).items()]
        result.append(Precision(stack, columns, tuple(rows)))
    return result


def padded(values: Sequence[float], width: int) -> tuple[float | None, ...]:
    """Return values filled up with None to ``width``."""
    return (*values, *[None] * (width - len(values)))


def least_precise(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the norm at which the residual stream keeps the fewest bits, None where the report has none."""
    rows = [row for row in report.get("precision") or () if not math.isnan(row["bits"])]
    return min(rows, key=lambda row: row["bits"], default=None)


def sunk_rows(regimes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the signals that stayed under fp16's smallest normal number on every input, with their regimes."""
    found: dict[str, dict[str, Any]] = {}
    for name, regime in regimes.items():
        for site in regime.get("underflow") or ():
            row = found.setdefault(site["name"], {"name": site["name"], "amax": site["amax"], "regimes": []})
            row["amax"] = max(row["amax"], site["amax"])
            row["regimes"].append(name)
    return list(found.values())


def attack_breaks(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the site that an attack drove furthest past its limit, None where it passed none or none ran."""
    sites = (report.get("attack") or {}).get("sites") or ()
    worst = min(sites, key=lambda site: site["headroom_bits"], default=None)
    return worst if worst is not None and (worst["headroom_bits"] < 0 or infinite(worst["worst"])) else None
