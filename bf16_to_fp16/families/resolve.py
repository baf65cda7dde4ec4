"""Apply a family to a checkpoint: find the role of every tensor.

The tensors decide whether a head is tied, because transformers 5 writes ``tie_word_embeddings: true`` beside a separate
head too. Every tensor must have a role: transformers fills a missing one at random and drops an unknown one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.formats import SAFETENSORS_NAMES
from ..checkpoint.headers import FLOATING_DTYPES, TensorInfo
from ..checkpoint.reader import Checkpoint
from ..checkpoint.sources import RESTORE
from ..errors import UserError
from .configs import axis_size, looked_up
from .experts import experts_apart
from .from_config import declared, in_folder
from .known import class_by_tensor_names, of_model_type
from .layout import Layout, ResolvedSignal, ResolvedTensor, TensorReader, TensorSource
from .signals import Tensor, carried_by
from .spread import channels_along
from .types import Family, OutputScale, Part, StockClass
from .wiring import Head, StackEnds

ROWS_AT_A_TIME = 4096

COMPUTED = ".rotary_emb.inv_freq"  # of a layer or a model; older files hold it, and every stock class computes it


def resolve(checkpoint: TensorSource, *, untie: bool = False) -> Layout:
    """Return the layout of a checkpoint. untie: whether a tied head gets a copy of the embedding, if its family allows
    that. Raises UserError for a tensor that is missing, unknown or misshapen, and for a bad config.json."""
    with in_folder(checkpoint.source):
        return classified(checkpoint, untie=untie)


def classified(checkpoint: TensorSource, *, untie: bool) -> Layout:
    config, names = checkpoint.config, set(checkpoint.tensors)
    bare, parts = declared(config, len(names))
    family, stock = bare.family, bare.stock
    embedding = next((n for n in (family.embedding, *family.copies) if n in names), None)
    if embedding is None:
        raise UserError(
            f"{checkpoint.source}: tensor {family.embedding} is missing{under_other_names(checkpoint, stock)}"
        )
    dropped = find_dropped(checkpoint, family, embedding, stock)
    tied = is_tied(checkpoint, family, embedding) if stock.is_language_model else None
    if tied and family.head in names:
        dropped[family.head] = f"the same values as {family.embedding}, to which transformers classes tie it"

    separate = bool(tied and untie and family.untie)
    parts.append(stock.end or (family.tied_head if tied and not separate else family.untied_head))
    parts += family.brings(config) if family.brings is not None else ()

    scale, size_of = head_scale(family, config, tied), cache(partial(axis_size, family, config))
    sources = {family.embedding: embedding}
    if separate:
        sources[family.head] = embedding
    tensors = {}
    for record in (t for part in parts for t in part.tensors):
        if record.name not in tensors:
            gain = scale if separate and record.name == family.head and family.untie == "scaled" else 1.0
            resolved = resolve_tensor(checkpoint, size_of, record, sources.get(record.name, record.name), gain)
            if resolved is not None:
                tensors[record.name] = resolved
    says_apart = tied is None and says_untied(family, config)
    if family.ties_all_or_nothing and (separate or tied is False or says_apart):
        # Stock code fills a tensor at random that it does not tie and a file lacks.
        for copy in family.copies:
            if says_apart and (copy not in names or copy.startswith(unread(family, stock))):
                continue
            tensors[copy] = replace(tensors[family.embedding], name=copy)
            if dropped.pop(copy, None):
                tensors[copy] = replace(tensors[copy], source=copy)

    tensors = carried(checkpoint, family) | tensors
    used = {t.source for t in tensors.values() if t.source is not None}
    for name in sorted(names - used - set(dropped)):
        if computed(name, used) or any(fnmatchcase(name, pattern) for pattern in family.ignorable):
            dropped[name] = "transformers classes ignore it"
            continue
        raise UserError(
            f"{checkpoint.source}: tensor {name} is not part of {family.title} as config.json describes it;"
            " transformers would drop it, so check the config's layer counts or remove the tensor"
        )
    return replace(
        bare,
        tied=tied if not separate else False,
        tensors=tensors,
        signals=merge_signals(size_of, parts, tensors),
        dropped=dropped,
        head_scale=1.0 if separate and family.untie == "scaled" else scale,
        topology=tuple(part.topology for part in parts if part.topology is not None),
    )


def computed(name: str, used: Iterable[str]) -> bool:
    place, _, rest = f".{name}".rpartition(COMPUTED)
    return not rest and any(f".{each}".startswith(f"{place}.") for each in used)


def under_other_names(checkpoint: TensorSource, stock: StockClass) -> str:
    """Return the end of the message about a missing embedding, which says how to mend it."""
    other = class_by_tensor_names(checkpoint.config, checkpoint.tensors)
    if other is None:
        return "; take the whole original checkpoint"
    own, name = stock.names[0], other.names[0]
    return (
        f" and the tensors have the names of {name}; load and save the checkpoint with {own} of transformers 5, or, if"
        f' the checkpoint has no head, write "architectures": ["{name}"] into config.json'
    )


def carried(checkpoint: TensorSource, family: Family) -> dict[str, ResolvedTensor]:
    projector = family.projector
    if projector is None:
        return {}
    tower = {name: info for name, info in checkpoint.tensors.items() if name.startswith(f"{projector.tower}.")}
    for name in tower:
        check_floating(checkpoint, name)
    return {n: ResolvedTensor(n, n, tuple(info.shape), (None,) * len(info.shape)) for n, info in tower.items()}


def check_floating(checkpoint: TensorSource, name: str) -> None:
    if (dtype := checkpoint.tensors[name].dtype) not in FLOATING_DTYPES:
        raise UserError(f"{checkpoint.source}: tensor {name} is {dtype}; use the checkpoint from before quantisation")


def find_dropped(checkpoint: TensorSource, family: Family, embedding: str, stock: StockClass) -> dict[str, str]:
    dropped = {}
    of_logits = () if stock.is_language_model else (family.head, family.logits_bias)
    others = (each.end for each in family.classes if each.end is not None and each is not stock)
    heads = [part.topology for part in others if isinstance(part.topology, Head)]
    own = {tensor.name for tensor in stock.end.tensors} if stock.end is not None else set()
    of_others = {*of_logits, *(n for head in heads for each in head.linears for n in (each.weight, each.bias))} - own
    for name in checkpoint.tensors:
        if name in family.ignorable:
            dropped[name] = "transformers classes ignore it"
        elif name.startswith(unread(family, stock)) or name in of_others:
            dropped[name] = f"{stock.names[0]} ignores it"
        elif name in family.copies and name != embedding:
            if not same_values(checkpoint, name, embedding):
                raise UserError(
                    f"{checkpoint.source}: {name} differs from {embedding}, but they are one tensor in"
                    f" {family.title}; remove {name} if {embedding} is right, or {RESTORE}"
                )
            dropped[name] = f"the same values as {family.embedding}, to which transformers classes tie it"
    return dropped


def unread(family: Family, stock: StockClass) -> tuple[str, ...]:
    others = [ends.topology for ends in family.ends[1:]] if not stock.decodes else []
    return tuple(f"{ends.at}." for ends in others if isinstance(ends, StackEnds))


def is_tied(checkpoint: TensorSource, family: Family, embedding: str) -> bool:
    """Return whether the embedding serves as head. A stored head with the embedding's values counts as a copy, unless
    the config says that the two are separate."""
    if family.head not in checkpoint.tensors:
        return True
    if says_untied(family, checkpoint.config):
        return False
    return same_values(checkpoint, family.head, embedding)


def says_untied(family: Family, config: Mapping[str, object]) -> bool:
    return any(looked_up(config, key) is False for key in family.tie_keys)


def head_scale(family: Family, config: Mapping[str, object], tied: bool | None) -> float:
    """Return the factor by which transformers 5 multiplies the decoder's output before the head; 1 for none."""
    scales: object = tied is not None and family.output_scale is not OutputScale.NEVER
    if scales and family.output_scale is OutputScale.CONFIG:
        scales = config.get(family.output_scale_key, config.get("tie_word_embeddings") is not False)
    return axis_size(family, config, "model") ** -0.5 if scales else 1.0


