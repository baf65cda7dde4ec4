"""The types of the report, through which it is written, read and checked. They keep unknown keys and the order of keys,
so a report written again has the same bytes. ``python -m bf16_to_fp16.report.schema`` makes
``docs/report.schema.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError

from ..checkpoint.files import sha256_of
from ..checkpoint.reader import Checkpoint
from ..checkpoint.recorded import REPORT as REPORT
from ..environment import SCHEMA
from ..errors import UserError
from ..families.known import architectures
from ..rescaling.plan import Plan
from ..results import (
    AttackEntry,
    CertificateEntry,
    Count,
    ExceptionEntry,
    Fidelity,
    Flag,
    InexactEntry,
    NumberOrNaN,
    OutputEntry,
    PlacedEntry,
    Real,
    RegimeEntry,
    ReportObject,
    SearchEntry,
)

PAGE = "fp16_report.html"
CARD = "README.md"


# --- where it comes from ---------------------------------------------------------------------------------------------


class Original(ReportObject):
    """A source tensor that the conversion replaced: its bytes in base64, and their SHA-256 in hexadecimal."""

    values: str
    sha256: str


class Source(ReportObject):
    """The source of the weights, with the data from which ``undo`` restores it. ``path``: its Hub id or local folder.
    After a finetune, path, revision and hashes are the original checkpoint's."""

    path: str | None = None
    subfolder: str | None = Field(default=None, description="model's folder in the source; a local path ends with it")
    revision: str | None = None
    sha256: dict[str, str] = Field(default={}, description="SHA-256 of each weight file")
    other_sha256: dict[str, str] = Field(default={}, description="SHA-256 of files without weights")
    dtype: str | None = Field(default=None, description="dtype of most tensors, in safetensors' spelling")
    dtypes: dict[str, str] = Field(default={}, description="dtype of each tensor with another dtype")
    made: list[str] = Field(default=[], description="tensors that the conversion added")
    dropped: dict[str, str] = Field(default={}, description="tensors left out, with the reason")
    config_changes: dict[str, dict[str, Any]] = Field(
        default={}, description="keys of config.json, with values before and after; a dot leads into a nested config"
    )
    carried_over: list[str] = Field(default=[], description="files other than weights that the output has")
    left_out: list[str] = Field(default=[], description="files that the output lacks")
    card: dict[str, str | list[str]] = Field(default={}, description="its licence, languages, tags and task")
    replaced: dict[str, Original] = Field(default={}, description="tensors changed by more than powers of two")

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        hashes = {file.name: sha256_of(file) for file in checkpoint.weight_files}
        return cls(**cls.place_of(checkpoint), sha256=hashes)

    def class_in(self, side: Literal["before", "after"]) -> str | None:
        """Return the name of the transformers class before or after the conversion; None if the conversion kept it."""
        sides = self.config_changes.get("architectures", {})
        return next(iter(architectures({"architectures": sides.get(side)})), None)

    @staticmethod
    def place_of(checkpoint: Checkpoint) -> dict[str, Any]:
        below = {"subfolder": checkpoint.subfolder} if checkpoint.subfolder else {}
        return {"path": checkpoint.name, **below, "revision": checkpoint.revision}


class FileEntry(ReportObject):
    """A file of the output: its name, size in bytes and SHA-256 in hexadecimal."""

    name: str
    nbytes: Count | None = None
    sha256: str | None = None


class Output(ReportObject):
    """The files of the output except the report. ``card_edited``: whether a user edited the card before publishing."""

    files: list[FileEntry] = []
    card_edited: Flag = False


class Text(ReportObject):
    """A text file that was run in addition to the probe. ``name``: its name without the folder. ``rows``: how many rows
    were drawn from it."""

    name: str
    rows: Count | None = None


class InputKind(ReportObject):
    """The inputs of one kind that were run. ``encoder``, ``decoder``: the length in tokens of the longest input to
    each. If a model is only a decoder, ``encoder`` has its length."""

    kind: str
    batches: Count
    rows: Count
    encoder: Count
    decoder: Count | None


class Inputs(ReportObject):
    """The inputs that were run, described so that they can be run again."""

    seed: Count | None = None
    data: Text | None = None
    batches: list[InputKind] = []
    chosen: dict[str, list[Count]] = Field(default={}, description="ids that the probe ran, by reason; empty: all ids")
    sha256: str | None = Field(default=None, description="SHA-256 of all ids and masks")


