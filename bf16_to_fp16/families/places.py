"""Find where in a model a module or site is: its stack, block and role. A layout tells them; for a model of no known
family, only the name does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .configs import full_config
from .layout import Layout, walk
from .types import Family
from .wiring import Attention, Sublayer, feed_forwards_of

STACKS = ("encoder", "decoder")  # names of stacks in order; an only stack has the last

_BLOCK = re.compile(r"(?:^|\.)(\d+)(?=[.:])")

_STACK = re.compile(r"(?:^|\.)(encoder|decoder)\.")


def attention_names(family: Family) -> set[str]:
    """Return the last path components of a family's attention modules, such as "SelfAttention"."""
    configs = [full_config(family, variant) for variant in ({}, *family.variants)]
    every = [p.topology for stack in family.stacks for config in configs for p in stack.block(config, 0)]
    return {part.at.rpartition(".")[2] for part in every if isinstance(part, Attention)}


def stack_of(path: str) -> str | None:
    match = _STACK.search(path)
    return match[1] if match else None


def stack_in(path: str, family: Family | None) -> str | None:
    """Return ``stack_of(path)`` or, if that is None, "decoder" for a family of one stack."""
    only = STACKS[-1] if family is not None and family.decoder is None else None
    return stack_of(path) or only


def block_of(path: str) -> int | None:
    match = _BLOCK.search(path)
    return int(match[1]) if match else None


def layer_of(site: str) -> str:
    """Return a site's name up to its layer's number (``encoder.block.3``); without a number, its first component."""
    parts = site.partition(":")[0].split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]


FEED_FORWARD = "feed-forward"
ATTENTIONS = ("attention", "self-attention", "cross-attention")
SUBLAYERS = (*ATTENTIONS, FEED_FORWARD)

_OPERATIONS = {"add": "sum", "": "linear", "mul": "product", "scores": "scores"}


@dataclass(frozen=True)
class Place:
    """Where in the model a site is; a field is None if it is unknown. ``stack`` is "encoder" or "decoder", ``block``
    counts from 0, and ``role`` says what the site belongs to, such as "feed-forward" or "queries"."""

    stack: str | None = None
    block: int | None = None
    role: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


def places(layout: Layout) -> Callable[[str], Place]:
    by_path: dict[str, str] = {}
    for reader in walk(layout):
        if reader.sublayer is not None:
            crosses = any(isinstance(sublayer, Attention) and sublayer.memory for sublayer in reader.stack.sublayers)
            by_path |= {path: role for path, role in _roles(reader.sublayer, crosses) if path}

    def place(site: str) -> Place:
        path = site.partition(":")[0]
        return Place(stack_in(path, layout.family), block_of(site), by_path.get(path))

    return place


def _roles(sublayer: Sublayer, crosses: bool) -> Iterator[tuple[str, str]]:
    name = FEED_FORWARD
    if isinstance(sublayer, Attention):
        name = ATTENTIONS[0] if not crosses else ATTENTIONS[2] if sublayer.memory else ATTENTIONS[1]
        yield from ((sublayer.at, name), (sublayer.output, name), (sublayer.block_norm, "block sums"))
        yield from ((sublayer.query_norm, "queries"), (sublayer.key_norm, "keys"), (sublayer.value_norm, "values"))
    yield from ((each.output, name) for each in feed_forwards_of(sublayer))
    yield from ((sublayer.norm, name), (sublayer.post_norm, f"behind {name}"))


def places_by_name(sites: Iterable[str]) -> dict[str, Place]:
    """Return where each site is, as far as its name alone tells. Sums, products and scores in an attention have the
    role "scores"."""
    names = list(sites)
    attentions = {name.removesuffix(":scores") for name in names if name.endswith(":scores")}

    def place(name: str) -> Place:
        path, _, operation = name.partition(":")
        role = _OPERATIONS.get(operation.partition("#")[0])
        return Place(stack_of(path), block_of(name), "scores" if role and path in attentions else role)

    return {name: place(name) for name in names}
