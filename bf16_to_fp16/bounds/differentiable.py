"""The bounds of what no rescaling moves, as functions of live weights that have a gradient.

Scores, what enters a gate, logits, the encoder's output and, where it cannot be scaled, the residual stream: the
formulas are the certificate's (``linear``, ``attention``, ``feed_forward``), in fp32 on the weights' own device. Two
things differ. A spectral norm is that of a power iteration, zᵀ·M·x with the vectors that it found held fixed, which at
convergence has the norm's value and gradient; being a lower bound it proves nothing, and the verdict stays the
certificate's. And what fp16 rounds is one factor for each kind of site instead of a sum of errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..families.layout import Layout, ResolvedStack, TensorReader
from ..families.resolve import effective
from ..families.types import (
    Attention,
    Experts,
    FeedForward,
    Head,
    HeadLinear,
    Kind,
    StackEnds,
    Sublayer,
    feed_forwards_of,
    outputs_of,
)
from ..families.walk import walk
from ..numerics import FP16_MAX
from .arithmetic import Arithmetic, full_precision
from .attention import MASK_ROUNDING, pair_order
from .feed_forward import LOWEST
from .linear import NORM_ERROR, lengthened

SQUARINGS = 10
"""Times that a Gram matrix of a head is squared: as 1024 steps of power iteration."""


STEPS = 32
"""Steps of power iteration on the rows of a feed-forward, whose Gram matrix is not made."""


ROWS_AT_A_TIME = 1 << 14
"""Rows of a head that are measured at a time."""


SMALL = 1e-30
"""What lengths are kept from being divided by."""


@dataclass(frozen=True)
class _Normalised:
    """What a norm gives: gain∘n + shift, ‖n‖₂ ≤ ``radius``."""

    gain: Tensor
    shift: Tensor | None
    radius: float

    @property
    def largest(self) -> Tensor:
        """Bound of each component."""
        most = self.gain.abs() * self.radius
        return most if self.shift is None else most + self.shift.abs()


@dataclass(frozen=True)
class _Rows:
    """What a linear makes of it. ``matrix``: weight times gain, [m, d]; [m]: ``norms`` radius·‖row‖, ``centre`` what
    does not depend on the input, ``partial`` the bound of the result and of its partial sums."""

    matrix: Tensor
    radius: float | Tensor
    norms: Tensor
    centre: Tensor
    partial: Tensor

    def halves(self) -> tuple[_Rows, _Rows]:
        """Return the first half of the rows, and the second."""
        parts = zip(*(x.chunk(2) for x in (self.matrix, self.norms, self.centre, self.partial)), strict=True)
        first, second = (_Rows(matrix, self.radius, *others) for matrix, *others in parts)
        return first, second


Owner = tuple[str, Callable[[Tensor], Tensor]]
"""A tensor that a site's bounds depend on, by its name in the layout, and its view with a row for each of them."""


