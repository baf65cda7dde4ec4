"""``convert`` and ``undo``: a checkpoint, one file, a whole pipeline or an adapter, there and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..checkpoint.places import written_folder
from ..errors import UserError
from ..visible import show
from .publishing import check_publishable, check_publishes, push, status_of
from .shared import (
    CONFIG,
    FOLDER,
    SAFE,
    UNSAFE,
    allow_unsafe,
    check_given,
    config,
    data,
    device,
    endpoint,
    force,
    json_file,
    make_progress,
    max_length,
    public,
    seed,
    source,
    subfolder,
    sweep,
    verbose,
    write_result,
)

if TYPE_CHECKING:
    from ..checkpoint.pipeline import Pipeline
    from ..commands.convert import Conversion
    from ..conversion.options import Destination, Options


@click.command("convert")
@source
@click.argument("out", type=FOLDER, required=False)
@click.option(
    "--target",
    type=click.Choice(["auto", "half", "norm-safe", "train", "fp16-accumulate"]),
    default="auto",
    show_default=True,
    help="auto: the strictest of half, norm-safe and fp16-accumulate that costs next to nothing. half: every value"
    " under 65504. norm-safe: also norms that square the residual in fp16. fp16-accumulate: also sums made in fp16."
    " train: with dropout, and room for weights that move and gradients.",
)
@data
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option(
    "--no-audit",
    is_flag=True,
    help="Audit nothing: plan from the bounds, let the certificate decide, compare a few short rows with the source.",
)
@subfolder
@config
@click.option(
    "--plan",
    type=FOLDER,
    metavar="REPORT",
    help="Replay the plan of a report instead of observing.",
)
@click.option(
    "--finetune",
    "recipe",
    type=FOLDER,
    metavar="RECIPE",
    help="Finetune by this recipe if the rescaled checkpoint is not safe; SOURCE, OUT and the target go into it.",
)
@click.option(
    "--layout",
    type=click.Choice(["hf", "comfy", "wan", "single"]),
    default="hf",
    show_default=True,
    help="hf: a folder. Else OUT is one file: comfy for ComfyUI and Forge, wan for Wan's, single with stock names.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 12),
    metavar="BITS",
    help="Bits kept between what is observed and each limit, 0 to 12; default: 1.25.",
)
@max_length
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    callback=lambda context, option, text: None if text is None else parse_size(text),
    help="Such as 5GB; default: sharded like the source.",
)
@click.option(
    "--push-to",
    metavar="REPO_ID",
    help="Publish the result without asking; OUT then defaults to the repository's name.",
)
@click.option(
    "--adapter",
    type=FOLDER,
    metavar="DIR",
    help="Write this LoRA adapter, trained on what SOURCE was converted from, for SOURCE, a converted folder.",
)
@public
@allow_unsafe
@endpoint
@seed
@sweep
@device
@click.option("--copy", is_flag=True, help="Of a whole pipeline: copy the other files instead of linking large ones.")
@force
@verbose
@json_file
def convert_command(
    source: str,
    out: Path | None,
    target: str,
    data: str | None,
    dry_run: bool,
    no_audit: bool,
    subfolder: str | None,
    config: Path | None,
    plan: Path | None,
    recipe: Path | None,
    layout: str,
    margin: float | None,
    max_length: int | None,
    max_shard_size: int | None,
    push_to: str | None,
    adapter: Path | None,
    public: bool,
    allow_unsafe: bool,
    endpoint: str | None,
    seed: int,
    sweep: bool,
    device: str,
    copy: bool,
    force: bool,
    verbose: bool,
    json_file: str | None,
) -> int:
    """Convert SOURCE to an fp16 checkpoint at OUT: bound, observe, plan, rescale, write, certify and audit what was
    written.

    Of a diffusion pipeline (model_index.json) every T5 encoder is converted, and the rest is linked.
    """
    # As many parameters as options, which click passes one by one, and so many lines.
    if adapter is not None:
        return take_adapter(adapter, out, Path(source), force=force, json_file=json_file)
    others = {plan: "an fp16_report.json or a converted folder", recipe: "the recipe's YAML file"}
    check_given(source, data, others | {config: CONFIG})
    if out is not None and not dry_run:
        check_free(out, Path(source), layout, force=force)
    from ..bounds.arithmetic import MAX_LENGTH
    from ..commands.convert import convert_by, convert_to_file
    from ..conversion.options import Destination, Options
    from ..rescaling.planner import MARGIN_BITS

    check_together(recipe, push_to, layout, runs=not (dry_run or no_audit), publishes=public or allow_unsafe)
    if push_to is not None:
        check_publishable(push_to, endpoint, dry_run=dry_run)
        out = out or Path(push_to.rpartition("/")[2])
    if out is None and not dry_run:
        raise click.UsageError("Missing argument 'OUT'.", click.get_current_context())
    out = out or Path("OUT")  # of a dry run, which writes nothing
    options = Options(
        target=target,
        data=data,
        run_model=not no_audit,
        subfolder=subfolder,
        plan=plan,
        margin_bits=MARGIN_BITS if margin is None else margin,
        max_length=MAX_LENGTH if max_length is None else max_length,
        max_shard_size=max_shard_size,
        seed=seed,
        sweep=sweep,
        device=device,
        config=config,
        layout=layout,
    )
    place = Destination(out, force=force, dry_run=dry_run)
    if (pipeline := whole_pipeline(source, options, endpoint)) is not None:
        check_whole(source, recipe, push_to)
        return convert_whole(options, pipeline, place, copy, endpoint, verbose=verbose, json_file=json_file)
    if copy:
        raise UserError(f"--copy is for whole pipelines, and {source} is one model; leave it out")
    if recipe is not None:
        from ..finetuning.run import convert_or_finetune

        convert_by = partial(convert_or_finetune, recipe)
    if layout == "hf" and out is not None and Path(out).suffix == ".safetensors":
        raise UserError(f"{out} names a file, and a folder is written; give a folder, or --layout single or comfy")
    run = convert_by if layout == "hf" or dry_run else convert_to_file
    result = run(options, source, place, endpoint=endpoint, progress=make_progress())
    published = push(out, push_to, result, public=public, allow_unsafe=allow_unsafe, endpoint=endpoint)
    write_result(json_file, result.report if published is None else {**result.report, "published": published})
    if json_file != "-":
        show_conversion(result, published, verbose=verbose)
    return status_of(dry_run or result.safe, published)


def take_adapter(adapter: Path, out: Path | None, base: Path, *, force: bool, json_file: str | None) -> int:
    """Write an adapter for the other side of a conversion: ``convert`` for what was converted, ``undo`` back."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name not in ("source", "folder", "out", "adapter", "force", "json_file"):
            raise UserError(f"{parameter.opts[0]} is for checkpoints; leave it out with --adapter")
    if out is None:
        raise click.UsageError("Missing argument 'OUT'.", context)
    for folder, wanted in ((adapter, "the folder of an adapter"), (base, "a folder that convert wrote")):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; give {wanted}")
    from ..commands.adapter import convert_adapter

    result = convert_adapter(adapter, out, base, back=context.command.name == "undo", force=force)
    write_result(json_file, result.to_json())
    if json_file != "-":
        show(f"{result.out} holds {len(result.tensors)} tensors of an adapter for {result.base}")
        for note in result.notes:
            show(note)
        if context.command.name == "convert":
            merged = f"bf16-to-fp16 certify {base} --adapter {result.out}"
            show(f"no certificate covers an adapter; bound the weights that it makes when it is merged with: {merged}")
    return SAFE


def whole_pipeline(source: str, options: Options, endpoint: str | None) -> Pipeline | None:
    """Return the pipeline that is to be converted whole, None for one model."""
    if options.subfolder is not None or options.config is not None or options.layout != "hf":
        return None
    from ..checkpoint.pipeline import open_pipeline
    from ..families.known import is_known

    return open_pipeline(source, is_known, endpoint)


def check_whole(source: str, recipe: Path | None, push_to: str | None) -> None:
    """Raise UserError for options of ``convert`` that take one model, where SOURCE is a whole pipeline."""
    for option, given in (("--finetune", recipe), ("--push-to", push_to)):
        if given is not None:
            raise UserError(
                f"{option} takes one model, and {source} is a whole pipeline; give --subfolder NAME as well"
            )


def convert_whole(
    options: Options,
    pipeline: Pipeline,
    place: Destination,
    copy: bool,
    endpoint: str | None,
    *,
    verbose: bool,
    json_file: str | None,
) -> int:
    """Convert a whole pipeline, write and print what was done, and return the exit status."""
    from ..commands.pipeline import convert_pipeline_by
    from ..report import terminal

    result = convert_pipeline_by(options, pipeline, place, copy=copy, endpoint=endpoint, progress=make_progress())
    reports = {name: one.report for name, one in result.encoders.items()}
    write_result(json_file, {**result.report, "reports": reports})
    if json_file != "-":
        for name, one in result.encoders.items():
            terminal.print_title(name)
            show_conversion(one, None, verbose=verbose)
        if result.out is not None:
            terminal.print_pipeline(result.report, result.out)
    return SAFE if result.out is None or result.safe else UNSAFE


