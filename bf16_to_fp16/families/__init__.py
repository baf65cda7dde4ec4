"""The supported families, and ``resolve``: which tensor of a checkpoint is what.

A family is chosen by the config's ``model_type``. Whether a head is tied is decided from the tensors, because the
flag in the config has meant different things: transformers 5 writes ``true`` beside a head of its own. Every tensor
must be accounted for, since stock code fills a missing one with random numbers and drops one that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import UserError
from .mt5 import MT5
from .pegasus import PEGASUS
from .t5 import T5
from .types import (
    Family,
    Kind,
    Layout,
    Part,
    ResolvedSignal,
    ResolvedTensor,
    Sighting,
    Signal,
    Stack,
    Tensor,
    TensorSource,
    size,
    value,
)
from .umt5 import UMT5

FAMILIES: tuple[Family, ...] = (T5, MT5, UMT5, PEGASUS)
"""Every supported family."""

FLOATING = {"F64", "F32", "F16", "BF16"}
ROWS_AT_A_TIME = 4096

MOST_POSITIONS = 1 << 16
"""Positions that are made where a file lacks them; published Pegasus models have 512 and 1024."""


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family of a config by its ``model_type``.

    Raises UserError with the list of the known ones where there is none, or where ``architectures`` names a class
    that is not supported.
    """
    model_type = config.get("model_type")
    known = "; ".join(f"{f.model_type}: {', '.join(f.seq2seq + f.encoder_only)}" for f in FAMILIES)
    for family in FAMILIES:
        if family.model_type == model_type:
            for name in architectures(config):
                if name not in family.seq2seq + family.encoder_only:
                    raise UserError(f"config.json: architecture {name} is not supported; the known ones are {known}")
            return family
    raise UserError(f"config.json: model_type {model_type!r} is not supported; the known ones are {known}")


def stock_class(config: Mapping[str, object]) -> str:
    """Return the name of the transformers class that loads a checkpoint with this config.

    Raises UserError as ``family_of`` does, and where the config names no class.
    """
    family = family_of(config)
    return family.encoder_only[0] if is_encoder_only(family, config) else family.seq2seq[0]


