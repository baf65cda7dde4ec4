"""One walk along the residual stream, in which bounds, hooks and searches visit a model.

A sublayer reads the stream, most through a norm, and adds its output to it; the final norm of a stack reads it last.
So these readers, in the order in which they run, lead past everything that flows through a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .layout import Layout, ResolvedStack
from .types import Attention, Sublayer


@dataclass(frozen=True)
class Reader:
    """What reads the residual stream: a norm, or the linears of a sublayer that has none.

    ``norm``: the norm's module path, "" where there is none. ``entrance``: a module that reads it. ``site``: where the
    stream that it reads was made, as the audit names it. ``sublayer``: what reads the norm's output, or the stream,
    None for the final norm of a stack. ``stack``: the one that both are in. ``is_first``: whether it reads what its
    stack begins with, to which no sublayer has added.
    """

    norm: str
    entrance: str
    site: str
    sublayer: Sublayer | None
    stack: ResolvedStack
    is_first: bool


def walk(layout: Layout) -> Iterator[Reader]:
    """Yield what reads the residual stream, in the order of running, the encoder first."""
    for stack in layout.stacks():
        first = site = layout.stream(stack.ends)
        for sublayer in stack.sublayers:
            yield Reader(sublayer.norm, sublayer.entrance, site, sublayer, stack, site == first)
            site = sublayer.add
        yield Reader(stack.ends.norm, stack.ends.norm, site, None, stack, site == first)


def norms_inside(sublayer: Sublayer | None) -> list[str]:
    if sublayer is None:
        return []
    norms = [sublayer.post_norm]
    if isinstance(sublayer, Attention):
        norms += [sublayer.block_norm, sublayer.query_norm, sublayer.key_norm]
    return [norm for norm in norms if norm]
