"""Evaluate a model: its task loss on held-out data, and its distance from the original on several kinds of input.

These are held-out data, the audit's inputs, other kinds of text and, for a classifier, inputs of every class. The
training text alone says least about whether the original's function is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..measuring.batch import Batch, stack
from ..measuring.fidelity import compared
from ..measuring.probe import batches, random_rows
from .corpus import Corpus, TrainingBatch
from .distillation import Teacher, arguments, counted_positions, task_loss
from .mixed_precision import MixedPrecision
from .processes import Processes
from .recipe import Recipe

MOST_EXAMPLES = 256  # held-out examples of one evaluation
SPARE_BITS = 0.25  # more headroom than was asked for, since the audit's values are rounded otherwise
ROWS_OF_A_CLASS, MOST_DRAWN = 4, 32  # rows for each class, and batches of random ids in which a class is looked for


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
        others: dict[str, Sequence[TrainingBatch | Batch]] = {"audit": probe, "unlike": self.corpus.unlike()}
        if self.corpus.answers_rows and self.teacher.chooses:
            others["class"] = self._of_every_class(self.teacher)
        return others

    def _of_every_class(self, teacher: Teacher) -> list[TrainingBatch]:
        """Return a few rows of each class that the teacher predicts, on text first and then on random ids."""
        config, by_class = self.stock.config, dict[int, list[Tensor]]()
        texts = [*self.corpus.held_out(MOST_EXAMPLES), *self.corpus.unlike()]
        drawn = (random_rows(config, seed=seed) for seed in range(MOST_DRAWN))
        of_random_ids = (in_rows(batch.input_ids, batch.attention_mask) for batch in drawn)
        for number, batch in enumerate(chain(texts, of_random_ids)):
            full = sum(len(rows) == ROWS_OF_A_CLASS for rows in by_class.values())
            if number >= len(texts) and full == config.num_labels:
                break
            classes = teacher.outputs(batch).argmax(-1).tolist()
            for ids, mask, chosen in zip(batch.input_ids, batch.attention_mask, classes, strict=True):
                if len(rows_of_class := by_class.setdefault(chosen, [])) < ROWS_OF_A_CLASS:
                    rows_of_class.append(ids[mask.bool()])
        every = [ids for rows_of_class in by_class.values() for ids in rows_of_class]
        size, padding = self.corpus.data.batch_size, self.corpus.conventions.pad
        return [in_rows(*stack(every[first : first + size], padding)) for first in range(0, len(every), size)]

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
    """Return the step of least geometric mean divergence with bounds and headroom kept; None: the last state."""
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


def in_rows(ids: Tensor, mask: Tensor) -> TrainingBatch:
    return TrainingBatch(ids, mask, None, tuple((0, row) for row in range(len(ids))), row_wise=True)
