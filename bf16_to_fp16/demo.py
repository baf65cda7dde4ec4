"""The demonstration: three small packaged checkpoints, trained in bf16, that break in fp16 until converted.
``recipes/`` has the scripts that trained them and made their activations large."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch

from .checkpoint.staging import check_out
from .conversion.audit import audit
from .conversion.convert import convert
from .progress import Progress
from .report import terminal
from .report.schema import Report, read
from .report.screen import Column, Table, console, numbers
from .results import Fidelity
from .wording import factor, percent

CHECKPOINTS = ("t5-gated-bytes", "pegasus-bytes", "gemma3-bytes")

TEXT = "held_out.txt"


def demo(out: Path, *, progress: Progress, show: bool = True) -> list[dict[str, Any]]:
    """Audit each packaged checkpoint in fp16, convert it into ``out``, and return the conversions' reports. Raises
    UserError, before any work, if ``out`` cannot be written. show: print the results."""
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
                terminal.print_audit(read(Report, before))
            progress.say(f"{name}: converting")
            result = convert(data / name, out / name, data=str(data / TEXT), force=True, progress=progress)
            if show:
                terminal.print_title(f"{name}, converted")
                terminal.print_conversion(read(Report, result.report), out / name)
            reports.append(dict(result.report) | {"name": name, "before": before})
    if show:
        print_table([(each["name"], read(Report, each["before"]), read(Report, each)) for each in reports])
    return reports


def print_table(pairs: Sequence[tuple[str, Report, Report]]) -> None:
    def proven(report: Report) -> str:
        if report.certificate is None or not report.certificate.holds:
            return "not proven"
        return f"{factor(report.certificate.headroom_bits)} ×"

    before, after = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    close = [report.fidelity or Fidelity() for report in after]
    broken = [max(regime.nonfinite + regime.saturated for regime in report.regimes.values()) for report in after]
    share = [report.weights.lossless_fraction if report.weights else 0.0 for report in after]
    room = [min(regime.headroom_bits for regime in report.regimes.values()) for report in after]
    streams = [report.plan.residual_exponents if report.plan else () for report in after]
    rows = [
        ("as trained, in fp16: inf or NaN", [f"{report.regimes['half'].nonfinite:,}" for report in before]),
        ("converted, in fp16: inf, NaN or saturated", [f"{count:,}" for count in broken]),
        ("headroom: largest observed value", [f"{factor(bits)} ×" for bits in room]),
        ("headroom: any input, by proof", [proven(report) for report in after]),
        ("residual stream's factor", [", ".join(f"2^{r}" for r in each) for each in streams]),
        ("KL to fp32, nats: original in bf16", [f"{each.kl_bf16 or 0:.1e}" for each in close]),
        ("KL to fp32, nats: converted in fp16", [f"{each.kl_fp16 or 0:.1e}" for each in close]),
        ("weights carried over bit for bit", [percent(each) for each in share]),
    ]
    columns = [Column("", 0), *(numbers(pair[0], i, str) for i, pair in enumerate(pairs, 1))]
    console().table(Table(columns, [(title, *cells) for title, cells in rows], "the three checkpoints"))