def architectures(config: Mapping[str, object]) -> list[str]:
    """Return the class names of a config, empty where it names none."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise UserError(
            "config.json: 'architectures' is not a list; write [\"T5ForConditionalGeneration\"] or the like"
        )
    return [str(name) for name in names]


def resolve(checkpoint: TensorSource, *, untie: bool = False) -> Layout:
    """Classify every tensor of ``checkpoint`` and return its layout.

    ``untie``: give an embedding that serves as head a copy of its own; no effect where it already has one.
    Raises UserError for a tensor that is missing, unknown, of the wrong shape or not floating, by name.
    """
    config, names = checkpoint.config, set(checkpoint.tensors)
    try:
        family = family_of(config)
        encoder_only = is_encoder_only(family, config)
    except UserError as error:
        raise UserError(f"{checkpoint.source}/{error}") from None
    embedding = next((n for n in (family.embedding, *family.copies) if n in names), None)
    if embedding is None:
        raise UserError(
            f"{checkpoint.source}: tensor {family.embedding} is missing; take the whole original checkpoint"
        )
    dropped = find_dropped(checkpoint, family, embedding, encoder_only)
    tied = None if encoder_only else is_tied(checkpoint, family, embedding)
    if tied and family.head in names:
        dropped[family.head] = f"the same values as {family.embedding}, to which stock classes tie it"

    parts = [family.encoder_ends, *blocks(family.encoder, family, config, len(names))]
    separate = bool(tied and untie and family.untie)
    if not encoder_only:
        parts += [family.decoder_ends, *blocks(family.decoder, family, config, len(names))]
        parts.append(family.tied_head if tied and not separate else family.untied_head)

    scale = head_scale(family, config, tied)
    sources = {family.embedding: embedding}
    if separate:
        sources[family.head] = embedding
    tensors = {}
    for record in (t for part in parts for t in part.tensors):
        if record.name not in tensors:
            gain = scale if separate and record.name == family.head and family.untie == "scaled" else 1.0
            resolved = resolve_tensor(checkpoint, family, record, sources.get(record.name, record.name), gain)
            if resolved is not None:
                tensors[record.name] = resolved
    if separate and family.untie == "copy":
        # Stock Pegasus with tie_word_embeddings false ties nothing, and makes an absent embedding at random.
        for copy in family.copies:
            tensors[copy] = resolve_tensor_like(tensors[family.embedding], copy)

    used = {t.source for t in tensors.values()}
    for name in sorted(names - used - set(dropped)):
        raise UserError(
            f"{checkpoint.source}: tensor {name} is not part of {family.title} as config.json describes it;"
            " stock code would drop it, so check the config's layer counts or remove the tensor"
        )
    return Layout(
        family=family,
        config=config,
        encoder_only=encoder_only,
        tied=tied if not separate else False,
        tensors=tensors,
        signals=merge_signals(family, config, parts, tensors),
        dropped=dropped,
        head_scale=1.0 if separate and family.untie == "scaled" else scale,
        wiring=tuple(part.wiring for part in parts if part.wiring is not None),
    )


def is_encoder_only(family: Family, config: Mapping[str, object]) -> bool:
    """Decide by its class whether a checkpoint is an encoder alone."""
    names = architectures(config)
    if not names:
        choices = " or ".join(f'["{c[0]}"]' for c in (family.seq2seq, family.encoder_only) if c)
        raise UserError(f'config.json names no class; add "architectures": {choices}')
    return names[0] in family.encoder_only


def find_dropped(checkpoint: TensorSource, family: Family, embedding: str, encoder_only: bool) -> dict[str, str]:
    """Return the tensors that are not carried over, each with the reason."""
    dropped = {}
    for name in checkpoint.tensors:
        if name in family.ignorable:
            dropped[name] = "stock classes ignore it"
        elif encoder_only and (name.startswith("decoder.") or name == family.head):
            dropped[name] = f"{family.encoder_only[0]} ignores it"
        elif name in family.copies and name != embedding:
            if not same_values(checkpoint, name, embedding):
                raise UserError(
                    f"{checkpoint.source}: {name} differs from {embedding}, but they are one tensor in"
                    f" {family.title}; remove the wrong one"
                )
            dropped[name] = f"the same values as {family.embedding}, to which stock classes tie it"
    return dropped


def is_tied(checkpoint: TensorSource, family: Family, embedding: str) -> bool:
    """Decide from the tensors whether the embedding serves as head.

    A stored head with the embedding's very values is a copy (``.bin`` files hold one), unless the config says in so
    many words that the two are apart.
    """
    if family.head not in checkpoint.tensors:
        return True
    if checkpoint.config.get("tie_word_embeddings") is False:
        return False
    return same_values(checkpoint, family.head, embedding)


def head_scale(family: Family, config: Mapping[str, object], tied: bool | None) -> float:
    """Return what the stock class (transformers 5) multiplies the decoder's output with before the head."""
    if tied is None or family is PEGASUS or family is MT5:
        return 1.0
    width = size(family, config, "model")
    if family is UMT5:
        return width**-0.5
    # T5Config reads tie_word_embeddings as "scale the outputs", unless an explicit key overrides that.
    scales = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    return width**-0.5 if scales else 1.0


def same_values(checkpoint: TensorSource, one: str, other: str) -> bool:
    """Return whether two tensors of a checkpoint are equal in every bit, reading a few thousand rows at a time."""
    a, b = checkpoint.tensors[one], checkpoint.tensors[other]
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    for start in range(0, a.shape[0], ROWS_AT_A_TIME):
        stop = min(start + ROWS_AT_A_TIME, a.shape[0])
        left, right = (checkpoint.read_rows(n, start, stop).view(torch.uint8) for n in (one, other))
        if not torch.equal(left, right):
            return False
    return True


