"""Rescale LoRA adapters for a rescaled checkpoint.

If the plan scales a weight's rows and columns, the update B·A becomes (2^rows B)·(A 2^columns). fp32 outputs keep every
bit. Tensors that an adapter stores whole are scaled as the checkpoint's are. Tensor names:
https://github.com/huggingface/peft/blob/main/docs/source/developer_guides/checkpoint.md"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.naming import name_in_modules
from ..errors import UserError
from ..families.layout import Layout, ResolvedTensor
from .apply import scale
from .exponents import axis_exponents, check_plan_fits, correction_of
from .plan import Plan

PREFIX = "base_model.model."  # what PEFT puts before the name of every module


@dataclass(frozen=True)
class AdapterTensor:
    """A kind of tensor in a LoRA adapter, known by the end of its name (``suffix``)."""

    suffix: str
    axes: tuple[int | None, ...]  # for each axis the matching one of the checkpoint's tensor; None for the rank
    takes_gain: bool = True  # whether a gain on the checkpoint's tensor multiplies it too


PARTS = (
    AdapterTensor(".lora_A.weight", (None, 1), takes_gain=False),
    AdapterTensor(".lora_B.weight", (0, None)),
    AdapterTensor(".lora_B.bias", (0,)),
    AdapterTensor(".lora_embedding_A", (None, 0), takes_gain=False),
    AdapterTensor(".lora_embedding_B", (1, None)),
    AdapterTensor(".token_adapter.trainable_tokens_delta", (None, 1)),
    AdapterTensor(".base_layer.weight", (0, 1)),
    AdapterTensor(".base_layer.bias", (0,)),
)
"""The tensors of a LoRA adapter by the end of their names; any other tensor is stored whole."""


def part_of(name: str) -> tuple[str, AdapterTensor | None]:
    """Return which tensor of the checkpoint is changed by the adapter's tensor ``name``, and the adapter tensor's entry
    of ``PARTS``. The entry is None if the adapter stores a whole tensor."""
    plain = name.removeprefix(PREFIX)
    for part in PARTS:
        if plain.endswith(part.suffix):
            kind = "bias" if part.suffix == ".base_layer.bias" else "weight"
            return f"{plain.removesuffix(part.suffix)}.{kind}", part
    return plain, None


def check_shape(name: str, values: Tensor, tensor: ResolvedTensor, part: AdapterTensor) -> None:
    wanted = [None if axis is None else tensor.shape[axis] for axis in part.axes]
    fits = values.dim() == len(wanted) and all(
        size is None or size == length for size, length in zip(wanted, values.shape, strict=True)
    )
    if not fits or not values.is_floating_point():
        raise UserError(
            f"{name} has shape {list(values.shape)} ({values.dtype}), which does not fit {tensor.name} of"
            f" {list(tensor.shape)}; give an adapter of this very checkpoint"
        )


def scaled_adapter(
    tensors: Mapping[str, Tensor], layout: Layout, plan: Plan, head_gain: float = 1.0
) -> dict[str, Tensor]:
    """Return an adapter's tensors, scaled for the checkpoint that ``plan`` makes. A tensor whose dtype would lose bits
    becomes fp32.

    layout: the layout of the converted checkpoint, for a plan and for its inverse. head_gain: the factor on a head that
    the conversion separated from the embedding. Raises UserError for a tensor that cannot be rescaled."""
    check_plan_fits(layout, plan)
    embedding = layout.tensors[layout.family.embedding]
    shared = (*layout.family.copies, *([layout.family.head] if layout.tied else []))
    named = dict.fromkeys(shared, embedding) | dict(layout.tensors)
    scaled = {}
    for name, values in tensors.items():
        stated, part = part_of(name)
        target = name_in_modules(stated, named)
        if target not in named:
            raise UserError(
                f"{name}: this {layout.family.title} has no tensor {stated}; give an adapter of this very checkpoint"
            )
        factor = 1.0 if layout.tied or target != layout.family.head else head_gain
        scaled[name] = on_tensor(name, values, named[target], part, plan, factor)
    return scaled


def on_tensor(
    name: str, values: Tensor, tensor: ResolvedTensor, part: AdapterTensor | None, plan: Plan, factor: float
) -> Tensor:
    part = part or AdapterTensor("", tuple(range(len(tensor.shape))))
    check_shape(name, values, tensor, part)
    exponents = axis_exponents(tensor, plan)
    total = torch.zeros((1,) * values.dim(), dtype=torch.int32)
    for position, axis in enumerate(part.axes):
        if axis is not None:
            shape = [-1 if i == position else 1 for i in range(values.dim())]
            total = total + torch.as_tensor(exponents[axis]).view(shape)
    # A whole tensor includes the offset; an update of one does not.
    offset = tensor.offset if not part.suffix else 0.0
    wanted = values.to(torch.float64, copy=True)
    scale(wanted, total, offset, factor * correction_of(tensor, plan) if part.takes_gain else 1.0)
    stored = wanted.to(values.dtype)
    if not torch.equal(stored.double(), wanted):
        stored = wanted.float()
    if not bool(torch.isfinite(stored).all()):
        raise UserError(f"{name} is inf or NaN after scaling; give an adapter whose values are finite and smaller")
    return stored
