"""Differentiable bounds of attention scores, and of the outputs of attentions and feed-forwards. The formulas are the
certificate's, except for spectral norms (``power_iteration``) and the rounding of linears (``linear_error``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..families.layout import Layout, TensorReader
from ..families.resolve import effective
from ..families.wiring import Attention, FeedForward, Rotary
from ..numerics import FP16_MAX
from . import power_iteration as power
from .activations import LOWEST
from .arithmetic import Arithmetic
from .attention import capped_span, masked_span, norm_scores, pair_order, query_growth, rotated_norm, soft_capped
from .linear import NormOutput, in_ball, knapsack, layer_normalised, rms_normalised


@dataclass(frozen=True)
class Rows:
    """The bounds of a linear that reads a norm's output, for each of the linear's m rows. The norm's output is gain∘n +
    shift, for a vector n with ‖n‖₂ ≤ ``radius``."""

    matrix: Tensor  # weight·gain, [m, d]
    radius: float | Tensor
    norms: Tensor  # radius·‖row‖
    centre: Tensor  # from shift and bias
    partial: Tensor  # bound of each row's partial sums

    def split(self, rows: Sequence[int]) -> list[Rows]:
        """Return each linear in a matrix that several linears share. rows: the number of rows of each."""
        parts = zip(*(x.split(rows) for x in (self.matrix, self.norms, self.centre, self.partial)), strict=True)
        return [Rows(matrix, self.radius, *others) for matrix, *others in parts]


@dataclass
class LiveWeights:
    """Reads the weights of a model in training, and bounds its norms and linears."""

    layout: Layout
    read: TensorReader  # of present values
    a: Arithmetic
    means: dict[str, float]  # by LayerNorm, a bound of its input's mean |x|
    finds_means: bool  # whether ``normalised`` computes ``means`` or only reads them

    def weight(self, name: str) -> Tensor | None:
        return effective(self.layout.tensors[name], wide(self.read(name))) if name in self.layout.tensors else None

    def pair(self, path: str) -> tuple[Tensor, Tensor | None]:
        weight = self.weight(f"{path}.weight")
        assert weight is not None
        return weight, self.weight(f"{path}.bias")

    def linear_error(self, width: int) -> float:
        """Return the relative error that rounding adds to a linear on a norm's output of ``width`` channels."""
        return 4 * self.a.unit + self.a.gamma(width)

    def linear(self, path: str, source: NormOutput, at: Tensor | slice | None = None) -> Rows:
        """Return the bounds of a linear on a norm's output. at: the indices of the rows to bound; None for all."""
        weight, bias = self.pair(path)
        if at is not None:
            weight, bias = weight[at], None if bias is None else bias[at]
        return rows_of(weight, bias, source)

    def linears(self, fused: Sequence[int], *reads: tuple[str, NormOutput]) -> list[Rows]:
        """Return the bounds of several linears. reads: each linear's module path and input. fused: if linears share one
        matrix, the number of rows of each, else (). For a shared matrix, all linears in it are returned, and only the
        first of ``reads`` is used."""
        if fused:
            return self.linear(*reads[0]).split(fused)
        return [self.linear(path, source) for path, source in reads]

    def normalised(self, path: str, amax: Tensor | None = None) -> NormOutput:
        """Return the possible outputs of a norm. amax: a bound of each input component, needed to bound the mean |x| of
        a LayerNorm's input."""
        gain, shift = self.pair(path)
        if not self.layout.family.centred_norm:
            return rms_normalised(gain, self.a, once=self.layout.family.norm_rounds_once)
        if self.finds_means:
            assert amax is not None
            self.means[path] = min(float(amax.mean()), FP16_MAX)
        return layer_normalised(gain, shift, self.means[path], self.layout.eps_of(path), self.a)


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rows_of(weight: Tensor, bias: Tensor | None, source: NormOutput) -> Rows:
    matrix = weight * source.gain
    norms = source.radius * power.lengths(matrix)
    centre, partial = torch.zeros_like(norms), norms
    if source.shift is not None:
        centre, partial = weight @ source.shift, partial + weight.abs() @ source.shift.abs()
    if bias is not None:
        centre, partial = centre + bias, partial + bias.abs()
    return Rows(matrix, source.radius, norms, centre, partial)


