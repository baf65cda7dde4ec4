"""Bound and record the sites of an attention: linears, rotation, scores of each head, context and output projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..families.signals import Spread
from ..families.spread import spread_out
from ..families.wiring import Attention, Rotary
from ..numerics import PROOF_LIMIT
from ..ranges import ScoreRange
from . import attention
from .arithmetic import largest
from .kinds import SiteKind
from .linear import LinearBound, NormOutput, block_sums, bound_linear, either
from .module_findings import ModuleFindings, Normed, Projected


class AttentionSites:
    """Computes the bounds of one attention's sites and records them in ``findings``."""

    def __init__(self, findings: ModuleFindings, sublayer: Attention) -> None:
        self.findings, self.sublayer, self.a = findings, sublayer, findings.arithmetic
        self.note, self.rounded, layout = findings.note, findings.rounded, findings.layout
        self.heads, self.kv_heads = layout.heads(sublayer), layout.kv_heads(sublayer)
        self.scale, self.cap = layout.score_scale(sublayer), layout.cap(sublayer)
        self.seen_at_once = replace(self.a, max_length=layout.most_keys(sublayer, self.a.max_length))

    def output(self, source: Normed, memory: Normed | None) -> Projected:
        """Bound and record all sites; return the bounds of the output projection. source: the attention's input.
        memory: the encoder's output, which cross-attention reads."""
        sublayer, findings = self.sublayer, self.findings
        other = memory if sublayer.memory else self.with_block_sums(*source) if sublayer.block else source
        assert other is not None
        reads = (
            (sublayer.query, SiteKind.QUERY, source),
            (sublayer.key, SiteKind.KEY, other),
            (sublayer.value, SiteKind.VALUE, other),
        )
        linears = findings.linears(sublayer.fused, *reads)
        self.scores(next(linears), next(linears))
        values, mean_square = next(linears)
        if sublayer.value_norm:
            values, mean_square = self.normed_values(values, mean_square)
        keep = findings.kept("attention")
        if keep != 1.0:
            site = f"{sublayer.weights_dropout}:mul" if sublayer.weights_dropout else f"{sublayer.at}:mul#2"
            self.note(site, SiteKind.WEIGHTS, self.rounded(torch.tensor(1 / keep, dtype=torch.float64)))
        context = attention.gathered(values, keep, self.seen_at_once)
        self.note(f"{sublayer.at}:context", SiteKind.CONTEXT, context.bound)
        weight, bias = findings.weight(sublayer.output)
        projection = attention.attention_output(context, weight, bias, self.heads, self.seen_at_once)
        read: Spread = (self.kv_heads, self.heads // self.kv_heads, len(context.bound) // self.kv_heads)
        entering, mean_square = (spread_out(x, read) for x in (context.bound, mean_square / 4))
        return findings.project(sublayer.output, weight, projection, entering, mean_square)

    def with_block_sums(self, source: NormOutput, square: Tensor) -> Normed:
        """Record the sums of token blocks in LongT5's global attention, and the norm of these sums. Return bounds that
        cover all inputs of keys and values: tokens (``source``) and normalised sums. square: mean squares of tokens."""
        size, length = self.findings.layout.positions_per_sum(self.sublayer), self.a.max_length
        # With padding on the right, the last sum is of a block and part of another.
        sums, longest = block_sums(source, min(2 * size - 1, length), length, self.a)
        self.note(f"{self.sublayer.at}:sum", SiteKind.BLOCK_SUM, sums)
        normed, normed_square = self.findings.normalised(self.sublayer.block_norm, sums, square * size, longest)
        return either(source, normed), torch.maximum(square, normed_square)

    def scores(self, query: tuple[LinearBound, Tensor], key: tuple[LinearBound, Tensor]) -> None:
        """Record any norms and rotation of queries and keys, then the scores and attention weights. query, key: bounds
        and mean squares of the outputs of both linears."""
        sublayer, rotary = self.sublayer, self.sublayer.rotary
        if rotary is None:
            self.scored(attention.score_bounds(query[0], key[0], self.heads, self.a, self.scale))
        elif sublayer.query_norm:
            norms = (sublayer.query_norm, *query, self.heads), (sublayer.key_norm, *key, self.kv_heads)
            normed = (self.head_norm(*each) for each in norms)
            one, other = (attention.rotated_norm(source, self.a, together, rotary) for source, together in normed)
            self.raise_outputs({sublayer.query_norm: one.bound.flatten(), sublayer.key_norm: other.bound.flatten()})
            self.rotation(rotary, one.bound, other.bound)
            self.scored(attention.norm_scores(one, other, self.heads, self.a, self.scale))
        else:
            self.rotated_scores(rotary, query[0], key[0])

    def head_norm(self, path: str, linear: LinearBound, square: Tensor, heads: int) -> tuple[NormOutput, int]:
        """Record a norm of queries, keys or values; return its output and the number of heads that it spans. linear,
        square: bounds and mean squares of the norm's input."""
        together = heads if self.sublayer.norms_whole else 1
        bound, square = (x.view(heads // together, -1) for x in (linear.bound, square))
        longest = float(bound.norm(dim=1).max())
        return self.findings.normalised(path, bound.amax(0), square.mean(0), longest)[0], together

    def normed_values(self, linear: LinearBound, square: Tensor) -> tuple[LinearBound, Tensor]:
        """Record the output of the norm layer that reads the values. Return the bounds and mean squares of this output.
        The bounds are a ``LinearBound``, as if a linear with the identity matrix as its weight read the output."""
        source, _ = self.head_norm(self.sublayer.value_norm, linear, square, self.kv_heads)
        same = torch.eye(len(source.gain), dtype=torch.float64).repeat(self.kv_heads, 1)
        return bound_linear(source, same, None, self.a), torch.ones(len(same), dtype=torch.float64)

    def rotated_scores(self, rotary: Rotary, query: LinearBound, key: LinearBound) -> None:
        """Record the rotation of queries and keys that have no norms, and the sites of their scores."""
        sublayer, a = self.sublayer, self.a
        one = attention.rotated_linear(query, self.heads, rotary, a, attention.query_growth(rotary, a.max_length))
        other = attention.rotated_linear(key, self.kv_heads, rotary, a)
        if rotary.growth is not None:
            self.note(f"{sublayer.at}:mul#5", SiteKind.ROTATION, largest(one.bound))
        if sublayer.fused:
            still = torch.zeros(sublayer.fused[2], dtype=torch.float64)
            self.raise_outputs({sublayer.query: torch.cat([one.bound, other.bound, still])})
        else:
            self.raise_outputs({sublayer.query: one.bound, sublayer.key: other.bound})
        self.rotation(rotary, one.bound, other.bound)
        self.scored(attention.linear_scores(one, other, a, self.scale))

    def raise_outputs(self, rotated: Mapping[str, Tensor]) -> None:
        """Raise modules' recorded output bounds to at least their bounds after rotation, which are ``rotated``."""
        # The same exponents scale an output before and after rotation, so both must fit.
        for path, most in rotated.items():
            bound, square = self.findings.outputs[path]
            self.findings.outputs[path] = (torch.maximum(bound, most), square)

    def rotation(self, rotary: Rotary, query: Tensor, key: Tensor) -> None:
        if not self.sublayer.turns:
            return
        most = max(largest(query), largest(key))
        self.note(f"{rotary.at}:to", SiteKind.ROTATION, rotary.factor)
        for operation in ("mul", "mul#2", "mul#3", "mul#4", "add", "add#2"):
            self.note(f"{self.sublayer.at}:{operation}", SiteKind.ROTATION, most)

    def scored(self, scores: attention.ScoreBounds) -> None:
        """Record the sites from query·key products to attention weights. scores: the products' bounds."""
        sublayer, findings = self.sublayer, self.findings
        self.note(f"{sublayer.at}:scores", SiteKind.SCORES, scores.product, scores.partial)
        scaled = self.rounded(scores.product * self.scale) if sublayer.scaled else scores.product
        self.note(sublayer.scaling[0], SiteKind.SCORES, scaled)
        top, steps, span = scaled, scaled, scores.span
        if self.cap is not None:
            capped = attention.soft_capped(scaled, self.cap, self.a)
            self.note(f"{sublayer.at}:div", SiteKind.SCORES, capped.quotient)
            steps = torch.maximum(scaled, capped.quotient)  # of a cap under 1 that is the larger one
            self.note(f"{sublayer.at}:tanh", SiteKind.SCORES, capped.tanh)
            # Eager attention multiplies tanh by the cap after it has scaled the scores.
            self.note(sublayer.scaling[1], SiteKind.SCORES, capped.result)
            scaled, span = capped.result, attention.capped_span(span, capped)
        offset = self.position_bias()
        biased = self.rounded(scaled + offset)
        self.note(sublayer.joining, SiteKind.SCORES, biased)
        product = torch.maximum(scores.product, scores.partial)
        excess = excess_bits(torch.maximum(product, steps))
        if self.cap is None:  # no factor on queries moves capped scores
            excess = torch.maximum(excess, excess_bits(scaled, offset))
        if not sublayer.radius:  # local attention's mask is −inf
            table = findings.tensor(sublayer.bias)
            table = None if table is None else table.double()
            whole, still = (attention.masked_span(x * span, x * scaled, table, self.a) for x in (1.0, 0.0))
            self.note(f"{sublayer.at}:masked", SiteKind.MASKED_SCORES, whole)
            if self.cap is None:
                excess = torch.maximum(excess, excess_bits(whole - still, still))
        self.note(f"{sublayer.at}:softmax", SiteKind.WEIGHTS, 1.0)
        findings.scores[sublayer.at] = ScoreRange(largest(product), largest(torch.maximum(biased, top)), excess)

    def position_bias(self) -> Tensor:
        """Record the position biases; return the largest magnitude for each head. It is 0 without tables of biases."""
        offset = torch.zeros(self.heads, dtype=torch.float64)
        for name in filter(None, (self.sublayer.bias, self.sublayer.block_bias)):
            table = self.findings.tensor(name)
            assert table is not None
            largest_bias = table.double().abs().amax(0)
            offset = torch.maximum(offset, largest_bias)
            self.note(f"{name.removesuffix('.weight')}:embedding", SiteKind.POSITION_BIAS, largest_bias)
        return offset


def excess_bits(values: Tensor, fixed: Tensor | float = 0.0) -> Tensor:
    """Return log₂ of the factor by which ``values`` must shrink so that ``values`` + ``fixed`` fits fp16."""
    room = (PROOF_LIMIT - torch.as_tensor(fixed, dtype=torch.float64)).clamp(min=0)
    return (values / room).nan_to_num(nan=1.0, posinf=torch.inf).clamp(min=1).log2()  # inf without room
