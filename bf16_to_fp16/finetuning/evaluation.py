"""How good a model is on held-out data: the losses that it is trained for, and the texts that it generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..run.batch import stack
from .corpus import Corpus, TrainingBatch
from .distillation import Teacher, arguments, counted_positions, task_loss
from .mixed_precision import MixedPrecision
from .processes import Processes
from .recipe import Evaluation

MOST_NEW_TOKENS = 64  # of a generated text


@dataclass(frozen=True)
class Evaluator:
    """Measures ``model``, which is ``stock`` as ``processes`` run it, on a corpus's held-out data."""

    settings: Evaluation
    corpus: Corpus
    stock: Any
    model: Any
    teacher: Teacher | None
    processes: Processes

    def measure(self, held: Sequence[TrainingBatch], mixed_precision: MixedPrecision) -> dict[str, Any]:
        """Return the mean losses over the positions of ``held``, and the scores of generated texts where wanted."""
        sums = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad(), mixed_precision.whole_step():
            for batch in held:
                sums += self._losses(batch, mixed_precision)
            texts = self._generate(held, mixed_precision) if self.settings.generate else []
        task, kl, positions = (float(x) for x in self.processes.sum(sums))
        found: dict[str, Any] = {"held_out_loss": None, "held_out_divergence": None}
        if positions:
            found["held_out_loss"] = task / positions if self.corpus.objective != "text" else None
            found["held_out_divergence"] = kl / positions if self.teacher is not None else None
        return found | scores(texts) if texts else found

    def _losses(self, batch: TrainingBatch, mixed_precision: MixedPrecision) -> Tensor:
        """Task's loss, divergence from the teacher and positions, each as a sum."""
        device = self.processes.device
        mask = counted_positions(batch).to(device)
        with mixed_precision.forward():
            out = self.model(**arguments(self.stock, batch, device))
        task = kl = torch.zeros((), device=device)
        if batch.labels is not None:
            task = task_loss(out.logits, batch.labels.to(device))
        if self.teacher is not None:
            kl = self.teacher.divergence(out, batch)
        return torch.stack([task.double(), kl.double(), mask.sum().double()]).cpu()

    def _generate(self, held: Sequence[TrainingBatch], mixed_precision: MixedPrecision) -> list[tuple[str, str]]:
        """(Generated, wanted) texts of all processes."""
        settings, device = self.settings, self.processes.device
        pairs: list[tuple[str, str]] = []
        for batch in held:
            if batch.targets is None:
                return []
            ids, mask = batch.input_ids, batch.attention_mask
            if batch.causal:
                ids, mask = prompts(batch, self.corpus.conventions.pad)
            with mixed_precision.forward():
                made = self.processes.accelerator.unwrap_model(self.model).generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    max_new_tokens=MOST_NEW_TOKENS,
                    num_beams=settings.beams,
                    do_sample=False,
                    synced_gpus=self.processes.sharded,
                )
            # What goes on with its input gives that as well.
            made = made[:, ids.shape[1] :] if batch.causal else made
            texts = self.corpus.tokenizer.batch_decode(made, skip_special_tokens=True)
            pairs += zip(texts[: len(batch.examples)], batch.targets, strict=False)
        return [(made, wanted) for made, wanted in self.processes.gather(pairs)]


def prompts(batch: TrainingBatch, padding: int) -> tuple[Tensor, Tensor]:
    """Return the ids and 0/1 mask of a causal model's inputs without their targets, padded on the left."""
    firsts = counted_positions(batch).int().argmax(1).tolist()
    rows = [ids[: first + 1].flip(0) for ids, first in zip(batch.input_ids, firsts, strict=True)]
    ids, mask = stack(rows, padding)
    return ids.flip(1), mask.flip(1)


def scores(texts: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return ROUGE-1, -2, -L (F1, in 0 to 1) and BLEU (0 to 100) of (generated, wanted) pairs; {} without packages."""
    try:
        import sacrebleu
        from rouge_score import rouge_scorer
    except ImportError:
        return {}
    names = ("rouge1", "rouge2", "rougeL")
    scorer = rouge_scorer.RougeScorer(list(names), use_stemmer=False)
    found = [scorer.score(wanted, made) for made, wanted in texts]
    result = {name: sum(each[name].fmeasure for each in found) / len(found) for name in names}
    bleu = sacrebleu.corpus_bleu([made for made, _ in texts], [[wanted for _, wanted in texts]])
    return result | {"bleu": float(bleu.score)}
