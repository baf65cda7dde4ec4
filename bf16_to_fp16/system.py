"""The memory that this process can still use, and glibc's arenas."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

CGROUP = Path("/sys/fs/cgroup")  # limits and use of this process's cgroup
M_ARENA_MAX = -8  # glibc's mallopt option: how many arenas threads allocate in, 0 for its own choice


def available_memory() -> float:
    """Return the number of bytes that this process can still use, within its cgroup."""
    limits = [float(psutil.virtual_memory().available)]
    with suppress(OSError, ValueError, KeyError):  # no such file, or "max"
        most = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        # The kernel counts page cache as used, but reclaims it.
        used_by_group = dict(map(str.split, (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()))
        limits.append(most - int(used_by_group["anon"]))
    return max(0.0, min(limits))


@contextmanager
def one_arena() -> Iterator[None]:
    """Let new threads share one malloc arena, and give free memory back to the system at the end. Without glibc nothing
    happens."""
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(M_ARENA_MAX, 1)
    try:
        yield
    finally:
        library.mallopt(M_ARENA_MAX, 0)
        library.malloc_trim(0)
