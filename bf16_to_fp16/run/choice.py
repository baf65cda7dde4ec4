"""Which ids of a large vocabulary the probe runs.

A row of the embedding table enters a pre-norm model as one more bounded vector. What it can reach depends on its
length, on its entries in the channels that norms amplify, on how it lies to the strongest neurons, and on its
direction. Rows that are extreme in the first three, and rows that cover the table's directions by farthest-point
traversal (Gonzalez, 1985), stand for all others. Table and feed-forward weights are read once, in parts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..families.resolve import resolve
from ..families.types import FeedForward, Layout, TensorSource

CHOSEN = 384
"""How many ids are chosen; a vocabulary that has no more is run whole."""


SPECIAL, LONGEST, SHORTEST, CHANNELS, NEURONS, COVER, DRAWN = (
    "special",
    "largest norm",
    "smallest norm",
    "outlier channels",
    "strongest neurons",
    "cover",
    "random",
)
"""Why an id was chosen; ``DRAWN``: where there were no weights to choose by."""


_NORMS = 16
"""Ids with the largest norm, and with the smallest."""


_CHANNELS = 24
"""Channels whose largest and smallest entry is taken."""


_NEURONS = 160
"""Ids for neurons. Each neuron has up to five: two that make its product large, two small, one for its gate."""


_SAMPLE = 4096
"""Rows of the table from which the cover is taken."""


_ELEMENTS = 1 << 22
"""Entries of the table in memory at a time."""


def drawn(vocabulary: int, special: Iterable[int], generator: torch.Generator) -> dict[str, list[int]]:
    """Return the special ids and others drawn at random, ``CHOSEN`` in all, by reason."""
    first = sorted(set(special))
    others = torch.randperm(vocabulary, generator=generator)[:CHOSEN].tolist()
    return {SPECIAL: first, DRAWN: [i for i in others if i not in first][: CHOSEN - len(first)]}


def chosen(source: TensorSource, special: Iterable[int], generator: torch.Generator) -> dict[str, list[int]]:
    """Return ``CHOSEN`` different ids of a checkpoint or model by reason, each under the first one it was chosen for.

    Raises UserError where it is of no known family.
    """
    layout = resolve(source)
    table = layout.tensors[layout.family.embedding]
    name, (vocabulary, width) = str(table.source), table.shape
    gates, linears = neurons(source, layout)
    sample = torch.randperm(vocabulary, generator=generator)[:_SAMPLE].sort().values
    sampled, lengths = torch.empty(len(sample), width), torch.empty(vocabulary, dtype=torch.float64)
    entries = _Extremes(2 * width, 1)
    products, reaches = _Extremes(2 * len(gates), 2), _Extremes(len(gates), 1)
    step = max(1, _ELEMENTS // width)
    for start in range(0, vocabulary, step):
        rows = source.read_rows(name, start, min(start + step, vocabulary)).float()
        stop = start + len(rows)
        lengths[start:stop] = rows.double().square().sum(1)
        inside = (sample >= start) & (sample < stop)
        sampled[inside] = rows[sample[inside] - start]
        entries.add(torch.cat([rows, -rows], 1), start)
        directions = unit(rows - rows.mean(1, keepdim=True) if layout.family.centred_norm else rows)
        gate, linear = directions @ gates.t(), directions @ linears.t()
        # The activations behind a gate let what is positive through.
        product = gate.clamp(min=0) * linear
        products.add(torch.cat([product, -product], 1), start)
        reaches.add(gate, start)
    norms = [stack.sublayers[0].norm for stack in layout.stacks() if stack.sublayers]
    gain = torch.stack([vector(source, layout, norm) for norm in norms]).amax(0) if norms else torch.ones(width)
    reach = gain * entries.values[0].view(2, width).amax(0)
    channels = reach.argsort(descending=True, stable=True)[:_CHANNELS]
    order = lengths.argsort(stable=True)
    best, second = products.ids.view(2, 2, len(gates))
    driving = torch.cat([best, reaches.ids, second])
    found: dict[str, list[int]] = {}
    seen: set[int] = set()

    def add(reason: str, ids: Iterable[int], most: int) -> None:
        found[reason] = []
        for i in ids:
            if len(found[reason]) < most and len(seen) < CHOSEN and i not in seen:
                seen.add(i)
                found[reason].append(i)

    add(SPECIAL, sorted(set(special)), CHOSEN)
    add(LONGEST, order.flip(0).tolist(), _NORMS)
    add(SHORTEST, order.tolist(), _NORMS)
    add(CHANNELS, entries.ids[0].view(2, width)[:, channels].t().flatten().tolist(), CHOSEN)
    add(NEURONS, driving.flatten().tolist(), _NEURONS)
    add(COVER, sample[farthest(sampled)].tolist(), CHOSEN)
    return found


class _Extremes:
    """The ``count`` largest values of each column seen so far, and the rows that they stand in."""

    def __init__(self, columns: int, count: int) -> None:
        self.values = torch.full((count, columns), -torch.inf)
        self.ids = torch.zeros((count, columns), dtype=torch.int64)

    def add(self, values: Tensor, start: int) -> None:
        """Add [rows, columns], the first of them row ``start``."""
        best = values.topk(min(len(self.values), len(values)), dim=0)
        joined = torch.cat([self.values, best.values])
        self.values, places = joined.topk(len(self.values), dim=0)
        self.ids = torch.cat([self.ids, best.indices + start]).gather(0, places)


def neurons(source: TensorSource, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the rows, times the gain before them, of the gate and of the linear that it multiplies for the strongest
    neurons, fp32 [neurons, width]; those of all feed-forwards alternate.

    Half are those with the largest product of row norms, half those with the largest of that times what the output
    adds for it. Without a gate both are the same row.
    """
    sublayers = [s for stack in layout.stacks() for s in stack.sublayers if isinstance(s, FeedForward)]
    each = max(1, -(-_NEURONS // (5 * max(1, len(sublayers)))))
    gates: list[list[Tensor]] = []
    linears: list[list[Tensor]] = []
    for sublayer in sublayers:
        gain = vector(source, layout, sublayer.norm)
        linear = matrix(source, layout, sublayer.linear) * gain
        gate = matrix(source, layout, sublayer.gate) * gain if sublayer.gate else linear
        product = linear.norm(dim=1) * (gate.norm(dim=1) if sublayer.gate else 1)
        added = product * matrix(source, layout, sublayer.output).norm(dim=0)
        ranked = torch.stack([x.argsort(descending=True, stable=True) for x in (product, added)], 1).flatten()
        best = list(dict.fromkeys(ranked[: 4 * each].tolist()))[:each]
        gates.append(list(gate[best]))
        linears.append(list(linear[best]))
    width = layout.tensors[layout.family.embedding].shape[1]

    def alternating(rows: list[list[Tensor]]) -> Tensor:
        flat = [own[i] for i in range(each) for own in rows if i < len(own)]
        return torch.stack(flat) if flat else torch.empty(0, width)

    return alternating(gates), alternating(linears)


def matrix(source: TensorSource, layout: Layout, module: str) -> Tensor:
    """Return a module's weight in fp32."""
    return source.read(str(layout.tensors[f"{module}.weight"].source)).float()


def vector(source: TensorSource, layout: Layout, norm: str) -> Tensor:
    """Return the magnitudes of a norm's gain in fp32."""
    return matrix(source, layout, norm).abs()


def unit(rows: Tensor) -> Tensor:
    """Return rows divided by their lengths; zeros stay."""
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def farthest(rows: Tensor) -> list[int]:
    """Return ``CHOSEN`` of these rows (or all) in the order in which they cover their directions: the longest first,
    then always the one whose direction is farthest from all before it."""
    directions, last = unit(rows), int(rows.norm(dim=1).argmax())
    nearest = torch.full((len(rows),), -torch.inf)
    found = []
    for _ in range(min(CHOSEN, len(rows))):
        found.append(last)
        nearest = torch.maximum(nearest, directions @ directions[last])
        nearest[last] = torch.inf
        last = int(nearest.argmin())
    return found
