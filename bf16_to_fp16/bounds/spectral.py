"""Upper bounds on the largest eigenvalue of a Gram matrix, rounding included.

Power or Lanczos iteration gives a lower bound, which is worth nothing in a proof. Here it only makes a guess t: if the
Cholesky factorisation of t·I − G runs through, every eigenvalue of G is below t, whatever the guess came from. Small
matrices take all eigenvalues from ``eigvalsh`` instead. To both the backward error of the computation is added
(Higham, Accuracy and Stability of Numerical Algorithms, theorems 10.3 and 8.3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arithmetic import full_precision

EXACT_UP_TO = 128
"""Rows of a matrix whose eigenvalues are all computed; beyond it Cholesky is faster."""


TILE = 512
"""Rows and columns of a Gram matrix that are summed at a time, so that the sum stays in the cache."""


FP32_ROWS = 256
"""Rows summed in fp32 before the sum goes on in fp64."""


WIDE = 1 << 22
"""Elements from which matrices are multiplied in fp32, chunk by chunk."""


_STEPS = 32


_GUESS = 1 + 2.0**-9


def working_dtype(elements: int) -> torch.dtype:
    """Return fp64 for matrices that are cheap in it, else fp32."""
    return torch.float64 if elements < WIDE else torch.float32


@full_precision()
def gram(rows: Tensor) -> Tensor:
    """Return an upper bound of rowsᵀ·rows in the positive semidefinite order: fp64 [d, d].

    rows: fp32 or fp64 [n, d]. The error of every product is bounded by γ·Σ|a||b|, whose
    Frobenius norm is at most γ times the trace; that is added to the diagonal.
    """
    count, size = rows.shape
    exact = rows.dtype == torch.float64
    step = max(1, count if exact else FP32_ROWS)
    total = torch.zeros(size, size, dtype=torch.float64)
    for i in range(0, size, TILE):
        for j in range(0, i + 1, TILE):
            left, right, tile = rows[:, i : i + TILE], rows[:, j : j + TILE], total[i : i + TILE, j : j + TILE]
            for start in range(0, count, step):
                tile += left[start : start + step].t() @ right[start : start + step]
            if i != j:
                total[j : j + TILE, i : i + TILE] = tile.t()
    unit = (count + 8) * 2.0**-52 if exact else (FP32_ROWS + 8) * 2.0**-24
    total.diagonal().add_(unit * float(total.trace()))
    return total


@full_precision()
def largest_eigenvalue(matrix: Tensor) -> float:
    """Return an upper bound on the largest eigenvalue of a symmetric positive semidefinite fp64 matrix.

    As a rule within 1% of it. Zero for an empty matrix.
    """
    size = matrix.shape[0]
    trace = float(matrix.trace())
    if size == 0 or trace <= 0:
        return 0.0
    if not math.isfinite(trace):
        return math.inf
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
    """Return a lower bound on the largest eigenvalue, close to it: Lanczos from a fixed random vector.

    With full reorthogonalisation (Golub and Van Loan, Matrix Computations, 10.3.5), in fp32, which is half the reading:
    what comes of it is only a guess.
    """
    size = matrix.shape[0]
    scaled = (matrix / matrix.trace()).float()
    basis = torch.zeros(min(_STEPS, size), size)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    for step in range(len(basis)):
        length = float(vector.norm())
        if length < 1e-7:  # the basis spans everything that the vector reaches
            break
        basis[step] = vector / length
        vector = scaled @ basis[step]
        for _ in range(2):
            vector -= basis.t() @ (basis @ vector)
    wide = torch.linalg.qr(basis.t().double()).Q
    return max(float(torch.linalg.eigvalsh(wide.t() @ (matrix @ wide))[-1]), 1e-300)
