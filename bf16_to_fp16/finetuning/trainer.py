"""The training loop, for one process or many. A run that is killed and continued ends with the same bits as one that
never stopped.

A run on two processes takes almost the same steps as a run on one: task loss and divergence are summed over the step's
positions in all processes, and divided by the number of these positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UserError
from ..families.layout import Layout
from ..families.resolve import ModelTensors, resolve
from ..progress import Progress
from ..report.schema import FinetuneEntry
from . import distillation
from .bound_constraint import BoundConstraint
from .corpus import Corpus, TrainingBatch
from .distillation import MOST_EXAMPLES, Evaluator, StepLosses, nearest
from .mixed_precision import MixedPrecision, recomputation
from .optimizers import make_optimizer, set_rate
from .penalty import ActivationPenalty
from .processes import Processes, precisions_of
from .recipe import Recipe, Schedule
from .states import LOG, STATE, TENSORS, RunFolder, RunLog, read_state, read_tensors

FITTING_STEPS = 20  # steps in a row in which every activation must fit fp16 before bf16 turns to fp16
_DROPOUT = 0  # what a step's random numbers are for
NONFINITE_STOP = 100  # skipped steps in the whole run after which it stops
OVERFLOW_STOP = 20  # overflows in a row after which the loss scale, 2**20 times smaller, has collapsed
STUCK_STOP = 1000  # steps without progress after which the penalty will not come down

CHANGEABLE = ("out", "wandb", "checkpointing", "evaluation", "quality", "source")
"""Keys of a recipe that may change when a run continues, because the training steps do not depend on them."""


@dataclass
class RunPosition:
    step: int = 0
    tokens: int = 0
    phase: int = 0
    fitting: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    least_excess: float = math.inf
    least_excess_step: int = 0


def learning_rate(schedule: Schedule, step: int) -> float:
    """Return the learning rate of a step, counted from 0: it rises linearly, then falls by half a cosine to 0."""
    rise = schedule.warmup_steps
    if step < rise:
        return schedule.learning_rate * (step + 1) / rise
    done = (step - rise) / max(1, schedule.steps - rise)
    return schedule.learning_rate * (1 + math.cos(math.pi * done)) / 2


def freeze_unreached(student: Any, layout: Layout) -> None:
    """Freeze vision towers and their projectors. Text gives them no gradient, and DDP waits for every gradient."""
    for path in (path for projector in layout.projectors for path in (projector.tower, projector.at)):
        student.get_submodule(path).requires_grad_(False)


class Trainer:
    """Trains ``student`` by a recipe, and saves the states of the run in ``folder``.

    student: the model to train. teacher: the source's model, or None without distillation. accelerator: must not set
    mixed precision, except by DeepSpeed's configuration. fits: whether a new run begins in the recipe's precision; if
    not, it begins in a wider one and turns to fp16 when all activations fit."""

    def __init__(
        self,
        recipe: Recipe,
        student: Any,
        teacher: distillation.Teacher | None,
        corpus: Corpus,
        folder: Path,
        accelerator: Any,
        *,
        progress: Progress | None = None,
        fits: bool = True,
    ) -> None:
        self.recipe, self.teacher, self.corpus = recipe, teacher, corpus
        self.progress = progress or Progress(quiet=True)
        self.processes = Processes(accelerator)
        self.log = RunLog(folder / LOG, accelerator.log) if self.processes.main else None
        self.device = self.processes.device
        self.precisions = precisions_of(recipe, accelerator)
        self.stock = student
        self.passes = recipe.data.share(self.processes.world).gradient_accumulation
        calls = self.passes * (1 if recipe.penalty.form == "none" else 2)
        student.train()
        if recipe.gradient_checkpointing:
            student.config.use_cache = False
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recomputation(self.device))
        self.position = RunPosition(phase=int(fits))
        self.mixed_precision = self._mixed_precision(self.position.phase)
        self.layout = resolve(ModelTensors(student))  # as long as this process has the model whole
        freeze_unreached(student, self.layout)
        trained = [p for p in student.parameters() if p.requires_grad]
        optimizer = make_optimizer(recipe, trained, fused=self.processes.offloads)
        self.model, self.optimizer = self.processes.prepare(student, optimizer, recipe, calls)
        self.penalty = self.constraint = None
        if recipe.penalty.form != "none":
            bits, train_mode = recipe.penalty.trained_bits, recipe.target == "train"
            self.penalty = ActivationPenalty(student, headroom_bits=bits, train_mode=train_mode, accumulation=calls)
        if recipe.penalty.certify:
            self.constraint = BoundConstraint(self.layout, student, engine=self.processes.engine)
        self.losses = StepLosses(recipe, student, self.model, teacher, self.penalty, self.processes, self.passes)
        self.training_batches = corpus.training_batches(self.processes.rank, self.processes.world)
        self.states = RunFolder(folder)
        self.evaluator = Evaluator(recipe, corpus, student, self.model, teacher, self.processes)

    def _mixed_precision(self, phase: int) -> MixedPrecision:
        return MixedPrecision(self.precisions[phase], self.device)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def train(self) -> FinetuneEntry:
        """Train to the recipe's last step, from the newest saved state if there is one. Return the report's entry on
        the run. Raises UserError if the run cannot go on; its saved states stay."""
        self._continue()
        schedule, p = self.recipe.schedule, self.position
        with self.progress.step(f"Finetuning to step {schedule.steps}") as advance, self.penalty or nullcontext():
            if self.constraint is not None and self.constraint.first is None:
                self.constraint.begin(p.step)
            if p.step == 0 and not p.evaluations:
                self._evaluate()
                self._save()
            while p.step < schedule.steps:
                self._choose_precision()
                self._step()
                advance(p.step, schedule.steps)
                check_progress(self.recipe, self.penalty, p)
                last = p.step == schedule.steps
                if last or p.step % self.recipe.evaluation.every == 0:
                    self._evaluate()
                if last or p.step % self.recipe.checkpointing.every == 0:
                    self._save()
        if self.kept != p.step:
            self.progress.say(f"Step {self.kept} is kept: of all steps within the limits it is nearest to the original")
        return FinetuneEntry(
            steps=p.step, tokens=p.tokens, skipped=p.skipped, evaluations=p.evaluations, kept=self.kept
        )

    def _step(self) -> None:
        p, recipe = self.position, self.recipe
        batches = [next(self.training_batches) for _ in range(self.passes)]
        positions = self._total(sum(int(distillation.counted_positions(b).sum()) for b in batches))
        rate = learning_rate(recipe.schedule, p.step)
        set_rate(self.optimizer, rate)
        # What holds the bounds afterwards is thousands of small fp32 operations, which its modes would only slow.
        with self.mixed_precision.whole_step():
            norm, sums = self._attempt(batches, positions)
        p.step += 1
        if self.constraint is not None:
            self.constraint.hold(p.step, recipe.schedule.steps)
        p.tokens += int(self._total(sum(int(b.attention_mask.sum()) for b in batches))) + int(positions)
        task, kl = (float(x) / max(1.0, positions) for x in sums[:2])
        share = recipe.distillation.weight if self.corpus.objective != "text" else 1.0
        loss_scale = None if self.mixed_precision.loss_scale is None else self.mixed_precision.scale
        shown: dict[str, Any] = {
            "loss": (task * (1 - share) if share < 1 else 0.0) + (kl * share if share > 0 else 0.0),
            "task_loss": task,
            "distillation": kl,
            # The mean of processes, as in the gradient.
            "penalty": float(sums[2]) / self.processes.world,
            "learning_rate": rate,
            "gradient_norm": norm,
            "loss_scale": loss_scale,
            "precision": self.precisions[p.phase],
            "tokens": p.tokens,
        }
        if not norm < math.inf:
            # Rows of data, not text: enough to find the batch again.
            rows = [list(example) for batch in batches for example in batch.examples]
            p.skipped.append({"step": p.step, "loss_scale": loss_scale, "examples": rows})
            shown["skipped_examples"] = rows
        if self.constraint is not None and self.constraint.headroom is not None:
            shown["bound_bits"] = self.constraint.headroom
        if self.log is not None:
            self.log.write(p.step, shown | {"skipped": len(p.skipped)} | self._worst())

    def _worst(self) -> dict[str, Any]:
        if self.penalty is None or not self.penalty.observations():
            return {}
        name, seen = self.penalty.worst()
        return {"worst_site": name, "worst_headroom_bits": self.recipe.penalty.trained_bits - seen.excess_bits}

    def _total(self, count: int) -> float:
        return float(self.processes.sum(torch.tensor(float(count))))

    def _attempt(self, batches: Sequence[TrainingBatch], positions: float) -> tuple[float, Tensor]:
        """Take one optimizer step on ``batches``, and return the norm of the gradient, which is inf or NaN for a
        skipped step. Return with it three sums over all processes: task loss, KL from the teacher, and penalty.
        positions: the number of positions in all processes, by which losses are divided."""
        p, recipe = self.position, self.recipe
        # Dropout is a function of where the run stands, so no generator has a state to keep.
        torch.manual_seed(hash((recipe.seed, p.step, _DROPOUT, self.processes.rank)) & 0x7FFF_FFFF_FFFF)
        if "fp16" in self.precisions:
            self.processes.tell_scale(self.mixed_precision.scale)
        if not self.processes.engine:
            self.optimizer.zero_grad()
        sums = torch.zeros(3, dtype=torch.float64)
        finite, calls = True, self.losses.calls(batches)
        for number, part in enumerate(calls, 1):
            with self.processes.synchronised(self.model, number == len(calls)):
                shown = torch.zeros(2, dtype=torch.float64)
                with self.mixed_precision.forward():
                    if isinstance(part, int):
                        objective = self.losses.of_probe(p.step, part)
                    else:
                        loss, shown = self.losses.of_batch(part)
                        objective = loss / max(1.0, positions)
                penalty = self.penalty() if self.penalty is not None else torch.zeros((), device=self.device)
                # Processes and calls are averaged; of the objective the sum over all of them is what is wanted.
                total = objective * (self.processes.world * len(calls)) + penalty
                if not self.processes.sharded:  # DDP waits for every parameter, and a backward needs a graph
                    total = total + sum(p.flatten()[:0].sum() for p in self.stock.parameters() if p.requires_grad)
                sums += torch.cat([shown, penalty.detach().cpu().double()[None] / len(calls)])
                if self.processes.engine and not self.processes.everywhere(bool(torch.isfinite(total))):
                    finite = False
                    if self.penalty is not None:
                        self.penalty.drop_step()
                    break
                scale = 1.0 if self.processes.engine else self.mixed_precision.scale
                self.processes.accelerator.backward(total if scale == 1 else total * scale)
        norm = self.processes.finish_step(finite, self.mixed_precision, self.optimizer)
        return norm, self.processes.sum(sums)

    def _choose_precision(self) -> None:
        p = self.position
        if p.phase == 0 and p.step and self.penalty is not None:
            limits = self.penalty.observations().values()
            inside = all(o.excess_bits <= self.recipe.penalty.trained_bits for o in limits)
            p.fitting = p.fitting + 1 if inside else 0
            if p.fitting >= FITTING_STEPS:
                p.phase, self.mixed_precision = 1, self._mixed_precision(1)
                self.progress.say(f"Step {p.step}: fp16 from here on")

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        recipe, p = self.recipe, self.position
        held = self.corpus.held_out(MOST_EXAMPLES, self.processes.rank, self.processes.world)
        if not held and self.teacher is None:
            return
        self.model.eval()
        if self.penalty is not None:
            self.penalty.detach()
        # In the last precision, for which the result is.
        measured: dict[str, Any] = {"step": p.step, **self.evaluator.measure(held, self._mixed_precision(1))}
        if self.penalty is not None:
            self.penalty.attach()
        self.model.train()
        if self.constraint is not None:
            over = self.constraint.over()
            measured["bounds_over"] = len(over)
            measured["bound_excess_bits"] = max((-site.headroom_bits for site in over), default=0.0)
        measured |= self._worst()
        p.evaluations.append(measured)
        if self.log is not None:
            self.log.write(p.step, {"evaluation": measured})
        if p.step and nearest(recipe, p.evaluations) == p.step:
            weights = self.weights()
            if self.processes.main:
                self.states.keep(p.step, weights)
        shown = ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in measured.items() if isinstance(v, float))
        self.progress.say(f"Step {p.step}: {shown or 'no figures'}")

    # ---- states --------------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        steps = self.states.steps()
        if steps:
            last = self.states.of(steps[-1])
            state = read_state(last)
            check_same_recipe(state, self.recipe, last)
            if state["parts"] != self.processes.parts:
                raise UserError(
                    f"{last}: saved with another number of processes, or with weights sharded otherwise; launch as"
                    " before, or give another checkpointing.folder"
                )
            self._load(steps[-1])
            self.progress.say(f"Continuing from step {steps[-1]}")
        if self.log is not None:
            self.log.rewind(steps[-1] if steps else -1)

    def _save(self) -> None:
        processes, place = self.processes, self.states.of(self.position.step)
        with self.states.writing(place, main=processes.main, wait=processes.accelerator.wait_for_everyone) as work:
            state: dict[str, Any] = {
                "progress": vars(self.position),
                "stream": self.training_batches.state_dict(),
                "amp": self.mixed_precision.state_dict(),
                "penalty": None if self.penalty is None else self.penalty.state_dict(),
                "constraint": None if self.constraint is None else self.constraint.state_dict(),
                "recipe": self.recipe.describe(),
                "parts": processes.parts,
            }
            if processes.sharded:
                state["untouched"] = not processes.engine and not self.optimizer.state
                processes.accelerator.save_state(str(work / "accelerate"))
                if state["untouched"]:  # for a sharded state torch takes a step of its own
                    self.optimizer.state.clear()
            elif processes.main:
                tensors = {name: p.detach().cpu().contiguous() for name, p in self.stock.named_parameters()}
                save_file(tensors, work / TENSORS)
                state["optimizer"] = self.optimizer.state_dict()
            if processes.main:
                torch.save(state, work / STATE)
        if processes.main:
            passed = self.position.evaluations
            before = ([e for e in passed if e["step"] <= step] for step in self.states.steps())
            self.states.keep_only({step for each in before if (step := nearest(self.recipe, each)) is not None})

    def _load(self, step: int) -> None:
        folder = self.states.of(step)
        state = read_state(folder)
        self.position = RunPosition(**state["progress"])
        self.mixed_precision = self._mixed_precision(self.position.phase)
        self.mixed_precision.load_state_dict(state["amp"])
        self.training_batches.load_state_dict(state["stream"])
        for name, part in (("penalty", self.penalty), ("constraint", self.constraint)):
            if part is not None:
                part.load_state_dict(state[name])
        if self.processes.sharded:
            self.processes.load(folder / "accelerate")
            if state["untouched"]:
                self.optimizer.state.clear()
            return
        tensors = read_tensors(folder)
        with torch.no_grad():
            for name, parameter in self.stock.named_parameters():
                parameter.copy_(tensors[name])
        self.optimizer.load_state_dict(state["optimizer"])

    @property
    def kept(self) -> int:
        """The step whose weights the run returns if it ends now."""
        step = nearest(self.recipe, self.position.evaluations)
        return self.position.step if step is None else step

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the step ``kept`` by tensor name in the first process; others can get {}."""
        if self.kept == self.position.step:
            return self.processes.whole_weights(self.model, self.stock)
        # {} also stands for a return to step 0, whose weights are those of the start.
        return read_tensors(self.states.best(self.kept)) if self.kept and self.processes.main else {}


