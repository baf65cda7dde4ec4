"""Run a finetune from its recipe: rescale, train under a penalty with the source as teacher, and convert to fp16."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.files import read_json
from ..checkpoint.folder import tokenizer_beside
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.recorded import CONVERTED_KEY
from ..checkpoint.sources import shown_in_a_command
from ..checkpoint.staging import check_out, overlap, put_in_place, scratch
from ..conversion.convert import Conversion, convert_by
from ..conversion.opening import say_where_saved_again
from ..conversion.options import Destination, Options, Provenance
from ..devices import Device, check_auto_uses_the_card, computes_in_bf16, find_device, shown
from ..errors import UserError
from ..families.known import class_of, spare_padding, stock_class
from ..measuring.agreement import agreed_layout
from ..measuring.attack import GROUP, attacked
from ..measuring.stock import attentions_of, load, load_config
from ..progress import Progress, progress_of
from ..quiet import quiet
from ..report.build import other_sha256
from ..report.schema import FinetuneEntry, Lineage, Report, Source, read
from ..rescaling.plan import Plan
from ..results import AttackEntry
from ..system import available_memory
from ..targets import AUTO
from .corpus import Corpus
from .distillation import Teacher, sharded
from .goals import Command, with_goals
from .launching import MOST_OVER, Needs
from .processes import begun_by, make_accelerator, weights_in_parts
from .recipe import Recipe, parse_recipe, read_recipe, read_recipe_for
from .start import START_FOLDER, START_RECORD, check_start, options_of, write_start, written_trained
from .states import LOG, RunFolder, read_state, start_tracker
from .trainer import Trainer, check_same_recipe

UNNEEDED = "Nothing to train: after a conversion alone no input can overflow it (--force trains all the same)"


@quiet()
def finetune(
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    force: bool = False,
    overrides: tuple[str, ...] = (),
    progress: Progress | bool | None = None,
) -> Conversion | None:
    """Finetune by ``recipe`` and return the conversion of the trained weights; None in every process but the first.

    overrides: new values for keys of the recipe's file, such as ``schedule.steps=200``. force: replace an existing
    output, and train even if a conversion alone fulfils the recipe; without it that conversion is the result. A run
    continues from its folder, even if the recipe now has more steps. Raises UserError for unusable input, or if the run
    cannot succeed."""
    command = Command()
    if isinstance(recipe, (str, Path)):
        command, recipe = Command(str(recipe), tuple(overrides), begun_by()), read_recipe(recipe, overrides)
    elif not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe)
    asked, recipe = recipe, recipe.settled()
    out = Path(recipe.out)
    check_recipe(recipe)
    check_out(out, recipe.source, force=force)  # before a download
    checkpoint = open_checkpoint(recipe.source, recipe.subfolder)
    check_out(out, recipe.source, checkpoint.folder, force=force)
    progress = progress_of(progress)
    with saying_where_it_stopped(run_folder(recipe)):
        run = train(recipe, checkpoint, progress=progress, if_needed=not force)
    if not isinstance(run, Run):
        return run
    if run.weights is None:
        return None
    provenance = Provenance(
        command.published().line(),
        lineage_of(checkpoint, asked, recipe, run),
        checkpoint,
        judge=partial(with_goals, recipe=asked, command=command.published()),
        search=partial(attack_unproven, recipe.evaluation.attack_steps, progress),
    )
    with saying_where_it_stopped(run.folder), written_trained(run.folder, run.weights) as trained:
        place, options = Destination(out, force=force), options_of(recipe)
        result = convert_by(options, trained, place, provenance=provenance, progress=progress)
    if not result.report.get("next"):
        return result
    return replace(result, next=with_goals(read(Report, result.report), asked, command).next)


@contextmanager
def saying_where_it_stopped(folder: Path) -> Iterator[None]:
    """If Ctrl-C stops the ``with`` block, say in its message from which step the run in ``folder`` will go on."""
    try:
        yield
    except KeyboardInterrupt:
        states = RunFolder(folder).steps()
        if not states:
            raise KeyboardInterrupt("interrupted; no state is saved yet: the same command begins anew") from None
        raise KeyboardInterrupt(f"interrupted; the same command goes on from step {states[-1]}") from None


@dataclass(frozen=True)
class Run:
    """The result of a finished run. entry: the report's entry. weights: in fp32; None in processes but the first."""

    folder: Path
    entry: FinetuneEntry
    weights: Mapping[str, torch.Tensor] | None


