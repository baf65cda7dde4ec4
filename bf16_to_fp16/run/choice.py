"""Which ids of a large vocabulary the probe runs.

Candidates are the rows of the embedding table that are longest, shortest, or extreme in an outlier channel, those that
should drive the first attentions and the strongest neurons farthest (``alone``), and some at random. They are carried
alone through every sublayer, and those that reach farthest at each site are chosen. The table is read once, in parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional

from ..families.layout import Layout, TensorSource
from ..families.types import Attention, feed_forwards_of
from .alone import Weights, forward, pulled_back, slopes

CHOSEN, WHOLE = 256, 384  # how many ids are chosen, and the largest vocabulary that is run whole instead
SPECIAL, DRAWN, LONGEST, SHORTEST, CHANNELS = "special", "random", "largest norm", "smallest norm", "outlier channels"
ALONE, ENCODER, DECODER = "largest alone", "largest alone in the encoder", "largest alone in the decoder"
"""Why an id was chosen."""

_CHANNELS = 24  # channels whose largest and smallest entry is taken
_MOST = {LONGEST: 16, SHORTEST: 16, CHANNELS: 2 * _CHANNELS}  # how many ids each reason brings in
_CANDIDATES = 768  # tokens that are carried through the layers, and more where that takes next to nothing
_CARRIED, _TOGETHER = 1 << 36, 1 << 22  # products that this may take, a few seconds, and outputs of one linear
_DRAWN, _TYPICAL = 128, 64  # candidates that are drawn at random, and how many of them stand for a typical token
_RUNNERS = 8  # candidates for a product of two neurons
_RANKS = 4  # how many candidates a site can bring in

_PRODUCTS = 1 << 24
"""Most products of rows of the table and of weights: those of 500 rows of weights at a vocabulary of 32,128."""

_DIRECTIONS = 512  # most rows of weights that the table is held against
_ELEMENTS = 1 << 22  # entries of the table in memory at a time


def drawn(vocabulary: int, special: Iterable[int], generator: torch.Generator) -> dict[str, list[int]]:
    """Return the special ids and others drawn at random, ``CHOSEN`` in all, by reason."""
    first = sorted(set(special))
    others = torch.randperm(vocabulary, generator=generator)[:CHOSEN].tolist()
    return {SPECIAL: first, DRAWN: [i for i in others if i not in first][: CHOSEN - len(first)]}


def chosen(
    source: TensorSource, layout: Layout, special: Iterable[int], generator: torch.Generator
) -> dict[str, list[int]]:
    """Return ``CHOSEN`` different ids of a checkpoint or model by reason, each under the first it was chosen for."""
    weights = Weights(source, layout)
    carried = max(_CANDIDATES, affordable(layout))
    others = torch.randperm(weights.vocabulary, generator=generator)[:carried].tolist()
    extremes, best = scanned(weights, others[:_TYPICAL])
    by_reason: dict[str, list[int]] = {}
    seen: set[int] = set()

    def add(reason: str, ids: Iterable[int], most: int = CHOSEN) -> None:
        new = by_reason.setdefault(reason, [])
        for i in ids:
            if len(seen) == CHOSEN or len(new) == most:
                break
            if i not in seen:
                seen.add(i)
                new.append(i)

    add(SPECIAL, sorted(set(special)))
    for reason, ids in extremes.items():
        add(reason, ids, _MOST[reason])
    ordered = dict.fromkeys([*seen, *others[:_DRAWN], *best, *others])
    candidates = list(ordered)[:carried]
    farthest: list[tuple[str, list[int]]] = []
    sides = {True: ALONE if layout.family.decoder is None else ENCODER, False: DECODER}
    for step in forward(weights, candidates):
        reason = sides[step.stack.is_encoder]
        for values in (step.stream, *step.outputs):
            order = values.abs().amax(1).argsort(descending=True, stable=True)
            farthest.append((reason, [candidates[i] for i in order[:_RANKS].tolist()]))
    for rank in range(_RANKS):
        for reason, ids in farthest:
            add(reason, ids[rank : rank + 1])
    add(DRAWN, others)
    return {reason: ids for reason, ids in by_reason.items() if ids}


def affordable(layout: Layout) -> int:
    """Return how many tokens can be carried through the layers for ``_CARRIED`` products, and in little memory."""
    shapes = [tensor.shape for name, tensor in layout.tensors.items() if name != layout.family.embedding]
    products, widest = sum(map(math.prod, shapes)), max(shape[0] for shape in shapes)
    return min(_CARRIED // max(1, products), _TOGETHER // widest)


def scanned(weights: Weights, sample: Sequence[int]) -> tuple[dict[str, list[int]], list[int]]:
    """Read the table once and return, best first, the ids of its extreme rows by reason, and those that should reach
    farthest before the rows of ``directions``. sample: ids of typical tokens."""
    rows, groups, gated = directions(weights, sample)
    gate, linear = (torch.cat([torch.empty(0, dtype=torch.int64), *(pair[i] for pair in gated)]) for i in (0, 1))
    lengths = torch.empty(weights.vocabulary, dtype=torch.float64)
    entries, single = _Extremes(2 * weights.width, 1), _Extremes(2 * len(rows), 1)
    products = _Extremes(2 * len(gate), _RUNNERS)
    step = max(1, _ELEMENTS // weights.width)
    for start in range(0, weights.vocabulary, step):
        part = weights.rows(start, min(start + step, weights.vocabulary))
        lengths[start : start + len(part)] = part.double().square().sum(1)
        entries.add(torch.cat([part, -part], 1).t(), start)
        reached = rows @ functional.normalize(part).t()
        single.add(torch.cat([reached, -reached]), start)
        # The activations behind a gate let what is positive through.
        product = reached[gate].clamp(min=0) * reached[linear]
        products.add(torch.cat([product, -product]), start)
    stacks = [stack for stack in weights.layout.stacks() if stack.sublayers]
    norms = [weights.matrix(norm).abs() if (norm := s.sublayers[0].norm) else torch.ones(weights.width) for s in stacks]
    norms = [norm for norm in norms if len(norm) == weights.width]
    reach = torch.stack(norms).amax(0) * entries.values.view(2, -1).amax(0)
    channels = reach.argsort(descending=True, stable=True)[:_CHANNELS]
    order = lengths.argsort(stable=True)
    extremes = {
        LONGEST: order.flip(0)[:CHOSEN].tolist(),
        SHORTEST: order[:CHOSEN].tolist(),
        CHANNELS: entries.ids.view(2, -1)[:, channels].t().flatten().tolist(),
    }
    places = torch.arange(len(gate)).split([len(pair[0]) for pair in gated])
    ranked = [*(products.ranked(group) for group in places), *(single.ranked(group) for group in groups)]
    return extremes, [i for column in zip_longest(*ranked) for i in column if i is not None]


class _Extremes:
    """The ``most`` largest values of each row so far, and their columns; the second half are the first's negatives."""

    def __init__(self, rows: int, most: int) -> None:
        self.values = torch.full((rows, most), -torch.inf)
        self.ids = torch.zeros((rows, most), dtype=torch.int64)

    def add(self, values: Tensor, start: int) -> None:
        """Add [rows, columns], the first column being number ``start``."""
        most = self.values.shape[1]
        best, places = values.max(1, keepdim=True) if most == 1 else values.topk(min(most, values.shape[1]))
        joined, ids = torch.cat([self.values, best], 1), torch.cat([self.ids, places + start], 1)
        self.values, places = joined.topk(most)
        self.ids = ids.gather(1, places)

    def ranked(self, rows: Tensor) -> list[int]:
        """Return the numbers of the columns in which these rows or their negatives are largest, largest first."""
        values, ids = (x.unflatten(0, (2, -1))[:, rows].flatten() for x in (self.values, self.ids))
        return [int(i) for i in ids[values.argsort(descending=True, stable=True)]]


