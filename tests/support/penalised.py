"""A tiny model under the activation penalty, its inputs, and what is compared of it."""

from typing import Any

import torch
from support import tiny
from torch import Tensor, nn

from bf16_to_fp16.finetuning.penalty import ActivationPenalty

SCORES = "encoder.block.1.layer.0.SelfAttention:scores"
LOGITS = "lm_head"


def built(kind: str = "gated", train: bool = False) -> Any:
    model = tiny.build(kind, factor=1.0).train(train)
    model.set_attn_implementation("eager")
    return model


def ids_of(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, (rows, 12), generator=torch.Generator().manual_seed(seed))


def waiting(penalty: ActivationPenalty, waits: bool) -> None:
    """Let a CPU count as a device whose values cost a wait, or not: it stands in for an accelerator."""
    penalty._waits = lambda x: waits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def reached(model: Any, ids: Tensor) -> dict[str, float]:
    with ActivationPenalty(model, weight=0.0, train_mode=True) as penalty:
        model(input_ids=ids, labels=ids)
        penalty()
    return {site: seen.amax for site, seen in penalty.observations().items()}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5, bias=False), nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def two() -> tuple[Two, Tensor]:
    torch.manual_seed(0)
    return Two(), torch.randn(2, 6, 3)


class Scaled(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class One:
    """A site whose values are all of one size, attached to a penalty of target and weight 1."""

    SITE = "model:mul"

    def __init__(self, **options: Any) -> None:
        self.model = Scaled(torch.ones(2, requires_grad=True))
        given: dict[str, Any] = {"targets": {self.SITE: 1.0}, "weight": 1.0, **options}
        self.penalty = ActivationPenalty(self.model, **given).attach()

    def call(self, *sizes: float) -> list[float]:
        totals = []
        for size in sizes:
            self.model(torch.tensor(size))
            totals.append(self.penalty().item())
        return totals

    @property
    def seen(self) -> Any:
        return self.penalty.observations()[self.SITE]
