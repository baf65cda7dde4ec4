"""The memory that a process may take and its threads keep."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

CGROUP = Path("/sys/fs/cgroup")  # where Linux says what the group of this process may use and does
M_ARENA_MAX = -8  # glibc's mallopt option: how many arenas threads allocate in, 0 for its own choice


def available_memory() -> float:
    """Return the bytes that this process may still take, within its cgroup and limits."""
    limits = [float(psutil.virtual_memory().available)]
    process = psutil.Process()
    if hasattr(process, "rlimit"):
        used = process.memory_info()
        for limit, taken in ((psutil.RLIMIT_AS, used.vms), (psutil.RLIMIT_DATA, used.data)):
            most, _ = process.rlimit(limit)
            if most != psutil.RLIM_INFINITY:
                limits.append(most - taken)
    with suppress(OSError, ValueError, KeyError):  # no such file, or "max"
        most = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        # Of what a group has, page cache can be taken back.
        used_by_group = dict(map(str.split, (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()))
        limits.append(most - int(used_by_group["anon"]))
    return max(0.0, min(limits))


@contextmanager
def one_arena() -> Iterator[None]:
    """Have new threads share one arena: each of their own would keep what it has freed. What lies free between is given
    back at the end. Only glibc has arenas."""
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
