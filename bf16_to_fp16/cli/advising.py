"""``advise``: four questions on training in 16 bits, a command each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ..conversion.options import SEED
from ..errors import UserError
from ..visible import show
from .shared import (
    FOLDER,
    PATH,
    SAFE,
    Grouped,
    Ordered,
    check_text,
    check_there,
    json_file,
    make_progress,
    source,
    subfolder,
    write_result,
)

# Each question, and what it is asked about.
QUESTIONS = {"updates": "SOURCE", "init": "SOURCE", "format": "NUMBER", "losses": "LOG"}


class _Questions(Ordered):
    """The four commands; the old form, ``advise SOURCE --updates``, still runs and says the new one."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Put the name of the question first, where it was asked for by an option."""
        split = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--format=") else [a])]
        asked = next((name for name in QUESTIONS if f"--{name}" in split), None)
        if asked is not None and split[0] not in QUESTIONS:
            split.remove(f"--{asked}")
            of = QUESTIONS[asked]
            show(f"advise {of} --{asked} is now: bf16-to-fp16 advise {asked} {of}", aside=True)
            arguments = [asked, *split]
        if not arguments or not (arguments[0] in QUESTIONS or arguments[0].startswith("-")):
            asks = f"ask for one of {', '.join(QUESTIONS)}, such as: bf16-to-fp16 advise updates SOURCE"
            raise click.UsageError(asks, context)
        return super().parse_args(context, arguments)


@click.group("advise", cls=_Questions)
def advise_command() -> None:
    """Advise on training in 16 bits: updates that vanish, initialisation, what a format holds, loss curves."""


tensors = click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Only these, with *; repeatable.")


@advise_command.command("updates", cls=Grouped)
@source
@click.option("--lr", "rate", type=float, default=1e-4, show_default=True, help="The learning rate.")
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "adam", "adafactor", "lion", "sgd"]),
    default="adamw",
    show_default=True,
    help="sgd needs --data or --relative-update.",
)
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True, help="Format of the weights."
)
@click.option(
    "--data",
    type=PATH,
    metavar="FILE",
    help="Text for real gradients: JSONL, CSV, Parquet, text, or a Hub dataset.",
)
@click.option("--batch-size", type=int, metavar="N", help="Examples of a step; advised on with the rate.")
@click.option("--steps", type=int, default=8, show_default=True, help="Steps with real gradients.")
@click.option("--share", type=float, default=0.5, show_default=True, help="Share of the weights to move.")
@click.option(
    "--relative-update",
    type=float,
    metavar="R",
    help="Root mean square of a tensor's update over that of the tensor, instead of the optimizer's own.",
)
@tensors
@subfolder
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the data's order.")
@json_file
def updates_command(source: str, json_file: str | None, **options: Any) -> int:
    """Say which weights an optimizer's updates would not move, and what helps."""
    check_text(options["data"])
    check_there(source, or_file=True)
    from ..advise.tables import print_updates
    from ..advise.updates import advise_updates

    return answer(json_file, advise_updates(source, progress=make_progress(), **options), print_updates)


@advise_command.command("init", cls=Grouped)
@source
@tensors
@subfolder
@json_file
def init_command(source: str, tensors: tuple[str, ...], subfolder: str | None, json_file: str | None) -> int:
    """Say how large weights should begin; SOURCE is a checkpoint, a config or a hidden size."""
    if not source.isdigit():
        check_there(source, or_file=True)
    from ..advise.initialisation import advise_init
    from ..advise.tables import print_init

    result = advise_init(source, tensors=tensors, subfolder=subfolder, progress=make_progress())
    return answer(json_file, result, print_init)


# A negative number looks like an option.
@advise_command.command("format", cls=Grouped, context_settings={"ignore_unknown_options": True})
@click.argument("numbers", metavar="NUMBER...", nargs=-1, required=True)
@json_file
def format_command(numbers: tuple[str, ...], json_file: str | None) -> int:
    """Say what bf16 and fp16 make of a number."""
    for number in numbers:
        if number.startswith("--"):
            raise UserError(f"no such option: {number} (see bf16-to-fp16 advise format --help)")
    from ..advise.formats import advise_format
    from ..advise.tables import print_format

    return answer(json_file, advise_format(*numbers), print_format)


@advise_command.command("losses", cls=Grouped)
@click.argument("log", type=PATH)
@click.option("--picture", type=FOLDER, metavar="FILE", help="Draw the curve (.svg, .png or .pdf).")
@click.option("--window", type=int, default=64, show_default=True, help="Losses that one is compared with.")
@click.option("--z", type=float, default=6.0, show_default=True, help="Robust deviations that make a spike.")
@json_file
def losses_command(log: str, picture: Path | None, window: int, z: float, json_file: str | None) -> int:
    """Say what went wrong in a training log: LOG is the log or its folder."""
    from ..advise.tables import print_losses
    from ..losses.logs import read_log
    from ..losses.report import check_picture, loss_report, write_picture

    if picture is not None:
        check_picture(picture)
    curve = read_log(log)
    result, events = loss_report(log, curve, z=z, window=window)
    if picture is not None:
        write_picture(picture, curve, events, Path(log).name)
    return answer(json_file, result, lambda report: print_losses(report, curve, events))


def answer(json_file: str | None, result: Mapping[str, Any], show: Callable[[Mapping[str, Any]], None]) -> int:
    """Write an advice, print it by ``show``, and return the exit status."""
    write_result(json_file, result)
    if json_file != "-":
        show(result)
    return SAFE
