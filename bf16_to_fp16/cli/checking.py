"""The commands ``audit``, ``certify`` and ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..conversion.options import FOLDER, PATH
from ..targets import TARGETS, WHERE
from . import shared
from .shared import SAFE, UNSAFE


@click.command("audit")
@shared.source
@click.option(
    "--regime",
    "regimes",
    multiple=True,
    type=click.Choice(["stock", "amp", "half"]),
    default=["stock", "amp", "half"],
    help="Repeat for several; default: all.",
)
@shared.data
@click.option(
    "--attention",
    multiple=True,
    type=click.Choice(["eager", "sdpa"]),
    default=["eager", "sdpa"],
    help="Repeat for several; default: both.",
)
@click.option("--train-mode", is_flag=True, help="With dropout, and the backward pass under a loss scale.")
@click.option(
    "--attack",
    "attack_steps",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Search by gradient for the input that comes nearest to each limit, and compare with the certificate.",
)
@shared.subfolder
@shared.device
@click.option("--html", type=FOLDER, metavar="FILE", help="Write the report as a page.")
@shared.json_file
def audit_command(source: str, html: Path | None, json_file: str | None, **options: Any) -> int:
    """Run SOURCE in fp16 in the ways people run models, and measure every operation's output."""
    shared.checked_target(html, "--html")
    from ..conversion.audit import audit
    from ..report import terminal
    from ..report.schema import Report, read

    result = audit(source, progress=True, **options)
    shared.write_result(json_file, result)
    report = read(Report, result)
    if html is not None:
        from ..report.page import write_page

        with shared.replacing_for("--html", html) as new:
            write_page(new, report)
    if json_file != "-":
        terminal.print_audit(report, page=html)
    return SAFE if result["verdict"] == "safe" else UNSAFE


@click.command("certify")
@shared.source
@click.option(
    "--target",
    type=click.Choice(TARGETS),
    default=TARGETS[0],
    show_default=True,
    help=" ".join(f"{target}: every value {where}." for target, where in WHERE.items()),
)
@shared.max_length
@shared.subfolder
@shared.device
@shared.json_file
def certify_command(source: str, json_file: str | None, **options: Any) -> int:
    """Bound every value in SOURCE for any input, from the weights alone."""
    from ..conversion.certify import certify
    from ..report import terminal
    from ..report.schema import Report, read

    result = certify(source, progress=True, **options)
    if shared.write_result(json_file, result):
        terminal.print_certificate(read(Report, result))
    return SAFE if result["verdict"] == "safe" else UNSAFE


@click.command("verify")
@shared.source
@click.option(
    "--original",
    type=PATH,
    metavar="SOURCE",
    help="What was converted (folder or Hub id): replay the recorded plan on it too.",
)
@shared.data
@click.option("--no-audit", is_flag=True, help="Run nothing: hashes, plan and certificate only.")
@shared.subfolder
@shared.device
@shared.endpoint
@shared.json_file
def verify_command(source: str, no_audit: bool, json_file: str | None, **options: Any) -> int:
    """Check a converted folder or Hub id against its report, and run it on this machine."""
    from ..conversion.verify import verify
    from ..report import terminal
    from ..report.other_reports import Verification
    from ..report.schema import read

    result = verify(source, run_model=not no_audit, progress=True, **options)
    if shared.write_result(json_file, result):
        terminal.print_verification(read(Verification, result))
    return SAFE if result["verified"] else UNSAFE
