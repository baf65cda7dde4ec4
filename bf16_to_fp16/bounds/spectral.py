"""Upper bounds on the largest eigenvalue of a Gram matrix G, rounding included.

Lanczos iteration makes a guess t. If the Cholesky factorisation of t·I − G succeeds, every eigenvalue is below t. For
small matrices ``eigvalsh`` computes all eigenvalues. Both results get the computation's backward error added (Higham,
Accuracy and Stability of Numerical Algorithms, theorems 10.3 and 8.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..devices import on_device
from ..families.layout import TensorReader
from .arithmetic import COMPUTED, full_precision
from .factored import IN_CACHE, Tall

EXACT_UP_TO = 128  # rows of a matrix whose eigenvalues are all computed; beyond it Cholesky is faster
TILE = 512  # rows and columns of a Gram matrix that are summed at a time, so that the sum stays in the cache
FP32_ROWS = 256  # rows summed in fp32 before the sum goes on in fp64
AT_A_TIME = 2048  # rows of a tall matrix that are computed at a time
CARRIED = 2.0**-8  # share of its root by which an eigenvalue may grow when it is carried over rather than computed

T = TypeVar("T")

_STEPS = 32

_GUESS = 1 + 2.0**-9


@on_device
def summed_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum of left_i·right_iᵀ over i: fp64 [a, b], from [n, a, k] and [n, b, k] of one dtype. Each product
    is computed in that dtype."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for one, other in zip(left, right, strict=True):
        total += times_rows(one, other)
    return total


@full_precision()
def gram(rows: Tensor | Tall) -> Tensor:
    """Return a matrix G, fp64 [d, d], such that G − rowsᵀ·rows is positive semidefinite. rows: [n, d], fp32 or fp64."""
    count, size = rows.shape
    exact = rows.dtype == torch.float64
    total = torch.zeros(size, size, dtype=torch.float64)
    for part in (rows,) if isinstance(rows, Tensor) else rows.parts(AT_A_TIME):
        together = max(1, len(part) if exact else min(len(part), FP32_ROWS))
        padded = torch.nn.functional.pad(part, (0, 0, 0, -len(part) % together))
        # Rows side by side, as oneDNN multiplies fastest.
        across = padded.view(-1, together, size).transpose(1, 2).contiguous()
        for i in range(0, size, TILE):
            for j in range(0, i + 1, TILE):
                tile = summed_products(across[:, i : i + TILE], across[:, j : j + TILE])
                total[i : i + TILE, j : j + TILE] += tile
    for i in range(0, size, TILE):
        total[:i, i : i + TILE] = total[i : i + TILE, :i].t()
    # Each entry is off by at most γ·Σ|a||b|, so the Frobenius norm of the errors is at most γ times the trace. γ is a
    # unit for each row of a sum, and eight more since both factors of a product may be off by four units.
    unit = (count + 8) * 2.0**-52 if exact else (FP32_ROWS + 8) * 2.0**-24
    total.diagonal().add_(unit * float(total.trace()))
    return total


@dataclass(frozen=True)
class Spectra:
    """A store of upper bounds on the largest eigenvalues of a source checkpoint's Gram matrices. Nearly equal weights,
    such as the converted ones, reuse the bounds. Where a reused bound is too loose, the eigenvalue is computed."""

    read: TensorReader  # of the source's weights
    bounds: dict[str, tuple[Tall, float]] = field(default_factory=dict)
    """By a matrix's label: the matrix without its weights' values, and a bound of its Gram matrix's eigenvalues."""
    kept: dict[tuple[frozenset[str], Hashable], Any] = field(default_factory=dict)
    """Results of ``once``, by the field ``about`` and by the argument ``given`` of ``once``."""
    about: frozenset[str] = frozenset()  # names of the weights from which ``once`` computes
    fixed: bool = False  # whether to add no bounds, as for weights that are not the source's

    def under(self, read: TensorReader, changed: Collection[str]) -> Spectra:
        """Return a store for new weights. It keeps the results of this store that depend on no tensor in ``changed``.
        read: a function that returns a new weight by name."""
        bounds = {label: kept for label, kept in self.bounds.items() if kept[0].names.isdisjoint(changed)}
        return Spectra(read, bounds, {key: result for key, result in self.kept.items() if key[0].isdisjoint(changed)})

    def for_others(self) -> Spectra:
        """Return a store for weights nearly equal to the source's. It derives bounds for the other weights from this
        store's bounds and from the difference of the weights. It does not store the derived bounds."""
        return replace(self, fixed=True, kept={})

    def once(self, given: Hashable, compute: Callable[[], T]) -> T:
        """Return ``compute()``, or its kept result from an earlier call with the same ``given`` and ``about``. given:
        the values on which the result depends besides the weights. Nothing is kept if ``about`` is empty."""
        key = (self.about, given)
        if not self.about:
            return compute()
        if key not in self.kept:
            self.kept[key] = compute()
        return self.kept[key]

    def largest(self, matrix: Tall) -> float:
        """Return an upper bound on the largest eigenvalue of the Gram matrix of ``matrix``. It follows from a stored
        bound where that is tight enough."""
        value = self.from_source(matrix) if matrix.label in self.bounds else None
        if value is None:
            value = largest_eigenvalue(gram(matrix))
            if matrix.label and not self.fixed:
                self.bounds[matrix.label] = without_weights(matrix), value
        return value

    @full_precision()
    def from_source(self, matrix: Tall) -> float | None:
        """Return a bound for ``matrix`` that follows from the bound stored for the same label. Return None if the two
        matrices cannot be compared or the result is too loose."""
        kept, value = self.bounds[matrix.label]
        other = self.with_weights(kept)
        if other.shape != matrix.shape or other.dtype != matrix.dtype or not 0 < value < math.inf:
            return None
        # For Z, Z₀ and a number s, ‖Z‖₂ ≤ s·‖Z₀‖₂ + ‖Z − s·Z₀‖_F.
        scale = matrix.length / kept.length if kept.length > 0 else 0.0
        square = 0.0
        rows = max(1, IN_CACHE // matrix.shape[1])
        for here, there in zip(matrix.parts(rows), other.parts(rows), strict=True):
            square += float(torch.linalg.vector_norm(here.sub_(there.mul_(scale)), dtype=torch.float64)) ** 2
        # Rounding moves each element by at most five units of the working dtype; ``scale`` adds two.
        off = math.sqrt(square) + 8 * torch.finfo(matrix.dtype).eps * matrix.length
        root = scale * math.sqrt(value)
        return (root + off) ** 2 * COMPUTED if off <= CARRIED * root else None

    def with_weights(self, matrix: Tall) -> Tall:
        weights = {part.name: self.read(part.name) for block in matrix.blocks for part in block}
        blocks = (tuple(replace(part, weight=weights[part.name]) for part in block) for block in matrix.blocks)
        return replace(matrix, blocks=tuple(blocks))


def without_weights(matrix: Tall) -> Tall:
    """Return a copy that has the names and factors of the matrix's weights, but not their values."""
    nothing = torch.zeros(0)
    return replace(matrix, blocks=tuple(tuple(replace(p, weight=nothing) for p in block) for block in matrix.blocks))


@on_device
@full_precision()
def product_of_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return left·rightᵀ in the dtype of both, fp32 or fp64, summed in any order. Both are contiguous."""
    return times_rows(left, right)


@full_precision()
def largest_eigenvalue(matrix: Tensor) -> float:
    """Return an upper bound on the largest eigenvalue of a symmetric positive semidefinite fp64 matrix. It is usually
    within 1% of the eigenvalue, 0 for an empty matrix, and inf for one that is not finite."""
    size = matrix.shape[0]
    trace = float(matrix.trace())
    if size == 0 or trace <= 0:
        return 0.0
    if not math.isfinite(trace):
        return math.inf
    if size <= EXACT_UP_TO:
        return float(largest_eigenvalues(matrix[None]))
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


def largest_eigenvalues(matrices: Tensor) -> Tensor:
    """Return upper bounds on largest eigenvalues, fp64 [k], of small positive semidefinite matrices, fp64 [k, n, n]."""
    trace = matrices.diagonal(dim1=1, dim2=2).sum(1)
    finite = torch.linalg.eigvalsh(matrices.nan_to_num(0.0, 0.0, 0.0))[:, -1].clamp(min=0)
    # inf where a matrix is not finite
    return torch.where(trace.isfinite(), finite + matrices.shape[1] * 2.0**-48 * trace, torch.inf)


def ritz_value(matrix: Tensor) -> float:
    """Return a close lower bound on a symmetric matrix's largest eigenvalue, by Lanczos iteration from a fixed random
    vector. Every step reorthogonalises fully (Golub and Van Loan, Matrix Computations, 10.3.5)."""
    size = matrix.shape[0]
    scaled = (matrix / matrix.trace()).float()  # half the memory, and exact enough for a guess
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


@cache
def onednn_linear() -> Any:
    """Return torch's oneDNN linear for fp32. Return None if there is none or if it rounds inputs to TF32 or bf16."""
    with torch._C._DisableTorchDispatch():  # observers of a model's operations need not see these
        x = torch.full((2, 64), 1 + 2.0**-12)
        try:
            linear = torch.ops.mkldnn._linear_pointwise.default
            exact = bool((linear(x, torch.ones_like(x), None, "none", [], "") == 64 + 2.0**-6).all())
        except (AttributeError, RuntimeError):
            return None
    return linear if exact else None


def times_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return left·rightᵀ, computed by oneDNN for fp32 on the CPU. left: [m, k], right: [n, k], both contiguous."""
    linear = onednn_linear() if left.dtype == torch.float32 and left.device.type == "cpu" else None
    if linear is None:
        return left @ right.t()
    return linear(left, right, None, "none", [], "")
