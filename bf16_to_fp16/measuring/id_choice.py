"""Choose which ids of a large vocabulary the probe runs: special and random ids, those with extreme embeddings, and
those with the largest values inside the model.

``forward`` computes these values in fp32 on rows of one token each, where attention returns the token's own value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..families.configs import config_value
from ..families.layout import Layout, ResolvedStack, TensorReader, TensorSource
from ..families.resolve import source_weights, unscaled
from ..families.spread import spread_out
from ..families.wiring import Attention, Experts, FeedForward, Sublayer

CHOSEN, WHOLE = 256, 384  # how many ids are chosen, and the largest vocabulary that is run whole instead
SPECIAL, DRAWN, LONGEST, SHORTEST, CHANNELS = "special", "random", "largest norm", "smallest norm", "outlier channels"
ALONE = "largest alone"
"""Reasons for choosing an id. ``ALONE``: in a row of its own, the id gives one of the largest values at some site."""

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
    """Choose token ids, as many as the constant ``CHOSEN`` says, and return them grouped by the reason for the choice.
    An id with several reasons is listed under the first. special: ids that are chosen first."""
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
    farthest: list[list[int]] = []
    for step in forward(weights, candidates):
        for values in (step.stream, *step.outputs):
            order = values.abs().amax(1).argsort(descending=True, stable=True)
            farthest.append([candidates[i] for i in order[:_RANKS].tolist()])
    for rank in range(_RANKS):
        for ids in farthest:
            add(ALONE, ids[rank : rank + 1])
    add(DRAWN, others)
    return {reason: ids for reason, ids in by_reason.items() if ids}


def affordable(layout: Layout) -> int:
    tables = (layout.family.embedding, layout.family.head)
    shapes = [tensor.shape for name, tensor in layout.tensors.items() if name not in tables]
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


class Weights:
    """Reads a layout's weights in fp32, and computes its operations with them. reader: returns a weight by name; by
    default it is read from ``source``. ``vocabulary`` and ``width`` are the sizes of the embedding."""

    def __init__(self, source: TensorSource, layout: Layout, reader: TensorReader | None = None) -> None:
        self.source, self.layout = source, layout
        self.reader = reader or source_weights(source, layout)
        table = layout.tensors[layout.family.embedding]
        self.table, (self.vocabulary, self.width) = str(table.source), table.shape

    def read(self, name: str) -> Tensor | None:
        return self.reader(name).float() if name in self.layout.tensors else None

    def matrix(self, module: str) -> Tensor:
        weight = self.read(f"{module}.weight")
        assert weight is not None
        return weight

    def query_key_value(self, sublayer: Attention, x: Tensor, read: Tensor) -> list[Tensor]:
        if sublayer.fused:
            return list(self.linear(sublayer.query, x).split(sublayer.fused, 1))
        return [self.query(sublayer, x), *(self.linear(path, read) for path in (sublayer.key, sublayer.value))]

    def query(self, sublayer: Attention, x: Tensor) -> Tensor:
        output = self.linear(sublayer.query, x)
        return output[:, : sublayer.fused[0]] if sublayer.fused else output

    def rows(self, start: int, stop: int) -> Tensor:
        return self.source.read_rows(self.table, start, stop).float()

    def linear(self, module: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.matrix(module), self.read(f"{module}.bias"))

    def norm(self, module: str, x: Tensor) -> Tensor:
        if not module:
            return x
        gain, shift, eps = self.read(f"{module}.weight"), self.read(f"{module}.bias"), self.layout.eps_of(module)
        if self.layout.family.centred_norm:
            return functional.layer_norm(x, x.shape[-1:], gain, shift, eps)
        return functional.rms_norm(x, x.shape[-1:], gain, eps)

    def embedded(self, stack: ResolvedStack, ids: Sequence[int]) -> Tensor:
        table = str(self.layout.tensors[self.layout.table(stack.ends)].source)
        rows = self.source.read_some_rows(table, ids).float()
        rows = rows * self.layout.embedding_scale(stack.ends)
        positions = self.layout.tensors.get(stack.ends.positions)
        return rows if positions is None else rows + unscaled(self.source, positions)[positions.ahead].float()

    def gathered(self, sublayer: Attention, values: Tensor) -> Tensor:
        heads = self.layout.kv_heads(sublayer)
        spread = (heads, self.layout.heads(sublayer) // heads, values.shape[1] // heads)
        values = self.norm(sublayer.value_norm, values.unflatten(1, (heads, -1))).flatten(1)
        return spread_out(values.t(), spread).t()

    def joined(self, sublayer: Sublayer, stream: Tensor, output: Tensor) -> Tensor:
        joined = stream + self.norm(sublayer.post_norm, output)
        scalar = self.read(sublayer.scalar) if isinstance(sublayer, FeedForward) and sublayer.scalar else None
        return joined if scalar is None else joined * scalar

    def feed_forward_outputs(self, sublayer: FeedForward, x: Tensor) -> list[Tensor]:
        if sublayer.gate:
            outputs = [self.linear(module, x) for module in dict.fromkeys((sublayer.gate, sublayer.linear))]
            outputs = list(outputs[0].split(sublayer.fused, 1)) if sublayer.fused else outputs
            outputs.append(self.activated(sublayer, outputs[0]) * outputs[1])
        else:
            outputs = [self.linear(sublayer.linear, x)]
            outputs.append(self.activated(sublayer, outputs[0]))
        return [*outputs, self.linear(sublayer.output, outputs[-1])]

    def expert_outputs(self, sublayer: Experts, x: Tensor) -> list[Tensor]:
        """Return the outputs of a sublayer with experts: the router's logits, the values inside each token's first
        expert, and last the sublayer's output. All are [tokens, channels]."""
        logits = self.linear(sublayer.classifier, x)
        numbers, shares = self.chosen(sublayer, logits)
        outputs: list[Tensor] = []
        for number in numbers.unique().tolist():
            tokens, places = torch.where(numbers == number)
            *inside, output = self.feed_forward_outputs(sublayer.experts[number], x[tokens])
            outputs = outputs or [x.new_zeros(len(x), value.shape[1]) for value in (*inside, output)]
            for whole, value in zip(outputs, inside, strict=False):
                whole[tokens[places == 0]] = value[places == 0]
            outputs[-1].index_add_(0, tokens, output * shares[tokens, places, None])
        if sublayer.shared is not None:
            outputs[-1] += self.feed_forward_outputs(sublayer.shared, x)[-1]
        return [logits, *outputs]

    def chosen(self, sublayer: Experts, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of each token's experts and the weights of these experts, both [tokens, experts per
        token], best expert first. A restriction to some groups of experts is ignored."""
        number, weight, _ = self.layout.experts_together(sublayer)
        scores = logits.sigmoid() if sublayer.sigmoid else logits.softmax(-1)
        correction = self.read(sublayer.correction) if sublayer.correction else None
        numbers = (scores if correction is None else scores + correction).topk(number).indices
        shares = scores.gather(1, numbers)
        key = sublayer.normalised
        if sublayer.chosen and (not key or config_value(self.layout.family, self.layout.config, key)):
            shares = shares / shares.sum(1, keepdim=True)
        return numbers, shares * weight

    def activated(self, sublayer: FeedForward, x: Tensor) -> Tensor:
        from transformers.activations import ACT2FN

        return ACT2FN[sublayer.activation](x)

    def head_output(self, states: Tensor) -> Tensor:
        """Return the output of the model's head for its last states, or the states themselves if it has no head."""
        head = self.layout.head
        if head is None:
            return states
        x = states * self.layout.head_scale
        for each in head.linears:
            x = functional.linear(x, self.matrix(each.weight.removesuffix(".weight")), self.read(each.bias))
            x = x.tanh() if each.tanh else x
        cap = self.layout.cap(head)
        return x if cap is None else cap * (x / cap).tanh()