def blocks(stack: Stack, family: Family, config: Mapping[str, object], tensors: int) -> list[Part]:
    """Return the parts of every block of a stack, in order; raise UserError for more blocks than the checkpoint has
    tensors."""
    full = {key: value(family, config, key) for key in family.defaults} | {
        k: v for k, v in config.items() if v is not None
    }
    count = value(family, config, stack.layers)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UserError(
            f"config.json: {stack.layers!r} is {count!r}, not a number of layers; take it from the original checkpoint"
        )
    if count > tensors:
        raise UserError(
            f"config.json: {stack.layers!r} is {count}, more than the {tensors} tensors that there are;"
            " use the config.json that belongs to these weights"
        )
    return [part for i in range(count) for part in stack.block(full, i)]


def resolve_tensor(
    checkpoint: TensorSource, family: Family, record: Tensor, source: str, gain: float
) -> ResolvedTensor | None:
    """Check one declared tensor against the checkpoint; None where it may be absent and is."""
    shape = tuple(size(family, checkpoint.config, name) for name in record.shape)
    info = checkpoint.tensors.get(source)
    axes = tuple((1 if a[0] == "+" else -1, a[1:]) if a else None for a in record.axes)
    if info is None:
        if record.generate is not None:
            if shape[0] > MOST_POSITIONS:
                raise UserError(
                    f"{checkpoint.source}: tensor {record.name} is missing, and config.json asks for {shape[0]} rows;"
                    " take the whole original checkpoint"
                )
            return ResolvedTensor(record.name, None, shape, axes, record.generate)
        if record.absent:
            return None
        raise UserError(
            f"{checkpoint.source}: tensor {record.name} is missing, and stock code would fill it with random numbers;"
            " take the whole original checkpoint"
        )
    if info.dtype not in FLOATING:
        raise UserError(
            f"{checkpoint.source}: tensor {source} is {info.dtype}; use the checkpoint from before quantisation"
        )
    if tuple(info.shape) != shape:
        raise UserError(
            f"{checkpoint.source}: tensor {source} has shape {list(info.shape)} but config.json asks for {list(shape)};"
            " use the config.json that belongs to these weights"
        )
    return ResolvedTensor(record.name, source, shape, axes, None, gain)


def resolve_tensor_like(tensor: ResolvedTensor, name: str) -> ResolvedTensor:
    """Return ``tensor`` under another name."""
    return ResolvedTensor(name, tensor.source, tensor.shape, tensor.axes, None, tensor.gain)


def merge_signals(
    family: Family, config: Mapping[str, object], parts: list[Part], tensors: Mapping[str, ResolvedTensor]
) -> dict[str, ResolvedSignal]:
    """Return the signals of all parts, those of one name joined, and check that every axis names one of the right
    size."""
    merged: dict[str, ResolvedSignal] = {}
    for record in (s for part in parts for s in part.signals):
        seen = tuple(resolve_sighting(entry) for entry in record.seen)
        old = merged.get(record.name)
        merged[record.name] = ResolvedSignal(
            record.name,
            record.kind,
            old.size if old else signal_size(family, config, record),
            old.seen + seen if old else seen,
        )
    for tensor in tensors.values():
        for axis, length in zip(tensor.axes, tensor.shape, strict=True):
            if axis is not None and merged[axis[1]].size != length:
                raise AssertionError(f"{tensor.name}: axis of {length} carries {axis[1]} of {merged[axis[1]].size}")
    return merged


def signal_size(family: Family, config: Mapping[str, object], record: Signal) -> int:
    """Return a signal's number of channels."""
    return size(family, config, record.size)


def resolve_sighting(entry: str) -> Sighting:
    """Parse ``+path:side``."""
    module, side = entry[1:].rsplit(":", 1)
    return Sighting(1 if entry[0] == "+" else -1, module, side)


__all__ = ["FAMILIES", "Family", "Kind", "Layout", "family_of", "resolve", "stock_class"]
