"""The recorded plan against config and weights, and against the original: what applying it again gives."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..checkpoint.folder import MODULES, carry_over, tokenizer_beside
from ..checkpoint.formats import bytes_of
from ..checkpoint.reader import VIEWS, Checkpoint, open_checkpoint
from ..checkpoint.side_modules import write_in_fp16
from ..checkpoint.writer import write_fp16
from ..errors import UserError
from ..families.configs import changes, looked_up, without_value
from ..families.known import stock_class
from ..families.layout import Layout
from ..families.resolve import resolve
from ..progress import Progress
from ..report.build import Rewritten, source_of, weight_counts
from ..report.remedies import RIGHT_REVISION
from ..report.schema import Report, Source, WeightsEntry, dump
from ..report.stored import originals
from ..rescaling.apply import DTYPE_KEYS, edited_config, writes
from ..rescaling.edits import listed_edits
from ..rescaling.outputs import joined, output_factors
from ..rescaling.plan import Plan, exponents_of
from ..run.agreement import agreed_layout
from .comparing import Problem, compared
from .files import beside_weights, present_files

OF_NO_MODEL = ("architectures", "dtype", "torch_dtype", "_name_or_path", "transformers_version")
"""Keys of a config that say nothing of the model itself, but for the class that ``architectures`` names."""

OF_OTHER_FILES = ("carried_over", "left_out", "card")  # keys of a source that come from the files beside its weights
OBEYED = ("generation_config.json", MODULES)  # files beside the weights on which it depends what a folder computes


def check_plan(
    checkpoint: Checkpoint,
    layout: Layout,
    plan: Plan,
    source: Source,
    report: Report | None = None,
    own_eps: float | None = None,
) -> list[Problem]:
    """Return where the recorded plan and the checkpoint contradict each other: family, signals, channels, config;
    report: None where there is no place for what else it says of the plan, its edits and outputs. own_eps: of the tool
    that is to read it, whatever the config says."""

    def problem(name: str, reason: str) -> Problem:
        return Problem("plan", name, reason)

    if plan.family != layout.family.name:
        return [problem("plan", f"is for {plan.family}, and the checkpoint is {layout.family.name}")]
    problems = [
        problem(name, "the plan moves it, and the checkpoint has no such signal")
        for name in plan.exponents
        if name not in layout.signals
    ]
    for tensor in layout.tensors.values():
        try:
            exponents_of(tensor, plan)
        except (UserError, RuntimeError, OverflowError) as error:
            problems.append(problem(tensor.name, " ".join(str(error).partition(";")[0].split())))
    try:
        originals(layout, plan, source)
    except UserError as error:
        problems.append(problem("plan", str(error).partition(";")[0]))
    if not problems and report is not None:
        said, edits = ([(e.site, e.exponent) for e in each] for each in (report.inexact, listed_edits(layout, plan)))
        if sorted(said) != sorted(edits):
            problems.append(problem("inexact", "does not list the edits that the plan makes"))
        start = {} if report.finetune is None else report.finetune.start_outputs
        factors = {n: joined(factor, start.get(n, 0)) for n, factor in output_factors(layout, plan).items()}
        if {name: entry.factor_log2 for name, entry in report.outputs.items()} != factors:
            problems.append(problem("outputs", "does not give the factors that the plan makes"))
    if plan.untied_head and layout.tied is not False:
        problems.append(problem("config.json", "the plan separates the head, and the checkpoint has it tied"))
    for key in layout.family.eps_keys if plan.eps is not None else ():
        value = looked_up(checkpoint.config, key)
        if value != plan.eps:
            problems.append(problem("config.json", f"{key} is {value} and the plan needs {plan.eps}"))
    if layout.family.eps_keys:
        problems += [problem("plan", reason) for reason in wrong_eps(layout, plan, source, own_eps)]
    recorded = {name: sides["after"] for name, sides in source.config_changes.items() if "after" in sides}
    for name, after in recorded.items():
        if (value := looked_up(checkpoint.config, name)) != after:
            problems.append(problem("config.json", f"{name} is {value} and the report says {after}"))
    for name, dtype in dtypes_of(checkpoint.config).items():
        if dtype != "float16" and name not in recorded:
            problems.append(problem("config.json", f"{name} is {dtype}, which stock code loads the weights in"))
    return problems


def wrong_eps(layout: Layout, plan: Plan, source: Source, own_eps: float | None) -> Iterator[str]:
    """Yield why a plan's eps is not the one that its exponents, or whoever is to read the output, ask for."""
    before = layout.eps
    if (change := source.config_changes.get(layout.family.eps_keys[0])) is not None:
        before = change.get("before", layout.family.eps)
    if own_eps is not None and not plan.eps_held:
        yield f"rescales eps, and the tool that reads this has {own_eps:g} whatever the config says"
        return
    held, r = before if own_eps is None else own_eps, plan.residual_exponent
    if plan.eps not in (None, wanted := held if plan.eps_held else before * 4.0**r):
        yield f"has an eps of {plan.eps}, and {wanted} goes with {before} before and the stream at 2^{r}"


def dtypes_of(config: Mapping[str, Any]) -> dict[str, object]:
    """Return what a config, and those inside it, say of the dtype, by key."""
    dtypes = {key: config[key] for key in DTYPE_KEYS if config.get(key) is not None}
    for name, inner in config.items():
        if isinstance(inner, Mapping):
            dtypes |= {f"{name}.{key}": inner[key] for key in DTYPE_KEYS if inner.get(key) is not None}
    return dtypes


