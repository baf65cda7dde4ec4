"""Write the model card of a converted checkpoint. Its licence, languages, tags and task are copied from the source's
card, or left out if that lacks them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, metadata_load

from ..checkpoint.contents import MODULES
from ..checkpoint.folder import TOKENIZER_FILES
from ..families.known import architectures, class_named, loading_class, named
from . import coverage, facts, remedies
from .markdown import changes_text, notice, origin, results_text, templates
from .schema import Report

NOTICES = {"unsafe": "> **Unsafe in fp16", "short": "> **Safe in fp16"}  # beginnings of the text by standing
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # a processor of images has one
FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n.*?\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
OTHER_FORMATS = frozenset(
    ("bf16", "bfloat16", "fp32", "gguf", "jax", "onnx", "openvino", "pytorch", "rust", "tf", "tflite")
)
"""Tags of the source for the format of its weights, which the converted folder does not share."""


def write_card(path: Path, report: Report, config: Mapping[str, Any]) -> None:
    path.write_text(render_card(report, config), encoding="utf-8", newline="\n")


def render_card(report: Report, config: Mapping[str, Any]) -> str:
    """Return the model card: YAML front matter, then Markdown. An unsafe checkpoint's card begins with the verdict.
    config: the output's config.json, which names the model's class."""
    inherited: dict[str, Any] = dict(report.source.card)
    architecture = next(iter(architectures(config)), "?")
    run, carried, family = report.finetune, report.source.carried_over, named(report.family)
    data = ModelCardData(
        base_model=origin(report)[0],
        library_name="transformers",
        tags=[*(tag for tag in inherited.pop("tags", ()) if tag.lower() not in OTHER_FORMATS), "fp16", "bf16-to-fp16"],
        **inherited,
    )
    template = templates().get_template("card.md.jinja")
    text = template.render(
        report=report,
        results=results_text(report),
        changes=changes_text(report),
        licensed="license" in inherited,
        languages="language" in inherited,
        recipe=yaml.safe_dump(run.recipe, sort_keys=False, width=120, allow_unicode=True) if run and run.recipe else "",
        model_class=loading_class(architecture),
        outside=sum(why.startswith(architecture) for why in report.source.dropped.values()),
        architecture=architecture,
        sentences=MODULES in carried,
        stock=class_named(architecture),
        tokenizer=any(name in TOKENIZER_FILES for name in carried),
        tower_in_fp32=remedies.tower_in_fp32(report.family, report.regimes),
        reads_images=coverage.has_tower(report.family) and not set(PROCESSOR_FILES).isdisjoint(carried),
        kept_in_fp32=family.kept_in_fp32 if family is not None else (),
        made_in_fp32=family is not None and family.made_in_fp32,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{text}"


def warned(card: str, report: Report) -> str:
    front = FRONT_MATTER.match(card)
    head, body = (card[: front.end()], card[front.end() :]) if front else ("", card)
    if body.lstrip().startswith(NOTICES[facts.standing(report)]):
        return card
    return f"{head}\n> {notice(report)} Statements below that contradict this were measured earlier.\n\n{body.lstrip()}"


def front_matter(folder: Path) -> dict[str, Any]:
    """Return the licence, languages, tags and task from a source's model card, or {} if there is no readable card.
    folder: the source's; in a diffusers pipeline, the card can also be in the folder above."""
    own, above = folder / "README.md", folder.parent
    cards = [own, folder / "SOURCE_README.md", *[above / "README.md"] * (above / "model_index.json").is_file()]
    try:
        metadata = metadata_load(next((card for card in cards if card.is_file()), own)) or {}
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError):
        # No conversion should fail for a card that cannot be read.
        return {}
    result: dict[str, Any] = {}
    for key in ("license", "license_name", "license_link", "pipeline_tag", "language", "tags"):
        value = metadata.get(key)
        if isinstance(value, str) and key != "tags":
            result[key] = value
        # YAML reads the language code of Norwegian as false; only text is taken.
        elif isinstance(value, list) and (kept := [each for each in value if isinstance(each, str)]):
            result[key] = kept
    return result
