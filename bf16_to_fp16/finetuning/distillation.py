"""The losses of a training step: the task loss, and the distance from the outputs of the teacher, the frozen original.

Logits are compared by KL(teacher ‖ student) (Hinton et al., arXiv:1503.02531), other outputs by the squared error
relative to the teacher's squared norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ..measuring.batch import IGNORED_LABEL, Batch, values_of, with_spare_padding
from ..measuring.fidelity import compared
from ..measuring.probe import batches as probe_batches
from ..measuring.probe import random_rows
from ..measuring.stock import gives_probabilities, is_causal, takes_decoder_ids
from .corpus import Corpus, TrainingBatch
from .mixed_precision import MixedPrecision
from .penalty import ActivationPenalty
from .processes import Processes
from .recipe import Recipe


def kl_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher ‖ student) at each position, in nats, for logits [positions, vocabulary] of any dtype."""
    p, q = (logits.float().log_softmax(-1) for logits in (teacher, student))
    return functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def hidden_error(student: Tensor, teacher: Tensor) -> Tensor:
    """Return ‖student − teacher‖²/‖teacher‖² at each position, for hidden states [positions, channels]."""
    s, t = student.float(), teacher.float()
    length = t.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (s - t).square().sum(-1) / length


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy, in nats, of logits [rows, length, vocabulary]; labels of −100 do not count."""
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def counted_positions(batch: TrainingBatch | Batch) -> Tensor:
    """Return which output positions count in the loss, as bool [rows, length]."""
    if isinstance(batch, Batch):
        return (batch.attention_mask if batch.decoder_attention_mask is None else batch.decoder_attention_mask).bool()
    if batch.labels is not None:
        return batch.labels != IGNORED_LABEL
    if not batch.examples:
        return torch.zeros_like(batch.attention_mask, dtype=torch.bool)
    if batch.row_wise:
        places = torch.arange(batch.attention_mask.shape[1])
        return places == (places * batch.attention_mask).amax(1, keepdim=True)
    return batch.attention_mask.bool()


def counted_values(out: Any, batch: TrainingBatch | Batch) -> Tensor:
    values, counted = values_of(out), counted_positions(batch)
    return values[(counted.any(1) if values.dim() == 2 else counted).to(values.device)]


def arguments(model: Any, batch: TrainingBatch | Batch, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments with which ``model`` runs a batch. In training, a decoder's inputs are the labels
    or, if there are none, ``input_ids``, shifted right."""
    given: dict[str, Any] = {"input_ids": batch.input_ids.to(device), "attention_mask": batch.attention_mask.to(device)}
    decodes, causal = takes_decoder_ids(model.config), is_causal(model.config)
    if isinstance(batch, Batch):
        names = ("decoder_input_ids", "decoder_attention_mask") if decodes else ()
        given |= {name: getattr(batch, name).to(device) for name in names}
    elif decodes and batch.labels is not None:
        given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch.labels.to(device))
    elif decodes:
        given["decoder_input_ids"] = model._shift_right(given["input_ids"])
        given["decoder_attention_mask"] = given["attention_mask"]
    if decodes or causal:
        # A cache is of no use for a whole target, and changes the order of sums.
        given["use_cache"] = False
    return given


