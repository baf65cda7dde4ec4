"""The losses of a finetune's step: the task and the divergence on the data, and the divergence on the audit's probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..measuring.batch import Batch, spared, values_of
from ..measuring.probe import batches as probe_batches
from ..measuring.probe import random_rows
from .corpus import TrainingBatch
from .distillation import Teacher, arguments, counted_positions, task_loss
from .penalty import ActivationPenalty
from .processes import Processes
from .recipe import Recipe

BEYOND = 0.2  # weight of the divergence beyond the data, beside that on the data


@dataclass(frozen=True)
class Losses:
    """stock: the student; model: the same as the processes run it. passes: batches of a step of one process."""

    recipe: Recipe
    stock: Any
    model: Any
    teacher: Teacher | None
    penalty: ActivationPenalty | None
    processes: Processes
    passes: int

    def calls(self, batches: Sequence[TrainingBatch]) -> list[TrainingBatch | int]:
        """Return what goes through the model before each backward of a step: a pass's batch, then the number of its
        share of the probe. In one backward both would hold their activations, and a model in parts what it gathers."""
        if self.penalty is None:
            return list(batches)
        return [call for index, batch in enumerate(batches) for call in (batch, index)]

    def of_batch(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the objective (with its graph), and the task's loss and the divergence, summed over positions."""
        mix, device = self.recipe.distillation, self.processes.device
        out = self.model(**arguments(self.stock, batch, device))
        task = kl = torch.zeros((), device=device)
        with torch.autocast(device.type, enabled=False):
            if self.teacher is not None and (mix.weight > 0 or batch.labels is None):
                kl = self.teacher.divergence(out, batch)
            loss = kl
            if batch.labels is not None:
                learnt = out.logits if mix.weight < 1 else out.logits.detach()  # then it is only shown
                task = task_loss(learnt, batch.labels.to(device))
                loss = kl if mix.weight == 1 else task * (1 - mix.weight) + kl * mix.weight
        return loss, torch.stack([task.detach(), kl.detach()]).double().cpu()

    def beyond_the_data(self, step: int, index: int) -> Tensor:
        """Run a pass's share of the audit's probe and return its part of the loss. The backward goes through every
        forward: processes that have parts of a model must gather the same weights."""
        assert self.penalty is not None
        whole, world, device = spared(self.stock.config, self.drawn(step)), self.processes.world, self.processes.device
        count, first = len(whole.input_ids), index + self.passes * self.processes.rank
        part = whole.rows(slice(min(first, count - 1), None, self.passes * world))
        # A wrapped model's forwards are for all processes: one for which no row is left repeats the last, unseen.
        self.penalty.watches = first < count
        out = self.model(**arguments(self.stock, part, device))
        self.penalty.watches = True
        share = BEYOND * self.recipe.distillation.weight
        if not share or self.teacher is None or not bool(values_of(out).isfinite().all()):
            # Under ZeRO and FSDP every forward has a backward, even if an infinity in it then skips the step.
            return values_of(out)[..., :0].sum() if self.processes.sharded else torch.zeros((), device=device)
        with torch.autocast(device.type, enabled=False):
            far = self.teacher.damped_divergence(out, part) * (first < count)
        return far * (share / int(counted_positions(whole).sum()))

    def drawn(self, step: int) -> Batch:
        config = self.stock.config
        seed = self.recipe.seed + 1 + step  # fixed random ids would be learnt by heart
        if step % 2 == 0:  # most of the probe is random ids, and in short rows nothing is averaged
            return random_rows(config, seed=seed, left=step % 4 == 2)
        drawn = [b for b in probe_batches(config, None, None, seed=seed) if not b.generate]
        return drawn[step // 2 % len(drawn)]
