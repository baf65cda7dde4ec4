"""How a training step and a saved state differ between one process, several, FSDP and DeepSpeed. DeepSpeed's engine
takes the optimizer's step inside the last backward."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..devices import computes_in_bf16, find_device
from ..environment import HOW_TO_TRAIN
from ..errors import UserError
from .mixed_precision import CLIP_NORM, MixedPrecision
from .recipe import Recipe


class Processes:
    """The processes of a training run; this one has the number ``rank`` of ``world``."""

    def __init__(self, accelerator: Any) -> None:
        kind = str(accelerator.distributed_type.value)
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.engine = kind == "DEEPSPEED"  # whether DeepSpeed takes the steps
        self.sharded = self.engine or kind == "FSDP"  # whether each process has only parts of the model
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.main: bool = accelerator.is_main_process  # whether this is the first
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
        """The number of processes that write a training state together; None if the first process writes it alone."""
        return self.world if self.sharded else None

    @property
    def offloads(self) -> bool:
        if not self.engine:
            return False
        zero = self._config.get("zero_optimization", {})
        return zero.get("offload_optimizer", {}).get("device", "none") != "none"

    def prepare(self, model: Any, optimizer: Any, recipe: Recipe, calls: int) -> tuple[Any, Any]:
        replaces = self.offloads and self._config.get("zero_force_ds_cpu_optimizer", True)
        if replaces and not isinstance(optimizer, torch.optim.Adam):  # which torch's AdamW is as well
            raise UserError(
                "DeepSpeed would put plain Adam in the place of this recipe's optimizer; set"
                ' "zero_force_ds_cpu_optimizer": false in its JSON'
            )
        if self.engine:
            config, zero = self._config, self._config.get("zero_optimization", {})
            config["train_micro_batch_size_per_gpu"] = recipe.data.share(self.world).batch_size
            config["gradient_accumulation_steps"] = calls
            config["gradient_clipping"] = CLIP_NORM
            if zero.get("stage") == 3:
                zero["stage3_gather_16bit_weights_on_model_save"] = True
        self.accelerator.gradient_accumulation_steps = calls
        # accelerate would give the embedding an FSDP group of its own, which torch refuses where encoder, decoder and
        # head share its weight.
        model.get_input_embeddings = model.get_output_embeddings = lambda: None
        prepared, optimizer = self.accelerator.prepare(model, optimizer)
        del model.get_input_embeddings, model.get_output_embeddings
        return prepared, optimizer

    # ---- a step --------------------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        if self.world == 1:
            return values
        moved = values.to(self.device, torch.float32 if self.device.type == "mps" else values.dtype)
        torch.distributed.all_reduce(moved)
        return moved.cpu()

    def everywhere(self, condition: bool) -> bool:
        return float(self.sum(torch.tensor(float(condition)))) == self.world

    @contextmanager
    def synchronised(self, model: Any, last: bool) -> Iterator[None]:
        """Let processes exchange gradients only in a step's ``last`` backward. Sharded models exchange them in each,
        because whole gradients would not fit."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        if last or self.sharded:
            yield
        else:
            with self.accelerator.no_sync(model):
                yield

    def tell_scale(self, scale: float) -> None:
        """Make DeepSpeed's engine, if it is used, take this package's loss scale. Raises UserError for a version of
        DeepSpeed other than 0.19."""
        if not self.engine:
            return
        optimizer = self._engine.optimizer
        if not hasattr(optimizer, "torch_autocast_gradscaler"):
            raise UserError("this version of DeepSpeed does not let the loss scale be set; install deepspeed 0.19")
        optimizer.torch_autocast_gradscaler = None  # which would divide the gradients again, unseen by the engine
        optimizer.override_loss_scale(scale)

    def finish_step(self, finite: bool, mixed_precision: MixedPrecision, optimizer: Any) -> float:
        """Take the optimizer's step unless the gradient overflowed; return the gradient's norm, inf or NaN after an
        overflow. finite: whether all losses were finite, which is used only with DeepSpeed."""
        if self.engine:
            norm = math.inf
            if finite:
                skipped, self._skipped = self._skipped, int(self._engine.skipped_steps)
                of_engine = self._engine.get_global_grad_norm()
                norm = norm if self._skipped > skipped else 0.0 if of_engine is None else float(of_engine)
            else:
                # The step ended before its last backward. accelerate's ``zero_grad`` would keep the engine's gradients,
                # and the next step would add to them. The names are those of DeepSpeed 0.19.
                engine = self._engine.optimizer
                engine.zero_grad()
                engine.averaged_gradients.clear()
                if self._config.get("zero_optimization", {}).get("stage") != 3:  # which begins to count anew by itself
                    engine.all_grad_tensors.clear()
                    engine.micro_step_id = -1
            if mixed_precision.loss_scale is not None:
                mixed_precision.loss_scale.update(overflowed=not norm < math.inf)
            return norm
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        units = [group.get("scale", 1.0) for group in groups for _ in group["params"]]
        norm = mixed_precision.finish(parameters, units)
        if norm < math.inf:
            with _disable_current_modes():  # which an optimizer that compiles its step cannot trace
                optimizer.step()
        return norm

    # ---- a state -------------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))
        if self.engine:
            # It counts from the beginning of the run.
            self._skipped = int(self._engine.skipped_steps)

    def whole_weights(self, model: Any, stock: Any) -> dict[str, Tensor]:
        """Return the full parameters of ``model`` on the CPU in the first process; others can get {}. All processes
        must call it. stock: the unwrapped model."""
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


