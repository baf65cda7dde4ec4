"""How much memory this process may still take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")  # where Linux says what the group of this process may use and does


def available() -> float:
    """Return the bytes that this process may still take: what is free, less where a cgroup or a limit leaves less."""
    found = [float(psutil.virtual_memory().available)]
    process = psutil.Process()
    if hasattr(process, "rlimit"):
        used = process.memory_info()
        for limit, taken in ((psutil.RLIMIT_AS, used.vms), (psutil.RLIMIT_DATA, used.data)):
            most, _ = process.rlimit(limit)
            if most != psutil.RLIM_INFINITY:
                found.append(most - taken)
    with suppress(OSError, ValueError, KeyError):  # no such file, or "max"
        most = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        # Of what a group has, page cache can be taken back.
        used_by_group = dict(map(str.split, (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()))
        found.append(most - int(used_by_group["anon"]))
    return max(0.0, min(found))
