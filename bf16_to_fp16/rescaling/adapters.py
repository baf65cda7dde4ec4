"""LoRA adapters on rescaled weights: the plan of a checkpoint applied to what an adapter adds to it.

W' = 2^E W has the exponents of its rows and columns, so the update B·A becomes B' = 2^rows B and A' = A 2^columns, and
fp32 outputs keep every bit. Whole tensors (``modules_to_save``, biases, rows of an embedding) are scaled as the
checkpoint's are. A DoRA magnitude, the length of a row, follows only where all columns have one exponent. Parts:
https://github.com/huggingface/peft/blob/main/docs/source/developer_guides/checkpoint.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import UserError
from ..families.layout import Layout, ResolvedTensor
from .plan import Plan, axis_exponents, check_plan_fits, correction_of

PREFIX = "base_model.model."  # what PEFT puts before the name of every module


@dataclass(frozen=True)
class Part:
    """What a tensor of an adapter is to one of the checkpoint: which axis of that each of its own axes is, None for the
    rank.

    ``made``: True where it makes the output, and so takes a factor on the tensor as well. ``magnitude``: the length of
    a row (or, of an embedding, a column), taken over the other axis.
    """

    suffix: str
    axes: tuple[int | None, ...]
    made: bool = True
    magnitude: bool = False


PARTS = (
    Part(".lora_A.weight", (None, 1), made=False),
    Part(".lora_B.weight", (0, None)),
    Part(".lora_B.bias", (0,)),
    Part(".lora_embedding_A", (None, 0), made=False),
    Part(".lora_embedding_B", (1, None)),
    Part(".lora_magnitude_vector", (0,), magnitude=True),
    Part(".lora_magnitude_vector.weight", (0,), magnitude=True),
    Part(".token_adapter.trainable_tokens_delta", (None, 1)),
    Part(".base_layer.weight", (0, 1)),
    Part(".base_layer.bias", (0,)),
)
"""The parts of a LoRA adapter by the end of their names; any other name is that of a whole tensor."""


@dataclass(frozen=True)
class Scaled:
    """An adapter's tensor on the other checkpoint.

    ``exact``: it holds every bit. ``widened``: its dtype could not, and it is fp32 now. ``small`` and ``small_before``:
    numbers under fp16's least normal one, 2^-14, which fp16 holds with fewer bits or as 0. ``overflows``: some are over
    65504.
    """

    values: Tensor
    exact: bool
    widened: bool
    small: int
    small_before: int
    overflows: bool


def scaled_adapter(
    tensors: Mapping[str, Tensor], layout: Layout, plan: Plan, head_gain: float = 1.0
) -> dict[str, Scaled]:
    """Return an adapter's tensors, by name, for the checkpoint that ``plan`` makes of one with this layout.

    layout: of the converted checkpoint, for the way back as well, with the inverse plan. head_gain: the factor on a
    head that the conversion separated. Raises UserError, by name, for what is on no tensor of the checkpoint, has
    another shape, or cannot follow the plan.
    """
    check_plan_fits(layout, plan)
    named = tensors_by_module(layout)
    embeddings = {part_of(name)[0] for name in tensors if name.endswith(".lora_embedding_A")}
    scaled = {}
    for name, values in tensors.items():
        target, part = part_of(name)
        check_known(name, target, layout, named)
        if part is not None and part.magnitude and target in embeddings:
            part = replace(part, axes=(1,))  # PEFT turns an embedding's weight over
        factor = 1.0 if layout.tied or target != layout.family.head else head_gain
        scaled[name] = on_tensor(name, values, named[target], part, plan, factor)
    return scaled


def on_tensor(
    name: str, values: Tensor, tensor: ResolvedTensor, part: Part | None, plan: Plan, factor: float
) -> Scaled:
    """Return one tensor of an adapter, scaled with the tensor that it is on; factor: on that, besides its exponents."""
    part = part or Part("", tuple(range(len(tensor.shape))))
    check_shape(name, values, tensor, part)
    exponents = axis_exponents(tensor, plan)
    total = torch.zeros((1,) * values.dim(), dtype=torch.int32)
    for position, axis in enumerate(part.axes):
        if axis is not None:
            total = total + along(exponents[axis], position, values.dim())
    if part.magnitude:
        total = total + uniform(name, tensor.name, exponents[0 if part.axes == (1,) else 1])
    # A whole tensor has the offset in it, what is added to one has not.
    offset = tensor.offset if not part.suffix else 0.0
    return multiplied(name, values, total, factor * correction_of(tensor, plan) if part.made else 1.0, offset)


def part_of(name: str) -> tuple[str, Part | None]:
    """Return the name of the checkpoint's tensor that an adapter's tensor belongs to, and which part it is; None for
    the tensor itself."""
    plain = name.removeprefix(PREFIX)
    for part in PARTS:
        if plain.endswith(part.suffix):
            kind = "bias" if part.suffix == ".base_layer.bias" else "weight"
            return f"{plain.removesuffix(part.suffix)}.{kind}", part
    return plain, None


def along(exponent: int | Tensor, position: int, axes: int) -> int | Tensor:
    """Return an axis's exponents, to be broadcast along one of so many axes."""
    if isinstance(exponent, int):
        return exponent
    return exponent.view([-1 if i == position else 1 for i in range(axes)])


