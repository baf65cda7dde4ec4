"""Other forms of the activation penalty, with which ``penalty.py`` and ``finetune.py`` compare the package's.

=============== =============================================== =======================
form            what is penalised                               target
=============== =============================================== =======================
``amax``        excess of log2 of the largest value             by dual ascent
``hinge``       sum of relu(|x| − target)² of every element      by dual ascent
``mean-square`` mean over all sites of the mean of x² (Jamba's) none; needs ``weight``
``lp``          mean over all sites of the L8 norm              none; needs ``weight``
=============== =============================================== =======================

For one process, without accumulation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bf16_to_fp16 import ActivationPenalty

ORDER = 8.0
WITHOUT_TARGET = ("mean-square", "lp")
FORMS = ("amax", "hinge", *WITHOUT_TARGET)


class ComparedPenalty(ActivationPenalty):
    """The penalty of another form of ``FORMS``; the rest is as the package has it."""

    def __init__(self, compared: str, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        if compared in WITHOUT_TARGET and self.weight is None:
            raise ValueError(f"{compared} has no target for dual ascent to reach; give a fixed weight")
        self.compared = compared

    def _note(self, site: str, amax: float) -> bool:
        over = super()._note(site, amax)
        return not math.isnan(amax) if self.compared in WITHOUT_TARGET else over

    def _may_pull(self, site: str) -> bool:
        return self.compared in WITHOUT_TARGET or super()._may_pull(site)

    def _term(self, site: str, x: Tensor) -> Tensor:
        wide = x.float()
        if self.compared == "mean-square":
            return wide.square().mean()
        magnitude = wide.abs()
        if self.compared == "hinge":
            return (magnitude - self._target[site]).relu().square().sum()
        if self.compared == "amax":
            return (magnitude.amax().log2() - math.log2(self._target[site])).relu()
        largest = magnitude.detach().amax().clamp(min=torch.finfo(torch.float32).tiny)
        return (magnitude / largest).pow(ORDER).sum().pow(1 / ORDER) * largest

    def _total(self) -> Tensor:
        if not self._terms:
            return torch.zeros(())
        if self.compared in WITHOUT_TARGET:
            assert self.weight is not None
            return torch.stack([term for runs in self._terms.values() for term in runs]).mean() * self.weight
        join = torch.amax if self.compared == "amax" else torch.sum
        return torch.stack([self._weight(site) * join(torch.stack(runs)) for site, runs in self._terms.items()]).sum()
