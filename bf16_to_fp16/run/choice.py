"""Which ids of a large vocabulary the probe runs.

A token that stands alone in its row, with no other to be averaged with, can be computed without running the model: its
attention gives back its own values. So candidates are gathered from the embedding table (rows that are longest,
shortest, extreme in an outlier channel, extreme before the first layers' longest rows and the strongest neurons of
all, and some at random), carried alone through every sublayer in fp32, and those that reach farthest at each site are
chosen. Table and weights are read once, in parts. It need not be what stock code computes to the last bit: it decides
what is run, and no figure comes from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional

from ..families.resolve import unscaled
from ..families.types import Attention, FeedForward, Layout, ResolvedStack, TensorSource, config_value

CHOSEN = 384
"""How many ids are chosen; a vocabulary that has no more is run whole."""


SPECIAL, LONGEST, SHORTEST, CHANNELS, ENCODER, DECODER, DRAWN = (
    "special",
    "largest norm",
    "smallest norm",
    "outlier channels",
    "largest alone in the encoder",
    "largest alone in the decoder",
    "random",
)
"""Why an id was chosen."""


_NORMS = 16
"""Ids with the largest norm, and with the smallest."""


_CHANNELS = 24
"""Channels whose largest and smallest entry is taken."""


_MOST = {LONGEST: _NORMS, SHORTEST: _NORMS, CHANNELS: 2 * _CHANNELS}


_CANDIDATES = 1024
"""Tokens that are carried through the layers."""


_DRAWN = 128
"""Candidates that are drawn at random."""


_RANKS = 4
"""How many candidates a site can bring in."""


_PRODUCTS = 1 << 25
"""Most products of a row of the table with a row of a weight: a thousand directions at a vocabulary of 32,128."""


_DIRECTIONS = 1024
"""Most rows of weights that the table is held against."""


_ELEMENTS = 1 << 22
"""Entries of the table in memory at a time."""


def drawn(vocabulary: int, special: Iterable[int], generator: torch.Generator) -> dict[str, list[int]]:
    """Return the special ids and others drawn at random, ``CHOSEN`` in all, by reason."""
    first = sorted(set(special))
    others = torch.randperm(vocabulary, generator=generator)[:CHOSEN].tolist()
    return {SPECIAL: first, DRAWN: [i for i in others if i not in first][: CHOSEN - len(first)]}


class _Weights:
    """A layout's weights in fp32, unscaled, and what its modules compute with them."""

    def __init__(self, source: TensorSource, layout: Layout) -> None:
        self.source, self.layout = source, layout
        table = layout.tensors[layout.family.embedding]
        self.table, (self.vocabulary, self.width) = str(table.source), table.shape

    def read(self, name: str) -> Tensor | None:
        tensor = self.layout.tensors.get(name)
        return None if tensor is None else unscaled(self.source, tensor).float()

    def matrix(self, module: str) -> Tensor:
        weight = self.read(f"{module}.weight")
        assert weight is not None
        return weight

    def rows(self, start: int, stop: int) -> Tensor:
        return self.source.read_rows(self.table, start, stop).float()

    def linear(self, module: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.matrix(module), self.read(f"{module}.bias"))

    def embedded(self, stack: ResolvedStack, rows: Tensor) -> Tensor:
        """Return what a stack begins with for tokens at its first position."""
        family, scale = self.layout.family, stack.ends.scale
        if scale and config_value(family, self.layout.config, scale):
            rows = rows * math.sqrt(self.width)
        positions = self.read(stack.ends.positions)
        return rows if positions is None else rows + positions[0]

    def neurons(self, sublayer: FeedForward, normed: Tensor) -> list[Tensor]:
        """Return what the linears of a feed-forward give, and last what enters its output."""
        from transformers.activations import ACT2FN

        activated = ACT2FN[sublayer.activation]
        linear = self.linear(sublayer.linear, normed)
        if not sublayer.gate:
            return [linear, activated(linear)]
        gate = self.linear(sublayer.gate, normed)
        return [gate, linear, activated(gate) * linear]

    def norm(self, module: str, x: Tensor) -> Tensor:
        gain, shift, eps = self.matrix(module), self.read(f"{module}.bias"), self.layout.eps
        if self.layout.family.centred_norm:
            return functional.layer_norm(x, gain.shape, gain, shift, eps)
        return functional.rms_norm(x, gain.shape, gain, eps)


def chosen(
    source: TensorSource, layout: Layout, special: Iterable[int], generator: torch.Generator
) -> dict[str, list[int]]:
    """Return ``CHOSEN`` different ids of a checkpoint or model by reason, each under the first one it was chosen for.

    layout: what its tensors are.
    """
    weights = _Weights(source, layout)
    extremes, best = scanned(weights)
    found: dict[str, list[int]] = {}
    seen: set[int] = set()

    def add(reason: str, ids: Iterable[int], most: int = CHOSEN) -> None:
        new = found.setdefault(reason, [])
        for i in ids:
            if len(seen) == CHOSEN or len(new) == most:
                break
            if i not in seen:
                seen.add(i)
                new.append(i)

    add(SPECIAL, sorted(set(special)))
    for reason, ids in extremes.items():
        add(reason, ids, _MOST[reason])
    others = torch.randperm(weights.vocabulary, generator=generator)[:_CANDIDATES].tolist()
    ordered = dict.fromkeys([*seen, *others[:_DRAWN], *best, *others])
    candidates = torch.tensor(list(ordered)[:_CANDIDATES])
    farthest = [
        (reason, candidates[values.abs().amax(1).argsort(descending=True, stable=True)[:_RANKS]].tolist())
        for reason, values in alone(weights, candidates)
    ]
    for rank in range(_RANKS):
        for reason, ids in farthest:
            add(reason, ids[rank : rank + 1])
    add(DRAWN, others)
    return {reason: ids for reason, ids in found.items() if ids}


