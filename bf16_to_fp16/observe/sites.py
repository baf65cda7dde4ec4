"""A site: the outputs of one operation of one module, over every call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..numerics import headroom_bits

MASK_REASON = "attention mask: these positions are excluded"


CONSTANT_REASON = "constant: no activation enters it"


CUBE_REASON = "cube inside gelu_new: tanh takes its infinity to 1"


@dataclass(slots=True)
class Site:
    """The outputs of one operation of one module, over every call.

    ``amax`` is the largest |x| (inf where one overflowed or was NaN) without masked positions. ``nonfinite``,
    ``saturated`` (finite |x| from 64504, fp16 only) and ``benign`` count elements; the first two leave out the
    benign ones, and NaN is never benign. ``order`` is the number of the output that first broke it (was not
    finite), else of its first output. ``limit`` is None where fp16's range does not bind: outputs of another
    dtype, constants, and the cube inside ``gelu_new``.
    """

    name: str
    dtype: torch.dtype
    limit: float | None
    amax: float = 0.0
    calls: int = 0
    nonfinite: int = 0
    saturated: int = 0
    benign: int = 0
    reason: str | None = None
    order: int = 0
    pending_nonfinite: int = 0
    pending_saturated: int = 0

    @property
    def headroom_bits(self) -> float | None:
        """log2(limit / amax), None where there is no limit."""
        return None if self.limit is None else headroom_bits(self.amax, self.limit)