def check_shape(name: str, values: Tensor, tensor: ResolvedTensor, part: Part) -> None:
    """Raise UserError unless the axes that an adapter shares with a tensor are as long as there."""
    wanted = [None if axis is None else tensor.shape[axis] for axis in part.axes]
    fits = values.dim() == len(wanted) and all(
        size is None or size == length for size, length in zip(wanted, values.shape, strict=True)
    )
    if not fits or not values.is_floating_point():
        raise UserError(
            f"{name} has shape {list(values.shape)} ({values.dtype}), which does not go on {tensor.name} of"
            f" {list(tensor.shape)}; give an adapter of this very checkpoint"
        )


def uniform(name: str, target: str, exponent: int | Tensor) -> int:
    """Return the one exponent of the axis that a DoRA magnitude is taken over; raise UserError where it has several."""
    if isinstance(exponent, int):
        return exponent
    first = int(exponent[0])
    if bool((exponent != first).any()):
        raise UserError(
            f"{name}: a DoRA magnitude is the length of a row, and the columns of {target} were scaled by different"
            " powers of two, so that lengths do not follow; merge the adapter into the original and convert that"
        )
    return first


def multiplied(name: str, values: Tensor, exponents: Tensor, factor: float, offset: float = 0.0) -> Scaled:
    """Return ``values``, or their sum with ``offset``, times 2^exponents and a factor, in their dtype if that holds
    every bit, else in fp32."""
    double = values.double()
    wanted = torch.ldexp(double + offset if offset else double, exponents.double()) * factor
    wanted = wanted - offset if offset else wanted  # taking off 0 would turn a -0
    stored = wanted.to(values.dtype)
    same = bool((stored.double() == wanted).all())
    widened = not same and values.dtype != torch.float32
    if widened:
        stored = wanted.float()
    if not bool(torch.isfinite(stored).all()):
        raise UserError(f"{name} holds inf or NaN, or would in fp32; take the adapter as it was trained")
    tiny = torch.finfo(torch.float16).tiny
    return Scaled(
        values=stored,
        exact=same or bool((stored.double() == wanted).all()),
        widened=widened,
        small=int(((stored != 0) & (stored.abs() < tiny)).sum()),
        small_before=int(((double != 0) & (double.abs() < tiny)).sum()),
        overflows=bool((stored.abs() > torch.finfo(torch.float16).max).any()),
    )


def tensors_by_module(layout: Layout) -> dict[str, ResolvedTensor]:
    """Return a layout's tensors under every name that a module of the stock class has for them."""
    embedding = layout.tensors[layout.family.embedding]
    shared = (*layout.family.copies, *([layout.family.head] if layout.tied else []))
    return dict.fromkeys(shared, embedding) | dict(layout.tensors)


def check_known(name: str, target: str, layout: Layout, named: Mapping[str, ResolvedTensor]) -> None:
    """Raise UserError for a tensor of an adapter that is on none of the checkpoint's."""
    if target not in named:
        raise UserError(
            f"{name}: this {layout.family.title} has no tensor {target}; give an adapter of this very checkpoint"
        )


def merged_update(tensors: Mapping[str, Tensor], layout: Layout, scaling: Mapping[str, float]) -> dict[str, Tensor]:
    """Return what an adapter of A and B adds to each tensor of its checkpoint when it is merged, fp32, by name.

    scaling: by module path, alpha/r or what the adapter has in its place. Raises UserError for an adapter that is on
    something else, lacks a half, or of which two parts are on one tensor.
    """
    updates: dict[str, Tensor] = {}
    named = tensors_by_module(layout)
    for name, values in tensors.items():
        target, part = part_of(name)
        check_known(name, target, layout, named)
        assert part is not None  # an A or a B
        check_shape(name, values, named[target], part)
        if not part.made:
            continue
        other = tensors.get(name.replace(".lora_B", ".lora_A").replace("_embedding_B", "_embedding_A"))
        if other is None or other.shape[0] != values.shape[1]:
            raise UserError(f"{name}: has no A of its rank beside it; save the adapter again")
        update = values.float() @ other.float() * scaling[target.rpartition(".")[0]]
        tensor = named[target].name
        if tensor in updates:
            raise UserError(f"{name}: is the second that is merged into {tensor}; merge it with merge_and_unload()")
        updates[tensor] = update.T if "_embedding_" in part.suffix else update
    return updates
