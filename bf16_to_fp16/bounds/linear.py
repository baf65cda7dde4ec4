"""Bounds of linear maps on a norm's output, a vector n with ‖n‖₂ ≤ √d, times a gain, plus a shift.

Let A be a weight W times the gain. Output i of a linear is then at most √d·‖A_i‖ (Cauchy-Schwarz), where A_i is a row.
A shift and a bias add at most |W·shift + bias|."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .arithmetic import COMPUTED, UNIT, UNIT32, Arithmetic, full_precision, growth, norm_units
from .factored import Factored, chunks, working_dtype

NORM_ERROR = 2.0**-10  # relative error allowed to a LayerNorm in fp32, on inputs that vary


@dataclass(frozen=True)
class NormOutput:
    """The possible outputs of a norm, with rounding: gain∘n + shift + error, with ‖n‖₂ ≤ ``radius``. Each component of
    the error is at most ``relative``·(|gain·n| + |shift|) + ``absolute``. Vectors are fp64 [d]."""

    gain: Tensor
    shift: Tensor | None
    radius: float
    relative: float
    absolute: Tensor
    most: Tensor | None = None  # a second bound of each component

    def scaled(self, factor: float, arithmetic: Arithmetic) -> NormOutput:
        """Return the norm's output multiplied by a factor and rounded once more."""
        if factor == 1.0:
            return self
        return NormOutput(
            self.gain * factor,
            None if self.shift is None else self.shift * factor,
            self.radius,
            self.relative * (1 + arithmetic.unit) + arithmetic.unit,
            self.absolute * factor * (1 + arithmetic.unit) + arithmetic.tiny,
        )

    @property
    def exact(self) -> Tensor:
        """The bound of each component before any rounding, fp64 [d]."""
        largest = self.gain.abs() * self.radius
        return largest if self.shift is None else largest + self.shift.abs()

    @property
    def bound(self) -> Tensor:
        """The bound of each component, rounding included, fp64 [d]."""
        bound = (self.exact * (1 + self.relative) + self.absolute) * COMPUTED
        return bound if self.most is None else torch.minimum(bound, self.most)

    @property
    def axes(self) -> Tensor:
        """The squared axes of an ellipsoid that contains the output of a norm without shift, fp64 [d]."""
        assert self.shift is None
        scaled, error = self.gain * self.radius * (1 + self.relative), self.absolute.square() * len(self.absolute)
        return summed_axes(scaled.square(), error)

    @property
    def length(self) -> float:
        """A bound of the output's ‖·‖₂: the sum of the largest lengths of gain∘n, shift and error (see the class)."""
        longest = float(self.gain.abs().max()) * self.radius
        longest += 0.0 if self.shift is None else float(self.shift.norm())
        return (longest * (1 + self.relative) + float(self.absolute.norm())) * COMPUTED


def summed_axes(one: Tensor, other: Tensor) -> Tensor:
    """Return the squared axes of an ellipsoid that contains each sum of a point in one ellipsoid and a point in
    another. one, other: their squared axes."""
    long, short = one.sum().sqrt(), other.sum().sqrt()
    if not (long > 0 and short > 0):
        return (one + other) * COMPUTED
    # By Cauchy-Schwarz (x + y)²/(a/p + b/(1 − p)) ≤ p·x²/a + (1 − p)·y²/b in each channel. Over all channels the right
    # sides add up to at most p + (1 − p) = 1, for every p. The p used gives the least sum of squared axes (Kurzhanski
    # and Vályi, Ellipsoidal calculus, 2.1).
    return (long + short) * (one / long + other / short) * COMPUTED


def enclosing_axes(caps: Tensor, length: float | Tensor) -> Tensor:
    """Return the squared axes [d] of an ellipsoid around all x with |x| ≤ ``caps``, ‖x‖₂ ≤ ``length``."""
    # The mean of Σ x²/(d·caps²) ≤ 1 and Σ x²/length² ≤ 1.
    box, ball = caps.square() * caps.numel(), length * length
    return box * (2 * ball / (box + ball)).nan_to_num(0.0) * COMPUTED