def scanned(weights: _Weights) -> tuple[dict[str, list[int]], list[int]]:
    """Read the table once and return, best first, the ids of its extreme rows by reason, and those that reach farthest
    before the rows of weights that ``directions`` gives."""
    rows, groups = directions(weights)
    lengths = torch.empty(weights.vocabulary, dtype=torch.float64)
    entries, products = _Extremes(2 * weights.width), _Extremes(2 * len(rows))
    step = max(1, _ELEMENTS // weights.width)
    for start in range(0, weights.vocabulary, step):
        part = weights.rows(start, min(start + step, weights.vocabulary))
        lengths[start : start + len(part)] = part.double().square().sum(1)
        entries.add(torch.cat([part, -part], 1).t(), start)
        centred = part - part.mean(1, keepdim=True) if weights.layout.family.centred_norm else part
        product = rows @ functional.normalize(centred).t()
        products.add(torch.cat([product, -product]), start)
    gain = torch.stack([weights.matrix(stack.sublayers[0].norm).abs() for stack in weights.layout.stacks()]).amax(0)
    order = lengths.argsort(stable=True)
    reach = gain * entries.values.view(2, -1).amax(0)
    channels = reach.argsort(descending=True, stable=True)[:_CHANNELS]
    extremes = {
        LONGEST: order.flip(0)[:CHOSEN].tolist(),
        SHORTEST: order[:CHOSEN].tolist(),
        CHANNELS: entries.ids.view(2, -1)[:, channels].t().flatten().tolist(),
    }
    both, ids = products.values.view(2, -1), products.ids.view(2, -1)
    ranked = []
    for group in groups:
        reached = both[:, group].flatten().argsort(descending=True, stable=True)
        ranked.append(ids[:, group].flatten()[reached].tolist())
    return extremes, list(interleaved(ranked))


def interleaved(lists: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the first of every list, then the second of every list, and so on."""
    for column in zip_longest(*lists):
        yield from (i for i in column if i is not None)


class _Extremes:
    """The largest value of each row so far, and the number of its column."""

    def __init__(self, rows: int) -> None:
        self.values = torch.full((rows,), -torch.inf)
        self.ids = torch.zeros(rows, dtype=torch.int64)

    def add(self, values: Tensor, start: int) -> None:
        """Add [rows, columns], the first column being number ``start``."""
        best = values.max(1)
        larger = best.values > self.values
        self.values = torch.where(larger, best.values, self.values)
        self.ids = torch.where(larger, best.indices + start, self.ids)


def directions(weights: _Weights) -> tuple[Tensor, list[slice]]:
    """Return the longest rows, times the gain before them, of the linears that read each stack's embedding first and
    of every feed-forward, fp32 [rows, width], and which of them belong to one linear."""
    linears: list[tuple[str, str, bool]] = []
    for stack in weights.layout.stacks():
        first = True
        for sublayer in stack.sublayers:
            if isinstance(sublayer, FeedForward):
                linears += [(sublayer.norm, m, first) for m in (sublayer.gate, sublayer.linear) if m]
                first = False
            elif first and not sublayer.memory:
                linears += [(sublayer.norm, m, True) for m in (sublayer.query, sublayer.key, sublayer.value)]
    most = min(_DIRECTIONS, _PRODUCTS // weights.vocabulary)
    early = sum(first for *_, first in linears)
    late = len(linears) - early
    # Behind the first feed-forward of a stack the stream is no longer the embedding alone: a few neurons stand for it.
    share = most // 4 // max(1, late) if late else 0
    each = {True: max(1, (most - share * late) // max(1, early)), False: max(1, share)}
    rows, groups = [torch.empty(0, weights.width)], []
    total = 0
    for norm, module, first in linears:
        gained = weights.matrix(module) * weights.matrix(norm)
        longest = gained[gained.norm(dim=1).argsort(descending=True, stable=True)[: each[first]]]
        rows.append(longest)
        groups.append(slice(total, total := total + len(longest)))
    return torch.cat(rows), groups


def alone(weights: _Weights, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what every site makes of each id alone in its row, in the encoder and beside itself in the decoder: the
    stack's reason, and values [ids, channels]."""
    table = torch.cat([weights.rows(i, i + 1) for i in ids.tolist()])
    memory = torch.empty(0)
    for stack in weights.layout.stacks():
        reason = ENCODER if stack.is_encoder else DECODER
        stream = weights.embedded(stack, table)
        for sublayer in stack.sublayers:
            normed = weights.norm(sublayer.norm, stream)
            if isinstance(sublayer, Attention):
                read = memory if sublayer.memory else normed
                value = weights.linear(sublayer.value, read)
                made = [
                    weights.linear(sublayer.query, normed),
                    weights.linear(sublayer.key, read),
                    value,
                    weights.linear(sublayer.output, value),
                ]
            else:
                made = weights.neurons(sublayer, normed)
                made.append(weights.linear(sublayer.output, made[-1]))
            stream = stream + made[-1]
            for values in (normed, *made, stream):
                yield reason, values
        memory = weights.norm(stack.ends.norm, stream)
        yield reason, memory
