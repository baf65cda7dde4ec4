"""The command ``advise`` with its three subcommands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from ..advise import OPTIMIZERS
from ..conversion.options import PATH
from .shared import SAFE, Ordered, json_file, source, subfolder, write_result


@click.group("advise", cls=Ordered, no_args_is_help=False)
def advise_command() -> None:
    """Advise on training in 16 bits: updates that vanish, initialisation, loss curves."""


@advise_command.command("updates")
@source
@click.option("--lr", "rate", type=float, default=1e-4, show_default=True, help="The learning rate.")
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True)
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True, help="Format of the weights."
)
@subfolder
@json_file
def updates_command(source: str, json_file: str | None, **options: Any) -> int:
    """Say which weights an optimizer's updates would not move, and what helps."""
    from ..advise.updates import advise_updates, print_updates

    return answer(json_file, advise_updates(source, progress=True, **options), print_updates)


@advise_command.command("init")
@source
@subfolder
@json_file
def init_command(source: str, subfolder: str | None, json_file: str | None) -> int:
    """Say how large initial weights should be; SOURCE is a checkpoint or a hidden size."""
    from ..advise.initialisation import advise_init, print_init

    return answer(json_file, advise_init(source, subfolder=subfolder, progress=True), print_init)


@advise_command.command("losses")
@click.argument("log", type=PATH)
@json_file
def losses_command(log: str, json_file: str | None) -> int:
    """Say what went wrong in a training log: LOG is the log or its folder."""
    from ..advise.losses import advise_losses, print_losses

    return answer(json_file, advise_losses(log), print_losses)


def answer(json_file: str | None, result: Mapping[str, Any], show: Callable[[Mapping[str, Any]], None]) -> int:
    if write_result(json_file, result):
        show(result)
    return SAFE
