"""Results of a measurement, which are at the same time entries of the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
NumberOrNaN = Annotated[
    float,
    Field(strict=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}], "description": "null stands for NaN"}),
]
"""A number that may be NaN."""
Infinite = Annotated[
    Real,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}], "description": "null stands for infinity"}),
]
"""A number that may be infinite, which is null in JSON."""


class ReportObject(BaseModel):
    """A JSON object of a report; it keeps the keys of another release."""

    model_config = ConfigDict(frozen=True, extra="allow")


def dump(part: BaseModel) -> dict[str, Any]:
    """Return a part as JSON data: its given keys, in order."""
    return part.model_dump(by_alias=True, exclude_unset=True)


class Fidelity(ReportObject):
    """How far the bf16 source and the fp16 output are from the fp32 source, on the same tokens.

    ``measure`` "kl": KL(fp32 ‖ x) per token, in nats; "relative squared error": Σ(x − fp32)² / Σ fp32² of an encoder's
    last states, with ``top1_*`` None. ``kl_fp32`` and ``squared_error_fp32``: of the output's weights in fp32. The bf16
    fields are None where no bf16 model ran. A model that gives inf or NaN is infinitely far; JSON has null for that.
    """

    measure: str = "kl"
    kl_bf16: Infinite | None = None
    kl_fp16: Infinite = math.inf
    max_logit_error_bf16: Infinite | None = None
    max_logit_error_fp16: Infinite = math.inf
    top1_bf16: Real | None = None
    top1_fp16: Real | None = None
    positions: Count | None = None
    kl_fp32: Infinite | None = None
    squared_error_fp32: Infinite | None = None
    reference: str = "fp32 source"

    @property
    def exact(self) -> bool:
        """Whether fp32 outputs kept every bit; a KL of 0 may be rounded."""
        return self.kl_fp32 == 0 and self.squared_error_fp32 == 0


class ExceptionEntry(ReportObject):
    """Ids on which edits move the output further from the source than 10 times bf16's rounding, and over 0.01. ``ids``:
    one put into ordinary text, or several drawn for a whole row. ``tokens``: the tokenizer's names. ``kl``: divergence
    in fp32. ``kl_bf16``: of the source with activations rounded to bf16 stochastically, the mean of 8 runs. ``kl_run``:
    of the source as bf16 runs it."""

    ids: list[int]
    tokens: list[str] = []
    kl: Real
    kl_bf16: Real
    kl_run: Real


MAX_ERROR_RATIO = 4.0  # to bf16's relative squared error; an edit may cost 1.75 of it
MAX_ERROR_WITHOUT_DRIFT = 1 / 8  # a wrong factor of 2 gives a relative squared error of 1/4 at least
BF16_NOISE = 2.0**-20  # the relative squared error of bf16 where it happens to be exact


@dataclass(frozen=True)
class OutputError:
    """Relative squared errors of an output in fp32, after division by its factor, and of the source in bf16; of the
    worst layer."""

    error: float
    error_bf16: float

    @property
    def ratio(self) -> float:
        return self.error / max(BF16_NOISE, self.error_bf16)

    def fits(self, *, drifts: bool) -> bool:
        """Return whether rounding explains the error; ``drifts``: or an edit or a drift of eps."""
        return self.ratio <= MAX_ERROR_RATIO and (drifts or self.error <= MAX_ERROR_WITHOUT_DRIFT)
