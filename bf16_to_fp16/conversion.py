"""The main job: a bf16 checkpoint in, an exactly rescaled, certified and audited fp16 checkpoint out.

One direction, no going back: open and classify the source, bound its signals for every input and observe what they
reach in fp32, plan, write the rescaled weights in a stream, bound the written weights, then load what was written with
stock code and measure it in every regime and against the source. Nothing appears at the output path before all of
that is done.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel

from . import probe
from . import report as reports
from .auditing import REGIMES, audit_folder, load, load_config
from .card import write_card
from .certificate import MAX_LENGTH, Arithmetic, Certificate, bound, served
from .checkpoint import Checkpoint, open_checkpoint, own_name, read_json
from .environment import SCHEMA
from .errors import UserError
from .families import resolve
from .families.types import RESIDUAL, Layout, ResolvedTensor, TensorSource
from .fidelity import Fidelity, fidelity
from .folder import carry_over, check_out, records, staged, write_json
from .observe import ModuleRange, observe_ranges
from .page import write_page
from .planner import MARGIN_BITS, PROOF_MARGIN_BITS, RESIDUAL_RANGE, Planned, Weights, make_plan
from .probe import Batch, batches
from .rescaling import Drift, Plan, apply, check, describe, edited_config, inverse, writes
from .talk import Talk
from .writer import Written, write_fp16

TARGETS = ("half", "norm-safe", "train")
REPORT, PAGE = "fp16_report.json", "fp16_report.html"

LONGEST_REPORT = 64_000_000
"""Bytes; one with an exponent for each channel of an 11B model has some 12 MB."""

MOST_MARGIN = 12
"""Bits of margin that leave a signal any room: 65504·2⁻¹² is 16."""

BEARABLE_DRIFT = 1 / 128
"""Share of bf16's divergence that the drift of an unscaled eps may have."""


@dataclass(frozen=True)
class Conversion:
    """What ``convert`` did: the report (CONTRACT's schema), the folder written (None for a dry run), the plan."""

    report: Mapping[str, Any]
    out: Path | None
    planned: Planned | None
    plan: Plan

    @property
    def safe(self) -> bool:
        """Return whether the verdict is safe."""
        return self.report.get("verdict") == "safe"