def same_values(checkpoint: TensorSource, one: str, other: str) -> bool:
    a, b = checkpoint.tensors[one], checkpoint.tensors[other]
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    for start in range(0, a.shape[0], ROWS_AT_A_TIME):
        stop = min(start + ROWS_AT_A_TIME, a.shape[0])
        left, right = (checkpoint.read_rows(n, start, stop).view(torch.uint8) for n in (one, other))
        if not torch.equal(left, right):
            return False
    return True


def resolve_tensor(
    checkpoint: TensorSource, size_of: Callable[[str], int], record: Tensor, source: str, gain: float
) -> ResolvedTensor | None:
    rows, *columns = map(size_of, record.shape)
    shape = (rows + record.ahead, *columns)
    info = checkpoint.tensors.get(source)
    if info is None:
        if record.generate is not None:
            return ResolvedTensor(record.name, None, shape, record.axes, record.generate)
        if record.absent:
            return None
        raise UserError(
            f"{checkpoint.source}: tensor {record.name} is missing, and transformers would fill it with random numbers;"
            " take the whole original checkpoint"
        )
    check_floating(checkpoint, source)
    if tuple(info.shape) != shape:
        raise UserError(
            f"{checkpoint.source}: tensor {source} has shape {list(info.shape)} but config.json asks for {list(shape)};"
            " use the config.json that belongs to these weights"
        )
    own = record.offset, record.ahead, record.in_fp32
    return ResolvedTensor(record.name, source, shape, record.axes, None, gain, *own)


