"""The start of a finetune: the rescaled source, stored on disk so that a continued run begins from the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..checkpoint.folder import carry_over, tokenizer_beside
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.recorded import CONVERTED_KEY
from ..checkpoint.staging import scratch, staged
from ..checkpoint.writer import write_fp16
from ..conversion.options import MOST_MARGIN, Options
from ..conversion.planning import Opened, decide
from ..devices import Device
from ..errors import UserError
from ..families.resolve import resolve
from ..json_text import write_json
from ..measuring.observer import SiteObserver
from ..measuring.probe import batches as probe_batches
from ..measuring.probe import checkpoint_batches
from ..progress import Progress
from ..rescaling.apply import edited_config, set_dtype, writes
from ..rescaling.exponents import moved, output_factors
from ..rescaling.plan import Plan, describe_plan
from ..targets import MARGIN_BITS
from ..wording import listed
from .corpus import Corpus
from .distillation import arguments
from .mixed_precision import MixedPrecision
from .processes import precisions_of
from .recipe import Recipe
from .states import on_a_disk

START_FOLDER, TRAINED_FOLDER = "start", "trained"
START_RECORD = "start.json"
"""A file in the run's folder if the start is rescaled: the plan, and log2 of each output's ratio to the source's."""

START_BATCHES = 4  # batches that the start must hold before the first step


def options_of(recipe: Recipe, **others: Any) -> Options:
    # A quarter of a bit more, since the audit's values are rounded otherwise than those that are observed.
    asked = 0.0 if recipe.penalty.form == "none" else recipe.penalty.headroom_bits + 0.25
    return Options(
        target=recipe.planned_target,
        margin_bits=min(max(MARGIN_BITS, asked), MOST_MARGIN),
        device=recipe.device,
        prove=bool(recipe.penalty.certify),
        **others,
    )


def write_start(checkpoint: Checkpoint, recipe: Recipe, start: Path, progress: Progress) -> None:
    layout = resolve(checkpoint)
    plan = Plan(family=layout.family.name)
    if recipe.rescale:
        inputs = checkpoint_batches(checkpoint, layout, None, recipe.seed)
        opened = Opened(checkpoint, layout, inputs, Device(recipe.device))
        decided = decide(opened, options_of(recipe, max_length=recipe.data.input_length), progress)
        layout, plan = decided.layout, decided.plan
    with staged(start) as work:
        if plan.moves:
            record = {"plan": describe_plan(plan), "outputs": moved(output_factors(layout, plan))}
            write_json(start.with_name(START_RECORD), record)
        tensors = [write.as_dtype("F32") for write in writes(checkpoint, layout, plan)]
        with progress.step(
            f"Writing {len(tensors)} rescaled tensors in fp32" if recipe.rescale else "Copying in fp32"
        ) as a:
            write_fp16(checkpoint, tensors, work, advance=a)
        config = edited_config(layout, plan)
        config.pop(CONVERTED_KEY, None)  # which tells of a report, and a start has none
        set_dtype(config, "float32")
        write_json(work / "config.json", config)
        carry_over(checkpoint.folder, work, tokenizer=tokenizer_beside(checkpoint.folder, recipe.subfolder))


def check_start(student: Any, recipe: Recipe, corpus: Corpus, accelerator: Any, progress: Progress) -> bool:
    """Return whether all values fit the recipe's precision in a few training batches and, with a penalty, in the probe.
    If not, training begins in a wider precision, in which the penalty lowers the values. If there is no penalty or no
    wider precision, or if values overflow there too, UserError is raised instead. student: the model to train."""
    (before, wanted), device = precisions_of(recipe, accelerator), accelerator.device
    given = [arguments(student, batch, device) for batch in islice(corpus.training_batches(), START_BATCHES)]
    penalised = recipe.penalty.form != "none"
    if penalised:
        probe = probe_batches(student.config, None, None, seed=recipe.seed)
        given += [arguments(student, batch, device) for batch in probe if not batch.generate]
    student.to(device).eval()
    broken = overflowing(student, given, wanted, device, progress)
    if broken is None:
        return True
    if penalised and before != wanted:
        broken = overflowing(student, given, before, device, progress)
    if broken is not None:
        raise UserError(
            f"{broken} is inf or NaN before the first step, and training cannot mend that; in the recipe, set"
            f" {what_helps(recipe.rescale, penalised, before, wanted)}"
        )
    return False


def what_helps(rescaled: bool, penalised: bool, before: str, wanted: str) -> str:
    """Return what can mend a start that overflows. before, wanted: the results of ``precisions_of``."""
    helps = {"rescale: true": not rescaled, "penalty.form: smooth-max": not penalised and before != wanted}
    helps["precision: fp32"] = wanted != "fp32" and (not penalised or before == wanted)
    return listed([key for key, each in helps.items() if each], "or") or "another source"


def overflowing(
    student: Any, given: Sequence[Any], precision: str, device: torch.device, progress: Progress
) -> str | None:
    """Return the name of the first site with an inf or NaN when the model runs in ``precision``, or None. given: the
    keyword arguments of each forward pass. Raises RuntimeError if no linear layer computes in this precision."""
    mixed_precision = MixedPrecision(precision, device)
    with (
        progress.step(f"Checking that all values are finite in {precision} before the first step") as advance,
        torch.no_grad(),
        mixed_precision.whole_step(),
    ):
        observer = SiteObserver(student)
        for done, each in enumerate(given, 1):
            with observer, mixed_precision.forward():
                student(**each)
            advance(done, len(given))
    linears = {path for path, module in student.named_modules() if isinstance(module, torch.nn.Linear)}
    if not any(site.dtype == mixed_precision.dtype for site in observer.sites() if site.name in linears):
        raise RuntimeError(f"the linears do not compute in {precision}")
    broken = sorted((s for s in observer.sites() if s.nonfinite and s.limit is not None), key=lambda s: s.order)
    return broken[0].name if broken else None


@contextmanager
def written_trained(folder: Path, weights: Mapping[str, torch.Tensor]) -> Iterator[Path]:
    """Yield the folder of a temporary checkpoint with the trained fp32 weights. folder: the run's folder. weights: the
    trained weights by name. A weight that is missing there is read from the run's start. The temporary checkpoint names
    its tensors as the start does."""
    start = folder / START_FOLDER
    checkpoint = open_checkpoint(start)
    layout = resolve(checkpoint)
    with scratch(folder / TRAINED_FOLDER) as beside:
        trained = beside / TRAINED_FOLDER
        with on_a_disk(trained):
            trained.mkdir()
            tensors = {}
            for tensor in layout.tensors.values():
                # Processes that hold parts of a model give a shared weight under one of its names only.
                shared = layout.family.embedding if tensor.name in layout.family.copies else tensor.name
                value = weights.get(tensor.name, weights.get(shared))
                if value is None and tensor.source is not None:
                    value = checkpoint.read(tensor.source)
                if value is not None:
                    tensors[tensor.name] = value.float().contiguous()
            # One storage under two names is refused.
            copies, names = layout.family.copies, checkpoint.stored_names
            tensors = {names.get(n, n): value.clone() if n in copies else value for n, value in tensors.items()}
            save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
            shutil.copyfile(start / "config.json", trained / "config.json")
            carry_over(start, trained)
        yield trained