def stream_itself(axes: Tensor, caps: Tensor) -> NormOutput:
    """Return the residual stream, which is read without a norm, as a ``NormOutput`` of radius √d."""
    # ``axes``: squared axes of an ellipsoid that contains the rounded stream. ``caps``: bounds of its components.
    radius = math.sqrt(caps.numel())
    return NormOutput((axes.sqrt() / radius) * COMPUTED, None, radius, 0.0, torch.zeros_like(caps), caps)


def either(one: NormOutput, other: NormOutput) -> NormOutput:
    """Return one ``NormOutput`` that covers the outputs of two norms without shift. Its gain G is the larger one in
    each channel. So any gain∘n is G∘n' for an n' with ‖n'‖ ≤ ‖n‖."""
    assert one.shift is None and other.shift is None
    return NormOutput(
        torch.maximum(one.gain.abs(), other.gain.abs()),
        None,
        max(one.radius, other.radius),
        max(one.relative, other.relative),
        torch.maximum(one.absolute, other.absolute),
    )


def block_sums(source: NormOutput, terms: int, length: int, arithmetic: Arithmetic) -> tuple[Tensor, float]:
    """Return bounds of the sum of a norm's outputs over ``terms`` positions in a sequence of ``length`` positions. The
    first is of each component, fp64 [d]. The second is of the sum's ‖·‖₂. Partial sums have the same bounds."""
    # Stock code multiplies by a matrix of zeros and ones, so the terms are exact.
    a, grown = arithmetic, 1 + arithmetic.gamma(length)
    bound = a.summed(source.bound * terms * grown)
    longest = float(source.gain.abs().max()) * source.radius * (1 + source.relative) + float(source.absolute.norm())
    rounded = longest * terms * grown * (1 + a.unit) ** 2 * COMPUTED + a.floor * math.sqrt(source.gain.numel())
    return bound, min(float(bound.norm()), rounded)


@dataclass(frozen=True)
class LinearBound:
    """The bounds of a linear on a norm's output, one for each of its m rows. Vectors are fp64 [m]. Without rounding the
    output is ``matrix``·n + ``centre`` for a vector n with ‖n‖₂ ≤ ``radius``."""

    matrix: Factored  # weight times gain, [m, d]
    radius: float
    norms: Tensor  # radius·‖row‖
    centre: Tensor  # the output's constant part, from shift and bias
    error: Tensor  # bound of the output's error, by rounding of norm and linear
    bound: Tensor  # of the output, error included
    partial: Tensor  # bound of the output's partial sums

    def scaled_rows(self, lengths: Tensor | float) -> Factored:
        """Return ``matrix`` with its rows scaled to these lengths. A negative length negates a row; zero rows stay."""
        # Rows shorter than fp32's least number are 0 in any product.
        length = (self.norms / (self.radius * COMPUTED)).clamp(min=torch.finfo(torch.float32).tiny)
        return replace(self.matrix, rows=lengths / length)

    def split(self, rows: Sequence[int]) -> list[LinearBound]:
        """Return the bounds of each linear in a matrix that several linears share. rows: the number of rows of each."""
        vectors = (self.norms, self.centre, self.error, self.bound, self.partial)
        parts = zip(self.matrix.weight.split(rows), *(x.split(rows) for x in vectors), strict=True)
        # Without the weight's name, by which the whole matrix would be read again.
        return [LinearBound(Factored(weight, self.matrix.columns), self.radius, *own) for weight, *own in parts]


@dataclass(frozen=True)
class Projection:
    """The bounds of a sublayer's output projection, whose output is added to the residual stream."""

    bound: Tensor  # of each component, fp64 [d]
    partial: Tensor  # bound of each component's partial sums, fp64 [d]
    length: float  # bound of the output's ‖·‖₂


