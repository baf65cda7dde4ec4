"""How each text encoder of a diffusion pipeline is converted, so that the pipeline reads the source's values.
Conversion keeps last states and scales inner ones, which many pipelines read. So the stream is held, except in
encoder-decoder families and in pipelines known to read the last states alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..checkpoint.pipeline import MODEL_INDEX, Pipeline, config_of
from ..errors import UserError
from ..families.known import architectures, class_named, family_of, names_of, same_code
from ..report.facts import giving_states
from ..report.schema import Report
from ..rescaling.outputs import LAST
from .options import Options


def classes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Pipeline" for name in names.split())


READ_AT_THE_END = classes(
    """
    DreamLite DreamLiteMobile Kandinsky5I2I Kandinsky5I2V Kandinsky5T2I Kandinsky5T2V Kandinsky6TI2VA LongCatImage
    LongCatImageEdit OvisImage QwenImage QwenImageControlNet QwenImageControlNetInpaint QwenImageEdit
    QwenImageEditInpaint QwenImageEditPlus QwenImageImg2Img QwenImageInpaint QwenImageLayered Sana SanaControlNet
    SanaImageToVideo SanaPAG SanaSprint SanaSprintImg2Img SanaVideo SanaWM
    """
)
"""Pipeline classes that read the last states alone of an encoder of one stack, by the source of diffusers 0.42.1."""
READ_INSIDE = classes("LongCatAudioDiT")
"""Pipeline classes that read inner states of an encoder of a family with two stacks."""


def alone(pipeline: Pipeline, name: str) -> str:
    return f"convert it alone: bf16-to-fp16 convert {pipeline.source} OUT --subfolder {name}"


def class_that_loads(pipeline: Pipeline, name: str, config: Mapping[str, Any]) -> str:
    library, kind = pipeline.loaded[name]
    known = names_of(family_of(config))
    fitting = next((each for each in same_code(kind) if each in known), None)
    if library != "transformers" or fitting is None:
        raise UserError(
            f"{pipeline.folder / MODEL_INDEX} loads {name} as {library}.{kind}, which is no supported class for its"
            f" config ({config['model_type']}: {', '.join(known)}); name the right one there, or"
            f" {alone(pipeline, name)}"
        )
    return fitting


def options_of(options: Options, pipeline: Pipeline, name: str) -> Options:
    """Return an encoder's options: the class that loads it, and its stream held where the pipeline may read inner
    states. Raises UserError for a class that does not fit its config, or one with a decoder, whose inner states
    change."""
    config = config_of(pipeline.folder, name) or {}
    kind = class_that_loads(pipeline, name, config)
    stock = class_named(kind)
    two_stacks = family_of(config).decoder is not None
    if two_stacks and stock is not None and stock.decodes:
        raise UserError(
            f"what {pipeline.kind} reads of {name} is not known, and inner states of a {kind} change by a factor;"
            f" {alone(pipeline, name)}"
        )
    held = pipeline.kind in READ_INSIDE if two_stacks else pipeline.kind not in READ_AT_THE_END
    asked = replace(
        options,
        subfolder=name,
        as_class=None if architectures(config)[:1] == [kind] else kind,
    )
    if held and options.stream not in (None, 0):
        raise UserError(
            f"{pipeline.kind} may read inner states of {name}, so that its stream stays; leave out --stream, or"
            f" {alone(pipeline, name)}"
        )
    return replace(asked, stream=0) if held else asked


def check_kept(pipeline: Pipeline, name: str, report: Report) -> None:
    factor = report.outputs[LAST].factor_log2
    if factor == 0:
        return
    other, itself = giving_states(report), alone(pipeline, name)
    raise UserError(
        f"{pipeline.source}: {pipeline.kind} reads the last states of {name}, which become"
        f" {f'2^{factor}' if isinstance(factor, int) else 'other'} times the source's;"
        f" {f'name {other} for it in {MODEL_INDEX}, or ' if other else ''}{itself}"
    )
