"""The certificate: a bound on every signal of a model, for every input, from its weights alone.

A norm makes a vector of known length out of whatever enters it: n with ‖n‖₂ ≤ √d, times the gain. So every sublayer
has a bounded input, and each of its signals a bound that no input can pass; the residual stream is the embedding plus
what every sublayer can add to it. The bounds hold for the values that fp16 arithmetic really computes: each rounding
is allowed for, and as an additive term, because a sum of large products that cancel can be off by more than any
multiple of the sum. What is covered is stated by ``Arithmetic``.

The bounds, with A the weight times the gain, b_i = √d·‖A_i‖ for its rows:

- a linear on a norm: b_i, plus |A·shift + bias| after a LayerNorm (Cauchy-Schwarz);
- scores: the spectral norm of AqᵀAk per head; the attention's output: Σ over heads of √d·‖O_i Av‖, since attention
  weights are convex;
- neurons of a gate: max (u·n)(w·n) = d(‖u‖‖w‖ + u·w)/2 on the sphere, and an activation x·Φ(x) with 0 ≤ Φ ≤ 1;
- the feed-forward's output: no input maximises all neurons at once. With neurons scaled to at most 1, their sum is at
  most M = ½·λmax(Σ ûûᵀ + ŵŵᵀ), so a row's bound is the sum of its M largest entries (gated), or the maximum over a
  ball of radius √λmax(Σ ŵŵᵀ) (plain). Rows that set a layer's maximum get an eigenvalue of their own.

Cauchy-Schwarz and sums of absolute values also bound every *partial* sum, which kernels that split a reduction round
to fp16; cancelling bounds do not, so both are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import open_checkpoint
from .environment import SCHEMA, environment
from .errors import UserError
from .families import resolve
from .families.types import Attention, Ends, FeedForward, Layout, TensorSource, value
from .numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT, headroom_bits
from .observe import ChannelRange, ModuleRange, NormRange, ScoreRange
from .proof import uncertified_rows
from .spectral import gram, largest_eigenvalue, working_dtype
from .talk import Talk

UNIT = 2.0**-11
"""Largest relative error of rounding to a normal fp16 number."""

TINY = 2.0**-25
"""Largest absolute error of rounding to a subnormal fp16 number."""

UNIT32 = 2.0**-24
"""The same as ``UNIT`` for fp32, in which kernels accumulate."""

MAX_LENGTH = 32768
"""Positions for which a certificate holds unless it is asked for another number."""

SPLITS = 8
"""Partial sums of one reduction that a kernel may round to fp16 and add in fp16."""

REFINED_ROWS = 4
"""Rows of one feed-forward output that get an eigenvalue of their own."""

NORM_ERROR = 2.0**-10
"""Relative error allowed to what a LayerNorm computes in fp32, on inputs that vary."""

NORM_ULPS = 4
"""Units of 2⁻²⁴ of the mean magnitude that a LayerNorm's deviations from the mean, and its standard deviation, may be
off by; the latter may be as small as √eps: inputs almost the same in every channel. Kernels measured here stay under
2."""

HOPELESS = 2.0**62
"""Weights from here on cannot be planned for: three exponents of 24 meet in one at most, and squares overflow fp32."""

COMPUTED = 1 + 2.0**-18
"""What the bounds are multiplied with for the rounding of their own computation in fp32 and fp64."""

LOWEST = {"relu": 0.0, "gelu": 0.17, "gelu_new": 0.1701, "silu": 0.2785, "swish": 0.2785}
"""How far below zero an activation goes, rounded up; all are x·Φ(x) with 0 ≤ Φ ≤ 1."""

STEEPEST = {"relu": 1.0, "gelu": 1.13, "gelu_new": 1.13, "silu": 1.1, "swish": 1.1}
"""Largest derivative of an activation, rounded up."""

Weights = Callable[[str], Tensor]
"""Gives a layout's tensor by name, with the values that are served."""


@dataclass(frozen=True)
class Arithmetic:
    """What a certificate holds for.

    Every operation's output is rounded to fp16 at most once; matrix products accumulate in fp32 in any order, or in up
    to ``splits`` partial sums that are rounded to fp16 and added in fp16; norms and softmax compute in fp32,
    LayerNorm from deviations (not E[x²] − E[x]²);
    sequences have at most ``max_length`` positions, of which each row of attention sees at least one. ``train``:
    dropout at the config's rates multiplies by 1/(1−p); neither the loss nor the backward pass is covered.
    ``planned``: leaves subnormals out and takes the residual stream as multiplied by 2 to this power, for weights that
    are still to be scaled by it. ``exact``: real arithmetic without any rounding.
    """

    max_length: int = MAX_LENGTH
    splits: int = SPLITS
    train: bool = False
    planned: int | None = None
    exact: bool = False

    @property
    def unit(self) -> float:
        """Relative error of one rounding to fp16."""
        return 0.0 if self.exact else UNIT

    @property
    def tiny(self) -> float:
        """Absolute error of one rounding to fp16 among the subnormals."""
        return 0.0 if self.exact or self.planned is not None else TINY

    @property
    def floor(self) -> float:
        """Absolute error of a matrix product: each partial sum and the result may be subnormal."""
        return (self.splits + 2) * self.tiny

    def gamma(self, terms: int) -> float:
        """Return the error of a sum of ``terms`` products relative to the sum of their absolute values."""
        return 0.0 if self.exact else (terms + 2) * UNIT32 + self.splits * UNIT

    @property
    def attention_sum(self) -> float:
        """Largest sum of one row of attention weights after rounding them."""
        if self.exact:
            return 1.0
        return (1 + UNIT) * (1 + (self.max_length + 8) * UNIT32) + self.max_length * TINY


@dataclass(frozen=True)
class Bound:
    """One site's bound: no input makes the value larger than ``bound``, nor a partial sum of it than ``partial``.

    ``name`` as the audit names the site; ``limit``: what both must stay under; ``kind``: which signal it is.
    """

    name: str
    kind: str
    bound: float
    partial: float
    limit: float = FP16_MAX

    @property
    def largest(self) -> float:
        """The larger of bound and partial sum."""
        return max(self.bound, self.partial)

    @property
    def holds(self) -> bool:
        """Whether the site cannot pass its limit."""
        return self.largest <= self.limit

    @property
    def headroom_bits(self) -> float:
        """log2(limit / largest)."""
        return headroom_bits(self.largest, self.limit)