def convert(
    source: str | Path,
    out: str | Path,
    *,
    target: str = "half",
    data: str | None = None,
    dry_run: bool = False,
    run_model: bool = True,
    subfolder: str | None = None,
    plan: str | Path | None = None,
    force: bool = False,
    margin_bits: float = MARGIN_BITS,
    max_length: int = MAX_LENGTH,
    max_shard_size: int | None = None,
    workers: int = 1,
    seed: int = 0,
    command: str | None = None,
    lineage: Mapping[str, Any] | None = None,
    original: Checkpoint | None = None,
    endpoint: str | None = None,
    talk: Talk | None = None,
) -> Conversion:
    """Convert ``source`` (folder or Hub id) to an fp16 checkpoint at ``out`` and return what was done and measured.

    target: ``half``, ``norm-safe`` or ``train``. data: text to observe and audit on besides the built-in probe.
    dry_run: plan only, write nothing. run_model: False plans from the bounds and lets the certificate alone decide;
    the model is never in memory. plan: a report whose plan to replay instead of observing. margin_bits: kept between
    what is observed and each limit. max_length: positions for which the certificate holds. max_shard_size: bytes,
    else sharded like the source. workers: processes that write shards. command: what the report and the card name as
    the way to reproduce, by default this function. lineage: report entries of a checkpoint that was trained, whose
    ``source`` then is the original's. original: what the output is compared with besides ``source``. endpoint: the
    Hub's address, by default the environment's. Raises UserError for input that cannot be used; ``out`` then does not
    exist.
    """
    talk = talk or Talk(quiet=True)
    if target not in TARGETS:
        raise UserError(f"target {target!r} is unknown; choose one of {', '.join(TARGETS)}")
    if not 0 <= margin_bits <= MOST_MARGIN:
        raise UserError(f"a margin of {margin_bits} bits cannot be kept; give 0 to {MOST_MARGIN}")
    if max_length < 1:
        raise UserError(f"a maximum length of {max_length} is not a number of positions; give 1 or more")
    if data is not None and not run_model:
        raise UserError("data is of no use where nothing is run; leave out either --data or --no-audit")
    out = Path(out)
    options = {
        "--data": data,
        "--plan": plan,
        "--subfolder": subfolder,
        "--max-shard-size": None if max_shard_size is None else f"{max_shard_size}B",
        "--seed": seed or None,
        "--max-length": None if max_length == MAX_LENGTH else max_length,
    }
    command = command or command_of(source, out, target, run_model, margin_bits, options)
    if not dry_run:
        check_out(out, Path(source) if Path(source).is_dir() else None, force=force)
    replayed = None if plan is None else read_plan(Path(plan), target)
    checkpoint = open_checkpoint(source, subfolder, endpoint=endpoint)
    if not dry_run:
        check_out(out, checkpoint.folder, force=force)
    layout = resolve(checkpoint)
    refuse_dead_norms(checkpoint, layout)
    inputs = gather(checkpoint, data, seed) if run_model else []
    planned, ranges = None, None
    if replayed is not None:
        chosen = replayed
        layout = resolve(checkpoint, untie=chosen.untied_head)
        check(layout, chosen)
    else:
        bounds = bound_source(checkpoint, target, max_length, talk)
        ranges = observe_source(checkpoint, inputs, talk) if run_model else None
        bearable = drift_is_bearable(checkpoint, inputs, talk) if run_model else None
        layout, planned = best_plan(checkpoint, layout, ranges, target, margin_bits, bounds, talk, bearable)
        chosen = planned.plan
    if dry_run:
        summary = {"schema": SCHEMA, "family": layout.family.name, "plan": describe(chosen)}
        return Conversion(summary, None, planned, chosen)

    with staged(out, force=force) as work:
        with talk.step(f"Writing {sum(1 for _ in layout.tensors)} tensors") as advance:
            written = write_fp16(
                checkpoint,
                writes(layout, chosen),
                work,
                max_shard_size=max_shard_size,
                workers=workers,
                progress=advance,
            )
        refuse_nonfinite(written)
        write_json(work / "config.json", edited_config(layout, chosen))
        carried, left_out = carry_over(checkpoint.folder, work, tokenizer=tokenizer_beside(checkpoint, subfolder))
        if not probe.has_tokenizer(work):
            talk.say(f"{checkpoint.name} has no tokenizer, so the output has none; put the original's there to use it")
        certificate = certificate_of(work, target, max_length, talk)
        regimes: Mapping[str, Any] = {}
        closeness = None
        if run_model:
            regimes = audit_regimes(work, inputs, seed, talk, train_mode=target == "train")
            with talk.step("Comparing fp16 and bf16 with the fp32 source") as advance:
                closeness, chosen = measure(checkpoint, layout, chosen, work, inputs)
        result = reports.build(
            checkpoint=checkpoint,
            layout=layout,
            plan=chosen,
            planned=planned,
            target=target,
            written=written,
            regimes=regimes,
            certificate=certificate,
            fidelity=closeness,
            ranges=ranges,
            inputs=probe.describe(inputs, seed=seed, data=data) if run_model else None,
            config_changes=changes(checkpoint.config, edited_config(layout, chosen)),
            carried=carried,
            left_out=left_out,
            others=records(work, {file.name for file in written.files}),
            command=command,
        )
        if lineage is not None:
            result = {**result, **lineage, "source": {**result["source"], **lineage["source"]}}
        if original is not None:
            with talk.step("Comparing fp16 with the original") as advance:
                result["finetune"]["fidelity"] = against(original, work, inputs)
        checkpoint.refuse_changes()
        write_page(work / PAGE, result)
        write_card(work / "README.md", checkpoint, result)
        # Made from the report, so they can only be recorded in it afterwards.
        listed = result["output"]["files"]
        result["output"] = {"files": [*listed, *records(work, {str(file["name"]) for file in listed})]}
        write_json(work / REPORT, result)
    return Conversion(result, out, planned, chosen)


