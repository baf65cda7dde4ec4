"""The model card of a converted checkpoint: what the next user of it sees first.

The front matter is inherited from the source's own card: licence, languages, tags and task. What that card does not say
is not invented; where it names no licence, the text says so. The figures come from the report, as everywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from jinja2 import Environment, PackageLoader, StrictUndefined

from .checkpoint import Checkpoint
from .display import bound_magnitude, excess, magnitude, significant_bits
from .page import (
    broken_regimes,
    fidelity_rows,
    figures,
    histograms,
    is_exact,
    plan_rows,
    regime_rows,
    source_name,
    unsafe_rows,
    verdict_sentence,
    weight_rows,
)
from .proof import coverage, is_proven, least_precise, uncertified_rows

TAGS = ("fp16", "bf16-to-fp16")

WO_STAYS_FP32 = ("t5", "mt5", "umt5")
"""Families whose stock classes list ``wo`` in ``_keep_in_fp32_modules``."""

OTHER_FORMATS = frozenset(
    ("bf16", "bfloat16", "fp32", "gguf", "jax", "onnx", "openvino", "pytorch", "rust", "tf", "tflite")
)
"""Tags of the source that say how its weights are stored, which the converted folder does not share."""

MOST_UNPROVEN = 6
"""Sites without a proof that a card lists; the report has all."""

TOKENIZER_FILES = frozenset(("tokenizer.json", "tokenizer_config.json", "spiece.model"))


def write_card(path: Path, checkpoint: Checkpoint, report: Mapping[str, Any]) -> None:
    """Write the model card of a conversion to ``path``: front matter and Markdown, UTF-8.

    checkpoint: the source, whose ``README.md`` gives the front matter. report: what ``report.build`` returns. An unsafe
    verdict is the first line of the text.
    """
    inherited = front_matter(checkpoint.folder)
    data = ModelCardData(
        base_model=hub_id(checkpoint),
        library_name="transformers",
        tags=[*(tag for tag in inherited.pop("tags", ()) if tag.lower() not in OTHER_FORMATS), *TAGS],
        **inherited,
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text(checkpoint, report, licensed='license' in inherited)}").save(path)


def hub_id(checkpoint: Checkpoint) -> str | None:
    """Return the Hub id that a source was given by, None for a local folder."""
    return None if checkpoint.revision is None else checkpoint.source.partition("@")[0]


def front_matter(folder: Path) -> dict[str, Any]:
    """Return licence, languages, tags and task from the card of a source folder, without what is absent or not text.

    A model inside a diffusers pipeline has its card one folder up, beside ``model_index.json``.
    """
    card = folder / "README.md"
    if not card.is_file() and (folder.parent / "model_index.json").is_file():
        card = folder.parent / "README.md"
    try:
        found = metadata_load(card) or {}
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError):
        # A card that cannot be read says nothing, and no conversion should fail for it.
        return {}
    result: dict[str, Any] = {}
    for key in ("license", "license_name", "license_link", "pipeline_tag"):
        if isinstance(found.get(key), str):
            result[key] = found[key]
    for key in ("license", "language", "tags"):
        values = found.get(key)
        # YAML reads the language code of Norwegian as false; only text is taken.
        if isinstance(values, list) and (kept := [v for v in values if isinstance(v, str)]):
            result[key] = kept
    if isinstance(found.get("language"), str):
        result["language"] = found["language"]
    return result


def text(checkpoint: Checkpoint, report: Mapping[str, Any], *, licensed: bool) -> str:
    """Return the Markdown of the card."""
    made = Environment(
        loader=PackageLoader("bf16_to_fp16"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"prose": prose, "span": span, "oneline": oneline}
    made.filters |= {"bound": bound_magnitude, "magnitude": magnitude, "over": excess, "significant": significant_bits}
    covers, leaves = coverage(report)
    architecture = str((checkpoint.config.get("architectures") or ["?"])[0])
    broken = broken_regimes(report)
    return made.get_template("card.md.jinja").render(
        report=report,
        name=source_name(report),
        hub_id=hub_id(checkpoint),
        revision=checkpoint.revision,
        licensed=licensed,
        safe=report["verdict"] == "safe",
        sentence=verdict_sentence(report),
        remedy=unsafe_rows(report)["remedy"],
        figures=figures(report),
        regimes=regime_rows(report["regimes"]),
        proven=is_proven(report),
        covers=covers,
        leaves=leaves,
        unproven=uncertified_rows(report),
        most_unproven=MOST_UNPROVEN,
        least_precise=least_precise(report),
        fidelity=fidelity_rows(report.get("fidelity")),
        weights=weight_rows(report.get("weights")),
        moves=plan_rows(report),
        exact=is_exact(report["plan"]),
        histograms=histograms(report["plan"]["exponents"]),
        model_class=architecture if encoder_only(architecture) else "AutoModelForSeq2SeqLM",
        encoder_only=encoder_only(architecture),
        tokenizer=bool(TOKENIZER_FILES & set(report["source"]["carried_over"])),
        half="half" not in broken,
        wo_stays_fp32=report["family"] in WO_STAYS_FP32,
    )


def encoder_only(architecture: str) -> bool:
    """Return whether a stock class has no decoder."""
    return architecture.endswith("EncoderModel")


def oneline(value: str) -> str:
    """Return text without line breaks."""
    return " ".join(str(value).split())


def prose(value: object) -> str:
    """Return text that Markdown shows as it is, also inside a table."""
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", oneline(str(value)))


def span(value: object) -> str:
    """Return text as a code span that nothing in it can end, also inside a table."""
    line = oneline(str(value)).replace("|", r"\|")
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence, pad = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{pad}{line}{pad}{fence}"
