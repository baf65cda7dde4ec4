"""Choose the accelerate configuration whose memory fits the cards, and the command line that launches it.

Configurations of ``launch/`` are tried from the fastest on: DDP, ZeRO-2 (sharded gradients and optimizer), ZeRO-3 or
FSDP2 (everything sharded), then ZeRO-3 with offload to the machine's memory.
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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..cards import cards
from ..checkpoint.contents import read_config
from ..checkpoint.fetching import fetched
from ..checkpoint.files import read_json
from ..checkpoint.sources import local_source, subfolder_of
from ..checkpoint.staging import replacing
from ..environment import how_to_install
from ..errors import INTERRUPTED, UserError
from ..families.known import stock_class
from ..measuring.stock import load_config
from ..quiet import quiet
from ..system import available_memory
from ..wording import counted
from . import memory
from .recipe import SHIPPED, Recipe

ASSUMED = 16  # GiB of a card that is not there: the smaller V100's
USABLE = 0.95  # share of a card's memory; the rest is lost between what is allocated
LESS = "give a smaller data.batch_size, shorter texts, gradient_checkpointing: true, or more or larger cards"
WRITTEN = "# Written by `bf16-to-fp16 launch`, which writes it anew.\n"

FILES = Path(__file__).parents[1] / "launch"

KINDS = {  # the configurations of ``launch/accelerate``, the fastest first
    "single": "one process",
    "ddp": "DDP",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp": "FSDP2",
    "zero3-offload": "ZeRO-3 with weights and optimizer in the machine's memory",
}


@dataclass(frozen=True)
class Place:
    processes: int
    memory: float  # bytes of each process
    said: str  # this place in words
    on_gpu: bool = True
    bf16: bool = False


def place_of(processes: int, gib: float | None, *, running: bool, on_cpu: bool = False) -> Place:
    """Return where processes run: on the cards here, on the CPU or, to plan a run, on assumed cards of ``gib``."""
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
    bf16 = all(card.has_bf16 for card in seen)
    return Place(processes, each, f"{processes} × {least.name}, {_gib(each)} each", bf16=bf16)


@dataclass(frozen=True)
class Choice:
    kind: str
    place: Place
    held: Mapping[str, float]  # bytes of a process by purpose
    tried: Mapping[str, float]  # bytes of a process by configuration, up to the chosen one
    blocks: Sequence[str]  # classes that FSDP wraps, where the model does not name them

    @property
    def total(self) -> float:
        return self.tried[self.kind]

    @property
    def fits(self) -> bool:
        return self.total <= USABLE * self.place.memory

    def explained(self) -> list[str]:
        place = self.place
        terms = " + ".join(f"{_gib(size)} {name}" for name, size in self.held.items())
        holds = f"a process holds {terms} = {_gib(self.total)} of {_gib(place.memory)}"
        lines = [place.said, f"{KINDS[self.kind]} ({self.kind}): {holds}"]
        others = [f"{name} {_gib(size)}" for name, size in self.tried.items() if name != self.kind]
        if others:
            lines.append(f"too much would be {', '.join(others)}")
        if not self.fits:
            lines.append(f"this is too much as well: {LESS}")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "processes": self.place.processes,
            "place": self.place.said,
            "memory": {"each": self.place.memory, "held": dict(self.held), "total": self.total},
            "fits": self.fits,
            "tried": dict(self.tried),
        }


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
    """Return the fastest configuration that fits ``place``, else the smallest; or ``kind``, where it can run."""
    import transformers

    if kind is not None and (why := excluded(kind, place)) is not None:
        raise UserError(f"{kind} {why}; choose another --kind")
    config = config_of_source(recipe)
    needs = memory.Needs(recipe, config, getattr(transformers, stock_class(config.to_dict())), place.processes)
    in_bf16 = place.bf16 and place.on_gpu and "bfloat16" in str(getattr(config, "dtype", None))
    teacher = 0 if recipe.distillation.weight == 0 else 2 if in_bf16 else 4
    tried = dict[str, float]()
    held = dict[str, Mapping[str, float]]()
    for name in [name for name in KINDS if excluded(name, place) is None] if kind is None else [kind]:
        held[name] = memory.terms(name, needs, place.processes, teacher, on_gpu=place.on_gpu)
        tried[name] = sum(held[name].values())
        if tried[name] <= USABLE * place.memory:
            break
    chosen = min(tried, key=lambda name: (tried[name] > USABLE * place.memory, tried[name]))
    # Stock classes name their blocks themselves, as a rule.
    named = getattr(needs.model, "_no_split_modules", None)
    blocks = [] if named else sorted({type(block).__name__ for block in needs.blocks})
    return Choice(chosen, place, held[chosen], tried, blocks)


def config_of_source(recipe: Recipe) -> Any:
    import transformers

    folder = local_source(recipe.source)
    if folder is None and (shape := read_json(SHIPPED / "shapes.json", "shapes").get(recipe.source)):
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


def accelerate_config(kind: str, processes: int, deepspeed: Path | None = None) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((FILES / "accelerate" / f"{kind}.yaml").read_text(encoding="utf-8"))
    if deepspeed is not None:
        tree["deepspeed_config"]["deepspeed_config_file"] = str(deepspeed)
    return tree | {"num_processes": processes}


def deepspeed_config(kind: str, precision: str) -> dict[str, Any]:
    tree: dict[str, Any] = dict(read_json(FILES / "deepspeed" / f"{kind}.json", "configuration"))
    if precision == "fp32":
        del tree["torch_autocast"]
    return tree


def write_launch(recipe: Recipe, choice: Choice, finetune: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Write the configuration files beside the recipe's output; return them and the words of the launch command.

    finetune: arguments after ``finetune``. Raises UserError rather than replace a YAML file that launch did not write.
    """
    out, processes = Path(recipe.out), choice.place.processes
    config, deepspeed = (out.with_name(f"{out.name}.{ending}") for ending in ("launch.yaml", "deepspeed.json"))
    by_engine = choice.kind.startswith("zero")
    tree = accelerate_config(choice.kind, processes, deepspeed if by_engine else None)
    if choice.kind == "fsdp" and choice.blocks:
        tree["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = ",".join(choice.blocks)
    contents = {config: WRITTEN + yaml.safe_dump(tree, sort_keys=False)}
    if by_engine:
        contents[deepspeed] = json.dumps(deepspeed_config(choice.kind, recipe.precision), indent=2) + "\n"
    for path, text in contents.items():
        _write(path, text)
    words = ["accelerate", "launch", "--config_file", str(config)]
    if processes > 1:
        words += ["--main_process_port", "0"]
    threads = (os.cpu_count() or 1) // processes
    if threads > 1 and "OMP_NUM_THREADS" not in os.environ:
        words += ["--num_cpu_threads_per_process", str(threads)]
    return list(contents), [*words, "-m", "bf16_to_fp16", "finetune", *finetune]


def _write(path: Path, text: str) -> None:
    try:
        if path.exists() and path.suffix == ".yaml" and not path.read_text(encoding="utf-8").startswith(WRITTEN):
            raise UserError(f"{path} was not written by launch; rename it, or give another out")
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; give another out") from error


def run_launch(words: Sequence[str], begun: Sequence[str], *, on_gpu: bool) -> int:
    """Run the command of ``write_launch``; return the exit status of the first process that failed.

    begun: first words of the command that reports show. Raises UserError where a signal ended a process.
    """
    import torch.distributed.run as elastic  # with its loggers
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The processes say what is wrong; the launcher would say once more that something was.
    for name in [each for each in logging.root.manager.loggerDict if each.startswith(elastic.__package__ or "")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["BF16_TO_FP16_BEGUN"] = shlex.join(begun)
    os.environ.setdefault("PYTHON_EXEC", sys.executable)
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        launch_command(launch_command_parser().parse_args(list(words[2:])))
    except SignalException as stop:  # after it has ended the processes
        if stop.sigval == signal.SIGINT:
            return INTERRUPTED
        sys.exit(128 + stop.sigval)
    except KeyboardInterrupt:  # of one process alone, which the terminal interrupts too
        return INTERRUPTED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return status_of(rank, int(failure.exitcode))
    except subprocess.CalledProcessError as error:
        return status_of(0, error.returncode)
    return 0


def status_of(rank: int, status: int) -> int:
    if status < 0:
        name = signal.Signals(-status).name
        raise UserError(f"process {rank} was ended by {name}; the same command goes on from the last state") from None
    return status


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
