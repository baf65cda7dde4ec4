"""Choose the accelerate configuration whose memory needs fit the cards, and the command line that launches it.

Configurations of ``launch/`` are tried from the fastest on. Weights, gradients and moments are counted from shapes.
Activations follow a formula that was fitted to traced steps of Flan-T5, mT5 and Pegasus, and gives 0.75 to 1.37 times
the traced bytes. For the shipped recipes, all memory together is 0.99 to 1.07 times the traced memory."""

from __future__ import annotations

import copy
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

import torch
import yaml
from torch import nn

from ..checkpoint.contents import read_config
from ..checkpoint.files import read_json
from ..checkpoint.hub import fetched
from ..checkpoint.sources import local_source, subfolder_of
from ..checkpoint.staging import replacing
from ..devices import cards
from ..errors import INTERRUPTED, UserError
from ..families.known import of_model_type, stock_class
from ..measuring.stock import config_of, is_causal, load_config, takes_decoder_ids
from ..quiet import quiet
from ..system import available_memory
from ..wording import counted
from .distillation import blocks_of
from .recipe import SHIPPED, Recipe

MOMENT_BYTES = 8  # of a weight: both of AdamW's, in fp32

OF_LINEARS = 5.0  # bytes kept for each element that enters or leaves a linear
OF_SCORES, OF_BIASED_SCORES = 2.0, 14.0  # for each attention score, without and with a learned position bias
OF_LOGITS = 20.0
OF_INPUTS = 12.0  # of a layer that is recomputed, for each element of its input

MOST_OVER = 1.37  # of the activations of traced steps
CONTEXT = float(1 << 30)  # bytes that CUDA, NCCL and torch's libraries take
PROBE = (16, 64, 16)  # rows of the built-in probe that go beside a batch, their ids and their decoder's

BUCKET = 20_000_000  # elements of a bucket of gradients in launch/deepspeed
GATHERED = 250_000_000  # elements of the layers that ZeRO-3 keeps, and gathers before they are needed


