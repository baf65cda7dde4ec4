"""Split the experts that transformers 5 fuses into modules of their own, named as in checkpoint files. Instead of one
product with gate and up projection there are two; nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .types import Family, StoredExperts


class Expert(nn.Module):
    def __init__(self, names: StoredExperts, gate: Tensor, linear: Tensor, output: Tensor, act: nn.Module) -> None:
        super().__init__()
        self.names, self.act_fn = names, copy.deepcopy(act)
        for name, weight in ((names.gate, gate), (names.linear, linear), (names.output, output)):
            module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            module.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        gate, linear, output = (getattr(self, name) for name in (self.names.gate, self.names.linear, self.names.output))
        return output(self.act_fn(gate(x)) * linear(x))


class ExpertsApart(nn.ModuleList):
    def __init__(self, gathered: Any, names: StoredExperts) -> None:
        super().__init__()
        for both, output in zip(gathered.gate_up_proj, gathered.down_proj, strict=True):
            gate, linear = both.chunk(2)
            self.append(Expert(names, gate, linear, output, gathered.act_fn))
        self.train(gathered.training)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for x [tokens, width]. chosen, weights: the ids and the
        weights of each token's experts, [tokens, experts per token]."""
        joined = torch.zeros_like(x)
        for number, expert in enumerate(self):
            if chosen.is_meta:  # routing needs values
                tokens, places = torch.arange(len(x), device=x.device), torch.zeros_like(chosen[:, 0])
            else:
                tokens, places = torch.where(chosen == number)
            if len(tokens):
                outputs = expert(x[tokens]) * weights[tokens, places, None]
                joined.index_add_(0, tokens, outputs.to(joined.dtype))
        return joined


def experts_apart(model: Any, family: Family | None) -> Any:
    """Split a model's fused experts in place, if its family's files store each separately, and return the model."""
    stored = None if family is None else family.stored_experts
    if stored is None:
        return model
    for path, module in list(model.named_modules()):
        gathered = getattr(module, "experts", None)
        if not isinstance(getattr(gathered, "gate_up_proj", None), nn.Parameter):
            continue
        module.experts = ExpertsApart(gathered, stored)
        if stored.inside:
            before, _, name = path.rpartition(".")
            layer = model.get_submodule(before)
            delattr(layer, name)
            layer.add_module(stored.inside, module)
            object.__setattr__(layer, name, module)  # which stock code calls
    return model