class Environment(ReportObject):
    """The software, devices and dtype of the run."""

    versions: dict[str, str | None] = Field(default={}, description="version of each package; null: not installed")
    python: str | None = None
    device: str | None = Field(default=None, description="the device as requested")
    devices: dict[str, list[str]] = Field(default={}, description="devices of each part of the work, in order of use")
    dtype: str | None = None


# --- what was measured -----------------------------------------------------------------------------------------------


class UnprovenEntry(ReportObject):
    """A site without a proof. Its ``bound`` exceeds its ``limit`` by ``excess_bits``, for the ``reason`` given."""

    name: str
    bound: NumberOrNaN
    limit: Real
    excess_bits: NumberOrNaN
    reason: str
    remedy: str


class TierEntry(ReportObject):
    """Whether the checkpoint is safe in a tier, a group of runtimes with the same arithmetic. ``proof``: certified by
    bounds, observed in a run, or None if it is not safe. ``reason``: why it is not safe."""

    holds: Flag
    proof: Literal["certified", "observed"] | None
    runtimes: list[str]
    reason: str = ""


class WeightsEntry(ReportObject):
    """The conversion's effect on the elements of the source's tensors. ``lossless_fraction``: the fraction of elements
    that fp16 holds exactly. ``normal_fraction``: the fraction of nonzero elements that become normal fp16 numbers.
    ``amax``: the largest |x| written."""

    elements: Count
    lossless_fraction: Real
    normal_fraction: Real
    flushed_to_zero: Count
    nonfinite: Count
    amax: NumberOrNaN


class SignalEntry(PlacedEntry):
    """The largest |x| at a module's input or output, as ``side`` says. ``before``: the value in the source. ``after``:
    the value with the plan applied. ``kind``: the kind of activation, such as "residual" or "scores"."""

    module: str
    side: str
    kind: str
    before: NumberOrNaN
    after: NumberOrNaN


class UnsafeEntry(ReportObject):
    """A site or output, named by ``signal``, that is unsafe or misses a goal. ``regimes``: the regimes in which it
    broke. ``nonfinite``, ``saturated``: the number of such elements in the regime that has the most of them."""

    signal: str
    kind: Literal["broke", "found", "limit", "inexact", "goal"] | None = Field(
        default=None,
        description=(
            "broke: it broke in a run; found: an attack drove it over its limit; limit: no exponent keeps the margin;"
            " inexact: an output is too far from the source's; goal: it misses a goal of the recipe or target"
        ),
    )
    regimes: list[str] | None = None
    nonfinite: Count | None = None
    saturated: Count | None = None
    excess_bits: NumberOrNaN = math.nan
    reason: str = ""
    remedy: str


class FinetuneEntry(ReportObject):
    """The record of a finetune."""

    start: Plan | None = Field(default=None, description="the plan that rescaled the original before training")
    start_outputs: dict[str, int | list[int]] = Field(default={}, description="log2 of start's factor on each output")
    recipe: dict[str, Any] = Field(default={}, description="the recipe as written, with its defaults")
    settled: dict[str, Any] = Field(default={}, description="values chosen for recipe keys left open")
    data: dict[str, Any] = {}
    processes: Count = 1
    devices: list[str] = Field(default=[], description="devices of the main process")
    steps: Count = 0
    kept: Count | None = Field(default=None, description="the step whose weights are the result")
    tokens: Count = Field(default=0, description="the number of tokens trained on")
    skipped: list[dict[str, Any]] = Field(default=[], description="steps with a non-finite gradient")
    evaluations: list[dict[str, Any]] = Field(default=[], description="held-out losses, distances, headroom, by step")
    fidelity: Fidelity | None = Field(default=None, description="distance of the output from the original")
    next: str = Field(default="", description="the next command if the recipe's goals were missed")

    @property
    def last(self) -> dict[str, Any]:
        of_kept = (each for each in reversed(self.evaluations) if each.get("step") == self.kept)
        return next(of_kept, self.evaluations[-1] if self.evaluations else {})

    @property
    def holds_bounds(self) -> bool:
        """Whether training also lowered bounds: ``penalty.certify`` in ``settled`` or, if absent, in ``recipe``."""
        penalty = self.recipe.get("penalty")
        asked = penalty.get("certify") if isinstance(penalty, Mapping) else None
        return self.settled.get("penalty.certify", asked) is True


class Lineage(ReportObject):
    """The origin of a finetuned checkpoint: the original, and the record of the finetune."""

    source: Source
    finetune: FinetuneEntry