def homogeneous(one: Rows, other: Rows) -> tuple[Rows, Rows]:
    """Return both linears with their constant parts, from shift and bias, as one more column of ``matrix``."""
    # A·n + c is the map (A, c/s) of (n, s) for every s. Both linears get s = ``length``.
    centres, norms = (torch.cat(both).abs().sum() for both in ((one.centre, other.centre), (one.norms, other.norms)))
    share = (centres / norms.clamp(min=power.SMALL)).clamp(2.0**-20, 2.0**20)
    length, radius = one.radius * share.sqrt(), one.radius * (1 + share).sqrt()

    def joined(rows: Rows) -> Rows:
        matrix = torch.cat([rows.matrix, rows.centre[:, None] / length], 1)
        return replace(rows, matrix=matrix, radius=radius, norms=radius * power.lengths(matrix))

    return joined(one), joined(other)


def directions(rows: Rows) -> Tensor:
    """Return the rows of a linear's matrix at unit length; zero rows stay as they are."""
    return rows.matrix / (rows.norms / rows.radius).clamp(min=power.SMALL)[:, None]


def scores(live: LiveWeights, sublayer: Attention, source: NormOutput, other: NormOutput) -> tuple[Tensor, ...]:
    """Return three bounds for each head: of query·key products and their partial sums, of scaled products, and of the
    difference between two scores of one query. source, other: the inputs of queries and keys."""
    if sublayer.rotary is not None and sublayer.query_norm:
        return rotary_scores_with_norms(live, sublayer, sublayer.rotary)
    if sublayer.rotary is not None:
        return rotary_scores(live, sublayer, sublayer.rotary, source)
    a, heads, scale = live.a, live.layout.heads(sublayer), live.layout.score_scale(sublayer)
    query, key, *_ = live.linears(sublayer.fused, (sublayer.query, source), (sublayer.key, other))
    size = len(query.norms) // heads
    group = len(query.norms) // len(key.norms)
    q, k = query.matrix.view(heads, size, -1), key.matrix.view(-1, size, key.matrix.shape[1])
    cq, ck = (x.centre.view(-1, size) for x in (query, key))
    most_q, most_k = (x.partial.view(-1, size) for x in (query, key))
    k, ck, most_k = (x.repeat_interleave(group, 0) for x in (k, ck, most_k))
    with torch.no_grad():
        gram_k = k @ k.mT
        right = power.top_vectors((q @ q.mT) @ gram_k)
        x = power.unit(power.transposed(k, right))
        z = power.unit(power.transposed(q, power.applied(gram_k, right)))
    crossed = query.radius * key.radius * (power.applied(q, z) * power.applied(k, x)).sum(1).abs()
    exact = crossed
    if source.shift is not None:
        crossed = crossed + key.radius * power.lengths(power.transposed(k, cq))
        exact = crossed + query.radius * power.lengths(power.transposed(q, ck)) + (cq * ck).sum(1).abs()
    # As in the certificate: ‖D·q‖·‖D⁻¹·k‖ bounds partial sums too.
    balance = power.balanced(most_k, most_q)
    long_q = query.radius * power.spectral_norms(q * balance[..., None]) + power.lengths(cq * balance)
    long_k = key.radius * power.spectral_norms(k / balance[..., None]) + power.lengths(ck / balance)
    sums = torch.minimum(long_q * long_k, (most_q * most_k).sum(1))
    off = (2 * live.linear_error(q.shape[2]) + a.gamma(size) + 2 * a.unit) * sums
    span = (2 * crossed + (5 if sublayer.scaled else 2) * off) * scale
    scaled = torch.minimum(exact, sums) * scale + off * scale
    return sums + off, scaled, span


