"""Bounds of an attention: its scores, its context and its output projection.

Queries and keys are linear maps of a norm's output, a vector of a length up to √d for d channels, times a gain. Let Aq
and Ak be a head's query and key weights times that gain. Scores are then at most d times the spectral norm of AqᵀAk.
With rotary positions this matrix becomes AqᵀRAk, for the worst rotation R."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..families.spread import spread_out
from ..families.wiring import Rotary
from .arithmetic import COMPUTED, Arithmetic
from .linear import (
    LinearBound,
    NormOutput,
    Projection,
    balanced,
    magnitudes,
    outer_scaled,
    products_of_rows,
    quadratic,
    root_of,
    row_norms,
)
from .spectral import largest_eigenvalue

MASK_ROUNDING = 2 * 16.0
"""The most that two roundings add to a masked score: fp16's spacing below 2¹⁶ is 32, and stock code adds the mask to
the score, or to the position bias first."""


@dataclass(frozen=True)
class ScoreBounds:
    """Bounds of an attention's scores, fp64 [heads]. ``product`` bounds query·key, and ``partial`` the partial sums of
    that product. ``span`` bounds the difference between two scores of one query, after their scale."""

    product: Tensor
    partial: Tensor
    span: Tensor


def score_bounds(
    query: LinearBound, key: LinearBound, heads: int, arithmetic: Arithmetic, scale: float = 1.0
) -> ScoreBounds:
    """Return bounds of each head's query·key products in fp16, without rotary positions. heads: the number of query
    heads, of which several may share one key head. scale: the factor on the finished products."""
    a = arithmetic
    size = query.norms.numel() // heads
    group = query.norms.numel() // key.norms.numel()
    exact, partial = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    error, span = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    for h in range(heads):
        part, read = (slice(n * size, (n + 1) * size) for n in (h, h // group))
        q, k = query.matrix[part], key.matrix[read]
        cq, ck = query.centre[part], key.centre[read]
        eq, ek = query.error[part], key.error[read]
        gq, gk = products_of_rows(q), products_of_rows(k)
        root = root_of(gq)
        crossed = query.radius * key.radius * math.sqrt(largest_eigenvalue(root.t() @ gk @ root))
        crossed += key.radius * quadratic(gk, cq)
        # Between two keys their common centre cancels.
        span[h] = 2 * crossed
        exact[h] = crossed + query.radius * quadratic(gq, ck) + abs(float(cq @ ck))
        # ‖D·q‖·‖D⁻¹·k‖ bounds the product and its partial sums for every D; this one balances the channels.
        balance = balanced(key.partial[read], query.partial[part])
        long_q = query.radius * math.sqrt(largest_eigenvalue(outer_scaled(gq, balance)))
        long_k = key.radius * math.sqrt(largest_eigenvalue(outer_scaled(gk, 1 / balance)))
        long_q, long_k = long_q + float((cq * balance).norm()), long_k + float((ck / balance).norm())
        off_q, off_k = float((eq * balance).norm()), float((ek / balance).norm())
        error[h] = long_q * off_k + long_k * off_q + off_q * off_k
        lengths = torch.tensor((long_q + off_q) * (long_k + off_k), dtype=torch.float64)
        partial[h] = torch.minimum(lengths, query.partial[part] @ key.partial[read])
    terms = query.partial.view(heads, size) + key.partial.view(-1, size).repeat_interleave(group, 0)
    return summed_scores(exact, error, partial, span, terms, scale, a)


def summed_scores(
    exact: Tensor, error: Tensor, partial: Tensor, span: Tensor, terms: Tensor, scale: float, arithmetic: Arithmetic
) -> ScoreBounds:
    """Return bounds of query·key products that include the rounding of their sums.

    All tensors but ``terms`` are fp64 [heads]. exact: bounds of the products without rounding. error: the most that
    errors of query and key add to a product. partial: bounds of the products' partial sums. span: bounds of the
    difference between two exact products of one query. terms: bounds of |query| + |key| in each channel, fp64 [heads,
    channels], which give the errors from subnormals. scale: the factor on the finished products."""
    a = arithmetic
    partial = partial * COMPUTED
    rounding = a.gamma(terms.shape[1]) * partial
    partial = a.summed(partial + rounding)
    largest = a.summed(exact * COMPUTED + error + rounding)
    off = (largest - exact * COMPUTED) * scale
    if scale != 1.0:
        # SDPA's plain path multiplies queries and keys by √scale each, eager attention the product by the scale.
        fine = a.tiny * math.sqrt(scale) * terms.sum(1)
        off = off + 3 * a.unit * (1 + a.unit) * partial * scale + fine + a.tiny
    return ScoreBounds(torch.minimum(largest, partial), partial, span * COMPUTED * scale + 2 * off)


ANGLES = 2.0**-20  # how far cos² + sin² may be from 1 in fp32, and cos and sin from their exact values


@dataclass(frozen=True)
class RotatedNorm:
    """Bounds of queries or keys after their norm and their rotary positions. Tensors have one row if all heads have the
    same norm.

    Rotary positions turn channels in pairs. The length of pair p is at most ``gain``_p·|n_p| + ``absolute``_p, where
    n_p is the pair's part of a vector n with ‖n‖₂ ≤ ``radius``."""

    gain: Tensor  # fp64 [heads, pairs]
    absolute: Tensor  # fp64 [heads, pairs]
    radius: float
    bound: Tensor  # of each channel, fp64 [heads, channels]


