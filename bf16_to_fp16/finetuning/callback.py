"""Use the activation penalty in any ``transformers.Trainer``: rescale, penalise, log the headroom, convert.

A callback cannot change a Trainer's loss or logged values, so ``Fp16Callback`` wraps ``compute_loss`` and ``log``."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..checkpoint.staging import check_out, scratch
from ..conversion.convert import Conversion, convert
from ..conversion.made_safe import MadeSafe
from ..conversion.make_safe import make_fp16_safe
from ..errors import UserError
from ..numerics import FP16_MAX
from ..progress import Progress
from .penalty import ActivationPenalty

STATE = "fp16_penalty"  # what a trainer's state has of the penalty, from which a resumed run goes on


class Fp16Callback(TrainerCallback):
    """Adds the activation penalty to a trainer's loss, logs the headroom, and converts the trained model.

    ``make_fp16_safe`` rescales the trainer's model at once; the model's fp32 outputs stay the same. Logs get the mean
    ``penalty``, and ``headroom_bits``: the least log2(limit / largest value) of any site since the last log. After
    training, the first process undoes the rescaling in a copy of the model and converts the copy to ``out``. ``result``
    is what ``convert`` returned.

    out: None to skip the conversion. headroom_bits: the distance from fp16's limit that the penalty enforces at every
    site. rescale: False to leave the model's scale, as for a model of no known family. force: whether to replace an
    existing ``out``. options: further arguments of ``convert``.

    Raises UserError, before any change, for an ``out`` that cannot be written and for a model not whole in one process
    (FSDP, DeepSpeed, DataParallel). ``make_fp16_safe`` and ``ActivationPenalty`` can raise it too."""

    def __init__(
        self,
        trainer: Any,
        out: str | Path | None = None,
        *,
        headroom_bits: float = 1.0,
        rescale: bool = True,
        force: bool = False,
        **options: Any,
    ) -> None:
        self.trainer, self.out, self.force, self.options = trainer, out, force, options
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.args.n_gpu > 1:
            raise UserError(
                "the trainer divides the model, or runs copies of it in one process; launch one process for each card"
                " (torchrun, accelerate launch), or finetune with bf16-to-fp16 launch"
            )
        if out is not None:
            check_out(Path(out), None, force=force)
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.set_attn_implementation("eager")  # whose scores can be seen
        self.safe: MadeSafe | None = make_fp16_safe(model) if rescale else None
        self.penalty = ActivationPenalty(model, headroom_bits=headroom_bits)
        self.result: Conversion | None = None
        self._least, self._sum, self._calls = math.inf, 0.0, 0
        self._compute_loss, self._log = trainer.compute_loss, trainer.log
        trainer.compute_loss, trainer.log = self._penalised, self._with_headroom

    def _penalised(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        loss, outputs = self._compute_loss(model, inputs, return_outputs=True, **given)
        if model.training and torch.is_grad_enabled():
            passes = int(getattr(self.trainer, "current_gradient_accumulation_steps", 1))
            self.penalty.accumulation = passes  # fewer in an epoch's last step
            penalty = self.penalty()
            self._sum, self._calls = self._sum + float(penalty.detach()), self._calls + 1
            trainer, of_step = self.trainer, getattr(self.trainer, "loss_is_scaled_for_ga", None)
            if of_step is None:
                of_items = trainer.model_accepts_loss_kwargs and given.get("num_items_in_batch") is not None
                of_step = of_items or trainer.compute_loss_func is not None
            # Where the loss is taken for one of the whole step, the trainer does not divide it by the passes.
            loss = loss + (penalty / passes if of_step else penalty)
        return (loss, outputs) if return_outputs else loss

    def _with_headroom(self, logs: dict[str, float], *rest: Any, **more: Any) -> None:
        if "loss" in logs and self._calls:
            logs |= {"penalty": self._sum / self._calls}
            logs |= {"headroom_bits": self._least} if self._least < math.inf else {}
            self._least, self._sum, self._calls = math.inf, 0.0, 0
        self._log(logs, *rest, **more)

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        stored = state.stateful_callbacks.get(STATE)
        if stored is not None:
            self.penalty.load_state_dict(stored)
        elif state.global_step and self.safe is not None and self.safe.changed:
            raise UserError(
                f"the checkpoint of step {state.global_step} was saved without this callback, so it cannot be resumed;"
                " begin a new run with the weights of that checkpoint"
            )
        self.penalty.attach()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        # Under no callback's name: the trainer would make one anew from what it finds under that.
        state.stateful_callbacks[STATE] = self.penalty.state_dict()
        if self.penalty.observations():
            _, seen = self.penalty.worst()
            self._least = min(self._least, math.log2(FP16_MAX / seen.target) - seen.excess_bits)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.penalty.detach()
        if self.out is None or not state.is_world_process_zero:
            return
        with scratch(Path(self.out)) as beside:
            self._save(beside / "trained")
            self.result = convert(beside / "trained", self.out, force=self.force, **self.options)
        Progress().say(f"{self.out}: {self.result.report['verdict']}, {self.result.report['proof']}")

    def _save(self, folder: Path) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        model.zero_grad(set_to_none=True)  # room for the copy
        copied = copy.deepcopy(model).cpu()
        if self.safe is not None:
            self.safe.undo(copied)
        copied.save_pretrained(folder)
        if (processing := getattr(self.trainer, "processing_class", None)) is not None:
            processing.save_pretrained(folder)