def train(
    recipe: Recipe, checkpoint: Checkpoint, *, progress: Progress | bool | None = None, if_needed: bool = False
) -> Run | Conversion | None:
    """Rescale ``checkpoint`` and train it by ``recipe``, or continue the run in the recipe's folder. if_needed: if a
    conversion alone fulfils the recipe, do not train; the first process then returns this conversion, and the others
    None. Raises UserError when the device runs out of memory."""
    linear = torch.nn.functional.linear
    try:
        return _train(recipe, checkpoint, progress, if_needed)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{shown(find_device(recipe.device))} is out of memory; give a smaller data.batch_size and more"
            " data.gradient_accumulation, or gradient_checkpointing: true; the same command then goes on with the run"
        ) from error
    finally:
        torch.nn.functional.linear = linear  # DeepSpeed's ZeRO-3 leaves its own there, which rounds otherwise


def check_memory(recipe: Recipe, student: Any, accelerator: Any) -> None:
    """Raise UserError where a batch cannot fit into the CPU's memory. The system would kill the process without an
    error."""
    if accelerator.device.type != "cpu":
        return
    needed = Needs(recipe, student.config, type(student), accelerator.num_processes).activations / MOST_OVER
    if needed > (free := available_memory()):
        raise UserError(
            f"data.batch_size {recipe.data.batch_size}: a pass takes {needed / 1e9:.3g} GB or more, and"
            f" {free / 1e9:.3g} GB are free; give a smaller one and more data.gradient_accumulation"
        )


def _train(
    recipe: Recipe, checkpoint: Checkpoint, progress: Progress | bool | None, if_needed: bool
) -> Run | Conversion | None:
    from accelerate.utils import broadcast_object_list

    folder = run_folder(recipe)
    check_run_folder(folder, recipe)
    corpus = corpus_of(recipe, checkpoint)
    accelerator = make_accelerator(recipe)
    main = accelerator.is_main_process
    progress = progress_of(progress) if main else Progress(quiet=True)
    say_where_saved_again(checkpoint, progress)
    if not computes_in_bf16(accelerator.device):
        before = ", and so are the steps before all values fit fp16" if recipe.precision == "fp16" else ""
        progress.say(f"{shown(accelerator.device)} has no bf16: the teacher is in fp32{before}")
    teacher = make_teacher(checkpoint, recipe, accelerator)
    start = folder / START_FOLDER
    if main and not (start / "config.json").is_file():
        write_start(checkpoint, recipe, start, progress)
    accelerator.wait_for_everyone()
    student = load(start, torch.float32, attention="eager")  # whose scores the penalty sees
    check_memory(recipe, student, accelerator)
    # Where stock code ties nothing the embedding is stored under several names; it is trained as the one that it was.
    student.set_input_embeddings(student.get_input_embeddings())
    fits = True
    if not RunFolder(folder).steps():
        converted = None
        if main:
            report = rehearse(recipe, folder, progress)
            enough = report["proof"] == "certified" and recipe.is_met_by(report["certificate"]["headroom_bits"])
            converted = converted_alone(recipe, progress) if enough and if_needed else None
        if broadcast_object_list([converted is not None])[0]:
            if main:  # of the folder what this run has written, and nothing else
                shutil.rmtree(start)
                (folder / START_RECORD).unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()
            accelerator.end_training()
            return converted
        tried = student
        if weights_in_parts(accelerator):  # no card need hold it whole
            tried = sharded(load(start, torch.float32, attention="eager").requires_grad_(False), accelerator.device)
        fits = check_start(tried, recipe, corpus, accelerator, progress)
        del tried
    if main:
        start_tracker(accelerator, recipe, folder)
    trainer = Trainer(recipe, student, teacher, corpus, folder, accelerator, progress=progress, fits=fits)
    entry, weights = trainer.train(), trainer.weights()
    # All are done with each other: a process that ends with its group's threads running may be aborted.
    accelerator.wait_for_everyone()
    accelerator.end_training()
    where = {"processes": accelerator.num_processes, "devices": [shown(accelerator.device)]}
    return Run(folder, entry.model_copy(update=where | {"data": corpus.describe()}), weights if main else None)


