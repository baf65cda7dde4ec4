"""One process or many: what several processes, FSDP and DeepSpeed make different about a step and a state.

Processes hold the whole model each, or parts of it (FSDP, DeepSpeed's ZeRO). DeepSpeed has an engine of its own: it
takes the optimizer's step inside the last backward of a step, and says only afterwards whether it did.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from .recipe import Recipe


class Processes:
    """The processes of a run, of which this one is ``rank`` of ``world``; ``main`` is the first.

    accelerator: an ``accelerate.Accelerator``. ``engine``: DeepSpeed takes the steps. ``sharded``: each process has
    parts of the model, with ``engine`` or without.
    """

    def __init__(self, accelerator: Any) -> None:
        """Look at the processes that a launcher started."""
        kind = str(accelerator.distributed_type.value)
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.engine = kind == "DEEPSPEED"
        self.sharded = self.engine or kind == "FSDP"
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.main: bool = accelerator.is_main_process
        self._skipped = 0

    @property
    def _engine(self) -> Any:
        return self.accelerator.deepspeed_engine_wrapped.engine

    @property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.accelerator.state.deepspeed_plugin.deepspeed_config
        return config

    @property
    def parts(self) -> int | None:
        """In how many parts a state is written; None where it is written whole."""
        return self.world if self.sharded else None

    @property
    def offloads(self) -> bool:
        """Whether the engine keeps the optimizer in the machine's memory and takes its steps there."""
        if not self.engine:
            return False
        zero = self._config.get("zero_optimization", {})
        return zero.get("offload_optimizer", {}).get("device", "none") != "none"

    def prepare(self, model: Any, optimizer: Any, recipe: Recipe) -> tuple[Any, Any]:
        """Return model and optimizer as the processes run them.

        Raises UserError for an optimizer of whole weights where each process has parts of them.
        """
        if self.sharded and recipe.optimizer.offload:
            raise UserError(
                "optimizer.offload is for whole weights; leave it out, and launch with"
                " launch/accelerate/zero2-offload.yaml, or for FSDP with --fsdp_offload_params true"
            )
        replaces = self.offloads and self._config.get("zero_force_ds_cpu_optimizer", True)
        if replaces and not isinstance(optimizer, torch.optim.Adam):  # which torch's AdamW is as well
            raise UserError(
                "DeepSpeed would put plain Adam in the place of this recipe's optimizer; set"
                ' "zero_force_ds_cpu_optimizer": false in its JSON, or weights and moments to fp32'
            )
        if self.engine:
            configure_engine(self.accelerator, recipe)
        with whole_embeddings(model):
            model, optimizer = self.accelerator.prepare(model, optimizer)
        return model, optimizer

    def wait(self) -> None:
        """Wait until every process is here."""
        self.accelerator.wait_for_everyone()

    # ---- a step --------------------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over all processes, on the CPU."""
        if self.world == 1:
            return values
        moved = values.to(self.device, torch.float32 if self.device.type == "mps" else values.dtype)
        torch.distributed.all_reduce(moved)
        return moved.cpu()

    def everywhere(self, condition: bool) -> bool:
        """Return whether ``condition`` holds in every process."""
        return float(self.sum(torch.tensor(float(condition)))) == self.world

    def gather(self, items: list[Any]) -> list[Any]:
        """Return the items of all processes."""
        if self.world == 1:
            return items
        from accelerate.utils import gather_object

        return list(gather_object(items))

    @contextmanager
    def synchronised(self, model: Any, last: bool) -> Iterator[None]:
        """Let only the last pass of a step exchange gradients."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        if last or self.engine:
            yield
        else:
            with self.accelerator.no_sync(model):
                yield

    def tell_scale(self, scale: float) -> None:
        """Make the engine, where there is one, use our loss scale.

        Under torch_autocast it has a GradScaler that its norm and its clipping know nothing of, so that every gradient
        is clipped as if it were as large as the scale, and that an overflow never reaches, so that it never falls.
        """
        if self.engine:
            self._engine.optimizer.torch_autocast_gradscaler = None
            self._engine.optimizer.override_loss_scale(scale)

    def engine_norm(self) -> float:
        """Return the gradient's norm of the step that the engine has taken in the last backward, inf if it did not."""
        skipped, self._skipped = self._skipped, int(self._engine.skipped_steps)
        norm = self._engine.get_global_grad_norm()
        return float("inf") if self._skipped > skipped else float(norm) if norm is not None else 0.0

    # ---- a state -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write model and optimizer, of which each process has its parts."""
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        """Take over what ``save`` wrote."""
        self.accelerator.load_state(str(folder))
        if self.engine:
            # It counts from the beginning of the run.
            self._skipped = int(self._engine.skipped_steps)

    def whole_weights(self, model: Any, stock: Any) -> dict[str, Tensor]:
        """Return the whole model's parameters on the CPU, to the first process; every one must call it.

        stock: the model before it was prepared.
        """
        # Under ZeRO-3 and FSDP the others get nothing.
        gathered = self.accelerator.get_state_dict(model) or {}
        whole = {name: t.detach().cpu() for name, t in gathered.items()}
        if self.engine:
            from deepspeed.utils import safe_get_full_fp32_param

            # The engine's model may be in 16 bits; its optimizer has the fp32 copy that was trained.
            for name, parameter in stock.named_parameters():
                copy = safe_get_full_fp32_param(parameter)
                if copy is not None:
                    whole[name] = copy.detach().cpu()
        return whole


@contextmanager
def whole_embeddings(student: Any) -> Iterator[None]:
    """Keep accelerate from giving the embedding an FSDP group of its own, which torch refuses where encoder, decoder
    and head share its weight; without one all of them are in the root's."""
    student.get_input_embeddings = student.get_output_embeddings = lambda: None
    try:
        yield
    finally:
        del student.get_input_embeddings, student.get_output_embeddings


def in_parts() -> bool:
    """Return whether the launcher has DeepSpeed or FSDP give each process a part of the weights."""
    asked = (os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() for name in ("DEEPSPEED", "FSDP"))
    return any(value in ("1", "true") for value in asked)


def weights_in_parts(accelerator: Any) -> bool:
    """Return whether each of several processes has a part of every weight: under FSDP and ZeRO-3."""
    kind = str(accelerator.distributed_type.value)
    stage = accelerator.state.deepspeed_plugin.zero_stage if kind == "DEEPSPEED" else 0
    return accelerator.num_processes > 1 and (kind == "FSDP" or stage == 3)


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
