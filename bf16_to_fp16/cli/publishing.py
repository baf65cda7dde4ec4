"""The command ``publish``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

from ..conversion.options import FOLDER
from ..errors import UserError
from ..report.screen import Column, Table, console, numbers
from ..wording import counted
from .shared import SAFE, UNSAFE, endpoint, json_file, write_result

if TYPE_CHECKING:
    from ..conversion.publish import Upload


@click.command("publish")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("repo_id")
@click.option("--dry-run", is_flag=True, help="Show the files and their sizes; send nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--public", is_flag=True, help="Make the repository public; without it a new one is private.")
@click.option("--create-pr", is_flag=True, help="Propose the change as a pull request.")
@click.option("--revision", metavar="BRANCH", help="Branch to upload to; default: main.")
@click.option(
    "--allow-unsafe", is_flag=True, help="Publish an unsafe checkpoint; the first line of its card says that it is."
)
@click.option("--force", is_flag=True, help="Replace files of REPO_ID that have other content.")
@endpoint
@json_file
def publish_command(
    folder: Path, repo_id: str, dry_run: bool, yes: bool, public: bool, json_file: str | None, **options: Any
) -> int:
    """Check the converted checkpoint in DIR once more and upload it to the Hub, private unless --public.

    The token is the one of `hf auth login` or HF_TOKEN. A run that was interrupted goes on where it stopped."""
    from ..conversion.publish import publish

    def confirm(upload: Upload) -> bool:
        print_upload(upload, repo_id, public=public, to_stderr=json_file == "-")
        if yes or dry_run:
            return True
        if not sys.stdin.isatty():
            raise UserError(
                "nothing was uploaded, since there is no terminal for the question; give -y to upload without it"
            )
        kind = "a public" if public else "a private"
        return click.confirm(f"Upload to {repo_id} ({kind} repository, if it is new)?", err=True)

    how: dict[str, Any] = {"public": public, "dry_run": dry_run, "confirm": confirm, "progress": True}
    result = publish(folder, repo_id, **how, **options)
    if write_result(json_file, result):
        screen = console()
        if result["uploaded"]:
            kind = "private" if result["private"] else "public"
            files = counted(len(result["uploaded"]), "file")
            screen.say(f"{result['url']} ({kind}): {files} in {result['commit']}")
        else:
            screen.print("nothing was uploaded")
        screen.rows(("these stay", ", ".join(result["kept"])))
    return SAFE if result["verdict"] == "safe" else UNSAFE


def print_upload(upload: Upload, repo: str, *, public: bool, to_stderr: bool) -> None:
    screen = console(stderr=to_stderr)
    screen.say(
        "public: everyone can read the repository; an existing private repository stays private"
        if public
        else "private: an existing public repository is refused"
    )
    items = upload.items()
    sizes = [(item.name, item.nbytes or 0) for item in items]
    sizes.append((f"{len(items)} files", sum(nbytes for _, nbytes in sizes)))
    screen.table(Table((Column("file", 0), numbers("size", 1, decimal)), sizes, f"for {repo}"))
    if upload.card_edited:
        screen.say("README.md: edited since the conversion")
