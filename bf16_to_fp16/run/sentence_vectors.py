"""What stands behind an encoder in a folder of sentence-transformers, as an audit runs it.

The same operations in the same dtypes as those of sentence-transformers 6.2, which this package does not need
installed: a mean of tokens is summed in fp32, all else runs in the dtype of the encoder's output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checkpoint.side_modules import DENSE, LAYER_NORM, NORM, NORMALIZE, POOLING, SideModule


class SentenceVectors(nn.Module):
    """Makes sentences' vectors of an encoder's last states; its children have the names of the modules' folders."""

    def __init__(self, modules: Sequence[SideModule]) -> None:
        super().__init__()
        self.order = [module.name for module in modules]
        for module in modules:
            if module.name not in self._modules:
                self.add_module(module.name, BUILT.get(module.kind, nn.Identity)(module))

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors: [rows, channels]; states: [rows, positions, channels]; mask: [rows, positions]."""
        seen = mask.bool().any(1)  # a row without any position has no vector
        states, mask = states[seen], mask[seen]
        vectors = states[:, 0]
        for name in self.order:
            module = self.get_submodule(name)
            vectors = module(states, mask) if isinstance(module, Pooling) else module(vectors)
        return vectors


class Pooling(nn.Module):
    """Makes one vector of the states of a row, in one way or in several that are joined."""

    def __init__(self, module: SideModule) -> None:
        super().__init__()
        self.modes = module.modes

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([self.pooled(mode, states, mask) for mode in self.modes], -1)

    def pooled(self, mode: str, states: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors of one way to pool, the mean of one that is not known."""
        if mode == "max":
            return torch.stack([row[here].amax(0) for row, here in zip(states, mask.bool(), strict=True)])
        rows, last = torch.arange(len(states), device=states.device), mask.shape[1] - 1
        if mode == "cls":
            return states[rows, mask.int().argmax(1)]
        if mode == "lasttoken":
            return states[rows, last - mask.flip(1).int().argmax(1)]
        weights = mask[..., None].float()
        if mode == "weightedmean":
            weights = weights * mask.cumsum(1)[..., None]
        total, divisor = (states.float() * weights).sum(1), weights.sum(1)
        return (total / (divisor.sqrt() if mode == "mean_sqrt_len_tokens" else divisor)).to(states.dtype)


class Dense(nn.Module):
    """A linear with its activation and its residual."""

    def __init__(self, module: SideModule) -> None:
        super().__init__()
        self.linear, self.residual = linear_of(module, "linear"), linear_of(module, "residual")
        self.activation: nn.Module = getattr(nn, module.activation, nn.Identity)()
        self.joins = bool(module.config.get("use_residual"))

    def forward(self, vectors: Tensor) -> Tensor:
        activated: Tensor = self.activation(self.linear(vectors))
        return activated + self.residual(vectors) if self.joins else activated


def layer_norm(module: SideModule) -> nn.Module:
    """Return a LayerNorm of torch's own eps, named as in the files."""
    norm = nn.LayerNorm(len(module.tensors[f"{NORM}.weight"]))
    norm.load_state_dict({name: module.tensors[f"{NORM}.{name}"] for name in ("weight", "bias")})
    return nn.Sequential(OrderedDict({NORM: norm}))


class Normalize(nn.Identity):
    """Divides each vector by its length, with an eps that is 0 in fp16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return vectors of length 1; NaN for one of zeros in fp16."""
        return functional.normalize(input, dim=-1)


BUILT: dict[str, Any] = {DENSE: Dense, LAYER_NORM: layer_norm, NORMALIZE: Normalize, POOLING: Pooling}
"""What runs for each class of modules; the others change nothing, as a dropout outside training."""


def linear_of(module: SideModule, name: str) -> nn.Module:
    """Return a module's linear of a name, the identity where it has none."""
    weight, bias = module.tensors.get(f"{name}.weight"), module.tensors.get(f"{name}.bias")
    if weight is None:
        return nn.Identity()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return linear
