"""Exact rescaling: a plan of powers of two, and the one function that applies it.

A pre-norm transformer computes the same function when signals between its weights are multiplied by powers of two
and the weights at both ends make up for it; every fp32 intermediate then moves by an exact power of two, so the
logits keep every bit. A ``Plan`` says by how much. It is pure data: it can be printed, stored beside the weights,
replayed and undone. ``apply`` (in memory) and ``writes`` (streamed to files) are the only places that change
weights, and both read the exponents of a tensor from ``exponents_of``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

from .errors import UserError
from .families.types import RESIDUAL, Kind, Layout, ResolvedTensor
from .writer import LARGEST_EXPONENT, Write

Exponent = Annotated[int, Field(ge=-LARGEST_EXPONENT // 3, le=LARGEST_EXPONENT // 3)]
"""An exponent of a plan; an element carries three at most, which the writer then can apply."""


class Drift(BaseModel):
    """What a norm eps that cannot be scaled does to the output: predicted, and measured on what was written.

    ``relative_error``: predicted root mean square over the norms of the relative change of their outputs.
    ``predicted_kl`` and ``predicted_max_logit_error``: from running the source with eps·4^-r, which is the same
    function.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    relative_error: float
    predicted_kl: float | None = None
    predicted_max_logit_error: float | None = None
    measured_kl: float | None = None
    measured_max_logit_error: float | None = None


class Plan(BaseModel):
    """Powers of two for every signal of a layout.

    ``exponents``: per signal one integer for all channels or a list with one per channel; signals at 0 are left
    out. ``gain_correction``: factor on a norm's weight, not a power of two, that takes out the mean of the eps
    drift. ``eps``: what the config must say, None where it cannot.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    residual_exponent: Exponent = 0
    exponents: dict[str, Exponent | list[Exponent]] = Field(default_factory=dict)
    untied_head: bool = False
    eps: float | None = None
    gain_correction: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    drift: Drift | None = None
    margin_bits: float | None = None
    notes: tuple[str, ...] = ()

    def exponent(self, signal: str) -> int | list[int]:
        """Return the exponent(s) of a signal, 0 where the plan does not move it."""
        return self.residual_exponent if signal == RESIDUAL else self.exponents.get(signal, 0)

    def changes_anything(self) -> bool:
        """Return whether any weight or config value differs after this plan."""
        return bool(self.residual_exponent or self.exponents or self.untied_head or self.gain_correction)


@dataclass(frozen=True)
class Exponents:
    """The power of two for each element of a tensor: ``scalar`` + ``rows[i]`` + ``columns[j]`` (vectors have rows
    only)."""

    scalar: int
    rows: torch.Tensor | None
    columns: torch.Tensor | None

    def full(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the exponents as an int32 tensor that broadcasts to ``shape``."""
        total = torch.full((1,) * len(shape), self.scalar, dtype=torch.int32)
        if self.rows is not None:
            total = total + self.rows.view(-1, *([1] * (len(shape) - 1)))
        if self.columns is not None:
            total = total + self.columns
        return total


def exponents_of(tensor: ResolvedTensor, plan: Plan) -> Exponents:
    """Return the exponents of one tensor: over its axes, the sum of ±the exponents of the signals that they carry."""
    scalar = 0
    per_axis: list[torch.Tensor | None] = [None, None]
    for position, axis in enumerate(tensor.axes):
        if axis is None:
            continue
        sign, signal = axis
        exponent = plan.exponent(signal)
        if isinstance(exponent, int):
            scalar += sign * exponent
            continue
        if len(exponent) != tensor.shape[position]:
            raise UserError(
                f"the plan has {len(exponent)} exponents for {signal}, but {tensor.name} has"
                f" {tensor.shape[position]} channels; use the plan of this very checkpoint"
            )
        per_axis[position] = sign * torch.tensor(exponent, dtype=torch.int32)
    return Exponents(scalar, per_axis[0], per_axis[1])


def correction_of(tensor: ResolvedTensor, plan: Plan) -> float:
    """Return the plan's gain correction for a norm's weight, 1 for every other tensor."""
    return plan.gain_correction.get(tensor.name, 1.0)


