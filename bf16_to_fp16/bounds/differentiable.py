"""Bounds that no rescaling moves, as functions of live weights that have a gradient.

The formulas are the certificate's, in fp32 on the weights' own device; those without eigenvalues are its very
functions. Two things differ. Spectral norms of all heads at once come from a power iteration with fixed vectors. At
convergence it has the norm's value and gradient, and it proves nothing. And a linear's rounding in fp16 is one factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..families.layout import Layout, ResolvedStack, TensorReader
from ..families.resolve import effective
from ..families.signals import Kind
from ..families.walk import walk
from ..families.wiring import (
    MOST_MEAN,
    Attention,
    Experts,
    FeedForward,
    Head,
    HeadLinear,
    Projector,
    Rotary,
    StackEnds,
    Sublayer,
    feed_forwards_of,
    outputs_of,
)
from ..numerics import FP16_MAX
from .activations import LOWEST
from .arithmetic import Arithmetic, full_precision
from .attention import (
    capped_span,
    masked_span,
    pair_order,
    query_growth,
    soft_capped,
    turned,
    turned_score_bounds,
)
from .linear import (
    NormOutput,
    either,
    enclosing_axes,
    in_ball,
    knapsack,
    layer_normalised,
    rms_normalised,
    side_by_side,
    stream_itself,
    summed_axes,
)

SQUARINGS = 10  # times that a head's Gram matrix is squared, which is 1024 steps of power iteration
STEPS = 32  # steps of power iteration on the rows of a feed-forward, whose Gram matrix is not made
ROWS_AT_A_TIME = 1 << 14  # rows of a head that are measured at a time
SMALL = 1e-30  # least divisor


@dataclass(frozen=True)
class _Rows:
    """The rows of a linear on a norm's output. ``matrix``: weight times gain, [m, d]. Of each row, [m]: ``norms`` is
    radius·‖row‖, ``centre`` the part that does not depend on the input, ``partial`` the bound of the result and its
    partial sums."""

    matrix: Tensor
    radius: float | Tensor
    norms: Tensor
    centre: Tensor
    partial: Tensor

    def split(self, rows: Sequence[int]) -> list[_Rows]:
        """Return the linears of one common matrix; rows: of each."""
        parts = zip(*(x.split(rows) for x in (self.matrix, self.norms, self.centre, self.partial)), strict=True)
        return [_Rows(matrix, self.radius, *others) for matrix, *others in parts]


Owner = tuple[str, Callable[[Tensor], Tensor]]
"""A tensor on which a site's bounds depend: its name in the layout, and a view with one row for each bound."""