class Teacher:
    """The frozen original model, with whose outputs the student's are compared. in_parts: whether to shard it over
    torch's default process group; then all processes must make each call."""

    def __init__(self, model: Any, device: torch.device, *, in_parts: bool = False) -> None:
        model = model.eval().requires_grad_(False)
        self.model = sharded(model, device) if in_parts else model.to(device)
        self.device = device
        self.chooses = gives_probabilities(model.config)

    @torch.no_grad()
    def outputs(self, batch: TrainingBatch | Batch) -> Tensor:
        """Return logits or hidden states of the positions that count, in fp32 [positions, vocabulary or channels]."""
        with torch.autocast(self.device.type, enabled=False):
            out = self.model(**arguments(self.model, batch, self.device))
        return counted_values(out, batch).float()

    def divergence(self, out: Any, batch: TrainingBatch | Batch) -> Tensor:
        return self._distances(counted_values(out, batch), self.outputs(batch)).sum()

    def damped_divergence(self, out: Any, batch: TrainingBatch | Batch) -> Tensor:
        """Return the sum of log(1 + divergence) over positions, so that no single position dominates the sum."""
        return self._distances(counted_values(out, batch), self.outputs(batch)).clamp(min=0).log1p().sum()

    def comparison(self, out: Any, batch: TrainingBatch | Batch) -> Tensor:
        """Return fp64 [3]: the summed divergence, the number of argmaxes equal to the teacher's, and the number of
        positions."""
        student, teacher = counted_values(out, batch), self.outputs(batch)
        same = (student.argmax(-1) == teacher.argmax(-1)).sum()
        sums = (self._distances(student, teacher).sum(), same, same.new_tensor(len(teacher)))
        return torch.stack([x.detach().cpu().double() for x in sums])

    def _distances(self, student: Tensor, teacher: Tensor) -> Tensor:
        return kl_divergence(student, teacher) if self.chooses else hidden_error(student, teacher)


def sharded(model: Any, device: torch.device) -> Any:
    """Shard ``model`` over torch's default process group by FSDP2, with one unit for each block; return it."""
    mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for part in (*blocks_of(model), model):
        fully_shard(part, mesh=mesh)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's blocks: the children of its outermost ModuleLists."""
    lists: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists.append(path)
    return [block for path in lists for block in model.get_submodule(path).children()]


PROBE_WEIGHT = 0.2  # of the divergence on the probe, beside that on the data


@dataclass(frozen=True)
class StepLosses:
    """Computes the losses of a training step. ``stock`` is the student, ``model`` the student as wrapped for several
    processes, and ``passes`` the number of batches in a step of one process."""

    recipe: Recipe
    stock: Any
    model: Any
    teacher: Teacher | None
    penalty: ActivationPenalty | None
    processes: Processes
    passes: int

    def calls(self, batches: Sequence[TrainingBatch]) -> list[TrainingBatch | int]:
        """Return the arguments of a step's calls, in order: a batch for ``of_batch``, an index for ``of_probe``. With a
        penalty, each batch is followed by the index of a part of the probe."""
        # Each has its own backward: one for both would keep both activations, and all weights that shards gather.
        if self.penalty is None:
            return list(batches)
        return [call for index, batch in enumerate(batches) for call in (batch, index)]

    def of_batch(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the loss and, detached, a tensor of the task loss and the divergence. All are sums over positions."""
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
                if mix.weight < 1:
                    loss = task * (1 - mix.weight) + kl * mix.weight
        return loss, torch.stack([task.detach(), kl.detach()]).double().cpu()

    def of_probe(self, step: int, index: int) -> Tensor:
        """Run part ``index`` of a step's probe and return its loss. All processes must call this together. If the model
        is sharded, even a loss of 0 has a graph, because the backward gathers weights in all processes together."""
        assert self.penalty is not None
        whole = with_spare_padding(self.stock.config, self.drawn(step))
        device, share = self.processes.device, PROBE_WEIGHT * self.recipe.distillation.weight
        count, first = len(whole.input_ids), index + self.passes * self.processes.rank
        part = whole.rows(slice(min(first, count - 1), None, self.passes * self.processes.world))
        # A wrapped model's forwards are for all processes: one for which no row is left repeats the last, unseen.
        self.penalty.watches = first < count
        out = self.model(**arguments(self.stock, part, device))
        self.penalty.watches = True
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
        """Return the mean held-out loss and, for each kind of input, how far the model is from the teacher: the mean
        divergence, and the share of equal argmaxes."""
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
        probe = compared(probe_batches(self.stock.config, None, None, seed=self.recipe.seed))
        return {"audit": probe, "unlike": self.corpus.unlike()}

    def _sums(self, batch: TrainingBatch | Batch, mixed_precision: MixedPrecision) -> Tensor:
        """Return four fp64 sums for a batch: the task loss, and the three that ``Teacher.comparison`` returns."""
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
    """Return the step whose model is nearest to the original, or None if the last step is to be used. The geometric
    mean of a step's divergences says how near it is. Only steps that meet the recipe's bounds and headroom count."""
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
