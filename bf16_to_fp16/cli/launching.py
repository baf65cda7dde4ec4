"""``recipe`` and ``launch``: what a finetune on several cards begins with."""

from __future__ import annotations

import click

from .shared import SAFE, json_file, write_result


@click.command("recipe")
@click.argument("name", required=False)
@json_file
def recipe_command(name: str | None, json_file: str | None) -> int:
    """Print a finetune's recipe that runs as it stands: flan-t5-base, pegasus, mt5, flan-t5-xl or demo."""
    from ..finetuning.recipe import parse_recipe
    from ..finetuning.shipped import recipe_text
    from ..yaml_files import parse_yaml

    text = recipe_text(name)
    write_result(
        json_file, {"name": name, "recipe": parse_recipe(parse_yaml(text, str(name))).describe(), "text": text}
    )
    if json_file != "-":
        click.echo(text, nl=False)
    return SAFE