def command_of(
    source: str | Path,
    out: Path,
    target: str,
    run_model: bool,
    margin_bits: float,
    options: Mapping[str, object],
) -> str:
    """Return the command line that does the same again; of local paths only the last part, since it is published.

    options: what stands behind further options; None leaves one out.
    """

    def shown(value: object) -> str:
        return own_name(value) if isinstance(value, (str, Path)) and Path(value).exists() else str(value)

    words = ["bf16-to-fp16", "convert", shown(source), out.name]
    words += [] if target == "half" else ["--target", target]
    words += [] if run_model else ["--no-audit"]
    words += [] if margin_bits == MARGIN_BITS else ["--margin", f"{margin_bits:g}"]
    for option, value in options.items():
        words += [] if value is None else [option, shown(value)]
    return shlex.join(words)


def gather(checkpoint: Checkpoint, data: str | None, seed: int) -> list[Batch]:
    """Return what to run on: the built-in probe, which reaches the whole vocabulary, and the user's text where
    given."""
    return probe.gather(load_config(checkpoint.folder), checkpoint.folder, data, seed=seed)


def audit_regimes(
    folder: Path, inputs: list[Batch], seed: int, talk: Talk, *, train_mode: bool = False
) -> Mapping[str, Any]:
    """Audit a folder in every regime, with progress."""
    with talk.step(f"Auditing {', '.join(REGIMES)}, eager and SDPA") as advance:
        return audit_folder(folder, inputs=inputs, seed=seed, progress=advance, train_mode=train_mode)


Bounds = Callable[[Layout, int], Mapping[str, ModuleRange]]
"""Gives the bounds of a layout, which depend on how its head is wired, for a residual exponent."""


def bound_source(checkpoint: TensorSource, target: str, max_length: int, talk: Talk) -> Bounds:
    """Return a function that bounds the signals of the unscaled source, in arithmetic without subnormals."""

    def of(layout: Layout, residual_exponent: int) -> Mapping[str, ModuleRange]:
        with talk.step("Bounding every signal of the source") as advance:
            arithmetic = Arithmetic(max_length, planned=residual_exponent)
            found = bound(layout, weights_of(checkpoint, layout), arithmetic, target=target, progress=advance)
        return found.ranges

    return of


def certificate_of(folder: Path, target: str, max_length: int, talk: Talk) -> Certificate:
    """Return the certificate of what was written."""
    checkpoint = open_checkpoint(folder)
    layout = resolve(checkpoint)
    with talk.step("Bounding every signal of the output") as advance:
        return bound(layout, served(checkpoint, layout), Arithmetic(max_length), target=target, progress=advance)


def observe_source(checkpoint: Checkpoint, inputs: list[Batch], talk: Talk) -> Mapping[str, ModuleRange]:
    """Run the source in fp32 on ``inputs`` and return what every module's input and output reach."""
    with talk.step("Observing the source in fp32"):
        ranges = observe_ranges(load(checkpoint.folder, torch.float32), inputs)
    for path, seen in ranges.items():
        if not bool(torch.isfinite(seen.output.amax).all()):
            bad = [n for n in sorted(checkpoint.tensors) if not all_finite(checkpoint, n)]
            because = f"tensor {bad[0]} holds inf or NaN, so that {path}" if bad else path
            raise UserError(
                f"{checkpoint.folder}: {because} gives inf or NaN in fp32 on the source; the checkpoint is damaged,"
                " use another revision of it or repair the tensor"
            )
    return ranges


