"""The exponents of 2 that a plan gives to the axes of a checkpoint's tensors and to the outputs of its transformers
class. Also a check that a plan fits a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..errors import UserError
from ..families.layout import Layout, ResolvedTensor
from ..families.signals import LOGITS, RESIDUAL, Axis, Kind, before, carried_by
from ..families.spread import channels_along, spread_out
from .centred import centrable
from .channels import folded
from .plan import OfChannels, Plan, takes_fractions


@dataclass(frozen=True)
class Exponents:
    """The powers of 2 that scale a tensor's elements. Element [i, j] has the exponent ``scalar`` + ``rows[i]`` +
    ``columns[j]``; vectors have no columns. The power multiplies the sum of the element and ``offset``."""

    scalar: float
    rows: torch.Tensor | None
    columns: torch.Tensor | None
    offset: float = 0.0

    def full(self, shape: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
        total = tensor_of(self.scalar).to(device).view((1,) * len(shape))
        if self.rows is not None:
            total = total + self.rows.view(-1, *([1] * (len(shape) - 1)))
        if self.columns is not None:
            total = total + self.columns
        return total

    def to(self, device: torch.device | str) -> Exponents:
        rows, columns = (None if part is None else part.to(device) for part in (self.rows, self.columns))
        return Exponents(self.scalar, rows, columns, self.offset)


def tensor_of(exponents: OfChannels) -> torch.Tensor:
    """Return exponents as int32, or as fp64 if one is a fraction."""
    double = torch.tensor(exponents, dtype=torch.float64)
    return double.to(torch.int32) if bool((double == double.round()).all()) else double


def axis_exponents(tensor: ResolvedTensor, plan: Plan) -> list[float | torch.Tensor]:
    """Return the plan's exponents for each axis of ``tensor``: one number, or a 1-D tensor over the axis."""

    def carried(axis: Axis, size: int) -> float | torch.Tensor:
        exponent = plan.exponent(axis.signal)
        if isinstance(exponent, int | float) and all(factor > 0 for factor in axis.spread):
            return axis.sign * exponent
        channels = channels_along(size, axis.spread)
        exponent = [exponent] * channels if isinstance(exponent, int | float) else exponent
        if len(exponent) != channels:
            raise UserError(
                f"the plan has {len(exponent)} exponents for {axis.signal}, but {tensor.name} has {channels} channels;"
                " use the plan of this very checkpoint"
            )
        return axis.sign * spread_out(tensor_of(exponent), axis.spread)

    sizes = zip(tensor.axes, tensor.shape, strict=True)
    return [sum((carried(each, size) for each in carried_by(axis)), 0) for axis, size in sizes]


def exponents_of(tensor: ResolvedTensor, plan: Plan) -> Exponents:
    exponents = axis_exponents(tensor, plan)
    scalar = sum(exponent for exponent in exponents if not isinstance(exponent, torch.Tensor))
    per_axis = [exponent if isinstance(exponent, torch.Tensor) else None for exponent in exponents]
    rows, columns = (*per_axis, None, None)[:2]
    return Exponents(scalar, rows, columns, tensor.offset)


def norm_exponents(layout: Layout, plan: Plan) -> dict[str, int]:
    streams = layout.streams_read.items()
    return {path: plan.stream_exponent(stream) + plan.stream_exponent(before(path)) for path, stream in streams}


def correction_of(tensor: ResolvedTensor, plan: Plan) -> float:
    return plan.gain_correction.get(tensor.name, 1.0)


def check_plan_fits(layout: Layout, plan: Plan) -> None:
    if plan.family != layout.family.name:
        raise UserError(
            f"the plan is for {plan.family}, the checkpoint is {layout.family.name}; use the plan of this checkpoint"
        )
    for signal, exponent in plan.exponents.items():
        known = layout.signals.get(signal)
        single = Kind.RESIDUAL, Kind.BEFORE_NORM
        several = not isinstance(exponent, int | float) and known is not None and known.kind in single
        fraction = not takes_fractions(signal) and tensor_of(exponent).is_floating_point()
        if known is None or known.kind is Kind.FIXED or signal == RESIDUAL or several or fraction:
            raise UserError(
                f"the plan's exponents for {signal!r} fit no signal of this checkpoint; use the plan of this checkpoint"
            )
        if not isinstance(exponent, int | float) and len(exponent) != known.size:
            raise UserError(
                f"the plan has {len(exponent)} exponents for {signal}, which has {known.size} channels;"
                " use the plan of this checkpoint"
            )
    check_centred(layout, plan)


def check_centred(layout: Layout, plan: Plan) -> None:
    free = {attention.at for attention in centrable(layout)}
    if unknown := [path for path in plan.centred_keys if path not in free]:
        raise UserError(
            f"the plan centres biases of {unknown[0]!r}, and none there can be centred; use the plan of this checkpoint"
        )


LAST = "last_hidden_state"
"""The key of the last state: of the decoder if there is one. A class without a head gives it as its output."""


def output_factors(layout: Layout, plan: Plan) -> dict[str, OfChannels]:
    """Return the log2 of the factor that the plan puts on each output, by its name: one number, or one for each channel
    or logit. ``hidden_states`` stands for all states but the last."""
    # At the ends of a soft cap a logit is the same after an edit.
    capped = layout.head is not None and layout.cap(layout.head) is not None
    factors: dict[str, OfChannels] = dict.fromkeys(layout.stock.gives, 0 if capped else plan.exponent(LOGITS))
    stacks = layout.stacks()
    for stack in stacks:
        whose = "" if len(stacks) == 1 else "encoder_" if stack.is_encoder else "decoder_"
        norm = layout.tensors[f"{stack.ends.norm}.weight"]
        last = exponents_of(norm, plan).full(norm.shape)
        factors[LAST if stack.is_last else f"{whose}{LAST}"] = folded(last)
        factors[f"{whose}hidden_states"] = plan.stream_exponent(layout.streams_read[stack.ends.norm])
        factors[f"{whose}attentions"] = 0
    if len(stacks) > 1:
        factors["cross_attentions"] = 0
    brought = [projector.gives for projector in layout.projectors if projector.gives]
    return factors | dict.fromkeys(brought, plan.stream_exponent(layout.streams[0]))


def on_request(name: str, outputs: Iterable[str]) -> bool:
    """Return whether transformers gives the output ``name`` only if asked. This is true of the stacks' hidden states
    and attentions. It is also true of the last state if ``outputs``, the names of all outputs, include logits."""
    inner = name.endswith(("hidden_states", "attentions")) and not name.startswith("image_")
    return inner or (name == LAST and any(each.endswith("logits") for each in outputs))


def moved(factors: Mapping[str, OfChannels]) -> dict[str, OfChannels]:
    return {name: factor for name, factor in factors.items() if factor}


def joined(one: OfChannels, other: OfChannels) -> OfChannels:
    return folded(torch.as_tensor(one) + torch.as_tensor(other))