@dataclass(frozen=True)
class Certificate:
    """The bounds of every site of a model, and what they hold for.

    ``ranges``: the same bounds by module and channel, as the planner takes them, with expected mean squares for
    normalised inputs that point anywhere. Not every site is a maximum of its own: ``at`` finds the bound of any site
    that an audit names.
    """

    sites: tuple[Bound, ...]
    arithmetic: Arithmetic
    ranges: Mapping[str, ModuleRange]
    inner: Mapping[str, float] = field(default_factory=dict)
    """Bounds of module inputs and weights, which copies and casts inside the module carry."""

    @property
    def holds(self) -> bool:
        """Whether no site can pass its limit."""
        return all(site.holds for site in self.sites)

    @property
    def headroom_bits(self) -> float:
        """log2(limit / bound) at the tightest site."""
        return min((site.headroom_bits for site in self.sites), default=math.inf)

    def at(self, name: str) -> float | None:
        """Return the bound of a site by the audit's name; None for one that the certificate does not know.

        Copies, casts, masks, clamps and dropout's own steps carry what is in their module; of repeated operations
        the largest counts.
        """
        by_name = {site.name: site.largest for site in self.sites}
        if name in by_name or name in self.inner:
            return max(by_name.get(name, 0.0), self.inner.get(name, 0.0))
        plain = name.split("#")[0]
        same = [v for n, v in by_name.items() if n.split("#")[0] == plain]
        if same:
            return max(same)
        path, _, operation = plain.partition(":")
        if operation and operation not in CARRYING:
            return None
        inside = [v for n, v in by_name.items() if within(n, path)]
        inside += [v for n, v in self.inner.items() if within(n, path)]
        return max(inside, default=None)

    def to_json(self, observed: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Return the ``certificate`` entry of the report; ``observed``: the largest value found at each site."""
        found = observed or {}
        return {
            "holds": self.holds,
            "headroom_bits": self.headroom_bits,
            "max_length": self.arithmetic.max_length,
            "splits": self.arithmetic.splits,
            "train_mode": self.arithmetic.train,
            "sites": [
                {
                    "name": s.name,
                    "kind": s.kind,
                    "bound": s.bound,
                    "partial": s.partial,
                    "limit": s.limit,
                    "headroom_bits": s.headroom_bits,
                    "observed": found.get(s.name),
                    "holds": s.holds,
                }
                for s in self.sites
            ],
        }


CARRYING = {"to", "clone", "cat", "where", "clamp", "mul", "div", "bernoulli", "native_dropout", "embedding", "add"}
"""Operations that only move, choose, limit or mask values of their module."""


def within(name: str, path: str) -> bool:
    """Return whether a site lies in the module ``path`` or below it."""
    return name == path or name.startswith((f"{path}:", f"{path}."))


@dataclass(frozen=True)
class Normalised:
    """A norm's output as arithmetic makes it: gain∘n + shift + error, with ‖n‖₂ ≤ ``radius``.

    ``gain``, ``shift``, ``absolute``: fp64 [d]. Each component of the error is at most ``relative``·(|gain·n| +
    |shift|) + ``absolute``.
    """

    gain: Tensor
    shift: Tensor | None
    radius: float
    relative: float
    absolute: Tensor

    def scaled(self, factor: float, arithmetic: Arithmetic) -> Normalised:
        """Return it multiplied by a number and rounded once more."""
        if factor == 1.0:
            return self
        return Normalised(
            self.gain * factor,
            None if self.shift is None else self.shift * factor,
            self.radius,
            self.relative * (1 + arithmetic.unit) + arithmetic.unit,
            self.absolute * factor * (1 + arithmetic.unit) + arithmetic.tiny,
        )

    @property
    def exact(self) -> Tensor:
        """Bound of each component without its error: fp64 [d]."""
        largest = self.gain.abs() * self.radius
        return largest if self.shift is None else largest + self.shift.abs()

    @property
    def bound(self) -> Tensor:
        """Bound of each component: fp64 [d]."""
        return (self.exact * (1 + self.relative) + self.absolute) * COMPUTED


@dataclass(frozen=True)
class Image:
    """What a linear makes of a normalised input, row by row; all fp64 [m].

    ``matrix``: weight times gain, [m, d]. ``norms``: radius·‖row‖. ``centre``: what the shift and the bias give.
    ``error``: largest difference from the exact value. ``bound``, ``partial``: of the result, of its partial sums.
    """

    matrix: Tensor
    radius: float
    norms: Tensor
    centre: Tensor
    error: Tensor
    bound: Tensor
    partial: Tensor

    def unit_rows(self) -> Tensor:
        """Return the rows scaled to length 1 (zero rows stay zero)."""
        return self.scaled_rows(torch.ones_like(self.norms))

    def scaled_rows(self, lengths: Tensor) -> Tensor:
        """Return the rows scaled to the given lengths, negative ones turned round (zero rows stay zero)."""
        length = (self.norms / (self.radius * COMPUTED)).clamp(min=torch.finfo(self.matrix.dtype).tiny)
        return self.matrix * (lengths / length).to(self.matrix.dtype)[:, None]


def image(source: Normalised, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> Image:
    """Return the bounds of a linear on a norm's output; weight [m, d], bias [m]."""
    dtype = working_dtype(weight.numel())
    weight = weight.to(dtype)
    matrix = weight * source.gain.to(dtype)
    norms = source.radius * row_norms(matrix) * COMPUTED
    # The terms that do not depend on the input: signed in the result, absolute in partial sums.
    centre, spread, added = torch.zeros_like(norms), norms, torch.zeros_like(norms)
    computed = torch.zeros_like(norms)
    if source.shift is not None:
        centre, magnitude = against(weight, source.shift), against(weight.abs(), source.shift.abs())
        spread, computed = norms + magnitude * COMPUTED, magnitude * (COMPUTED - 1)
    if bias is not None:
        centre, added = centre + bias.double(), bias.double().abs()
    incoming = source.relative * spread + magnitudes(weight, source.absolute) * COMPUTED
    error = computed + incoming + arithmetic.gamma(weight.shape[1]) * (spread + incoming + added)
    exact = norms + centre.abs()
    error = error + 2 * arithmetic.unit * (exact + error) + arithmetic.floor
    return Image(matrix, source.radius, norms, centre, error, exact + error, spread + added + error)


def against(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix·vector with products and sums in fp64, a few rows at a time: fp64 [m]."""
    return torch.cat([part.double() @ vector.double() for part in chunks(matrix)])


def magnitudes(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return an upper bound of |matrix|·vector for a vector of no negative entries: fp64 [m].

    Summed in the matrix's dtype: where no term is negative, a sum of n rounded products is off by at most γ of n + 2
    terms (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), besides what underflows.
    """
    limits, terms = torch.finfo(matrix.dtype), matrix.shape[1] + 2
    top = vector.to(matrix.dtype)
    sums = torch.cat([part.abs() @ top for part in chunks(matrix)]).double()
    return sums * (1 + 2 * terms * limits.eps) + terms * limits.tiny


def row_norms(matrix: Tensor) -> Tensor:
    """Return ‖row‖₂ of every row: fp64, computed in it."""
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in chunks(matrix)]
    return torch.cat(norms) if norms else matrix.new_zeros(0, dtype=torch.float64)


def column_norms(matrix: Tensor) -> Tensor:
    """Return ‖column‖₂ of every column: fp64, computed in it."""
    total = torch.zeros(matrix.shape[1], dtype=torch.float64)
    for part in chunks(matrix):
        total += part.double().square().sum(0)
    return total.sqrt()


def row_products(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner product of every row with the other matrix's: fp64 [m], summed in it."""
    pairs = zip(chunks(one), chunks(other), strict=True)
    return torch.cat([(left * right).sum(1, dtype=torch.float64) for left, right in pairs])


def squares_against(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return the squared entries of a matrix times a vector: fp64 [m], computed in it."""
    return torch.cat([part.double().square() @ vector for part in chunks(matrix)])


def knapsack(values: Tensor, caps: Tensor, budget: float) -> Tensor:
    """Return max Σ v_i·s_i over 0 ≤ s_i ≤ cap_i, Σ s_i ≤ budget, for every row of values: [m]. caps: [n], over 0."""
    count = min(values.shape[1], math.ceil(budget / float(caps.min())) + 1)
    top = values.topk(count, dim=1)
    taken = caps.double()[top.indices]
    fill = torch.minimum((budget - (taken.cumsum(1) - taken)).clamp(min=0), taken)
    return (top.values * fill).sum(1)


def in_ball(values: Tensor, caps: Tensor, square: float) -> Tensor:
    """Return an upper bound of max Σ v_i·s_i over 0 ≤ s_i ≤ cap_i, ‖s‖₂² ≤ square, for every row of values: [m].

    Lagrange duality: λ·square + Σ max_s (v·s − λ·s²) bounds it for every λ > 0; bisection finds a good one.
    """
    largest = (values.norm(dim=1) / (2 * math.sqrt(max(square, 1e-30)))).clamp(min=1e-30)
    low, high = largest * 2.0**-20, largest
    for _ in range(24):
        middle = low.sqrt() * high.sqrt()
        used = torch.minimum(values / (2 * middle[:, None]), caps).square().sum(1)
        low, high = torch.where(used > square, middle, low), torch.where(used > square, high, middle)
    chosen = torch.minimum(values / (2 * high[:, None]), caps)
    gained = (values * chosen - high[:, None] * chosen.square()).sum(1, dtype=torch.float64)
    return torch.minimum(high.double() * square + gained, against(values, caps))


class _Walk:
    """One pass over a layout, sublayer by sublayer; only one sublayer's weights are in memory."""

    def __init__(
        self,
        layout: Layout,
        weights: Weights,
        arithmetic: Arithmetic,
        limits: Mapping[str, float],
        refine: int,
        squares: bool,
    ) -> None:
        self.layout, self.arithmetic, self.limits, self.refine = layout, arithmetic, limits, refine
        self.squares = squares
        self.read = weights
        self.sites: dict[str, Bound] = {}
        self.inner: dict[str, float] = {}
        self.inputs: dict[str, tuple[Tensor, Tensor]] = {}
        self.outputs: dict[str, tuple[Tensor, Tensor]] = {}
        self.norms: dict[str, NormRange] = {}
        self.scores: dict[str, ScoreRange] = {}
        self.stream = torch.zeros(0)
        self.stream_square = torch.zeros(0)
        self.stream_norm = 0.0

    # -- the model --------------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[int, int], None] | None = None) -> Certificate:
        memory: tuple[Normalised, Tensor] | None = None
        done = 0
        for ends, sublayers in stacks(self.layout):
            self.begin(ends)
            for wiring in sublayers:
                if isinstance(wiring, Attention):
                    self.attention(wiring, memory)
                else:
                    self.feed_forward(wiring)
                done += 1
                if progress is not None:
                    progress(done, len(self.layout.wiring))
            final, square = self.norm(ends.norm)
            keep = self.kept("stream") if ends.dropouts else 1.0
            if keep != 1.0:
                final = final.scaled(1 / keep, self.arithmetic)
                self.note(f"{ends.dropouts[-1]}:mul", "norm", final.bound)
                self.dropout(ends.dropouts[-1], keep)
            memory = memory or (final, square)
            if ends is not self.layout.wiring[0]:
                self.head(final, square)
        paths = [*self.outputs, *(p for p in self.scores if p not in self.outputs)]
        empty = (torch.zeros(0), torch.zeros(0))
        ranges = {
            path: ModuleRange(
                channels(self.inputs.get(path, empty)),
                channels(self.outputs.get(path, empty)),
                self.norms.get(path),
                self.scores.get(path),
            )
            for path in paths
        }
        return Certificate(tuple(self.sites.values()), self.arithmetic, ranges, self.inner)

    def kept(self, what: str) -> float:
        """Return a lower bound of 1 over the factor that a dropout multiplies with; 1 outside training."""
        if not self.arithmetic.train:
            return 1.0
        key = self.layout.family.dropout[what]
        rate = float(str(value(self.layout.family, self.layout.config, key)))
        if not 0 <= rate < 1:
            raise UserError(f"config.json: {key!r} is {rate}, not a dropout rate; give a number from 0 to under 1")
        # Kernels may round the factor 1/(1−p) to fp16 before they multiply with it.
        return (1 - rate) / (1 + UNIT) if rate else 1.0

    def rounded(self, values: Tensor) -> Tensor:
        """Return a bound after one more rounding."""
        return values * (1 + self.arithmetic.unit) + self.arithmetic.tiny

    def longer(self, length: float, width: int) -> float:
        """Return a bound of ‖x‖₂ after one more rounding of each of its components."""
        return (length * (1 + self.arithmetic.unit) + self.arithmetic.tiny * math.sqrt(width)) * COMPUTED

    def summed(self, values: Tensor) -> Tensor:
        """Return a bound of a matrix product's result from that of the sum: at most two roundings, and the floor."""
        return values * (1 + self.arithmetic.unit) ** 2 + self.arithmetic.floor

    def note(self, name: str, kind: str, bound: Tensor | float, partial: Tensor | float | None = None) -> None:
        """Record a site; of one that runs twice (dropout at both ends of a stack) the larger counts."""
        top = largest(bound)
        sums = top if partial is None else largest(partial)
        before = self.sites.get(name)
        if before is not None:
            top, sums = max(top, before.bound), max(sums, before.partial)
        self.sites[name] = Bound(name, kind, top, sums, self.limits.get(kind, FP16_MAX))

    def tensor(self, name: str) -> Tensor | None:
        """Return a tensor, None where the model has none of this name."""
        if name not in self.layout.tensors:
            return None
        return self.checked(name, self.read(name))

    def checked(self, name: str, weight: Tensor) -> Tensor:
        """Record a tensor's largest entry; one that fp16 cannot hold becomes a site that fails."""
        low, high = (float(x) for x in torch.aminmax(weight)) if weight.numel() else (0.0, 0.0)
        path = name.rsplit(".", 1)[0]
        self.inner[f"{path}:{name.rsplit('.', 1)[-1]}"] = max(-low, high)
        if self.arithmetic.planned is not None and not max(-low, high) < HOPELESS:
            raise UserError(
                f"tensor {name}: weights are NaN or up to {max(-low, high):.3g}, which no exponent brings under 65504;"
                " use another revision of the checkpoint or repair the tensor"
            )
        if not (math.isfinite(low) and math.isfinite(high)):
            self.note(name, "weight", math.inf)
            weight = torch.nan_to_num(weight.float(), 0.0, FP16_MAX, -FP16_MAX)
        return weight

    def weight(self, path: str) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of a linear."""
        weight = self.tensor(f"{path}.weight")
        assert weight is not None
        return weight, self.tensor(f"{path}.bias")

    def dropout(self, path: str, keep: float) -> None:
        """Record the steps of a dropout in module ``path``: a mask of 0 and 1, divided by 1 − p."""
        self.inner[f"{path}:bernoulli"] = self.inner[f"{path}:div"] = (1 + UNIT) / keep

    # -- a stack ----------------------------------------------------------------------------------------------------

    def begin(self, ends: Ends) -> None:
        """Start the residual stream from the embedding: per channel its largest entry over the vocabulary."""
        family, config = self.layout.family, self.layout.config
        table = self.tensor(family.embedding)
        assert table is not None
        amax, square, length = table_of(table)
        self.note(f"{ends.embedding}:embedding", "embedding", amax)
        width = table.shape[1]
        if ends.scale and value(family, config, ends.scale):
            amax, square = self.rounded(amax * math.sqrt(width)), square * width
            length = self.longer(length * math.sqrt(width), width)
            self.note(f"{ends.at}:mul", "embedding", amax)
        self.outputs[ends.embedding] = (amax, square)
        if ends.positions:
            positions = self.tensor(ends.positions)
            assert positions is not None
            extra, extra_square, extra_length = table_of(positions)
            path = ends.positions.removesuffix(".weight")
            self.note(f"{path}:embedding", "embedding", extra)
            self.outputs[path] = (extra, extra_square)
            amax, square = self.rounded(amax + extra), square + extra_square
            length = self.longer(length + extra_length, width)
            self.note(f"{ends.at}:add", "residual", amax)
        keep = self.kept("stream")
        if keep != 1.0:
            amax, length = self.rounded(amax / keep), self.longer(length / keep, width)
            path = ends.dropouts[0] if ends.dropouts else ends.at
            self.note(f"{path}:mul", "residual", amax)
            self.dropout(path, keep)
        self.stream, self.stream_square, self.stream_norm = amax, square, length

    def add(self, site: str, branch: Tensor, square: Tensor, length: float, dropout: str) -> None:
        """Add a sublayer's output, whose ‖·‖₂ is at most ``length``, to the residual stream, channel by channel."""
        keep = self.kept("stream")
        width = branch.numel()
        length = min(length, float(branch.norm())) / keep * (1 + self.arithmetic.unit)
        total = (self.stream_norm + length) * (1 + self.arithmetic.unit)
        self.stream_norm = total * COMPUTED + 2 * self.arithmetic.tiny * math.sqrt(width)
        if keep != 1.0:
            branch = self.rounded(branch / keep)
            path = dropout or site.partition(":")[0]
            self.note(f"{path}:mul", "output", branch)
            self.dropout(path, keep)
        self.stream = self.rounded(self.stream + branch)
        self.stream_square = self.stream_square + square
        self.note(site, "residual", self.stream)

    def norm(self, path: str) -> tuple[Normalised, Tensor]:
        """Return what a norm of the residual stream gives, and the mean square of its components."""
        gain, shift = self.tensor(f"{path}.weight"), self.tensor(f"{path}.bias")
        assert gain is not None
        width, a = gain.numel(), self.arithmetic
        gain = gain.double()
        shift = None if shift is None else shift.double()
        centred = self.layout.family.centred_norm
        radius = math.sqrt(width)
        if centred and not a.exact:
            # A stream that does not fit fails at its own site; here it would only make the bounds grow past fp32.
            mean = min(float(self.stream.mean()) * 2.0 ** (a.planned or 0), FP16_MAX)
            radius *= lengthened(mean, self.layout.eps) * (1 + NORM_ERROR)
        elif not a.exact:
            radius *= 1 + (width + 16) * UNIT32
        if centred:
            # nn.LayerNorm rounds once, after gain and shift.
            absolute = torch.full_like(gain, 2 * a.tiny)
            made = Normalised(gain, shift, radius, a.unit * (1 + 2.0**-9), absolute)
            self.note(f"{path}:layer_norm", "norm", made.bound)
            self.note(f"{path}:layer_norm.1", "statistic", self.rounded(self.stream.mean()))
            self.note(f"{path}:layer_norm.2", "statistic", self.layout.eps**-0.5 * (1 + 2 * UNIT))
        else:
            # An RMS norm rounds n itself, then the product with the gain.
            absolute = a.tiny * (gain.abs() * (1 + a.unit) + 1)
            made = Normalised(gain, shift, radius, 2 * a.unit + a.unit**2, absolute)
            self.note(f"{path}:to#2", "normalised", radius * (1 + UNIT))
            self.note(f"{path}:mul#2", "norm", made.bound)
        square = gain.square() if shift is None else gain.square() + shift.square()
        self.inputs[path] = (self.stream, self.stream_square)
        self.outputs[path] = (made.bound, square)
        variance = float(self.stream_square.mean()) if width else 0.0
        length = min(float(self.stream.norm()), self.stream_norm)
        self.norms[path] = NormRange(length, torch.tensor([[variance, 1.0]], dtype=torch.float64))
        if self.squares:
            self.note(f"{path} (sum of squares)", "squares", length**2 * (1 + (width + 2) * UNIT) + width * TINY)
        self.inner[f"{path}:input"] = largest(self.stream)
        return made, square

    # -- attention --------------------------------------------------------------------------------------------------

    def linear(self, path: str, kind: str, source: Normalised, square: Tensor) -> tuple[Image, Tensor]:
        """Bound a linear on a norm's output; return it and the expected mean square of each of its outputs."""
        weight, bias = self.weight(path)
        made = image(source, weight, bias, self.arithmetic)
        expected = (made.norms / made.radius).square() + made.centre.square()
        self.note(path, kind, made.bound, made.partial)
        self.inner[f"{path}:input"] = largest(source.bound)
        self.inputs[path] = (source.bound, square)
        self.outputs[path] = (torch.maximum(made.bound, made.partial), expected)
        return made, expected

    def attention(self, w: Attention, memory: tuple[Normalised, Tensor] | None) -> None:
        """Bound one attention sublayer and add it to the stream."""
        heads = int(str(value(self.layout.family, self.layout.config, w.heads)))
        source, square = self.norm(w.norm)
        other = (source, square) if not w.memory else memory
        assert other is not None
        query, _ = self.linear(w.query, "query", source, square)
        key, _ = self.linear(w.key, "key", *other)
        self.score(w, heads, query, key)
        del query, key
        values, mean_square = self.linear(w.value, "value", *other)
        keep = self.kept("attention")
        if keep != 1.0:
            self.note(f"{w.at}:mul#2", "weights", self.rounded(torch.tensor(1 / keep, dtype=torch.float64)))
            self.dropout(w.at, keep)
        total = self.arithmetic.attention_sum
        if keep != 1.0:
            total = total / keep * (1 + self.arithmetic.unit) + self.arithmetic.max_length * self.arithmetic.tiny
        gamma = self.arithmetic.gamma(self.arithmetic.max_length)
        context = self.summed(values.bound * total * (1 + gamma))
        self.note(f"{w.at}:context", "context", context)
        weight, bias = self.weight(w.output)
        bound, partial, length = self.attended(values, context, total, gamma, weight, bias, heads)
        self.note(w.output, "output", bound, partial)
        self.inputs[w.output] = (context, mean_square / 4)
        expected = squares_against(weight, mean_square / 4)
        self.outputs[w.output] = (torch.maximum(bound, partial), expected)
        self.add(w.add, bound, expected, length, w.dropout)

    def score(self, w: Attention, heads: int, query: Image, key: Image) -> None:
        """Bound the scores of every head: the bare product, the scaled one, and with the position bias."""
        a = self.arithmetic
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
        partial = self.summed(partial + rounding)
        bound = torch.minimum(self.summed(exact * COMPUTED + error + rounding), partial)
        self.note(f"{w.at}:scores", "scores", bound, partial)
        scaled = self.rounded(bound * size**-0.5) if w.scaled else bound
        self.note(f"{w.at}:mul", "scores", scaled)
        # SDPA's plain path multiplies queries and keys by the root of the scale instead.
        self.inner[f"{w.at}:mul"] = self.inner[f"{w.at}:mul#2"] = max(largest(query.bound), largest(key.bound))
        bias = self.tensor(w.bias) if w.bias else None
        offset = torch.zeros(heads, dtype=torch.float64) if bias is None else bias.double().abs().amax(0)
        biased = self.rounded(scaled + offset)
        if bias is not None:
            self.note(f"{w.bias.removesuffix('.weight')}:embedding", "position bias", offset)
        self.note(f"{w.at}:add", "scores", biased)
        self.note(f"{w.at}:softmax", "weights", 1.0)
        self.scores[w.at] = ScoreRange(largest(torch.maximum(bound, partial)), largest(torch.maximum(biased, scaled)))

    def attended(
        self,
        values: Image,
        context: Tensor,
        total: float,
        gamma: float,
        weight: Tensor,
        bias: Tensor | None,
        heads: int,
    ) -> tuple[Tensor, Tensor, float]:
        """Return bound and partial-sum bound of the output projection, both fp64 [d], and a bound of its ‖·‖₂.

        Attention weights are convex up to ``total``, so a head adds at most total·max over positions of |O·v|, that is
        radius·‖O·Av‖ + |O·centre|.
        """
        a = self.arithmetic
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
        sums = against(magnitude, context)
        added = torch.zeros_like(sums) if bias is None else bias.double().abs()
        partial = torch.minimum(sums, lengths) * COMPUTED + added
        # What each context value is off by: the value's own error, then the sum over positions and its rounding.
        rounding = (1 + gamma) * (1 + a.unit) ** 2 - 1
        off = total * values.error + total * rounding * values.bound + a.floor
        error = against(magnitude, off) * COMPUTED + a.gamma(weight.shape[1]) * partial
        signed = torch.zeros_like(sums) if bias is None else bias.double()
        bound = exact * COMPUTED + signed.abs() + error
        partial = partial + a.gamma(weight.shape[1]) * partial
        whole = longest_all * COMPUTED + float(signed.norm()) + float(error.norm())
        whole = whole * (1 + a.unit) ** 2 + a.floor * math.sqrt(rows)
        bound, partial = self.summed(bound), self.summed(partial)
        return torch.minimum(bound, partial), partial, whole

    # -- feed-forward -----------------------------------------------------------------------------------------------

    def feed_forward(self, w: FeedForward) -> None:
        """Bound one feed-forward sublayer and add it to the stream."""
        if w.activation not in LOWEST:
            raise UserError(
                f"activation {w.activation!r} has no bound; the certificate knows {', '.join(sorted(LOWEST))}"
            )
        source, square = self.norm(w.norm)
        if w.gate:
            gate, gate_square = self.linear(w.gate, "gate", source, square)
            other, other_square = self.linear(w.linear, "neuron", source, square)
            self.activation(w, gate)
            gated = _Gated(gate, other, self.arithmetic, self.kept("neurons"))
            neurons: _Neurons = gated
            self.note(f"{w.at}:mul", "product", neurons.undropped)
            mean_square = (gate_square * other_square + 2 * gated.products.square()) / 2
        else:
            made, made_square = self.linear(w.linear, "neuron", source, square)
            self.activation(w, made)
            neurons = _Plain(made, w.activation, self.arithmetic, self.kept("neurons"))
            mean_square = made_square / 2
        if self.kept("neurons") != 1.0 and w.dropouts:
            self.note(f"{w.dropouts[0]}:mul", "product", neurons.bound)
            self.dropout(w.dropouts[0], self.kept("neurons"))
        weight, bias = self.weight(w.output)
        a = self.arithmetic
        bound = self.projected(neurons, weight, bias)
        self.note(w.output, "output", bound)
        self.inputs[w.output] = (neurons.bound, mean_square)
        expected = squares_against(weight, mean_square)
        self.outputs[w.output] = (bound, expected)
        self.inner[f"{w.output}:input"] = largest(neurons.bound)
        # ‖W·x‖ ≤ Σ ‖column_i‖·|x_i|: one more row, of column lengths.
        columns = column_norms(weight)[None].to(working_dtype(weight.numel())) * COMPUTED
        up, _ = neurons.rows(columns)
        length = float(up + neurons.row_errors(columns, up))
        length += neurons.depth * float(columns.sum())
        length *= (1 + a.gamma(weight.shape[1])) * (1 + a.unit) ** 2
        if bias is not None:
            length += float(bias.double().norm()) * (1 + a.unit) ** 2
        length += a.floor * math.sqrt(weight.shape[0])
        self.add(w.add, bound, expected, length, w.dropouts[-1] if w.dropouts else "")

    def activation(self, w: FeedForward, before: Image) -> None:
        """Record the sites inside the activation; each is at most |x|, or bounded by tanh."""
        after = self.rounded(before.bound)
        if w.activation == "gelu_new":
            self.note(f"{w.act}:mul", "activation", self.rounded(before.bound / 2))
            self.note(f"{w.act}:tanh", "activation", 1.0)
            self.note(f"{w.act}:add#2", "activation", 2.0)
            self.note(f"{w.act}:mul#4", "activation", self.rounded(after))
        else:
            name = "silu" if w.activation == "swish" else w.activation
            self.note(f"{w.act}:{name}", "activation", after)

    def projected(self, neurons: _Neurons, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the bound of a feed-forward's output projection: fp64 [d]; it covers partial sums too.

        First one eigenvalue for the whole layer, then one each for the rows that set the maximum.
        """
        a = self.arithmetic
        dtype = working_dtype(weight.numel())
        out = weight.to(dtype)
        added = torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double().abs()
        up, down = neurons.rows(out)
        error = neurons.row_errors(out, torch.maximum(up, down))

        def whole(exact: Tensor, off: Tensor, extra: Tensor) -> Tensor:
            summed = (exact + off) * COMPUTED + extra
            return self.summed(summed * (1 + a.gamma(weight.shape[1])))

        bound = whole(torch.maximum(up, down), error, added)
        done: set[int] = set()
        for _ in range(min(self.refine, weight.shape[0])):
            row = int(bound.argmax())
            if row in done:
                break
            done.add(row)
            better = torch.tensor([neurons.row(out[row])], dtype=torch.float64)
            at = slice(row, row + 1)
            bound[row] = torch.minimum(bound[at], whole(better, error[at], added[at]))[0]
        return bound

    # -- the head ---------------------------------------------------------------------------------------------------

    def head(self, final: Normalised, square: Tensor) -> None:
        """Bound the logits."""
        layout = self.layout
        path = layout.family.head.removesuffix(".weight")
        scale = layout.head_scale
        if scale != 1.0:
            final = final.scaled(scale, self.arithmetic)
            self.note("model:mul", "norm", final.bound)
        name = layout.family.head if layout.family.head in layout.tensors else layout.family.embedding
        table = self.checked(name, self.read(name))
        bounds, partials, expected = [], [], []
        for rows in chunks(table):
            made = image(final, rows, None, self.arithmetic)
            bounds.append(made.bound)
            partials.append(made.partial)
            expected.append((made.norms / made.radius).square() + made.centre.square())
        bound, partial = torch.cat(bounds), torch.cat(partials)
        self.note(path, "logits", bound, partial)
        self.inner[f"{path}:input"] = largest(final.bound)
        self.inputs[path] = (final.bound, square * scale**2)
        self.outputs[path] = (torch.maximum(bound, partial), torch.cat(expected))
        if layout.family.centred_norm:
            offset = self.tensor("final_logits_bias")
            offset = torch.zeros_like(bound) if offset is None else offset.double().abs().view(-1)
            bound = self.rounded(bound + offset)
            self.note("model:add", "logits", bound)


class _Neurons:
    """The inner signals of a feed-forward: ``undropped`` and ``bound``, fp64 [n], before and after dropout.

    ``depth``: how far below zero an activation may go, which ``rows`` counts for negative weights only.
    """

    undropped: Tensor
    bound: Tensor
    depth: float

    def rows(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return upper bounds of ±(out · neurons) for every row without their rounding: fp64 [d] each."""
        raise NotImplementedError

    def row(self, out: Tensor) -> float:
        """Return a tighter bound of |out · neurons| for one row."""
        raise NotImplementedError

    def row_errors(self, out: Tensor, exact: Tensor) -> Tensor:
        """Return what the rounding of the neurons adds to every row, given what ``rows`` bounds it by: fp64 [d]."""
        raise NotImplementedError


class _Gated(_Neurons):
    """Neurons Φ(x)·x·y behind a gate, x = u·n and y = w·n."""

    def __init__(self, gate: Image, other: Image, arithmetic: Arithmetic, keep: float) -> None:
        a = arithmetic
        self.gate, self.other, self.keep, self.depth = gate, other, keep, 0.0
        scale = gate.norms * other.norms
        self.products = row_products(gate.matrix, other.matrix)
        cosine = self.products * gate.radius * other.radius
        self.cosine = (cosine / scale.clamp(min=1e-300)).clamp(-1, 1)
        self.caps = ((1 + self.cosine.abs()) / 2 * COMPUTED).clamp(0.5, 1)
        self.size = scale / keep
        product = scale * self.caps
        # Errors of x and y, then of the activation (two roundings) and the product (one), and of dropout.
        factor = (1 + 2 * a.unit) * (1 + a.unit) - 1
        self.crossed = gate.error * other.error
        off = gate.norms * other.error + other.norms * gate.error + self.crossed
        absolute = 2 * a.tiny * (other.norms + other.error) * (1 + a.unit) + a.tiny
        self.undropped = (product + off) * (1 + factor) + absolute
        if keep != 1.0:
            factor = (1 + factor) * (1 + a.unit) - 1
            absolute = absolute * (1 + a.unit) / keep + a.tiny
        self.factor, self.absolute = factor, absolute
        self.bound = (product + off) / keep * (1 + factor) + absolute
        both = gram(gate.unit_rows()).add_(gram(other.unit_rows()))
        self.budget = largest_eigenvalue(both) / 2 * COMPUTED

    def rows(self, out: Tensor) -> tuple[Tensor, Tensor]:
        caps, size = self.caps.to(out.dtype), self.size.to(out.dtype)
        best = []
        for part in chunks(out):
            values = part.abs() * size
            best.append(torch.minimum(knapsack(values, caps, self.budget), against(values, caps)))
        both = torch.cat(best) * COMPUTED
        return both, both

    def row(self, out: Tensor) -> float:
        values = out.double().abs() * self.size
        roots = (values / 4).sqrt()
        u, w = self.gate.scaled_rows(roots), self.other.scaled_rows(roots * out.sign())
        # x·y = ((x̂ + ŷ)² − (x̂ − ŷ)²)/4, so the positive part of ±x·y is at most a single square.
        best = max(largest_eigenvalue(gram(u + w)), largest_eigenvalue(gram(u - w)))
        # Four roundings of each element of u and w at most: a matrix whose norm is within its Frobenius norm.
        off = 5 * torch.finfo(u.dtype).eps / 2 * math.sqrt(float(values.sum()))
        return (math.sqrt(best) + off) ** 2 * COMPUTED

    def row_errors(self, out: Tensor, exact: Tensor) -> Tensor:
        keep, dtype = self.keep, out.dtype
        gate_off, other_off = self.other.norms * self.gate.error / keep, self.gate.norms * self.other.error / keep
        root = math.sqrt(2 * self.budget)
        total = []
        rest = self.crossed / keep * (1 + self.factor) + self.absolute
        for part in chunks(out):
            a = part.abs()
            plain = against(a, gate_off + other_off)
            # Not all |x| are large at once: Σ x̂² ≤ λmax(Σ ûûᵀ) ≤ 2M.
            ball = root * (row_norms(a * gate_off.to(dtype)) + row_norms(a * other_off.to(dtype)))
            total.append(torch.minimum(plain, ball) * (1 + self.factor) + against(a, rest))
        return torch.cat(total) * COMPUTED + self.factor * exact


class _Plain(_Neurons):
    """Neurons of an activation at most max(x, 0) and at least −m, x = w·n + c."""

    def __init__(self, made: Image, activation: str, arithmetic: Arithmetic, keep: float) -> None:
        a = arithmetic
        self.made, self.keep = made, keep
        self.lowest = LOWEST[activation]
        self.depth = self.lowest / keep
        size = made.norms.clamp(min=1e-300)
        self.caps = ((made.norms + made.centre.clamp(max=0)).clamp(min=0) / size).clamp(max=1)
        self.offset = made.centre.clamp(min=0) / keep
        self.size = made.norms / keep
        rounding = 0.0 if activation == "relu" else 2 * a.unit
        top = torch.maximum(made.norms + made.centre, torch.full_like(made.norms, self.lowest)).clamp(min=0)
        self.error = STEEPEST[activation] * made.error
        self.error = self.error + rounding * (top + self.error) + (2 * a.tiny if rounding else 0.0)
        self.undropped = top + self.error
        if keep != 1.0:
            self.error = self.error / keep * (1 + a.unit) + a.unit * top / keep + a.tiny
        self.bound = top / keep + self.error
        self.budget = largest_eigenvalue(gram(made.unit_rows())) * COMPUTED

    def rows(self, out: Tensor) -> tuple[Tensor, Tensor]:
        return self.side(out), self.side(-out)

    def side(self, out: Tensor) -> Tensor:
        """Return an upper bound of Σ out_i·neuron_i for every row."""
        dtype = out.dtype
        caps, size, ones = self.caps.to(dtype), self.size.to(dtype), torch.ones_like(self.caps).to(dtype)
        bent = bool((self.caps < 1).any())
        total = []
        for many in chunks(out, 1 << 23):  # as many rows as make a good matrix product
            straight = row_norms((many.clamp(min=0) / self.keep) @ self.made.matrix) * self.made.radius
            at = 0
            for part in chunks(many):
                positive = part.clamp(min=0)
                values = positive * size
                ball = in_ball(values, ones, self.budget)
                # Σ c·max(x, 0) = ½ (Σ c·x + Σ c·|x|).
                half = (straight[at : at + len(part)] + self.product_error(values) + ball) / 2
                best = torch.minimum(half, in_ball(values, caps, self.budget) if bent else ball)
                below = (positive - part).sum(1, dtype=torch.float64) * self.depth
                total.append(best + against(positive, self.offset) + below)
                at += len(part)
        return torch.cat(total) * COMPUTED

    def row(self, out: Tensor) -> float:
        best = 0.0
        for direction in (1, -1):
            positive = (out * direction).clamp(min=0).double()
            values = positive * self.size
            ball = math.sqrt(float(values.sum()) * largest_eigenvalue(gram(self.made.scaled_rows(values.sqrt()))))
            row = (positive / self.keep).to(self.made.matrix.dtype)[None]
            straight = float(row_norms(row @ self.made.matrix) * self.made.radius)
            straight += float(self.product_error(values.to(row.dtype)[None]))
            rest = positive @ self.offset + (out * direction).double().clamp(max=0).abs().sum() * self.depth
            best = max(best, min(ball, (straight + ball) / 2) + float(rest))
        return best * COMPUTED

    def row_errors(self, out: Tensor, exact: Tensor) -> Tensor:
        return against(out.abs(), self.error) * COMPUTED

    def product_error(self, values: Tensor) -> Tensor:
        """Return what a matrix product in the working dtype may be off by, as a length: n·u·Σ|c_i|·‖row_i‖."""
        unit = 2.0**-52 if values.dtype == torch.float64 else 2.0**-23
        return values.sum(1, dtype=torch.float64) * values.shape[1] * unit


def chunks(matrix: Tensor, elements: int = 1 << 17) -> Iterator[Tensor]:
    """Yield a matrix in runs of rows of so many elements at most; as a rule what a core's cache holds in fp64."""
    rows = max(1, elements // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], rows):
        yield matrix[start : start + rows]


def lengthened(mean: float, eps: float) -> float:
    """Return how many times √d a LayerNorm's output may be long whose deviations are off by NORM_ULPS of ``mean``.

    Let them be off by e, with rms a. They are divided by √(s² + eps) with s ≥ a − e and s ≥ 0, so with t = a − e the
    quotient's rms is at most (t + 2e)/√(t² + eps), whose maximum over t ≥ 0 is √(1 + 4e²/eps); for t < 0 it is less
    than 2e/√eps. Nothing is added for e itself: the quotient is the vector that the bounds are about.
    """
    off = NORM_ULPS * UNIT32 * mean
    return math.sqrt(1 + 4 * off * off / eps)


def square_root(matrix: Tensor) -> Tensor:
    """Return the symmetric root of a positive semidefinite fp64 matrix, its eigenvalues raised by their error."""
    values, vectors = torch.linalg.eigh(matrix)
    raised = values.clamp(min=0) + matrix.shape[0] * 2.0**-48 * float(matrix.trace())
    return (vectors * raised.sqrt()) @ vectors.t()


def balanced(one: Tensor, other: Tensor) -> Tensor:
    """Return √(one/other) per channel, 1 where a channel is always 0: what balances two sides of a product."""
    usable = (one > 0) & (other > 0)
    return torch.where(usable, (one / other.clamp(min=1e-300)).sqrt(), torch.ones_like(one)).clamp(1e-12, 1e12)


def outer_scaled(matrix: Tensor, factors: Tensor) -> Tensor:
    """Return diag(factors)·G·diag(factors)."""
    return matrix * factors[:, None] * factors[None, :]


def quadratic(matrix: Tensor, vector: Tensor) -> float:
    """Return √(vᵀGv) for a Gram matrix G."""
    return math.sqrt(max(0.0, float(vector @ matrix @ vector)))


def largest(values: Tensor | float) -> float:
    """Return the largest element; inf for NaN, which only weights beyond fp16 can give."""
    if isinstance(values, float):
        return values
    top = float(values.max()) if values.numel() else 0.0
    return math.inf if math.isnan(top) else top


def table_of(table: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return of an embedding each channel's largest |x| and mean square, fp64 [d], and the largest ‖row‖₂."""
    amax = torch.zeros(table.shape[1], dtype=torch.float64)
    square = torch.zeros(table.shape[1], dtype=torch.float64)
    length = 0.0
    for part in chunks(table):
        wide = part.float()
        amax = torch.maximum(amax, wide.abs().amax(0).double())
        squares = wide.double().square()
        square += squares.sum(0)
        length = max(length, float(squares.sum(1).max()))
    return amax, square / max(1, table.shape[0]), math.sqrt(length)


def channels(pair: tuple[Tensor, Tensor]) -> ChannelRange:
    """Return bounds and expected mean squares as the planner takes them."""
    return ChannelRange(pair[0].float(), pair[1].float(), 1)


def stacks(layout: Layout) -> list[tuple[Ends, list[Attention | FeedForward]]]:
    """Return each stack's ends with its sublayers in order."""
    found: list[tuple[Ends, list[Attention | FeedForward]]] = []
    for wiring in layout.wiring:
        if isinstance(wiring, Ends):
            found.append((wiring, []))
        else:
            found[-1][1].append(wiring)
    return found


def bound(
    layout: Layout,
    weights: Weights,
    arithmetic: Arithmetic | None = None,
    *,
    target: str = "half",
    refine: int = REFINED_ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Return the certificate of a layout's model with the given weights, read sublayer by sublayer.

    weights: gives a tensor by name with the values that are served. target: ``train`` holds gate pre-activations
    under 147.8, where the derivative of gelu_new's cube overflows. refine: rows of each feed-forward output that
    get an eigenvalue of their own. progress: called with sublayers done and their number. Raises UserError for an
    activation without a bound.
    """
    arithmetic = arithmetic or Arithmetic()
    if layout.eps < 2.0**-126:
        raise UserError(f"norm eps {layout.eps:g} is subnormal in fp32: a zero vector gives NaN; give it 1e-6 or so")
    limits = {}
    if target not in ("half", "norm-safe", "train"):
        raise UserError(f"target {target!r} is unknown; choose one of half, norm-safe, train")
    if target == "train":
        arithmetic = replace(arithmetic, train=True)
        if any(isinstance(w, FeedForward) and w.activation == "gelu_new" for w in layout.wiring):
            limits["gate"] = GELU_CUBE_BACKWARD_LIMIT
    with torch.no_grad():
        return _Walk(layout, weights, arithmetic, limits, refine, target == "norm-safe").run(progress)


def served(checkpoint: TensorSource, layout: Layout) -> Weights:
    """Return a function from a layout's tensor name to the fp16 values that a checkpoint's user gets."""

    def read(name: str) -> Tensor:
        tensor = layout.tensors[name]
        if tensor.source is None:
            assert tensor.generate is not None
            return tensor.generate(tensor.shape[0], tensor.shape[1]).half()
        weight = checkpoint.read(tensor.source)
        return (weight if tensor.gain == 1.0 else weight.float() * tensor.gain).half()

    return read


def certify(
    source: str | Path,
    *,
    max_length: int = MAX_LENGTH,
    target: str = "half",
    subfolder: str | None = None,
    talk: Talk | None = None,
) -> dict[str, Any]:
    """Bound every signal of ``source`` (folder or Hub id) for every input, from its weights rounded to fp16, and return
    the report: verdict, certificate with every site, environment.

    Nothing is run. max_length: positions of a sequence for which it holds. target: ``half``, ``norm-safe`` (also the
    squares of the residual stream summed by a norm) or ``train`` (dropout, and the limit of the cube's derivative).
    Raises UserError for a source that cannot be used.
    """
    talk = talk or Talk(quiet=True)
    if max_length < 1:
        raise UserError(f"a maximum length of {max_length} is not a number of positions; give 1 or more")
    checkpoint = open_checkpoint(source, subfolder)
    layout = resolve(checkpoint)
    with talk.step("Bounding every signal") as advance:
        found = bound(layout, served(checkpoint, layout), Arithmetic(max_length), target=target, progress=advance)
    described = {"certificate": found.to_json()}
    return {
        "schema": SCHEMA,
        "verdict": "safe" if found.holds else "unsafe",
        "proof": "certified" if found.holds else "observed",
        "family": layout.family.name,
        "source": {
            "path": checkpoint.name,
            "revision": checkpoint.revision,
            "sha256": {file.name: checkpoint.sha256(file) for file in checkpoint.weight_files},
        },
        "target": target,
        **described,
        "uncertified": uncertified_rows(described),
        "environment": environment(),
    }