def rms_normalised(gain: Tensor, arithmetic: Arithmetic, *, once: bool = False) -> NormOutput:
    """Return the possible outputs of an RMS norm. gain: fp64 [d], with any offset that stock code adds to it. once:
    whether stock code rounds to fp16 only after it multiplies by the gain."""
    a, width = arithmetic, gain.numel()
    radius = math.sqrt(width)
    if not a.exact:
        radius *= (1 + (width + 16) * UNIT32) * a.norm_factor(width)
    if once and not a.norms16:
        # The sum of gain and offset, and the product: a unit of fp32 each.
        return NormOutput(gain, None, radius, a.unit * (1 + 2.0**-9), torch.full_like(gain, a.tiny))
    if once:
        # A norm in fp16 rounds its gain too, which is at most one more unit of the product.
        absolute = a.tiny * (gain.abs() * (1 + a.unit) + radius + 2)
        return NormOutput(gain, None, radius, 3 * a.unit * (1 + 2 * a.unit), absolute)
    # It rounds n itself, then the product with the gain.
    absolute = a.tiny * (gain.abs() * (1 + a.unit) + 1)
    return NormOutput(gain, None, radius, 2 * a.unit + a.unit**2, absolute)


def side_by_side(source: NormOutput, number: int, *, by_channel: bool) -> NormOutput:
    """Return ``number`` outputs of one norm as one vector. They are interleaved by channel with ``by_channel``, else
    concatenated. The radius follows from ‖(n₁, n₂, …)‖² ≤ number·radius²."""
    if number == 1:
        return source

    def each(values: Tensor) -> Tensor:
        return values.repeat_interleave(number) if by_channel else values.repeat(number)

    shift, radius = None if source.shift is None else each(source.shift), source.radius * math.sqrt(number)
    return NormOutput(each(source.gain), shift, radius, source.relative, each(source.absolute), each(source.bound))


def layer_normalised(gain: Tensor, shift: Tensor | None, mean: float, eps: float, arithmetic: Arithmetic) -> NormOutput:
    """Return the possible outputs of a LayerNorm for inputs with mean |x| up to ``mean``. gain, shift: fp64 [d]."""
    a = arithmetic
    radius = math.sqrt(gain.numel())
    if not a.exact:
        if a.norms16:
            # The mean is off by its sum's rounding in fp16, and with it all deviations, up to twice against their root
            # mean square.
            off = (growth(gain.numel()) - 1 + 3 * UNIT) * mean
            radius *= math.sqrt(1 + 4 * off * off / eps) * a.norm_factor(gain.numel())
        radius *= lengthened(mean, eps, gain.numel()) * (1 + NORM_ERROR)
    # It rounds once, after gain and shift.
    absolute = torch.full_like(gain, 2 * a.tiny)
    return NormOutput(gain, shift, radius, a.unit * (1 + 2.0**-9), absolute)


def lengthened(mean: float, eps: float, width: int) -> float:
    """Return the factor by which fp32 rounding can lengthen a LayerNorm's output beyond √``width``, for mean |x| up to
    ``mean``. The factor is inf if rounding can make the sum of the computed variance and ``eps`` 0 or negative."""
    # The mean and the standard deviation are off by at most e, ``norm_units`` of ``mean``. Let s be the exact
    # deviations' rms. The mean's error moves all deviations equally, so it is orthogonal to them. They are divided by
    # √(v + eps); the computed variance v is at least (s − e)² for s ≥ e. With t = s − e = τ√eps and q = e²/eps, the
    # output's mean square is at most (s² + e²)/(t² + eps) = (τ² + 2τ√q + 2q)/(τ² + 1), and so at most the larger
    # eigenvalue of ((1, √q), (√q, 2q)). For s < e it is at most 2q. Rounding can make v negative, to −(2⁻²⁴·mean)²/2.
    unit = UNIT32 * mean
    eps -= unit * unit / 2
    if eps <= 0:
        return math.inf
    q = (norm_units(width) * unit) ** 2 / eps
    return math.sqrt((1 + 2 * q + math.sqrt(1 + 4 * q * q)) / 2)


