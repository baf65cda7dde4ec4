"""From a recipe and cards to the line that launches it: the configuration of accelerate whose sum fits them.

``CONFIGS`` is what the files of ``launch/`` say. The fastest that fits is taken: every process with everything (DDP, in
which bounds are held as well), then shares of optimizer and gradients (ZeRO-2), of all (ZeRO-3; FSDP2 without
DeepSpeed), then the optimizer in the machine's memory.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..cards import architecture, cards
from ..checkpoint.contents import read_config
from ..checkpoint.fetching import fetched
from ..checkpoint.files import read_json
from ..checkpoint.places import local_source, subfolder_of
from ..checkpoint.staging import replacing
from ..environment import how_to_install
from ..errors import UserError
from ..families.known import stock_class
from ..quiet import quiet
from ..run.stock import load_config
from ..system import available_memory
from ..wording import counted
from . import memory
from .recipe import Recipe
from .shipped import FOLDER

ASSUMED = 16  # GiB of a card that is not there: the smaller V100's
USABLE = 0.95  # share of a card's memory; the rest is lost between what is allocated
LESS = "give a smaller data.batch_size, shorter texts, gradient_checkpointing: true, or more or larger cards"
WRITTEN = "# Written by `bf16-to-fp16 launch`, which writes it anew.\n"

_EVERY: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "machine_rank": 0,
    "use_cpu": False,
    "dynamo_backend": "NO",
    "main_training_function": "main",
    "enable_cpu_affinity": False,
    "debug": False,
}
_SEVERAL: dict[str, Any] = {"rdzv_backend": "static", "same_network": True}
# Autocast and the loss scale are the recipe's; with DeepSpeed its JSON's, which accelerate wants said once.
_OURS: dict[str, Any] = {"mixed_precision": "no"}
_FSDP: dict[str, Any] = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_offload_params": False,
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_activation_checkpointing": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "single": {"distributed_type": "NO", **_OURS},
    "ddp": {"distributed_type": "MULTI_GPU", "gpu_ids": "all", **_SEVERAL, **_OURS},
    "zero2": {"distributed_type": "DEEPSPEED", **_SEVERAL},
    "zero3": {"distributed_type": "DEEPSPEED", **_SEVERAL},
    "fsdp": {"distributed_type": "FSDP", "fsdp_config": _FSDP, **_SEVERAL, **_OURS},
    "zero2-offload": {"distributed_type": "DEEPSPEED", **_SEVERAL},
    "zero3-offload": {"distributed_type": "DEEPSPEED", **_SEVERAL},
}
"""What a configuration of accelerate says beside ``_EVERY``, the fastest first."""

IN_WORDS = {
    "single": "one process",
    "ddp": "DDP",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp": "FSDP2",
    "zero2-offload": "ZeRO-2 with the optimizer in the machine's memory",
    "zero3-offload": "ZeRO-3 with weights and optimizer in the machine's memory",
}


def accelerate_config(kind: str, processes: int, deepspeed: str | None = None) -> dict[str, Any]:
    given = _EVERY | CONFIGS[kind] | {"num_processes": processes}
    if kind.startswith("zero"):
        given["deepspeed_config"] = {
            "deepspeed_config_file": deepspeed,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": False,
        }
    return given


def deepspeed_config(kind: str, precision: str = "fp16") -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": int(kind[4]),
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": memory.BUCKET,
    }
    if kind.startswith("zero2"):
        zero["reduce_scatter"] = True
    else:
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = memory.LIVE
        zero["stage3_prefetch_bucket_size"] = memory.AHEAD
    given: dict[str, Any] = {"zero_optimization": zero}
    if kind.endswith("offload"):
        in_memory = {"device": "cpu", "pin_memory": True}
        zero["offload_optimizer"] = in_memory
        if kind == "zero3-offload":
            zero["offload_param"] = dict(in_memory)
        given["zero_force_ds_cpu_optimizer"] = False
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(precision)
    return ({"torch_autocast": {"enabled": True, "dtype": dtype}} if dtype else {}) | given


# ---- which of them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a launch runs: so many processes, with so many bytes each, on cards or on the CPU.

    ``said``: in words. ``bf16``: whether it computes in bf16.
    """

    processes: int
    memory: float
    said: str
    on_gpu: bool = True
    bf16: bool = False

    def holds(self, held: Mapping[str, float]) -> bool:
        return memory.total(held, on_gpu=self.on_gpu) <= USABLE * self.memory


