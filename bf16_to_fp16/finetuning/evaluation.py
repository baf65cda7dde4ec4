"""Evaluate a model: its task loss on held-out data, and its distance from the original there, on the audit's inputs and
on other kinds of text. The training data alone would not show changes of the function elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..measuring.batch import Batch
from ..measuring.fidelity import compared
from ..measuring.probe import batches
from .corpus import Corpus, TrainingBatch
from .distillation import Teacher, arguments, counted_positions, task_loss
from .mixed_precision import MixedPrecision
from .processes import Processes
from .recipe import Recipe

MOST_EXAMPLES = 256  # held-out examples of one evaluation
SPARE_BITS = 0.25  # more headroom than was asked for, since the audit's values are rounded otherwise


@dataclass(frozen=True)
class Evaluator:
    recipe: Recipe
    corpus: Corpus
    stock: Any
    model: Any
    teacher: Teacher | None
    processes: Processes

    def measure(self, held: Sequence[TrainingBatch], mixed_precision: MixedPrecision) -> dict[str, Any]:
        """Return the mean held-out loss and, by kind of input, divergence and argmax agreement with the teacher."""
        measured: dict[str, Any] = {"held_out_loss": None, "held_out_divergence": None}
        with torch.no_grad(), mixed_precision.whole_step():
            for kind, batches in {"held_out": held, **self._others}.items():
                sums = torch.zeros(4, dtype=torch.float64)
                for batch in batches:
                    sums += self._sums(batch, mixed_precision)
                task, divergence, same, positions = (float(x) for x in self.processes.sum(sums))
                if positions and kind == "held_out" and self.corpus.objective != "text":
                    measured["held_out_loss"] = task / positions
                if positions and self.teacher is not None:
                    measured[f"{kind}_divergence"] = divergence / positions
                    if self.teacher.chooses:
                        measured[f"{kind}_agreement"] = same / positions
        return measured

    @cached_property
    def _others(self) -> dict[str, Sequence[TrainingBatch | Batch]]:
        if self.teacher is None:
            return {}
        probe = compared(batches(self.stock.config, None, None, seed=self.recipe.seed))
        return {"audit": probe, "unlike": self.corpus.unlike()}

    def _sums(self, batch: TrainingBatch | Batch, mixed_precision: MixedPrecision) -> Tensor:
        """Return the sums of task loss, divergence, equal argmax and counted positions: fp64 [4]."""
        device = self.processes.device
        with mixed_precision.forward():
            out = self.model(**arguments(self.stock, batch, device))
        task = torch.zeros((), dtype=torch.float64)
        if isinstance(batch, TrainingBatch) and batch.labels is not None:
            task = task_loss(out.logits, batch.labels.to(device)).cpu().double()
        if self.teacher is None:
            positions = counted_positions(batch).sum().double()
            return torch.stack([task, torch.zeros_like(task), torch.zeros_like(task), positions])
        return torch.cat([task[None], self.teacher.comparison(out, batch)])


def nearest(recipe: Recipe, evaluations: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the evaluated step that is nearest to the original (least geometric mean of the divergences) among those
    whose bounds and headroom meet the recipe; None to use the last step."""
    if recipe.quality.max_kl is None or recipe.distillation.weight < 1:
        return None
    wanted = recipe.penalty.headroom_bits + SPARE_BITS

    def holds(evaluation: Mapping[str, Any]) -> bool:
        over, bits = evaluation.get("bounds_over"), evaluation.get("worst_headroom_bits")
        return (over is not None or bits is not None) and not over and (bits is None or bits >= wanted)

    def far(evaluation: Mapping[str, Any]) -> float:
        values = [value for key, value in evaluation.items() if key.endswith("_divergence") and value is not None]
        total = sum(math.log(max(value, 1e-30)) if value < math.inf else math.inf for value in values)
        return total if values else math.inf

    best = min(filter(holds, evaluations), key=far, default=None)
    return None if best is None or far(best) == math.inf else best["step"]
