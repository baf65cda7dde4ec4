"""Search for inputs on which edits do harm: they change the output far more than bf16 does. An edit changes the
function most where the edited activation is small. This is the activation's soft side.

Candidates are ids, and sets of ids, for which edits change outputs or attention weights most. Stock code runs a row for
each candidate and for random pairs of ids. Harm is confirmed in several rows, because one bad row can be chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.reader import Checkpoint
from ..families.layout import Layout
from ..families.wiring import Attention, Experts, FeedForward, feed_forwards_of
from ..optim.rounding import stochastic
from ..rescaling.edits import changed_by, edited_weights, edits_of
from ..rescaling.plan import Plan
from ..results import ExceptionEntry, SearchEntry
from .batch import LOGIT_BUDGET, Batch, run_batch
from .fidelity import Difference, Outputs, add_outputs, output_on
from .id_choice import Step, Weights, affordable, forward
from .lanes import Walk, results_of
from .probe import whole_rows
from .products import FastProducts
from .stock import vocabulary_of

LENGTH, EVERY = 16, 4  # tokens of a row; one in four of a text is replaced
LEAST_ROWS, MOST_ROWS = 64, 2048  # rows that are run, fewer of a large vocabulary
TOGETHER = 128  # rows of one batch
IN_TEXT = 32  # ids that are put into text
MOST_OVER = 256  # rows, worst beside a bf16 run, that are rounded stochastically too
AGAIN, MOST_AGAIN = 8, 24  # rows that confirm a harmed input, and most inputs that are confirmed
WORST, PARTNERED = 24, 8  # inputs that are fed back, and how many of their ids are put beside random ones
NEGLIGIBLE = 1e-4  # a smaller divergence of bf16 counts as this
RANKS = 8  # suspects of one site
IN_PAIRS = 2048  # ids of which all pairs are looked at
DRAWS = 8  # stochastic roundings whose mean stands for bf16
TIMES, LEAST = 10.0, 0.01
"""Edits harm an input if its divergence from fp32 exceeds LEAST and TIMES bf16's, by one statistic of AGAIN rows."""

STATISTICS: tuple[Callable[[Tensor], Tensor], ...] = (torch.mean, *(partial(torch.quantile, q=q) for q in (0.75, 0.5)))
"""Statistics of the divergences of rows. One row that bf16 ruins raises bf16's mean, which hides harm to other rows.
Quartiles do not hide it."""

LOGITS_TOGETHER = 1 << 25  # of lone tokens, 128 MiB
HALF_STEP = 2.0**-9  # relative rounding error of bf16


@dataclass(frozen=True)
class SoftSide:
    exceptions: list[ExceptionEntry]  # worst first
    searched: SearchEntry


