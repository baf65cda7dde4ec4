"""Bounds of a feed-forward: its neurons, gated or plain, and its output projection.

Scale the value of each neuron to at most 1, and the neuron's column of the output projection by the inverse. Let û and
ŵ be the rows of gate and linear, divided by their lengths, and λmax the largest eigenvalue.

Gated: the neurons' values sum to at most M = ½·λmax(Σ ûûᵀ + ŵŵᵀ). So an output of the projection is at most the sum of
the ⌈M⌉ largest magnitudes in its row of the projection's weight. Plain: the neurons' values form a vector v with
‖v‖₂² ≤ λmax(Σ ŵŵᵀ). So an output is at most the largest product of its row with any such v."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .activations import LOWEST, STEEPEST
from .arithmetic import COMPUTED, Arithmetic, full_precision
from .factored import Factored, Tall, chunks, working_dtype
from .linear import LinearBound, Projection, column_norms, in_ball, knapsack, magnitudes, matrix_vector, row_norms
from .spectral import Spectra, largest_eigenvalues, product_of_rows

HEAVIEST = 8  # neurons behind a gate that get an eigenvalue together, for every row of the output

WORTH_REFINING = 2.0**0.25
"""How far a row must exceed the others to get its own eigenvalue; below that the largest bound would fall by less."""


def homogeneous(one: LinearBound, other: LinearBound) -> tuple[LinearBound, LinearBound]:
    """Return two linears on one norm's output with their constant parts moved into the matrices. A constant part, from
    shift and bias, becomes one more column of ``matrix``. The field ``centre`` of both results is 0."""
    assert one.radius == other.radius
    norms, centres = torch.cat([one.norms, other.norms]), torch.cat([one.centre, other.centre]).abs()
    share = min(max(float(centres.sum()) / max(float(norms.sum()), 1e-300), 2.0**-20), 2.0**20)
    # A·n + c is the map (A, c/s) of (n, s), whose length is at most √(radius² + s²), for every s. If the bounds of A·n
    # and c have the same ratio in all rows, this s makes a row's bound the sum of both.
    length = one.radius * math.sqrt(share)
    radius = math.hypot(one.radius, length)

    def joined(linear: LinearBound) -> LinearBound:
        weight, column = linear.matrix.weight, linear.centre[:, None]
        if not torch.equal(column.to(weight.dtype).double(), column):
            weight = weight.double()
        weight = torch.cat([weight, column.to(weight.dtype)], 1)
        columns = torch.cat([linear.matrix.columns, torch.full((1,), 1 / length, dtype=torch.float64)])
        norms = radius * torch.hypot(linear.norms / linear.radius, linear.centre / length * COMPUTED)
        # Without the weight's name: no other checkpoint holds this matrix.
        return replace(linear, matrix=Factored(weight, columns), radius=radius, norms=norms, centre=0 * linear.centre)

    return joined(one), joined(other)


def bytes_of(*vectors: Tensor) -> tuple[bytes, ...]:
    return tuple(vector.numpy().tobytes() if vector.any() else b"" for vector in vectors)


class GatedNeurons:
    """Bounds of gated neurons Φ(x)·x·y on a norm's output n, where x = u·n is the gate and y = w·n the linear. Biases
    are included. Every activation is Φ(x)·x with 0 ≤ Φ ≤ 1. The methods bound out·neurons, where ``out`` is one or all
    rows of the output projection's weight. The attribute ``scale`` grows with the length of n. ``unit_rows`` and
    ``unit_row`` return bounds divided by ``scale``, so these results can be reused for every length of n. keep: the
    number by which dropout divides the neurons' outputs, 1 without dropout."""

    def __init__(
        self, gate: LinearBound, other: LinearBound, arithmetic: Arithmetic, keep: float, spectra: Spectra
    ) -> None:
        a, centres = arithmetic, bytes_of(gate.centre, other.centre)
        if gate.centre.any() or other.centre.any():
            gate, other = homogeneous(gate, other)
        # ``rows`` bounds neurons of both signs, so ``depth`` is 0.
        self.gate, self.other, self.keep, self.depth, self.spectra = gate, other, keep, 0.0, spectra
        # Results at a scale of 1 are kept for norms' outputs of every length, and every arithmetic.
        self.scale = gate.radius * other.radius / keep
        self.given = (*bytes_of(gate.matrix.columns, other.matrix.columns), *centres, math.isfinite(self.scale))
        scale = gate.norms * other.norms
        pairs = zip(gate.matrix.parts(), other.matrix.parts(), strict=True)
        self.products = torch.cat([(left * right).sum(1, dtype=torch.float64) for left, right in pairs])
        cosine = self.products * gate.radius * other.radius
        self.cosine = (cosine / scale.clamp(min=1e-300)).clamp(-1, 1)
        # (u·n)(w·n) ≤ d(‖u‖‖w‖ + |u·w|)/2 for ‖n‖₂ ≤ √d, and 0 ≤ Φ ≤ 1.
        self.caps = ((1 + self.cosine.abs()) / 2 * COMPUTED).clamp(0.5, 1)
        self.size = scale / keep
        product = scale * self.caps
        # Errors of x and y, then of the activation (two roundings) and the product (one), and of dropout.
        factor = (1 + 2 * a.unit) * (1 + a.unit) - 1
        self.crossed = gate.error * other.error
        off = gate.norms * other.error + other.norms * gate.error + self.crossed
        absolute = 2 * a.tiny * (other.norms + other.error) * (1 + a.unit) + a.tiny
        self.undropped = (product + off) * (1 + factor) + absolute  # bounds before dropout, fp64 [neurons]
        if keep != 1.0:
            factor = (1 + factor) * (1 + a.unit) - 1
            absolute = absolute * (1 + a.unit) / keep + a.tiny
        self.factor, self.absolute = factor, absolute
        self.bound = (product + off) / keep * (1 + factor) + absolute  # after it
        blocks = ((gate.scaled_rows(1.0),), (other.scaled_rows(1.0),))
        both = Tall(blocks, other.matrix.name, math.sqrt(2 * len(scale)) * COMPUTED)
        self.budget = spectra.largest(both) / 2 * COMPUTED

    def rows(self, out: Tensor, label: str) -> tuple[Tensor, Tensor]:
        """Return upper bounds, fp64 [d], of r·z and −r·z for each row r of ``out`` and the neurons' exact outputs z."""
        # ``label`` names ``out`` in the results that ``spectra`` keeps.
        both = self.spectra.once((label, self.given), lambda: self.unit_rows(out)) * self.scale
        return both, both

    def unit_rows(self, out: Tensor) -> Tensor:
        """Return a bound of |out·neurons|/``scale`` for each row of ``out``, fp64 [d]."""
        dtype = working_dtype(out)
        unit_size = self.size / self.scale
        caps, size = self.caps.to(dtype), unit_size.to(dtype)
        top = out.amax(0).maximum(-out.amin(0)).double() * unit_size
        heaviest = top.topk(min(HEAVIEST, len(top))).indices
        unit = torch.cat([linear.scaled_rows(1.0).chosen(heaviest) for linear in (self.gate, self.other)])
        cosines = unit @ unit.t()

        def largest_sum(values: Tensor) -> Tensor:
            return torch.minimum(knapsack(values, caps.double(), self.budget), matrix_vector(values, caps))

        best = []
        for part in chunks(out):
            values = part.to(dtype).abs() * size
            together = largest_sum(values)
            # Σ v·|x·y| ≤ ½ Σ v·(x̂² + ŷ²).
            roots = (part[:, heaviest].double().abs() * unit_size[heaviest]).sqrt().repeat(1, 2)
            shared = largest_eigenvalues(cosines * roots[:, :, None] * roots[:, None, :]) / 2
            values[:, heaviest] = 0
            best.append(torch.minimum(together, shared + largest_sum(values)))
        return torch.cat(best) * COMPUTED

    def row(self, out: Tensor, number: int) -> float:
        """Return a bound of |out·z| for the neurons' exact outputs z and for ``out``, the row of index ``number``."""
        return self.spectra.once((number, self.given), lambda: self.unit_row(out, number)) * self.scale

    def unit_row(self, out: Tensor, number: int) -> float:
        """Return a bound of |out·neurons|/``scale`` for one row ``out``. number: the row's index."""
        wide = out.double()
        values = wide.abs() * self.size / self.scale
        roots, length = (values / 4).sqrt(), math.sqrt(float(values.sum())) * COMPUTED
        u = self.gate.scaled_rows(roots)
        # x·y = ((x̂ + ŷ)² − (x̂ − ŷ)²)/4, so the positive part of ±x·y is at most a single square. An eigenvalue bounds
        # the sum of these squares, weighted by ``values``.
        best = 0.0
        for sign in (1, -1):
            w = self.other.scaled_rows(sign * roots * wide.sign())
            label = f"{self.other.matrix.name} {number} {sign}" if self.other.matrix.name else ""
            best = max(best, self.spectra.largest(Tall(((u, w),), label, length)))
        # Five roundings of each element of u and w at most: a matrix whose norm is within its Frobenius norm.
        off = 3 * torch.finfo(working_dtype(self.other.matrix)).eps * length
        return (math.sqrt(best) + off) ** 2 * COMPUTED

    def least(self, out: Tensor) -> float:
        """Return a lower limit of ``row``'s results: the largest bound of |out_i·z_i| over the neurons' outputs z_i."""
        return float((out.double().abs() * self.size * self.caps).max())

    def row_errors(self, out: Tensor, exact: Tensor) -> Tensor:
        """Return bounds of the error in out·neurons that comes from rounding the neurons, for each row, fp64 [d].
        exact: for each row, a bound of |out·neurons| without this error (from ``rows``)."""
        keep, dtype = self.keep, working_dtype(out)
        gate_off, other_off = self.other.norms * self.gate.error / keep, self.gate.norms * self.other.error / keep
        root = math.sqrt(2 * self.budget)
        rest = self.crossed / keep * (1 + self.factor) + self.absolute
        plain, rest = magnitudes(out, torch.stack([gate_off + other_off, rest], 1)).unbind(1)
        # Not all |x| are large at once: Σ x̂² ≤ λmax(Σ ûûᵀ) ≤ 2M.
        squares = torch.stack([gate_off, other_off], 1).square()
        lengths = [part.to(dtype).double().square() @ squares for part in chunks(out)]
        ball = root * torch.cat(lengths).sqrt().sum(1)
        return (torch.minimum(plain, ball) * (1 + self.factor) + rest) * COMPUTED + self.factor * exact