def corpus_of(recipe: Recipe, checkpoint: Checkpoint) -> Corpus:
    layout, tokenizer = agreed_layout(checkpoint), tokenizer_beside(checkpoint.folder, recipe.subfolder)
    if recipe.precision == "fp16" and spare_padding(layout.config) == math.inf:
        raise UserError(
            f"{checkpoint.name}: in fp16 the local attention of {layout.family.title} in transformers gives NaN for"
            " padding, and NaN gradients for rows that do not fill its blocks; set precision: fp32"
        )
    folder = tokenizer if tokenizer is not None and tokenizer.is_dir() else checkpoint.folder
    return Corpus(recipe.data, folder, load_config(checkpoint.folder), seed=recipe.seed)


def converted_alone(recipe: Recipe, progress: Progress) -> Conversion | None:
    """Convert the recipe's source without training, and return the conversion. If it is unsafe, or lacks a certificate
    that the recipe asks for, nothing is written and None is returned."""
    progress.say("Rescaling alone gives the proof that the recipe asks for: trying a conversion without training")
    target = recipe.target if "target" in recipe.model_fields_set else AUTO
    options = replace(options_of(recipe, subfolder=recipe.subfolder), target=target)
    place = Destination(Path(recipe.out))
    result = converted_if_enough(options, recipe.source, place, progress=progress)
    if result.out != place.out:
        return None
    progress.say(UNNEEDED)
    return result


def converted_if_enough(options: Options, source: str | Path, place: Destination, **more: Any) -> Conversion:
    """Convert ``source`` in a temporary folder, and return the conversion. The folder moves to ``place`` only if the
    result is safe and has the certificate that ``options`` may ask for. more: further arguments of ``convert_by``."""
    with scratch(place.out) as beside:
        work = beside / place.out.name
        result = convert_by(options, source, Destination(work), **more)
        if result.safe and (not options.prove or result.report["proof"] == "certified"):
            put_in_place(work, place.out.absolute(), force=place.force)
            return replace(result, out=place.out)
    return result


@quiet()
def convert_or_finetune(
    recipe: str | Path,
    options: Options,
    source: str | Path,
    place: Destination,
    *,
    progress: Progress | bool | None = None,
) -> Conversion:
    """Convert ``source``, and finetune it if the result is unsafe or lacks a certificate that the recipe asks for.
    recipe: the recipe's file; the other arguments replace its source, out, subfolder and target."""
    progress = progress_of(progress)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("convert runs in one process only; start it without the launcher, or launch finetune instead")
    read_as, overrides = read_recipe_for(recipe, source, place.out, options.target, options.subfolder)
    check_recipe(read_as)
    check_out(place.out, source, force=place.force)
    check_run_folder(run_folder(read_as), read_as.settled())
    asked = replace(options, target=read_as.planned_target, prove=bool(read_as.penalty.certify))
    result = converted_if_enough(asked, source, place, progress=progress)
    if result.out == place.out:
        return result
    worst = ", ".join(str(entry["signal"]) for entry in result.report["unsafe"][:3])
    left = ("uncertified" if result.safe else "unsafe") + (f" ({worst})" if worst else "")
    progress.say(f"After rescaling alone it is {left}: finetuning")
    finetuned = finetune(recipe, overrides=overrides, force=place.force, progress=progress)
    assert finetuned is not None  # the only process is the first one
    return finetuned


def check_recipe(recipe: Recipe) -> None:
    check_auto_uses_the_card(recipe.device)
    device, world = find_device(recipe.device), int(os.environ.get("WORLD_SIZE", "1"))
    recipe.data.share(world)  # which says where it cannot be divided
    if device.index is not None and world > 1:
        raise UserError(f"device {device} would serve all processes; set device: cuda, so that each takes its own")


def run_folder(recipe: Recipe) -> Path:
    out = Path(recipe.out)
    return Path(recipe.checkpointing.folder) if recipe.checkpointing.folder else out.with_name(f"{out.name}.run")


