"""Four steps of a small model, and what they leave of its weights."""

from typing import Any

import torch


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids[:, :7].flip(1)}


def trained(model: Any, optimizer: torch.optim.Optimizer, clip: float = 0.0, **given: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(**batch() | given).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses
