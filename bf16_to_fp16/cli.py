"""The command line: thin, and the same promises for every command.

Data go to standard output, progress to standard error. Exit status: 0 done (and safe, where there is a verdict), 1 done
and unsafe, 2 bad input or usage with one line ``error: …``, 130 interrupted, 141 the reader of our output has gone.
Heavy imports wait until a command needs them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .checkpoint.places import CONVERTED, check_config, local_folder, local_source, written_folder
from .environment import how_to_install
from .errors import UserError

if TYPE_CHECKING:
    from .checkpoint.pipeline import Pipeline
    from .commands.convert import Conversion
    from .conversion.options import Destination, Options
    from .report.schema import Report

SAFE, UNSAFE, USAGE, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141


FOLDER = click.Path(path_type=Path)


CONFIG = "the config.json of SOURCE's weights"


source = click.argument("source", type=click.Path())  # or a Hub id; what a shell completes


data = click.option(
    "--data",
    type=click.Path(),
    metavar="FILE",
    help="Text to run on besides the built-in probe: JSONL, CSV, Parquet, text (.gz too), or a Hub dataset.",
)


json_file = click.option(
    "--json",
    "json_file",
    type=click.Path(),
    metavar="FILE",
    callback=lambda context, option, target: checked_target(target, "--json"),
    help="Write the report as JSON; - for standard output.",
)


verbose = click.option("-v", "--verbose", is_flag=True, help="Print the tables of the report as well.")


force = click.option("--force", is_flag=True, help="Replace OUT if it exists.")


seed = click.option("--seed", type=int, default=0, show_default=True, help="Seed of the built-in probe.")


sweep = click.option("--sweep", is_flag=True, help="Run every id of a large vocabulary, not a choice of them.")


max_length = click.option(
    "--max-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Positions for which the certificate holds; default 32768.",
)


endpoint = click.option(
    "--endpoint", metavar="URL", help="Address of the Hub; default: HF_ENDPOINT, else https://huggingface.co."
)


public = click.option("--public", is_flag=True, help="Make the repository public; without it a new one is private.")


allow_unsafe = click.option(
    "--allow-unsafe", is_flag=True, help="Publish an unsafe checkpoint; the first line of its card says that it is."
)


subfolder = click.option("--subfolder", metavar="NAME", help="Folder inside SOURCE (diffusers: text_encoder_2).")


config = click.option(
    "--config",
    type=FOLDER,
    metavar="FILE",
    help="config.json of a SOURCE that is one file of weights; default: told from its names and shapes.",
)


device = click.option(
    "--device",
    metavar="DEVICE",
    callback=lambda context, option, name: checked_device(name),
    help="auto (CUDA where there is one, else the CPU), cpu, cuda, cuda:N or mps; default: auto.",
)


def show_keys(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Print every key of a recipe with its default and meaning, one a line, and end."""
    if not wanted or context.resilient_parsing:
        return
    from .finetuning.recipe import keys

    for key, default, meaning in keys():
        click.echo(f"{key}: {default}  # {meaning}" if meaning else f"{key}: {default}")
    context.exit()


class _UnreadError(Exception):
    """Nobody reads our output any more."""


