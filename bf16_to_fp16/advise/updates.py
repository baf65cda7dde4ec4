"""Find the weights that an update leaves unchanged because rounding loses it. That happens if an update is smaller than
half the gap between a 16-bit value and the next."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..checkpoint.reader import Checkpoint
from ..errors import UserError
from ..families.places import layer_of
from ..numerics import BF16_SIGNIFICANT_BITS, FP16_SIGNIFICANT_BITS
from ..progress import Progress
from ..quiet import quiet
from ..report.screen import console
from ..wording import counted, rounded_up
from . import OPTIMIZERS
from .weight_statistics import floating_names, open_weights, tensor_pieces

# The dtype of a format, its significant bits, and the exponent of its smallest normal number.
FORMATS = {"bf16": (torch.bfloat16, BF16_SIGNIFICANT_BITS, -126), "fp16": (torch.float16, FP16_SIGNIFICANT_BITS, -14)}

# Least root mean square that Adafactor takes a tensor to have (Shazeer and Stern, arXiv:1804.04235).
SMALLEST_SCALE = 1e-3
LOWEST = -200  # exponent of the first bin of a histogram


@dataclass
class Layer:
    overflow: int = 0  # elements that are not finite in the format
    moves: Counter[float] = field(default_factory=Counter)  # the others, by the least rate that moves them

    def to_json(self, name: str, rate: float) -> dict[str, Any]:
        finite = self.moves.total()
        stalled = sum(count for least, count in self.moves.items() if least > rate)
        rates = sorted(self.moves)
        reached = accumulate(self.moves[least] for least in rates)
        half = next((least for least, count in zip(rates, reached, strict=True) if 2 * count >= finite), None)
        return {
            "name": name,
            "elements": finite + self.overflow,
            "stalled": stalled,
            "stalled_fraction": stalled / finite if finite else 0.0,
            "overflow": self.overflow,
            "rate_for_half": half,
        }


@quiet()
def advise_updates(
    source: str | Path,
    *,
    rate: float = 1e-4,
    optimizer: str = "adamw",
    dtype: str = "bf16",
    subfolder: str | None = None,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Return the fraction of a checkpoint's weights that an optimizer's update would leave unchanged, with advice.

    rate: the learning rate. optimizer: "adamw", "adam", "lion" or "adafactor". dtype: the weights' format in training,
    "bf16" or "fp16". In ``layers`` and ``total``, ``stalled`` is the number of elements that stay unchanged, and
    ``overflow`` the number of elements that are not finite in ``dtype``. ``rate_for_half`` is the lowest rate at which
    half the finite elements change. ``advice`` is empty if at most half of them stay unchanged. Raises UserError for a
    rate that is not positive and finite, an unknown optimizer or dtype, or an unreadable source."""
    if not 0 < rate < math.inf:
        raise UserError(f"the learning rate is {rate:g}; give a positive number")
    for name, given, known in (("optimizer", optimizer, OPTIMIZERS), ("dtype", dtype, FORMATS)):
        if given not in known:
            raise UserError(f"{name} {given!r} is unknown; choose {', '.join(known)}")
    checkpoint = open_weights(source, subfolder)
    total = Layer()
    layers: defaultdict[str, Layer] = defaultdict(Layer)
    for name in floating_names(checkpoint, progress):
        overflow, moves = _moving(checkpoint, name, dtype, optimizer)
        for sums in (layers[layer_of(name)], total):
            sums.overflow += overflow
            sums.moves.update(moves)
    result = {
        "mode": "updates",
        "source": checkpoint.source,
        "optimizer": optimizer,
        "dtype": dtype,
        "learning_rate": rate,
        "total": total.to_json("all", rate),
        "layers": [layer.to_json(name, rate) for name, layer in layers.items()],
    }
    return result | {"advice": _advice(result)}


