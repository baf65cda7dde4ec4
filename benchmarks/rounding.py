"""A model whose weights are kept in 16 bits and computed with in fp32, so that only the storage of a step differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bf16_to_fp16 import AdamW
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch
from bf16_to_fp16.finetuning.recipe import Data

HERE = Path(__file__).parent
ROOT = HERE.parent
DEMO = ROOT / "bf16_to_fp16" / "demo_data"
LOSS_SCALE = 2.0**12
"""Keeps fp16 gradients out of the subnormals; divided out by the optimizer."""


def demo_corpus(config: Any, rows: int, *, input_length: int = 130, target_length: int = 62, seed: int = 0) -> Corpus:
    """Return the T5 demo's text in batches of so many rows, in the order of a seed."""
    data = Data(
        path=str(ROOT / "bf16_to_fp16" / "demo_data" / "python-topics.txt.gz"),
        held_out_path=str(DEMO / "held_out.txt"),
        noise_density=0.3,
        mean_span_length=18.0,
        first_sentinel=383,
        input_length=input_length,
        target_length=target_length,
        batch_size=rows,
    )
    return Corpus(data, DEMO / "t5-gated-bytes", config, seed=seed)


class Weights:
    """The parameters of a model as one way keeps them, and the optimizer that changes them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, way: str, rate: float, seed: int = 0) -> None:
        """Take the model's values, rounded to ``dtype``; seed: of stochastic rounding."""
        self.model, self.dtype, self.scale = model, dtype, LOSS_SCALE if dtype == torch.float16 else 1.0
        stored = torch.float32 if way == "fp32 master" else dtype
        self.kept = {n: nn.Parameter(p.detach().to(dtype).to(stored, copy=True)) for n, p in model.named_parameters()}
        self.start = {n: p.detach().clone() for n, p in self.kept.items()}
        options: dict[str, Any] = {"lr": rate, "weight_decay": 0.0}
        self.optimizer: torch.optim.Optimizer
        if way == "fp32 master":
            self.optimizer = torch.optim.AdamW(self.kept.values(), **options)
        else:
            self.optimizer = AdamW(self.kept.values(), rounding=way, seed=seed, **options)
        self.master = way == "fp32 master"

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Return the mean loss, computed in fp32 from the values that the format holds."""
        values = {n: p.to(self.dtype).float() for n, p in self.kept.items()}
        found: Tensor = functional_call(self.model, values, kwargs=batch.inputs()).loss
        return found

    def step(self, *batches: TrainingBatch) -> None:
        """Take one step, of gradients accumulated over some batches in the dtype of what is kept."""
        self.optimizer.zero_grad()
        for batch in batches:
            (self.loss(batch) * (self.scale / len(batches))).backward()
        if self.master:
            for parameter in self.kept.values():
                if parameter.grad is not None:
                    parameter.grad.div_(self.scale)
        else:
            self.optimizer.grad_scale = torch.tensor(self.scale)  # type: ignore[attr-defined]
        self.optimizer.step()

    def moved(self) -> float:
        """Return the share of the weights, as the forward pass reads them, that are no longer what they were."""
        changed = sum(int((p.to(self.dtype) != self.start[n].to(self.dtype)).sum()) for n, p in self.kept.items())
        return changed / sum(p.numel() for p in self.kept.values())
