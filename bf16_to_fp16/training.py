"""The loop of a finetune: one process or many, and nothing about a run that is not in its state.

A step takes its batches from a stream whose place is two numbers; dropout's randomness is a function of (seed, step,
process); the learning rate is a function of the step. So a run that is killed and continued from its last whole state
ends with the same bits as one that never stopped, and a run on two processes takes the steps of one.

Losses are sums over the positions of the whole step divided by their number, whatever process holds them. What goes
wrong is met where it is seen: a step whose gradient is not finite is passed over, a spike of the loss sends the run
back to an earlier state past the batches around it (Chowdhery et al., PaLM, arXiv:2204.02311, section 5.1), and a loss
scale that collapses or a penalty that does not come down ends the run with the name of the layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .amp import DTYPES, Amp, LossScale
from .corpus import Corpus, TrainingBatch
from .distillation import (
    Teacher,
    TopStore,
    arguments,
    counted,
    divergence,
    divergence_from_top,
    hidden_error,
    task_loss,
)
from .errors import UserError
from .losscurve import Detector, Divergence, Spike
from .numerics import FP16_MAX
from .probe import Batch
from .probe import batches as probe_batches
from .recipe import Recipe, Schedule
from .runlog import RunLog
from .runstate import RunFolder, read_state, write_state
from .talk import Talk

if TYPE_CHECKING:
    from .penalty import ActivationPenalty

FITTING_STEPS = 20
"""Steps in a row in which every activation must fit fp16 before [bf16, fp16] turns to fp16."""

PULLED_STEPS = 16
"""Steps after one with a site past its target in which a rise of the loss is laid to the penalty."""


@dataclass(frozen=True)
class Outcome:
    """What a run did: optimizer steps taken, input and target tokens seen, steps skipped, rewinds, and evaluations in
    order (step, losses, headroom)."""

    steps: int
    tokens: int
    skipped: tuple[Mapping[str, Any], ...]
    rewinds: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


@dataclass
class Progress:
    """Where a run stands besides weights, optimizer and data: all of it is in every state."""

    step: int = 0
    tokens: int = 0
    phase: int = 0
    fitting: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    rewinds: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    pulled: int | None = None
    least_excess: float = math.inf
    least_excess_step: int = 0


def learning_rate(schedule: Schedule, step: int) -> float:
    """Return the learning rate of a step, counted from 0: a linear rise, then constant, or a fall to 0 at the end."""
    rise = schedule.warmup_steps
    if step < rise:
        return schedule.learning_rate * (step + 1) / rise
    done = (step - rise) / max(1, schedule.steps - rise)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule.decay]
    return schedule.learning_rate * share


class Trainer:
    """Trains ``student`` by a recipe and keeps the run's states in ``folder``.

    accelerator: an ``accelerate.Accelerator`` without mixed precision of its own, unless DeepSpeed's configuration has
    one. teacher: the frozen original, or None where nothing is distilled. ``train`` continues a run that ``folder``
    holds.
    """

    def __init__(
        self,
        recipe: Recipe,
        student: Any,
        teacher: Teacher | None,
        corpus: Corpus,
        folder: Path,
        accelerator: Any,
        *,
        name: str = "finetune",
        fits: bool = False,
        talk: Talk | None = None,
        log: RunLog | None = None,
    ) -> None:
        """Prepare model, optimizer and penalty; nothing is computed yet.

        fits: the start is known to be finite in fp16: [bf16, fp16] begins with fp16, unless bf16_steps are given.
        """
        self.fits = fits
        self.recipe, self.teacher, self.corpus, self.accelerator = recipe, teacher, corpus, accelerator
        self.talk = talk or Talk(quiet=True)
        self.device: torch.device = accelerator.device
        self.engine = str(accelerator.distributed_type.value) == "DEEPSPEED"
        self.sharded = self.engine or str(accelerator.distributed_type.value) == "FSDP"
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.precisions = precisions_of(recipe, accelerator)
        self.stock = student
        student.train()
        if recipe.gradient_checkpointing:
            student.config.use_cache = False
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        weights = DTYPES[recipe.optimizer.weights]
        if weights != torch.float32:
            student.to(weights)
        self.amp = self._amp(0)
        # Made before the model is wrapped, whose names the wrappers would change.
        self.penalty: ActivationPenalty | None = None
        self.model, self.optimizer = self._prepare(student)
        if recipe.penalty.form != "none":
            from .penalty import ActivationPenalty

            self.penalty = ActivationPenalty(
                self.stock,
                headroom_bits=recipe.penalty.headroom_bits,
                form=recipe.penalty.form,
                dual_step=recipe.penalty.dual_step,
                weight=recipe.penalty.weight,
                train_mode=recipe.penalty.train_mode,
                accumulation=self.passes,
                process_group=torch.distributed.group.WORLD if self.world > 1 else None,
            )
        self.stream = corpus.stream(self.rank, self.world)
        self.detector = Detector(z=recipe.stability.spike_z, window=recipe.stability.window)
        self.progress = Progress()
        self.states = RunFolder(folder, recipe.checkpointing.keep)
        self.tops = TopStore(folder / "teacher", self.rank) if recipe.distillation.top_k and teacher else None
        self.log = log

    # ---- setting up ----------------------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        """Forward passes of one step."""
        return self.recipe.data.gradient_accumulation

    def _amp(self, phase: int) -> Amp:
        stability = self.recipe.stability
        amp = Amp(
            "fp32" if self.engine else self.precisions[phase],
            self.device,
            loss_scale=stability.loss_scale,
            window=stability.loss_scale_window,
            recomputes=self.recipe.gradient_checkpointing,
        )
        if self.engine and self.precisions[phase] == "fp16":
            # The engine autocasts, and multiplies the loss by what it is told (see _tell_scale).
            amp.loss_scale = LossScale(stability.loss_scale, stability.loss_scale_window)
        return amp

    def _prepare(self, student: Any) -> tuple[Any, Any]:
        optimizer = make_optimizer(self.recipe, [p for p in student.parameters() if p.requires_grad])
        if self.engine:
            configure_engine(self.accelerator, self.recipe)
        with whole_embeddings(student):
            model, optimizer = self.accelerator.prepare(student, optimizer)
        return torch.compile(model) if self.recipe.compile else model, optimizer

    def _tell_scale(self) -> None:
        """Make the engine use our loss scale.

        Under torch_autocast it has a GradScaler that its norm and its clipping know nothing of, so that every gradient
        is clipped as if it were as large as the scale, and that an overflow never reaches, so that it never falls.
        """
        if self.engine and self.amp.loss_scale is not None:
            optimizer = self.accelerator.deepspeed_engine_wrapped.engine.optimizer
            optimizer.torch_autocast_gradscaler = None
            optimizer.override_loss_scale(self.amp.scale)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Run to the recipe's last step and return what was done.

        Raises UserError where the run cannot go on; its states stay.
        """
        self._continue()
        schedule, p = self.recipe.schedule, self.progress
        if self.tops is not None:
            self._fill_tops()
        with self.talk.step(f"Finetuning to step {schedule.steps}") as advance, self._observing():
            if p.step == 0 and not p.evaluations:
                self._evaluate()
                self._save()
            while p.step < schedule.steps:
                self._choose_precision()
                with self.amp.whole_step():
                    seen = self._step()
                advance(p.step, schedule.steps)
                if self._went_back(seen):
                    p = self.progress
                    continue
                self._watch(seen)
                last = p.step == schedule.steps
                if last or p.step % self.recipe.evaluation.every == 0:
                    self._evaluate()
                if last or p.step % self.recipe.checkpointing.every == 0:
                    self._save()
        if self.log is not None:
            self.log.close()
        return Outcome(p.step, p.tokens, tuple(p.skipped), tuple(p.rewinds), tuple(p.evaluations))

    @contextmanager
    def _observing(self) -> Iterator[None]:
        if self.penalty is None:
            yield
            return
        with self.penalty:
            yield

    def _step(self) -> dict[str, Any]:
        """Take one optimizer step and return what was seen."""
        p, recipe = self.progress, self.recipe
        data_step = self.stream.steps
        batches = [next(self.stream) for _ in range(self.passes)]
        positions = float(self._sum(torch.tensor(float(sum(int(counted(b).sum()) for b in batches)))))
        rate = learning_rate(recipe.schedule, p.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        norm, sums = self._search_scale(batches, data_step, positions)
        taken = norm < math.inf
        p.step += 1
        read = sum(int(b.attention_mask.sum()) for b in batches)
        p.tokens += int(self._sum(torch.tensor(float(read)))) + int(positions)
        positions = max(1.0, positions)
        task_sum, kl_sum, penalty_sum = (float(x) for x in sums)
        shown = {
            "loss": self._mixed(task_sum, kl_sum) / positions,
            "task_loss": task_sum / positions,
            "distillation": kl_sum / positions,
            # The mean of processes, as in the gradient.
            "penalty": penalty_sum / self.world,
            "learning_rate": rate,
            "gradient_norm": norm,
            **(
                {"relative_gradient_norm": self.amp.counted_norm}
                if recipe.optimizer.relative and not self.engine
                else {}
            ),
            "loss_scale": self._loss_scale(),
            "precision": self.precisions[p.phase],
            "tokens": p.tokens,
        }
        if not taken:
            # Rows of data, not text: enough to find the batch again.
            rows = [list(example) for batch in batches for example in batch.examples]
            p.skipped.append({"step": p.step, "loss_scale": shown["loss_scale"], "examples": rows})
        due = not taken or p.step % recipe.logging.every == 0 or p.step == recipe.schedule.steps
        if self.log is not None and due:
            extra: dict[str, Any] = {"skipped": len(p.skipped)}
            if not taken:
                extra["skipped_examples"] = p.skipped[-1]["examples"]
            if self.penalty is not None:
                extra["headroom"] = headroom_by_layer(self.penalty)
            self.log.write(p.step, shown | extra)
        return shown | {"taken": taken}

    def _search_scale(self, batches: Sequence[TrainingBatch], data_step: int, positions: float) -> tuple[float, Tensor]:
        """Compute a step and finish it, and return its gradient's norm and its sums.

        Until a first step was taken in fp16 the step is computed again while a lower loss scale may help, so that
        finding the scale costs no data; what is not finite before the backward is the same under every scale.
        """
        scale = self.amp.loss_scale
        before = None if scale is None or scale.settled else (scale.scale, scale.overflows)
        penalty = None if self.penalty is None else self.penalty.state_dict()
        while True:
            norm, sums = self._attempt(batches, data_step, positions)
            if before is None or scale is None or norm < math.inf:
                return norm, sums
            seen = [] if self.penalty is None else self.penalty.observations().values()
            forward_is_finite = bool(sums.isfinite().all()) and all(o.amax < math.inf for o in seen)
            if scale.scale < 1 or not forward_is_finite:
                # No scale helps: a skipped step like any other.
                scale.scale, scale.overflows = before[0] / 2, before[1] + 1
                return norm, sums
            if self.penalty is not None and penalty is not None:
                self.penalty.load_state_dict(penalty)

    def _attempt(self, batches: Sequence[TrainingBatch], data_step: int, positions: float) -> tuple[float, Tensor]:
        """Forward, backward and optimizer on the batches of a step; return the gradient's norm, infinite or NaN where
        the step was skipped, and the sums of task, divergence and penalty over all processes."""
        p, recipe = self.progress, self.recipe
        # Dropout is a function of where the run stands, so no generator has a state to keep.
        torch.manual_seed(hash((recipe.seed, p.step, len(p.rewinds), self.rank)) & 0x7FFF_FFFF_FFFF)
        self._tell_scale()
        if not self.engine:
            self.optimizer.zero_grad()
        sums = torch.zeros(3, dtype=torch.float64)
        finite = True
        for index, batch in enumerate(batches):
            last = index == self.passes - 1
            with self._synchronised(last):
                with self.amp.forward():
                    loss, task, kl = self._losses(batch, data_step, index)
                    anchor = self._reach_beyond_the_data(p.step * self.passes + index)
                # Processes and passes are averaged; the sum over all of them is what is wanted.
                total = loss * (self.world * self.passes / max(1.0, positions))
                penalty = self.penalty() if self.penalty is not None else torch.zeros((), device=self.device)
                total = total + penalty if anchor is None else total + penalty + anchor
                sums += torch.stack([task, kl, penalty.detach().double() / self.passes]).cpu()
                if self.engine and not self._everywhere(bool(torch.isfinite(total))):
                    finite = False
                    if self.penalty is not None:
                        self.penalty.drop_step()
                    break
                scaled = total if self.engine or self.amp.scale == 1 else total * self.amp.scale
                self.accelerator.backward(scaled)
        norm = self._finish_step(finite)
        return norm, self._sum(sums)

    def _losses(self, batch: TrainingBatch, data_step: int, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the objective (with its graph), the task's loss and the divergence, summed over positions."""
        mix = self.recipe.distillation
        mask = counted(batch).to(self.device)
        out = self.model(**arguments(self.stock, batch, self.device))
        zero = torch.zeros((), device=self.device)
        with torch.autocast(self.device.type, enabled=False):
            if batch.labels is None:
                if self.teacher is None:
                    raise UserError("an encoder has no task of its own; leave distillation on")
                kl = hidden_error(out.last_hidden_state[mask], self.teacher.outputs(batch))
                return kl, zero.double(), kl.detach().double()
            values = out.logits
            task = task_loss(values, batch.labels.to(self.device)) if mix.weight < 1 else zero
            kl = zero
            if mix.weight > 0 and self.teacher is not None:
                if self.tops is not None:
                    top = self.tops.read(data_step, index, self.device)
                    kl = divergence_from_top(values[mask], top, mix.temperature)
                else:
                    kl = divergence(values[mask], self.teacher.outputs(batch), mix.temperature)
        loss = task * (1 - mix.weight) + kl * mix.weight
        return loss, task.detach().double(), kl.detach().double()

    def _reach_beyond_the_data(self, turn: int) -> Tensor | None:
        """Run a batch of the built-in probe, for the penalty alone: the audit will run what no text contains.

        Its random ids are new each time, and other ones than the audit's: what is held fixed would be learnt by heart.
        Where processes have parts of a model, returns a zero whose backward goes through this forward as well: all must
        gather the same weights, and the penalty pulls in some of them only.
        """
        if self.penalty is None or not self.recipe.penalty.probe:
            return None
        # Every other batch is random ids, of which there are most.
        seed = self.recipe.seed + 1 + turn
        made = [b for b in probe_batches(self.stock.config, None, None, seed=seed) if not b.generate]
        batch = made[0 if turn % 2 == 0 else turn // 2 % len(made)]
        out = self.model(**probe_arguments(batch, self.device))
        if not self.sharded:
            return None
        anchor: Tensor = _Anchor.apply(out.last_hidden_state if batch.decoder_input_ids is None else out.logits)
        return anchor

    def _mixed(self, task: float, kl: float) -> float:
        share = self.recipe.distillation.weight if self.corpus.objective != "text" else 1.0
        return (task * (1 - share) if share < 1 else 0.0) + (kl * share if share > 0 else 0.0)

    @contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Only the last pass of a step exchanges gradients."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        if last or self.engine:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def _finish_step(self, finite: bool) -> float:
        """Step the optimizer where the gradient allows, and return its norm, infinite or NaN where the step was
        skipped."""
        if self.engine:
            norm = self._engine_norm(finite)
            if self.amp.loss_scale is not None:
                self.amp.loss_scale.update(overflowed=not norm < math.inf)
            return norm
        owned = [(p, g.get("scale", 1.0)) for g in self.optimizer.param_groups for p in g["params"]]
        norm = self.amp.finish([p for p, _ in owned], self.recipe.optimizer.clip_norm, [unit for _, unit in owned])
        if norm < math.inf:
            self.optimizer.step()
        return norm

    def _engine_norm(self, finite: bool) -> float:
        if not finite:
            self.optimizer.zero_grad()
            return math.inf
        # The engine has stepped inside the last backward; it says only afterwards whether it did.
        engine = self.accelerator.deepspeed_engine_wrapped.engine
        skipped, self._engine_skipped = getattr(self, "_engine_skipped", 0), int(engine.skipped_steps)
        norm = engine.get_global_grad_norm()
        return math.inf if self._engine_skipped > skipped else float(norm) if norm is not None else 0.0

    def _loss_scale(self) -> float | None:
        return None if self.amp.loss_scale is None else self.amp.scale

    # ---- what may go wrong ---------------------------------------------------------------------------------------

    def _went_back(self, seen: Mapping[str, Any]) -> bool:
        """Feed the detector, and where a spike begins go back to an earlier state past the batches around it."""
        if not seen["taken"]:
            return False
        p, stability = self.progress, self.recipe.stability
        pulled_until = self._pulled_until()
        for event in self.detector.update(p.step, seen["loss"], seen["loss_scale"]):
            if event.start <= pulled_until:
                # What the penalty moves costs some loss for a while; going back would only begin that again.
                continue
            if isinstance(event, Divergence) and event.end is None and len(p.rewinds) >= stability.rewinds:
                raise UserError(
                    f"the loss diverges from step {event.start} on{self._worst()}; lower schedule.learning_rate,"
                    " or begin from another checkpoint"
                )
            if not isinstance(event, (Spike, Divergence)) or event.end is not None:
                continue
            earlier = [step for step in self.states.steps() if step < event.start]
            if len(p.rewinds) >= stability.rewinds or not earlier:
                self.talk.say(f"Step {p.step}: the loss spikes; it has gone back as often as it may")
                continue
            self._rewind(earlier[-1], event.start)
            return True
        return False

    def _pulled_until(self) -> float:
        """The last step whose loss the penalty may have raised: a site was past its target shortly before."""
        p = self.progress
        seen = [] if self.penalty is None else self.penalty.observations().values()
        if any(o.excess_bits > 0 and o.weight > 0 for o in seen):
            p.pulled = p.step
        return -math.inf if p.pulled is None else p.pulled + PULLED_STEPS

    def _rewind(self, state: int, spike: int) -> None:
        now, rewinds, data_step = self.progress.step, list(self.progress.rewinds), self.stream.steps
        skipped, detector = list(self.progress.skipped), self.detector.state_dict()
        self._load(state)
        left_out = max(self.recipe.stability.skip_batches, data_step - self.stream.steps)
        self.stream.skip(left_out)
        self.detector.load_state_dict(detector)
        self.detector.resumed(state)
        self.progress.skipped = skipped
        note = {"spike": spike, "noticed": now, "back_to": state, "steps_of_data_left_out": left_out}
        self.progress.rewinds = [*rewinds, note]
        self.talk.say(f"Step {now}: the loss spikes at {spike}; back to step {state}, past {left_out} steps of data")
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            for later in [step for step in self.states.steps() if step > state]:
                self.states.remove(later)
        if self.log is not None:
            self.log.rewind(state)
            self.log.write(state, {"rewind": note})
        self._save()

    def _watch(self, seen: Mapping[str, Any]) -> None:
        """Stop a run that cannot succeed."""
        p, stability = self.progress, self.recipe.stability
        row = list(itertools.takewhile(lambda s: s[1]["step"] == p.step - s[0], enumerate(reversed(p.skipped))))
        if len(row) >= stability.overflow_stop:
            raise UserError(
                f"{len(row)} steps in a row overflow, down to a loss scale of {seen['loss_scale']:g}{self._worst()};"
                " rescale first, begin with precision [bf16, fp16], or lower the learning rate"
                if seen["loss_scale"] is not None
                else f"{len(row)} steps in a row have no finite gradient{self._worst()}; lower the learning rate"
            )
        if len(p.skipped) >= stability.nonfinite_stop:
            raise UserError(
                f"{len(p.skipped)} steps had no finite gradient{self._worst()}; look at their examples in log.jsonl,"
                " or raise stability.nonfinite_stop"
            )
        if self.penalty is None or self.recipe.penalty.form not in ("amax", "smooth-max"):
            return
        excess = max((o.excess_bits for o in self.penalty.observations().values()), default=0.0)
        if excess <= 0 or excess < p.least_excess - 0.01:
            p.least_excess, p.least_excess_step = min(excess, p.least_excess), p.step
        elif p.step - p.least_excess_step >= stability.stuck_stop:
            raise UserError(
                f"the penalty has not come down for {stability.stuck_stop} steps{self._worst()};"
                " raise schedule.learning_rate or penalty.dual_step, lower penalty.headroom_bits,"
                " or let the task go: distillation.weight 0"
            )

    def _worst(self) -> str:
        """Say which site is furthest past its target, if one is."""
        if self.penalty is None or not self.penalty.observations():
            return ""
        name, seen = self.penalty.worst()
        if seen.excess_bits <= 0:
            return ", though every activation is inside its target"
        return f", worst at {name} with {seen.amax:.4g} where {seen.target:.4g} is wanted"

    def _choose_precision(self) -> None:
        """Turn from bf16 to fp16 when it is time."""
        p, recipe = self.progress, self.recipe
        if len(self.precisions) == 1 or p.phase == 1:
            return
        due = recipe.schedule.bf16_steps
        if due is None and p.step == 0 and (self.fits or self.penalty is None):
            # There is nothing to wait for.
            p.phase, self.amp = 1, self._amp(1)
            return
        if self.penalty is not None and p.step:
            limits = self.penalty.observations().values()
            fits = all(o.excess_bits <= recipe.penalty.headroom_bits for o in limits)
            p.fitting = p.fitting + 1 if fits else 0
        if p.step >= due if due is not None else p.fitting >= FITTING_STEPS:
            p.phase = 1
            self.amp = self._amp(1)
            self.talk.say(f"Step {p.step}: fp16 from here on")

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Measure the held-out losses in the run's precision, and generated texts where the data have targets."""
        recipe, p = self.recipe, self.progress
        held = self.corpus.held_out(recipe.evaluation.examples, self.rank, self.world)
        if not held:
            return
        sums = torch.zeros(3, dtype=torch.float64)
        self.model.eval()
        if self.penalty is not None:
            self.penalty.detach()
        try:
            with torch.no_grad(), self.amp.whole_step():
                for batch in held:
                    sums += self._evaluate_batch(batch)
                texts = self._generate(held) if recipe.evaluation.generate else []
        finally:
            self.model.train()
            if self.penalty is not None:
                self.penalty.attach()
        task, kl, positions = (float(x) for x in self._sum(sums))
        found: dict[str, Any] = {"step": p.step, "held_out_loss": None, "held_out_divergence": None}
        if positions:
            found["held_out_loss"] = task / positions if self.corpus.objective != "text" else None
            found["held_out_divergence"] = kl / positions if self.teacher is not None else None
        if texts:
            found |= scores(texts)
        if self.penalty is not None and self.penalty.observations():
            name, seen = self.penalty.worst()
            found["worst_site"], found["worst_headroom_bits"] = name, recipe.penalty.headroom_bits - seen.excess_bits
        p.evaluations.append(found)
        if self.log is not None:
            self.log.write(p.step, {"evaluation": found})
        shown = ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in found.items() if isinstance(v, float))
        self.talk.say(f"Step {p.step}: {shown or 'no figures'}")

    def _evaluate_batch(self, batch: TrainingBatch) -> Tensor:
        mask = counted(batch).to(self.device)
        with self.amp.forward():
            out = self.model(**arguments(self.stock, batch, self.device))
        task = kl = torch.zeros((), device=self.device)
        if batch.labels is not None:
            task = task_loss(out.logits, batch.labels.to(self.device))
            if self.teacher is not None:
                kl = divergence(out.logits[mask], self.teacher.outputs(batch), 1.0)
        elif self.teacher is not None:
            kl = hidden_error(out.last_hidden_state[mask], self.teacher.outputs(batch))
        return torch.stack([task.double(), kl.double(), mask.sum().double()]).cpu()

    def _generate(self, held: Sequence[TrainingBatch]) -> list[tuple[str, str]]:
        """Return (generated, wanted) texts of all processes."""
        evaluation, tokenizer = self.recipe.evaluation, self.corpus.tokenizer
        pairs: list[tuple[str, str]] = []
        for batch in held:
            if batch.targets is None:
                return []
            with self.amp.forward():
                made = self.accelerator.unwrap_model(self.model).generate(
                    input_ids=batch.input_ids.to(self.device),
                    attention_mask=batch.attention_mask.to(self.device),
                    max_new_tokens=evaluation.max_new_tokens,
                    num_beams=evaluation.beams,
                    do_sample=False,
                    synced_gpus=self.sharded,
                )
            texts = tokenizer.batch_decode(made, skip_special_tokens=True)
            pairs += zip(texts[: len(batch.examples)], batch.targets, strict=False)
        if self.world > 1:
            from accelerate.utils import gather_object

            pairs = [tuple(pair) for pair in gather_object(pairs)]
        return pairs

    # ---- states --------------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Go on from the last whole state, if there is one."""
        steps = self.states.steps()
        if steps:
            self._load(steps[-1])
            self.talk.say(f"Continuing from step {steps[-1]}")
        if self.log is not None:
            self.log.rewind(steps[-1] if steps else -1)

    def _save(self) -> None:
        """Write a whole state, together."""
        step = self.progress.step
        main = self.accelerator.is_main_process
        if main:
            self.states.begin(step)
        self.accelerator.wait_for_everyone()
        work = self.states.path / f".step-{step:08d}.partial"
        state: dict[str, Any] = {
            "progress": vars(self.progress),
            "stream": self.stream.state_dict(),
            "amp": self.amp.state_dict(),
            "penalty": None if self.penalty is None else self.penalty.state_dict(),
            "detector": self.detector.state_dict(),
            "recipe": self.recipe.describe(),
        }
        if self.sharded:
            state["untouched"] = not self.engine and not self.optimizer.state
            self.accelerator.save_state(str(work / "accelerate"))
            self._forget_if(state["untouched"])
        elif main:
            tensors = {name: p.detach().cpu().contiguous() for name, p in self.stock.named_parameters()}
            save_file(tensors, work / "model.safetensors")
            state["optimizer"] = self.optimizer.state_dict()
        if main:
            write_state(work, state)
        self.accelerator.wait_for_everyone()
        if main:
            self.states.commit(step)
        self.accelerator.wait_for_everyone()

    def _forget_if(self, untouched: bool) -> None:
        """Empty an optimizer that has not stepped: torch fills it for a sharded state by a step of its own, which the
        bias correction would count."""
        if untouched:
            self.optimizer.state.clear()

    def _load(self, step: int) -> None:
        """Take over a state."""
        folder = self.states.of(step)
        state = read_state(folder)
        refuse_other_recipe(state["recipe"], self.recipe, folder)
        self.progress = Progress(**state["progress"])
        self.amp = self._amp(self.progress.phase)
        self.amp.load_state_dict(state["amp"])
        self.stream.load_state_dict(state["stream"])
        self.detector.load_state_dict(state["detector"])
        if self.penalty is not None:
            self.penalty.load_state_dict(state["penalty"])
        if self.sharded:
            self.accelerator.load_state(str(folder / "accelerate"))
            self._forget_if(state["untouched"])
            if self.engine:
                # It counts from the beginning of the run.
                self._engine_skipped = int(self.accelerator.deepspeed_engine_wrapped.engine.skipped_steps)
            return
        tensors = load_file(folder / "model.safetensors")
        with torch.no_grad():
            for name, parameter in self.stock.named_parameters():
                parameter.copy_(tensors[name])
        self.optimizer.load_state_dict(state["optimizer"])

    def weights(self) -> dict[str, Tensor]:
        """Return the whole trained model's parameters on the CPU, to the first process; every one must call it."""
        # Under ZeRO-3 and FSDP the others get nothing.
        gathered = self.accelerator.get_state_dict(self.model) or {}
        whole = {name: t.detach().cpu() for name, t in gathered.items()}
        if self.engine:
            from deepspeed.utils import safe_get_full_fp32_param

            # The engine's model may be in 16 bits; its optimizer has the fp32 copy that was trained.
            for name, parameter in self.stock.named_parameters():
                copy = safe_get_full_fp32_param(parameter)
                if copy is not None:
                    whole[name] = copy.detach().cpu()
        return whole

    # ---- processes -----------------------------------------------------------------------------------------------

    def _sum(self, values: Tensor) -> Tensor:
        if self.world == 1:
            return values
        moved = values.to(self.device, torch.float32 if self.device.type == "mps" else values.dtype)
        torch.distributed.all_reduce(moved)
        return moved.cpu()

    def _everywhere(self, condition: bool) -> bool:
        return float(self._sum(torch.tensor(float(condition)))) == self.world

    def _fill_tops(self) -> None:
        """Run the teacher over all the data of the run beforehand, and let go of it."""
        assert self.tops is not None and self.teacher is not None and self.recipe.distillation.top_k is not None
        steps = self.recipe.schedule.steps + self.recipe.stability.rewinds * self.recipe.stability.skip_batches
        stream = self.corpus.stream(self.rank, self.world)
        with self.talk.step(f"Computing the teacher's {self.recipe.distillation.top_k} best logits") as advance:
            for step in range(steps):
                if self.tops.has(step):
                    stream.skip(1)
                    continue
                batches = [next(stream) for _ in range(self.passes)]
                self.tops.write(step, [self.teacher.top(batch, self.recipe.distillation.top_k) for batch in batches])
                advance(step + 1, steps)


class _Anchor(torch.autograd.Function):
    """A zero whose gradient is a tensor of zeros, whatever the values are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = x.shape, x.dtype, x.device
        return torch.zeros((), device=x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device)


def probe_arguments(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Return what to call a stock model with for a batch of the probe."""
    given: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if batch.decoder_input_ids is not None:
        given["decoder_input_ids"] = batch.decoder_input_ids
        given["decoder_attention_mask"] = batch.decoder_attention_mask
        given["use_cache"] = False
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in given.items()}


@contextmanager
def whole_embeddings(student: Any) -> Iterator[None]:
    """Keep accelerate from giving the embedding an FSDP group of its own, which torch refuses where encoder, decoder
    and head share its weight; without one all of them are in the root's."""
    student.get_input_embeddings = student.get_output_embeddings = lambda: None
    try:
        yield
    finally:
        del student.get_input_embeddings, student.get_output_embeddings


def typical_magnitude(parameter: Tensor) -> float:
    """Return the median of |w| of a tensor that is not all zeros, which a few outlier rows or channels do not move;
    the root mean square where more than half of it is zero."""
    size = parameter.detach().float().abs()
    median = float(size.median())
    return median if median > 0 else float(size.square().mean().sqrt()) or 1.0


def make_optimizer(recipe: Recipe, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW for ``parameters``: torch's for fp32 ones, this package's for weights kept in 16 bits."""
    given = recipe.optimizer
    options = {
        "lr": recipe.schedule.learning_rate,
        "betas": given.betas,
        "eps": given.epsilon,
        "weight_decay": given.weight_decay,
    }
    # Norm gains and biases are not decayed: they are scales, not directions.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if given.relative:
        # A group for each tensor; the scale is kept in every state with the other options of a group. Gradients go with
        # its inverse, so epsilon does as well; and decay, which the scaled learning rate multiplies, is undone.
        groups = [
            {
                **group,
                "params": [p],
                "scale": scale,
                "eps": given.epsilon / scale,
                "weight_decay": group.get("weight_decay", given.weight_decay) / scale,
            }
            for group in groups
            for p, scale in ((p, typical_magnitude(p)) for p in group["params"])
        ]
    if given.weights == "fp32" and given.moments == "fp32":
        return torch.optim.AdamW(groups, **options)  # type: ignore[arg-type]
    from .optimizer import AdamW

    moments = {"fp32": "float32", "bf16": "bfloat16", "8bit": "8bit"}[given.moments]
    exact = {"rounding": given.rounding, "moments": moments, "seed": recipe.seed, "compile": recipe.compile or None}
    return AdamW(groups, **options, **exact)  # type: ignore[arg-type]


def precisions_of(recipe: Recipe, accelerator: Any) -> tuple[str, ...]:
    """Return the precisions of the run, in order: the recipe's, or where it leaves them out those of DeepSpeed's
    configuration.

    Raises UserError where the two disagree.
    """
    if str(accelerator.distributed_type.value) != "DEEPSPEED":
        return recipe.precision
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    cast = config.get("torch_autocast", {})
    has = {
        "fp16": bool(config.get("fp16", {}).get("enabled") is True)
        or (bool(cast.get("enabled")) and cast.get("dtype") == "float16"),
        "bf16": bool(config.get("bf16", {}).get("enabled") is True)
        or (bool(cast.get("enabled")) and cast.get("dtype") == "bfloat16"),
    }
    found = next((name for name, there in has.items() if there), "fp32")
    if "precision" not in recipe.model_fields_set:
        return (found,)
    if len(recipe.precision) > 1:
        raise UserError("precision [bf16, fp16] cannot change inside a DeepSpeed run; make it two recipes")
    wanted = recipe.precision[0]
    if found != wanted:
        raise UserError(
            f"the recipe's precision is {wanted} and DeepSpeed's configuration is for {found};"
            f" set precision: {found}, or change fp16, bf16 or torch_autocast in its JSON"
        )
    return (found,)


def configure_engine(accelerator: Any, recipe: Recipe) -> None:
    """Complete DeepSpeed's configuration from the recipe."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = recipe.data.batch_size
    config["gradient_accumulation_steps"] = recipe.data.gradient_accumulation
    config["gradient_clipping"] = recipe.optimizer.clip_norm
    if config.get("zero_optimization", {}).get("stage") == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


CHANGEABLE = ("out", "logging", "checkpointing", "evaluation", "source")
"""Parts of a recipe that may change when a run continues: they have no part in its bits."""


def refuse_other_recipe(before: Mapping[str, Any], recipe: Recipe, folder: Path) -> None:
    """Raise UserError where a state was written under a recipe that would have given other bits."""
    now = recipe.describe()
    changed = [key for key in now if key not in CHANGEABLE and before.get(key) != now[key]]
    if changed:
        raise UserError(
            f"{folder.parent}: holds a run with another {changed[0]}; restore the recipe, give another"
            " checkpointing.folder, or remove that one to start anew"
        )


def headroom_by_layer(penalty: ActivationPenalty) -> dict[str, float]:
    """Return the least headroom of each layer's sites in bits: log2(limit / amax)."""
    least: dict[str, float] = {}
    for name, seen in penalty.observations().items():
        layer = layer_of(name)
        bits = math.log2(FP16_MAX / seen.amax) if 0 < seen.amax < math.inf else (40.0 if seen.amax == 0 else -40.0)
        least[layer] = min(least.get(layer, math.inf), bits)
    return least


def layer_of(site: str) -> str:
    """Return the part of a site's name up to its layer's number: ``encoder.block.3``, or its first module."""
    parts = site.partition(":")[0].split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]


def scores(texts: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return ROUGE-1, -2, -L (F1, in 0 to 1) and BLEU (0 to 100) of (generated, wanted) texts; none where the packages
    are not installed."""
    try:
        import sacrebleu
        from rouge_score import rouge_scorer
    except ImportError:
        return {}
    names = ("rouge1", "rouge2", "rougeL")
    scorer = rouge_scorer.RougeScorer(list(names), use_stemmer=False)
    found = [scorer.score(wanted, made) for made, wanted in texts]
    result = {name: sum(each[name].fmeasure for each in found) / len(found) for name in names}
    bleu = sacrebleu.corpus_bleu([made for made, _ in texts], [[wanted for _, wanted in texts]])
    return result | {"bleu": float(bleu.score)}
