"""One walk along the residual stream, for bounds, hooks and searches, whose readers pass every signal of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .layout import Layout, ResolvedStack
from .wiring import Attention, FeedForward, Sublayer


@dataclass(frozen=True)
class Reader:
    """A reader of the residual stream. ``norm``: module path, "" where a sublayer's linears read it. ``entrance``: a
    module that reads it. ``site``: the site that made the stream, as audits name it. ``sublayer``: None for a final
    norm. ``is_first``: whether no sublayer has added to the stream yet."""

    norm: str
    entrance: str
    site: str
    sublayer: Sublayer | None
    stack: ResolvedStack
    is_first: bool


def walk(layout: Layout) -> Iterator[Reader]:
    """Yield the readers of the residual stream in the order of running, the encoder's first."""
    for stack in layout.stacks():
        first = site = layout.stream(stack.ends)
        for sublayer in stack.sublayers:
            yield Reader(sublayer.norm, sublayer.entrance, site, sublayer, stack, site == first)
            site = (isinstance(sublayer, FeedForward) and sublayer.scaled) or sublayer.add
        yield Reader(stack.ends.norm, stack.ends.norm, site, None, stack, site == first)


def norms_inside(sublayer: Sublayer | None) -> list[str]:
    if sublayer is None:
        return []
    norms = [sublayer.post_norm]
    if isinstance(sublayer, Attention):
        norms += [sublayer.block_norm, sublayer.query_norm, sublayer.key_norm, sublayer.value_norm]
    return [norm for norm in norms if norm]
