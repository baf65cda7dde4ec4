"""The place of a site in a model: its stack, block and role; without a known family, as far as its name tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .layout import Layout
from .roles import block_of, stack_in, stack_of
from .walk import walk
from .wiring import Attention, Sublayer, feed_forwards_of

FEED_FORWARD = "feed-forward"
ATTENTIONS = ("attention", "self-attention", "cross-attention")
SUBLAYERS = (*ATTENTIONS, FEED_FORWARD)

_OPERATIONS = {"add": "sum", "": "linear", "mul": "product", "scores": "scores"}


@dataclass(frozen=True)
class Place:
    """``stack``: encoder or decoder. ``block``: from 0. ``role``: of the module or operation. None where unknown."""

    stack: str | None = None
    block: int | None = None
    role: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}


def places(layout: Layout) -> Callable[[str], Place]:
    roles: dict[str, str] = {}
    for reader in walk(layout):
        if reader.sublayer is not None:
            crosses = any(isinstance(sublayer, Attention) and sublayer.memory for sublayer in reader.stack.sublayers)
            roles |= {path: role for path, role in _roles(reader.sublayer, crosses) if path}

    def place(site: str) -> Place:
        path = site.partition(":")[0]
        return Place(stack_in(path, layout.family), block_of(site), roles.get(path))

    return place


def _roles(sublayer: Sublayer, crosses: bool) -> Iterator[tuple[str, str]]:
    name = FEED_FORWARD
    if isinstance(sublayer, Attention):
        name = ATTENTIONS[0] if not crosses else ATTENTIONS[2] if sublayer.memory else ATTENTIONS[1]
        yield from ((sublayer.at, name), (sublayer.output, name), (sublayer.block_norm, "block sums"))
        yield from ((sublayer.query_norm, "queries"), (sublayer.key_norm, "keys"))
    yield from ((each.output, name) for each in feed_forwards_of(sublayer))
    yield from ((sublayer.norm, name), (sublayer.post_norm, f"behind {name}"))


def places_by_name(sites: Iterable[str]) -> dict[str, Place]:
    """Return places by name alone, for any class; all operations of an attention have the role "scores"."""
    names = list(sites)
    attentions = {name.removesuffix(":scores") for name in names if name.endswith(":scores")}

    def place(name: str) -> Place:
        path, _, operation = name.partition(":")
        role = _OPERATIONS.get(operation.partition("#")[0])
        return Place(stack_of(path), block_of(name), "scores" if role and path in attentions else role)

    return {name: place(name) for name in names}