def merge_signals(
    size_of: Callable[[str], int], parts: list[Part], tensors: Mapping[str, ResolvedTensor]
) -> dict[str, ResolvedSignal]:
    merged: dict[str, ResolvedSignal] = {}
    for record in (s for part in parts for s in part.signals):
        old = merged.get(record.name)
        merged[record.name] = ResolvedSignal(
            record.name,
            record.kind,
            old.size if old else channels_along(size_of(record.size), record.spread),
            old.seen + record.seen if old else record.seen,
            old.added_at + record.added_at if old else record.added_at,
        )
    for tensor in tensors.values():
        for axis, length in zip(tensor.axes, tensor.shape, strict=True):
            for signal, spread in ((merged[each.signal], each.spread) for each in carried_by(axis)):
                if not signal.kind.has_one_exponent and signal.size != channels_along(length, spread):
                    raise AssertionError(f"{tensor.name}: axis of {length}, but {signal.name} has size {signal.size}")
    return merged


def stored(checkpoint: TensorSource, tensor: ResolvedTensor) -> torch.Tensor:
    """Return a tensor before rescaling, in the file's dtype; in fp32 if it is generated or multiplied by a ``gain``."""
    if tensor.source is None:
        assert tensor.generate is not None
        return tensor.generate(tensor.shape[0], tensor.shape[1])
    weight = checkpoint.read(tensor.source)
    return weight if tensor.gain == 1.0 else weight.float() * tensor.gain


def effective(tensor: ResolvedTensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the values that transformers computes with: ``weight`` unchanged, or plus its offset in fp32 (fp64 for
    fp64)."""
    if not tensor.offset:
        return weight
    return (weight if weight.dtype == torch.float64 else weight.float()) + tensor.offset


def unscaled(checkpoint: TensorSource, tensor: ResolvedTensor) -> torch.Tensor:
    return effective(tensor, stored(checkpoint, tensor))


def source_weights(checkpoint: TensorSource, layout: Layout) -> TensorReader:
    return lambda name: unscaled(checkpoint, layout.tensors[name])


class ModelTensors:
    def __init__(self, model: Any) -> None:
        experts_apart(model, of_model_type(model.config.model_type))
        self.source = type(model).__name__
        self.config: dict[str, object] = model.config.to_dict() | {"architectures": [self.source]}
        self._state = model.state_dict()
        self.tensors = {
            name: TensorInfo(name, SAFETENSORS_NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape), Path(), 0, t.nbytes)
            for name, t in self._state.items()
        }

    def read(self, name: str) -> torch.Tensor:
        return self._state[name]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._state[name][start:stop].contiguous()

    def read_some_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        return self._state[name][list(rows)]


def check_norms(checkpoint: Checkpoint, layout: Layout) -> None:
    """Raise UserError for a norm whose gains are all 0, because its output would not depend on its input."""
    for path in layout.norms:
        tensor = layout.tensors.get(f"{path}.weight")
        name = None if tensor is None else tensor.source
        if tensor is not None and name is not None and not unscaled(checkpoint, tensor).any():
            zero = f"{-tensor.offset:g}" if tensor.offset else "zero"
            raise UserError(
                f"{checkpoint.tensors[name].file}: tensor {name} is {zero} throughout; the file is damaged,"
                " fetch it again from the original checkpoint"
            )


def eps_attribute(norm: torch.nn.Module) -> str:
    return "eps" if hasattr(norm, "eps") else "variance_epsilon"
