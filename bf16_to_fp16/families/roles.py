"""Names of a family's modules by role, read from the first block of each stack under the stock defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .configs import full_config
from .types import Family, Stack
from .wiring import Attention, Experts, FeedForward, Sublayer, feed_forwards_of

STACKS = ("encoder", "decoder")  # names of stacks in order; an only stack has the last

_BLOCK = re.compile(r"(?:^|\.)(\d+)(?=[.:])")

_STACK = re.compile(r"(?:^|\.)(encoder|decoder)\.")


@dataclass(frozen=True)
class Roles:
    """Last parts of module paths by role. ``attentions``: modules that form scores. ``insides``: activations and
    position biases, whose outputs are no signals."""

    attentions: frozenset[str] = frozenset()
    attention_outputs: tuple[str, ...] = ()
    feed_forward_outputs: tuple[str, ...] = ()
    insides: frozenset[str] = frozenset()


def roles(family: Family) -> Roles:
    first = {stack.layers: 1 for stack in family.stacks}
    configs = [full_config(family, {**first, **variant}) for variant in ({}, *family.variants)]
    every = [sublayer for stack in family.stacks for config in configs for sublayer in sublayers(stack, config)]
    attentions = [sublayer for sublayer in every if isinstance(sublayer, Attention)]
    feed_forwards = [each for sublayer in every for each in feed_forwards_of(sublayer)]
    biases = (
        bias.removesuffix(".weight") for sublayer in attentions for bias in (sublayer.bias, sublayer.block_bias) if bias
    )
    return Roles(
        attentions=frozenset(last(sublayer.at) for sublayer in attentions),
        attention_outputs=tuple(dict.fromkeys(last(sublayer.output) for sublayer in attentions)),
        feed_forward_outputs=tuple(dict.fromkeys(last(sublayer.output) for sublayer in feed_forwards)),
        insides=frozenset(last(path) for path in (*(sublayer.act for sublayer in feed_forwards), *biases)),
    )


def sublayers(stack: Stack, config: Mapping[str, object]) -> list[Sublayer]:
    topology = [part.topology for part in stack.block(config, 0)]
    return [sublayer for sublayer in topology if isinstance(sublayer, Attention | FeedForward | Experts)]


def last(path: str) -> str:
    return path.rpartition(".")[2]


def stack_of(path: str) -> str | None:
    match = _STACK.search(path)
    return match[1] if match else None


def stack_in(path: str, family: Family | None) -> str | None:
    """Return ``stack_of(path)``, or for a family of one stack its name where paths have none."""
    only = STACKS[-1] if family is not None and family.decoder is None else None
    return stack_of(path) or only


def block_of(path: str) -> int | None:
    match = _BLOCK.search(path)
    return int(match[1]) if match else None


def layer_of(site: str) -> str:
    """Return a site's name up to its layer's number: ``encoder.block.3``, or its first module."""
    parts = site.partition(":")[0].split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]