@dataclass
class Step:
    """A norm and the sublayer after it, if any, run on rows of one token each. All values are [tokens, channels]."""

    stack: ResolvedStack
    norm: str  # "" for none
    sublayer: Sublayer | None
    stream: Tensor  # the norm's input
    outputs: list[Tensor]
    """The norm's output, then those of the sublayer's linears. A feed-forward's neurons, which its last linear reads,
    come before that linear's output. A sublayer with experts has ``expert_outputs`` instead."""


def forward(weights: Weights, ids: Sequence[int]) -> Iterator[Step]:
    memory = torch.empty(0)
    for stack in weights.layout.stacks():
        stream = weights.embedded(stack, ids)
        if stack.ends.first_norm:
            begun = weights.norm(stack.ends.first_norm, stream)
            yield Step(stack, stack.ends.first_norm, None, stream, [begun])
            stream = begun
        for sublayer in stack.sublayers:
            normed = weights.norm(sublayer.norm, stream)
            if isinstance(sublayer, Attention):
                outputs = weights.query_key_value(sublayer, normed, memory if sublayer.memory else normed)
                outputs.append(weights.linear(sublayer.output, weights.gathered(sublayer, outputs[-1])))
            elif isinstance(sublayer, Experts):
                outputs = weights.expert_outputs(sublayer, normed)
            else:
                outputs = weights.feed_forward_outputs(sublayer, normed)
            yield Step(stack, sublayer.norm, sublayer, stream, [normed, *outputs])
            stream = weights.joined(sublayer, stream, outputs[-1])
        memory = weights.norm(stack.ends.norm, stream)
        yield Step(stack, stack.ends.norm, None, stream, [memory])
