"""What the commands share: exit statuses, options, and how results and progress are shown."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from ..checkpoint.places import check_config, local_source
from ..errors import UserError, shortened
from ..numerics import MOST_POSITIONS
from ..visible import visible

SAFE, UNSAFE, USAGE, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141


class Location(click.Path):
    """A path that a file may have; anything longer, and what may not be looked at, is refused here, in one place."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path; raise UserError for one that the system refuses, but for one that is not there."""
        try:
            os.stat(os.path.expanduser(value))
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                said = error.strerror if isinstance(error, OSError) else str(error)
                raise UserError(f"{shortened(value)}: {said}; give another path") from error
        return super().convert(value, parameter, context)


PATH = Location()


FOLDER = Location(path_type=Path)


CONFIG = "the config.json of SOURCE's weights"


source = click.argument("source", type=PATH)  # or a Hub id; what a shell completes


data = click.option(
    "--data",
    type=PATH,
    metavar="FILE",
    help="Text to run on besides the built-in probe: JSONL, CSV, Parquet, text (.gz too), or a Hub dataset.",
)


json_file = click.option(
    "--json",
    "json_file",
    type=PATH,
    metavar="FILE",
    callback=lambda context, option, target: checked_target(target, "--json"),
    help="Write the report as JSON; - for standard output.",
)


verbose = click.option("-v", "--verbose", is_flag=True, help="Print the tables of the report as well.")


force = click.option("--force", is_flag=True, help="Replace OUT if this program wrote it and it holds nothing else.")


SEED = click.IntRange(-(2**63), 2**63 - 1)


seed = click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the built-in probe.")


sweep = click.option("--sweep", is_flag=True, help="Run every id of a large vocabulary, not a choice of them.")


max_length = click.option(
    "--max-length",
    type=click.IntRange(1, MOST_POSITIONS),
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


def checked_device(name: str | None) -> str:
    """Return the name of a device, auto by default; raise UserError at once for one of no known form."""
    from ..devices import checked_name

    return checked_name(name or "auto")


def check_given(
    source: str | None, data: str | None = None, others: Mapping[Path | None, str] = MappingProxyType({})
) -> None:
    """Raise UserError for a checkpoint, a text or another file that was given and is not there, before the seconds that
    the work takes to import; others: paths, with what is then told to give."""
    if source is not None:
        check_config(local_source(source))
    if data is not None:
        from ..run.texts import text_file

        text_file(data)
    for path, wanted in others.items():
        if path is not None and not path.exists():
            raise UserError(f"{path}: No such file or directory; give {wanted}")


def make_progress() -> Any:
    """Return what shows the progress of a command."""
    from ..progress import Progress

    return Progress()


def checked_target(target: Any, option: str) -> Any:
    """Return ``target``; raise UserError at once where a report could not be written after the work is done."""
    if target is None or (str(target) == "-" and option == "--json"):
        return target
    if str(target) == "-":
        raise UserError(f"{option} writes a file, and - is none; give its name")
    from ..checkpoint.staging import check_file

    check_file(Path(target), f"choose another file for {option}")
    return target


def write_result(target: str | None, data: Mapping[str, Any]) -> None:
    """Write ``data`` and the version of its keys as JSON to a file, or to standard output for ``-``."""
    if target is None:
        return
    from ..checkpoint.folder import finite, write_json
    from ..environment import SCHEMA

    data = {"schema": SCHEMA, **data}
    if target == "-":
        print(visible(json.dumps(finite(data), indent=2, ensure_ascii=False), as_json=True))
        return
    from ..checkpoint.staging import replacing

    try:
        with replacing(Path(target)) as new:
            write_json(new, data)
    except OSError as error:
        raise UserError(f"{target}: {error.strerror}; choose another file for --json") from error
