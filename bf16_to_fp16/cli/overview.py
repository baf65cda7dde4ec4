"""The commands ``families`` and ``demo``."""

from __future__ import annotations

from pathlib import Path

import click

from .shared import FOLDER, SAFE, UNSAFE, json_file, make_progress, write_result


@click.command("families")
@json_file
def families_command(json_file: str | None) -> int:
    """List what is supported, and what cannot be."""
    from ..families.known import FAMILIES, REFUSED, names_of
    from ..report.screen import print_families, print_refused

    rows = [
        {
            "name": f.name,
            "title": f.title,
            "model_type": f.model_type,
            "architectures": list(names_of(f)),
            "untie": f.untie or "never",
        }
        for f in FAMILIES
    ]
    if write_result(json_file, {"families": rows, "refused": dict(REFUSED)}):
        print_families(rows)
        print_refused(REFUSED)
    return SAFE


@click.command("demo")
@click.option(
    "--out", type=FOLDER, metavar="DIR", default=Path("fp16-demo"), show_default=True, help="Where the results go."
)
@json_file
def demo_command(out: Path, json_file: str | None) -> int:
    """Break three small trained checkpoints in fp16, convert them, and show the difference; no network."""
    from ..demo import demo

    reports = demo(out, progress=make_progress(), show=json_file != "-")
    write_result(json_file, {"demos": reports})
    return SAFE if all(r["verdict"] == "safe" for r in reports) else UNSAFE
