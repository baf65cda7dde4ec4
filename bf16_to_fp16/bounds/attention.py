"""Bounds of an attention: the scores, what the weights gather of the values, and the output projection.

A head's scores are at most d times the spectral norm of AqᵀAk, with A the weight times the gain of the norm. Attention
weights are convex, so what is gathered is no larger than the values, and row i of the output at most the sum over
heads of √d·‖O_i·Av‖.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .arithmetic import COMPUTED, Arithmetic
from .linear import LinearBound, Projection, balanced, matrix_vector, outer_scaled, quadratic, row_norms, square_root
from .spectral import largest_eigenvalue, working_dtype


def score_bounds(query: LinearBound, key: LinearBound, heads: int, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Return bounds of every head's products of a query and a key, and of their partial sums: fp64 [heads] each."""
    a = arithmetic
    size = query.norms.numel() // heads
    exact, partial = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    error = torch.zeros(heads, dtype=torch.float64)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        q, k = query.matrix[part].double(), key.matrix[part].double()
        cq, ck = query.centre[part], key.centre[part]
        eq, ek = query.error[part], key.error[part]
        gq, gk = q @ q.t(), k @ k.t()
        root = square_root(gq)
        crossed = query.radius * key.radius * math.sqrt(largest_eigenvalue(root @ gk @ root))
        crossed += query.radius * quadratic(gq, ck) + key.radius * quadratic(gk, cq) + abs(float(cq @ ck))
        # ‖D·q‖·‖D⁻¹·k‖ bounds the product and its partial sums for every D; this one balances the channels.
        balance = balanced(key.partial[part], query.partial[part])
        long_q = query.radius * math.sqrt(largest_eigenvalue(outer_scaled(gq, balance)))
        long_k = key.radius * math.sqrt(largest_eigenvalue(outer_scaled(gk, 1 / balance)))
        long_q, long_k = long_q + float((cq * balance).norm()), long_k + float((ck / balance).norm())
        off_q, off_k = float((eq * balance).norm()), float((ek / balance).norm())
        error[h] = long_q * off_k + long_k * off_q + off_q * off_k
        exact[h] = crossed
        lengths = torch.tensor((long_q + off_q) * (long_k + off_k), dtype=torch.float64)
        partial[h] = torch.minimum(lengths, query.partial[part] @ key.partial[part])
    partial = partial * COMPUTED
    rounding = a.gamma(size) * partial
    partial = a.summed(partial + rounding)
    bound = torch.minimum(a.summed(exact * COMPUTED + error + rounding), partial)
    return bound, partial


@dataclass(frozen=True)
class Context:
    """What attention gathers of its values: a sum over positions, with weights that are convex up to ``total``.

    ``total``: largest sum of a row of weights, their rounding and dropout included. ``gamma``: error of the sum over
    positions relative to that of the absolute values. ``bound``: fp64 [inner].
    """

    values: LinearBound
    total: float
    gamma: float
    bound: Tensor


def gathered(values: LinearBound, keep: float, arithmetic: Arithmetic) -> Context:
    """Return what attention gathers of ``values``; keep: a lower bound of 1 over the factor of dropout on weights."""
    a = arithmetic
    total = a.attention_sum
    if keep != 1.0:
        total = total / keep * (1 + a.unit) + a.max_length * a.tiny
    gamma = a.gamma(a.max_length)
    return Context(values, total, gamma, a.summed(values.bound * total * (1 + gamma)))


def attention_output(
    context: Context, weight: Tensor, bias: Tensor | None, heads: int, arithmetic: Arithmetic
) -> Projection:
    """Return the bounds of an attention's output projection; weight [d, inner], bias [d].

    Attention weights are convex up to ``total``, so a head adds at most total·max over positions of |O·v|, that is
    radius·‖O·Av‖ + |O·centre|.
    """
    a = arithmetic
    values, total, gamma = context.values, context.total, context.gamma
    dtype = working_dtype(weight.numel())
    out = weight.to(dtype)
    size = weight.shape[1] // heads
    rows = weight.shape[0]
    exact, lengths = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    longest_all = 0.0
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        v, o = values.matrix[part].double(), out[:, part].double()
        g = v @ v.t()
        g.diagonal().add_(g.trace() * (size + v.shape[1]) * 2.0**-50)
        root = square_root(g)
        exact += total * (values.radius * row_norms(o @ root) + (o @ values.centre[part]).abs())
        balance = balanced(row_norms(o.t()), values.partial[part])
        longest = values.radius * math.sqrt(largest_eigenvalue(outer_scaled(g, balance)))
        longest += float(((values.centre[part].abs() + values.error[part]) * balance).norm())
        longest = longest * total * (1 + gamma) * (1 + a.unit) ** 2 + a.floor * float(balance.norm())
        lengths += row_norms(o / balance) * longest
        moved = o @ root
        longest_all += total * values.radius * math.sqrt(largest_eigenvalue(moved.t() @ moved))
        longest_all += total * float((o @ values.centre[part]).norm())
    magnitude = out.abs()
    sums = matrix_vector(magnitude, context.bound)
    added = torch.zeros_like(sums) if bias is None else bias.double().abs()
    partial = torch.minimum(sums, lengths) * COMPUTED + added
    # What each context value is off by: the value's own error, then the sum over positions and its rounding.
    rounding = (1 + gamma) * (1 + a.unit) ** 2 - 1
    off = total * values.error + total * rounding * values.bound + a.floor
    error = matrix_vector(magnitude, off) * COMPUTED + a.gamma(weight.shape[1]) * partial
    signed = torch.zeros_like(sums) if bias is None else bias.double()
    bound = exact * COMPUTED + signed.abs() + error
    partial = partial + a.gamma(weight.shape[1]) * partial
    whole = longest_all * COMPUTED + float(signed.norm()) + float(error.norm())
    whole = whole * (1 + a.unit) ** 2 + a.floor * math.sqrt(rows)
    bound, partial = a.summed(bound), a.summed(partial)
    return Projection(torch.minimum(bound, partial), partial, whole)