def _moving(checkpoint: Checkpoint, name: str, dtype: str, optimizer: str) -> tuple[int, dict[float, int]]:
    """Return how many elements of a tensor are not finite in ``dtype``, and a histogram of the others. The histogram
    counts elements by the lowest learning rate at which an update changes them."""
    exponents = torch.zeros(512, dtype=torch.int64)
    square, overflow = 0.0, 0
    for part in tensor_pieces(checkpoint, name):
        narrow = part.to(FORMATS[dtype][0])
        finite = narrow[narrow.isfinite()].float()
        overflow += part.numel() - finite.numel()
        square += float(finite.double().square().sum())
        exponents += torch.bincount(half_gap_exponents(finite, dtype) - LOWEST, minlength=512)
    elements = int(exponents.sum())
    size = 1.0  # of an update, in units of the learning rate
    if optimizer == "adafactor":
        size = max(SMALLEST_SCALE, math.sqrt(square / elements) if elements else 0.0)
    held = exponents.nonzero().flatten().tolist()
    return overflow, {math.ldexp(1.0, exponent + LOWEST) / size: int(exponents[exponent]) for exponent in held}


def half_gap_exponents(x: Tensor, dtype: str) -> Tensor:
    """Return log₂ of half the gap between each value and the next larger magnitude in ``dtype``, as int64."""
    _, bits, least = FORMATS[dtype]
    binade = torch.frexp(x).exponent.to(torch.int64) - 1
    return torch.where(x == 0, least, binade.clamp(min=least)) - bits


def _advice(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    total, dtype = result["total"], result["dtype"]
    if total["stalled_fraction"] <= 0.5:
        return []
    stochastic = 'bf16_to_fp16.AdamW(..., rounding="stochastic") moves every weight as far as it should on average'
    needed = rounded_up(total["rate_for_half"], 3)
    factor = needed / result["learning_rate"]
    # Cheapest first. Stochastic rounding: Gupta et al., arXiv:1502.02551; Zamirai et al., arXiv:2010.06192. A batch
    # size that grows with the rate: Goyal et al., arXiv:1706.02677.
    return [
        {"what": "stochastic-rounding", "why": f"{stochastic}, with weights in {dtype} and no copy"},
        {
            "what": "fp32-master",
            "why": f"an fp32 copy of the weights keeps what {dtype} loses, for 4 bytes more a weight",
        },
        {
            "what": "learning-rate",
            "learning_rate": needed,
            "factor": factor,
            "why": f"at a learning rate of {needed:.3g} ({factor:.3g} times yours) half of the weights move; scale the"
            " batch size by the same factor; the higher learning rate may still be too high for training",
        },
    ]


def print_updates(result: Mapping[str, Any]) -> None:
    screen = console()
    size = "every update of that size"
    if result["optimizer"] == "adafactor":
        size += " times each tensor's root mean square"
    whose = f"{result['optimizer']} at learning rate {result['learning_rate']:g}, {size}"
    screen.print(f"{result['dtype']} weights rounded to nearest, {whose}", markup=False)
    rows = Table("layer", "weights", "would not move", "lr that moves half the weights")
    for column in rows.columns[1:]:
        column.justify = "right"
    for row in (*result["layers"], result["total"]):
        rate = row["rate_for_half"]
        if row is result["total"]:
            rows.add_section()
        shown = "-" if rate is None else f"{rounded_up(rate, 3):.3g}"
        rows.add_row(row["name"], f"{row['elements']:,}", f"{row['stalled_fraction']:.1%}", shown)
    screen.print(rows)
    if overflow := result["total"]["overflow"]:
        screen.print(f"{counted(overflow, 'weight')} not finite in {result['dtype']}, left out")
    if not result["advice"]:
        screen.print(f"{1 - result['total']['stalled_fraction']:.1%} of the weights move: nothing to do")
        return
    screen.print("What helps, best first:")
    for number, item in enumerate(result["advice"], 1):
        screen.print(f"{number}. {item['why']}", markup=False)