class PlainNeurons:
    """Bounds of neurons without a gate: act(x), x = w·n + c, on a norm's output n. Here −m ≤ act(x) ≤ max(x, 0), with m
    from ``LOWEST``. The methods do the same as in ``GatedNeurons``."""

    def __init__(
        self, linear: LinearBound, activation: str, arithmetic: Arithmetic, keep: float, spectra: Spectra
    ) -> None:
        a = arithmetic
        self.linear, self.spectra, self.scale = linear, spectra, linear.radius / keep
        self.given = (*bytes_of(linear.matrix.columns, linear.centre), activation, keep, math.isfinite(self.scale))
        self.lowest = LOWEST[activation]
        self.depth = self.lowest / keep  # ``rows`` counts it for negative weights only
        size = linear.norms.clamp(min=1e-300)
        self.caps = ((linear.norms + linear.centre.clamp(max=0)).clamp(min=0) / size).clamp(max=1)
        self.offset = linear.centre.clamp(min=0) / keep
        self.size = linear.norms / keep
        rounding = 0.0 if activation == "relu" else 2 * a.unit
        top = torch.maximum(linear.norms + linear.centre, torch.full_like(linear.norms, self.lowest)).clamp(min=0)
        self.error = STEEPEST[activation] * linear.error
        self.error = self.error + rounding * (top + self.error) + (2 * a.tiny if rounding else 0.0)
        self.undropped = top + self.error
        if keep != 1.0:
            self.error = self.error / keep * (1 + a.unit) + a.unit * top / keep + a.tiny
        self.bound = top / keep + self.error
        rows = Tall(((linear.scaled_rows(1.0),),), linear.matrix.name, math.sqrt(len(size)) * COMPUTED)
        self.budget = spectra.largest(rows) * COMPUTED

    def rows(self, out: Tensor, label: str) -> tuple[Tensor, Tensor]:
        moving, still = self.spectra.once((label, self.given), lambda: self.unit_rows(out))  # for w·n; for c and m
        moving = moving * self.scale
        if bool((self.caps < 1).any()):
            moving = torch.minimum(moving, torch.stack([self.capped_moving(out, direction) for direction in (1, -1)]))
        up, down = (moving + still) * COMPUTED
        return up, down

    def unit_rows(self, out: Tensor) -> Tensor:
        """Return a and b such that ``scale``·a + b is an upper bound of r·z, for each row r of ``out``. Here z are the
        neurons' exact outputs act(w·n + c)/keep on a norm's output n. At n = 0, b alone is such a bound. The result is
        fp64 [2, 2, d], with a at [0] and b at [1]. In each of the two, [0] is for bounds of r·z and [1] for −r·z."""
        dtype = working_dtype(out)
        size, ones = (self.size / self.scale).to(dtype), torch.ones_like(self.caps).to(dtype)
        matrix = self.linear.matrix.columns_first(dtype)
        pairs = []
        for direction in (1, -1):
            for many in chunks(out, 1 << 21):  # as many rows as make a good matrix product
                lengths = row_norms(product_of_rows((many.to(dtype) * direction).clamp_(min=0), matrix))
                parts = list(chunks(many))
                for narrow, straight in zip(parts, lengths.split([len(x) for x in parts]), strict=True):
                    part = narrow.to(dtype) * direction
                    positive = part.clamp(min=0)
                    values = positive * size
                    ball = in_ball(values, ones, self.budget)
                    # Σ c·max(x, 0) = ½ (Σ c·x + Σ c·|x|).
                    moving = torch.minimum((straight + self.product_error(values) + ball) / 2, ball)
                    below = (positive - part).sum(1, dtype=torch.float64) * self.depth
                    pairs.append(torch.stack([moving, matrix_vector(positive, self.offset) + below]))
        return torch.cat(pairs, 1).view(2, 2, -1)

    def capped_moving(self, out: Tensor, direction: int) -> Tensor:
        """Return x, fp64 [d], such that x + b is an upper bound of ``direction``·(r·z) for each row r of ``out``. Here
        b and z are as in ``unit_rows``. If any c are negative, x can be less than the ``scale``·a of ``unit_rows``.
        direction: 1 or −1."""
        dtype = working_dtype(out)
        caps, size = self.caps.to(dtype), self.size.to(dtype) * direction
        return torch.cat([in_ball((x.to(dtype) * size).clamp_(min=0), caps, self.budget) for x in chunks(out)])

    def row(self, out: Tensor, number: int) -> float:
        sides = self.spectra.once(
            (number, self.given), lambda: [self.unit_row(out, number, direction) for direction in (1, -1)]
        )
        return max(0.0, *(moving * self.scale + still for moving, still in sides)) * COMPUTED

    def unit_row(self, out: Tensor, number: int, direction: int) -> tuple[float, float]:
        """Return a and b such that ``scale``·a + b is an upper bound of ``direction``·(out·z) for one row ``out``. Here
        z are the neurons' exact outputs act(w·n + c)/keep on a norm's output n. At n = 0, b alone is such a bound.
        number: the row's index. direction: 1 or −1."""
        name, dtype = self.linear.matrix.name, working_dtype(self.linear.matrix)
        positive = (out * direction).clamp(min=0).double()
        values = positive * self.size / self.scale
        total = float(values.sum())
        label = f"{name} {number} {direction}" if name else ""
        rows = Tall(((self.linear.scaled_rows(values.sqrt()),),), label, math.sqrt(total) * COMPUTED)
        ball = math.sqrt(total * self.spectra.largest(rows))
        row, product, start = positive.to(dtype), torch.zeros(len(self.linear.matrix.columns), dtype=dtype), 0
        for part in self.linear.matrix.parts():
            product += row[start : start + len(part)] @ part
            start += len(part)
        straight = float(torch.linalg.vector_norm(product, dtype=torch.float64)) + float(
            self.product_error(values.to(dtype)[None])
        )
        below = (out * direction).double().clamp(max=0).abs().sum() * self.depth
        return min(ball, (straight + ball) / 2), float(positive @ self.offset + below)

    def least(self, out: Tensor) -> float:
        return 0.0

    def row_errors(self, out: Tensor, exact: Tensor) -> Tensor:
        return magnitudes(out, self.error) * COMPUTED

    def product_error(self, values: Tensor) -> Tensor:
        """Return bounds, [k], of the length of the rounding error of k vectors. Each vector is Σ f_i·w_i, where w_i are
        the rows of the linear's matrix. values: |f_i|·‖w_i‖ for each vector, [k, neurons], in the sums' dtype."""
        unit = 2.0**-52 if values.dtype == torch.float64 else 2.0**-23
        return values.sum(1, dtype=torch.float64) * values.shape[1] * unit