def check_config(layout: Layout, checkpoint: Checkpoint, plan: Plan) -> list[Problem]:
    """Return the keys of a config that are not what the plan makes of the original's; layout: the original's."""
    wanted, config = edited_config(layout, plan), checkpoint.config
    differing = ["architectures"] if stock_class(wanted) != stock_class(config) else []
    for key in OF_NO_MODEL:
        wanted, config = without_value(wanted, key), without_value(config, key)
    reason = "is not what the conversion makes of the original's config.json"
    differing += changes(wanted, config)
    return [Problem("replay", f"config.json, {key}", reason) for key in sorted(differing)]


@dataclass(frozen=True)
class Replayed:
    """What applying the recorded plan to the original shows: problems, the layout, what the report must say of source
    and weights (None where it is another original), and the files that nothing was compared with, with the reason."""

    problems: list[Problem]
    layout: Layout | None = None
    source: Source | None = None
    weights: WeightsEntry | None = None
    unchecked: Mapping[str, str] = field(default_factory=dict)


def replay(original: Checkpoint, checkpoint: Checkpoint, plan: Plan, source: Source, progress: Progress) -> Replayed:
    """Return where applying the recorded plan to the original does not give the checkpoint's weights, bit for bit, and
    its config, where the original has one of its own."""
    hashes = {original.file_name(file): original.sha256(file) for file in original.weight_files}
    for name in sorted({*hashes, *source.sha256}):
        if source.sha256.get(name) != hashes.get(name):
            return Replayed([Problem("replay", name, "is not the file that was converted", RIGHT_REVISION)])
    agreed_layout(original)
    layout = resolve(original, untie=plan.untied_head)
    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-replay-") as scratch:
        with progress.step("Replaying the plan on the original") as advance:
            written = write_fp16(original, writes(original, layout, plan), Path(scratch), hashes=False, advance=advance)
        (Path(scratch) / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8", newline="\n")
        again = open_checkpoint(scratch)
        differing = sorted(set(again.tensors) ^ set(checkpoint.tensors))
        for name in sorted(set(again.tensors) & set(checkpoint.tensors)):
            ours, theirs = again.read(name), checkpoint.read(name)
            if ours.dtype != theirs.dtype or ours.shape != theirs.shape or bytes_of(ours) != bytes_of(theirs):
                differing.append(name)
    reason = "is not what the plan makes of the original"
    problems = [Problem("replay", name, reason) for name in differing]
    weights = weight_counts(layout, plan, written)
    rewritten = Rewritten(replace(written, source_sha256=hashes), [], [])
    if original.home in VIEWS:
        # Its config was told from the weights or given, and nothing lies beside it.
        untold = ("config_changes", "other_sha256", *OF_OTHER_FILES)
        entry = source_of(original, layout, plan, rewritten)
        entry = entry.model_copy(update={key: getattr(source, key) for key in untold})
        reason = "the original is one file, which does not tell"
        unseen = {f"source.{key}": reason for key in untold if getattr(source, key)}
        return Replayed(problems, layout, entry, weights, unseen)
    problems += check_config(layout, checkpoint, plan)
    if checkpoint.folder in VIEWS:
        rewritten = replace(rewritten, carried=source.carried_over, left_out=source.left_out)
        return Replayed(problems, layout, source_of(original, layout, plan, rewritten), weights)
    wrong, unchecked, (carried, left_out), side = check_carried(original, checkpoint.folder, source.subfolder)
    rewritten = replace(rewritten, carried=carried, left_out=left_out, side_dtypes=side)
    return Replayed(problems + wrong, layout, source_of(original, layout, plan, rewritten), weights, unchecked)


def check_source(said: Source, again: Source) -> tuple[list[Problem], dict[str, str]]:
    """Return the keys of a recorded source that are not what the original gives, and those that cannot be told, since
    files beside the original's weights were changed, with the reason."""
    data, truth, unchecked = dump(said), dump(again), dict[str, str]()
    keys = ["sha256", "dtype", "dtypes", "made", "dropped", "config_changes", "side_dtypes", "replaced"]
    if said.other_sha256 == again.other_sha256:
        keys += OF_OTHER_FILES
    else:
        reason = "the original has other files beside its weights than those that were converted"
        unchecked = {f"source.{key}": reason for key in ("other_sha256", *OF_OTHER_FILES)}
    return compared("replay", {k: data.get(k) for k in keys}, {k: truth.get(k) for k in keys}, "source"), unchecked


def check_carried(
    original: Checkpoint, folder: Path, subfolder: str | None
) -> tuple[list[Problem], dict[str, str], tuple[list[str], list[str]], dict[str, str]]:
    """Return the files beside the weights, such as tokenizer and generation settings, that are not what a conversion
    carries over from the original, those that nothing was compared with, and what a conversion carries over and leaves
    out, with the dtypes of side modules.

    A model card, and files that only one of both has, decide nothing; but for those that stock code obeys where it
    finds them.
    """
    problems, unchecked = list[Problem](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-carried-") as scratch:
        brought = carry_over(original.home, Path(scratch), tokenizer=tokenizer_beside(original.home, subfolder))
        side = write_in_fp16(original.home, Path(scratch))
        ours = {name: Path(scratch, name) for name in present_files(Path(scratch)) if name != "SOURCE_README.md"}
        for name in beside_weights(folder):
            if name not in ours:
                unchecked[name] = "the original has no such file"
        for name in sorted({*ours, *OBEYED}):
            both = [file.is_file() for file in (Path(scratch, name), folder / name)]
            if all(both):
                same = ours[name].read_bytes() == (folder / name).read_bytes()
            else:
                same = not any(both) or not (name in OBEYED or "/" in name)
            if not same:
                reason = "is not what the conversion carries over from the original"
                problems.append(Problem("replay", name, reason))
    return problems, unchecked, brought, side
