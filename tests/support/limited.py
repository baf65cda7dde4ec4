"""What a process does that may use only so much memory: ``python -m support.limited ACTION SOURCE OUT PLAN``.

It is a process of its own, since one that has run other tests would compute in what they have freed.
"""

import ctypes
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.convert import convert
from bf16_to_fp16.devices import Device
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.measuring import probe
from bf16_to_fp16.measuring.batch import REPEATED, Batch
from bf16_to_fp16.measuring.probe import checkpoint_batches
from bf16_to_fp16.measuring.source_runs import observe_source
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.progress import Progress

ROOM = 140 * 2**20  # for a block or two, and what is imported late; the whole model does not load in 200
M_MMAP_THRESHOLD = -3


def limit() -> None:
    """Let this process have ``ROOM`` more bytes than it has."""
    # What is freed goes back, so that no gaps count.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 19)
    used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM,) * 2)


def repeated(*given: Any, **options: Any) -> list[Batch]:
    """Gather one batch, which shows the use of memory as well as all, and what generates."""
    return [batch for batch in gather(*given, **options) if batch.kind == REPEATED or batch.generate]


def main(action: str, source: Path, out: Path, plan: Path) -> None:
    """Do one thing: ``load`` the whole model; ``convert`` with the plan, and before it what making a plan observes."""
    torch.set_num_threads(1)
    probe.audit_batches = repeated
    limit()
    if action == "load":
        load(source, torch.float32)
        return
    progress = Progress(quiet=True)
    checkpoint = open_checkpoint(source)
    inputs = checkpoint_batches(checkpoint, resolve(checkpoint), None, 0)
    observe_source(checkpoint, inputs, progress, Device("cpu", progress))
    convert(source, out, plan=plan)


gather = probe.audit_batches

if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
