"""The commands ``convert`` and ``undo``: for a checkpoint, one file, a whole pipeline or an adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.filesize import decimal

from ..checkpoint.pipeline_files import open_pipeline
from ..conversion.options import FLAGS, FOLDER, FOLDER_LAYOUT, Destination, Options
from ..errors import UserError
from ..progress import show
from . import shared
from .shared import SAFE, UNSAFE

if TYPE_CHECKING:
    from ..conversion.convert import Conversion

OTHER_OPTIONS = (  # the options of ``convert`` that are not fields of ``Options``
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option(
        "--finetune",
        "recipe",
        type=FOLDER,
        metavar="RECIPE",
        help="Finetune by this recipe if the rescaled checkpoint is not safe; SOURCE, OUT and the target go into it.",
    ),
    click.option(
        "--adapter",
        type=FOLDER,
        metavar="DIR",
        help="Rescale only this LoRA adapter, trained on the original, to fit SOURCE, a converted folder.",
    ),
    shared.force,
    shared.json_file,
)


def options_of_convert(command: Callable[..., int]) -> Callable[..., int]:
    for option in reversed((*map(shared.field_option, FLAGS), *OTHER_OPTIONS)):  # --help shows the last first
        command = option(command)
    return command


@click.command("convert")
@shared.source
@click.argument("out", type=FOLDER, required=False)
@options_of_convert
def convert_command(
    source: str,
    out: Path | None,
    dry_run: bool,
    recipe: Path | None,
    adapter: Path | None,
    force: bool,
    json_file: str | None,
    **fields: Any,
) -> int:
    """Convert SOURCE to an fp16 checkpoint at OUT, prove what can be proven, run it, and say whether it is safe.

    Of a diffusion pipeline every supported text encoder is converted, and the rest is linked.
    """
    # As many parameters as options, which click passes one by one; ``fields`` are those of ``Options``.
    if adapter is not None:
        return take_adapter(adapter, out, Path(source), force=force, json_file=json_file)
    options = Options(**fields)
    options.check()
    folder = options.layout == FOLDER_LAYOUT
    if out is None and not dry_run:
        raise click.UsageError("Missing argument 'OUT'.", click.get_current_context())
    out = out or Path("OUT")
    if recipe is not None:
        for flag, given in (("--layout", not folder), ("--dry-run", dry_run), ("--no-audit", not options.run_model)):
            if given:
                raise UserError(f"--finetune cannot be combined with {flag}; leave out --finetune or {flag}")
    place = Destination(out, force=force, dry_run=dry_run)
    if folder:
        place.check(source)
    if folder and options.subfolder is None:
        from ..families.known import is_known

        if open_pipeline(source, is_known) is not None:
            if recipe is not None:
                one = f"--finetune takes one model, and {source} is a whole pipeline"
                raise UserError(f"{one}; give --subfolder NAME as well")
            return convert_whole(source, place, fields, json_file=json_file)
    if recipe is not None:
        from ..finetuning.recipe import read_recipe_for

        read_recipe_for(recipe, source, out, options.target, options.subfolder)
    if folder and out.suffix == ".safetensors":
        raise UserError(f"{out} names a file, and a folder is written; give a folder, or --layout single")
    from ..conversion.convert import convert_by

    run = convert_by
    if recipe is not None:
        from ..finetuning.run import convert_or_finetune

        run = partial(convert_or_finetune, recipe)
    result = run(options, source, place, progress=True)
    if shared.write_result(json_file, result.report):
        show_conversion(result)
    return SAFE if dry_run or result.safe else UNSAFE


def take_adapter(adapter: Path, out: Path | None, base: Path, *, force: bool, json_file: str | None) -> int:
    context = click.get_current_context()
    taken = ("source", "folder", "out", "adapter", "force", "json_file")
    for each in context.command.params:
        if each.name not in taken and context.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE:
            raise UserError(f"{each.opts[0]} is for checkpoints; leave it out with --adapter")
    if out is None:
        raise click.UsageError("Missing argument 'OUT'.", context)
    from ..conversion.adapter import convert_adapter

    result = convert_adapter(adapter, out, base, back=context.command.name == "undo", force=force)
    if shared.write_result(json_file, result.to_json()):
        show(f"{result.out} holds {len(result.tensors)} tensors of an adapter for {result.base}")
        for note in result.notes:
            show(note)
        if context.command.name == "convert":
            show("no certificate covers an adapter: merge it with PEFT, save that, and give it to bf16-to-fp16 certify")
    return SAFE


def convert_whole(source: str, place: Destination, fields: dict[str, Any], *, json_file: str | None) -> int:
    from ..conversion.pipeline import convert_pipeline
    from ..report import terminal

    how: dict[str, Any] = {"dry_run": place.dry_run, "force": place.force, "progress": True}
    result = convert_pipeline(source, place.out, **how, **fields)
    reports = {name: one.report for name, one in result.encoders.items()}
    if shared.write_result(json_file, {**result.report, "reports": reports}):
        for name, one in result.encoders.items():
            terminal.print_title(name)
            show_conversion(one)
        if result.out is not None:
            terminal.print_pipeline(result.report, result.out)
    return SAFE if result.out is None or result.safe else UNSAFE


def show_conversion(result: Conversion) -> None:
    from ..report import terminal
    from ..report.schema import Report, read

    report = read(Report, result.report)
    if result.out is None:
        terminal.print_planned(report, result.planned)
        show(f"to write: {decimal(result.nbytes or 0)} of weights")
        terminal.print_plan(report.plan or result.plan, result.planned)
    else:
        notes = result.notes if result.out.is_file() else ()
        terminal.print_conversion(report, result.out, notes, then=result.next)


@click.command("undo")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option(
    "--adapter",
    type=FOLDER,
    metavar="ADAPTER",
    help="Rescale only this LoRA adapter, made for DIR, to fit the original of DIR.",
)
@click.option(
    "--plan",
    type=FOLDER,
    metavar="CONVERTED",
    help="The converted folder that DIR was trained from, where DIR was saved by another program.",
)
@shared.force
@shared.json_file
def undo_command(
    folder: Path, out: Path, adapter: Path | None, plan: Path | None, force: bool, json_file: str | None
) -> int:
    """Bring back the weights from before the rescaling, by the inverse of DIR's plan."""
    if adapter is not None:
        return take_adapter(adapter, out, folder, force=force, json_file=json_file)
    from ..conversion.undo import undo

    written = undo(folder, out, plan=plan, force=force, progress=True)
    words = "the trained weights at the original's scale"
    if plan is None:
        words = "the weights from before the rescaling, bit for bit wherever fp16 held them"
    if shared.write_result(json_file, {"out": str(written), "holds": words}):
        show(f"{written} holds {words}")
    return SAFE
