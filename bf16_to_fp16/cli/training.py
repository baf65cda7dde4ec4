"""The commands ``finetune``, ``recipe`` and ``launch``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ..conversion.options import FOLDER, check_data
from ..errors import UserError
from .shared import SAFE, UNSAFE, force, json_file, write_result


@click.command("finetune")
@click.argument("recipe", type=FOLDER, metavar="RECIPE")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Such as schedule.steps=200; repeatable.")
@force
@json_file
def finetune_command(recipe: Path, overrides: tuple[str, ...], force: bool, json_file: str | None) -> int:
    """Train by RECIPE (YAML) until the checkpoint fits fp16, then convert it.

    Continues an interrupted run. On several processes or GPUs: accelerate launch -m bf16_to_fp16 finetune RECIPE.
    """
    from ..finetuning.recipe import read_recipe

    asked = read_recipe(recipe, overrides)
    for texts in (asked.data.path, asked.data.held_out_path):
        check_data(texts)
    from ..finetuning.run import finetune
    from ..report import terminal
    from ..report.schema import Report, read

    result = finetune(recipe, overrides=overrides, force=force, progress=True)
    if result is None:  # not the first process
        return SAFE
    if write_result(json_file, result.report):
        terminal.print_conversion(read(Report, result.report), Path(asked.out), then=result.next)
    return SAFE if result.safe else UNSAFE


@click.command("recipe")
@click.argument("name", required=False)
@json_file
def recipe_command(name: str | None, json_file: str | None) -> int:
    """Print a finetune's recipe that runs as it stands: flan-t5-base, pegasus, mt5, flan-t5-xl or demo."""
    from ..finetuning.recipe import parse_recipe, shipped_text
    from ..yaml_files import parse_yaml

    text = shipped_text(name)
    recipe = parse_recipe(parse_yaml(text, str(name))).describe()
    if write_result(json_file, {"name": name, "recipe": recipe, "text": text}):
        click.echo(text, nl=False)
    return SAFE


@click.command("launch")
@click.argument("recipe", type=FOLDER, metavar="RECIPE")
@click.option("--gpus", type=click.IntRange(min=1), required=True, metavar="N", help="Number of cards to train on.")
@click.option("--run", "run", is_flag=True, help="Run the command too. Without a card, N CPU processes run it.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Memory of each card. Default: the memory of this machine's cards, else 16 GiB.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Such as schedule.steps=200; repeatable.")
@force
@json_file
def launch_command(
    recipe: Path,
    gpus: int,
    run: bool,
    memory: float | None,
    overrides: tuple[str, ...],
    force: bool,
    json_file: str | None,
) -> int:
    """Print the `accelerate launch` line of RECIPE for N cards, with the memory that it needs; --run runs it.

    The configuration is written beside the recipe's `out`.
    """
    from ..finetuning.recipe import read_recipe

    asked = read_recipe(recipe, overrides)
    # What follows takes seconds to import.
    from ..devices import check_auto_uses_the_card
    from ..finetuning.launching import choose, machine_of, run_launch, write_launch

    if run:
        if json_file == "-":
            raise UserError(
                "with --run the finetune prints to standard output, where JSON cannot go; give --json a file"
            )
        check_auto_uses_the_card(asked.device)
    choice = choose(asked, machine_of(gpus, memory, running=run, on_cpu=asked.device == "cpu"))
    if run and not choice.fits:
        raise UserError(f"{'; '.join(choice.explained())}; or give a larger --memory to run it all the same")
    given = [str(recipe), *(word for each in overrides for word in ("--set", each)), *(["--force"] if force else [])]
    files, words = write_launch(asked, choice, given)
    told = choice.to_json() | {"files": [str(path) for path in files], "command": shlex.join(words)}
    if json_file != "-":
        for line in choice.explained():
            click.echo(f"# {line}")
        click.echo(told["command"])
    if not run:
        write_result(json_file, told)
        return SAFE
    begun = ["bf16-to-fp16", "launch", "--gpus", str(gpus), "--run"]
    begun += [] if memory is None else ["--memory", f"{memory:g}"]
    status = run_launch(words, begun, on_gpu=choice.machine.on_gpu)
    write_result(json_file, told | {"status": status})
    return status