def directions(weights: Weights, sample: Sequence[int]) -> tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return which directions of an embedding drive what can become large, fp32 [rows, width], which rows belong to one
    linear, and which are gates and the linears that they multiply. They are the longest rows of the attention that
    reads a stack's embedding first and each feed-forward's strongest neurons, pulled back to the embedding; none where
    each stack has an embedding of its own."""
    if not weights.layout.shares_table:
        return torch.empty(0, weights.width), [], []
    sublayers = [
        sublayer
        for stack in weights.layout.stacks()
        for place, sublayer in enumerate(stack.sublayers)
        if place == 0 or not isinstance(sublayer, Attention)
    ]
    room = min(_DIRECTIONS, _PRODUCTS // weights.vocabulary)
    # Of many experts as many as there is room for, one neuron each.
    most = max(1, room // 4 // max(1, len(sublayers)))
    feeds = {each.entrance: feed_forwards_of(each)[:most] for each in sublayers}
    neurons = max(1, room // 4 // max(1, sum(map(len, feeds.values()))))
    first = max(1, room // 4 // max(1, len(weights.layout.stacks()) * 3))
    read: dict[str, list[Tensor]] = {}
    for sublayer in sublayers:
        for feed in feeds[sublayer.entrance]:
            matrices = [weights.before(sublayer.norm, matrix) for matrix in weights.into_neurons(feed)]
            adds = weights.matrix(feed.output).norm(dim=0)
            for x in matrices:
                adds = adds * x.norm(dim=1)
            best = adds.argsort(descending=True, stable=True)[:neurons]
            read.setdefault(sublayer.entrance, []).extend(x[best] for x in matrices)
        if isinstance(sublayer, Attention):
            modules = (sublayer.query, sublayer.key, sublayer.value)
            matrices = [weights.before(sublayer.norm, weights.matrix(module)) for module in modules]
            read[sublayer.entrance] = [x[x.norm(dim=1).argsort(descending=True, stable=True)[:first]] for x in matrices]
    pulled = pulled_back(
        weights, {path: torch.cat(matrices) for path, matrices in read.items()}, slopes(weights, sample)
    )
    places = torch.arange(sum(map(len, pulled.values())))
    groups: list[Tensor] = []
    gated: list[tuple[Tensor, Tensor]] = []
    gates = {path for path, feed_forwards in feeds.items() if feed_forwards and feed_forwards[0].gate}
    for path in pulled:
        own = list(places.split([len(x) for x in read[path]] + [len(places) - sum(map(len, read[path]))]))
        places = own.pop()
        groups += own
        if path in gates:
            gated += zip(own[::2], own[1::2], strict=True)
    return torch.cat([torch.empty(0, weights.width), *pulled.values()]), groups, gated