def all_finite(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor of a checkpoint has neither inf nor NaN."""
    return bool(torch.isfinite(checkpoint.read(name)).all())


def best_plan(
    checkpoint: TensorSource,
    layout: Layout,
    ranges: Mapping[str, ModuleRange] | None,
    target: str,
    margin_bits: float,
    bounds: Bounds | None = None,
    talk: Talk | None = None,
    bearable: Callable[[Layout, Plan], bool] | None = None,
) -> tuple[Layout, Planned]:
    """Plan with the head as it is; where the tied head's limit stands in the way and it may be separated, plan with
    it separated.

    ranges: what was observed; None plans from the bounds alone, which need no margin. bearable: tries a plan whose
    drift was predicted to be too dear, since the prediction weighs every norm alike.
    """

    talk = talk or Talk(quiet=True)

    def plan_at(layout: Layout, possible: Mapping[str, ModuleRange] | None, exponent: int | None = None) -> Planned:
        weights = weights_of(checkpoint, layout)
        if ranges is None:
            assert possible is not None
            return make_plan(layout, weights, possible, target=target, margin_bits=PROOF_MARGIN_BITS)
        return make_plan(
            layout,
            weights,
            ranges,
            target=target,
            margin_bits=margin_bits,
            bounds=possible,
            residual_exponent=exponent,
        )

    def plan_for(layout: Layout) -> Planned:
        exponent = -RESIDUAL_RANGE
        while True:
            possible = bounds(layout, exponent) if bounds is not None else None
            with talk.step("Planning the exponents"):
                planned = plan_at(layout, possible)
            if bearable is not None and layout.family.eps_key is None:
                stream = next((f for f in planned.fallbacks if f.signal == RESIDUAL), None)
                if stream is not None and stream.exponent is not None:
                    trial = plan_at(layout, possible, stream.exponent)
                    # A corrected gain is no longer carried over exactly, so the plain plan goes first.
                    plain = replace(trial, plan=trial.plan.model_copy(update={"gain_correction": {}}))
                    planned = next((t for t in (plain, trial) if bearable(layout, t.plan)), planned)
            chosen = planned.plan.residual_exponent
            # LayerNorm's eps stays when the stream is scaled, so its bounds are those of the exponent they were made
            # for or a smaller one. Each round starts from the last one's plan, until that covers itself.
            if bounds is None or not layout.family.centred_norm or chosen <= exponent:
                return planned
            exponent = chosen

    planned = plan_for(layout)
    if not planned.violations or not layout.tied or not layout.family.untie:
        return layout, planned
    apart = resolve(checkpoint, untie=True)
    other = plan_for(apart)
    if sum(v.excess_bits for v in other.violations) < sum(v.excess_bits for v in planned.violations):
        return apart, other
    return layout, planned


def drift_is_bearable(checkpoint: Checkpoint, inputs: list[Batch], talk: Talk) -> Callable[[Layout, Plan], bool]:
    """Return a function that runs the source with the eps that a plan amounts to, and says whether the drift's
    divergence stays under 1/128 of bf16's: half of what fp16's own rounding may take."""

    def of(layout: Layout, plan: Plan) -> bool:
        with talk.step(f"Trying the drift of eps at 2^{plan.residual_exponent}"):
            source, bf16, drifted = (
                load(checkpoint.folder, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)
            )
            simulate_drift(drifted, layout, plan)
            found = fidelity(source, bf16, drifted, inputs)
        return found.kl_bf16 is not None and found.kl_fp16 <= found.kl_bf16 * BEARABLE_DRIFT

    return of


def weights_of(checkpoint: TensorSource, layout: Layout) -> Weights:
    """Return a function from a layout's tensor name to its unscaled values."""

    def read(name: str) -> torch.Tensor:
        tensor: ResolvedTensor = layout.tensors[name]
        if tensor.source is None:
            assert tensor.generate is not None
            return tensor.generate(tensor.shape[0], tensor.shape[1])
        weight = checkpoint.read(tensor.source)
        return weight if tensor.gain == 1.0 else weight.float() * tensor.gain

    return read


def refuse_dead_norms(checkpoint: Checkpoint, layout: Layout) -> None:
    """Raise UserError for a norm whose every gain is zero: nothing behind it depends on its input, which no training
    gives."""
    for path in layout.norms:
        name = layout.tensors[f"{path}.weight"].source
        if name is not None and not checkpoint.read(name).any():
            raise UserError(
                f"{checkpoint.tensors[name].file}: tensor {name} is zero throughout; the file is damaged,"
                " fetch it again from the original checkpoint"
            )


def refuse_nonfinite(written: Written) -> None:
    """Raise UserError for a weight that is inf or NaN in the source or beyond fp16 at every exponent."""
    for name, stats in written.stats.items():
        if stats.nonfinite:
            raise UserError(
                f"tensor {name}: {stats.nonfinite} of {stats.elements} weights are inf, NaN or so large that no"
                " exponent brings them under 65504; use another revision of the checkpoint or repair the tensor"
            )


def tokenizer_beside(checkpoint: Checkpoint, subfolder: str | None) -> Path | None:
    """Return the tokenizer's folder of a diffusers layout: ``text_encoder_2`` has ``tokenizer_2`` beside it."""
    if subfolder is None or "text_encoder" not in subfolder:
        return None
    return checkpoint.folder.parent / checkpoint.folder.name.replace("text_encoder", "tokenizer")


def measure(
    checkpoint: Checkpoint, layout: Layout, plan: Plan, work: Path, inputs: list[Batch]
) -> tuple[Fidelity, Plan]:
    """Measure the written fp16 model and the source in bf16 against the source in fp32; complete the plan's drift
    figures."""
    source = load(checkpoint.folder, torch.float32)
    output = load(work, torch.float16, half=True)
    closeness = fidelity(source, load(checkpoint.folder, torch.bfloat16), output, inputs)
    if plan.drift is None:
        return closeness, plan
    drifted = load(checkpoint.folder, torch.float32)
    simulate_drift(drifted, layout, plan)
    predicted = fidelity(source, None, drifted, inputs)
    measured = fidelity(source, None, load(work, torch.float32), inputs)
    drift = Drift(
        relative_error=plan.drift.relative_error,
        predicted_kl=predicted.kl_fp16,
        predicted_max_logit_error=predicted.max_logit_error_fp16,
        measured_kl=measured.kl_fp16,
        measured_max_logit_error=measured.max_logit_error_fp16,
    )
    return closeness, plan.model_copy(update={"drift": drift})


def against(original: Checkpoint, work: Path, inputs: list[Batch]) -> dict[str, Any]:
    """Return how far the written fp16 model and the original in bf16 are from the original in fp32."""
    source, bf16 = (load(original.folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    return fidelity(source, bf16, load(work, torch.float16, half=True), inputs).to_json()


def simulate_drift(model: torch.nn.Module, layout: Layout, plan: Plan) -> None:
    """Give an fp32 source model the norm eps that its rescaled weights will meet: eps·4^-r, which is the same function.

    Corrected gains are rounded to fp16, as they will be stored.
    """
    for path in layout.norms:
        norm: Any = model.get_submodule(path)
        norm.eps = layout.eps * 4.0**-plan.residual_exponent
        correction = plan.gain_correction.get(f"{path}.weight")
        if correction is not None:
            norm.weight.data.copy_((norm.weight.data * correction).half())


def read_plan(path: Path, target: str | None = None) -> Plan:
    """Return the plan that a report holds.

    Raises UserError where the file cannot be read or holds none, or one that was made for another ``target``.
    """
    path = path / REPORT if path.is_dir() else path
    if not path.exists():
        raise UserError(f"{path}: No such file or directory; give an {REPORT} or a converted folder")
    try:
        report = read_json(path, "report", LONGEST_REPORT)
        plan = Plan.model_validate(report["plan"])
    except (UserError, ValueError, KeyError) as error:
        raise UserError(f"{path}: holds no plan of this program; give an {REPORT} that convert wrote") from error
    made_for = report.get("target", target)
    if target is not None and made_for != target:
        raise UserError(f"{path}: the plan was made for --target {made_for}; give that, or leave --plan away")
    return plan


class Origin(BaseModel):
    """What a report says of the source, as far as ``undo`` needs it: dtypes in safetensors' spelling, by name where
    they differ from ``dtype``; tensors that the conversion made; config keys with their values before and after."""

    dtype: Literal["F64", "F32", "F16", "BF16"]
    dtypes: dict[str, Literal["F64", "F32", "F16", "BF16"]]
    made: list[str]
    config_changes: dict[str, dict[str, Any]]


def refuse_strangers(folder: Path, sha256: Mapping[str, str]) -> None:
    """Raise UserError unless the weight files that were read are those that the report in ``folder`` lists."""
    report = read_json(folder / REPORT, "report", LONGEST_REPORT)
    try:
        known = {entry["name"]: entry["sha256"] for entry in report["output"]["files"]}
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / REPORT}: does not say what was written; convert again") from error
    for name, digest in sha256.items():
        if known.get(name) != digest:
            raise UserError(f"{folder / name}: is not what convert wrote (SHA-256); fetch or convert it again")


def read_origin(path: Path) -> Origin:
    """Return what the report in a converted folder says of its source; raise UserError where it does not."""
    try:
        return Origin.model_validate(read_json(path / REPORT, "report", LONGEST_REPORT)["source"])
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path / REPORT}: does not say what the source was; take the one that convert wrote"
        ) from error


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return for every config key that differs its value before and after; an absent key has no entry."""
    keys = [k for k in {**before, **after} if before.get(k, ...) != after.get(k, ...)]
    return {k: {side: c[k] for side, c in (("before", before), ("after", after)) if k in c} for k in keys}


@dataclass(frozen=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]


class ModelTensors:
    """A stock model in memory, seen as a source of tensors."""

    def __init__(self, model: Any) -> None:
        """Look at ``model``; nothing is copied."""
        self.source = type(model).__name__
        self.config: dict[str, object] = model.config.to_dict() | {"architectures": [self.source]}
        self._state = model.state_dict()
        names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
        self.tensors = {
            name: _Stored(names.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in self._state.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, shared with the model."""
        return self._state[name]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows of a tensor."""
        return self._state[name][start:stop].contiguous()


def rescale(
    model: Any, inputs: list[Batch] | None = None, *, target: str = "half", margin_bits: float = MARGIN_BITS
) -> Plan:
    """Rescale a stock fp32 model in place, exactly, by the best plan for what it shows on ``inputs``, and return
    the plan.

    inputs: batches as ``probe.batches`` makes them, by default the built-in probe. The head stays as tied as it is.
    The model's outputs keep every bit in fp32; norm eps attributes are scaled with the residual stream, so
    ``model.config`` must say so too before saving (``plan.eps``). Raises UserError for a model of no known family.
    """
    source = ModelTensors(model)
    layout = resolve(source)
    narrow = sorted({t.dtype for t in source.tensors.values()} & {"F16", "BF16"})
    if narrow:
        raise UserError(f"{source.source} holds {narrow[0]} parameters; load it with dtype=torch.float32 to rescale it")
    ranges = observe_ranges(model, inputs if inputs is not None else batches(model.config, None, None))
    planned = make_plan(layout, weights_of(source, layout), ranges, target=target, margin_bits=margin_bits)
    apply(model, layout, planned.plan)
    return planned.plan


def undo(folder: str | Path, out: str | Path, *, force: bool = False, talk: Talk | None = None) -> Path:
    """Write the source's weights back from a converted folder by the inverse of its recorded plan, and return
    ``out``.

    Bit for bit where the conversion was lossless. Tensors that the conversion made (positions, a separated head)
    are left out; those that it dropped as copies are not restored. Raises UserError where the folder has no plan.
    """
    talk = talk or Talk(quiet=True)
    folder, out = Path(folder), Path(out)
    if not folder.is_dir():
        raise UserError(f"{folder}: No such folder; give one that convert wrote")
    if not (folder / REPORT).is_file():
        raise UserError(f"{folder}: has no {REPORT}, so convert did not write it; give a converted folder")
    check_out(out, folder, force=force)
    plan = read_plan(folder)
    origin = read_origin(folder)
    checkpoint = open_checkpoint(folder)
    layout = resolve(checkpoint)
    stored = {"F64": "F32"}  # which holds all that came through fp16
    back = [
        write.as_dtype(stored.get(dtype := origin.dtypes.get(write.name, origin.dtype), dtype))
        for write in writes(layout, inverse(plan))
        if write.name not in origin.made
    ]
    config = dict(checkpoint.config)
    for key, sides in origin.config_changes.items():
        config.pop(key, None)
        if "before" in sides:
            config[key] = sides["before"]
    with staged(out, force=force) as work:
        with talk.step(f"Writing {len(back)} tensors") as advance:
            written = write_fp16(checkpoint, back, work, progress=advance)
        checkpoint.refuse_changes()
        refuse_strangers(folder, written.source_sha256)
        write_json(work / "config.json", config)
        carry_over(folder, work, back=True)
    return out
