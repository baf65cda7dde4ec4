"""The demonstration: three small shipped checkpoints, trained in bf16, that break in fp16 until converted. ``recipes/``
has their training and enlargement."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch

from .checkpoint.staging import check_out
from .conversion.audit import audit
from .conversion.convert import convert
from .progress import Progress
from .report import terminal
from .report.remedies import next_command
from .report.schema import Report, read

CHECKPOINTS = ("t5-gated-bytes", "pegasus-bytes", "gemma3-bytes")

TEXT = "held_out.txt"


def demo(out: Path, *, progress: Progress, show: bool = True) -> list[dict[str, Any]]:
    """Audit each shipped checkpoint in fp16, convert it into ``out``, and return the reports. ``show``: print the
    tables. Raises UserError, before any work, where ``out`` cannot hold them."""
    for name in CHECKPOINTS:
        check_out(out / name, force=True)
    reports = []
    # On models this small, threads wait for each other longer than they work.
    torch.set_num_threads(1)
    with as_file(files("bf16_to_fp16") / "demo_data") as data:
        for name in CHECKPOINTS:
            progress.say(f"{name}: as trained, every parameter in fp16")
            before = audit(data / name, regimes=("half",), data=str(data / TEXT), progress=progress)
            if show:
                terminal.print_title(f"{name}, as trained")
                broken = read(Report, before)
                terminal.print_audit(broken, next_command(str(data / name), broken.regimes, converted=False))
            progress.say(f"{name}: converting")
            result = convert(data / name, out / name, data=str(data / TEXT), force=True, progress=progress)
            if show:
                terminal.print_title(f"{name}, converted")
                terminal.print_conversion(read(Report, result.report), out / name)
            reports.append(dict(result.report) | {"name": name, "before": before})
    if show:
        terminal.print_demo([(each["name"], read(Report, each["before"]), read(Report, each)) for each in reports])
    return reports