# --- the whole -------------------------------------------------------------------------------------------------------


class Versioned(ReportObject):
    version: Count = Field(default=SCHEMA, alias="schema", description="version of these keys")


class Report(Versioned):
    """The verdict of ``convert``, ``finetune``, ``audit`` or ``certify``, with its evidence. Sections that do not apply
    are absent."""

    verdict: Literal["safe", "unsafe"] | None = None
    proof: Literal["certified", "observed"] | None = None
    family: str | None = None
    target: str | None = Field(
        default=None, description="the arithmetic that plan and bounds are for, as --target names it"
    )
    tiers: dict[str, TierEntry] = Field(default={}, description="whether it is safe in each group of runtimes")
    source: Source = Source()
    output: Output = Output()
    train_mode: Flag = Field(default=False, description="whether it was run with dropout")
    model_class: str | None = Field(
        default=None,
        description="the only class that the report covers; null: the report covers every class that the files fit",
    )
    padding: Count | None = Field(
        default=0,
        description="smallest number of padding positions that a padded encoder row needs in fp16; null: pad no row",
    )
    older: list[str] = Field(
        default=[], description="sentences on how results from these files differ between transformers 4.57 and 5"
    )
    attention: list[str] = Field(default=[], description="the implementations of attention that were run")
    inputs: Inputs | None = None
    regimes: dict[str, RegimeEntry] = {}
    certificate: CertificateEntry | None = None
    uncertified: list[UnprovenEntry] = Field(default=[], description="sites without a proof")
    attack: AttackEntry | None = None
    fidelity: Fidelity | None = None
    outputs: dict[str, OutputEntry] = Field(
        default={},
        description=(
            "each output that the transformers class can return, and last_hidden_state, which its class without a head"
            " returns; hidden_states stands for all hidden states but the last"
        ),
    )
    inexact: list[InexactEntry] = Field(
        default=[], description="the edits, each of which changes the function a little"
    )
    exceptions: list[ExceptionEntry] = Field(
        default=[],
        description="inputs that edits harm, worst first; a single token id with kl > max_kl (null: 0) is unsafe",
    )
    searched: SearchEntry | None = None
    max_kl: Real | None = Field(default=None, description="the divergence from the source that the user accepts")
    weights: WeightsEntry | None = None
    plan: Plan | None = None
    for_proof: dict[str, int] = Field(
        default={}, description="the exponent that observed values need, for each stream that a proof scales further"
    )
    signals: list[SignalEntry] = Field(default=[], description="the activations that the plan scales")
    unsafe: list[UnsafeEntry] = Field(default=[], description="the reasons why it is unsafe")
    next: str = Field(default="", description="what to do next, with a command after the first colon")
    finetune: FinetuneEntry | None = None
    command: str | None = None
    environment: Environment = Environment()

    @property
    def safe(self) -> bool:
        return self.verdict == "safe"

    @property
    def short(self) -> bool:
        """Whether the checkpoint is unsafe only because it misses goals of a recipe or target."""
        return not self.safe and bool(self.unsafe) and all(entry.kind == "goal" for entry in self.unsafe)

    @property
    def proven(self) -> bool:
        return self.certificate is not None and self.certificate.holds

    @property
    def of_plan(self) -> Plan:
        assert self.plan is not None  # of a conversion; its readers ask for it
        return self.plan

    @property
    def start(self) -> Plan | None:
        """The plan that rescaled the original before training; None if nothing was trained or rescaled."""
        return None if self.finetune is None else self.finetune.start

    @property
    def broken_regimes(self) -> list[str]:
        return [name for name, regime in self.regimes.items() if regime.broken]


# --- reading ---------------------------------------------------------------------------------------------------------

Model = TypeVar("Model", bound=ReportObject)


def read(model: type[Model], data: Mapping[str, Any]) -> Model:
    """Return JSON data as a ``model`` object. Raises pydantic's ValidationError for a missing key or wrong type."""
    return model.model_validate(data)


def typed(data: Mapping[str, Any], path: Path) -> Report:
    try:
        return read(Report, data)
    except ValidationError as error:
        raise UserError(unlike(path, ".".join(map(str, error.errors()[0]["loc"])))) from error


def unlike(path: Path, key: str) -> str:
    return f"{path}: {key} is not what convert writes; convert the source again"


def json_schema() -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Report.model_json_schema()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(json_schema(), end="")