def rotation_error(arithmetic: Arithmetic) -> tuple[float, float]:
    """Return a factor f and a constant c that bound the error of a channel after rotation. The error is at most f·l +
    c, where l is the length of the channel's pair. A pair's two errors form a vector of length at most √2·(f·l + c)."""
    a = arithmetic
    if a.exact:
        return 0.0, 0.0
    # Cosine, sine, two products and their sum are rounded to fp16, and |x_i·cos| + |x_j·sin| ≤ √(x_i² + x_j²). The
    # angles' own errors and subnormal cosines are relative to |x_i| + |x_j|.
    relative = ((1 + a.unit) ** 3 - 1) * (1 + ANGLES) + ANGLES
    relative += math.sqrt(2) * (1 + a.unit) ** 2 * (a.tiny + ANGLES)
    return relative, 3 * a.tiny * (1 + a.unit)


def rotated_norm(source: NormOutput, arithmetic: Arithmetic, heads: int, rotary: Rotary) -> RotatedNorm:
    """Return the bounds of a norm's output after rotary positions. Only ``rotary.factor`` and rounding
    (``rotation_error``) change the length of a pair of channels. heads: the number of heads that the norm spans."""
    factor, order = rotary.factor, pair_order(len(source.gain) // heads, rotary).to(source.gain.device)

    def largest_of_pairs(values: Tensor) -> Tensor:
        return values.view(heads, -1)[:, order].view(heads, 2, -1).amax(1) * factor

    gain = largest_of_pairs(source.gain.abs()) * (1 + source.relative)
    absolute = math.sqrt(2) * largest_of_pairs(source.absolute)
    relative, tiny = rotation_error(arithmetic)
    most = (gain * source.radius + absolute) * (1 + relative) + tiny
    both = 1 + math.sqrt(2) * relative
    bound = torch.empty_like(most.repeat(1, 2))
    bound[:, order] = most.repeat(1, 2) * COMPUTED
    return RotatedNorm(gain * both, absolute * both + math.sqrt(2) * tiny, source.radius, bound)


def norm_scores(query: RotatedNorm, key: RotatedNorm, heads: int, arithmetic: Arithmetic, scale: float) -> ScoreBounds:
    """Return bounds of each head's query·key products, for queries and keys that pass a norm and are then rotated by
    any angles. scale: the factor on the products."""

    def each(values: Tensor) -> Tensor:
        return values.repeat_interleave(heads // len(values), 0)

    gain_q, gain_k, fixed_q, fixed_k = map(each, (query.gain, key.gain, query.absolute, key.absolute))
    # Cauchy-Schwarz: Σ g_p·|n_p|·|m_p| ≤ max g_p·‖n‖·‖m‖ for pairs p of channels, with g_p = gain_q·gain_k.
    whole = query.radius * key.radius * (gain_q * gain_k).amax(1)
    # Σ|n_p| ≤ √pairs·‖n‖.
    root = math.sqrt(gain_q.shape[1])
    off = root * query.radius * (gain_q * fixed_k).amax(1)
    off = off + root * key.radius * (gain_k * fixed_q).amax(1)
    off = off + (fixed_q * fixed_k).sum(1)
    terms = each(query.bound) + each(key.bound)
    return summed_scores(whole, off, whole + off, 2 * whole, terms, scale, arithmetic)


@dataclass(frozen=True)
class RotatedLinear:
    """Bounds of queries or keys after their rotary positions, if no norm lies between linear and rotation.

    A head's channels are A·n + c, then rotated, for constant A and c and any n with ‖n‖₂ ≤ 1. The rotation keeps the
    length of each pair; A and c contain all factors on it. The rows of A and c are in ``pair_order``."""

    grams: tuple[Tensor, ...]  # A·Aᵀ for each head, fp64 [channels, channels]
    shifts: Tensor  # c for each head, fp64 [heads, channels]
    peaks: Tensor  # bounds of the length of each pair in A·n, fp64 [heads, pairs]
    centres: Tensor  # the length of each pair in c, fp64 [heads, pairs]
    errors: Tensor  # bounds of the length of each pair's rounding error, fp64 [heads, pairs]
    bound: Tensor  # of each rotated channel, in the linear's own order, fp64 [heads·channels]


def pair_order(size: int, rotary: Rotary) -> Tensor:
    """Return the indices of a head's channels, [size], with the first channels of all rotary pairs first, and then
    the second channels in the same order. Channels that are not rotated form pairs too."""
    channels = torch.arange(size)
    if rotary.interleaved:
        return channels.view(-1, 2).t().flatten()
    halves = [part.chunk(2) for part in channels.tensor_split([rotary.turned or size])]
    return torch.cat([half[number] for number in (0, 1) for half in halves if len(half) == 2])


def rotated_linear(
    linear: LinearBound, heads: int, rotary: Rotary, arithmetic: Arithmetic, factor: float = 1.0
) -> RotatedLinear:
    """Return the bounds of a linear's outputs after rotation by any angles and multiplication by at most ``factor``."""
    size = linear.norms.numel() // heads
    order, half = pair_order(size, rotary), size // 2
    relative, tiny = rotation_error(arithmetic)
    if factor != 1.0:  # rounded, as is its product
        factor *= (1 + arithmetic.unit) ** 2
        tiny = tiny * factor + arithmetic.tiny
    both = (1 + math.sqrt(2) * relative) * rotary.factor * factor * COMPUTED

    def ordered(values: Tensor) -> Tensor:
        return values.view(heads, size)[:, order] * both

    def lengths(values: Tensor) -> Tensor:
        return values.view(heads, 2, half).norm(dim=1)

    grams, peaks = [], []
    for h in range(heads):
        rows = linear.matrix[h * size : (h + 1) * size][order] * (linear.radius * both)
        gram = products_of_rows(rows)
        one, other, mixed = gram.diagonal()[:half], gram.diagonal()[half:], gram[:half, half:].diagonal()
        grams.append(gram)
        # A pair's Gram matrix ((a, c), (c, b)) has the larger eigenvalue (a + b)/2 + √((a − b)²/4 + c²).
        peaks.append(((one + other) / 2 + torch.hypot((one - other) / 2, mixed)).sqrt() * COMPUTED)
    longest, shifts = torch.stack(peaks), ordered(linear.centre)
    centres, errors = lengths(shifts), lengths(ordered(linear.error)) + math.sqrt(2) * tiny
    bound = torch.empty(heads, size, dtype=torch.float64)
    bound[:, order] = (longest + centres + errors).repeat(1, 2)
    return RotatedLinear(tuple(grams), shifts, longest, centres, errors, bound.flatten())


def query_growth(rotary: Rotary, length: int) -> float:
    """Return the largest factor by which stock code scales a query for its position, over up to ``length``
    positions."""
    if rotary.growth is None:
        return 1.0
    growth, positions = rotary.growth
    return (1 + growth * math.log1p(length / positions)) * (1 + 2.0**-20)  # fp32's logarithm is nearer than that


def linear_scores(query: RotatedLinear, key: RotatedLinear, arithmetic: Arithmetic, scale: float) -> ScoreBounds:
    """Return bounds of each head's query·key products after rotation by any angles, for queries and keys without norms.
    scale: the factor on the products."""
    heads, group = len(query.peaks), len(query.peaks) // len(key.peaks)
    exact, error = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    for h in range(heads):
        n = h // group
        peaks_q, peaks_k, fixed_q, fixed_k = query.peaks[h], key.peaks[n], query.centres[h], key.centres[n]
        balance = balanced(peaks_k + fixed_k, peaks_q + fixed_q)
        map_q, long_q = longest_of(query.grams[h], query.shifts[h], balance.repeat(2))
        map_k, long_k = longest_of(key.grams[n], key.shifts[n], 1 / balance.repeat(2))
        # A pair's product is at most ‖q_p‖·‖k_p‖ (Cauchy-Schwarz), and the sum over pairs ‖D·q‖·‖D⁻¹·k‖, for every D
        # with one entry for each pair. Or add bounds of map·map, map·shift, shift·map and shift·shift.
        apart = min(map_q * map_k, float(peaks_q @ peaks_k)) + float(fixed_q @ fixed_k)
        apart += min(float(peaks_q @ fixed_k), map_q * float((fixed_k / balance).norm()))
        apart += min(float(peaks_k @ fixed_q), map_k * float((fixed_q * balance).norm()))
        exact[h] = min(apart, long_q * long_k)
        off_q, off_k = query.errors[h], key.errors[n]
        error[h] = min(float((peaks_q + fixed_q) @ off_k), long_q * float((off_k / balance).norm()))
        error[h] += min(float((peaks_k + fixed_k) @ off_q), long_k * float((off_q * balance).norm()))
        error[h] += off_q @ off_k
    terms = query.bound.view(heads, -1) + key.bound.view(heads // group, -1).repeat_interleave(group, 0)
    # Two keys are rotated by different angles, so their common centre does not cancel.
    return summed_scores(exact, error, exact + error, 2 * exact, terms, scale, arithmetic)


def longest_of(gram: Tensor, shift: Tensor, factors: Tensor) -> tuple[float, float]:
    """Return bounds of ‖D·A·n‖ and ‖D·(A·n + c)‖ for ‖n‖ ≤ 1, with A·Aᵀ = ``gram``, c = ``shift``, D =
    diag(``factors``)."""
    scaled, fixed = outer_scaled(gram, factors), shift * factors
    long, added = math.sqrt(largest_eigenvalue(scaled)), float(fixed.norm())
    if not (long > 0 and 0 < added < math.inf and long < math.inf):
        return long, long + added
    # For every s, A·n + c is (A, c/s) times the vector (n, s), whose length is at most √(1 + s²). This s gives at most
    # the sum of both lengths.
    square = added / long
    joined = largest_eigenvalue(scaled + torch.outer(fixed, fixed) / square)
    return long, math.sqrt((1 + square) * joined)


@dataclass(frozen=True)
class Capped:
    """Bounds of the steps of a soft cap c·tanh(x/c), in the shape of x. ``error`` bounds the rounding of the result."""

    quotient: Tensor
    tanh: Tensor
    result: Tensor
    error: Tensor


def soft_capped(values: Tensor, cap: float, arithmetic: Arithmetic) -> Capped:
    """Return bounds of the steps of a soft cap cap·tanh(x/cap), for |x| up to ``values``."""
    a = arithmetic
    # Each step grows with x, so its bound is the step applied to the bound before it, rounded once.
    quotient = a.rounded(values / cap) * COMPUTED
    tanh = (a.rounded(quotient.tanh()) * COMPUTED).clamp(max=1)
    result = a.rounded(tanh * cap) * COMPUTED
    # The slope of c·tanh(x/c) is at most 1, so rounding x/c moves the result no further than rounding x. Rounding tanh,
    # and then c·tanh, adds one relative rounding error each.
    error = a.unit * values + 2 * a.unit * result + (2 * cap + 1) * a.tiny
    return Capped(quotient, tanh, result, error * COMPUTED)


def capped_span(span: Tensor, capped: Capped) -> Tensor:
    """Return ``span``, a bound of the difference between two scores of one query, after a soft cap."""
    # The slope of a cap is at most 1, and both scores lie between −``result`` and ``result``.
    return torch.minimum(span + 2 * capped.error, 2 * capped.result)


def masked_span(span: Tensor, scores: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> Tensor:
    """Return how far a mask must lower scores so that masked positions get an attention weight of 0, fp64 [heads].

    span: bounds of the difference between two scores of one query. scores: bounds of |score|. bias: position biases
    [buckets, heads]. A query whose positions are all masked is not covered."""
    a = arithmetic
    # Stock masks only add −65504. If the weights of all masked positions sum to less than 2⁻²⁵, each is 0 in fp16.
    reach = (26 + math.log2(a.max_length)) * math.log(2)
    if bias is not None:
        # SDPA puts the mask in place of a masked position's bias, eager attention adds it.
        high, low = bias.amax(0).clamp(min=0), bias.amin(0)
        largest = scores + torch.maximum(high, -low)
        span = span + (high - low) + 2 * (a.rounded(largest) - largest)
    return span * COMPUTED + MASK_ROUNDING + reach


@dataclass(frozen=True)
class Context:
    """Bounds of an attention's context, which is the sum over positions of values times attention weights."""

    values: LinearBound
    total: float  # the largest sum of one row's weights after rounding and dropout; none is negative
    gamma: float  # error of the sum over positions, relative to the sum of absolute values
    bound: Tensor  # of each channel, fp64 [inner]


def gathered(values: LinearBound, keep: float, arithmetic: Arithmetic) -> Context:
    """Return the bounds of an attention's context, which sums values times attention weights. keep: 1 − p for dropout
    of the weights with probability p, rounded down."""
    a = arithmetic
    total = a.attention_sum
    if keep != 1.0:
        total = total / keep * (1 + a.unit) + a.max_length * a.tiny
    gamma = a.gamma(a.max_length)
    return Context(values, total, gamma, a.summed(values.bound * total * (1 + gamma)))


def attention_output(
    context: Context, weight: Tensor, bias: Tensor | None, heads: int, arithmetic: Arithmetic
) -> Projection:
    """Return the bounds of an attention's output projection. weight: [d, inner]. bias: [d]. heads: the number of query
    heads, each of which has its own columns of ``weight``."""
    a = arithmetic
    values, total, gamma = context.values, context.total, context.gamma
    size = weight.shape[1] // heads
    group = weight.shape[1] // len(values.norms)
    rows = weight.shape[0]
    exact, lengths = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    longest_all = 0.0
    # Attention weights are at least 0 with a sum up to ``total``. With values v = V·x + centre and ‖x‖ ≤ radius, a head
    # adds at most total·(radius·‖O·V‖ + |O·centre|). Several heads may read the same values.
    for h in range(heads):
        part, columns = (slice(n * size, (n + 1) * size) for n in (h // group, h))
        v, o = values.matrix[part], weight[:, columns].double()
        g = products_of_rows(v)
        moved = o @ root_of(g)
        exact += total * (values.radius * row_norms(moved) + (o @ values.centre[part]).abs())
        balance = balanced(row_norms(o.t()), values.partial[part])
        longest = values.radius * math.sqrt(largest_eigenvalue(outer_scaled(g, balance)))
        longest += float(((values.centre[part].abs() + values.error[part]) * balance).norm())
        longest = longest * total * (1 + gamma) * (1 + a.unit) ** 2 + a.floor * float(balance.norm())
        lengths += row_norms(o / balance) * longest
        longest_all += total * values.radius * math.sqrt(largest_eigenvalue(moved.t() @ moved))
        longest_all += total * float((o @ values.centre[part]).norm())
    # Each context value's error: the value's own, then the sum over positions and its rounding.
    rounding = (1 + gamma) * (1 + a.unit) ** 2 - 1
    off = total * values.error + total * rounding * values.bound + a.floor
    each = spread_out(torch.stack([context.bound, off], 1), (len(off) // size, group, size))
    sums, error = magnitudes(weight, each).unbind(1)
    added = torch.zeros_like(sums) if bias is None else bias.double().abs()
    partial = torch.minimum(sums, lengths) * COMPUTED + added
    error = error * COMPUTED + a.gamma(weight.shape[1]) * partial
    signed = torch.zeros_like(sums) if bias is None else bias.double()
    bound = exact * COMPUTED + signed.abs() + error
    partial = partial + a.gamma(weight.shape[1]) * partial
    whole = longest_all * COMPUTED + float(signed.norm()) + float(error.norm())
    whole = whole * (1 + a.unit) ** 2 + a.floor * math.sqrt(rows)
    bound, partial = a.summed(bound), a.summed(partial)
    return Projection(torch.minimum(bound, partial), partial, whole)