def soft_side(
    source: Checkpoint, written: Checkpoint, layout: Layout, plan: Plan, config: Any, text: Tensor | None
) -> SoftSide:
    """Search for inputs on which a plan's edits do harm, and return those that were confirmed. written: the checkpoint
    with the edits. text: ids of ordinary text, int64 [rows, length], into which candidate ids are put; by default
    random ids."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = vocabulary_of(config)
    order = torch.randperm(vocabulary, generator=generator)
    carried = affordable(layout)
    ids = order[: max(IN_PAIRS // 2, carried)].sort().values
    with FastProducts():
        candidates, covered = suspected(source, layout, edits_of(layout, plan), ids)
    suspects = list(dict.fromkeys(candidates))
    alone = list(dict.fromkeys(s[:1] for s in suspects))[:IN_TEXT]
    together = [s for s in suspects if len(s) > 1]
    most = max(LEAST_ROWS, min(MOST_ROWS, carried // LENGTH))
    most = min(most, LOGIT_BUDGET // (LENGTH * vocabulary))
    inputs = (alone[: most // 4] + together)[: most // 2]
    pairs = torch.randint(vocabulary, ((most - len(inputs)) // 2, 2), generator=generator)
    lines = torch.randint(vocabulary, (AGAIN, LENGTH), generator=generator) if text is None else text
    lines = lines.repeat(1, math.ceil(LENGTH / lines.shape[1]))[:, :LENGTH]  # a text may be shorter
    rows = Rows(source, written, layout, config, lines, generator)
    inputs += map(tuple, pairs.tolist())
    harmed, kl, run = rows.harmed(inputs)
    worst = Counter(i for n in in_order(kl, run)[:WORST].tolist() for i in inputs[n])
    beside = torch.randint(vocabulary, (most - len(inputs),), generator=generator).tolist()
    usual = cycle([i for i, _ in worst.most_common(PARTNERED)])
    harmed += rows.harmed(list(zip(usual, beside, strict=False)))[0]
    parts = dict.fromkeys((i,) for each in harmed if len(each.ids) > 1 for i in each.ids)
    if untried := [part for part in parts if part not in inputs][:IN_TEXT]:
        harmed += rows.harmed(untried)[0]
    search = SearchEntry(ids=len(ids), covered=covered, further=float((kl > run)[-len(pairs) :].float().mean()))
    different = {tuple(each.ids): each for each in harmed}.values()
    return SoftSide(sorted(different, key=lambda each: -each.kl), search)


@dataclass(frozen=True)
class Rows:
    """Makes rows that contain candidate ids, and runs the source and ``written``, the edited checkpoint, on them."""

    source: Checkpoint
    written: Checkpoint
    layout: Layout
    config: Any
    lines: Tensor  # int64 [n, ``LENGTH``]; in the row of a single candidate id, this id replaces every fourth token
    generator: torch.Generator

    def of(self, inputs: Sequence[tuple[int, ...]]) -> Tensor:
        lines = cycle(self.lines)
        return torch.stack([row_of(ids, line, self.generator) for ids, line in zip(inputs, lines, strict=False)])

    def batches(self, rows: Tensor) -> list[Batch]:
        return [whole_rows(self.config, part, "rows of ids that edits may harm") for part in rows.split(TOGETHER)]

    def harmed(self, inputs: Sequence[tuple[int, ...]]) -> tuple[list[ExceptionEntry], Tensor, Tensor]:
        """Return the report's entries of the inputs that edits harm, then two tensors: the divergence of each input
        from the source after edits, and in bf16. inputs: sets of ids; each set makes one row."""
        rows = self.of(inputs)
        kl, run = self.divergences(rows)
        order = in_order(kl, run)
        over = order[kl[order] > LEAST][:MOST_OVER]
        if not len(over):
            return [], kl, run
        suspects = over[kl[over] > TIMES * self.bf16(rows[over])].tolist()
        different = dict.fromkeys(tuple(sorted(inputs[i])) for i in suspects)
        return self.confirmed(list(different)[:MOST_AGAIN]), kl, run

    def confirmed(self, suspects: Sequence[tuple[int, ...]]) -> list[ExceptionEntry]:
        if not suspects:
            return []
        rows = self.of([ids for ids in suspects for _ in range(AGAIN)])
        columns = (x.view(-1, AGAIN) for x in (*self.divergences(rows), self.bf16(rows)))
        entries: list[ExceptionEntry] = []
        for ids, *values in zip(suspects, *columns, strict=True):
            figures = ([float(statistic(x)) for x in values] for statistic in STATISTICS)
            if harm := next((each for each in figures if each[0] > max(LEAST, TIMES * each[2])), None):
                entries.append(ExceptionEntry(ids=list(ids), kl=harm[0], kl_run=harm[1], kl_bf16=harm[2]))
        return entries

    def divergences(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's divergence from the fp32 source, for the edited checkpoint and for the bf16 source."""
        batches, walk, other = self.batches(rows), Walk(self.source), Walk(self.written)
        expected, as_bf16 = (add_outputs(walk, batches, dtype) for dtype in (torch.float32, torch.bfloat16))
        edited = add_outputs(other, batches, torch.float32)
        walk.run()
        other.run()
        apart = partial(divergences, batches, results_of(expected), self.layout.gives_probabilities)
        return apart(results_of(edited)), apart(results_of(as_bf16))

    def bf16(self, rows: Tensor) -> Tensor:
        return mean_bf16_divergence(self.source, self.batches(rows), self.layout)


def in_order(kl: Tensor, kl_bf16: Tensor) -> Tensor:
    """Return the indices of rows, sorted by the ratio of ``kl`` to ``kl_bf16``, largest first. kl, kl_bf16: each row's
    divergence after edits and in bf16."""
    return (kl / kl_bf16.clamp(min=NEGLIGIBLE)).argsort(descending=True)


