"""Convert whole diffusion pipelines: convert every supported text encoder, and link or copy the other files. Each
converted sub-folder is a checkpoint by itself, and ``fp16_pipeline.json`` lists all of them."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint.folder import records
from ..checkpoint.formats import SAFETENSORS_DTYPES
from ..checkpoint.headers import FLOATING_DTYPES, read_whole_header
from ..checkpoint.hub import fetched
from ..checkpoint.pipeline_files import MODEL_INDEX, PIPELINE, Pipeline, bring, config_of, open_pipeline
from ..checkpoint.sources import own_name
from ..checkpoint.staging import staged
from ..environment import SCHEMA
from ..errors import UserError
from ..families.known import architectures, class_named, family_of, is_known, names_of
from ..json_text import write_json
from ..progress import Progress, progress_of
from ..quiet import quiet
from ..report import other_reports, schema
from ..report.facts import giving_states
from ..rescaling.exponents import LAST
from ..results import dump
from ..wording import counted, listed
from .convert import Conversion, convert_by
from .options import Destination, Options

_LAST_STATES = """
DreamLite DreamLiteMobile Kandinsky5I2I Kandinsky5I2V Kandinsky5T2I Kandinsky5T2V Kandinsky6TI2VA LongCatImage
LongCatImageEdit OvisImage QwenImage QwenImageControlNet QwenImageControlNetInpaint QwenImageEdit
QwenImageEditInpaint QwenImageEditPlus QwenImageImg2Img QwenImageInpaint QwenImageLayered Sana SanaControlNet
SanaImageToVideo SanaPAG SanaSprint SanaSprintImg2Img SanaVideo SanaWM
"""
READ_AT_THE_END = frozenset(f"{name}Pipeline" for name in _LAST_STATES.split())
"""Pipeline classes of diffusers 0.42.1 that read only the last states of a text encoder with one stack of layers."""
READ_INSIDE = frozenset({"LongCatAudioDiTPipeline"})
"""Pipeline classes that read inner states of a text encoder whose family also has a decoder."""


@dataclass(frozen=True)
class PipelineConversion:
    """The result of ``convert_pipeline``. After a dry run, ``report`` is empty and ``out`` is None."""

    report: Mapping[str, Any] = field(repr=False)
    out: Path | None
    encoders: Mapping[str, Conversion]

    @property
    def safe(self) -> bool:
        return all(done.safe for done in self.encoders.values())


@quiet()
def convert_pipeline(
    source: str | Path,
    out: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | bool | None = None,
    **options: Any,
) -> PipelineConversion:
    """Convert every supported text encoder of a diffusion pipeline (folder or Hub id); link or copy the other files to
    ``out``.

    options: the fields of ``Options``. dry_run: make the plans and write nothing. force: replace an existing ``out``.
    Raises UserError where an encoder cannot be converted; ``out`` is then not written."""
    progress, settings = progress_of(progress), Options(**options)
    settings.check()
    pipeline = open_pipeline(source, is_known)
    if pipeline is None:
        raise UserError(f"{source} has no model_index.json, so it is not a pipeline; use convert")
    for flag, given in (("--plan", settings.plan if len(pipeline.encoders) > 1 else None), ("--as", settings.as_class)):
        if given is not None:
            raise UserError(f"{flag} works on one model; give --subfolder {listed(pipeline.encoders, 'or')} as well")
    place = Destination(Path(out), force=force, dry_run=dry_run)
    asked = {name: encoder_options(settings, pipeline, name) for name in pipeline.encoders}
    place.check(pipeline.folder)
    if place.dry_run:
        planned = {n: converted(asked[n], pipeline, n, place, progress) for n in pipeline.encoders}
        return PipelineConversion({}, None, planned)
    with staged(place.out, force=place.force) as work:
        if pipeline.revision is not None:
            with progress.step(f"Fetching {counted(len(pipeline.others), 'other file')}"):
                fetched(pipeline.source, [glob.escape(name) for name in pipeline.others], commit=pipeline.revision)
        with progress.step(f"Linking or copying {counted(len(pipeline.others), 'other file')}") as advance:
            links = bring(pipeline.folder, pipeline.others, work, advance=advance)
        done: dict[str, Conversion] = {}
        for name in pipeline.encoders:
            progress.say(f"{name}, {len(done) + 1} of {counted(len(pipeline.encoders), 'encoder')}")
            done[name] = converted(asked[name], pipeline, name, Destination(work / name), progress)
        report = report_of(pipeline, done, links, work, settings.command(pipeline.source, place.out))
        write_json(work / PIPELINE, dump(report))
    moved = {
        name: replace(one, out=place.out / name, next=alone(pipeline, name) if one.next else "")
        for name, one in done.items()
    }
    return PipelineConversion(dump(report), place.out, moved)


def report_of(
    pipeline: Pipeline, done: Mapping[str, Conversion], links: Mapping[str, int], work: Path, command: str
) -> other_reports.PipelineReport:
    # Links are recorded without SHA-256: replacing ``out`` removes only the link, not the source's file.
    known: list[dict[str, object]] = [{"name": name, "nbytes": nbytes} for name, nbytes in links.items()]
    files = sorted([*records(work, links), *known], key=lambda entry: str(entry["name"]))
    shown = own_name(pipeline.source) if pipeline.revision is None else pipeline.source
    return other_reports.PipelineReport(
        schema=SCHEMA,
        verdict="safe" if all(one.safe for one in done.values()) else "unsafe",
        source=schema.Source(path=shown, revision=pipeline.revision),
        pipeline=pipeline.kind,
        encoders=[
            other_reports.PipelineEntry(subfolder=name, verdict=one.report["verdict"], proof=one.report["proof"])
            for name, one in done.items()
        ],
        left_out=list(pipeline.left_out),
        command=command,
        environment=schema.read(schema.Report, next(iter(done.values())).report).environment,
        output=schema.Output(files=[schema.FileEntry.model_validate(entry) for entry in files]),
        linked=len(links),
        copied=len(pipeline.others) - len(links),
        nbytes=sum((work / name).stat().st_size for name in pipeline.others),
        dtype=dtype_of_largest(work, pipeline.others),
    )


def converted(options: Options, pipeline: Pipeline, name: str, place: Destination, progress: Progress) -> Conversion:
    done = convert_by(options, pipeline.source, place, progress=progress)
    if place.dry_run:
        return done
    if done.report["source"].get("revision") != pipeline.revision:
        raise UserError(f"{pipeline.source} was changed on the Hub meanwhile; run the same command again")
    report = schema.read(schema.Report, done.report)
    if (factor := report.outputs[LAST].factor_log2) != 0:
        other, itself = giving_states(report), alone(pipeline, name)
        raise UserError(
            f"{pipeline.source}: {pipeline.kind} reads the last states of {name}, and the conversion"
            f" {f'multiplies them by 2^{factor}' if isinstance(factor, int) else 'changes them'};"
            f" {f'write {other} as the class of {name} in {MODEL_INDEX}, or ' if other else ''}{itself}"
        )
    return done


def dtype_of_largest(folder: Path, names: Sequence[str]) -> str | None:
    files = [folder / name for name in names if name.endswith(".safetensors")]
    if not files:
        return None
    try:
        tensors = read_whole_header(max(files, key=lambda file: file.stat().st_size))[0]
    except UserError:  # a file that is brought along as it is
        return None
    return next((str(SAFETENSORS_DTYPES[t.dtype]) for t in tensors.values() if t.dtype in FLOATING_DTYPES), None)


def alone(pipeline: Pipeline, name: str) -> str:
    return f"convert it alone: bf16-to-fp16 convert {pipeline.source} OUT --subfolder {name}"


def encoder_options(options: Options, pipeline: Pipeline, name: str) -> Options:
    """Return the options for the text encoder ``name``. Its stream keeps its scale if the pipeline may read inner
    states. Raises UserError if the class that the pipeline loads has a decoder or does not fit the config."""
    config = config_of(pipeline.folder, name) or {}
    (library, loaded), known = pipeline.loaded[name], names_of(family_of(config))
    # T5 and MT5 are the same code, so that the classes of each load the other's config.
    kind = next((each for each in (loaded, f"M{loaded}", loaded.removeprefix("M")) if each in known), None)
    if library != "transformers" or kind is None:
        raise UserError(
            f"{pipeline.folder / MODEL_INDEX} loads {name} as {library}.{loaded}, but its config is for"
            f" {', '.join(known)}; write the right class there, or {alone(pipeline, name)}"
        )
    stock = class_named(kind)
    two_stacks = family_of(config).decoder is not None
    if two_stacks and stock is not None and stock.decodes:
        raise UserError(
            f"{pipeline.kind} may read inner states of {name}, but rescaling a {kind} changes its inner states;"
            f" {alone(pipeline, name)}"
        )
    held = pipeline.kind in READ_INSIDE if two_stacks else pipeline.kind not in READ_AT_THE_END
    if held and options.stream not in (None, 0):
        raise UserError(
            f"{pipeline.kind} may read inner states of {name}, so --stream could change its results; leave out"
            f" --stream, or {alone(pipeline, name)}"
        )
    own = architectures(config)[:1] == [kind]
    return replace(options, subfolder=name, as_class=None if own else kind, stream=0 if held else options.stream)