def check_same_recipe(state: Mapping[str, Any], recipe: Recipe, folder: Path) -> None:
    """Raise UserError if ``recipe`` trains in another way than the recipe of a saved state. Only a finished run may get
    more steps. folder: where the state is saved."""
    before, now = state["recipe"], recipe.describe()
    ended, steps = state["progress"]["step"] == before["schedule"]["steps"], recipe.schedule.steps
    if ended and steps > before["schedule"]["steps"]:
        before = {**before, "schedule": {**before["schedule"], "steps": steps}}
    changed = [key for key in now if key not in CHANGEABLE and before.get(key) != now[key]]
    if changed:
        raise UserError(
            f"{folder.parent}: holds a run with another {changed[0]}; set it back, give another"
            " checkpointing.folder, or delete this one to start anew"
        )


def check_progress(recipe: Recipe, penalty: ActivationPenalty | None, p: RunPosition) -> None:
    """Raise UserError after too many skipped steps, or too many steps without a lower penalty. The error names the
    worst site. p: the position of the run; its least excess over the limits is updated."""
    at = worst_site(penalty)
    row = list(itertools.takewhile(lambda s: s[1]["step"] == p.step - s[0], enumerate(reversed(p.skipped))))
    if len(row) >= OVERFLOW_STOP:
        mend = "precision: fp32" if recipe.rescale else "rescale: true"
        raise UserError(f"{len(row)} steps in a row overflow{at}; set {mend}, or lower schedule.learning_rate")
    if len(p.skipped) >= NONFINITE_STOP:
        raise UserError(f"{len(p.skipped)} steps had no finite gradient{at}; look at their examples in log.jsonl")
    if penalty is None:
        return
    excess = max((o.excess_bits for o in penalty.observations().values()), default=0.0)
    if excess <= 0 or excess < p.least_excess - 0.01:
        p.least_excess, p.least_excess_step = min(excess, p.least_excess), p.step
    elif p.step - p.least_excess_step >= STUCK_STOP:
        raise UserError(
            f"the penalty has not come down for {STUCK_STOP} steps{at};"
            " raise schedule.learning_rate, lower penalty.headroom_bits,"
            " or drop the task loss with distillation.weight: 1"
        )


def worst_site(penalty: ActivationPenalty | None) -> str:
    if penalty is None or not penalty.observations():
        return ""
    name, seen = penalty.worst()
    if seen.excess_bits <= 0:
        return ", though every activation is inside its target"
    return f", worst at {name} with {seen.amax:.4g} where {seen.target:.4g} is wanted"
