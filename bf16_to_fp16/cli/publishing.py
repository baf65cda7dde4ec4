"""The command ``publish``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..checkpoint.hub import check_name
from ..checkpoint.pipeline import is_pipeline
from ..checkpoint.places import written_folder
from ..checkpoint.recorded import recorded
from ..errors import UserError
from .shared import FOLDER, SAFE, UNSAFE, endpoint, json_file, make_progress, write_result


@click.command("publish")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("repo_id")
@click.option("--dry-run", is_flag=True, help="Show the files and their sizes; send nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--public", is_flag=True, help="Make the repository public; without it a new one is private.")
@click.option("--create-pr", is_flag=True, help="Propose the change as a pull request.")
@click.option("--revision", metavar="BRANCH", help="Branch to upload to; default: main.")
@click.option("--commit-message", "message", metavar="TEXT", help="First line of the commit.")
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

    The token is that of `hf auth login` or HF_TOKEN. A run that was interrupted goes on where it stopped.
    """
    check_name(repo_id)
    if not is_pipeline(written_folder(folder)):  # ``publish`` itself refuses a pipeline
        recorded(folder)
    from ..conversion.publish import Upload, publish
    from ..report import terminal

    def confirm(upload: Upload) -> bool:
        terminal.print_upload(upload, repo_id, public=public, aside=json_file == "-")
        if yes or dry_run:
            return True
        if not sys.stdin.isatty():
            raise UserError(
                "nothing was uploaded, since nobody can be asked here; give -y to upload without a question"
            )
        kind = "a public" if public else "a private"
        return click.confirm(f"Upload to {repo_id} ({kind} repository, if it is new)?", err=True)

    how: dict[str, Any] = {"public": public, "dry_run": dry_run, "confirm": confirm, "progress": make_progress()}
    result = publish(folder, repo_id, **how, **options)
    write_result(json_file, result)
    if json_file != "-":
        terminal.print_published(result)
    return SAFE if result["verdict"] == "safe" else UNSAFE
