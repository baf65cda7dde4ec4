"""The mean square of activations over all sites as a penalty (Jamba's), beside which the package's is measured.

For one process.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bf16_to_fp16 import ActivationPenalty


class MeanSquare(ActivationPenalty):
    """Has no target, so that its ``weight`` is given."""

    def __init__(self, model: nn.Module, *, weight: float, **options: Any) -> None:
        super().__init__(model, weight=weight, **options)

    def _note(self, site: str, amax: float) -> bool:
        super()._note(site, amax)
        return not math.isnan(amax)

    def _may_pull(self, site: str) -> bool:
        return True

    def _term(self, site: str, x: Tensor) -> Tensor:
        return x.float().square().mean()

    def _total(self) -> Tensor:
        if not self._terms:
            return torch.zeros(())
        assert self.weight is not None
        return torch.stack([term for runs in self._terms.values() for term in runs]).mean() * self.weight