def row_of(ids: Sequence[int], line: Tensor, generator: torch.Generator) -> Tensor:
    if len(ids) > 1:
        return torch.tensor(ids)[torch.randint(len(ids), (LENGTH,), generator=generator)]
    row = line.clone()
    row[2::EVERY] = ids[0]  # the last before the end token too, which a classifier may read alone
    return row


def suspected(
    source: Checkpoint, layout: Layout, edits: Plan, ids: Tensor
) -> tuple[list[tuple[int, ...]], float | None]:
    """Return the inputs (tuples of ids) on which edits may do most harm, and a fraction: of ids, or in attention of
    pairs of ids, whose values an edit changes by at most bf16's rounding error. It is the smallest over edited
    feed-forwards and attention heads; None if none is edited. edits: a plan of edits alone."""
    centred = Plan(family=edits.family, centred_keys=edits.centred_keys)
    plain, edited = (Weights(source, layout, edited_weights(source, layout, each)) for each in (centred, edits))
    priced = edits.model_copy(update={"centred_keys": []})
    changed = {name.rpartition(".")[0] for name in changed_by(layout, priced)}
    outputs: list[tuple[int, ...]] = []
    by_site: list[list[tuple[int, ...]]] = []
    covered: list[float] = []
    for step, after in zip(*(forward(weights, ids.tolist()) for weights in (plain, edited)), strict=True):
        parts = () if step.sublayer is None else (step.sublayer, *feed_forwards_of(step.sublayer))
        if step.sublayer is None:
            if step.stack.is_last and step.norm == step.stack.ends.norm:
                change = change_of_output(plain, edited, step.outputs[0], after.outputs[0])
                outputs += [(i,) for i in first_of(change, ids)]
        elif any(not changed.isdisjoint(vars(part).values()) for part in parts):
            if isinstance(step.sublayer, Attention):
                for sets, fraction in pairs_at(plain, edited, step.sublayer, step, ids):
                    by_site.append(sets)
                    covered.append(fraction)
            else:
                change = change_at(plain, edited, step)
                first = first_of(change, ids)
                by_site.append([*((i,) for i in first), tuple(first[:4])])
                covered.append(float((change <= 1).float().mean()))
    # First the inputs whose final output changes most, then the first input of every edited site, then every second.
    in_turn = [each for rank in zip_longest(*by_site) for each in rank if each]
    return outputs + in_turn, min(covered, default=None)


def first_of(change: Tensor, ids: Tensor) -> list[int]:
    most = change.nan_to_num(0.0).topk(min(RANKS, len(ids)))
    return ids[most.indices[most.values > 0]].tolist()


def change_at(plain: Weights, edited: Weights, step: Step) -> Tensor:
    """Return how much edits change each token's feed-forward output, in units of bf16's rounding error. step: the
    values without edits."""
    normed, output = step.outputs[0], step.outputs[-1]
    sublayer = step.sublayer
    assert isinstance(sublayer, FeedForward | Experts)
    whole = (
        edited.expert_outputs(sublayer, normed)
        if isinstance(sublayer, Experts)
        else edited.feed_forward_outputs(sublayer, normed)
    )
    before, after = (plain.norm(sublayer.post_norm, each) for each in (output, whole[-1]))
    noise = HALF_STEP * (step.stream.norm(dim=1) + before.norm(dim=1))
    return (after - before).norm(dim=1) / noise.clamp(min=1e-30)