def begun_by() -> tuple[str, ...]:
    """Return the words before the recipe in the command that started this process."""
    if (line := os.environ.get("BF16_TO_FP16_BEGUN")) is not None:
        return tuple(shlex.split(line))
    count = os.environ.get("WORLD_SIZE", "1")
    by_another = ("accelerate", "launch", "--num_processes", count, "-m", "bf16_to_fp16", "finetune")
    return by_another if count != "1" else ("bf16-to-fp16", "finetune")


def make_accelerator(recipe: Recipe) -> Any:
    """Return this process's accelerator with mixed precision "no": this package does autocast and loss scaling."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import parse_flag_from_env

    place = find_device(recipe.device)
    on_cpu = place.type == "cpu"
    if place.type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)  # which is then the one that "cuda" means
    engine = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    # Given to a single process it would look for a group that nobody made.
    group = InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=timedelta(hours=2))
    # Whatever the launcher says: fp16 on a CPU would otherwise quietly be fp32, and elsewhere be applied twice.
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    # The recipe decides, whatever a launcher's configuration says.
    passes = recipe.data.share(wanted).gradient_accumulation
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(passes)
    if engine and find_spec("deepspeed") is None:
        raise UserError(f"deepspeed is not installed; {HOW_TO_TRAIN}, or run launch again for a plan without it")
    if engine and on_cpu:
        import deepspeed.ops

        # A module that it would first compile, with a compiler that may be missing, and announce among data; gloo does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # With DeepSpeed cpu=True would quietly turn it off.
    device = {} if engine else {"cpu": on_cpu}
    accelerator = Accelerator(
        mixed_precision="no",
        gradient_accumulation_steps=passes,
        kwargs_handlers=[group] if wanted > 1 or engine else [],
        log_with=None if recipe.wandb == "off" else "wandb",
        **device,
    )
    if engine:
        # Under ZeRO-3 stock loading would else cut every model into parts, the teacher's and the audited one's too, and
        # wait for processes that load nothing.
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    if accelerator.num_processes != wanted:
        raise UserError(
            f"{wanted} processes were launched, but accelerate counts {accelerator.num_processes};"
            " launch with `bf16-to-fp16 launch`, or with `accelerate launch --multi_gpu`"
        )
    return accelerator


def weights_in_parts(accelerator: Any) -> bool:
    kind = str(accelerator.distributed_type.value)
    stage = accelerator.state.deepspeed_plugin.zero_stage if kind == "DEEPSPEED" else 0
    return accelerator.num_processes > 1 and (kind == "FSDP" or stage == 3)


def precisions_of(recipe: Recipe, accelerator: Any) -> tuple[str, str]:
    """Return a run's precision until the model fits fp16, and its precision after that. With DeepSpeed, both are the
    recipe's. Raises UserError if DeepSpeed is configured for another precision."""
    wanted = recipe.precision
    if str(accelerator.distributed_type.value) != "DEEPSPEED":
        return "bf16" if wanted == "fp16" and computes_in_bf16(accelerator.device) else "fp32", wanted
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    cast = config.get("torch_autocast", {})
    dtype = str(cast.get("dtype")) if cast.get("enabled") else "float32"
    in_16_bits = any(config.get(name, {}).get("enabled") is True for name in ("fp16", "bf16"))
    if in_16_bits or dtype != {"fp16": "float16"}.get(wanted, "float32"):
        raise UserError(
            f"DeepSpeed's JSON is not for precision {wanted}; remove fp16 and bf16, which keep weights in 16 bits, and"
            f" {'enable torch_autocast with dtype float16' if wanted == 'fp16' else 'remove torch_autocast'}"
        )
    return wanted, wanted
