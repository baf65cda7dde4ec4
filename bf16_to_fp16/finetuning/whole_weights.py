"""One weight at a time, whole, of a model of which each process may hold a part: read, and written back.

A process never has more of the others' weights than the one it reads, and the leaves that it asks for. All must read
and write the same ones in the same order, since each is gathered from all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


class WholeWeights:
    """The parameters and buffers of a stock model by the names of its modules, as the processes run it.

    Of a model that is whole ``read`` gives the live tensors. Of one in parts it gives copies, whose changes ``write``
    puts into every process's part.
    """

    def __init__(self, model: nn.Module, *, engine: bool = False) -> None:
        self.engine = engine
        self._named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        self._named |= dict(model.named_buffers(remove_duplicate=False))
        self.in_parts = engine or any(isinstance(x, DTensor) for x in self._named.values())
        self._leaves: dict[int, Tensor] = {}

    def is_trained(self, name: str) -> bool:
        return bool(self._named[name].requires_grad)

    def read(self, name: str) -> Tensor:
        weight = self._named[name]
        return self._leaves[id(weight)] if id(weight) in self._leaves else self._gathered(weight)

    def leaves(self, names: Iterable[str]) -> list[Tensor]:
        """Return weights whole, as leaves of a graph that ``read`` gives under every name of theirs until ``write``."""
        leaves = []
        for name in names:
            weight = self._named[name]
            if id(weight) not in self._leaves:
                self._leaves[id(weight)] = self._gathered(weight).requires_grad_() if self.in_parts else weight
            leaves.append(self._leaves[id(weight)])
        return leaves

    def write(self) -> None:
        """Put the leaves, as they are now, where the weights are; those of the first process where others differ."""
        leaves, self._leaves = self._leaves, {}
        if self.in_parts:
            for weight in {id(x): x for x in self._named.values()}.values():
                if id(weight) in leaves:
                    self._put(weight, leaves[id(weight)].detach())

    def agreed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.in_parts or not values:
            return dict(values)
        joined = torch.cat([x.flatten() for x in values.values()])
        torch.distributed.broadcast(joined, 0)
        parts = joined.split([x.numel() for x in values.values()])
        return {name: part.view(x.shape) for (name, x), part in zip(values.items(), parts, strict=True)}

    def _gathered(self, weight: Any) -> Tensor:
        if isinstance(weight, DTensor):
            part: Any = weight.detach()
            gathered: Tensor = part.full_tensor()
            return gathered
        if not self.in_parts:
            whole: Tensor = weight
            return whole
        if not hasattr(weight, "ds_id"):
            return weight.detach().clone()
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([weight]):
            return weight.detach().clone()

    def _put(self, weight: Any, value: Tensor) -> None:
        if isinstance(weight, DTensor):
            part = distribute_tensor(value, weight.device_mesh, weight.placements).to_local()
            local: Any = weight.detach()
            local.to_local().copy_(part)
            return
        from deepspeed import utils
        from deepspeed.runtime.zero import GatheredParameters

        if hasattr(weight, "ds_id"):
            with GatheredParameters([weight], modifier_rank=0):
                weight.data.copy_(value)
            # The optimizer's copy, which is the same memory unless it is offloaded.
            utils.safe_set_local_fp32_param(weight, weight.ds_tensor.detach())
        else:
            torch.distributed.broadcast(value, 0)
            weight.data.copy_(value)
            utils.safe_set_full_fp32_param(weight, value)
