"""Exit statuses, options and output that the commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..checkpoint.contents import read_config, weight_files
from ..checkpoint.files import zip_records
from ..checkpoint.folder import check_tokenizer, tokenizer_beside
from ..checkpoint.headers import read_header
from ..checkpoint.hub import SMALL_FILES, fetched
from ..checkpoint.recorded import packed_data, recorded
from ..checkpoint.sources import CHECKPOINT, local_folder, local_source, subfolder_of
from ..checkpoint.staging import check_file, replacing
from ..conversion.options import FLAGS, PATH, Options
from ..environment import SCHEMA
from ..errors import UserError
from ..json_text import finite, write_json
from ..progress import visible
from ..quiet import quiet_downloads

SAFE, UNSAFE, USAGE, UNREAD = 0, 1, 2, 141


Check = Callable[[Path, Mapping[str, Any]], object]  # raises UserError for a checkpoint's folder and config

source = click.argument("source", type=PATH)  # or a Hub id; a shell completes paths


def field_option(name: str) -> Callable[[Any], Any]:
    flag, more = FLAGS[name], dict[str, Any]()
    if not flag.switch:
        more["default"] = getattr(Options, name)
    if (read := flag.read) is not None:
        more["callback"] = lambda context, option, given: None if given is None else read(given)
    return click.option(flag.name, name, help=flag.help, **flag.click, **more)


data, max_length, subfolder, device = map(field_option, ("data", "max_length", "subfolder", "device"))

json_file = click.option(
    "--json",
    "json_file",
    type=PATH,
    metavar="FILE",
    callback=lambda context, option, target: checked_target(target, "--json"),
    help="Write the report as JSON; - for standard output.",
)

force = click.option("--force", is_flag=True, help="Replace OUT if this program wrote it and it holds nothing else.")

endpoint = click.option(
    "--endpoint", metavar="URL", help="Address of the Hub; default: HF_ENDPOINT, else https://huggingface.co."
)


class Ordered(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(500)) for name, command in self.commands.items()])


def check_given(
    source: str | None,
    data: str | None = None,
    subfolder: str | None = None,
    *,
    check: Check = lambda *_: None,
) -> None:
    """Raise UserError if a given checkpoint or text is missing, or a folder is no usable checkpoint. It runs
    before slow imports and downloads. check: a further check of the folder and its config by the command."""
    here = None if source is None else local_source(source)
    if source is not None and (here is None or here.is_dir()):
        from ..families.from_config import in_folder

        folder = here or asked(source, SMALL_FILES)
        folder = folder if subfolder is None else subfolder_of(folder, subfolder)
        if not (folder / "model_index.json").is_file() and not (folder / "modules.json").is_file():
            with in_folder("/".join(filter(None, (source, subfolder)))):
                check(folder, read_config(folder))
            if data is not None:
                check_tokenizer(folder, tokenizer_beside(folder, subfolder))
            for file in weight_files(folder)[0] if here is not None else ():
                (read_header if file.suffix == ".safetensors" else zip_records)(file)
    check_text(data)


def check_text(data: str | None) -> None:
    if data is not None:
        from ..measuring.texts import local_file

        local_file(data)


def check_written(place: Path, subfolder: str | None = None, data: str | None = None) -> None:
    if place.is_file():
        packed_data(place)
    else:
        folder = place if subfolder is None else subfolder_of(place, subfolder)
        recorded(folder)
        if data is not None:
            check_tokenizer(folder)
    check_text(data)


def check_there(
    source: str, wanted: str = CHECKPOINT, *, or_file: bool = False, endpoint: str | None = None
) -> Path | None:
    """Return the local folder (with ``or_file`` also the file) that a source names, None for a Hub id. Raises
    UserError, before slow imports, if it is neither. wanted: the noun to ask for in the message."""
    here = local_folder(source, wanted, or_file=or_file)
    if here is None:
        asked(source, (), endpoint)
    return here


def asked(source: str, patterns: Sequence[str], endpoint: str | None = None) -> Path:
    with quiet_downloads():
        return fetched(source, patterns, endpoint)[0]


def checked_target(target: Any, option: str) -> Any:
    """Return ``target``; raise UserError if the report could not be written there, before the work begins."""
    if target is None or (str(target) == "-" and option == "--json"):
        return target
    if str(target) == "-":
        raise UserError(f"{option} writes a file, and - is not one; give a file name")
    check_file(Path(target), f"choose another file for {option}")
    return target


def write_result(target: str | None, data: Mapping[str, Any]) -> bool:
    """Write a report to ``target``; return whether standard output is free for text."""
    if target is None:
        return True
    data = {"schema": SCHEMA, **data}
    if target == "-":
        print(visible(json.dumps(finite(data), indent=2, ensure_ascii=False), as_json=True))
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
