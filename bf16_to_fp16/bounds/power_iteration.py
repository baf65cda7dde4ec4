"""Spectral norms by power iteration with fixed start vectors, differentiable and for many matrices at once. A converged
result has the norm's value and gradient, but it is not a proven bound."""

from __future__ import annotations

import torch
from torch import Tensor

SQUARINGS = 10  # times that a head's Gram matrix is squared, which is 1024 steps of power iteration
STEPS = 32  # steps of power iteration on the rows of a feed-forward, whose Gram matrix is not made
SMALL = 1e-30  # least divisor


def lengths(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def unit(x: Tensor) -> Tensor:
    """Return the vectors at unit length; zero vectors stay as they are."""
    return torch.nn.functional.normalize(x, dim=-1, eps=SMALL)


def balanced(divided: Tensor, multiplied: Tensor) -> Tensor:
    """Return √(divided/multiplied), the scales that make the channels of a product's two factors equally large. They
    divide one factor and multiply the other; the arguments are the sizes of these factors' channels."""
    return ((divided + SMALL) / (multiplied + SMALL)).sqrt().clamp(1e-6, 1e6)


def applied(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return M·x for each matrix M and vector x: [h, s] from [h, s, d] and [h, d]."""
    return (matrices @ vectors[..., None])[..., 0]


def transposed(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return Mᵀ·x for each matrix M and vector x: [h, d] from [h, s, d] and [h, s]."""
    return (vectors[:, None] @ matrices)[:, 0]


def start_vector(like: Tensor) -> Tensor:
    """Return the fixed random start vector of every power iteration, as long as the last axis of ``like``."""
    drawn = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return drawn.to(like.device, like.dtype)


def top_vectors(matrices: Tensor) -> Tensor:
    """Return the eigenvector of the largest eigenvalue of each matrix: [h, s] from [h, s, s]. All eigenvalues must be
    real and at least 0."""
    for _ in range(SQUARINGS):
        matrices = matrices / matrices.abs().amax((1, 2), keepdim=True).clamp(min=SMALL)
        matrices = matrices @ matrices
    return unit(matrices @ start_vector(matrices))


def spectral_norms(matrices: Tensor) -> Tensor:
    """Return the largest singular value of each matrix: [h] from [h, s, d]."""
    with torch.no_grad():
        right = unit(transposed(matrices, top_vectors(matrices @ matrices.mT)))
    return lengths(applied(matrices, right))


def pair_peaks(matrices: Tensor) -> Tensor:
    """Return the largest singular value of each 2 × d matrix of rows i and i + s/2: [h, s/2] from [h, s, d]."""
    one, other = matrices.unflatten(1, (2, -1)).unbind(1)
    half = (one.square() - other.square()).sum(2) / 2
    squares = (one.square() + other.square()).sum(2) / 2 + torch.hypot(half + SMALL, (one * other).sum(2))
    return squares.clamp(min=SMALL).sqrt()


def longest_of(matrices: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors [h]: the largest ‖M·n‖ over all n with ‖n‖ ≤ 1, and a bound of ‖M·n + c‖ over these n.
    matrices: h matrices M, [h, s, d]. fixed: a vector c for each M, [h, s]."""
    long, added = spectral_norms(matrices), lengths(fixed)  # formulas as in ``attention.longest_of``
    if not bool(fixed.any()):
        return long, long
    square = (added / long.clamp(min=SMALL)).clamp(SMALL, 1 / SMALL)
    joined = spectral_norms(torch.cat([matrices, (fixed / square.sqrt()[:, None])[..., None]], 2))
    return long, (1 + square).sqrt() * joined


def largest_eigenvalue(*rows: Tensor) -> Tensor:
    """Return the largest eigenvalue of Σ RᵀR over the matrices R, which have the same width."""
    with torch.no_grad():
        vector = unit(start_vector(rows[0]))
        for _ in range(STEPS):
            vector = unit(sum(((r @ vector) @ r for r in rows), torch.zeros_like(vector)))
    return sum(((r @ vector).square().sum() for r in rows), torch.zeros((), device=vector.device))
