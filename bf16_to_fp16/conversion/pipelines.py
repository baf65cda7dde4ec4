"""What a diffusion pipeline reads of its encoders, and what makes up for a factor that a conversion puts there.

A conversion leaves an encoder's last states as they are and multiplies its inner ones with a power of two. Where a
linear of another component reads these, it carries the inverse, and the pipeline computes the same; where a norm does,
it forgives the factor but for its eps. Which it is says the table of ``checkpoint.pipeline_classes``; of a class that
is not in it nothing is known, and only encoders that have no other use than their last states are taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.linears import check_scalable, holders, rescale_columns
from ..checkpoint.pipeline import MODEL_INDEX, Pipeline, config_of
from ..checkpoint.pipeline_classes import LAST, PIPELINES, READ_OTHERWISE, Linear, Norm, Reading
from ..checkpoint.places import contained
from ..errors import UserError
from ..families.configs import number_of
from ..families.known import architectures, class_named, family_of, names_of, placed_family, same_code
from ..progress import Progress
from ..ranges import NormRange
from ..report.answers import ReadingEntry, RescaledEntry
from ..report.facts import giving_states
from ..report.schema import Report
from ..wording import counted


@dataclass(frozen=True)
class Uses:
    """How a pipeline uses its encoders: the class that loads each (None where it is that of its config), what it reads
    of each, and of which of them that is assumed, by the encoder's name."""

    classes: Mapping[str, str | None]
    readings: Mapping[str, Sequence[Reading]]
    assumed: tuple[str, ...]

    @property
    def linears(self) -> dict[Linear, int]:
        """The linears that read inner states, each with the number of states that it reads side by side."""
        every = [reading for readings in self.readings.values() for reading in readings]
        return {met: len(r.states or ()) for r in every for met in r.meets if isinstance(met, Linear)}


def alone(pipeline: Pipeline, name: str) -> str:
    """Return the words of an error that tell to convert one encoder by itself."""
    return f"convert it alone: bf16-to-fp16 convert {pipeline.source} OUT --subfolder {name}"


def uses_of(pipeline: Pipeline) -> Uses:
    """Return how a pipeline uses its encoders; raise UserError for a class that does not fit an encoder's config, and
    for an encoder of which the pipeline may read anything."""
    configs = {name: config_of(pipeline.folder, name) or {} for name in pipeline.loaded}
    classes: dict[str, str | None] = {}
    readings: dict[str, Sequence[Reading]] = {}
    assumed: list[str] = []
    for name in (*pipeline.encoders, *pipeline.same):
        kind = class_that_loads(pipeline, name, configs[name])
        classes[name] = None if architectures(configs[name])[:1] == [kind] else kind
        known = [reading for reading in PIPELINES.get(pipeline.kind, ()) if reading.encoder == name]
        if not known:
            check_read_at_end(pipeline, name, kind, configs[name])
            assumed.append(name)
            known = [Reading(name)]
        readings[name] = [each for reading in known for each in reading.each(configs)]
    return Uses(classes, readings, tuple(assumed))


def class_that_loads(pipeline: Pipeline, name: str, config: Mapping[str, Any]) -> str:
    """Return the stock class, of the family of an encoder's config, that a pipeline's index names for it."""
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


def check_read_at_end(pipeline: Pipeline, name: str, kind: str, config: Mapping[str, Any]) -> None:
    """Raise UserError unless an encoder's class gives the states of an encoder, which are read at their end."""
    stock = class_named(kind)
    assert stock is not None
    if family_of(config).decoder is None or stock.decodes:
        unknown = (
            f"what {pipeline.kind} reads of {name} is not known here, and inner states of a {kind} change by a factor"
        )
        reads = f"{pipeline.kind} {reason}" if (reason := READ_OTHERWISE.get(pipeline.kind)) else unknown
        raise UserError(f"{reads}; {alone(pipeline, name)}")


def check_linears(folder: Path, uses: Uses) -> None:
    """Raise UserError where a linear that may have to carry a power of two is not there, or cannot."""
    for linear, states in uses.linears.items():
        for file in files_of(folder, linear.component, linear.weight):
            check_scalable(file, {linear.weight: [0] * states})


def files_of(folder: Path, component: str, weight: str) -> list[Path]:
    """Return the files of a pipeline's component that hold a weight; raise UserError where none does."""
    files = holders(folder / component, weight)
    if not files:
        raise UserError(
            f"{folder / component}: no safetensors file here has {weight}, which reads inner states of an encoder and"
            " has to carry a power of two; save the whole pipeline with save_pretrained, or convert the encoder alone"
            " with --subfolder"
        )
    return files


# --- factors ---------------------------------------------------------------------------------------------------------