class Needs:
    """What training by a recipe needs: counts of parameters and, in ``activations``, the bytes that one forward and
    backward of a process takes in addition to weights and gradients."""

    def __init__(self, recipe: Recipe, config: Any, kind: Any, processes: int = 1) -> None:
        self.recipe = recipe
        with torch.device("meta"):
            # Stock code would make it in the checkpoint's dtype, and writes another into the config.
            config = copy.deepcopy(config)
            self.model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)
        self.blocks = blocks_of(self.model)
        sizes = [sum(p.numel() for p in block.parameters()) for block in self.blocks]
        self.parameters = sum(p.numel() for p in self.model.parameters())
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if head is not None and head.weight is embedding.weight:
            known = of_model_type(config.model_type)
            # T5's class overwrites the flag of tied weights and keeps the file's in another key.
            if not getattr(config, known.output_scale_key if known else "", config.tie_word_embeddings):
                self.parameters += head.weight.numel()  # tied as long as no file has a head of its own
        self.largest_block = max(sizes, default=self.parameters)
        self.outside_blocks = self.parameters - sum(sizes)
        data, probe = recipe.data.share(processes), [PROBE] if recipe.penalty.form != "none" else []
        # Batch and probe have a backward each.
        shapes = [(data.batch_size, data.input_length, data.target_length), *probe]
        self.activations = max(self._kept(*shape) for shape in shapes)

    def _kept(self, rows: int, length: int, target: int) -> float:
        config, head = config_of(self.model), self.model.get_output_embeddings()
        if is_causal(config):
            length = length + target
        shape = config.get_text_config()  # models with images and T5Gemma have the sizes of their stacks inside
        read = {*self.model.get_encoder().modules()} if takes_decoder_ids(config) else {*self.model.modules()}
        tokens = {module: rows * (length if module in read else target) for module in self.model.modules()}
        linears = [module for module in tokens if isinstance(module, nn.Linear) and module is not head]
        of_layers = sum(OF_LINEARS * tokens[each] * (each.in_features + each.out_features) for each in linears)
        keys = sum(length * length if block in read else target * target + length * target for block in self.blocks)
        biased = hasattr(config, "relative_attention_num_buckets")
        of_layers += rows * shape.num_attention_heads * keys * (OF_BIASED_SCORES if biased else OF_SCORES)
        if self.recipe.gradient_checkpointing:
            inputs = sum(tokens[block] for block in self.blocks)
            of_layers = of_layers / max(1, len(self.blocks) // 2) + OF_INPUTS * inputs * shape.hidden_size
        return of_layers + (0.0 if head is None else OF_LOGITS * rows * (target or length) * head.out_features)


def bytes_by_purpose(kind: str, needs: Needs, processes: int, teacher_bytes: int, *, on_gpu: bool) -> dict[str, float]:
    """Return the bytes that a process takes on its card, by purpose. kind: an accelerate configuration, a key of
    ``KINDS``. teacher_bytes: the bytes of each weight of the teacher, 0 without one."""
    recipe, count, each = needs.recipe, needs.parameters, torch.float32.itemsize
    weights, teacher = float(count * each), float(count * teacher_bytes)
    in_parts, zero = kind.startswith(("zero3", "fsdp")), kind.startswith("zero")
    share = processes if zero or in_parts else 1
    held: dict[str, float] = {"weights": 0.0 if kind == "zero3-offload" else weights / (share if in_parts else 1)}
    if not kind.endswith("offload"):
        held["gradients"] = weights / share
        held["moments of AdamW"] = count * MOMENT_BYTES / share
    if kind == "ddp":
        held["buckets of gradients"] = weights
    if zero:
        held["buckets of gradients"] = BUCKET * each * (2.0 if in_parts else 4.0)
    if kind == "zero2":
        held["copies of the weights that are stepped"] = weights / share
    if in_parts:
        at_once = min(count, GATHERED) if zero else 2 * needs.largest_block + needs.outside_blocks
        held["gathered layers"] = float(at_once * each)
    held["teacher"] = teacher / processes + needs.largest_block * teacher_bytes if in_parts else teacher
    held["activations"] = needs.activations
    # Autocast's copies of the weights; linears of ZeRO-3 keep none.
    if recipe.precision != "fp32" and not kind.startswith("zero3") and not recipe.gradient_checkpointing:
        held["activations"] += 2.0 * count
    held["CUDA"] = CONTEXT if on_gpu else 0.0
    return {name: size for name, size in held.items() if size}


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
class Machine:
    processes: int
    memory: float  # bytes of each process
    described: str
    on_gpu: bool = True
    bf16: bool = False


def machine_of(processes: int, gib: float | None, *, running: bool, on_cpu: bool = False) -> Machine:
    """Return the cards or the CPU that the processes will use. gib: memory of each process. running: whether to launch
    now, for which all cards must be here; otherwise missing cards are assumed."""
    seen, given = [] if on_cpu else cards(), None if gib is None else gib * 2**30
    if on_cpu or (running and not seen):
        each = given or available_memory() / processes
        return Machine(processes, each, f"CPU processes over gloo: {processes}, {_gib(each)} each", on_gpu=False)
    if running and len(seen) < processes:
        raise UserError(f"{counted(len(seen), 'card')} here, and --gpus asks for {processes}; give --gpus {len(seen)}")
    if not seen:
        each = given or ASSUMED * 2**30
        return Machine(processes, each, f"{counted(processes, 'card')} of {_gib(each)} each (--memory changes this)")
    least = min(seen[:processes], key=lambda card: card.memory)
    text = f"{processes} × {least.name}, {_gib(given or least.memory)} each"
    return Machine(processes, given or least.memory, text, bf16=all(card.has_bf16 for card in seen))


@dataclass(frozen=True)
class Choice:
    kind: str
    machine: Machine
    tried: Mapping[str, Mapping[str, float]]  # a process's bytes by configuration, up to one that fits, and purpose
    blocks: Sequence[str]  # names of the classes that FSDP wraps, empty if the model names them itself

    @property
    def total(self) -> float:
        return sum(self.tried[self.kind].values())

    @property
    def fits(self) -> bool:
        return self.total <= USABLE * self.machine.memory

    def explained(self) -> list[str]:
        terms = " + ".join(f"{_gib(size)} {name}" for name, size in self.tried[self.kind].items())
        holds = f"a process holds {terms} = {_gib(self.total)} of {_gib(self.machine.memory)}"
        too_much = [] if self.fits else [f"this is too much: {LESS}"]
        return [self.machine.described, f"{KINDS[self.kind]} ({self.kind}): {holds}", *too_much]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "processes": self.machine.processes,
            "place": self.machine.described,
            "memory": {"each": self.machine.memory, "held": self.tried[self.kind], "total": self.total},
            "fits": self.fits,
            "tried": {kind: sum(held.values()) for kind, held in self.tried.items()},
        }


