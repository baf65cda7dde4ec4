"""A device to test with where there is none: it computes as the CPU does, and its memory is full after some copies."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

STAND_IN = torch.device("meta")  # a device that every torch has; its tensors have no values


class StandIn:
    """Context manager in which what is copied to ``STAND_IN`` stays on the CPU, until so many copies fill its
    memory."""

    def __init__(self, room: int) -> None:
        self.room, self.copies = room, 0

    def __enter__(self) -> StandIn:
        to = Tensor.to

        def copied(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if tensor.device.type == "cpu" and STAND_IN in (*args, kwargs.get("device")):
                if self.copies == self.room:
                    raise torch.OutOfMemoryError(f"{STAND_IN} is out of memory")
                self.copies += 1
                args = tuple(torch.device("cpu") if arg == STAND_IN else arg for arg in args)
                kwargs = {name: torch.device("cpu") if arg == STAND_IN else arg for name, arg in kwargs.items()}
            return to(tensor, *args, **kwargs)

        self._patch = mock.patch.object(Tensor, "to", copied)
        self._patch.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
