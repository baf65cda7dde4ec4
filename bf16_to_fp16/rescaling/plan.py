"""A plan of powers of two: pure data, to be printed, stored, replayed and inverted.

In a pre-norm transformer a signal can be multiplied by a power of two, if the weights at both ends make up for it. The
logits keep every bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ..families.signals import RESIDUAL
from ..numerics import LARGEST_EXPONENT

RANGE = Field(ge=-LARGEST_EXPONENT // 3, le=LARGEST_EXPONENT // 3)
Exponent = Annotated[int, RANGE]
"""An exponent of a plan. At most three scale one element of a weight, and the writer can apply their sum."""
EditExponent = Exponent | Annotated[float, RANGE]
"""log2 of an edit's factor. For scores it is m/8·2^-k, m from 5 to 8: fp16 holds its product with a bf16 weight."""
OfChannels = float | Sequence[float]  # exponents of a signal: one for all its channels, or one for each


def takes_fractions(signal: str) -> bool:
    """Return whether a signal's exponents can be fractions: true for attention scores only."""
    return signal.endswith(".scores")


class Drift(BaseModel):
    """A small change of the model's function. It occurs where a norm's eps cannot be scaled like the norm's input, or
    where gains are rounded after an offset was subtracted. For the predictions, the source runs with the rounded gains.
    Its norms get the output's eps times 4^-r, where r is the exponent by which the output scales the norm's input."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    relative_error: float = Field(description="predicted relative change of norms' outputs, root mean square")
    predicted_kl: float | None = None
    predicted_max_logit_error: float | None = None
    measured_kl: float | None = None
    measured_max_logit_error: float | None = None


class Plan(BaseModel):
    """The powers of two that scale a checkpoint. A signal is an activation that has exponents of its own.
    ``untied_head``: whether the head becomes a tensor of its own. ``margin_bits``: headroom above observed values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    residual_exponent: Exponent = Field(
        default=0, description="exponent of the residual stream, or of the encoder's if the decoder has its own"
    )
    exponents: dict[str, EditExponent | Sequence[EditExponent]] = Field(
        default_factory=dict, description="exponents by signal: one number for all channels, or one for each"
    )
    untied_head: bool = False
    eps: float | None = Field(default=None, description="eps of the converted norms; null if no config key holds it")
    eps_held: bool = Field(
        default=False,
        description="whether eps is a constant of the program that runs the output, not read from a config",
    )
    gain_correction: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="factors on norms' weights: any positive numbers that lower the mean drift of a fixed eps",
    )
    drift: Drift | None = None
    margin_bits: float | None = None
    centred_keys: list[str] = Field(default_factory=list, description="paths of attentions with centred keys")

    @property
    def exact(self) -> bool:
        """Whether the plan has no drift, gain correction or centred keys; edits can still change the function."""
        return not (self.drift or self.gain_correction or self.centred_keys)

    @property
    def moves(self) -> bool:
        moved = (e if isinstance(e, int | float) else any(e) for e in self.exponents.values())
        return bool(self.residual_exponent or self.gain_correction) or any(moved)

    def exponent(self, signal: str) -> OfChannels:
        return self.residual_exponent if signal == RESIDUAL else self.exponents.get(signal, 0)

    @property
    def residual_exponents(self) -> list[int]:
        others = (e for name, e in self.exponents.items() if name.endswith(f".{RESIDUAL}") and isinstance(e, int))
        return [self.residual_exponent, *others]

    def stream_exponent(self, signal: str) -> int:
        exponent = self.exponent(signal)
        assert isinstance(exponent, int)
        return exponent


@dataclass(frozen=True)
class Violation:
    signal: str
    excess_bits: float


@dataclass(frozen=True)
class Fallback:
    """A signal that is planned without a proof for every input. ``impossible``: whether no exponent gives a proof.
    ``exponent``: the stream exponent that would give one, if known."""

    signal: str
    impossible: bool
    exponent: int | None = None


def inverse(plan: Plan) -> Plan:
    """Return the plan that undoes ``plan``. It cannot restore the attention biases that ``plan.centred_keys`` replaced,
    because no weight holds the old biases."""
    return Plan(
        family=plan.family,
        residual_exponent=-plan.residual_exponent,
        exponents={k: -v if isinstance(v, int | float) else [-e for e in v] for k, v in plan.exponents.items()},
        gain_correction={k: 1 / v for k, v in plan.gain_correction.items()},
    )


def composed(first: Plan, second: Plan) -> Plan:
    """Return the plan that has the effect of ``first`` and then ``second``; eps is the second's."""

    def total(signal: str) -> OfChannels:
        one, other = (plan.exponents.get(signal, 0) for plan in (first, second))
        if isinstance(one, int | float) and isinstance(other, int | float):
            return one + other
        channels = next(len(e) for e in (one, other) if not isinstance(e, int | float))
        both = ([e] * channels if isinstance(e, int | float) else e for e in (one, other))
        return [sum(pair) for pair in zip(*both, strict=True)]

    corrections = {name: first.gain_correction.get(name, 1.0) * second.gain_correction.get(name, 1.0)
                   for name in first.gain_correction | second.gain_correction}  # fmt: skip
    return second.model_copy(
        update={
            "residual_exponent": first.residual_exponent + second.residual_exponent,
            "exponents": {signal: total(signal) for signal in first.exponents | second.exponents},
            "gain_correction": corrections,
            "untied_head": first.untied_head or second.untied_head,
            "centred_keys": sorted({*first.centred_keys, *second.centred_keys}),
        }
    )


def describe_plan(plan: Plan) -> Mapping[str, object]:
    """Return the plan as JSON data; a list of one repeated number becomes that number."""
    data = plan.model_dump(exclude={name for name in ("centred_keys", "eps_held") if not getattr(plan, name)})
    data["exponents"] = {
        k: v[0] if isinstance(v, list) and len(set(v)) == 1 else v for k, v in data["exponents"].items()
    }
    return data


def mark_of(plan: Plan) -> dict[str, object]:
    moved = {key: value for key, value in describe_plan(plan).items() if key not in ("drift", "margin_bits")}
    digest = hashlib.sha256(json.dumps(moved, sort_keys=True).encode()).hexdigest()
    return {"stream_exponents": plan.residual_exponents, "plan_sha256": digest[:16]}