@full_precision()
def bound_linear(
    source: NormOutput, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic, name: str = ""
) -> LinearBound:
    """Return the bounds of a linear on a norm's output. weight: [m, d]. bias: [m]. name: the weight's name in the
    checkpoint, under which ``Spectra`` may keep results on it."""
    matrix = Factored(weight, source.gain, name=name)
    lengths = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in matrix.parts()]
    norms = source.radius * torch.cat(lengths) * COMPUTED
    # The terms that do not depend on the input: signed in the result, absolute in partial sums.
    centre, spread, added = torch.zeros_like(norms), norms, torch.zeros_like(norms)
    computed = torch.zeros_like(norms)
    if source.shift is not None:
        centre, magnitude = matrix_vector(weight, source.shift), magnitudes(weight, source.shift.abs())
        spread, computed = norms + magnitude * COMPUTED, magnitude * (COMPUTED - 1)
    if bias is not None:
        centre, added = centre + bias.double(), bias.double().abs()
    incoming = source.relative * spread + magnitudes(weight, source.absolute) * COMPUTED
    error = computed + incoming + arithmetic.gamma(weight.shape[1]) * (spread + incoming + added)
    exact = norms + centre.abs()
    error = error + 2 * arithmetic.unit * (exact + error) + arithmetic.floor
    return LinearBound(matrix, source.radius, norms, centre, error, exact + error, spread + added + error)


