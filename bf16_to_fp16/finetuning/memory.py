"""The memory of one card in a finetune under DDP, ZeRO and FSDP, as a sum of terms.

Weights, gradients and moments are counted from shapes. Activations are a formula of tokens, linears and scores, fitted
to traced steps of Flan-T5, mT5 and Pegasus. It gives 0.75 to 1.37 times the traced activations; the sums for the
shipped recipes are 0.99 to 1.07 times the traced ones.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..families.known import of_model_type
from ..measuring.stock import config_of, is_causal, takes_decoder_ids
from .distillation import blocks_of
from .recipe import Recipe

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
    """Numbers of parameters: of the model, its largest layer (``largest_block``) and what is in no layer. ``blocks``:
    its layers; ``activations``: bytes that a pass of one process holds beside weights and gradients."""

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
        if head is not None and head.weight is embedding.weight and not _says_tied(config):
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
        read = {*self.model.get_encoder().modules()} if takes_decoder_ids(config) else {*self.model.modules()}
        tokens = {module: rows * (length if module in read else target) for module in self.model.modules()}
        linears = [module for module in tokens if isinstance(module, nn.Linear) and module is not head]
        of_layers = sum(OF_LINEARS * tokens[each] * (each.in_features + each.out_features) for each in linears)
        keys = sum(length * length if block in read else target * target + length * target for block in self.blocks)
        biased = hasattr(config, "relative_attention_num_buckets")
        of_layers += rows * config.num_attention_heads * keys * (OF_BIASED_SCORES if biased else OF_SCORES)
        if self.recipe.gradient_checkpointing:
            inputs = sum(tokens[block] for block in self.blocks)
            of_layers = of_layers / max(1, len(self.blocks) // 2) + OF_INPUTS * inputs * config.hidden_size
        return of_layers + (0.0 if head is None else OF_LOGITS * rows * (target or length) * head.out_features)


def _says_tied(config: Any) -> bool:
    """Whether a config says that the head is tied; T5's says so of all, and keeps what it said in another key."""
    known = of_model_type(config.model_type)
    return bool(getattr(config, known.output_scale_key if known else "", config.tie_word_embeddings))


def terms(kind: str, needs: Needs, processes: int, teacher_bytes: int, *, on_gpu: bool) -> dict[str, float]:
    """Return a process's bytes on its card: weights, gradients, moments and so on. kind: a file name of
    launch/accelerate. teacher_bytes: bytes of one weight of the teacher, 0 without a teacher."""
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