def rotary_scores_with_norms(live: LiveWeights, sublayer: Attention, rotary: Rotary) -> tuple[Tensor, ...]:
    """Return bounds of products, scaled products and score differences as the function ``scores`` does, for queries and
    keys that have norms and rotary positions."""
    scale = live.layout.score_scale(sublayer)
    heads, kv_heads = live.layout.heads(sublayer), live.layout.kv_heads(sublayer)
    if not sublayer.norms_whole:
        heads = kv_heads = 1
    norms = zip((sublayer.query_norm, sublayer.key_norm), (heads, kv_heads), strict=True)
    query, key = (rotated_norm(live.normalised(path), live.a, of, rotary) for path, of in norms)
    scores = norm_scores(query, key, heads, live.a, scale)
    return torch.maximum(scores.product, scores.partial), scores.product * scale, scores.span


def rotary_scores(live: LiveWeights, sublayer: Attention, rotary: Rotary, source: NormOutput) -> tuple[Tensor, ...]:
    """Return bounds of products, scaled products and score differences as the function ``scores`` does, for queries and
    keys that have rotary positions but no norms. source: the input of queries and keys."""
    a, scale = live.a, live.layout.score_scale(sublayer)
    heads, kv_heads = live.layout.heads(sublayer), live.layout.kv_heads(sublayer)
    sides = []
    query, key, *_ = live.linears(sublayer.fused, (sublayer.query, source), (sublayer.key, source))
    for side, number in ((query, heads), (key, kv_heads)):
        size = len(side.norms) // number
        order = pair_order(size, rotary).to(side.norms.device)
        matrix, centre = side.radius * side.matrix.view(number, size, -1)[:, order], side.centre.view(number, size)
        factor = rotary.factor * (query_growth(rotary, a.max_length) if side is query else 1.0)
        matrix, centre = matrix * factor, centre * factor
        group = heads // number
        sides.append((matrix.repeat_interleave(group, 0), centre[:, order].repeat_interleave(group, 0)))
    (q, cq), (k, ck) = sides
    peaks_q, peaks_k = power.pair_peaks(q), power.pair_peaks(k)
    fixed_q, fixed_k = (power.lengths(c.view(heads, 2, -1).mT) for c in (cq, ck))
    balance = power.balanced(peaks_k + fixed_k, peaks_q + fixed_q)
    wide_balance = balance.repeat(1, 2)
    map_q, long_q = power.longest_of(q * wide_balance[..., None], cq * wide_balance)
    map_k, long_k = power.longest_of(k / wide_balance[..., None], ck / wide_balance)
    apart = torch.minimum(map_q * map_k, (peaks_q * peaks_k).sum(1)) + (fixed_q * fixed_k).sum(1)
    apart = apart + torch.minimum((peaks_q * fixed_k).sum(1), map_q * power.lengths(fixed_k / balance))
    apart = apart + torch.minimum((peaks_k * fixed_q).sum(1), map_k * power.lengths(fixed_q * balance))
    exact = torch.minimum(apart, long_q * long_k)
    # A rotation's three roundings on either side.
    share = 2 * live.linear_error(source.gain.numel()) + 6 * math.sqrt(2) * a.unit
    off = (share + a.gamma(q.shape[1]) + 2 * a.unit) * exact
    return exact + off, (exact + off) * scale, (2 * exact + 5 * off) * scale


