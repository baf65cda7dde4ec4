"""The commands ``audit``, ``certify`` and ``verify``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checkpoint.contents import is_converted
from ..checkpoint.sources import CONVERTED, local_source
from ..conversion.options import FOLDER, PATH, check_data
from ..targets import RECORDS, TARGETS
from . import shared
from .shared import SAFE, UNSAFE

if TYPE_CHECKING:
    from ..report.schema import Report


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
def audit_command(
    source: str,
    data: str | None,
    subfolder: str | None,
    html: Path | None,
    json_file: str | None,
    **options: Any,
) -> int:
    """Run SOURCE in fp16 in the ways people run it, and measure every operation's output."""
    shared.check_given(source, data, subfolder, check=partial(check_source, proof=False))
    shared.checked_target(html, "--html")
    from ..conversion.audit import audit
    from ..report import terminal
    from ..report.schema import Report, read

    result = audit(source, data=data, subfolder=subfolder, progress=True, **options)
    shared.write_result(json_file, result)
    report = read(Report, result)
    if html is not None:
        from ..report.page import write_page

        with shared.replacing_for("--html", html) as new:
            write_page(new, report)
    if json_file != "-":
        terminal.print_audit(report, exact_next(report, source, subfolder), page=html)
    return SAFE if result["verdict"] == "safe" else UNSAFE


@click.command("certify")
@shared.source
@click.option(
    "--target",
    type=click.Choice(TARGETS),
    default=TARGETS[0],
    show_default=True,
    help=" ".join(f"{target.name}: every value {target.where}." for target in RECORDS),
)
@shared.max_length
@shared.subfolder
@shared.device
@shared.json_file
def certify_command(source: str, subfolder: str | None, json_file: str | None, **options: Any) -> int:
    """Bound every value in SOURCE for any input, from the weights alone."""
    shared.check_given(source, None, subfolder, check=partial(check_source, proof=True))
    from ..conversion.certify import certify
    from ..report import terminal
    from ..report.schema import Report, read

    result = certify(source, subfolder=subfolder, progress=True, **options)
    if shared.write_result(json_file, result):
        report = read(Report, result)
        terminal.print_certificate(report, exact_next(report, source, subfolder))
    return SAFE if result["verdict"] == "safe" else UNSAFE


def check_source(folder: Path, config: Mapping[str, Any], *, proof: bool) -> None:
    from ..bounds.activations import check_bounded
    from ..families.from_config import check_config
    from ..families.known import is_known

    if proof:
        check_bounded(check_config(config))
    elif is_known(config):
        check_config(config)


def exact_next(report: Report, source: str, subfolder: str | None) -> str:
    """Return a report's next command with the path as given; in the report it has only its last part."""
    from ..families.known import named
    from ..report.remedies import next_command

    folder = local_source(source)
    if not report.next or folder is None or named(report.family) is None:
        return report.next
    converted = is_converted(folder / (subfolder or ""))
    return next_command(source, report.regimes, converted, subfolder, report.target, report.family)


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
def verify_command(
    source: str, original: str | None, data: str | None, no_audit: bool, json_file: str | None, **options: Any
) -> int:
    """Check a converted folder, file or Hub id against its report, and run it on this machine."""
    check_data(data, run_model=not no_audit)
    place = shared.check_there(source, CONVERTED, or_file=True, endpoint=options["endpoint"])
    if place is not None:
        shared.check_written(place, options["subfolder"], data)
    shared.check_given(original, check=partial(check_source, proof=False))
    from ..conversion.verify import verify
    from ..report import terminal
    from ..report.other_reports import Verification
    from ..report.schema import read

    result = verify(source, original=original, data=data, run_model=not no_audit, progress=True, **options)
    if shared.write_result(json_file, result):
        terminal.print_verification(read(Verification, result))
    return SAFE if result["verified"] else UNSAFE