def can_run(kind: str, machine: Machine) -> bool:
    if kind.startswith("zero") and find_spec("deepspeed") is None:
        return False
    if kind == "fsdp" and not machine.on_gpu:  # on CPUs accelerate would run DDP instead
        return False
    return (kind == "single") == (machine.processes == 1) or kind.endswith("offload")


@quiet()
def choose(recipe: Recipe, machine: Machine) -> Choice:
    """Return the fastest configuration whose needs fit the memory of ``machine``; if none fits, the one that needs
    least."""
    import transformers

    config = config_of_source(recipe)
    needs = Needs(recipe, config, getattr(transformers, stock_class(config.to_dict())), machine.processes)
    in_bf16 = machine.bf16 and "bfloat16" in str(getattr(config, "dtype", None))
    teacher = 0 if recipe.distillation.weight == 0 else 2 if in_bf16 else 4
    tried = dict[str, Mapping[str, float]]()
    for name in (name for name in KINDS if can_run(name, machine)):
        tried[name] = bytes_by_purpose(name, needs, machine.processes, teacher, on_gpu=machine.on_gpu)
        if sum(tried[name].values()) <= USABLE * machine.memory:
            break
    chosen = min(tried, key=lambda name: sum(tried[name].values()))
    # Stock classes name their blocks themselves, as a rule.
    named = getattr(needs.model, "_no_split_modules", None)
    blocks = [] if named else sorted({type(block).__name__ for block in needs.blocks})
    return Choice(chosen, machine, tried, blocks)


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
        raise UserError(f"{folder}: one file of weights cannot be finetuned; give the folder of a checkpoint")
    folder = folder if recipe.subfolder is None else subfolder_of(folder, recipe.subfolder)
    read_config(folder)
    return load_config(folder)


def accelerate_config(kind: str, processes: int, deepspeed: Path | None = None) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((FILES / "accelerate" / f"{kind}.yaml").read_text(encoding="utf-8"))
    if deepspeed is not None:
        tree["deepspeed_config"]["deepspeed_config_file"] = str(deepspeed)
    return tree | {"num_processes": processes}


def write_launch(recipe: Recipe, choice: Choice, arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Write configuration files beside the recipe's output; return their paths and the launch command. arguments: the
    arguments of ``finetune`` in that command. Raises UserError rather than replace YAML that launch did not write."""
    out, processes = Path(recipe.out), choice.machine.processes
    config, deepspeed = (out.with_name(f"{out.name}.{ending}") for ending in ("launch.yaml", "deepspeed.json"))
    by_engine = choice.kind.startswith("zero")
    tree = accelerate_config(choice.kind, processes, deepspeed if by_engine else None)
    if choice.kind == "fsdp" and choice.blocks:
        tree["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = ",".join(choice.blocks)
    contents = {config: WRITTEN + yaml.safe_dump(tree, sort_keys=False)}
    if by_engine:
        settings = dict(read_json(FILES / "deepspeed" / f"{choice.kind}.json", "configuration"))
        if recipe.precision == "fp32":
            del settings["torch_autocast"]
        contents[deepspeed] = json.dumps(settings, indent=2) + "\n"
    try:
        if config.exists() and not config.read_text(encoding="utf-8").startswith(WRITTEN):
            raise UserError(f"{config} exists and is not from bf16-to-fp16 launch; rename it, or set another `out`")
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            with replacing(path) as new:
                new.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; set another `out`") from error
    words = ["accelerate", "launch", "--config_file", str(config)]
    if processes > 1:
        words += ["--main_process_port", "0"]
    threads = (os.cpu_count() or 1) // processes
    if threads > 1 and "OMP_NUM_THREADS" not in os.environ:
        words += ["--num_cpu_threads_per_process", str(threads)]
    return list(contents), [*words, "-m", "bf16_to_fp16", "finetune", *arguments]


def run_launch(command: Sequence[str], begun: Sequence[str], *, on_gpu: bool) -> int:
    """Run ``command``, from ``write_launch``; return its exit status, that of the first process to fail. begun: the
    first words of the user's command, before the recipe; messages on how to go on repeat these words. Raises UserError
    if a signal ended a process."""
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
        launch_command(launch_command_parser().parse_args(list(command[2:])))
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
        raise UserError(
            f"process {rank} was ended by {name}; run the same command to go on from the last state"
        ) from None
    return status


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