def place_of(processes: int, gib: float | None, *, running: bool, on_cpu: bool = False) -> Place:
    """Return where ``processes`` run: on the cards that are there, else on those that are assumed, or where the run is
    to begin now, or asks for it (``on_cpu``), on the CPU. gib: the memory of a card (of a process on the CPU) in GiB,
    where it is given."""
    seen = [] if on_cpu else cards()
    if on_cpu or (running and not seen):
        each = available_memory() / processes if gib is None else gib * 2**30
        which = "1 CPU process" if processes == 1 else f"{processes} CPU processes over gloo"
        why = "device: cpu" if on_cpu else "no GPU is here"
        return Place(processes, each, f"{why}: {which}, {_gib(each)} of memory each", on_gpu=False, bf16=True)
    if running and len(seen) < processes:
        raise UserError(f"{counted(len(seen), 'card')} here, and --gpus asks for {processes}; give --gpus {len(seen)}")
    if not seen:
        each = (ASSUMED if gib is None else gib) * 2**30
        why = "as no card is here to ask; --memory says otherwise" if gib is None else "by --memory"
        return Place(processes, each, f"{counted(processes, 'card')} of {_gib(each)} each, {why}")
    least = min(seen[:processes], key=lambda card: card.memory)
    each = least.memory if gib is None else gib * 2**30
    bf16 = all(architecture(card.capability)[1] for card in seen)
    return Place(processes, each, f"{processes} × {least.name}, {_gib(each)} each", bf16=bf16)


@dataclass(frozen=True)
class Choice:
    kind: str
    place: Place
    held: Mapping[str, float]
    of_the_machine: float
    totals: Mapping[str, float]
    blocks: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return memory.total(self.held, on_gpu=self.place.on_gpu)

    @property
    def fits(self) -> bool:
        return self.place.holds(self.held)


def excluded(kind: str, place: Place) -> str | None:
    if (kind == "single") != (place.processes == 1) and not kind.endswith("offload"):
        return "is for another number of processes"
    if kind.startswith("zero") and find_spec("deepspeed") is None:
        return f"needs deepspeed ({how_to_install('train')})"
    if kind == "fsdp" and not place.on_gpu:
        return "needs GPUs: on CPUs accelerate would run DDP instead"
    return None


@quiet()
def choose(recipe: Recipe, place: Place, kind: str | None = None) -> Choice:
    """Return the fastest configuration whose sum fits ``place``, else that of the least; or the one that is asked for.

    Raises UserError where that one cannot run, or none can.
    """
    import transformers

    left_out = {name: why for name in CONFIGS if (why := excluded(name, place)) is not None}
    if kind in left_out:
        raise UserError(f"{kind} {left_out[str(kind)]}; choose another --kind")
    if len(left_out) == len(CONFIGS):
        raise UserError(f"no configuration runs this recipe: {'; '.join(f'{n} {why}' for n, why in left_out.items())}")
    config = config_of_source(recipe)
    needs = memory.Needs(recipe, config, getattr(transformers, stock_class(config.to_dict())))
    in_bf16 = place.bf16 and place.on_gpu and "bfloat16" in str(getattr(config, "dtype", None))
    teacher = 0 if recipe.distillation.weight == 0 else 2 if in_bf16 else 4
    held = dict[str, Mapping[str, float]]()
    for name in [name for name in CONFIGS if name not in left_out] if kind is None else [kind]:
        held[name] = memory.terms(name, needs, recipe, place.processes, teacher)
        if place.holds(held[name]):
            break
    totals = {name: memory.total(each, on_gpu=place.on_gpu) for name, each in held.items()}
    chosen = name if place.holds(held[name]) else min(totals, key=lambda each: totals[each])
    blocks = () if needs.names_its_blocks else needs.block_classes
    machine = memory.of_the_machine(chosen, needs, recipe, place.processes)
    return Choice(chosen, place, held[chosen], machine, totals, blocks, left_out)


def config_of_source(recipe: Recipe) -> Any:
    import transformers

    folder = local_source(recipe.source)
    if folder is None and (shape := read_json(FOLDER / "shapes.json", "shapes").get(recipe.source)):
        known: dict[str, Any] = dict(shape)
        return transformers.AutoConfig.for_model(known.pop("model_type"), **known)
    if folder is None:
        inside = f"{recipe.subfolder}/" if recipe.subfolder else ""
        folder, _ = fetched(recipe.source, (f"{inside}config.json",))
    if folder.is_file():
        raise UserError(f"{folder}: one file of weights is not finetuned; give the folder of a checkpoint")
    folder = folder if recipe.subfolder is None else subfolder_of(folder, recipe.subfolder)
    read_config(folder)
    return load_config(folder)


