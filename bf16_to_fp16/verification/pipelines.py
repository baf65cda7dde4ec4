"""An encoder inside a converted pipeline: whether the linears that read its inner states carry what they have to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from ..checkpoint.files import read_json
from ..checkpoint.folder import sha256_of
from ..checkpoint.linears import rescale_columns
from ..checkpoint.pipeline import PIPELINE, class_of, components, config_of
from ..checkpoint.pipeline_classes import PIPELINES, Linear
from ..checkpoint.places import contained
from ..errors import UserError
from ..report.schema import PipelineReport, Report, read
from .comparing import Problem


def check_pipeline(folder: Path, report: Report, original: Path | None) -> list[Problem] | None:
    """Return what is wrong in the pipeline that an encoder's folder lies in, as far as it reads that encoder; None for
    a folder that is in no converted pipeline. original: the encoder's folder in the source."""
    whole, name = folder.absolute().parent, folder.absolute().name
    if not (whole / PIPELINE).is_file():
        return None
    try:
        said = read(PipelineReport, read_json(contained(whole, PIPELINE), "report of the pipeline"))
    except ValidationError:
        return [Problem("pipeline", PIPELINE, "is not what convert writes")]
    if name not in {entry.subfolder for entry in said.encoders}:
        return None
    states = ("hidden_states", "last_hidden_state")
    factors = {output: entry.factor_log2 for output, entry in report.outputs.items() if output in states}
    problems = []
    for entry in said.readings:
        if entry.encoder == name and any(factor not in [*factors.values()] for factor in entry.factors_log2):
            problems.append(
                Problem("pipeline", PIPELINE, f"says other factors of {name}'s states than its report: {factors}")
            )
    carried = {
        (entry.component, entry.linear): [-factor for factor in entry.factors_log2]
        for entry in said.readings
        if entry.encoder == name and entry.linear is not None
    }
    wanted = set(linears_of(whole, name)) if factors.get("hidden_states") else set()
    for component, weight in sorted(wanted - {*carried}):
        reads = f"reads inner states of {name}, and no power of two is recorded of it"
        problems.append(Problem("pipeline", f"{component}: {weight}", reads))
    for (component, weight), powers in carried.items():
        files = [entry for entry in said.rescaled if entry.name.startswith(f"{component}/") and weight in entry.tensors]
        if not files or any(entry.tensors[weight] != powers for entry in files):
            reads = f"is not recorded to carry the inverse of {name}'s factor"
            problems.append(Problem("pipeline", f"{component}: {weight}", reads))
    mine = {component for component, _ in carried}
    for rescaled in said.rescaled:
        if rescaled.name.partition("/")[0] in mine:
            problems += check_rescaled(whole, rescaled.name, said, original)
    return problems


def linears_of(whole: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield component and weight of every linear that reads inner states of an encoder, by the pipeline's class."""
    configs = {part: config_of(whole, part) or {} for part in components(whole)}
    for reading in PIPELINES.get(class_of(whole), ()):
        if reading.encoder == name and not reading.at_end:
            for each in reading.each(configs):
                yield from (
                    (met.component, met.weight) for met in each.meets if isinstance(met, Linear) and not each.at_end
                )


def check_rescaled(whole: Path, name: str, said: PipelineReport, original: Path | None) -> list[Problem]:
    """Return what is wrong with a file of another component whose linears carry powers of two."""
    (entry,) = (entry for entry in said.rescaled if entry.name == name)
    file = contained(whole, name)
    if not file.is_file():
        return [Problem("pipeline", name, "is missing")]
    try:
        back = rescale_columns(file, entry.inverse, write=False)
    except (UserError, KeyError) as error:
        return [Problem("pipeline", name, f"its linears cannot be brought back: {error}")]
    if back.before != entry.sha256:
        return [Problem("pipeline", name, "was changed since: its SHA-256 is not the recorded one")]
    if back.after != entry.source_sha256:
        return [Problem("pipeline", name, "is not the source's times the recorded powers of two")]
    source = None if original is None else original.parent / name
    if source is not None and source.is_file() and sha256_of(source) != entry.source_sha256:
        return [Problem("pipeline", name, f"is not made from {source}")]
    return []