def check_run_folder(folder: Path, recipe: Recipe) -> None:
    for other, what in ((recipe.out, "output"), (recipe.source, "source")):
        path = Path(other).expanduser()
        if (what == "output" or path.exists()) and overlap(folder, path):
            raise UserError(f"{folder} overlaps the {what} {other}; give another checkpointing.folder")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give another checkpointing.folder")
    states = RunFolder(folder)
    if states.steps():
        last = states.of(states.steps()[-1])
        check_same_recipe(read_state(last), recipe, last)
        return
    before_a_state = {START_FOLDER, START_RECORD, LOG, "wandb"}
    start, names = folder / START_FOLDER, {entry.name for entry in folder.iterdir()} - before_a_state
    if any(not name.startswith(".") for name in names) or (start.exists() and not (start / "config.json").is_file()):
        raise UserError(f"{folder} holds other files; give an empty or new checkpointing.folder")


def make_teacher(checkpoint: Checkpoint, recipe: Recipe, accelerator: Any) -> Teacher | None:
    device = accelerator.device
    if recipe.distillation.weight == 0 and class_of(checkpoint.config).is_language_model:
        return None
    kept = {tensor.dtype for tensor in checkpoint.tensors.values()}
    in_bf16 = kept == {"BF16"} and device.type != "cpu" and computes_in_bf16(device)
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    return Teacher(
        load(checkpoint.folder, dtype, attention=attentions_of(stock_class(checkpoint.config), ("sdpa", "eager"))[0]),
        device,
        in_parts=weights_in_parts(accelerator),
    )


def rehearse(recipe: Recipe, folder: Path, progress: Progress) -> Mapping[str, Any]:
    """Return the report of a trial conversion of the untrained weights, which shows errors before the training."""
    with (
        progress.step("Trying the conversion on the untrained weights"),
        written_trained(folder, {}) as trained,
        scratch(Path(recipe.out)) as beside,
    ):
        return convert_by(options_of(recipe, run_model=False), trained, Destination(beside / "out")).report


def attack_unproven(
    steps: int, progress: Progress, folder: Path, unproven: list[str], device: Device
) -> AttackEntry | None:
    """Search for inputs that overflow the sites in ``unproven``, and return the report's entry on it; None for 0 steps.
    steps: the number of gradient steps. unproven: names of sites without a proof."""
    if not steps:
        return None
    rows = unproven * max(1, GROUP // len(unproven))
    return attacked(folder, agreed_layout(open_checkpoint(folder)), steps, 0, device, progress, sites=rows)


def lineage_of(checkpoint: Checkpoint, recipe: Recipe, taken: Recipe, run: Run) -> Lineage:
    """Return the report's entry on how a trained checkpoint came about. recipe: the recipe as the user gave it. taken:
    the same recipe after ``Recipe.settled``."""
    written, certify = recipe.describe(), taken.penalty.certify
    settled = {"penalty.certify": certify} if recipe.penalty.certify != certify else {}
    # A report is published; of local paths only the last part says anything to others.
    out = Path(recipe.out).name
    source, path = map(shown_in_a_command, (recipe.source, recipe.data.path))
    settings = written | {
        "source": source,
        "out": out,
        "data": written["data"] | {"path": path},
        "checkpointing": written["checkpointing"] | {"folder": None},
    }
    data = {key: Path(str(value)).name if key == "path" else value for key, value in run.entry.data.items()}
    file = run.folder / START_RECORD
    record = read_json(file, "plan of the starting weights") if file.is_file() else {}
    mark = checkpoint.config.get(CONVERTED_KEY)
    before = {} if mark is None else {"config_changes": {CONVERTED_KEY: {"before": mark}}}
    return Lineage(
        source=Source.of(checkpoint).model_copy(update={"other_sha256": other_sha256(checkpoint), **before}),
        finetune=run.entry.model_copy(
            update={
                "recipe": settings,
                "settled": settled,
                "data": data,
                "start": Plan.model_validate(record["plan"]) if record else None,
                "start_outputs": record.get("outputs", {}),
            }
        ),
    )
