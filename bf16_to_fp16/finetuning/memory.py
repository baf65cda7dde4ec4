"""What a finetune holds in a card's memory, term by term, under each way to share it out among processes.

All of it is counted from the shapes of the weights. Activations are one formula of tokens, linears and scores. Its
factors were fitted to steps of Flan-T5, mT5 and Pegasus that were traced tensor by tensor. Of those activations it
gives 0.75 to 1.37 times, of a whole sum of the shipped recipes 0.99 to 1.07 times.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..families.known import of_model_type
from ..run.interface import config_of, is_causal, takes_decoder_ids
from .mixed_precision import PRECISION_DTYPES
from .recipe import Recipe

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0}
"""Both of AdamW's moments of a weight."""

OF_LINEARS = 5.0  # bytes kept for each element that enters or leaves a linear
OF_SCORES, OF_BIASED_SCORES = 2.0, 14.0  # for each attention score, without and with a learned position bias
OF_LOGITS = 20.0
OF_INPUTS = 12.0  # of a layer that is recomputed, for each element of its input

CONTEXT = 1 << 30  # bytes that CUDA, NCCL and torch's libraries take
PROBE = (16, 64, 16)  # rows of the built-in probe that go beside a batch, their ids and their decoder's

BUCKET = 20_000_000  # elements of DeepSpeed's buckets of gradients; its own 500 million in four of them are 8 GB
LIVE, AHEAD = 200_000_000, 50_000_000  # elements that ZeRO-3 keeps gathered, and gathers before they are needed


class Needs:
    """A finetune of a stock model in numbers, from its config alone.

    ``parameters``, ``largest_block``, ``outside_blocks``: of the model, of its largest layer, of what is in no layer.
    ``block_classes``: the names of its layers' classes; ``names_its_blocks``: whether its own class says which they
    are.
    """

    def __init__(self, recipe: Recipe, config: Any, kind: Any) -> None:
        self.recipe = recipe
        with torch.device("meta"):
            # Stock code would make it in the checkpoint's dtype, and writes another into the config.
            dtype = PRECISION_DTYPES[recipe.optimizer.weights]
            self.model = kind._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=dtype)
        self.blocks = _blocks(self.model)
        sizes = [sum(p.numel() for p in block.parameters()) for block in self.blocks]
        self.parameters = sum(p.numel() for p in self.model.parameters())
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if head is not None and head.weight is embedding.weight and not _says_tied(config):
            self.parameters += head.weight.numel()  # tied as long as no file has a head of its own
        self.largest_block = max(sizes, default=self.parameters)
        self.outside_blocks = self.parameters - sum(sizes)
        self.block_classes = tuple(sorted({type(block).__name__ for block in self.blocks}))
        self.names_its_blocks = bool(getattr(self.model, "_no_split_modules", None))
        data = recipe.data
        self.shapes = [(data.batch_size, data.input_length, data.target_length)]
        self.shapes += [PROBE] if recipe.penalty.form != "none" else []

    def activations(self, *, gathers: bool = False) -> float:
        """Return the most bytes that a step's pass of one process holds beside weights and their gradients; batch and
        probe have a backward each. gathers: linears are ZeRO-3's, which keep no copies for autocast."""
        copies = self.recipe.precision[-1] != "fp32" and not gathers and not self.recipe.gradient_checkpointing
        return max(self._kept(*shape) for shape in self.shapes) + 2.0 * self.parameters * copies

    def _kept(self, rows: int, length: int, target: int) -> float:
        config, head = config_of(self.model), self.model.get_output_embeddings()
        if is_causal(config):
            length = length + target
        read = {*self.model.get_encoder().modules()} if takes_decoder_ids(config) else {*self.model.modules()}
        scores, of_layers = 0, 0.0
        for block in self.blocks:
            keys = length * length if block in read else target * target + length * target
            scores += rows * config.num_attention_heads * keys
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                tokens = rows * (length if module in read else target)
                of_layers += OF_LINEARS * tokens * (module.in_features + module.out_features) * (module is not head)
        biased = hasattr(config, "relative_attention_num_buckets")
        of_layers += scores * (OF_BIASED_SCORES if biased else OF_SCORES)
        if self.recipe.gradient_checkpointing:
            inputs = sum(rows * (length if block in read else target) for block in self.blocks)
            of_layers = of_layers / max(1, len(self.blocks) // 2) + OF_INPUTS * inputs * config.hidden_size
        of_head = 0.0 if head is None else OF_LOGITS * rows * (target or length) * head.out_features
        return of_layers + of_head


def _says_tied(config: Any) -> bool:
    """Whether a config says that the head is tied; T5's says so of all, and keeps what it said in another key."""
    known = of_model_type(config.model_type)
    return bool(getattr(config, known.output_scale_key if known else "", config.tie_word_embeddings))


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists.append(path)
    return [block for path in lists for block in model.get_submodule(path).children()]


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
    held["activations"] = needs.activations(gathers=kind.startswith("zero3"))
    return {name: size for name, size in held.items() if size}


def of_the_machine(kind: str, needs: Needs, recipe: Recipe, processes: int) -> float:
    """Return the bytes that all processes together take of the machine's own memory: each reads student and teacher
    whole, and what is offloaded stays there."""
    reading = processes * needs.parameters * (4 + (4 if recipe.distillation.weight else 0))
    each = WEIGHT_BYTES[recipe.optimizer.weights]
    stays = 2 * each + MOMENT_BYTES[recipe.optimizer.moments] + (each if kind == "zero3-offload" else 0)
    return float(max(reading, needs.parameters * stays if kind.endswith("offload") else 0))


def total(held: Mapping[str, float], *, on_gpu: bool) -> float:
    return sum(held.values()) + (CONTEXT if on_gpu else 0)
