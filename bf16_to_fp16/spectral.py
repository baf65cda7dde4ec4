"""Upper bounds on the largest eigenvalue of a Gram matrix, rounding included.

Power iteration gives a lower bound, which is worth nothing in a proof. Here it only makes a guess t: if the
Cholesky factorisation of t·I − G runs through, every eigenvalue of G is below t, whatever the guess came from. Small
matrices take all eigenvalues from ``eigvalsh`` instead. Both get the backward error of what computed them on top
(Higham, Accuracy and Stability of Numerical Algorithms, theorems 10.3 and 8.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_UP_TO = 512
"""Rows of a matrix whose eigenvalues are all computed; beyond it Cholesky is faster."""

CHUNK = 256
"""Rows summed in fp32 before the sum goes on in fp64."""

WIDE = 1 << 22
"""Elements from which matrices are multiplied in fp32, chunk by chunk."""

_STEPS = 12
_BLOCK = 8
_GUESS = 1 + 2.0**-9


def working_dtype(elements: int) -> torch.dtype:
    """Return fp64 for matrices that are cheap in it, else fp32."""
    return torch.float64 if elements < WIDE else torch.float32


def gram(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return an upper bound of rowsᵀ·diag(weights)·rows in the positive semidefinite order: fp64 [d, d].

    rows: fp32 or fp64 [n, d]. weights: [n], not negative. The error of every product is bounded by γ·Σ|a||b|, whose
    Frobenius norm is at most γ times the trace; that is added to the diagonal.
    """
    scaled = rows if weights is None else rows * weights.sqrt().to(rows.dtype)[:, None]
    if scaled.dtype == torch.float64:
        total, unit = scaled.t() @ scaled, (scaled.shape[0] + 8) * 2.0**-52
    else:
        total = torch.zeros(scaled.shape[1], scaled.shape[1], dtype=torch.float64)
        for start in range(0, scaled.shape[0], CHUNK):
            part = scaled[start : start + CHUNK]
            total += part.t() @ part
        unit = (CHUNK + 8) * 2.0**-24
    total.diagonal().add_(unit * float(total.trace()))
    return total


def largest_eigenvalue(matrix: Tensor) -> float:
    """Return an upper bound on the largest eigenvalue of a symmetric positive semidefinite fp64 matrix.

    As a rule within 1% of it. Zero for an empty matrix.
    """
    size = matrix.shape[0]
    trace = float(matrix.trace())
    if size == 0 or trace <= 0:
        return 0.0
    if size <= EXACT_UP_TO:
        return max(0.0, float(torch.linalg.eigvalsh(matrix)[-1])) + size * 2.0**-48 * trace
    value = ritz_value(matrix)
    guess = value * _GUESS
    while guess < trace:
        shifted = -matrix
        shifted.diagonal().add_(guess)
        if int(torch.linalg.cholesky_ex(shifted).info) == 0:
            # ‖|R|ᵀ|R|‖ ≤ trace(t·I − G) ≤ n·t, times γ of n + 1 terms.
            return guess * (1 + size * (size + 1) * 2.0**-52)
        guess *= 1 + (guess / value - 1) * 2
    return trace


def ritz_value(matrix: Tensor) -> float:
    """Return a lower bound on the largest eigenvalue, close to it: block power iteration from fixed random vectors."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(matrix.shape[0], _BLOCK, dtype=torch.float64, generator=generator)
    for _ in range(_STEPS):
        block = torch.linalg.qr(matrix @ block).Q
    return max(float(torch.linalg.eigvalsh(block.t() @ (matrix @ block))[-1]), 1e-300)


__all__ = ["gram", "largest_eigenvalue", "working_dtype"]
