"""A device to test with where there is none: it computes as the CPU does, and its memory is full after some copies."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

STAND_IN = torch.device("cpu", 1)
"""A device that torch takes for another than the CPU, and whose tensors are on the CPU all the same."""


class StandIn(TorchDispatchMode):
    """Context manager in which so many copies to ``STAND_IN`` fill its memory; those of other threads do not count."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.copies = room, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == STAND_IN:
            if self.copies == self.room:
                raise torch.OutOfMemoryError(f"{STAND_IN} is out of memory")
            self.copies += 1
        return func(*args, **kwargs)