class DifferentiableBounds:
    """Bounds of the sites that only training can bring down, by the audit's names. weights: gives a live tensor by its
    name in the layout, as stored. stream: bound the residual stream, too."""

    def __init__(self, layout: Layout, weights: TensorReader, *, stream: bool = False) -> None:
        self.layout, self.read, self.arithmetic, self.stream = layout, weights, Arithmetic(), stream
        fixed = [signal for signal in layout.signals.values() if signal.kind is Kind.FIXED or signal.kind.has_price]
        self.fixed = {point.module for signal in fixed for point in signal.seen if point.side == "output"}
        self.means: dict[str, float] = {}

    @full_precision()
    def measure(self, *, again: bool = False) -> dict[str, Tensor]:
        """Return all bounds without a graph, fp32 by row, head or channel. again: weights have hardly changed, so means
        of LayerNorms' inputs are the last ones."""
        with torch.no_grad():
            return _Walk(self, None, again=again).run()

    def owners(self) -> dict[str, list[Owner]]:
        """Return by site the tensors that training may change to lower it; of norms' gains only the encoder's last."""
        layout, found = self.layout, dict[str, list[Owner]]()

        def linear(path: str, view: Callable[[Tensor], Tensor]) -> list[Owner]:
            return [(name, view) for name in (f"{path}.weight", f"{path}.bias") if name in layout.tensors]

        def scores(sublayer: Attention) -> list[Owner]:
            if sublayer.query_norm and not sublayer.norms_whole:
                return linear(sublayer.query_norm, all_of) + linear(sublayer.key_norm, all_of)
            queries, keys = (
                partial(by_head, heads=layout.heads(sublayer), fused=sublayer.fused, number=i) for i in (0, 1)
            )
            # Keys that several heads of queries share have no row for each of them.
            shared = layout.kv_heads(sublayer) != layout.heads(sublayer)
            query, key = sublayer.query_norm or sublayer.query, sublayer.key_norm or sublayer.key
            return linear(query, queries) + ([] if shared else linear(key, keys))

        for stack in layout.stacks():
            starts = (layout.table(stack.ends), stack.ends.positions)
            stream: list[Owner] = [(name, Tensor.t) for name in starts if name in layout.tensors]
            if stack.ends.first_norm:
                stream = linear(stack.ends.first_norm, rows)
            for sublayer in stack.sublayers:
                if isinstance(sublayer, Attention):
                    own = scores(sublayer)
                    biased = own + [(name, Tensor.t) for name in (sublayer.bias, sublayer.block_bias) if name]
                    found |= {f"{sublayer.at}:scores": own, sublayer.joining: biased, f"{sublayer.at}:masked": biased}
                found |= {path: linear(path, rows) for path in first_linears(sublayer) if path in self.fixed}
                found |= {path: linear(path, rows) for path in outputs_of(sublayer)}
                made = [owner for path in outputs_of(sublayer) for owner in found[path]]
                stream = stream + (linear(sublayer.post_norm, rows) if sublayer.post_norm else made)
                found[sublayer.add] = stream
            if stack.ends.norm in self.fixed:
                found[f"{stack.ends.norm}:{layout.family.norm_site}"] = linear(stack.ends.norm, rows)
        if layout.head is not None:
            for of in layout.head.linears:
                found[of.at] = [(name, rows) for name in (of.weight, of.bias) if name]
            if layout.stock.is_language_model and layout.family.logits_bias:
                found["model:add"] = found[layout.head.at]
        return found

    @full_precision()
    def at(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return bounds of some sites at indices, with a graph; LayerNorms' input means are the last ``measure``'s."""
        return _Walk(self, wanted).run()


class _Walk:
    """One pass over a layout. ``wanted``: indices of the bounds by site; None for all, with means of norms' inputs."""

    def __init__(
        self, whole: DifferentiableBounds, wanted: Mapping[str, Tensor] | None, *, again: bool = False
    ) -> None:
        self.layout, self.read, self.a = whole.layout, whole.read, whole.arithmetic
        self.fixed, self.means, self.wanted = whole.fixed, whole.means, wanted
        self.stream_counts = whole.stream
        self.centred = self.layout.family.centred_norm
        self.finds_means = wanted is None and not again
        self.found: dict[str, Tensor] = {}
        self.stream: Tensor | None = None
        self.axes = torch.empty(0)  # squared axes of an ellipsoid that holds the stream, as the certificate's
        self.memory: NormOutput | None = None

    def run(self) -> dict[str, Tensor]:
        for reader in walk(self.layout):
            stack, sublayer = reader.stack, reader.sublayer
            if reader.is_first:
                sums = [x for s in stack.sublayers for x in (s.add, *outputs_of(s))]
                follows = (self.stream_counts and self.wants(*sums)) or (self.centred and self.finds_means)
                follows = follows or self.layout.reads_stream_itself
                self.stream = self.embedding(stack.ends) if follows else None
                if self.layout.reads_stream_itself:
                    self.axes = self.first_axes(stack.ends)
            source = self.read_by(reader.norm)
            if isinstance(sublayer, Attention):
                self.scores(sublayer, source)
            elif sublayer is not None:
                for path in first_linears(sublayer):
                    if path in self.fixed and self.wants(path):
                        self.linear_site(path, source)
            else:
                self.end(stack, source)
            if sublayer is not None and self.stream is not None:
                self.add(sublayer, *self.outputs(sublayer, source))
        return self.found

    def end(self, stack: ResolvedStack, source: NormOutput) -> None:
        """Note a final norm's output where no exponent may move it, and the head's."""
        norm = stack.ends.norm
        if stack.is_encoder:
            self.memory = source
        if norm in self.fixed:
            self.note(f"{norm}:{self.layout.family.norm_site}", source.bound)
        if stack.is_last and self.layout.head is not None:
            self.head(self.layout.head, source)

    def wants(self, *sites: str) -> bool:
        return self.wanted is None or any(site in self.wanted for site in sites)

    def note(self, site: str, bounds: Tensor) -> None:
        if self.wanted is None:
            self.found[site] = bounds
        elif site in self.wanted:
            self.found[site] = bounds[self.wanted[site]]

    def weight(self, name: str) -> Tensor | None:
        return effective(self.layout.tensors[name], wide(self.read(name))) if name in self.layout.tensors else None

    def pair(self, path: str) -> tuple[Tensor, Tensor | None]:
        weight = self.weight(f"{path}.weight")
        assert weight is not None
        return weight, self.weight(f"{path}.bias")

    def linear_error(self, width: int) -> float:
        """Relative error of a linear on a norm's output, with the rounding of both."""
        return 4 * self.a.unit + self.a.gamma(width)

    # -- the stream ---------------------------------------------------------------------------------------------------

    def embedding(self, ends: StackEnds) -> Tensor:
        table = self.weight(self.layout.table(ends))
        assert table is not None
        amax = table.abs().amax(0) * self.layout.embedding_scale(ends)
        positions = self.weight(ends.positions) if ends.positions else None
        amax = amax if positions is None else amax + positions.abs().amax(0)
        for w in (w for w in self.layout.projectors if not w.behind):
            amax = torch.maximum(amax, self.projected(w))
        return self.normalised(ends.first_norm, amax).exact if ends.first_norm else amax

    def projected(self, w: Projector) -> Tensor:
        """Bounds by channel of a projector's output, as ``certificate`` has them."""
        gain, shift = self.pair(w.norm)
        if w.layer_norm_eps is None:
            source = rms_normalised(gain, self.a, once=self.layout.family.norm_rounds_once)
        else:
            source = layer_normalised(gain, shift, MOST_MEAN, w.layer_norm_eps, self.a)
        source = side_by_side(source, w.joined, by_channel=w.by_channel)
        if w.merging:
            merged = self.linear(w.merging, source).partial
            source = stream_itself(enclosing_axes(merged, merged.norm()), merged)
        if w.feed_forward is not None:
            return self.feed_forward_output(w.feed_forward, source)
        weight = self.weight(w.weight)
        assert weight is not None
        return rows_of(weight.mT, None, source).partial

    def first_axes(self, ends: StackEnds) -> Tensor:
        """Squared axes of an ellipsoid that holds the stream's start."""
        table = self.weight(self.layout.table(ends))
        assert table is not None and self.stream is not None
        return enclosing_axes(self.stream, lengths(table).amax() * self.layout.embedding_scale(ends))

    def outputs(self, sublayer: Sublayer, source: NormOutput) -> tuple[Mapping[str, Tensor], Tensor]:
        """Bounds of output projections by path, and of their joint output; zeros where a norm behind hides them."""
        if sublayer.post_norm and not self.stream_counts and not self.centred:
            return {}, torch.zeros(())
        if isinstance(sublayer, Attention):
            made, partial_sums = self.attention_output(sublayer, source)
            return {sublayer.output: torch.maximum(made, partial_sums)}, made
        found = {each.output: self.feed_forward_output(each, source) for each in feed_forwards_of(sublayer)}
        if not isinstance(sublayer, Experts):
            return found, found[sublayer.output]
        # A token's experts have weights whose sum is bounded; each product and sum is rounded.
        number, _, together = self.layout.experts_together(sublayer)
        made = torch.stack([found[each.output] for each in sublayer.experts]).amax(0) * together
        made = made * (1 + self.a.unit) ** (number + 2) if sublayer.chosen else made
        return found, made if sublayer.shared is None else (made + found[sublayer.shared.output]) * (1 + self.a.unit)

    def add(self, sublayer: Sublayer, outputs: Mapping[str, Tensor], made: Tensor) -> None:
        assert self.stream is not None
        for path, bounds in outputs.items() if self.stream_counts else ():
            self.note(path, bounds)
        source = self.norm(sublayer.post_norm) if sublayer.post_norm else None
        made = made if source is None else source.bound
        if self.layout.reads_stream_itself:
            own = enclosing_axes(made, made.norm()) if source is None else source.axes
            self.axes = summed_axes(self.axes, own) * (1 + self.a.unit) ** 2
        self.stream = (self.stream + made) * (1 + self.a.unit)
        for w in (w for w in self.layout.projectors if w.behind == sublayer.add):
            self.stream = (self.stream + self.projected(w)) * (1 + self.a.unit)
        if self.stream_counts:
            self.note(sublayer.add, self.stream)

    def read_by(self, norm: str) -> NormOutput:
        if norm:
            return self.norm(norm)
        assert self.stream is not None
        return stream_itself(self.axes, self.stream)

    def norm(self, path: str) -> NormOutput:
        return self.normalised(path, self.stream)

    def normalised(self, path: str, amax: Tensor | None) -> NormOutput:
        """Return a norm's output. amax: of its input's components, needed for the means of LayerNorms' inputs."""
        gain, shift = self.pair(path)
        if not self.centred:
            return rms_normalised(gain, self.a, once=self.layout.family.norm_rounds_once)
        if self.finds_means:
            assert amax is not None
            self.means[path] = min(float(amax.mean()), FP16_MAX)
        return layer_normalised(gain, shift, self.means[path], self.layout.eps_of(path), self.a)

    # -- linears, scores, logits --------------------------------------------------------------------------------------

    def linear(self, path: str, source: NormOutput, at: Tensor | None = None) -> _Rows:
        """Return the rows of a linear on a norm's output, all or those at the indices ``at``."""
        weight, bias = self.pair(path)
        if at is not None:
            weight, bias = weight[at], None if bias is None else bias[at]
        return rows_of(weight, bias, source)

    def linears(self, fused: Sequence[int], *reads: tuple[str, NormOutput]) -> list[_Rows]:
        """Return the rows of each linear on its source. fused: the rows of each in one common matrix."""
        if fused:
            return self.linear(*reads[0]).split(fused)
        return [self.linear(path, source) for path, source in reads]

    def linear_site(self, path: str, source: NormOutput) -> None:
        """Note a linear whose output no exponent moves, with all rows of a matrix that gate and neurons share."""
        at = None if self.wanted is None else self.wanted[path]
        self.found[path] = self.linear(path, source, at).partial * (1 + self.linear_error(source.gain.numel()))

    def head(self, head: Head, final: NormOutput) -> None:
        """Note the bounds of a head's linears, a language model's with and without its bias."""
        layout, (first, *others) = self.layout, head.linears
        offset = None
        if layout.stock.is_language_model and layout.family.logits_bias:
            offset = self.weight(layout.family.logits_bias)
        added = None if offset is None else offset.abs().view(-1)
        error = 1 + self.linear_error(final.gain.numel()) + (self.a.unit if layout.head_scale != 1.0 else 0.0)
        final = final.scaled(layout.head_scale, self.a)
        self.head_rows(first, first.at, final, error, None)
        if added is not None:
            self.head_rows(first, "model:add", final, error, added)
        for linear in others:
            # A tanh is at most 1.
            if not self.wants(linear.at):
                continue
            weight, bias = self.weight(linear.weight), self.weight(linear.bias)
            assert weight is not None
            total = weight.abs().sum(1) if bias is None else weight.abs().sum(1) + bias.abs()
            self.note(linear.at, total * (1 + self.linear_error(weight.shape[1])))

    def head_rows(self, linear: HeadLinear, site: str, final: NormOutput, error: float, added: Tensor | None) -> None:
        """Note a head's linear, some thousand rows at a time where all are wanted. added: is added to its outputs."""
        if not self.wants(site):
            return
        weight, bias = self.read(linear.weight), self.weight(linear.bias)

        def bounds(at: Any) -> Tensor:
            made = rows_of(wide(weight[at]), None if bias is None else bias[at], final).partial * error
            return made if added is None else made + added[at]

        if self.wanted is not None:
            self.found[site] = bounds(self.wanted[site])
            return
        starts = range(0, len(weight), ROWS_AT_A_TIME)
        self.found[site] = torch.cat([bounds(slice(start, start + ROWS_AT_A_TIME)) for start in starts])

    def with_sums(self, sublayer: Attention, source: NormOutput) -> NormOutput:
        """Return the input of keys and values: a norm's output and, where block sums are read too, their own norm's."""
        return either(source, self.norm(sublayer.block_norm)) if sublayer.block else source

    def scores(self, sublayer: Attention, source: NormOutput) -> None:
        """Note every head's products, its scores with position bias, and the least that a mask must add."""
        a, heads, other = (
            self.a,
            self.layout.heads(sublayer),
            self.memory if sublayer.memory else self.with_sums(sublayer, source),
        )
        sites = [f"{sublayer.at}:scores", sublayer.joining, *(() if sublayer.radius else (f"{sublayer.at}:masked",))]
        if not self.wants(*sites):
            return
        assert other is not None
        if sublayer.rotary is not None:
            product, scaled, span = (
                self.turned_scores(sublayer, sublayer.rotary)
                if sublayer.query_norm
                else self.rotated_scores(sublayer, sublayer.rotary, source)
            )
            for site, bound in zip(sites, (product, *self.masked(sublayer, scaled, span)), strict=True):
                self.note(site, bound)
            return
        query, key, *_ = self.linears(sublayer.fused, (sublayer.query, source), (sublayer.key, other))
        size = len(query.norms) // heads
        group = len(query.norms) // len(key.norms)
        q, k = query.matrix.view(heads, size, -1), key.matrix.view(-1, size, key.matrix.shape[1])
        cq, ck = (x.centre.view(-1, size) for x in (query, key))
        most_q, most_k = (x.partial.view(-1, size) for x in (query, key))
        k, ck, most_k = (x.repeat_interleave(group, 0) for x in (k, ck, most_k))
        with torch.no_grad():
            gram_k = k @ k.mT
            right = top_vectors((q @ q.mT) @ gram_k)
            x, z = unit(transposed(k, right)), unit(transposed(q, (gram_k @ right[..., None])[..., 0]))
        crossed = query.radius * key.radius * (applied(q, z) * applied(k, x)).sum(1).abs()
        exact = crossed
        if source.shift is not None:
            crossed = crossed + key.radius * lengths(transposed(k, cq))
            exact = crossed + query.radius * lengths(transposed(q, ck)) + (cq * ck).sum(1).abs()
        # As in the certificate: ‖D·q‖·‖D⁻¹·k‖ bounds partial sums too.
        balance = balanced(most_k, most_q)
        long_q = query.radius * spectral_norms(q * balance[..., None]) + lengths(cq * balance)
        long_k = key.radius * spectral_norms(k / balance[..., None]) + lengths(ck / balance)
        sums = torch.minimum(long_q * long_k, (most_q * most_k).sum(1))
        off = (2 * self.linear_error(q.shape[2]) + a.gamma(size) + 2 * a.unit) * sums
        scale = self.layout.score_scale(sublayer)
        span = (2 * crossed + (5 if sublayer.scaled else 2) * off) * scale
        scaled = torch.minimum(exact, sums) * scale + off * scale
        # Where the mask is −inf there is no third site.
        for site, bound in zip(sites, (sums + off, *self.masked(sublayer, scaled, span)), strict=False):
            self.note(site, bound)

    def turned_scores(self, sublayer: Attention, rotary: Rotary) -> tuple[Tensor, ...]:
        """Bounds of normalised, rotated products with their partial sums, of these scaled, and of one query's span."""
        scale = self.layout.score_scale(sublayer)
        heads, kv_heads = self.layout.heads(sublayer), self.layout.kv_heads(sublayer)
        if not sublayer.norms_whole:
            heads = kv_heads = 1
        norms = zip((sublayer.query_norm, sublayer.key_norm), (heads, kv_heads), strict=True)
        query, key = (turned(self.norm(path), self.a, of, rotary) for path, of in norms)
        made = turned_score_bounds(query, key, heads, self.a, scale)
        return torch.maximum(made.product, made.partial), made.product * scale, made.span

    def masked(self, sublayer: Attention, scores: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of capped scores with bias, and of the least that a mask must add. scores, span: before the cap."""
        cap = self.layout.cap(sublayer)
        if cap is not None:
            capped = soft_capped(scores, cap, self.a)
            scores, span = capped.result, capped_span(span, capped)
        biases = [
            bias for name in (sublayer.bias, sublayer.block_bias) if name and (bias := self.weight(name)) is not None
        ]
        span = masked_span(span, scores, biases[0] if biases else None, self.a)
        return scores + torch.stack([bias.abs().amax(0) for bias in biases]).amax(0) if biases else scores, span

    def rotated_scores(self, sublayer: Attention, rotary: Rotary, source: NormOutput) -> tuple[Tensor, ...]:
        """Bounds by head of rotated products with their partial sums, of these scaled, and of one query's span."""
        a, scale = self.a, self.layout.score_scale(sublayer)
        heads, kv_heads = self.layout.heads(sublayer), self.layout.kv_heads(sublayer)
        sides = []
        query, key, *_ = self.linears(sublayer.fused, (sublayer.query, source), (sublayer.key, source))
        for made, number in ((query, heads), (key, kv_heads)):
            size = len(made.norms) // number
            order = pair_order(size, rotary).to(made.norms.device)
            matrix, centre = made.radius * made.matrix.view(number, size, -1)[:, order], made.centre.view(number, size)
            factor = rotary.factor * (query_growth(rotary, a.max_length) if made is query else 1.0)
            matrix, centre = matrix * factor, centre * factor
            group = heads // number
            sides.append((matrix.repeat_interleave(group, 0), centre[:, order].repeat_interleave(group, 0)))
        (q, cq), (k, ck) = sides
        peaks_q, peaks_k = pair_peaks(q), pair_peaks(k)
        fixed_q, fixed_k = (lengths(c.view(heads, 2, -1).mT) for c in (cq, ck))
        balance = balanced(peaks_k + fixed_k, peaks_q + fixed_q)
        wide_balance = balance.repeat(1, 2)
        map_q, long_q = longest_of(q * wide_balance[..., None], cq * wide_balance)
        map_k, long_k = longest_of(k / wide_balance[..., None], ck / wide_balance)
        apart = torch.minimum(map_q * map_k, (peaks_q * peaks_k).sum(1)) + (fixed_q * fixed_k).sum(1)
        apart = apart + torch.minimum((peaks_q * fixed_k).sum(1), map_q * lengths(fixed_k / balance))
        apart = apart + torch.minimum((peaks_k * fixed_q).sum(1), map_k * lengths(fixed_q * balance))
        exact = torch.minimum(apart, long_q * long_k)
        # A rotation's three roundings on either side.
        share = 2 * self.linear_error(source.gain.numel()) + 6 * math.sqrt(2) * a.unit
        off = (share + a.gamma(q.shape[1]) + 2 * a.unit) * exact
        return exact + off, (exact + off) * scale, (2 * exact + 5 * off) * scale

    # -- what joins the stream ----------------------------------------------------------------------------------------

    def attention_output(self, sublayer: Attention, source: NormOutput) -> tuple[Tensor, Tensor]:
        """Bounds of an attention's output and of its partial sums, by channel."""
        heads, other = self.layout.heads(sublayer), self.memory if sublayer.memory else self.with_sums(sublayer, source)
        a = replace(self.a, max_length=self.layout.sees(sublayer, self.a.max_length))
        assert other is not None
        values = self.linears(sublayer.fused, (sublayer.value, other))[-1]
        weight, bias = self.pair(sublayer.output)
        group = weight.shape[1] // len(values.norms)
        o = weight.view(len(weight), heads, -1).transpose(0, 1)
        # Several heads may read the same values.
        v, most, centre = (
            x.unflatten(0, (heads // group, -1)).repeat_interleave(group, 0)
            for x in (values.matrix, values.partial, values.centre)
        )
        squares = ((o @ (v @ v.mT)) * o).sum(2)
        made = (values.radius * squares.clamp(min=SMALL).sqrt() + (o @ centre[..., None])[..., 0].abs()).sum(0)
        balance = balanced(lengths(o.mT), most)
        longest = values.radius * spectral_norms(v * balance[..., None]) + lengths(centre * balance)
        sums = torch.minimum(weight.abs() @ most.flatten(), (lengths(o / balance[:, None]) * longest[:, None]).sum(0))
        error = self.linear_error(source.gain.numel()) + a.gamma(a.max_length) + a.gamma(weight.shape[1]) + 4 * a.unit
        added = torch.zeros_like(made) if bias is None else bias.abs()
        sums = sums * a.attention_sum + added
        made = torch.minimum(made * a.attention_sum + added + error * sums, sums * (1 + error))
        return made, sums * (1 + error)

    def feed_forward_output(self, sublayer: FeedForward, source: NormOutput) -> Tensor:
        """Bound of a feed-forward's output by channel; no row has an eigenvalue of its own."""
        weight, bias = self.pair(sublayer.output)
        if sublayer.gate:
            gate, linear = self.linears(sublayer.fused, (sublayer.gate, source), (sublayer.linear, source))
            if bool(gate.centre.any()) or bool(linear.centre.any()):
                gate, linear = homogeneous(gate, linear)
            size = gate.norms * linear.norms
            cosine = (gate.matrix * linear.matrix).sum(1) * gate.radius**2 / size.clamp(min=SMALL)
            caps = ((1 + cosine.abs()) / 2).clamp(max=1)
            budget = largest_eigenvalue(directions(gate), directions(linear)) / 2
            made = knapsack(weight.abs() * size, caps, budget)
        else:
            linear = self.linear(sublayer.linear, source)
            ones = torch.ones_like(linear.norms)
            budget = largest_eigenvalue(directions(linear))
            offset = linear.centre.clamp(min=0)
            sides = []
            for side in (weight, -weight):
                positive = side.clamp(min=0)
                ball = in_ball(positive * linear.norms, ones, budget, ones.dtype)
                straight = lengths(positive @ linear.matrix) * linear.radius
                below = (positive - side).sum(1) * LOWEST[sublayer.activation]
                sides.append(torch.minimum((straight + ball) / 2, ball) + positive @ offset + below)
            made = torch.maximum(*sides)
        error = 2 * self.linear_error(source.gain.numel()) + self.a.gamma(weight.shape[1]) + 5 * self.a.unit
        return (made + (0 if bias is None else bias.abs())) * (1 + error)


def first_linears(sublayer: Sublayer) -> list[str]:
    # A gate and neurons in one matrix are one linear.
    found = list(
        dict.fromkeys(path for each in feed_forwards_of(sublayer) for path in (each.gate, each.linear) if path)
    )
    return [*found, sublayer.classifier] if isinstance(sublayer, Experts) else found


def rows(x: Tensor) -> Tensor:
    return x.view(len(x), -1)


def all_of(x: Tensor) -> Tensor:
    return x.view(1, -1)


def by_head(x: Tensor, heads: int, fused: Sequence[int], number: int) -> Tensor:
    """Return each head's part of a weight or bias: [heads, …]. fused, number: rows in one matrix, and which it is."""
    return (x.split(fused)[number] if fused else x).view(heads, -1)


def rows_of(weight: Tensor, bias: Tensor | None, source: NormOutput) -> _Rows:
    matrix = weight * source.gain
    norms = source.radius * lengths(matrix)
    centre, partial = torch.zeros_like(norms), norms
    if source.shift is not None:
        centre, partial = weight @ source.shift, partial + weight.abs() @ source.shift.abs()
    if bias is not None:
        centre, partial = centre + bias, partial + bias.abs()
    return _Rows(matrix, source.radius, norms, centre, partial)


def homogeneous(one: _Rows, other: _Rows) -> tuple[_Rows, _Rows]:
    """Return two linears as maps alone: shift and bias become one more column, as in the certificate."""
    centres, norms = (torch.cat(both).abs().sum() for both in ((one.centre, other.centre), (one.norms, other.norms)))
    share = (centres / norms.clamp(min=SMALL)).clamp(2.0**-20, 2.0**20)
    length, radius = one.radius * share.sqrt(), one.radius * (1 + share).sqrt()

    def joined(made: _Rows) -> _Rows:
        matrix = torch.cat([made.matrix, made.centre[:, None] / length], 1)
        return replace(made, matrix=matrix, radius=radius, norms=radius * lengths(matrix))

    return joined(one), joined(other)


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def directions(rows: _Rows) -> Tensor:
    """Return the rows at unit length; zero rows stay as they are."""
    return rows.matrix / (rows.norms / rows.radius).clamp(min=SMALL)[:, None]


def balanced(one: Tensor, other: Tensor) -> Tensor:
    """Return √(one/other), which balances two sides of a product channel by channel."""
    return ((one + SMALL) / (other + SMALL)).sqrt().clamp(1e-6, 1e6)


def lengths(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def unit(x: Tensor) -> Tensor:
    """Return the vectors at unit length; zero vectors stay as they are."""
    return torch.nn.functional.normalize(x, dim=-1, eps=SMALL)


def applied(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return M·x: [h, s] from [h, s, d] and [h, d]."""
    return (matrices @ vectors[..., None])[..., 0]


def transposed(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return Mᵀ·x: [h, d] from [h, s, d] and [h, s]."""
    return (vectors[:, None] @ matrices)[:, 0]


def random_vector(like: Tensor) -> Tensor:
    """Return the start vector of every power iteration, as long as the last axis."""
    drawn = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return drawn.to(like.device, like.dtype)


def top_vectors(matrices: Tensor) -> Tensor:
    """Return eigenvectors of the largest eigenvalues, which are real and not negative: [h, s] from [h, s, s]."""
    for _ in range(SQUARINGS):
        matrices = matrices / matrices.abs().amax((1, 2), keepdim=True).clamp(min=SMALL)
        matrices = matrices @ matrices
    return unit(matrices @ random_vector(matrices))


def spectral_norms(matrices: Tensor) -> Tensor:
    """Return the largest singular values: [h] from [h, s, d]."""
    with torch.no_grad():
        right = unit(transposed(matrices, top_vectors(matrices @ matrices.mT)))
    return lengths(applied(matrices, right))


def pair_peaks(matrices: Tensor) -> Tensor:
    """Return the largest singular value of each pair of rows i and i + s/2: [h, s/2] from [h, s, d]."""
    one, other = matrices.unflatten(1, (2, -1)).unbind(1)
    half = (one.square() - other.square()).sum(2) / 2
    squares = (one.square() + other.square()).sum(2) / 2 + torch.hypot(half + SMALL, (one * other).sum(2))
    return squares.clamp(min=SMALL).sqrt()


def longest_of(matrices: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest ‖M·n‖ and ‖M·n + c‖ over ‖n‖ ≤ 1, [h] each, from [h, s, d] and [h, s], as the certificate
    does."""
    long, added = spectral_norms(matrices), lengths(fixed)
    if not bool(fixed.any()):
        return long, long
    square = (added / long.clamp(min=SMALL)).clamp(SMALL, 1 / SMALL)
    joined = spectral_norms(torch.cat([matrices, (fixed / square.sqrt()[:, None])[..., None]], 2))
    return long, (1 + square).sqrt() * joined


def largest_eigenvalue(*rows: Tensor) -> Tensor:
    """Return the largest eigenvalue of Σ RᵀR over matrices of one width."""
    with torch.no_grad():
        vector = unit(random_vector(rows[0]))
        for _ in range(STEPS):
            vector = unit(sum(((r @ vector) @ r for r in rows), torch.zeros_like(vector)))
    return sum(((r @ vector).square().sum() for r in rows), torch.zeros((), device=vector.device))
