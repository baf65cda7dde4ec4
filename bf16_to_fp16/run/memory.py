"""How much memory this process may still take."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path


def available() -> float:
    """Return the bytes that this process may still take: of the machine's memory what is free, less where a cgroup or
    a resource limit leaves less; infinity where nothing tells, as on systems other than Linux without a limit."""
    found = [float("inf")]
    if sys.platform == "linux":
        found.append(_field("/proc/meminfo", "MemAvailable") * 1024)
        for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            most, _ = resource.getrlimit(limit)
            if most != resource.RLIM_INFINITY:
                found.append(most - _field("/proc/self/status", used) * 1024)
        group = Path("/sys/fs/cgroup")
        with suppress(OSError, ValueError):  # no such file, or "max"
            # Of what a group has, page cache can be taken back.
            found.append(int((group / "memory.max").read_text()) - _field(str(group / "memory.stat"), "anon"))
    return max(0.0, min(found))


def _field(path: str, name: str) -> float:
    """The number behind a name at the beginning of a line; infinity where there is none."""
    for line in Path(path).read_text().splitlines():
        words = line.replace(":", " ").split()
        if words[:1] == [name]:
            return int(words[1])
    return float("inf")


def peak() -> int:
    """Return the most bytes of memory that this process has held at a time."""
    if sys.platform == "linux":
        # Of itself alone: what getrusage says may be of the process that started it.
        return int(_field("/proc/self/status", "VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
