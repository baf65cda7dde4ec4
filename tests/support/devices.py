"""A device to test with where there is none: it computes as the CPU does, and its memory is full after some copies."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

STAND_IN = torch.device("meta")  # a device that every torch has; its tensors have no values


class StandIn:
    """Context manager in which what is copied to ``STAND_IN``, in this thread and in those it starts, stays on the CPU,
    until so many copies fill its memory."""

    def __init__(self, room: int) -> None:
        self.room, self.copies = room, 0
        self._open = ExitStack()

    def __enter__(self) -> StandIn:
        run = threading.Thread.run

        def inside(thread: threading.Thread) -> None:
            with _Copies(self):
                run(thread)

        self._open.enter_context(mock.patch.object(threading.Thread, "run", inside))
        self._open.enter_context(_Copies(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()


class _Copies(TorchDispatchMode):
    """Keeps what one thread copies to the device; a mode is a thread's own."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.ops.aten._to_copy.default
            and kwargs.get("device") == STAND_IN
            and args[0].device.type == "cpu"
        ):
            if self.device.copies == self.device.room:
                raise torch.OutOfMemoryError(f"{STAND_IN} is out of memory")
            self.device.copies += 1
            kwargs = kwargs | {"device": torch.device("cpu")}
        return func(*args, **kwargs)
