"""``survey``, ``families`` and ``demo``: what there is to convert, and what comes of it."""

from __future__ import annotations

from pathlib import Path

import click

from ..targets import AUTO, TARGETS
from ..visible import show
from .shared import FOLDER, SAFE, UNSAFE, check_given, data, device, json_file, make_progress, seed, write_result


@click.command("survey")
@click.argument("listing", type=FOLDER, metavar="LIST")
@click.argument("out", type=FOLDER, required=False, metavar="OUTDIR")
@click.option("--pin", "pins", is_flag=True, help="First write into LIST which commit each Hub id stands for now.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Checkpoints at a time; default: as many as memory and cores allow.",
)
@click.option("--keep", is_flag=True, help="Keep the converted checkpoints in OUTDIR.")
@click.option(
    "--target",
    type=click.Choice((AUTO, *TARGETS)),
    default="auto",
    show_default=True,
    help="Of the conversions, as in convert.",
)
@data
@seed
@device
@click.option("--force", is_flag=True, help="Do again what is done.")
@json_file
def survey_command(
    listing: Path,
    out: Path | None,
    pins: bool,
    jobs: int | None,
    keep: bool,
    target: str,
    data: str | None,
    seed: int,
    device: str,
    force: bool,
    json_file: str | None,
) -> int:
    """Audit, certify and convert every checkpoint of LIST (YAML), each in a process of its own, into one page and one
    CSV in OUTDIR.

    A survey that was stopped goes on where it was. Status 1: a checkpoint could not be done.
    """
    # As many parameters as options, which click passes one by one.
    from ..survey.checkpoints import pin, read_list

    check_given(None, data)
    read_list(listing)  # a bad list is answered before anything is fetched
    if out is None and not pins:
        raise click.UsageError("Missing argument 'OUTDIR'.", click.get_current_context())
    if pins:
        written = pin(listing)
        show(f"{listing}: {written or 'nothing'} pinned", aside=True)
    if out is None:
        return SAFE
    from ..survey.run import Settings, survey
    from ..survey.terminal import print_survey

    settings = Settings(target=target, data=data, seed=seed, device=device, keep=keep)
    rows = survey(read_list(listing), out, settings, jobs=jobs, force=force, progress=make_progress())
    write_result(json_file, {"checkpoints": [row.model_dump() for row in rows]})
    if json_file != "-":
        print_survey(rows, out)
    return SAFE if all(row.ended for row in rows) else UNSAFE


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
    write_result(json_file, {"families": rows, "refused": dict(REFUSED)})
    if json_file != "-":
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
