"""The weights of a checkpoint merged with a LoRA adapter, for ``certify --adapter``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint.adapters import TENSORS, config_of
from ..checkpoint.naming import in_modules
from ..errors import UserError, first_line
from ..families.layout import Layout, ResolvedTensor, TensorReader

PREFIX = "base_model.model."  # what PEFT puts before the name of every module


@dataclass(frozen=True)
class Part:
    """What an adapter's tensor is to the checkpoint's: the axis there of each of its own axes, None for the rank.
    ``made``: it makes the output, so a factor on the tensor scales it too. ``magnitude``: the length of a row or of an
    embedding's column."""

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


def part_of(name: str) -> tuple[str, Part | None]:
    """Return the checkpoint's tensor name, and which part an adapter's tensor is; None for the tensor itself."""
    plain = name.removeprefix(PREFIX)
    for part in PARTS:
        if plain.endswith(part.suffix):
            kind = "bias" if part.suffix == ".base_layer.bias" else "weight"
            return f"{plain.removesuffix(part.suffix)}.{kind}", part
    return plain, None


def check_shape(name: str, values: Tensor, tensor: ResolvedTensor, part: Part) -> None:
    wanted = [None if axis is None else tensor.shape[axis] for axis in part.axes]
    fits = values.dim() == len(wanted) and all(
        size is None or size == length for size, length in zip(wanted, values.shape, strict=True)
    )
    if not fits or not values.is_floating_point():
        raise UserError(
            f"{name} has shape {list(values.shape)} ({values.dtype}), which does not go on {tensor.name} of"
            f" {list(tensor.shape)}; give an adapter of this very checkpoint"
        )


def tensors_by_module(layout: Layout) -> dict[str, ResolvedTensor]:
    embedding = layout.tensors[layout.family.embedding]
    shared = (*layout.family.copies, *([layout.family.head] if layout.tied else []))
    return dict.fromkeys(shared, embedding) | dict(layout.tensors)


def target_of(name: str, target: str, layout: Layout, named: Mapping[str, ResolvedTensor]) -> str:
    """Return the layout's name of an adapter's ``target``, which older transformers call as files do."""
    known = in_modules(target, named)
    if known not in named:
        raise UserError(
            f"{name}: this {layout.family.title} has no tensor {target}; give an adapter of this very checkpoint"
        )
    return known


def merged_update(tensors: Mapping[str, Tensor], layout: Layout, scaling: Mapping[str, float]) -> dict[str, Tensor]:
    """Return what an adapter of A and B adds to each tensor, fp32, by name. scaling: alpha/r or its like, by module
    path. Raises UserError for an adapter of something else, without a half, or with two parts on one tensor."""
    updates: dict[str, Tensor] = {}
    named = tensors_by_module(layout)
    for name, values in tensors.items():
        target, part = part_of(name)
        on = named[target_of(name, target, layout, named)]
        assert part is not None  # an A or a B
        check_shape(name, values, on, part)
        if not part.made:
            continue
        other = tensors.get(name.replace(".lora_B", ".lora_A").replace("_embedding_B", "_embedding_A"))
        if other is None or other.shape[0] != values.shape[1]:
            raise UserError(f"{name}: has no A of its rank beside it; save the adapter again")
        update = values.float() @ other.float() * scaling[target.rpartition(".")[0]]
        if on.name in updates:
            raise UserError(f"{name}: is the second that is merged into {on.name}; merge it with merge_and_unload()")
        updates[on.name] = update.T if "_embedding_" in part.suffix else update
    return updates


MERGED = re.compile(r"\.lora_(embedding_)?[AB](\.weight)?$")
"""Parts of an adapter that can be merged into a weight by themselves."""


def read_tensors(folder: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(folder / TENSORS)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / TENSORS}: cannot be read ({first_line(error)}); save the adapter again") from error
    if not tensors:
        raise UserError(f"{folder / TENSORS}: holds no tensor; save the adapter again")
    return tensors


def merged_weights(adapter: Path, folder: Path, layout: Layout, stored: TensorReader) -> TensorReader:
    """Return a function from a layout's tensor name to merged fp16 values. stored: gives the checkpoint's own. Raises
    UserError for an adapter with more than A and B, not on it, or for the conversion's other side."""
    config, tensors = config_of(adapter, folder), read_tensors(adapter)
    others = [name for name in tensors if not MERGED.search(name)]
    if others:
        raise UserError(
            f"{adapter / TENSORS}: {others[0]} is more than A and B, which are merged here; merge it with PEFT's"
            " merge_and_unload(), and certify what that saves"
        )
    try:
        update = merged_update(tensors, layout, scaling_of(tensors, config))
    except UserError as error:
        raise UserError(f"{adapter / TENSORS}: {error}") from None

    def read(name: str) -> Tensor:
        weight = stored(name)
        return weight if name not in update else (weight.float() + update[name]).half()

    return read


def scaling_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, float]:
    """Return the factor of B·A by module path: alpha/r, or alpha/√r with ``use_rslora``."""
    scalings = {}
    for name, values in tensors.items():
        target, part = part_of(name)
        if part is None or part.suffix not in (".lora_A.weight", ".lora_embedding_A"):
            continue
        path, rank = target.rpartition(".")[0], values.shape[0]
        patterns: Mapping[str, Any] = config.get("alpha_pattern") or {}
        fitting = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path))
        alpha = float(next(fitting, config.get("lora_alpha", 8)))
        scalings[path] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return scalings