def bound_box(caps: Tensor, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> Tensor:
    """Return the bounds of a linear's outputs, fp64 [m], on any fp16 vector with components up to ``caps``, fp64 [n].
    They hold for partial sums too. weight: [m, n]. bias: [m]."""
    terms = magnitudes(weight, caps) * COMPUTED
    total = terms if bias is None else terms + bias.double().abs()
    total = total * (1 + arithmetic.gamma(weight.shape[1]))
    return total * (1 + 2 * arithmetic.unit) + arithmetic.floor


def matrix_vector(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix·vector, fp64 [m], with products and sums in fp64, a few rows at a time."""
    return torch.cat([part.double() @ vector.double() for part in chunks(matrix)])


@full_precision()
def magnitudes(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return an upper bound of |matrix|·vector for a vector without negative entries, fp64 [m], or [m, k] from [d,
    k]."""
    if not vector.any():
        return vector.new_zeros(len(matrix), *vector.shape[1:])
    dtype = working_dtype(matrix)
    limits, terms = torch.finfo(dtype), matrix.shape[1] + 2
    top = vector.to(dtype)
    sums = torch.cat([part.to(dtype).abs() @ top for part in chunks(matrix)]).double()
    # A sum of n rounded products without negative terms is off by at most γ of n + 2 terms (Higham, Accuracy and
    # Stability of Numerical Algorithms, 3.1), besides underflow.
    return sums * (1 + 2 * terms * limits.eps) + terms * limits.tiny


def row_norms(matrix: Tensor) -> Tensor:
    """Return ‖row‖₂ of every row, computed in fp64."""
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in chunks(matrix)]
    return torch.cat(norms) if norms else matrix.new_zeros(0, dtype=torch.float64)


def column_norms(matrix: Tensor) -> Tensor:
    """Return ‖column‖₂ of every column, computed in fp64."""
    total = torch.zeros(matrix.shape[1], dtype=torch.float64)
    for part in chunks(matrix):
        total += part.double().square().sum(0)
    return total.sqrt()


def squared_matrix_vector(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return the matrix of squared entries times a vector, fp64 [m], computed in fp64."""
    return torch.cat([part.double().square() @ vector for part in chunks(matrix)])


def knapsack(values: Tensor, caps: Tensor, budget: float | Tensor) -> Tensor:
    """Return the maximum of Σ v_i·s_i over 0 ≤ s_i ≤ cap_i and Σ s_i ≤ ``budget`` for each row v of ``values``, as [m].
    values: [m, n], without negative entries. caps: [n], positive."""
    count = min(values.shape[1], math.ceil(number(budget) / number(caps.min())) + 1)
    top = values.topk(count, dim=1)
    taken = caps[top.indices]
    fill = torch.minimum((budget - (taken.cumsum(1) - taken)).clamp(min=0), taken)
    return (top.values * fill).sum(1)


def in_ball(values: Tensor, caps: Tensor, square: float | Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a bound, [m], of max Σ v_i·s_i over 0 ≤ s_i ≤ cap_i and ‖s‖₂² ≤ square, for every row v of ``values``."""
    with torch.no_grad():
        start = (values.norm(dim=1) / (2 * math.sqrt(max(number(square), 1e-30)))).clamp(min=1e-30)
        best = start
        # By Lagrange duality, λ·square + Σ max_s (v·s − λ·s²) is a bound for every λ > 0. It is least where the
        # maximising s has ‖s‖² = square. This ‖s‖² is concave and piecewise linear in λ⁻², so Newton's method descends
        # to the best λ from the one without caps. Gradients treat λ as a constant (envelope theorem).
        for _ in range(14):
            wanted = values / (2 * best[:, None])
            squares = torch.minimum(wanted, caps).square()
            used, capped = squares.sum(1), (squares * (wanted >= caps)).sum(1)
            room = (square - capped).clamp(min=1e-30)
            step = ((used - capped).clamp(min=0) / room).sqrt().clamp(max=1)
            best = torch.maximum(best * step, start * 2.0**-20)
            if bool((step > 1 - 2.0**-10).all()):  # a λ so near would raise the maximum by less than 1 in a million
                break
        chosen = torch.minimum(values / (2 * best[:, None]), caps)
    gained = (values * chosen - best[:, None] * chosen.square()).sum(1, dtype=dtype)
    whole = matrix_vector(values, caps) if dtype == torch.float64 else values @ caps
    return torch.minimum(best.to(dtype) * square + gained, whole)


def number(value: float | Tensor) -> float:
    """Return a value as a float, without its gradient."""
    return float(value.detach()) if isinstance(value, Tensor) else value


def products_of_rows(rows: Tensor) -> Tensor:
    """Return G, fp64 [n, n], such that G − rows·rowsᵀ is positive semidefinite, for fp64 rows [n, d]."""
    products = rows @ rows.t()
    products.diagonal().add_(products.trace() * sum(rows.shape) * 2.0**-50)
    return products


def root_of(matrix: Tensor) -> Tensor:
    """Return a matrix L such that L·Lᵀ − matrix is positive semidefinite, for a positive semidefinite fp64 matrix."""
    # Several times Cholesky's error (Higham, Accuracy and Stability of Numerical Algorithms, theorem 10.3).
    raised = matrix.clone()
    raised.diagonal().add_(matrix.shape[0] * 2.0**-48 * matrix.trace())
    root, failed = torch.linalg.cholesky_ex(raised)
    if int(failed):  # as with squares that underflow in fp64
        root = raised.trace().sqrt() * torch.eye(len(matrix), dtype=matrix.dtype)
    return root


def balanced(divided: Tensor, multiplied: Tensor) -> Tensor:
    """Return scales s = √(divided/multiplied), so that ``divided``/s and ``multiplied``·s are equal in each channel. A
    scale is 1 where either of the two is 0. divided, multiplied: sizes of the channels of a product's two factors."""
    usable = (divided > 0) & (multiplied > 0)
    return torch.where(usable, (divided / multiplied.clamp(min=1e-300)).sqrt(), 1.0).clamp(1e-12, 1e12)


def outer_scaled(matrix: Tensor, factors: Tensor) -> Tensor:
    """Return diag(factors)·matrix·diag(factors)."""
    return matrix * factors[:, None] * factors[None, :]


def quadratic(matrix: Tensor, vector: Tensor) -> float:
    """Return √(vᵀGv) for a Gram matrix G and a vector v."""
    return math.sqrt(max(0.0, float(vector @ matrix @ vector)))


def table_of(table: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return each channel's largest |x| and mean square in an embedding, fp64 [d] each, and the largest ‖row‖₂."""
    amax = torch.zeros(table.shape[1], dtype=torch.float64)
    square = torch.zeros(table.shape[1], dtype=torch.float64)
    length = 0.0
    for part in chunks(table):
        squares = part.double().square()
        amax = torch.maximum(amax, part.abs().amax(0).double())
        square += squares.sum(0)
        length = max(length, float(squares.sum(1).max()))
    return amax, square / max(1, table.shape[0]), math.sqrt(length)