def masked(live: LiveWeights, sublayer: Attention, scores: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of scores after a soft cap and position bias, and how far a mask must lower scores to hide
    positions. scores: bounds of the scores before the cap. span: bounds of the difference between two scores of one
    query, also before the cap."""
    cap = live.layout.cap(sublayer)
    if cap is not None:
        capped = soft_capped(scores, cap, live.a)
        scores, span = capped.result, capped_span(span, capped)
    biases = [bias for name in (sublayer.bias, sublayer.block_bias) if name and (bias := live.weight(name)) is not None]
    span = masked_span(span, scores, biases[0] if biases else None, live.a)
    return scores + torch.stack([bias.abs().amax(0) for bias in biases]).amax(0) if biases else scores, span


def attention_output(live: LiveWeights, sublayer: Attention, value_input: NormOutput) -> tuple[Tensor, Tensor]:
    """Return two bounds for each channel of an attention's output: of the channel and of the channel's partial sums."""
    heads = live.layout.heads(sublayer)
    a = replace(live.a, max_length=live.layout.most_keys(sublayer, live.a.max_length))
    values = live.linears(sublayer.fused, (sublayer.value, value_input))[-1]
    weight, bias = live.pair(sublayer.output)
    if sublayer.value_norm:
        size = live.layout.head_size(sublayer)
        source = rms_normalised(weight.new_ones(size), live.a, once=live.layout.family.norm_rounds_once)
        same = torch.eye(size, dtype=weight.dtype, device=weight.device)
        values = rows_of(same.repeat(live.layout.kv_heads(sublayer), 1), None, source)
    group = weight.shape[1] // len(values.norms)
    o = weight.view(len(weight), heads, -1).transpose(0, 1)
    # Several heads may read the same values.
    v, most, centre = (
        x.unflatten(0, (heads // group, -1)).repeat_interleave(group, 0)
        for x in (values.matrix, values.partial, values.centre)
    )
    squares = ((o @ (v @ v.mT)) * o).sum(2)
    output = (values.radius * squares.clamp(min=power.SMALL).sqrt() + (o @ centre[..., None])[..., 0].abs()).sum(0)
    balance = power.balanced(power.lengths(o.mT), most)
    longest = values.radius * power.spectral_norms(v * balance[..., None]) + power.lengths(centre * balance)
    sums = torch.minimum(weight.abs() @ most.flatten(), (power.lengths(o / balance[:, None]) * longest[:, None]).sum(0))
    error = live.linear_error(value_input.gain.numel()) + a.gamma(a.max_length) + a.gamma(weight.shape[1]) + 4 * a.unit
    added = torch.zeros_like(output) if bias is None else bias.abs()
    sums = sums * a.attention_sum + added
    output = torch.minimum(output * a.attention_sum + added + error * sums, sums * (1 + error))
    return output, sums * (1 + error)


def feed_forward_output(live: LiveWeights, sublayer: FeedForward, source: NormOutput) -> Tensor:
    """Return a bound of each channel of a feed-forward's output, [d]. source: the feed-forward's input."""
    weight, bias = live.pair(sublayer.output)
    if sublayer.gate:
        gate, linear = live.linears(sublayer.fused, (sublayer.gate, source), (sublayer.linear, source))
        if bool(gate.centre.any()) or bool(linear.centre.any()):
            gate, linear = homogeneous(gate, linear)
        size = gate.norms * linear.norms
        cosine = (gate.matrix * linear.matrix).sum(1) * gate.radius**2 / size.clamp(min=power.SMALL)
        caps = ((1 + cosine.abs()) / 2).clamp(max=1)
        budget = power.largest_eigenvalue(directions(gate), directions(linear)) / 2
        output = knapsack(weight.abs() * size, caps, budget)
    else:
        linear = live.linear(sublayer.linear, source)
        ones = torch.ones_like(linear.norms)
        budget = power.largest_eigenvalue(directions(linear))
        offset = linear.centre.clamp(min=0)
        sides = []
        for side in (weight, -weight):
            positive = side.clamp(min=0)
            ball = in_ball(positive * linear.norms, ones, budget, ones.dtype)
            straight = power.lengths(positive @ linear.matrix) * linear.radius
            below = (positive - side).sum(1) * LOWEST[sublayer.activation]
            sides.append(torch.minimum((straight + ball) / 2, ball) + positive @ offset + below)
        output = torch.maximum(*sides)
    error = 2 * live.linear_error(source.gain.numel()) + live.a.gamma(weight.shape[1]) + 5 * live.a.unit
    return (output + (0 if bias is None else bias.abs())) * (1 + error)
