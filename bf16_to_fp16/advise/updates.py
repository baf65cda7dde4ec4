"""Which weights would not move: updates below half the gap of a 16-bit weight vanish when it is rounded to nearest.

The gap between neighbouring values is a power of two, so one histogram of exponents says for every learning rate at
once which share of a tensor moves. Updates of Adam and Lion are about the learning rate, whatever the gradient is;
Adafactor's about the learning rate times the tensor's root mean square.

The remedies in the order of their cost: round stochastically, so that the mean of many lost updates arrives (Gupta et
al., arXiv:1502.02551; Zamirai et al., arXiv:2010.06192); keep an fp32 copy of the weights; or raise the learning rate,
and with it, linearly (Goyal et al., arXiv:1706.02677), the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..checkpoint.reader import Checkpoint
from ..errors import UserError
from ..families.roles import layer_of
from ..numerics import BF16_SIGNIFICANT_BITS, FP16_SIGNIFICANT_BITS
from ..progress import Progress, shown_by
from ..quiet import quiet
from ..report.screen import console
from ..wording import counted, rounded_up
from .weights import chosen, open_weights, tensor_pieces

OPTIMIZERS = ("adamw", "adam", "adafactor", "lion")

# The dtype of a format, its significant bits, and the exponent of its smallest normal number.
FORMATS = {
    "bf16": (torch.bfloat16, BF16_SIGNIFICANT_BITS, -126),
    "fp16": (torch.float16, FP16_SIGNIFICANT_BITS, -14),
}

SMALLEST_SCALE = 1e-3
"""Adafactor takes a tensor's root mean square for at least this (Shazeer and Stern, arXiv:1804.04235)."""

LOWEST = -200  # exponent of the first bin of a histogram


