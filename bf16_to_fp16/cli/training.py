"""The command ``finetune``."""

from __future__ import annotations

from pathlib import Path

import click

from . import shared
from .shared import SAFE, UNSAFE


@click.command("finetune")
@click.argument("recipe", type=shared.FOLDER, metavar="RECIPE")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Such as schedule.steps=200; repeatable.")
@shared.force
@shared.json_file
def finetune_command(
    recipe: Path,
    overrides: tuple[str, ...],
    force: bool,
    json_file: str | None,
) -> int:
    """Train by RECIPE (YAML) until the checkpoint fits fp16, then convert it.

    Continues an interrupted run. On several processes or GPUs: accelerate launch -m bf16_to_fp16 finetune RECIPE.
    """
    from ..finetuning.recipe import read_recipe

    asked = read_recipe(recipe, overrides)
    shared.check_there(asked.source)
    for texts in (asked.data.path, asked.data.held_out_path):
        shared.check_text(texts)
    # These imports take seconds.
    from ..finetuning.run import finetune
    from ..report import terminal
    from ..report.schema import Report, read

    result = finetune(recipe, overrides=overrides, force=force, progress=shared.make_progress())
    if result is None:  # not the first process
        return SAFE
    if shared.write_result(json_file, result.report):
        terminal.print_conversion(read(Report, result.report), Path(asked.out), then=result.next)
    return SAFE if result.safe else UNSAFE
