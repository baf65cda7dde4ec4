"""The click program: its commands in the order of use, and its exit statuses."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from ..checkpoint.files import FULL_OR_FAILING
from ..checkpoint.hub import chain
from ..conversion.options import FOLDER
from ..errors import INTERRUPTED, UserError, shortened
from ..progress import Progress, show
from .advising import advise_command
from .checking import audit_command, certify_command, verify_command
from .converting import convert_command, undo_command
from .publishing import publish_command
from .shared import SAFE, UNREAD, UNSAFE, USAGE, Ordered, json_file, write_result
from .training import finetune_command, launch_command, recipe_command


class _Commands(Ordered):
    """The group of all commands. On a closed pipe it exits with ``UNREAD``; click would exit with 1, the status of
    "unsafe"."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (BrokenPipeError, SystemExit) as stop:
            if isinstance(stop, SystemExit) and not isinstance(stop.__context__, BrokenPipeError):  # which rich raises
                raise
            raise click.exceptions.Exit(UNREAD) from stop


@click.group(
    cls=_Commands,
    name="bf16-to-fp16",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(package_name="bf16_to_fp16", message="%(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Make bf16 checkpoints of T5, Pegasus, Gemma and others safe in fp16, to be loaded by stock libraries.

    SOURCE is a local folder, one file of weights or a Hub id (name[@revision]).
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@click.command("families")
@json_file
def families_command(json_file: str | None) -> int:
    """List the supported families."""
    from ..families.known import FAMILIES, names_of
    from ..report.screen import print_families

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
    if write_result(json_file, {"families": rows}):
        print_families(rows)
    return SAFE


@click.command("demo")
@click.option(
    "--out", type=FOLDER, metavar="DIR", default=Path("fp16-demo"), show_default=True, help="Where the results go."
)
@json_file
def demo_command(out: Path, json_file: str | None) -> int:
    """Break three small trained checkpoints in fp16, convert them, and show the difference; no network."""
    from ..demo import demo

    reports = demo(out, progress=Progress(), show=json_file != "-")
    write_result(json_file, {"demos": reports})
    return SAFE if all(r["verdict"] == "safe" for r in reports) else UNSAFE


def refusing_shared_paths(command: click.Command) -> Callable[..., Any]:
    """Wrap a command's callback so that it raises UserError if a report's path is given for another argument too."""
    run = command.callback
    assert run is not None
    paths = {p.name: p.opts[0] for p in command.params if isinstance(p.type, click.Path) and p.name is not None}

    @functools.wraps(run)
    def checked(**values: Any) -> Any:
        given = [os.path.realpath(values[name]) for name in paths if values[name] not in (None, "-", os.devnull)]
        for report in ("json_file", "html"):
            if values.get(report) is not None and given.count(os.path.realpath(values[report])) > 1:
                raise UserError(f"{values[report]} is given twice; choose another file for {paths[report]}")
        return run(**values)

    return checked


COMMANDS: tuple[click.Command, ...] = (
    convert_command,
    audit_command,
    certify_command,
    publish_command,
    verify_command,
    undo_command,
    finetune_command,
    recipe_command,
    launch_command,
    advise_command,
    families_command,
    demo_command,
)
for command in COMMANDS:
    app.add_command(command)
    for each in command.commands.values() if isinstance(command, click.Group) else [command]:
        each.callback = refusing_shared_paths(each)


def main(arguments: list[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, terminate)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else tokenizers warn in every process that is forked
    try:
        status = app(args=arguments, prog_name="bf16-to-fp16", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except UserError as error:
        return complain(str(error))
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "bf16-to-fp16"
        hint = f" (see {command} --help)" if isinstance(error, click.UsageError) else ""
        return complain(f"{error.format_message()}{hint}")
    except (KeyboardInterrupt, click.Abort) as stop:
        return interrupted(stop.__cause__ or stop)  # click.Abort names the interrupt as its cause
    except BrokenPipeError:
        return UNREAD
    except Exception as error:
        # A compiled module whose import is interrupted raises errors of its own.
        if any(isinstance(each, KeyboardInterrupt) for each in chain(error)):
            return interrupted(KeyboardInterrupt())
        if isinstance(error, OSError) and error.errno in (*FULL_OR_FAILING, errno.ENAMETOOLONG, errno.EACCES):
            place = shortened(error.filename or "standard output")
            return complain(f"{place}: {error.strerror}; choose another place for it")
        raise


def terminate(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def interrupted(stop: BaseException) -> int:
    if int(os.environ.get("RANK", "0")) == 0:  # under a launcher the first process says it for all
        print(str(stop) or "interrupted", file=sys.stderr)
    return INTERRUPTED


def complain(message: str) -> int:
    if int(os.environ.get("RANK", "0")) > 0:
        # Under a launcher the first process reports the same error, and the launcher ends this one during the sleep.
        # An error of this process alone is still reported.
        time.sleep(30)
    show("error: " + " ".join(message.split()), aside=True)
    return USAGE