def change_of_output(plain: Weights, edited: Weights, before: Tensor, after: Tensor) -> Tensor:
    """Return how much edits change the final output of each token: the KL of its logits, or else its relative squared
    error. before, after: the last states without and with edits."""
    parts, together = [], max(1, LOGITS_TOGETHER // plain.vocabulary)
    for states in zip(before.split(together), after.split(together), strict=True):
        a, b = (weights.head_output(each) for weights, each in zip((plain, edited), states, strict=True))
        if plain.layout.gives_probabilities:
            p, q = a.log_softmax(-1), b.log_softmax(-1)
            parts.append((p.exp() * (p - q)).sum(1))
        else:
            parts.append((a - b).square().sum(1) / a.square().sum(1).clamp(min=1e-30))
    return torch.cat(parts)


def pairs_at(
    plain: Weights, edited: Weights, attention: Attention, step: Step, ids: Tensor
) -> Iterator[tuple[list[tuple[int, ...]], float]]:
    """Yield (inputs, fraction) for every edited attention head. inputs: tuples of token ids, on which edits may do
    harm. fraction: edits change the attention weight of this fraction of id pairs by at most bf16's rounding error. At
    most ``IN_PAIRS`` ids are paired. step: the values without edits."""
    layout = plain.layout
    some = torch.linspace(0, len(ids) - 1, min(len(ids), IN_PAIRS)).long()
    normed, query, key = (x[some] for x in step.outputs[:3])
    queries, others = (
        heads_of(weights, attention.query_norm, layout.heads(attention), x, whole=attention.norms_whole)
        for weights, x in ((plain, query), (edited, edited.query(attention, normed)))
    )
    keys = heads_of(plain, attention.key_norm, layout.kv_heads(attention), key, whole=attention.norms_whole)
    shared = layout.heads(attention) // layout.kv_heads(attention)
    scale, cap = layout.score_scale(attention), layout.cap(attention)

    def scores(q: Tensor, k: Tensor) -> Tensor:
        product = q @ k.t() * scale
        return product if cap is None else cap * (product / cap).tanh()

    for head in range(layout.heads(attention)):
        q, other, k = queries[:, head], others[:, head], keys[:, head // shared]
        if torch.equal(q, other):
            continue
        before, after = scores(q, k), scores(other, k)
        noise = HALF_STEP * scale * ((q.square() @ k.square().t()).sqrt() + before.abs())
        noise = noise + noise.diagonal()[:, None]  # of the difference of two scores
        gaps, edited_gaps = beside_own_key(before), beside_own_key(after)
        change = (gaps.sigmoid() - edited_gaps.sigmoid()).abs()
        moved = change / (1 + noise)
        best = moved.flatten().topk(min(4 * RANKS, moved.numel())).indices
        of_best = zip((best // len(some)).tolist(), (best % len(some)).tolist(), strict=True)
        pairs = [(t, u) for t, u in of_best if t != u]
        usual = [i for i, _ in Counter(i for pair in pairs for i in pair).most_common(4)]
        by_key, by_both = k.norm(dim=1), q.norm(dim=1) * k.norm(dim=1)
        # Edits change small signals most: ids with small queries and keys, and ids with small keys, are inputs too.
        soft = [each.argsort()[:n].tolist() for each in (by_both, by_key) for n in (3, 6)]
        sets = [tuple(usual), *(tuple(each) for each in soft), *pairs[:RANKS], tuple(usual[:1])]
        covered = (change <= HALF_STEP) | ((gaps - edited_gaps).abs() <= noise)
        yield [tuple(ids[some[list(each)]].tolist()) for each in sets if each], float(covered.float().mean())


def heads_of(weights: Weights, norm: str, heads: int, x: Tensor, *, whole: bool) -> Tensor:
    if norm and whole:
        return weights.norm(norm, x).unflatten(1, (heads, -1))
    return weights.norm(norm, x.unflatten(1, (heads, -1)))


def beside_own_key(scores: Tensor) -> Tensor:
    return scores - scores.diagonal()[:, None]


def divergences(batches: Sequence[Batch], expected: Outputs, probabilities: bool, actual: Outputs) -> Tensor:
    rows = [
        Difference().add(a, b, probabilities=probabilities).mean
        for batch, one, other in zip(batches, expected, actual, strict=True)
        for a, b in zip(*(x.chunk(len(batch.input_ids)) for x in (one, other)), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def mean_bf16_divergence(source: Checkpoint, batches: Sequence[Batch], layout: Layout) -> Tensor:
    """Return each row's mean divergence in bf16 over runs with stochastic rounding. A single run may be lucky."""
    walk = Walk(source)
    expected = add_outputs(walk, batches, torch.float32)
    draws = [
        [walk.add(partial(run_rounded, batch, 1 + n * DRAWS + k), torch.float32) for n, batch in enumerate(batches)]
        for k in range(DRAWS)
    ]
    walk.run()
    apart = partial(divergences, batches, results_of(expected), layout.gives_probabilities)
    return torch.stack([apart(results_of(each)) for each in draws]).mean(0)


def run_rounded(batch: Batch, seed: int, model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)

    def rounded(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        bits = torch.randint(1 << 16, output.shape, generator=generator, dtype=torch.int32)
        return stochastic(output.float(), torch.bfloat16, bits)

    with ExitStack() as hooks, FastProducts():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding) or "Norm" in type(module).__name__:
                hooks.enter_context(module.register_forward_hook(rounded))
        return output_on(batch, run_batch(model, batch))