Neurons = GatedNeurons | PlainNeurons  # the inner signals of a feed-forward


@full_precision()
def feed_forward_output(
    neurons: Neurons, weight: Tensor, bias: Tensor | None, refine: int, arithmetic: Arithmetic
) -> Projection:
    """Return the bounds of a feed-forward's output projection. weight: [d, neurons]. bias: [d]. refine: for how many
    rows of ``weight`` the slow method ``neurons.row`` may be called, to tighten the largest bounds."""
    a = arithmetic
    added = torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double().abs()
    up, down = neurons.rows(weight, "output")
    error = neurons.row_errors(weight, torch.maximum(up, down))

    def whole(exact: Tensor, off: Tensor, extra: Tensor) -> Tensor:
        summed = (exact + off) * COMPUTED + extra
        return a.summed(summed * (1 + a.gamma(weight.shape[1])))

    bound = whole(torch.maximum(up, down), error, added)
    # The largest bound cannot fall below this with ``refine`` rows refined.
    rest = float(bound.sort(descending=True).values[refine]) if refine < len(bound) else 0.0
    done: set[int] = set()
    for _ in range(min(refine, len(bound))):
        row = int(bound.argmax())
        if row in done or float(bound[row]) <= max(rest, neurons.least(weight[row])) * WORTH_REFINING:
            break
        done.add(row)
        better = torch.tensor([neurons.row(weight[row], row)], dtype=torch.float64)
        at = slice(row, row + 1)
        bound[row] = torch.minimum(bound[at], whole(better, error[at], added[at]))[0]
    return Projection(bound, bound, output_length(neurons, weight, bias, arithmetic))


def output_length(neurons: Neurons, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> float:
    """Return an upper bound on the length ‖·‖₂ of a feed-forward's output."""
    a = arithmetic
    # ‖W·x‖ ≤ Σ ‖column_i‖·|x_i|: one more row, of column lengths.
    columns = column_norms(weight)[None] * COMPUTED
    up, _ = neurons.rows(columns, "length")
    length = float(up + neurons.row_errors(columns, up))
    length += neurons.depth * float(columns.sum())
    length *= (1 + a.gamma(weight.shape[1])) * (1 + a.unit) ** 2
    if bias is not None:
        length += float(bias.double().norm()) * (1 + a.unit) ** 2
    return length + a.floor * math.sqrt(weight.shape[0])
