"""What a finetune holds in a card's memory, term by term, under each way to share it out among processes.

States are counted from the shapes of the weights. Activations are measured: the stock model of the config takes a step
without values, under the autocast and with the batch of the recipe, and what is alive at once is added up.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..errors import UserError, first_line
from ..families.known import of_model_type
from ..run.batch import values_of
from ..run.interface import config_of, gives_probabilities, is_causal, takes_decoder_ids
from . import distillation
from .mixed_precision import PRECISION_DTYPES, WidePowers, recomputation
from .recipe import Recipe

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0}
"""Both of AdamW's moments of a weight."""

CONTEXT = 1 << 30  # bytes that CUDA, NCCL and torch's libraries take
PROBE = (16, 64, 16)  # rows of the built-in probe that go beside a batch, their ids and their decoder's

BUCKET = 20_000_000  # elements of DeepSpeed's buckets of gradients; its own 500 million in four of them are 8 GB
LIVE, AHEAD = 200_000_000, 50_000_000  # elements that ZeRO-3 keeps gathered, and gathers before they are needed


class Needs:
    """A finetune of a stock model in numbers, from its config alone.

    ``parameters``, ``largest_block``, ``outside_blocks``: of the model, of its largest layer, of what is in no layer.
    ``block_classes``: the names of its layers' classes; ``names_its_blocks``: whether its own class says which they
    are. ``flops``: floating-point operations of a pass's forwards and backward, once ``activations`` was asked.
    """

    flops = 0

    def __init__(self, recipe: Recipe, config: Any, kind: Any) -> None:
        """Make the model of ``kind`` without values, and look at its shapes."""
        self.recipe = recipe
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            # Stock code would make it in the checkpoint's dtype, and writes another into the config.
            dtype = PRECISION_DTYPES[recipe.optimizer.weights]
            self.model = kind._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=dtype).train()
        blocks = _blocks(self.model)
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        self.parameters = sum(p.numel() for p in self.model.parameters())
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if head is not None and head.weight is embedding.weight and not _says_tied(config):
            self.parameters += head.weight.numel()  # tied as long as no file has a head of its own
        self.largest_block = max(sizes, default=self.parameters)
        self.outside_blocks = self.parameters - sum(sizes)
        self.block_classes = tuple(sorted({type(block).__name__ for block in blocks}))
        self.names_its_blocks = bool(getattr(self.model, "_no_split_modules", None))
        if recipe.gradient_checkpointing:
            settings = recomputation(torch.device("cpu"))
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        for parameter in (p for p in self.model.parameters() if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    @cache  # noqa: B019  (as long as the one object that a command makes)
    def activations(self, *, apart: bool, gathers: bool = False) -> int:
        """Return the most bytes that a step's pass of one process holds beside weights and their gradients: what is
        kept for the backward, autocast's copies of the weights, and gradients of the probe's rows until those of the
        batch are added to them.

        apart: batch and probe have a backward each. gathers: linears are ZeRO-3's, which keep no copies. Raises
        UserError where the class cannot run without values.
        """
        data, dtype, config = self.recipe.data, PRECISION_DTYPES[self.recipe.precision[-1]], config_of(self.model)
        shapes = [(data.batch_size, data.input_length, data.target_length)]
        shapes += [PROBE] if self.recipe.penalty.form != "none" else []
        live = _Live(self.model)
        try:
            with self._mode, live, WidePowers(), _gathered_linears() if gathers else nullcontext():
                for group in [[shape] for shape in shapes] if apart else [shapes]:
                    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                        values = [values_of(self.model(**_inputs(config, *shape))) for shape in group]
                    torch.stack([_distance(config, each.flatten(0, -2)) for each in values]).sum().backward()
                    del values
        except Exception as error:  # of whatever a class does with values
            raise UserError(
                f"the memory of a {type(self.model).__name__} cannot be counted without its weights"
                f" ({first_line(error)}); choose with --kind"
            ) from error
        self.flops = live.flops
        return live.most


class _Live(TorchDispatchMode):
    """Adds up the bytes of the storages that are made in it and still alive, none of them a weight of a model; ``most``
    is the largest sum.

    ``flops``: operations of products by the formulas of torch's counter, which itself would keep tensors alive.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.live = self.most = self.flops = 0
        self.weights: set[int] = {p.untyped_storage()._cdata for p in model.parameters()}
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=out))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key: int = storage._cdata
        if key not in self.sizes and key not in self.weights:
            self.sizes[key] = storage.nbytes()
            self.live += self.sizes[key]
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


class _GatheredLinear(torch.autograd.Function):
    """A linear as ZeRO-3 has it: it keeps what it is given, and casts to autocast's dtype for each product alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        out = x @ weight.t()
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (x, weight), rows = ctx.saved_tensors, gradient.flatten(0, -2)
        with torch.autocast("cpu", ctx.dtype, enabled=ctx.dtype != weight.dtype):
            of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
            return gradient @ weight, rows.t() @ x.flatten(0, -2), of_bias


@contextmanager
def _gathered_linears() -> Iterator[None]:
    """Have all linears be those of ZeRO-3, in recomputations too, which no function mode sees."""
    stock = nn.functional.linear
    nn.functional.linear = _GatheredLinear.apply
    try:
        yield
    finally:
        nn.functional.linear = stock


def _says_tied(config: Any) -> bool:
    """Whether a config says that the head is tied; T5's says so of all, and keeps what it said in another key."""
    known = of_model_type(config.model_type)
    return bool(getattr(config, known.output_scale_key if known else "", config.tie_word_embeddings))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: what its outermost lists of modules hold."""
    lists: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists.append(path)
    return [block for path in lists for block in model.get_submodule(path).children()]


def _inputs(config: Any, rows: int, length: int, target: int) -> dict[str, Any]:
    decodes, causal = takes_decoder_ids(config), is_causal(config)
    ids = torch.zeros(rows, length + (target if causal else 0), dtype=torch.long)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if decodes:
        given["decoder_input_ids"] = torch.zeros(rows, target, dtype=torch.long)
    return given | ({"use_cache": False} if decodes or causal else {})


def _distance(config: Any, values: Tensor) -> Tensor:
    """Return the distance from a teacher's values of the same shape, as in the loss."""
    measure = distillation.kl_divergence if gives_probabilities(config) else distillation.hidden_error
    return measure(values, torch.empty_like(values, dtype=torch.float32)).sum()


def terms(kind: str, needs: Needs, recipe: Recipe, processes: int, teacher_bytes: int) -> dict[str, float]:
    """Return the bytes that a process holds on its card, by what they are for.

    kind: a configuration of ``launching``. teacher_bytes: of one of the teacher's weights, 0 for no teacher.
    """
    count, each = needs.parameters, WEIGHT_BYTES[recipe.optimizer.weights]
    weights, moments = float(count * each), count * MOMENT_BYTES[recipe.optimizer.moments]
    teacher = float(count * teacher_bytes)
    in_parts, offloads = kind.startswith(("zero3", "fsdp")), kind.endswith("offload")
    share = processes if kind.startswith(("zero", "fsdp")) else 1
    held: dict[str, float] = {"weights": 0.0 if kind == "zero3-offload" else weights / (share if in_parts else 1)}
    if not offloads:
        held["gradients"] = weights / share
        held["moments of AdamW"] = moments / share
    if kind == "ddp":
        held["buckets of gradients"] = weights
    if kind.startswith("zero"):
        held["buckets of gradients"] = BUCKET * each * (2.0 if in_parts else 4.0)
    if kind == "zero2":
        held["copies of the weights that are stepped"] = weights / share
    if kind.startswith("zero3"):
        held["gathered layers"] = float(min(count, LIVE + AHEAD) * each)
    if kind == "fsdp":
        held["gathered layers"] = float((2 * needs.largest_block + needs.outside_blocks) * each)
    held["teacher"] = teacher / processes + needs.largest_block * teacher_bytes if in_parts else teacher
    held["activations"] = float(needs.activations(apart=share > 1, gathers=kind.startswith("zero3")))
    return {name: size for name, size in held.items() if size}


def of_the_machine(kind: str, needs: Needs, recipe: Recipe, processes: int) -> float:
    """Return the bytes that all processes together take of the machine's own memory: each reads student and teacher
    whole, and what is offloaded stays there."""
    reading = processes * needs.parameters * (4 + (4 if recipe.distillation.weight else 0))
    each = WEIGHT_BYTES[recipe.optimizer.weights]
    stays = 2 * each + MOMENT_BYTES[recipe.optimizer.moments] + (each if kind == "zero3-offload" else 0)
    return float(max(reading, needs.parameters * stays if kind.endswith("offload") else 0))


def total(held: Mapping[str, float], *, on_gpu: bool) -> float:
    """Return the sum of terms, with what CUDA takes."""
    return sum(held.values()) + (CONTEXT if on_gpu else 0)
