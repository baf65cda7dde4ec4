"""A plan of powers of two: pure data, to be printed, stored, replayed and inverted.

A pre-norm transformer computes the same function when signals between its weights are multiplied by powers of two and
the weights at both ends make up for it: the logits keep every bit. ``apply`` is the only module that changes weights by
a plan, and reads the exponents of a tensor from ``exponents_of``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

from ..checkpoint.shards import LARGEST_EXPONENT
from ..errors import UserError
from ..families.layout import Layout, ResolvedTensor
from ..families.spread import all_carry, channels_along, spread_out
from ..families.types import RESIDUAL, Axis, Kind, before, carried_by
from .centred import centrable

Exponent = Annotated[int, Field(ge=-LARGEST_EXPONENT // 3, le=LARGEST_EXPONENT // 3)]
"""An exponent of a plan; an element carries three at most, which the writer then can apply."""


class Drift(BaseModel):
    """What a norm eps that cannot be scaled, or gains that fp16 rounds less their offset, do to the output: predicted,
    and measured on what was written.

    ``relative_error``: predicted root mean square over the norms of the relative change of their outputs.
    ``predicted_kl`` and ``predicted_max_logit_error``: from running the source with eps·4^-r and the gains, where they
    are less an offset all weights, as they are rounded, which is the same function.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    relative_error: float
    predicted_kl: float | None = None
    predicted_max_logit_error: float | None = None
    measured_kl: float | None = None
    measured_max_logit_error: float | None = None


class Plan(BaseModel):
    """Powers of two for every signal of a layout.

    ``residual_exponent``: of the residual stream, of the encoder's where stacks have one each. ``exponents``: per other
    signal one integer for all channels or a list with one per channel; those of channels at 0 are left out.
    ``gain_correction``: factor on a norm's weight, not a power of two, that takes out the mean of the eps drift.
    ``eps``: what the config must say, None where it cannot. ``eps_held``: whether that goes with no exponent, since
    whoever is to read the output has this eps whatever the config says. ``centred_keys``: paths of the attentions whose
    key bias is replaced by the one that centres keys, or whose table of position biases by a centred one, see
    ``centred``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    residual_exponent: Exponent = 0
    exponents: dict[str, Exponent | list[Exponent]] = Field(default_factory=dict)
    untied_head: bool = False
    eps: float | None = None
    eps_held: bool = False
    gain_correction: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    drift: Drift | None = None
    margin_bits: float | None = None
    centred_keys: list[str] = Field(default_factory=list)

    @property
    def drifts_by(self) -> str:
        """What makes it drift, in words."""
        if self.eps_held:
            return "the eps that is held"
        if self.eps is None:
            return "LayerNorm's eps"
        before_norms = any(name.endswith(before("")) for name in self.exponents)
        return "norms' eps and rounded gains" if before_norms else "rounded gains"

    def exponent(self, signal: str) -> int | list[int]:
        """Return the exponent(s) of a signal, 0 where the plan does not move it."""
        return self.residual_exponent if signal == RESIDUAL else self.exponents.get(signal, 0)

    @property
    def residual_exponents(self) -> list[int]:
        """The exponents of all residual streams, those of later stacks with one of their own behind the first."""
        others = (e for name, e in self.exponents.items() if name.endswith(f".{RESIDUAL}") and isinstance(e, int))
        return [self.residual_exponent, *others]

    def stream_exponent(self, signal: str) -> int:
        """Return the exponent of a residual signal, or another that has one number."""
        exponent = self.exponent(signal)
        assert isinstance(exponent, int)
        return exponent


@dataclass(frozen=True)
class Exponents:
    """The power of two for each element of a tensor: ``scalar`` + ``rows[i]`` + ``columns[j]`` (vectors have rows
    only); of its sum with ``offset``, where stock code adds one."""

    scalar: int
    rows: torch.Tensor | None
    columns: torch.Tensor | None
    offset: float = 0.0

    def full(self, shape: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the exponents as an int32 tensor on ``device`` that broadcasts to ``shape``; rows and columns must be
        there."""
        total = torch.full((1,) * len(shape), self.scalar, dtype=torch.int32, device=device)
        if self.rows is not None:
            total = total + self.rows.view(-1, *([1] * (len(shape) - 1)))
        if self.columns is not None:
            total = total + self.columns
        return total

    def to(self, device: torch.device | str) -> Exponents:
        """Return the same on a device."""
        rows, columns = (None if part is None else part.to(device) for part in (self.rows, self.columns))
        return Exponents(self.scalar, rows, columns, self.offset)


