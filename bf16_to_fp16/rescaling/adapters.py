"""LoRA adapters for a rescaled checkpoint: scale an adapter's tensors by the checkpoint's plan.

The plan multiplies rows and columns of a weight by powers of two. The update B·A becomes (2^rows B)·(A 2^columns), so
fp32 outputs keep every bit. Tensors stored whole (``modules_to_save``, biases, rows of an embedding) are scaled as the
checkpoint's are. A DoRA magnitude, the length of a row, can be scaled only if all columns have one exponent. Tensor
names: https://github.com/huggingface/peft/blob/main/docs/source/developer_guides/checkpoint.md"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoint.naming import in_modules
from ..errors import UserError
from ..families.layout import Layout, ResolvedTensor
from .exponents import axis_exponents, check_plan_fits, correction_of, exponents_of
from .plan import Plan

UNMOVED, PROMPT = ".ia3_l", "prompt_embeddings"
"""IA3's factors of channels, which no plan changes, and the rows of prompt tuning, which replace embeddings."""


PREFIX = "base_model.model."  # what PEFT puts before the name of every module


@dataclass(frozen=True)
class AdapterTensor:
    """One kind of tensor in an adapter. ``axes``: for each of its axes the matching axis of the checkpoint's tensor,
    None for the rank. ``scaled``: whether a gain on the checkpoint's tensor must multiply this one too. ``magnitude``:
    whether it holds the lengths of rows, or of an embedding's columns."""

    suffix: str
    axes: tuple[int | None, ...]
    scaled: bool = True
    magnitude: bool = False


PARTS = (
    AdapterTensor(".lora_A.weight", (None, 1), scaled=False),
    AdapterTensor(".lora_B.weight", (0, None)),
    AdapterTensor(".lora_B.bias", (0,)),
    AdapterTensor(".lora_embedding_A", (None, 0), scaled=False),
    AdapterTensor(".lora_embedding_B", (1, None)),
    AdapterTensor(".lora_magnitude_vector", (0,), magnitude=True),
    AdapterTensor(".lora_magnitude_vector.weight", (0,), magnitude=True),
    AdapterTensor(".token_adapter.trainable_tokens_delta", (None, 1)),
    AdapterTensor(".base_layer.weight", (0, 1)),
    AdapterTensor(".base_layer.bias", (0,)),
)
"""The tensors of a LoRA adapter by the end of their names; any other tensor is stored whole."""


def part_of(name: str) -> tuple[str, AdapterTensor | None]:
    """Return the name of the checkpoint's tensor that the adapter's tensor ``name`` changes, and its entry of
    ``PARTS``; None for a tensor stored whole."""
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


@dataclass(frozen=True)
class Scaled:
    """An adapter's tensor after scaling. ``exact``: no bit is lost. ``widened``: stored in fp32 to keep its bits.
    ``overflows``: some values are over 65504."""

    values: Tensor
    exact: bool
    widened: bool
    overflows: bool


def scaled_adapter(
    tensors: Mapping[str, Tensor], layout: Layout, plan: Plan, head_gain: float = 1.0
) -> dict[str, Scaled]:
    """Return an adapter's tensors, by name, scaled for the checkpoint that ``plan`` makes.

    layout: the converted checkpoint's, even if ``plan`` is the inverse and leads back to the source. head_gain: the
    factor in a head that was separated from the embedding. Raises UserError for a tensor that cannot be rescaled."""
    check_plan_fits(layout, plan)
    embedding = layout.tensors[layout.family.embedding]
    shared = (*layout.family.copies, *([layout.family.head] if layout.tied else []))
    named = dict.fromkeys(shared, embedding) | dict(layout.tensors)
    embeddings = {part_of(name)[0] for name in tensors if name.endswith(".lora_embedding_A")}
    scaled = {}
    for name, values in tensors.items():
        if name.endswith(UNMOVED):
            scaled[name] = multiplied(name, values, torch.zeros(1, dtype=torch.int32), 1.0)
            continue
        if name == PROMPT:
            check_shape(name, values, embedding, AdapterTensor("", (None, 1)))
            columns = exponents_of(replace(embedding, axes=(None, embedding.axes[1]), offset=0.0), plan)
            scaled[name] = multiplied(name, values, columns.full(tuple(values.shape)), 1.0)
            continue
        stated, part = part_of(name)
        if part is not None and part.magnitude and stated in embeddings:
            part = replace(part, axes=(1,))  # PEFT transposes an embedding's weight
        target = in_modules(stated, named)
        if target not in named:
            raise UserError(
                f"{name}: this {layout.family.title} has no tensor {stated}; give an adapter of this very checkpoint"
            )
        factor = 1.0 if layout.tied or target != layout.family.head else head_gain
        scaled[name] = on_tensor(name, values, named[target], part, plan, factor)
    return scaled


def on_tensor(
    name: str, values: Tensor, tensor: ResolvedTensor, part: AdapterTensor | None, plan: Plan, factor: float
) -> Scaled:
    part = part or AdapterTensor("", tuple(range(len(tensor.shape))))
    check_shape(name, values, tensor, part)
    exponents = axis_exponents(tensor, plan)
    total = torch.zeros((1,) * values.dim(), dtype=torch.int32)
    for position, axis in enumerate(part.axes):
        if axis is not None:
            shape = [-1 if i == position else 1 for i in range(values.dim())]
            total = total + torch.as_tensor(exponents[axis]).view(shape)
    if part.magnitude:
        total = total + common_exponent(name, tensor.name, exponents[0 if part.axes == (1,) else 1])
    # A whole tensor includes the offset; an update of one does not.
    offset = tensor.offset if not part.suffix else 0.0
    return multiplied(name, values, total, factor * correction_of(tensor, plan) if part.scaled else 1.0, offset)


def common_exponent(name: str, target: str, exponent: float | Tensor) -> float:
    """Return the common exponent of a weight's columns, for its DoRA magnitude; raise UserError if they differ."""
    if not isinstance(exponent, Tensor):
        return exponent
    first = float(exponent[0])
    if bool((exponent != first).any()):
        raise UserError(
            f"{name}: this DoRA magnitude cannot be rescaled, since the columns of {target} are multiplied by different"
            " powers of two; merge the adapter into the original and convert that"
        )
    return first


def multiplied(name: str, values: Tensor, exponents: Tensor, factor: float, offset: float = 0.0) -> Scaled:
    double = values.double()
    wanted = torch.ldexp(double + offset if offset else double, exponents.double()) * factor
    wanted = wanted - offset if offset else wanted  # subtracting 0 would change the sign of -0
    stored = wanted.to(values.dtype)
    same = bool((stored.double() == wanted).all())
    widened = not same and values.dtype != torch.float32
    if widened:
        stored = wanted.float()
    if not bool(torch.isfinite(stored).all()):
        raise UserError(f"{name} holds inf or NaN, or would after scaling; take the adapter as it was trained")
    return Scaled(
        values=stored,
        exact=same or bool((stored.double() == wanted).all()),
        widened=widened,
        overflows=bool((stored.abs() > torch.finfo(torch.float16).max).any()),
    )