class DifferentiableBounds:
    """Bounds of the sites that only training can bring down, by the audit's names.

    layout: of the model. weights: gives a live tensor by its name in the layout, as it is stored. arithmetic: what the
    certificate is to hold for. stream: bound the residual stream as well, which matters where no exponent brings it
    down.
    """

    def __init__(
        self, layout: Layout, weights: TensorReader, arithmetic: Arithmetic | None = None, *, stream: bool = False
    ) -> None:
        self.layout, self.read, self.arithmetic, self.stream = layout, weights, arithmetic or Arithmetic(), stream
        fixed = [signal for signal in layout.signals.values() if signal.kind is Kind.FIXED]
        self.fixed = {point.module for signal in fixed for point in signal.seen if point.side == "output"}
        self.radii: dict[str, float] = {}

    @full_precision()
    def measure(self, *, again: bool = False) -> dict[str, Tensor]:
        """Return the bounds of all sites without a graph: fp32, one each for the rows, heads or channels of a site.

        again: the weights have hardly changed since the last time, from which lengths of LayerNorms' outputs are taken.
        """
        with torch.no_grad():
            return _Walk(self, None, again=again).run()

    def owners(self) -> dict[str, list[Owner]]:
        """Return by site the tensors that are its own to bring down; norms' gains, which others share, are nobody's
        but the encoder's last."""
        layout, found = self.layout, dict[str, list[Owner]]()

        def linear(path: str, view: Callable[[Tensor], Tensor]) -> list[Owner]:
            return [(name, view) for name in (f"{path}.weight", f"{path}.bias") if name in layout.tensors]

        def scores(w: Attention) -> list[Owner]:
            if w.query_norm:
                return linear(w.query_norm, all_of) + linear(w.key_norm, all_of)
            heads = partial(by_head, heads=layout.heads(w))
            # Keys that several heads of queries share have no row for each of them.
            shared = layout.kv_heads(w) != layout.heads(w)
            return linear(w.query, heads) + ([] if shared else linear(w.key, heads))

        for stack in layout.stacks():
            starts = (layout.table(stack.ends), stack.ends.positions)
            stream: list[Owner] = [(name, columns) for name in starts if name in layout.tensors]
            if stack.ends.first_norm:
                stream = linear(stack.ends.first_norm, rows)
            for w in stack.sublayers:
                if isinstance(w, Attention):
                    own = scores(w)
                    biased = own + [(name, columns) for name in (w.bias, w.block_bias) if name]
                    found |= {f"{w.at}:scores": own, w.joining: biased, f"{w.at}:masked": biased}
                found |= {path: linear(path, rows) for path in first_linears(w) if path in self.fixed}
                found |= {path: linear(path, rows) for path in outputs_of(w)}
                made = [owner for path in outputs_of(w) for owner in found[path]]
                stream = stream + (linear(w.post_norm, rows) if w.post_norm else made)
                found[w.add] = stream
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
        """Return the bounds of some sites at the indices given, with a graph; how much longer than √d a LayerNorm's
        output may be is taken from the last ``measure``."""
        return _Walk(self, wanted).run()