@dataclass
class Layer:
    """Elements of a tensor by the learning rate from which they move.

    ``moves``: their number by that rate. ``lost``: elements that do not move at the rate that was asked for.
    ``overflow``: elements that are not finite in the format.
    """

    name: str
    elements: int = 0
    lost: int = 0
    overflow: int = 0
    moves: dict[float, int] = field(default_factory=dict)

    def join(self, other: Layer) -> None:
        for name in ("elements", "lost", "overflow"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for rate, count in other.moves.items():
            self.moves[rate] = self.moves.get(rate, 0) + count

    def rate_for_half(self) -> float | None:
        reached = 0
        for rate in sorted(self.moves):
            reached += self.moves[rate]
            if 2 * reached >= sum(self.moves.values()):
                return rate
        return None

    def to_json(self) -> dict[str, Any]:
        finite = self.elements - self.overflow
        return {
            "name": self.name,
            "elements": self.elements,
            "stalled": self.lost,
            "stalled_fraction": self.lost / finite if finite else 0.0,
            "overflow": self.overflow,
            "rate_for_half": self.rate_for_half(),
        }


@quiet()
def advise_updates(
    source: str | Path,
    *,
    rate: float = 1e-4,
    optimizer: str = "adamw",
    dtype: str = "bf16",
    batch_size: int | None = None,
    tensors: Sequence[str] = (),
    subfolder: str | None = None,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Return which share of a checkpoint's weights an optimizer's update would not move, and what to do about it.

    rate: the learning rate. optimizer: one of ``OPTIMIZERS``. dtype: of the weights, "bf16" or "fp16". tensors: names
    with wildcards.

    The result has ``layers`` and ``tensors`` (name, elements, ``stalled`` ones and their fraction, ``overflow`` for
    those that the format does not hold, ``rate_for_half``, at which half of them move), the same for all as ``total``,
    and ``advice``. Raises UserError for settings or a source that cannot be used.
    """
    if optimizer not in OPTIMIZERS:
        raise UserError(f"optimizer {optimizer!r} is not known; choose from {', '.join(OPTIMIZERS)}")
    if dtype not in FORMATS:
        raise UserError(f"dtype {dtype!r} is not a 16-bit format; choose from {', '.join(FORMATS)}")
    if not 0 < rate < math.inf:
        raise UserError(f"the learning rate is {rate:g}; give a positive number")
    if batch_size is not None and batch_size < 1:
        raise UserError(f"the batch size is {batch_size}; give at least 1")
    checkpoint = open_weights(source, subfolder)
    names = chosen(checkpoint, tensors)
    rows: list[Layer] = []
    with shown_by(progress).step("Looking at the weights") as advance:
        for place, name in enumerate(names):
            rows.append(_moving(checkpoint, name, dtype, rate, optimizer))
            advance(place + 1, len(names))
    total = Layer("all")
    layers: dict[str, Layer] = {}
    for row in rows:
        layer = layers.setdefault(layer_of(row.name), Layer(layer_of(row.name)))
        for sums in (layer, total):
            sums.join(row)
    result = {
        "mode": "updates",
        "source": checkpoint.source,
        "optimizer": optimizer,
        "dtype": dtype,
        "learning_rate": rate,
        "batch_size": batch_size,
        "total": total.to_json(),
        "layers": [layer.to_json() for layer in layers.values()],
        "tensors": [row.to_json() for row in rows],
    }
    return result | {"advice": _advice(result)}


def _moving(checkpoint: Checkpoint, name: str, dtype: str, rate: float, optimizer: str) -> Layer:
    row = Layer(name)
    exponents = torch.zeros(512, dtype=torch.int64)
    square = 0.0
    for part in tensor_pieces(checkpoint, name):
        narrow = part.to(FORMATS[dtype][0])
        finite = narrow[narrow.isfinite()].float()
        row.overflow += part.numel() - finite.numel()
        square += float(finite.double().square().sum())
        exponents += torch.bincount(half_gap_exponents(finite, dtype) - LOWEST, minlength=512)
    elements = int(exponents.sum())
    size = 1.0  # of an update, in units of the learning rate
    if optimizer == "adafactor":
        size = max(SMALLEST_SCALE, math.sqrt(square / elements) if elements else 0.0)
    row.elements = row.overflow + elements
    for exponent in exponents.nonzero().flatten().tolist():
        moves_from = math.ldexp(1.0, exponent + LOWEST) / size
        row.moves[moves_from] = int(exponents[exponent])
        row.lost += row.moves[moves_from] * (moves_from > rate)
    return row


def half_gap_exponents(x: Tensor, dtype: str) -> Tensor:
    """Return log₂ of half the distance from each fp32 value to the next larger one of the format, as int64."""
    _, bits, least = FORMATS[dtype]
    binade = torch.frexp(x).exponent.to(torch.int64) - 1
    return torch.where(x == 0, least, binade.clamp(min=least)) - bits


def _advice(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    total = result["total"]
    if total["stalled_fraction"] <= 0.5:
        return []
    dtype = result["dtype"]
    stochastic = 'bf16_to_fp16.AdamW(..., rounding="stochastic") moves every weight as far as it should on average'
    remedies: list[dict[str, Any]] = [
        {"what": "stochastic-rounding", "why": f"{stochastic}, with weights in {dtype} and no copy"},
        {
            "what": "fp32-master",
            "why": f"an fp32 copy of the weights keeps what {dtype} loses, for 4 bytes more a weight",
        },
    ]
    needed = total["rate_for_half"]
    if needed is not None:
        needed = rounded_up(needed, 3)
        factor = needed / result["learning_rate"]
        batch = result["batch_size"] and math.ceil(result["batch_size"] * factor)
        bigger = f"the batch size to {batch:,}" if batch else "the batch size by the same factor"
        remedies.append(
            {
                "what": "learning-rate",
                "learning_rate": needed,
                "factor": factor,
                "batch_size": batch,
                "why": f"a learning rate of {needed:.3g} ({factor:.3g} times as much) moves half of the weights;"
                f" scale {bigger}; it may still be too high to train with",
            }
        )
    return remedies


def print_updates(result: Mapping[str, Any]) -> None:
    screen = console()
    size = "every update of that size"
    if result["optimizer"] == "adafactor":
        size += " times each tensor's root mean square"
    whose = f"{result['optimizer']} at learning rate {result['learning_rate']:g}, {size}"
    screen.print(f"{result['dtype']} weights rounded to nearest, {whose}", markup=False)
    rows = Table("layer", "weights", "would not move", "half move from lr")
    for column in rows.columns[1:]:
        column.justify = "right"
    for row in (*result["layers"], result["total"]):
        rate = row["rate_for_half"]
        if row is result["total"]:
            rows.add_section()
        shown = "-" if rate is None else f"{rounded_up(rate, 3):.3g}"
        rows.add_row(row["name"], f"{row['elements']:,}", percent(row["stalled_fraction"]), shown)
    screen.print(rows)
    if overflow := result["total"]["overflow"]:
        screen.print(f"{counted(overflow, 'weight')} not finite in {result['dtype']}, left out")
    if not result["advice"]:
        moving = percent(1 - result["total"]["stalled_fraction"])
        screen.print(f"{moving} of the weights move: nothing to do")
        return
    screen.print("What helps, best first:")
    for number, item in enumerate(result["advice"], 1):
        screen.print(f"{number}. {item['why']}", markup=False)


def percent(fraction: float) -> str:
    if 0 < fraction < 0.001:
        return "under 0.1%"
    if 0.999 < fraction < 1:
        return "over 99.9%"
    return f"{100 * fraction:.1f}%"
