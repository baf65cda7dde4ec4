"""``finetune`` and ``advise``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from ..checkpoint.places import local_folder
from ..conversion.options import SEED
from ..errors import UserError
from ..visible import show
from .publishing import check_publishable, check_publishes, push, status_of
from .shared import (
    FOLDER,
    PATH,
    SAFE,
    allow_unsafe,
    endpoint,
    force,
    given_options,
    json_file,
    make_progress,
    public,
    subfolder,
    verbose,
    write_result,
)


def show_keys(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Print every key of a recipe with its default and meaning, one a line, and end."""
    if not wanted or context.resilient_parsing:
        return
    from ..finetuning.recipe import keys

    for key, default, meaning in keys():
        click.echo(f"{key}: {default}  # {meaning}" if meaning else f"{key}: {default}")
    context.exit()


@click.command("finetune")
@click.argument("recipe", type=FOLDER, metavar="RECIPE")
@click.option(
    "--keys", is_flag=True, is_eager=True, expose_value=False, callback=show_keys, help="List every key of a recipe."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Such as schedule.steps=200; repeatable.")
@click.option(
    "--device",
    metavar="DEVICE",
    help="auto (CUDA where there is one, else the CPU), cpu, cuda, cuda:N or mps, instead of the recipe's.",
)
@click.option("--push-to", metavar="REPO_ID", help="Publish the result without asking.")
@public
@allow_unsafe
@endpoint
@force
@verbose
@json_file
def finetune_command(
    recipe: Path,
    overrides: tuple[str, ...],
    device: str | None,
    push_to: str | None,
    endpoint: str | None,
    force: bool,
    verbose: bool,
    json_file: str | None,
    **publishing: bool,
) -> int:
    """Finetune by RECIPE (YAML) with the activation-magnitude penalty, then convert what was trained.

    Continues a run that was interrupted. On several processes or GPUs: accelerate launch -m bf16_to_fp16 finetune
    RECIPE.
    """
    # As many parameters as options, which click passes one by one.
    check_publishes(push_to, public=any(publishing.values()))
    from ..finetuning.recipe import read_recipe
    from ..run.texts import local_files

    overrides = (*overrides, f"device={device}") if device else overrides
    asked = read_recipe(recipe, overrides)
    local_folder(asked.source)
    for texts in filter(None, (asked.data.path, asked.data.held_out_path)):
        local_files(texts)
    if push_to is not None:
        check_publishable(push_to, endpoint)
    # What follows takes seconds to import.
    from ..finetuning.run import finetune
    from ..report import terminal
    from ..report.schema import Report, read

    result = finetune(recipe, overrides=overrides, force=force, endpoint=endpoint, progress=make_progress())
    if result is None:  # not the first process
        return SAFE
    if result.out is None:
        write_result(json_file, result.report)
        show(result.next, aside=json_file == "-" or push_to is not None)
        return SAFE
    published = push(Path(asked.out), push_to, result, endpoint=endpoint, **publishing)
    write_result(json_file, result.report, published=published)
    if json_file != "-":
        terminal.print_conversion(read(Report, result.report), result.out, then=result.next, verbose=verbose)
        if published is not None:
            terminal.print_published(published)
    return status_of(result.safe, published)


class _Numbers(click.Command):
    """A command whose arguments may be negative numbers, which look like options."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Take what begins with a minus and a digit for an argument, where no option before it wants a value."""
        options = (parameter for parameter in self.params if isinstance(parameter, click.Option))
        wanting = {name for option in options if not option.is_flag for name in option.opts} - {"--format"}
        first: list[str] = []
        rest = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--format=-") else [a])]
        while rest and (not wanting.isdisjoint(first[-1:]) or not re.match(r"-[\d.]", rest[0])):
            first.append(rest.pop(0))
        return super().parse_args(context, [*first, *rest[1:], "--", rest[0]] if rest else first)


@click.command("advise", cls=_Numbers)
@click.argument("source", type=PATH, required=False, metavar="SOURCE")
@click.option("--updates", is_flag=True, help="Which weights an optimizer's updates would not move, and what helps.")
@click.option("--init", is_flag=True, help="How large weights should begin; SOURCE may be a hidden size.")
@click.option(
    "--format",
    "number",
    is_flag=False,
    flag_value="",
    metavar="[NUMBER]",
    help="What bf16 and fp16 make of a number.",
)
@click.option("--losses", is_flag=True, help="What went wrong in a training log: SOURCE is the log or its folder.")
@click.option("--lr", "rate", type=float, default=1e-4, show_default=True, help="updates: the learning rate.")
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "adam", "adafactor", "lion", "sgd"]),
    default="adamw",
    show_default=True,
    help="updates: sgd needs --data or --relative-update.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16"]),
    default="bf16",
    show_default=True,
    help="updates: format of the weights.",
)
@click.option(
    "--relative-update",
    type=float,
    metavar="R",
    help="updates: root mean square of a tensor's update over that of the tensor, instead of the optimizer's own.",
)
@click.option(
    "--data",
    type=PATH,
    metavar="FILE",
    help="updates: text for real gradients: JSONL, CSV, Parquet, text, or a Hub dataset.",
)
@click.option("--steps", type=int, default=8, show_default=True, help="updates: steps with real gradients.")
@click.option("--batch-size", type=int, metavar="N", help="updates: examples of a step; advised on with the rate.")
@click.option("--share", type=float, default=0.5, show_default=True, help="updates: share of the weights to move.")
@click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Only these, with wildcards; repeatable.")
@click.option("--window", type=int, default=64, show_default=True, help="losses: losses that one is compared with.")
@click.option("--z", type=float, default=6.0, show_default=True, help="losses: robust deviations that make a spike.")
@click.option("--picture", type=FOLDER, metavar="FILE", help="losses: draw the curve (.svg, .png or .pdf).")
@subfolder
@click.option("--seed", type=SEED, default=0, show_default=True, help="updates: seed of the data's order.")
@json_file
def advise_command(
    source: str | None,
    updates: bool,
    init: bool,
    number: str | None,
    losses: bool,
    json_file: str | None,
    **options: Any,
) -> int:
    """Advise on training in low precision: updates that vanish, initialisation, what a format holds, loss curves."""
    from ..advise import tables as advice

    modes = {"--updates": updates, "--init": init, "--format": number is not None, "--losses": losses}
    asked = [name for name, given in modes.items() if given]
    if len(asked) != 1:
        raise UserError(f"ask for one of {', '.join(modes)}" + (f", not for {len(asked)}" if asked else ""))
    check_belongs(asked[0])
    if source is None and not number:
        wanted = {"--losses": "the log", "--init": "a checkpoint or hidden size", "--format": "a number"}
        needed = wanted.get(asked[0], "a checkpoint")
        raise UserError(f"{asked[0]} needs {needed}: bf16-to-fp16 advise SOURCE {asked[0]}")
    if options["data"] is not None:
        from ..run.texts import local_files

        local_files(options["data"])
    result = advice.advise(asked[0].removeprefix("--"), source, number, options, progress=make_progress())
    write_result(json_file, result.report)
    if json_file != "-":
        result.show()
    return SAFE


ADVICE = {
    "--updates": (
        *("rate", "optimizer", "dtype", "relative_update", "data", "steps", "batch_size", "share", "seed"),
        *("tensors", "subfolder"),
    ),
    "--init": ("tensors", "subfolder"),
    "--format": (),
    "--losses": ("window", "z", "picture"),
}
"""The options of ``advise`` that each of its questions takes."""


def check_belongs(question: str) -> None:
    """Raise UserError for an option of ``advise`` that was given and that the question does not take."""
    for name, flag in given_options(click.get_current_context()):
        takers = [asked for asked, names in ADVICE.items() if name in names]
        if takers and question not in takers:
            raise UserError(f"{flag} goes with {' or '.join(takers)}; leave it out of {question}")