def factors_of(pipeline: Pipeline, name: str, report: Report) -> dict[bool, int]:
    """Return log2 of how much larger than the source's an encoder's last states are (True), and its inner ones."""
    factors = {}
    for last, output in ((True, "last_hidden_state"), (False, "hidden_states")):
        factor = report.outputs[output].factor_log2
        if not isinstance(factor, int):
            raise UserError(
                f"{pipeline.source}: the {output} of {name} change by a factor that is not the same for all channels;"
                f" {alone(pipeline, name)}"
            )
        factors[last] = factor
    return factors


def met(
    pipeline: Pipeline, name: str, readings: Sequence[Reading], report: Report, states: Sequence[NormRange]
) -> list[ReadingEntry]:
    """Return where a pipeline reads states of an encoder that are not the source's, with what they meet there.

    report: of the encoder's conversion. states: what entered each of its layers. Raises UserError for states that
    the encoder has not, and for such as nothing makes up for.
    """
    config = config_of(pipeline.folder, name) or {}
    family = placed_family(config)
    layers = number_of(family, config, family.encoder.layers, "a number of layers")
    by_place = factors_of(pipeline, name, report)
    entries = []
    for reading in readings:
        numbers = range(layers + 1) if reading.states is None else reading.states
        if not all(-layers - 1 <= number <= layers for number in numbers):
            listed = ", ".join(map(str, numbers))
            raise UserError(
                f"{pipeline.source}: {pipeline.kind} reads hidden_states {listed} of {name}, which has"
                f" {counted(layers, 'layer')}; {alone(pipeline, name)}"
            )
        factors = [by_place[number in (LAST, layers)] for number in numbers]
        if not any(factors):
            continue
        if not reading.meets:
            other = giving_states(report)
            mend = (
                f"name {other} for it in {MODEL_INDEX}, or {alone(pipeline, name)}" if other else alone(pipeline, name)
            )
            raise UserError(
                f"{pipeline.source}: {pipeline.kind} reads the last states of {name}, which become 2^{factors[0]} times"
                f" the source's; {mend}"
            )
        for what in reading.meets:
            own: dict[str, Any] = {}
            if isinstance(what, Linear):
                own["linear"] = what.weight
            else:
                own |= of_norm(what, config_of(pipeline.folder, what.component) or {}, numbers, factors, states)
            entry = ReadingEntry(encoder=name, states=[*numbers], factors_log2=factors, component=what.component, **own)
            entries.append(entry)
    return entries


def of_norm(
    norm: Norm, config: Mapping[str, Any], numbers: Sequence[int], factors: Sequence[int], states: Sequence[NormRange]
) -> dict[str, Any]:
    """Return what an entry says of a norm that states enter, whose component has this config."""
    eps = norm.eps_by(config)
    changes = []
    for number, factor in zip(numbers, factors, strict=True):
        if states and number not in (LAST, len(states)):
            changes.append(states[number if number >= 0 else number + 1].drift(eps, factor))
    predicted = max(changes, default=None)
    return {"norm": norm.module, "eps": eps, "predicted": predicted}


# --- what makes up for them ------------------------------------------------------------------------------------------


def powers_of(readings: Sequence[ReadingEntry]) -> dict[str, dict[str, list[int]]]:
    """Return log2 of what linears have to be multiplied with, by component and weight, one for each block of
    columns."""
    powers: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for entry in readings:
        if entry.linear is not None:
            powers[entry.component][entry.linear] = [-factor for factor in entry.factors_log2]
    return powers


def rescale_linears(folder: Path, readings: Sequence[ReadingEntry], progress: Progress) -> list[RescaledEntry]:
    """Multiply the linears of a pipeline's folder that read states with a factor, in files of its own, and return what
    became of these."""
    entries = []
    for component, powers in powers_of(readings).items():
        by_file: dict[Path, dict[str, list[int]]] = defaultdict(dict)
        for weight, exponents in powers.items():
            for file in files_of(folder, component, weight):
                by_file[file][weight] = exponents
        for file, tensors in by_file.items():
            name = file.relative_to(folder).as_posix()
            with progress.step(f"Writing {name}") as advance:
                done = rescale_columns(file, tensors, advance, name=name)
            hashes = {"source_sha256": done.before, "sha256": done.after}
            entries.append(RescaledEntry(name=name, tensors=tensors, amax=done.amax, **hashes))
    return entries


def restore_linears(folder: Path, rescaled: Sequence[RescaledEntry], progress: Progress) -> tuple[str, ...]:
    """Take the powers of two out of linears again, in files of a pipeline's folder, and return the names of those files
    that are not the source's then, since they were changed in between."""
    changed = []
    for entry in rescaled:
        with progress.step(f"Writing {entry.name}") as advance:
            done = rescale_columns(contained(folder, entry.name), entry.inverse, advance, name=entry.name)
        if done.after != entry.source_sha256:
            changed.append(entry.name)
    return tuple(changed)