def check(layout: Layout, plan: Plan) -> None:
    """Raise UserError unless ``plan`` fits ``layout``: same family, known signals, right numbers of channels."""
    if plan.family != layout.family.name:
        raise UserError(
            f"the plan is for {plan.family}, the checkpoint is {layout.family.name}; use the plan of this checkpoint"
        )
    for signal, exponent in plan.exponents.items():
        known = layout.signals.get(signal)
        if known is None or known.kind in (Kind.FIXED, Kind.RESIDUAL):
            raise UserError(
                f"the plan moves {signal!r}, which this checkpoint does not have; use the plan of this checkpoint"
            )
        if isinstance(exponent, list) and len(exponent) != known.size:
            raise UserError(f"the plan has {len(exponent)} exponents for {signal}, which has {known.size} channels")


def writes(layout: Layout, plan: Plan) -> list[Write]:
    """Return what to write for ``layout`` under ``plan``, tensor by tensor, sorted by name."""
    check(layout, plan)
    result = []
    for name in sorted(layout.tensors):
        tensor = layout.tensors[name]
        exponents = exponents_of(tensor, plan)
        result.append(
            Write(
                name=name,
                shape=tensor.shape,
                source=tensor.source,
                data=tensor.generate(tensor.shape[0], tensor.shape[1]) if tensor.generate else None,
                exponent=exponents.scalar,
                row_exponents=exponents.rows,
                column_exponents=exponents.columns,
                gain=tensor.gain * correction_of(tensor, plan),
            )
        )
    return result


def apply(model: torch.nn.Module, layout: Layout, plan: Plan) -> torch.nn.Module:
    """Rescale ``model`` in place by ``plan`` and return it; in fp32 its outputs keep every bit.

    The model's parameters are named as in ``layout`` and the head is as tied as the layout says. Norm eps
    attributes are multiplied by 4^r, also where no config could say so (LayerNorm).
    """
    check(layout, plan)
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    done: set[int] = set()
    with torch.no_grad():
        for name, tensor in layout.tensors.items():
            parameter = found[name]
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            exponents = exponents_of(tensor, plan).full(tensor.shape)
            # Two factors, each a normal fp32 number, so that no intermediate is lost.
            half = torch.div(exponents, 2, rounding_mode="floor")
            for part in (half, exponents - half):
                parameter.mul_(torch.ldexp(torch.ones_like(part, dtype=torch.float32), part).to(parameter.dtype))
            parameter.mul_(correction_of(tensor, plan))
    for path in layout.norms:
        norm = model.get_submodule(path)
        attribute = "eps" if hasattr(norm, "eps") else "variance_epsilon"
        setattr(norm, attribute, getattr(norm, attribute) * 4.0**plan.residual_exponent)
    return model


def inverse(plan: Plan) -> Plan:
    """Return the plan that takes the weights back: every exponent negated, every correction inverted."""
    return Plan(
        family=plan.family,
        residual_exponent=-plan.residual_exponent,
        exponents={k: -v if isinstance(v, int) else [-e for e in v] for k, v in plan.exponents.items()},
        gain_correction={k: 1 / v for k, v in plan.gain_correction.items()},
    )


def edited_config(layout: Layout, plan: Plan) -> dict[str, object]:
    """Return the source's config with only what the plan needs changed: eps, tie flag, dtype.

    The config is never written by transformers, whose version 5 forces ``tie_word_embeddings`` to true for T5 and
    so makes version 4 tie an untied head.
    """
    config = dict(layout.config)
    key = layout.family.eps_key
    if key and plan.residual_exponent:
        config[key] = layout.eps * 4.0**plan.residual_exponent
    if (layout.tied is False and layout.head_scale == 1.0) or (layout.tied is False and layout.family.name == "umt5"):
        config["tie_word_embeddings"] = False
        if "scale_decoder_outputs" in config:
            config["scale_decoder_outputs"] = False
    set_dtype(config, "float16")
    return config


def set_dtype(config: dict[str, object], dtype: str) -> None:
    """Set the dtype under the key that the config already uses; ``torch_dtype``, which every version reads, if it
    has none."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    for key in keys:
        config[key] = dtype


def describe(plan: Plan) -> Mapping[str, object]:
    """Return the plan as JSON data, lists of one repeated number folded into that number."""
    data = plan.model_dump()
    data["exponents"] = {
        k: v[0] if isinstance(v, list) and len(set(v)) == 1 else v for k, v in data["exponents"].items()
    }
    return data
