"""Choose the ids of a large vocabulary that the probe runs: special ids, the embedding's longest, shortest and outlier
rows, and ids with the largest values when carried alone through every sublayer. Random ids fill up the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..families.layout import Layout, TensorSource
from .alone import Weights, forward

CHOSEN, WHOLE = 256, 384  # how many ids are chosen, and the largest vocabulary that is run whole instead
SPECIAL, DRAWN, LONGEST, SHORTEST, CHANNELS = "special", "random", "largest norm", "smallest norm", "outlier channels"
ALONE, ENCODER, DECODER = "largest alone", "largest alone in the encoder", "largest alone in the decoder"
"""Why an id was chosen."""

_CHANNELS = 24  # channels whose largest and smallest entry is taken
_MOST = {LONGEST: 16, SHORTEST: 16, CHANNELS: 2 * _CHANNELS}  # how many ids each reason brings in
_CANDIDATES = 768  # tokens carried through the layers; a small model carries more
_CARRIED, _TOGETHER = 1 << 38, 1 << 22  # most multiplications of the search, a few seconds; most outputs of one linear
_RANKS = 4  # how many candidates a site can bring in

_ELEMENTS = 1 << 22  # entries of the table in memory at a time


def drawn(vocabulary: int, special: Iterable[int], generator: torch.Generator) -> dict[str, list[int]]:
    first = sorted(set(special))
    others = torch.randperm(vocabulary, generator=generator)[:CHOSEN].tolist()
    return {SPECIAL: first, DRAWN: [i for i in others if i not in first][: CHOSEN - len(first)]}


def chosen(
    source: TensorSource, layout: Layout, special: Iterable[int], generator: torch.Generator
) -> dict[str, list[int]]:
    """Return ``CHOSEN`` different ids, each under the first reason that chose it."""
    weights = Weights(source, layout)
    carried = max(_CANDIDATES, affordable(layout))
    others = torch.randperm(weights.vocabulary, generator=generator)[:carried].tolist()
    extremes = scanned(weights)
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
    candidates = list(dict.fromkeys([*seen, *others]))[:carried]
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
    run = (
        tensor for name, tensor in layout.tensors.items() if name not in (layout.family.embedding, layout.family.head)
    )
    shapes = [tensor.shape for tensor in run]
    products, widest = sum(map(math.prod, shapes)), max(shape[0] for shape in shapes)
    return min(_CARRIED // max(1, products), _TOGETHER // widest)


def scanned(weights: Weights) -> dict[str, list[int]]:
    lengths = torch.empty(weights.vocabulary, dtype=torch.float64)
    entries = torch.full((2, weights.width), -torch.inf)
    ids = torch.zeros((2, weights.width), dtype=torch.int64)
    step = max(1, _ELEMENTS // weights.width)
    for start in range(0, weights.vocabulary, step):
        part = weights.rows(start, min(start + step, weights.vocabulary))
        lengths[start : start + len(part)] = part.double().square().sum(1)
        for side, signed in enumerate((part, -part)):
            best, places = signed.max(0)
            ids[side] = torch.where(best > entries[side], places + start, ids[side])
            entries[side] = torch.maximum(entries[side], best)
    stacks = [stack for stack in weights.layout.stacks() if stack.sublayers]
    norms = [weights.matrix(norm).abs() if (norm := s.sublayers[0].norm) else torch.ones(weights.width) for s in stacks]
    norms = [norm for norm in norms if len(norm) == weights.width]
    reach = torch.stack(norms).amax(0) * entries.amax(0)
    channels = reach.argsort(descending=True, stable=True)[:_CHANNELS]
    order = lengths.argsort(stable=True)
    return {
        LONGEST: order.flip(0)[:CHOSEN].tolist(),
        SHORTEST: order[:CHOSEN].tolist(),
        CHANNELS: ids[:, channels].t().flatten().tolist(),
    }