def axis_exponents(tensor: ResolvedTensor, plan: Plan) -> list[int | torch.Tensor]:
    """Return for each axis of a tensor the exponents that it carries: one number, or an int32 number per channel."""

    def carried(axis: Axis, size: int) -> int | torch.Tensor:
        exponent = plan.exponent(axis.signal)
        if isinstance(exponent, int) and all_carry(axis.spread):
            return axis.sign * exponent
        channels = channels_along(size, axis.spread)
        exponent = [exponent] * channels if isinstance(exponent, int) else exponent
        if len(exponent) != channels:
            raise UserError(
                f"the plan has {len(exponent)} exponents for {axis.signal}, but {tensor.name} has {channels} channels;"
                " use the plan of this very checkpoint"
            )
        return axis.sign * spread_out(torch.tensor(exponent, dtype=torch.int32), axis.spread)

    sizes = zip(tensor.axes, tensor.shape, strict=True)
    return [sum((carried(each, size) for each in carried_by(axis)), 0) for axis, size in sizes]


def exponents_of(tensor: ResolvedTensor, plan: Plan) -> Exponents:
    """Return the exponents of one tensor: over its axes, the sum of ±the exponents of the signals that they carry."""
    exponents = axis_exponents(tensor, plan)
    scalar = sum(exponent for exponent in exponents if isinstance(exponent, int))
    per_axis = [exponent if isinstance(exponent, torch.Tensor) else None for exponent in exponents]
    return Exponents(scalar, per_axis[0], per_axis[1] if len(per_axis) > 1 else None, tensor.offset)


def norm_exponents(layout: Layout, plan: Plan) -> dict[str, int]:
    """Return by module path the exponent of what each norm reads that a residual exponent scales."""
    streams = layout.streams_read.items()
    return {path: plan.stream_exponent(stream) + plan.stream_exponent(before(path)) for path, stream in streams}


def correction_of(tensor: ResolvedTensor, plan: Plan) -> float:
    """Return the plan's gain correction for a norm's weight, 1 for every other tensor."""
    return plan.gain_correction.get(tensor.name, 1.0)


def check_plan_fits(layout: Layout, plan: Plan) -> None:
    """Raise UserError unless ``plan`` fits ``layout``: same family, known signals, right numbers of channels, centred
    keys where they may be."""
    if plan.family != layout.family.name:
        raise UserError(
            f"the plan is for {plan.family}, the checkpoint is {layout.family.name}; use the plan of this checkpoint"
        )
    for signal, exponent in plan.exponents.items():
        known = layout.signals.get(signal)
        single = Kind.RESIDUAL, Kind.BEFORE_NORM
        whole = isinstance(exponent, list) and known is not None and known.kind in single
        if known is None or known.kind is Kind.FIXED or signal == RESIDUAL or whole:
            raise UserError(
                f"the plan moves {signal!r}, which this checkpoint does not have; use the plan of this checkpoint"
            )
        if isinstance(exponent, list) and len(exponent) != known.size:
            raise UserError(
                f"the plan has {len(exponent)} exponents for {signal}, which has {known.size} channels;"
                " use the plan of this checkpoint"
            )
    check_centred(layout, plan)


def check_centred(layout: Layout, plan: Plan) -> None:
    """Raise UserError unless the attentions whose keys ``plan`` centres are of ``layout`` and have a free key bias or
    a table of position biases."""
    free = {attention.at for attention in centrable(layout)}
    if unknown := [path for path in plan.centred_keys if path not in free]:
        raise UserError(
            f"the plan centres the keys of {unknown[0]!r}, which has no free key bias and no table here; use the plan"
            " of this checkpoint"
        )


def inverse(plan: Plan) -> Plan:
    """Return the plan that takes the weights back: every exponent negated, every correction inverted. Centred keys stay
    centred: the biases that they had are no function of the weights."""
    return Plan(
        family=plan.family,
        residual_exponent=-plan.residual_exponent,
        exponents={k: -v if isinstance(v, int) else [-e for e in v] for k, v in plan.exponents.items()},
        gain_correction={k: 1 / v for k, v in plan.gain_correction.items()},
    )


def describe_plan(plan: Plan) -> Mapping[str, object]:
    """Return the plan as JSON data, lists of one repeated number folded into that number, without centred keys and a
    held eps where there are none."""
    data = plan.model_dump(exclude={name for name in ("centred_keys", "eps_held") if not getattr(plan, name)})
    data["exponents"] = {
        k: v[0] if isinstance(v, list) and len(set(v)) == 1 else v for k, v in data["exponents"].items()
    }
    return data