class _Walk:
    """One pass over a layout; ``wanted``: indices of what to bound by site, None for all, which also finds radii."""

    def __init__(
        self, whole: DifferentiableBounds, wanted: Mapping[str, Tensor] | None, *, again: bool = False
    ) -> None:
        self.layout, self.read, self.a = whole.layout, whole.read, whole.arithmetic
        self.fixed, self.radii, self.wanted = whole.fixed, whole.radii, wanted
        self.stream_counts = whole.stream
        self.centred = self.layout.family.centred_norm
        self.finds_radii = wanted is None and not again
        self.found: dict[str, Tensor] = {}
        self.stream: Tensor | None = None
        self.memory: _Normalised | None = None

    def run(self) -> dict[str, Tensor]:
        for reader in walk(self.layout):
            stack, w = reader.stack, reader.sublayer
            if reader.is_first:
                sums = [x for s in stack.sublayers for x in (s.add, *outputs_of(s))]
                follows = (self.stream_counts and self.wants(*sums)) or (self.centred and self.finds_radii)
                self.stream = self.embedding(stack.ends) if follows else None
            source = self.norm(reader.norm)
            if isinstance(w, Attention):
                self.scores(w, source)
                if self.stream is not None:
                    made, partial_sums = self.attention_output(w, source)
                    self.add(w, {w.output: torch.maximum(made, partial_sums)}, made)
            elif w is not None:
                for path in first_linears(w):
                    if path in self.fixed and self.wants(path):
                        self.linear_site(path, source)
                if self.stream is not None:
                    outputs = {each.output: self.feed_forward_output(each, source) for each in feed_forwards_of(w)}
                    # A token has the output of one expert at most, times a probability.
                    self.add(w, outputs, torch.stack(list(outputs.values())).amax(0))
            else:
                self.end(stack, source)
        return self.found

    def end(self, stack: ResolvedStack, source: _Normalised) -> None:
        """Note what a stack's final norm gives where nothing may move it, and what the head makes of the last one's."""
        norm = stack.ends.norm
        if stack.is_encoder:
            self.memory = source
        if norm in self.fixed:
            self.note(f"{norm}:{self.layout.family.norm_site}", source.largest * (1 + 4 * self.a.unit))
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

    def linear_error(self, width: int) -> float:
        """Relative error of a linear of a norm's output, both of which are rounded."""
        return 4 * self.a.unit + self.a.gamma(width)

    # -- the stream ---------------------------------------------------------------------------------------------------

    def embedding(self, ends: StackEnds) -> Tensor:
        """What the stream begins with, by channel."""
        table = self.weight(self.layout.table(ends))
        assert table is not None
        amax = table.abs().amax(0) * self.layout.embedding_scale(ends)
        positions = self.weight(ends.positions) if ends.positions else None
        amax = amax if positions is None else amax + positions.abs().amax(0)
        if (w := self.layout.family.projector) is not None:
            brought, weight = self.norm(w.norm), self.weight(w.weight)
            assert weight is not None
            amax = torch.maximum(amax, rows_of(weight.mT, None, brought).partial)
        return self.normalised(ends.first_norm, amax).largest if ends.first_norm else amax

    def add(self, w: Sublayer, outputs: Mapping[str, Tensor], made: Tensor) -> None:
        assert self.stream is not None
        for path, bounds in outputs.items() if self.stream_counts else ():
            self.note(path, bounds)
        if w.post_norm:
            out = self.norm(w.post_norm)
            made = out.gain.abs() * out.radius * (1 + self.a.unit)
        self.stream = (self.stream + made) * (1 + self.a.unit)
        if self.stream_counts:
            self.note(w.add, self.stream)

    def norm(self, path: str) -> _Normalised:
        """What a norm gives, of the stream where it is a LayerNorm."""
        return self.normalised(path, self.stream)

    def normalised(self, path: str, amax: Tensor | None) -> _Normalised:
        """What a norm gives; amax: of the components that it reads, needed where radii are found of LayerNorms."""
        gain, shift = self.weight(f"{path}.weight"), self.weight(f"{path}.bias")
        assert gain is not None
        if self.finds_radii:
            self.radii[path] = math.sqrt(gain.numel())
            if self.centred:
                assert amax is not None
                longer = lengthened(min(float(amax.mean()), FP16_MAX), self.layout.eps_of(path), gain.numel())
                self.radii[path] *= longer * (1 + NORM_ERROR)
        return _Normalised(gain, shift, self.radii[path])

    # -- linears, scores, logits --------------------------------------------------------------------------------------

    def linear(self, path: str, source: _Normalised, at: Tensor | None = None) -> _Rows:
        """What a linear makes of a norm's output, of some rows only where indices are given."""
        weight, bias = self.weight(f"{path}.weight"), self.weight(f"{path}.bias")
        assert weight is not None
        if at is not None:
            weight, bias = weight[at], None if bias is None else bias[at]
        return rows_of(weight, bias, source)

    def linear_site(self, path: str, source: _Normalised) -> None:
        """Note a linear whose output no exponent moves, with the neurons that stand in one matrix with their gates."""
        at = None if self.wanted is None else self.wanted[path]
        self.found[path] = self.linear(path, source, at).partial * (1 + self.linear_error(source.gain.numel()))

    def head(self, head: Head, final: _Normalised) -> None:
        """Note what a head's linears make of the last norm's output, a language model's with and without its bias."""
        layout, (first, *others) = self.layout, head.linears
        offset = None
        if layout.stock.is_language_model and layout.family.logits_bias:
            offset = self.weight(layout.family.logits_bias)
        added = None if offset is None else offset.abs().view(-1)
        scale = layout.head_scale
        final = _Normalised(final.gain * scale, None if final.shift is None else final.shift * scale, final.radius)
        error = 1 + self.linear_error(final.gain.numel()) + (self.a.unit if scale != 1.0 else 0.0)
        self.head_rows(first, first.at, final, error, None)
        if added is not None:
            self.head_rows(first, "model:add", final, error, added)
        for linear in others:
            # What a tanh gives is at most 1.
            if not self.wants(linear.at):
                continue
            weight, bias = self.weight(linear.weight), self.weight(linear.bias)
            assert weight is not None
            total = weight.abs().sum(1) if bias is None else weight.abs().sum(1) + bias.abs()
            self.note(linear.at, total * (1 + self.linear_error(weight.shape[1])))

    def head_rows(self, linear: HeadLinear, site: str, final: _Normalised, error: float, added: Tensor | None) -> None:
        """Note a head's linear on a norm's output, a few thousand rows at a time where all are wanted.

        added: magnitudes that join its outputs.
        """
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

    def with_sums(self, w: Attention, source: _Normalised) -> _Normalised:
        """What keys and values read: a norm's output and, where there are sums of it, what their own norm gives."""
        if not w.block:
            return source
        gain = self.weight(f"{w.block_norm}.weight")
        assert gain is not None
        return _Normalised(torch.maximum(source.gain.abs(), gain.abs()), None, source.radius)

    def scores(self, w: Attention, source: _Normalised) -> None:
        """Note every head's products with their partial sums, the scores with their position bias, and what a mask must
        add at least."""
        a, heads, other = self.a, self.layout.heads(w), self.memory if w.memory else self.with_sums(w, source)
        sites = [f"{w.at}:scores", w.joining, *(() if w.radius else (f"{w.at}:masked",))]
        if not self.wants(*sites):
            return
        assert other is not None
        if w.rotary:
            product, biased, span = self.turned_scores(w) if w.query_norm else self.rotated_scores(w, source)
            for site, bound in zip(sites, (product, *self.capped(w, biased, span)), strict=True):
                self.note(site, bound)
            return
        query, key = self.linear(w.query, source), self.linear(w.key, other)
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
        scale = self.layout.score_scale(w)
        span = (2 * crossed + (5 if w.scaled else 2) * off) * scale
        biased = torch.minimum(exact, sums) * scale + off * scale
        bias = self.weight(w.bias) if w.bias else None
        if bias is not None:
            high, low = bias.amax(0).clamp(min=0), bias.amin(0)
            span = span + (high - low) + 2 * a.unit * (biased + torch.maximum(high, -low))
            further = self.weight(w.block_bias) if w.block_bias else None
            offset = bias.abs().amax(0)
            biased = biased + (offset if further is None else torch.maximum(offset, further.abs().amax(0)))
        # Where the mask is −inf there is no third site.
        for site, bound in zip(sites, (sums + off, *self.capped(w, biased, span)), strict=False):
            self.note(site, bound)

    def turned_scores(self, w: Attention) -> tuple[Tensor, ...]:
        """Bounds of the scores of normalised and turned queries and keys, which all heads have in common: of products
        and partial sums, scaled, and of how far those of one query lie apart."""
        a, scale = self.a, self.layout.score_scale(w)
        query, key = self.norm(w.query_norm), self.norm(w.key_norm)
        pairs = [source.gain.abs().view(2, -1).amax(0) for source in (query, key)]
        exact = query.radius * key.radius * (pairs[0] * pairs[1]).amax()[None]
        # A norm's rounding and a rotation's three, on either side.
        off = (2 * (1 + 3 * math.sqrt(2)) * a.unit + a.gamma(len(query.gain)) + 2 * a.unit) * exact
        return exact + off, (exact + off) * scale, (2 * exact + 5 * off) * scale

    def capped(self, w: Attention, scores: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of scores behind a soft cap, where there is one, and of what a mask must add to them at least.

        span: of the scores of one query before it.
        """
        cap, a = self.layout.cap(w), self.a
        if cap is not None:
            off = 2 * a.unit * scores
            scores = cap * (scores / cap).tanh()
            off = off + 4 * a.unit * scores
            scores = scores + off
            span = torch.minimum(span + off, 2 * scores)
        reach = (26 + math.log2(a.max_length)) * math.log(2)
        return scores, span + MASK_ROUNDING + reach

    def rotated_scores(self, w: Attention, source: _Normalised) -> tuple[Tensor, ...]:
        """Bounds of the scores of turned queries and keys without norms, head by head: of products and partial sums,
        scaled, and of how far those of one query lie apart."""
        a, scale = self.a, self.layout.score_scale(w)
        heads, kv_heads = self.layout.heads(w), self.layout.kv_heads(w)
        sides = []
        for path, number in ((w.query, heads), (w.key, kv_heads)):
            made = self.linear(path, source)
            size = len(made.norms) // number
            order = pair_order(size, w.interleaved).to(made.norms.device)
            matrix, centre = made.radius * made.matrix.view(number, size, -1)[:, order], made.centre.view(number, size)
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

    def attention_output(self, w: Attention, source: _Normalised) -> tuple[Tensor, Tensor]:
        """Bounds of an attention's output and of its partial sums, by channel."""
        heads, other = self.layout.heads(w), self.memory if w.memory else self.with_sums(w, source)
        a = replace(self.a, max_length=self.layout.sees(w, self.a.max_length))
        assert other is not None
        values = self.linear(w.value, other)
        weight, bias = self.weight(f"{w.output}.weight"), self.weight(f"{w.output}.bias")
        assert weight is not None
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

    def feed_forward_output(self, w: FeedForward, source: _Normalised) -> Tensor:
        """Bound of a feed-forward's output by channel; no row has an eigenvalue of its own."""
        weight, bias = self.weight(f"{w.output}.weight"), self.weight(f"{w.output}.bias")
        assert weight is not None
        linear = self.linear(w.linear, source)
        if w.gate:
            gate, linear = linear.halves() if w.fused else (self.linear(w.gate, source), linear)
            if bool(gate.centre.any()) or bool(linear.centre.any()):
                gate, linear = homogeneous(gate, linear)
            size = gate.norms * linear.norms
            cosine = (gate.matrix * linear.matrix).sum(1) * gate.radius**2 / size.clamp(min=SMALL)
            caps = ((1 + cosine.abs()) / 2).clamp(max=1)
            budget = largest_eigenvalue(directions(gate), directions(linear)) / 2
            made = knapsack(weight.abs() * size, caps, budget)
        else:
            budget = largest_eigenvalue(directions(linear))
            offset = linear.centre.clamp(min=0)
            sides = []
            for side in (weight, -weight):
                positive = side.clamp(min=0)
                ball = in_ball(positive * linear.norms, budget)
                straight = lengths(positive @ linear.matrix) * linear.radius
                below = (positive - side).sum(1) * LOWEST[w.activation]
                sides.append(torch.minimum((straight + ball) / 2, ball) + positive @ offset + below)
            made = torch.maximum(*sides)
        error = 2 * self.linear_error(source.gain.numel()) + self.a.gamma(weight.shape[1]) + 5 * self.a.unit
        return (made + (0 if bias is None else bias.abs())) * (1 + error)


def first_linears(w: Sublayer) -> list[str]:
    """Return the linears that read a norm's output in a feed-forward, or in experts and their router."""
    # Of a gate and neurons in one matrix there is one linear.
    found = list(dict.fromkeys(path for each in feed_forwards_of(w) for path in (each.gate, each.linear) if path))
    return [*found, w.classifier] if isinstance(w, Experts) else found


def rows(x: Tensor) -> Tensor:
    """Return a matrix, or a vector as one column."""
    return x.view(len(x), -1)


def columns(x: Tensor) -> Tensor:
    """Return a matrix's columns as rows."""
    return x.t()


def all_of(x: Tensor) -> Tensor:
    """Return a vector as one row."""
    return x.view(1, -1)


def by_head(x: Tensor, heads: int) -> Tensor:
    """Return what belongs to each head of a weight or a bias of all: [heads, …]."""
    return x.view(heads, -1)


def rows_of(weight: Tensor, bias: Tensor | None, source: _Normalised) -> _Rows:
    """Return what a linear makes of a norm's output, row by row."""
    matrix = weight * source.gain
    norms = source.radius * lengths(matrix)
    centre, partial = torch.zeros_like(norms), norms
    if source.shift is not None:
        centre, partial = weight @ source.shift, partial + weight.abs() @ source.shift.abs()
    if bias is not None:
        centre, partial = centre + bias, partial + bias.abs()
    return _Rows(matrix, source.radius, norms, centre, partial)


def homogeneous(one: _Rows, other: _Rows) -> tuple[_Rows, _Rows]:
    """Return two linears of one norm's output as maps alone, what shift and bias give being one more column, as the
    certificate does."""
    centres, norms = (torch.cat(both).abs().sum() for both in ((one.centre, other.centre), (one.norms, other.norms)))
    share = (centres / norms.clamp(min=SMALL)).clamp(2.0**-20, 2.0**20)
    length, radius = one.radius * share.sqrt(), one.radius * (1 + share).sqrt()

    def joined(made: _Rows) -> _Rows:
        matrix = torch.cat([made.matrix, made.centre[:, None] / length], 1)
        return replace(made, matrix=matrix, radius=radius, norms=radius * lengths(matrix))

    return joined(one), joined(other)


def wide(x: Tensor) -> Tensor:
    """Return a tensor in fp32, one in fp64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def directions(rows: _Rows) -> Tensor:
    """Return the rows at length 1, zero ones as they are."""
    return rows.matrix / (rows.norms / rows.radius).clamp(min=SMALL)[:, None]


def balanced(one: Tensor, other: Tensor) -> Tensor:
    """Return √(one/other), which balances two sides of a product channel by channel."""
    return ((one + SMALL) / (other + SMALL)).sqrt().clamp(1e-6, 1e6)


def lengths(x: Tensor) -> Tensor:
    """Return ‖·‖₂ over the last axis."""
    return torch.linalg.vector_norm(x, dim=-1)


def unit(x: Tensor) -> Tensor:
    """Return vectors along the last axis at length 1, zero ones as they are."""
    return x / lengths(x)[..., None].clamp(min=SMALL)


def applied(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return M·x: [h, s] of [h, s, d] and [h, d]."""
    return (matrices @ vectors[..., None])[..., 0]


def transposed(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return Mᵀ·x: [h, d] of [h, s, d] and [h, s]."""
    return (vectors[:, None] @ matrices)[:, 0]


def random_vector(like: Tensor) -> Tensor:
    """Return the vector from which every power iteration begins, as long as the last axis: always the same."""
    drawn = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return drawn.to(like.device, like.dtype)


def top_vectors(matrices: Tensor) -> Tensor:
    """Return eigenvectors of the largest eigenvalues, which are real and not negative: [h, s] of [h, s, s]."""
    for _ in range(SQUARINGS):
        matrices = matrices / matrices.abs().amax((1, 2), keepdim=True).clamp(min=SMALL)
        matrices = matrices @ matrices
    return unit(matrices @ random_vector(matrices))


def spectral_norms(matrices: Tensor) -> Tensor:
    """Return the largest singular values: [h] of [h, s, d]."""
    with torch.no_grad():
        right = unit(transposed(matrices, top_vectors(matrices @ matrices.mT)))
    return lengths(applied(matrices, right))


def pair_peaks(matrices: Tensor) -> Tensor:
    """Return the largest singular value of each pair of rows i and i + s/2: [h, s/2] of [h, s, d]."""
    one, other = matrices.unflatten(1, (2, -1)).unbind(1)
    half = (one.square() - other.square()).sum(2) / 2
    squares = (one.square() + other.square()).sum(2) / 2 + torch.hypot(half + SMALL, (one * other).sum(2))
    return squares.clamp(min=SMALL).sqrt()


def longest_of(matrices: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest ‖M·n‖ and ‖M·n + c‖ over ‖n‖ ≤ 1 as the certificate does: [h] each, of [h, s, d] and
    [h, s]."""
    long, added = spectral_norms(matrices), lengths(fixed)
    if not bool(fixed.any()):
        return long, long
    square = (added / long.clamp(min=SMALL)).clamp(SMALL, 1 / SMALL)
    joined = spectral_norms(torch.cat([matrices, (fixed / square.sqrt()[:, None])[..., None]], 2))
    return long, (1 + square).sqrt() * joined


def largest_eigenvalue(*rows: Tensor) -> Tensor:
    """Return that of Σ RᵀR over matrices of one width."""
    with torch.no_grad():
        vector = unit(random_vector(rows[0]))
        for _ in range(STEPS):
            vector = unit(sum(((r @ vector) @ r for r in rows), torch.zeros_like(vector)))
    return sum(((r @ vector).square().sum() for r in rows), torch.zeros((), device=vector.device))


def knapsack(values: Tensor, caps: Tensor, budget: Tensor) -> Tensor:
    """Return max Σ v_i·s_i over 0 ≤ s_i ≤ cap_i, Σ s_i ≤ budget, for every row of values: [m].

    As its dual, μ·budget + Σ cap_i·max(v_i − μ, 0) at the value μ of the last that is taken, which has the gradient of
    the maximum.
    """
    count = min(values.shape[1], math.ceil(float(budget.detach() / caps.detach().min())) + 1)
    top = values.topk(count, dim=1)
    taken = caps[top.indices]
    full = taken.detach().cumsum(1) <= budget.detach()
    last = full.sum(1, keepdim=True)
    rest = top.values.gather(1, last.clamp(max=count - 1)) * (last < count)
    return rest[:, 0] * budget + (taken * (top.values - rest).clamp(min=0)).sum(1)


def in_ball(values: Tensor, square: Tensor) -> Tensor:
    """Return max Σ v_i·s_i over 0 ≤ s_i ≤ 1, ‖s‖₂² ≤ square, for every row of values: [m].

    As its dual, λ·square + Σ max (v·s − λ·s²), at a λ that bisection finds.
    """
    with torch.no_grad():
        high = (lengths(values) / (2 * square.sqrt())).clamp(min=SMALL)
        low = high * 2.0**-20
        for _ in range(24):
            middle = (low * high).sqrt()
            used = (values / (2 * middle[:, None])).clamp(max=1).square().sum(1)
            low, high = torch.where(used > square, middle, low), torch.where(used > square, high, middle)
        chosen = (values / (2 * high[:, None])).clamp(max=1)
    gained = (values * chosen - high[:, None] * chosen.square()).sum(1)
    return torch.minimum(high * square + gained, values.sum(1))