class _Commands(click.Group):
    """The commands; of a reader that has gone click itself would make status 1, which here says "unsafe"."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the commands in the order in which they are needed: that of this file."""
        return list(self.commands)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with its whole first sentence, which click itself would cut."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(500)) for name, command in self.commands.items()])

    def invoke(self, context: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(context)
        except BrokenPipeError as error:
            raise _UnreadError from error
        except SystemExit as stop:  # so rich
            if isinstance(stop.__context__, BrokenPipeError):
                raise _UnreadError from stop
            raise


@click.group(
    cls=_Commands,
    name="bf16-to-fp16",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(package_name="bf16_to_fp16", message="%(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Make bf16-pretrained T5-family and Pegasus checkpoints safe in fp16: exactly rescaled, audited, stock-loadable.

    SOURCE is a local folder, one file of weights or a Hub id (name[@revision]).
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@app.command("convert")
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
    help="Run nothing: plan from the bounds and let the certificate decide. Needs no memory for the model.",
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
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that write shards at the same time; the bytes are the same.",
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
    workers: int,
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
    from .bounds.arithmetic import MAX_LENGTH
    from .commands.convert import convert_by, convert_to_file
    from .conversion.options import Destination, Options
    from .rescaling.planner import MARGIN_BITS

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
        workers=workers,
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
        from .finetuning.run import convert_or_finetune

        convert_by = partial(convert_or_finetune, recipe)
    if layout == "hf" and out is not None and Path(out).suffix == ".safetensors":
        raise UserError(f"{out} names a file, and a folder is written; give a folder, or --layout single or comfy")
    run = convert_by if layout == "hf" or dry_run else convert_to_file
    result = run(options, source, place, endpoint=endpoint, progress=make_progress())
    published = push(out, push_to, result, public=public, allow_unsafe=allow_unsafe, endpoint=endpoint)
    write_result(json_file, result.report if published is None else {**result.report, "published": published})
    if json_file != "-":
        show_conversion(result, published, verbose=verbose)
    return SAFE if dry_run or result.safe else UNSAFE


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
    from .commands.adapter import convert_adapter

    result = convert_adapter(adapter, out, base, back=context.command.name == "undo", force=force)
    write_result(json_file, result.to_json())
    if json_file != "-":
        print(f"{result.out} holds {len(result.tensors)} tensors of an adapter for {result.base}")
        for note in result.notes:
            print(note)
        if context.command.name == "convert":
            merged = f"bf16-to-fp16 certify {base} --adapter {result.out}"
            print(f"no certificate covers an adapter; bound the weights that it makes when it is merged with: {merged}")
    return SAFE


def whole_pipeline(source: str, options: Options, endpoint: str | None) -> Pipeline | None:
    """Return the pipeline that is to be converted whole, None for one model."""
    if options.subfolder is not None or options.config is not None or options.layout != "hf":
        return None
    from .checkpoint.pipeline import open_pipeline
    from .families.known import is_known

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
    from .commands.pipeline import convert_pipeline_by
    from .report import terminal

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
    from .checkpoint.staging import check_out

    if layout == "hf":
        check_out(out, source if source.is_dir() else None, force=force)
        return
    from .checkpoint.packing import check_out_file

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
    from .progress import roughly
    from .report import terminal
    from .report.schema import Report, read
    from .wording import bytes_in_words

    report = read(Report, result.report)
    if result.out is None:
        terminal.print_planned(report, result.planned)
        took = "" if result.seconds is None else f"; converting takes {roughly(result.seconds)} in all on this machine"
        print(f"to write: {bytes_in_words(result.nbytes or 0)} of weights{took}")
        terminal.print_plan(report.plan or result.plan, result.planned)
        return
    if result.out.is_file():
        terminal.print_file(report, result.out, result.notes, then=result.next)
        return
    terminal.print_conversion(report, result.out, then=result.next, verbose=verbose)
    if published is not None:
        terminal.print_published(published)


def check_publishes(push_to: str | None, *, public: bool) -> None:
    """Raise UserError for options of publishing (``public``: whether any was given) where nothing is published."""
    if push_to is None and public:
        raise UserError("--public and --allow-unsafe are for publishing; give --push-to REPO_ID as well")


def check_publishable(repo_id: str, endpoint: str | None, *, dry_run: bool = False) -> None:
    """Raise UserError for what stands in the way of an upload, which is better known before the work than after it."""
    from .commands.publish import check_name, token_of

    if dry_run:
        raise UserError("a dry run writes nothing to publish; leave out either --dry-run or --push-to")
    check_name(repo_id)
    token_of(None, endpoint)


def push(
    out: Path, repo_id: str | None, result: Conversion, *, allow_unsafe: bool, **options: Any
) -> dict[str, Any] | None:
    """Publish what has just been converted and audited, where that is asked for and it is safe or may be unsafe, and
    return what was done; where that fails, say how to go on."""
    if repo_id is None:
        return None
    if not result.safe and not allow_unsafe:
        said = f"not published: {out} is unsafe in fp16; give --allow-unsafe to publish it all the same"
        print(said, file=sys.stderr)
        return None
    from .commands.publish import publish

    try:
        return publish(out, repo_id, audited=True, allow_unsafe=allow_unsafe, progress=make_progress(), **options)
    except UserError as error:
        raise UserError(f"{error} ({out} is converted: go on with bf16-to-fp16 publish {out} {repo_id})") from None


@app.command("audit")
@source
@click.option(
    "--regime",
    "regimes",
    multiple=True,
    type=click.Choice(["stock", "amp", "half"]),
    help="Repeat for several; default: all.",
)
@data
@click.option(
    "--attention",
    "attentions",
    multiple=True,
    type=click.Choice(["eager", "sdpa", "scaled"]),
    help="Repeat for several; default: eager and sdpa. scaled: this package's, with √scale in q and in k.",
)
@click.option("--train-mode", is_flag=True, help="With dropout, and the backward pass under a loss scale.")
@click.option(
    "--attack",
    "attack_steps",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Search by gradient for the input that comes nearest to each limit, and compare with the certificate.",
)
@subfolder
@config
@seed
@sweep
@device
@click.option("--html", type=FOLDER, metavar="FILE", help="Write the report as a page.")
@json_file
def audit_command(
    source: str,
    regimes: tuple[str, ...],
    data: str | None,
    attentions: tuple[str, ...],
    train_mode: bool,
    attack_steps: int | None,
    subfolder: str | None,
    config: Path | None,
    seed: int,
    sweep: bool,
    device: str,
    html: Path | None,
    json_file: str | None,
) -> int:
    """Run SOURCE in fp16 the ways people run it and measure every site, that is every operation's output."""
    # As many parameters as options, which click passes one by one.
    check_given(source, data, {config: CONFIG})
    checked_target(html, "--html")
    from .auditing.regimes import ATTENTIONS, REGIMES
    from .commands.audit import audit
    from .report import terminal
    from .report.schema import Report, read

    result = audit(
        source,
        regimes=regimes or REGIMES,
        attention=attentions or ATTENTIONS,
        data=data,
        train_mode=train_mode,
        attack_steps=attack_steps,
        subfolder=subfolder,
        seed=seed,
        sweep=sweep,
        device=device,
        config=config,
        progress=make_progress(),
    )
    write_result(json_file, result)
    if html is not None:
        from .report.page import write_page

        try:
            write_page(html, read(Report, result))
        except OSError as error:
            raise UserError(f"{html}: {error.strerror}; choose another file for --html") from error
    if json_file != "-":
        report = read(Report, result)
        terminal.print_audit(report, exact_next(report, source, subfolder))
    return SAFE if result["verdict"] == "safe" else UNSAFE


@app.command("certify")
@source
@click.option(
    "--target",
    type=click.Choice(["half", "norm-safe", "train", "fp16-accumulate"]),
    default="half",
    show_default=True,
    help="half: every value. norm-safe: with norms in fp16. fp16-accumulate: with every sum in fp16."
    " train: with dropout.",
)
@max_length
@click.option(
    "--adapter",
    type=FOLDER,
    metavar="DIR",
    help="Bound SOURCE merged with this LoRA adapter, which is for SOURCE: what runs when it is merged, not beside it.",
)
@subfolder
@config
@device
@json_file
def certify_command(
    source: str,
    target: str,
    max_length: int | None,
    adapter: Path | None,
    subfolder: str | None,
    config: Path | None,
    device: str,
    json_file: str | None,
) -> int:
    """Bound every site of SOURCE for every input, from its weights alone; nothing is run."""
    check_given(source, None, {config: CONFIG, adapter: "the folder of an adapter"})
    from .bounds.arithmetic import MAX_LENGTH
    from .commands.certify import certify
    from .report import terminal
    from .report.schema import Report, read

    length = MAX_LENGTH if max_length is None else max_length
    result = certify(
        source,
        max_length=length,
        target=target,
        subfolder=subfolder,
        device=device,
        config=config,
        adapter=adapter,
        progress=make_progress(),
    )
    write_result(json_file, result)
    if json_file != "-":
        report = read(Report, result)
        terminal.print_certificate(report, report.next if adapter else exact_next(report, source, subfolder))
    return SAFE if result["verdict"] == "safe" else UNSAFE


def exact_next(report: Report, source: str, subfolder: str | None) -> str:
    """Return a report's next step with the path as it was given, of which the report has the last part only."""
    from .checkpoint.folder import is_converted
    from .families.known import named
    from .report.remedies import going_on_from

    folder = local_source(source)
    if not report.next or folder is None or named(report.family) is None:
        return report.next
    return going_on_from(source, report.regimes, is_converted(folder / (subfolder or "")), subfolder)


@app.command("publish")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("repo_id")
@click.option("--dry-run", is_flag=True, help="Show the files, their sizes and the card; send nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@public
@click.option("--create-pr", is_flag=True, help="Propose the change as a pull request.")
@click.option("--revision", metavar="BRANCH", help="Branch to upload to; default: main.")
@click.option("--commit-message", metavar="TEXT", help="First line of the commit.")
@allow_unsafe
@click.option("--force", is_flag=True, help="Replace other content that REPO_ID has; its other weights stay.")
@click.option(
    "--add",
    multiple=True,
    type=FOLDER,
    metavar="FILE",
    help="A file that convert --layout wrote, to lie beside DIR's; repeatable.",
)
@endpoint
@json_file
def publish_command(
    folder: Path,
    repo_id: str,
    dry_run: bool,
    yes: bool,
    public: bool,
    create_pr: bool,
    revision: str | None,
    commit_message: str | None,
    allow_unsafe: bool,
    force: bool,
    add: tuple[Path, ...],
    endpoint: str | None,
    json_file: str | None,
) -> int:
    """Upload the converted checkpoint in DIR to the Hub, private unless --public, after checking it once more.

    The token is that of `hf auth login` or HF_TOKEN. A run that was interrupted goes on where it stopped.
    """
    # As many parameters as options, which click passes one by one.
    written_folder(folder)
    from .commands.publish import Upload, publish
    from .report import terminal

    def confirm(upload: Upload) -> bool:
        terminal.print_upload(upload, repo_id, whole=dry_run, public=public, aside=json_file == "-")
        if yes or dry_run:
            return True
        if not sys.stdin.isatty():
            raise UserError(
                "nothing was uploaded, since nobody can be asked here; give -y to upload without a question"
            )
        kind = "a public" if public else "a private"
        return click.confirm(f"Upload to {repo_id} ({kind} repository, if it is new)?", err=True)

    result = publish(
        folder,
        repo_id,
        public=public,
        create_pr=create_pr,
        revision=revision,
        message=commit_message,
        allow_unsafe=allow_unsafe,
        add=add,
        force=force,
        dry_run=dry_run,
        endpoint=endpoint,
        confirm=confirm,
        progress=make_progress(),
    )
    write_result(json_file, result)
    if json_file != "-":
        terminal.print_published(result)
    return SAFE if result["verdict"] == "safe" else UNSAFE


@app.command("verify")
@source
@click.option(
    "--original",
    type=click.Path(),
    metavar="SOURCE",
    help="What was converted (folder or Hub id): replay the recorded plan on it too.",
)
@data
@click.option("--no-audit", is_flag=True, help="Run nothing: hashes, plan and certificate only.")
@subfolder
@device
@endpoint
@json_file
def verify_command(
    source: str,
    original: str | None,
    data: str | None,
    no_audit: bool,
    subfolder: str | None,
    device: str,
    endpoint: str | None,
    json_file: str | None,
) -> int:
    """Check SOURCE, a converted folder, its Hub id or one converted file, against its report: hashes, plan, certificate
    and audit, all computed again."""
    if not Path(source).is_file():
        local_folder(source, CONVERTED)
    check_given(original, data)
    from .commands.verify import verify
    from .report import terminal
    from .report.schema import Verification, read

    result = verify(
        source,
        original=original,
        data=data,
        run_model=not no_audit,
        subfolder=subfolder,
        device=device,
        endpoint=endpoint,
        progress=make_progress(),
    )
    write_result(json_file, result)
    if json_file != "-":
        terminal.print_verification(read(Verification, result))
    return SAFE if result["verified"] else UNSAFE


@app.command("check", epilog=f"The runtimes are an extra: {how_to_install('runtimes')}.")
@click.argument("out", type=click.Path(), metavar="OUT")
@click.option(
    "--runtime",
    type=click.Choice(["openvino", "onnxruntime", "ctranslate2", "onnx-reference"]),
    required=True,
    help="onnx-reference: numpy, every operation in fp16, norms included.",
)
@click.option(
    "--source",
    type=click.Path(),
    metavar="SOURCE",
    help="What OUT was converted from (folder or Hub id), to run beside it.",
)
@seed
@json_file
def check_command(out: str, runtime: str, source: str | None, seed: int, json_file: str | None) -> int:
    """Run OUT in another runtime in fp16, compare it with stock code in fp32, and say which arithmetic was used."""
    check_given(out)
    check_given(source)
    from .commands.check import check
    from .report import terminal
    from .report.schema import RuntimeCheck, read

    result = check(out, runtime, source=source, seed=seed, progress=make_progress())
    write_result(json_file, result)
    if json_file != "-":
        terminal.print_check(read(RuntimeCheck, result))
    return UNSAFE if result["verdict"] == "unsafe" else SAFE


@app.command("undo")
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
    from .checkpoint.pipeline import is_pipeline
    from .checkpoint.reader import subfolder_of
    from .checkpoint.staging import check_out
    from .commands.undo import undo
    from .report import terminal
    from .report.schema import REPORT
    from .report.stored import read_packed

    folder, words = folder if subfolder is None else subfolder_of(folder, subfolder), ""
    if is_pipeline(folder):
        return undo_whole(folder, out, force=force, json_file=json_file)
    if folder.is_file():
        words = terminal.came_through("the source's weights", read_packed(folder).weights)
    elif (folder / REPORT).is_file():  # what is no converted folder ``undo`` refuses in words of its own
        check_out(out, folder, force=force)
        words = terminal.brought_back(folder)  # before anything is written
    written = undo(folder, out, force=force, progress=make_progress())
    write_result(json_file, {"out": str(written)})
    if json_file != "-":
        print(f"{written} holds {words}")
    return SAFE


def undo_whole(folder: Path, out: Path, *, force: bool, json_file: str | None) -> int:
    """Bring the source of a converted pipeline back, print what came through, and return the exit status."""
    from .checkpoint.staging import check_out
    from .commands.pipeline import read_pipeline, undo_pipeline
    from .report import terminal

    names = [entry.subfolder for entry in read_pipeline(folder).encoders]
    check_out(out, folder, force=force)
    words = {name: terminal.brought_back(folder / name) for name in names}
    done = undo_pipeline(folder, out, force=force, progress=make_progress())
    write_result(json_file, {"out": str(done.out), "missing": list(done.missing)})
    if json_file != "-":
        for name, said in words.items():
            print(f"{done.out / name} holds {said}")
        print(f"{done.out} has the rest of the pipeline as it was")
        if done.missing:
            print(f"not brought back, since convert left them out: {', '.join(done.missing)}")
    return SAFE


@app.command("finetune")
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
    public: bool,
    allow_unsafe: bool,
    endpoint: str | None,
    force: bool,
    verbose: bool,
    json_file: str | None,
) -> int:
    """Finetune by RECIPE (YAML) with the activation-magnitude penalty, then convert what was trained.

    Continues a run that was interrupted. On several processes or GPUs: accelerate launch -m bf16_to_fp16 finetune
    RECIPE.
    """
    # As many parameters as options, which click passes one by one.
    check_publishes(push_to, public=public or allow_unsafe)
    from .finetuning.recipe import read_recipe
    from .run.texts import local_files

    overrides = (*overrides, f"device={device}") if device else overrides
    asked = read_recipe(recipe, overrides)
    local_folder(asked.source)
    for texts in filter(None, (asked.data.path, asked.data.held_out_path)):
        local_files(texts)
    if push_to is not None:
        check_publishable(push_to, endpoint)
    # What follows takes seconds to import.
    from .finetuning.run import finetune
    from .report import terminal
    from .report.schema import Report, read

    result = finetune(recipe, overrides=overrides, force=force, endpoint=endpoint, progress=make_progress())
    if result is None:  # not the first process
        return SAFE
    published = push(Path(asked.out), push_to, result, public=public, allow_unsafe=allow_unsafe, endpoint=endpoint)
    write_result(json_file, result.report if published is None else {**result.report, "published": published})
    if json_file != "-" and result.out is not None:
        terminal.print_conversion(read(Report, result.report), result.out, then=result.next, verbose=verbose)
        if published is not None:
            terminal.print_published(published)
    return SAFE if result.safe else UNSAFE


@app.command("survey")
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
    type=click.Choice(["auto", "half", "norm-safe", "train", "fp16-accumulate"]),
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
    from .survey.checkpoints import pin, read_list

    check_given(None, data)
    read_list(listing)  # a bad list is answered before anything is fetched
    if out is None and not pins:
        raise click.UsageError("Missing argument 'OUTDIR'.", click.get_current_context())
    if pins:
        written = pin(listing)
        print(f"{listing}: {written or 'nothing'} pinned", file=sys.stderr)
    if out is None:
        return SAFE
    from .survey.run import Settings, survey
    from .survey.terminal import print_survey

    settings = Settings(target=target, data=data, seed=seed, device=device, keep=keep)
    rows = survey(read_list(listing), out, settings, jobs=jobs, force=force, progress=make_progress())
    write_result(json_file, {"checkpoints": [row.model_dump() for row in rows]})
    if json_file != "-":
        print_survey(rows, out)
    return SAFE if all(row.ended for row in rows) else UNSAFE


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


@app.command("advise", cls=_Numbers)
@click.argument("source", type=click.Path(), required=False, metavar="SOURCE")
@click.option("--updates", is_flag=True, help="Which weights an optimizer's updates would not move, and what helps.")
@click.option("--init", is_flag=True, help="How large weights should begin; SOURCE may be a hidden size.")
@click.option(
    "--format",
    "number",
    is_flag=False,
    flag_value="",
    metavar="[NUMBER]",
    help="What bf16 and fp16 make of a number, or of SOURCE's weights.",
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
    type=click.Path(),
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
@click.option("--html", type=FOLDER, metavar="FILE", help="losses: write curve and events as a page.")
@subfolder
@click.option("--seed", type=int, default=0, show_default=True, help="updates: seed of the data's order.")
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
    from .advise import tables as advice

    modes = {"--updates": updates, "--init": init, "--format": number is not None, "--losses": losses}
    asked = [name for name, given in modes.items() if given]
    if len(asked) != 1:
        raise UserError(f"ask for one of {', '.join(modes)}" + (f", not for {len(asked)}" if asked else ""))
    check_belongs(asked[0])
    if source is None and not number:
        wanted = {"--losses": "the log", "--init": "a checkpoint or hidden size", "--format": "a number or checkpoint"}
        needed = wanted.get(asked[0], "a checkpoint")
        raise UserError(f"{asked[0]} needs {needed}: bf16-to-fp16 advise SOURCE {asked[0]}")
    if options["data"] is not None:
        from .run.texts import local_files

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
    "--format": ("tensors", "subfolder"),
    "--losses": ("window", "z", "picture", "html"),
}
"""The options of ``advise`` that each of its questions takes."""


def check_belongs(question: str) -> None:
    """Raise UserError for an option of ``advise`` that was given and that the question does not take."""
    context = click.get_current_context()
    for parameter in context.command.params:
        takers = [asked for asked, names in ADVICE.items() if parameter.name in names]
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and takers and question not in takers:
            raise UserError(f"{parameter.opts[0]} goes with {' or '.join(takers)}; leave it out of {question}")


@app.command("families")
@json_file
def families_command(json_file: str | None) -> int:
    """List what is supported, and what cannot be."""
    from .families.known import FAMILIES, REFUSED, names_of
    from .report.screen import print_families

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
        print_families(rows, REFUSED)
    return SAFE


@app.command("demo")
@click.option(
    "--out", type=FOLDER, metavar="DIR", default=Path("fp16-demo"), show_default=True, help="Where the results go."
)
@json_file
def demo_command(out: Path, json_file: str | None) -> int:
    """Break two small trained checkpoints in fp16, convert them, and show the difference; no network."""
    from .demo import demo

    reports = demo(out, progress=make_progress(), show=json_file != "-")
    write_result(json_file, {"demos": reports})
    return SAFE if all(r["verdict"] == "safe" for r in reports) else UNSAFE


def checked_device(name: str | None) -> str:
    """Return the name of a device, auto by default; raise UserError at once for one of no known form."""
    from .devices import checked_name

    return checked_name(name or "auto")


def check_given(
    source: str | None, data: str | None = None, others: Mapping[Path | None, str] = MappingProxyType({})
) -> None:
    """Raise UserError for a checkpoint, a text or another file that was given and is not there, before the seconds that
    the work takes to import; others: paths, with what is then told to give."""
    if source is not None:
        check_config(local_source(source))
    if data is not None:
        from .run.texts import text_file

        text_file(data)
    for path, wanted in others.items():
        if path is not None and not path.exists():
            raise UserError(f"{path}: No such file or directory; give {wanted}")


def make_progress() -> Any:
    """Return what shows the progress of a command."""
    from .progress import Progress

    return Progress()


def checked_target(target: Any, option: str) -> Any:
    """Return ``target``; raise UserError at once where a report could not be written after the work is done."""
    if target is None or str(target) == "-":
        return target
    from .checkpoint.staging import check_file

    check_file(Path(target), f"choose another file for {option}")
    return target


def write_result(target: str | None, data: Mapping[str, Any]) -> None:
    """Write ``data`` and the version of its keys as JSON to a file, or to standard output for ``-``."""
    if target is None:
        return
    from .checkpoint.folder import finite, write_json
    from .environment import SCHEMA

    data = {"schema": SCHEMA, **data}
    if target == "-":
        json.dump(finite(data), sys.stdout, indent=2, ensure_ascii=False)
        print()
        return
    try:
        write_json(Path(target), data)
    except OSError as error:
        raise UserError(f"{target}: {error.strerror}; choose another file for --json") from error


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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else tokenizers warn in every process that is forked
    interrupts: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where it is ignored, as in a shell's background
        signal.signal(signal.SIGINT, interrupt)
    try:
        status = app(args=arguments, prog_name="bf16-to-fp16", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except UserError as error:
        return complain(str(error))
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "bf16-to-fp16"
        hint = f" (see {command} --help)" if isinstance(error, click.UsageError) else ""
        return complain(f"{error.format_message()}{hint}")
    except (KeyboardInterrupt, click.Abort):
        return interrupted()
    except (BrokenPipeError, _UnreadError):
        return unread()
    except Exception:
        # Compiled modules that are interrupted while they are imported turn it into errors of their own.
        if interrupts:
            return interrupted()
        raise
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def interrupted() -> int:
    """Say that the work was stopped and return the status for it."""
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def unread() -> int:
    """Return the status for output that nobody reads any more (``| head``), as a shell gives it to what SIGPIPE ends.

    What is left in the buffers goes nowhere, so that the interpreter does not fail on it while it ends.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    return UNREAD


def complain(message: str) -> int:
    """Print one error line and return the status for bad input."""
    if int(os.environ.get("RANK", "0")) > 0:
        # Under a launcher the first process says the same, and the launcher then ends this one, in this sleep; what is
        # wrong with this one alone is still said.
        time.sleep(10)
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return USAGE