def check_free(out: Path, source: Path, layout: str, *, force: bool) -> None:
    """Raise UserError unless a conversion can be written at ``out``, as a folder or in a layout of one file."""
    from ..checkpoint.staging import check_out

    if layout == "hf":
        check_out(out, source, force=force)
        return
    from ..checkpoint.packing import check_out_file

    check_out_file(out, source, force=force)


def check_together(recipe: Path | None, push_to: str | None, layout: str, *, runs: bool, publishes: bool) -> None:
    """Raise UserError for options of ``convert`` that do not go together."""
    if layout != "hf" and (recipe is not None or push_to is not None):
        raise UserError("--layout writes one file; leave it out with --finetune and --push-to, which make a folder")
    if recipe is not None and not runs:
        raise UserError("a finetune follows from the audit; leave out either --finetune or --dry-run and --no-audit")
    check_publishes(push_to, public=publishes)


def show_conversion(result: Conversion, published: Mapping[str, Any] | None, *, verbose: bool = False) -> None:
    """Print what was done, or for a dry run what would be."""
    from ..progress import roughly
    from ..report import terminal
    from ..report.schema import Report, read
    from ..wording import bytes_in_words

    report = read(Report, result.report)
    if result.out is None:
        terminal.print_planned(report, result.planned)
        took = "" if result.seconds is None else f"; converting takes {roughly(result.seconds)} in all on this machine"
        show(f"to write: {bytes_in_words(result.nbytes or 0)} of weights{took}")
        terminal.print_plan(report.plan or result.plan, result.planned)
        return
    if result.out.is_file():
        terminal.print_file(report, result.out, result.notes, then=result.next)
        return
    terminal.print_conversion(report, result.out, then=result.next, verbose=verbose)
    if published is not None:
        terminal.print_published(published)


@click.command("undo")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--subfolder", metavar="NAME", help="Folder inside DIR; without it a pipeline is brought back whole.")
@click.option(
    "--adapter",
    type=FOLDER,
    metavar="ADAPTER",
    help="Write this LoRA adapter, which is for DIR, for what DIR was converted from.",
)
@force
@json_file
def undo_command(
    folder: Path, out: Path, subfolder: str | None, adapter: Path | None, force: bool, json_file: str | None
) -> int:
    """Write the weights from before the rescaling back, a source's or a finetune's, by the inverse of DIR's plan."""
    if adapter is not None:
        return take_adapter(adapter, out, folder, force=force, json_file=json_file)
    if not folder.is_file():
        written_folder(folder)
    from ..checkpoint.pipeline import is_pipeline
    from ..checkpoint.reader import subfolder_of
    from ..checkpoint.staging import check_out
    from ..commands.undo import undo
    from ..report import terminal
    from ..report.schema import REPORT
    from ..report.stored import read_packed

    folder, words = folder if subfolder is None else subfolder_of(folder, subfolder), ""
    if is_pipeline(folder):
        return undo_whole(folder, out, force=force, json_file=json_file)
    if folder.is_file():
        words = terminal.came_through("the source's weights", read_packed(folder).weights)
    elif (folder / REPORT).is_file():  # what is no converted folder ``undo`` refuses in words of its own
        check_out(out, folder, force=force, back=True)
        words = terminal.brought_back(folder)  # before anything is written
    written = undo(folder, out, force=force, progress=make_progress())
    write_result(json_file, {"out": str(written)})
    if json_file != "-":
        show(f"{written} holds {words}")
    return SAFE


def undo_whole(folder: Path, out: Path, *, force: bool, json_file: str | None) -> int:
    """Bring the source of a converted pipeline back, print what came through, and return the exit status."""
    from ..checkpoint.staging import check_out
    from ..commands.pipeline import read_pipeline, undo_pipeline
    from ..report import terminal

    names = [entry.subfolder for entry in read_pipeline(folder).encoders]
    check_out(out, folder, force=force, back=True)
    words = {name: terminal.brought_back(folder / name) for name in names}
    done = undo_pipeline(folder, out, force=force, progress=make_progress())
    write_result(json_file, {"out": str(done.out), "missing": list(done.missing)})
    if json_file != "-":
        for name, said in words.items():
            show(f"{done.out / name} holds {said}")
        show(f"{done.out} has the rest of the pipeline as it was")
        if done.missing:
            show(f"not brought back, since convert left them out: {', '.join(done.missing)}")
    return SAFE


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``5GB`` or ``500MB`` (decimal units), as stock ``max_shard_size`` reads
    them."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1}
    upper = text.strip().upper()
    for unit in sorted(units, key=len, reverse=True):
        if upper.endswith(unit):
            number = upper.removesuffix(unit).strip()
            try:
                size = float(number) * units[unit]
            except ValueError:
                break
            if 0 < size < 2**63:
                return max(1, int(size))
            break
    raise UserError(f"--max-shard-size {text!r} is not a size; write it like 5GB or 500MB")
