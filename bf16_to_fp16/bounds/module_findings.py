"""The bounds recorded in a walk through a model, by site and by module, and methods that record norms and linears."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..errors import UserError
from ..families.configs import config_value
from ..families.layout import Layout, TensorReader
from ..families.places import places
from ..families.types import DropoutKind
from ..families.wiring import MOST_MEAN
from ..numerics import FP16_MAX, headroom_bits
from ..ranges import ChannelRange, ModuleRange, NormRange, ScoreRange
from ..results import BoundEntry
from .arithmetic import TINY, UNIT, Arithmetic, growth, largest
from .findings import Certificate
from .kinds import SiteKind
from .linear import (
    LinearBound,
    NormOutput,
    Projection,
    bound_linear,
    layer_normalised,
    rms_normalised,
    squared_matrix_vector,
    table_of,
)
from .spectral import Spectra

HOPELESS = 2.0**62
"""Weights this large cannot be planned for: an element has three exponents of 24 at most, and squares overflow fp32."""

Normed = tuple[NormOutput, Tensor]  # a norm's output, and the mean square of each component
Projected = tuple[Projection, Tensor]  # a sublayer's output projection, and the mean square of each component


def channels(pair: tuple[Tensor, Tensor]) -> ChannelRange:
    return ChannelRange(pair[0].float(), pair[1].float(), 1)


@dataclass(eq=False)
class ModuleFindings:
    """Collects the bounds of a model's sites and modules, and reads the weights for them."""

    layout: Layout
    read: TensorReader
    arithmetic: Arithmetic
    limits: Mapping[str, float]  # by kind of site; other kinds have FP16_MAX
    refine: int  # rows of each feed-forward output that may get an eigenvalue of their own
    spectra: Spectra

    def __post_init__(self) -> None:
        self.place, self.rounded = places(self.layout), self.arithmetic.rounded
        self.sites: dict[str, BoundEntry] = {}
        self.inputs: dict[str, tuple[Tensor, Tensor]] = {}  # each channel's bound and expected mean square
        self.outputs: dict[str, tuple[Tensor, Tensor]] = {}
        self.norms: dict[str, NormRange] = {}
        self.scores: dict[str, ScoreRange] = {}
        self.tables: dict[str, tuple[Tensor, Tensor, float]] = {}

    def certificate(self) -> Certificate:
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
        return Certificate(tuple(self.sites.values()), self.arithmetic, ranges)

    def note(self, name: str, kind: SiteKind, bound: Tensor | float, partial: Tensor | float | None = None) -> None:
        """Record the largest element of a site's bounds. partial: bounds of its partial sums, if they differ. A site
        recorded twice, such as dropout at both ends of a stack, keeps the larger values."""
        top = largest(bound)
        sums = top if partial is None else largest(partial)
        before = self.sites.get(name)
        if before is not None:
            top, sums = max(top, before.bound), max(sums, before.partial)
        limit, most = self.limits.get(kind, FP16_MAX), max(top, sums)
        self.sites[name] = BoundEntry(
            name=name,
            kind=str(kind),
            bound=top,
            partial=sums,
            limit=limit,
            headroom_bits=headroom_bits(most, limit),
            observed=None,
            holds=most <= limit,
            **self.place(name).to_json(),
        )

    def record(
        self,
        path: str,
        kind: SiteKind,
        bounds: tuple[Tensor, Tensor],  # of the output and its partial sums
        expected: Tensor,  # mean squares of the output
        entering: tuple[Tensor, Tensor],  # bounds and mean squares of the input
    ) -> None:
        """Record the bounds of a linear at its site, and the ranges of its input and output."""
        self.note(path, kind, *bounds)
        self.inputs[path], self.outputs[path] = entering, (torch.maximum(*bounds), expected)

    def kept(self, what: DropoutKind) -> float:
        """Return 1 − p for dropout with probability p, lowered by one rounding to fp16; 1 outside training."""
        if not self.arithmetic.train:
            return 1.0
        key = self.layout.family.dropout.get(what)
        if key is None:
            return 1.0
        rate = float(str(config_value(self.layout.family, self.layout.config, key)))
        # Kernels may round the factor 1/(1−p) to fp16 first.
        return (1 - rate) / (1 + UNIT) if rate else 1.0

    def tensor(self, name: str) -> Tensor | None:
        if name not in self.layout.tensors:
            return None
        return self.checked(name, self.read(name))

    def checked(self, name: str, weight: Tensor) -> Tensor:
        """Return ``weight`` with NaN replaced by 0 and inf by ±65504, and record a failing site if there is any. Raises
        UserError if a plan is to be made and no plan could bring the weight under 65504."""
        low, high = (float(x) for x in torch.aminmax(weight)) if weight.numel() else (0.0, 0.0)
        if self.arithmetic.planned is not None and not max(-low, high) < HOPELESS:
            raise UserError(
                f"tensor {name}: weights are NaN or up to {max(-low, high):.3g}, which rescaling cannot bring under"
                " 65504; use another revision of the checkpoint or repair the tensor"
            )
        if not (math.isfinite(low) and math.isfinite(high)):
            self.note(name, SiteKind.WEIGHT, math.inf)
            weight = torch.nan_to_num(weight.float(), 0.0, FP16_MAX, -FP16_MAX)
        return weight

    def weight(self, path: str) -> tuple[Tensor, Tensor | None]:
        weight = self.tensor(f"{path}.weight")
        assert weight is not None
        return weight, self.tensor(f"{path}.bias")

    def table(self, name: str) -> tuple[Tensor, Tensor, float]:
        if name not in self.tables:
            table = self.tensor(name)
            assert table is not None
            of_it = replace(self.spectra, about=frozenset((name,)))
            self.tables[name] = of_it.once("table", partial(table_of, table))
        return self.tables[name]

    def normalised(
        self, path: str, entering: Tensor, variances: Tensor, length: float, *, eps: float | None = None
    ) -> Normed:
        """Record a norm; return bounds and mean squares of its output. entering: the input's bounds. variances: the
        input's mean squares. length: the input's largest ‖·‖₂. eps: only for a LayerNorm in a model of RMSNorms."""
        gain, shift = self.tensor(f"{path}.weight"), self.tensor(f"{path}.bias")
        gain = torch.ones_like(entering) if gain is None else gain
        width, a = gain.numel(), self.arithmetic
        gain = gain.double()
        shift, planned = None if shift is None else shift.double(), a.planned or {}
        centred = self.layout.family.centred_norm or eps is not None
        if centred:
            # A stream that does not fit fails at its own site; here it would only make the bounds grow past fp32.
            # An embedding's norm reads no stream, so no exponent scales its input.
            factor = 2.0 ** planned.get(self.layout.streams_read.get(path, ""), 0)
            mean = min(float(entering.mean()) * factor, FP16_MAX if eps is None else MOST_MEAN)
            eps = eps or self.layout.eps_of(path)
            output = layer_normalised(gain, shift, mean, eps, a)
            self.note(f"{path}:layer_norm", SiteKind.NORM, output.bound)
            self.note(f"{path}:layer_norm.1", SiteKind.STATISTIC, self.rounded(torch.tensor(mean / factor)))
            self.note(f"{path}:layer_norm.2", SiteKind.STATISTIC, eps**-0.5 * (1 + 2 * UNIT))
        else:
            output = rms_normalised(gain, a, once=self.layout.family.norm_rounds_once)
            if not self.layout.family.norm_rounds_once:
                self.note(f"{path}:to#2", SiteKind.NORMALISED, output.radius * (1 + UNIT))
            self.note(f"{path}:{self.layout.family.norm_site}", SiteKind.NORM, output.bound)
        square = gain.square() if shift is None else gain.square() + shift.square()
        self.inputs[path] = (entering, variances)
        self.outputs[path] = (output.bound, square)
        variance = float(variances.mean()) if width else 0.0
        self.norms[path] = NormRange(length, torch.tensor([[variance, 1.0]], dtype=torch.float64))
        if a.norms16:
            # A centred norm sums the components as well.
            most = max(length**2, math.sqrt(width) * length if centred else 0.0)
            self.note(f"{path} (sum of squares)", SiteKind.SQUARES, most * growth(width) + width * TINY)
        return output, square

    def linear(self, path: str, kind: SiteKind, source: Normed) -> tuple[LinearBound, Tensor]:
        """Record a linear on a norm's output; return its bounds and the expected mean square of each output."""
        (read, square), (weight, bias) = source, self.weight(path)
        linear = bound_linear(read, weight, bias, self.arithmetic, f"{path}.weight")
        expected = (linear.norms / linear.radius).square() + linear.centre.square()
        if read.most is not None:
            expected = squared_matrix_vector(weight, square) + linear.centre.square()
        self.record(path, kind, (linear.bound, linear.partial), expected, (read.bound, square))
        return linear, expected

    def linears(
        self, fused: Sequence[int], *reads: tuple[str, SiteKind, Normed]
    ) -> Iterator[tuple[LinearBound, Tensor]]:
        """Record linears and yield the result of ``linear`` for each. reads: the arguments of ``linear`` for each.
        fused: if linears share one matrix, the number of rows of each, else (). For a shared matrix, all linears in it
        are recorded as one, and only the first of ``reads`` is used."""
        if not fused:
            yield from (self.linear(*read) for read in reads)
            return
        linear, expected = self.linear(*reads[0])
        yield from zip(linear.split(fused), expected.split(fused), strict=True)

    def project(self, path: str, weight: Tensor, projection: Projection, entering: Tensor, square: Tensor) -> Projected:
        """Record an output projection; return it with its mean squares. entering, square: the input's bounds and mean
        squares."""
        expected = squared_matrix_vector(weight, square)
        self.record(path, SiteKind.OUTPUT, (projection.bound, projection.partial), expected, (entering, square))
        return projection, expected
