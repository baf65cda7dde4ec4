"""Exit statuses, options and output that the commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..checkpoint.staging import check_file, replacing
from ..conversion.options import FLAGS, PATH, Options
from ..environment import SCHEMA
from ..errors import UserError
from ..json_text import finite, write_json

SAFE, UNSAFE, USAGE, UNREAD = 0, 1, 2, 141


source = click.argument("source", type=PATH)  # or a Hub id; a shell completes paths


def field_option(name: str) -> Callable[[Any], Any]:
    flag = FLAGS[name]
    default = {} if flag.switch else {"default": getattr(Options, name)}
    return click.option(flag.name, name, help=flag.help, **flag.click, **default)


data, max_length, subfolder, device = map(field_option, ("data", "max_length", "subfolder", "device"))

json_file = click.option(
    "--json",
    "json_file",
    type=PATH,
    metavar="FILE",
    callback=lambda context, option, target: checked_target(target, "--json"),
    help="Write the report as JSON; - for standard output.",
)

force = click.option("--force", is_flag=True, help="Replace OUT if a report in it lists all that it holds.")

endpoint = click.option(
    "--endpoint", metavar="URL", help="Address of the Hub; default: HF_ENDPOINT, else https://huggingface.co."
)


class Ordered(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(500)) for name, command in self.commands.items()])


def checked_target(target: Any, option: str) -> Any:
    """Return ``target``, a report's path. Raises UserError if it cannot be written. option: named in the error."""
    if target is None or (str(target) == "-" and option == "--json"):
        return target
    if str(target) == "-":
        raise UserError(f"{option} cannot write to standard output (-); give a file name")
    check_file(Path(target), f"choose another file for {option}")
    return target


def write_result(target: str | None, data: Mapping[str, Any]) -> bool:
    """Write a report as JSON to ``target``: a path, ``-`` for standard output, or None for nowhere. Return whether
    standard output is still free for text."""
    if target is None:
        return True
    data = {"schema": SCHEMA, **data}
    if target == "-":
        print(json.dumps(finite(data), indent=2))  # in ASCII, so that no character steers a terminal
        return False
    with replacing_for("--json", Path(target)) as new:
        write_json(new, data)
    return True


@contextmanager
def replacing_for(option: str, path: Path) -> Iterator[Path]:
    try:
        with replacing(path) as new:
            yield new
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another file for {option}") from error