# ---- what is written and run -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    choice: Choice
    config: Path
    files: tuple[Path, ...]
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        return shlex.join(self.words)

    def to_json(self) -> dict[str, Any]:
        choice = self.choice
        return {
            "kind": choice.kind,
            "processes": choice.place.processes,
            "place": choice.place.said,
            "memory": {"each": choice.place.memory, "held": dict(choice.held), "total": choice.total},
            "fits": choice.fits,
            "tried": dict(choice.totals),
            "left_out": dict(choice.left_out),
            "machine": choice.of_the_machine,
            "files": [str(path) for path in self.files],
            "command": self.line,
        }


def write_launch(recipe: Recipe, choice: Choice, finetune: Sequence[str]) -> Launch:
    """Write the configuration beside the recipe's output and return the line that launches it.

    finetune: the words behind ``finetune``. Raises UserError where a file of others would be replaced.
    """
    out = Path(recipe.out)
    config, deepspeed = (out.with_name(f"{out.name}.{ending}") for ending in ("launch.yaml", "deepspeed.json"))
    tree = accelerate_config(choice.kind, choice.place.processes, str(deepspeed))
    if choice.kind == "fsdp" and choice.blocks:
        tree["fsdp_config"] = tree["fsdp_config"] | {"fsdp_transformer_layer_cls_to_wrap": ",".join(choice.blocks)}
    contents = {config: WRITTEN + yaml.safe_dump(tree, sort_keys=False)}
    if choice.kind.startswith("zero"):
        precision = recipe.precision[0] if "precision" in recipe.model_fields_set else "fp16"
        # Of several precisions none is the engine's.
        precision = "fp32" if recipe.phases else precision
        contents[deepspeed] = json.dumps(deepspeed_config(choice.kind, precision), indent=2) + "\n"
    for path, text in contents.items():
        _write(path, text)
    words = ["accelerate", "launch", "--config_file", str(config)]
    if choice.place.processes > 1:
        words += ["--main_process_port", "0"]
    threads = (os.cpu_count() or 1) // choice.place.processes
    if threads > 1 and "OMP_NUM_THREADS" not in os.environ:
        words += ["--num_cpu_threads_per_process", str(threads)]
    return Launch(choice, config, tuple(contents), (*words, "-m", "bf16_to_fp16", "finetune", *finetune))


def _write(path: Path, text: str) -> None:
    try:
        if path.exists() and path.suffix == ".yaml" and not path.read_text(encoding="utf-8").startswith(WRITTEN):
            raise UserError(f"{path} was not written by launch; rename it, or give another out")
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8", newline="\n")
    except FileExistsError as error:
        raise UserError(f"{error.filename} is a file, and no folder to write in; give another out") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give another out") from error


def run_launch(launch: Launch, begun: Sequence[str]) -> int:
    """Run a launch and return its exit status, that of the process that failed first; raise UserError where a process
    was killed, and as the program does where it is itself interrupted or ended. begun: the words of the command before
    the recipe, which reports then name."""
    import torch.distributed.run as elastic  # with its loggers
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The processes say what is wrong; the launcher would say once more that something was.
    for name in [each for each in logging.root.manager.loggerDict if each.startswith(elastic.__package__ or "")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["BF16_TO_FP16_BEGUN"] = shlex.join(begun)
    os.environ.setdefault("PYTHON_EXEC", sys.executable)
    if not launch.choice.place.on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        launch_command(launch_command_parser().parse_args(list(launch.words[2:])))
    except SignalException as stop:  # after it has ended the processes
        if stop.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.exit(128 + stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return status_of(rank, int(failure.exitcode))
    except subprocess.CalledProcessError as error:  # of one process alone
        return status_of(0, error.returncode)
    return 0


def status_of(rank: int, status: int) -> int:
    if status < 0:
        name = signal.Signals(-status).name
        raise UserError(f"process {rank} was ended by {name}; the same command goes on from the last state") from None
    return status


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def _sum(held: Mapping[str, float], place: Place) -> str:
    each = dict(held) | ({"CUDA": memory.CONTEXT} if place.on_gpu else {})
    terms = " + ".join(f"{_gib(size)} {name}" for name, size in each.items())
    return f"{terms} = {_gib(memory.total(held, on_gpu=place.on_gpu))}"


def explained(choice: Choice) -> list[str]:
    place, name = choice.place, IN_WORDS[choice.kind]
    lines = [
        place.said,
        f"{name} ({choice.kind}): a process holds {_sum(choice.held, place)} of {_gib(place.memory)}",
    ]
    others = [f"{name} {_gib(size)}" for name, size in choice.totals.items() if name != choice.kind]
    if others:
        lines.append(f"too much would be {', '.join(others)}")
    if not choice.fits:
        lines.append(f"this is too much as well: {LESS}")
    lines.append(f"the machine's own memory: {_gib(choice.of_the_machine)} while the models are read")
    return lines
