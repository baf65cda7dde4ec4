"""The bounds of norms and linears on the way of the walk, each recorded at its sites with its mean squares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..families.wiring import MOST_MEAN
from ..numerics import FP16_MAX
from ..ranges import NormRange
from .arithmetic import TINY, UNIT, growth, largest
from .findings import Findings
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

Normed = tuple[NormOutput, Tensor]  # a norm's output, and the mean square of each component
Projected = tuple[Projection, Tensor]  # the same of a sublayer's output projection


@dataclass(eq=False)
class ModuleFindings(Findings):
    """refine: rows of one feed-forward output that get an eigenvalue of their own."""

    refine: int
    spectra: Spectra

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rounded = self.arithmetic.rounded
        self.tables: dict[str, tuple[Tensor, Tensor, float]] = {}

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
        """Bound a norm. entering, variances, length: bounds, mean squares and largest ‖·‖₂ of its input. eps: of a
        LayerNorm among RMSNorms."""
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
            made = layer_normalised(gain, shift, mean, eps, a)
            self.note(f"{path}:layer_norm", SiteKind.NORM, made.bound)
            self.note(f"{path}:layer_norm.1", SiteKind.STATISTIC, self.rounded(torch.tensor(mean / factor)))
            self.note(f"{path}:layer_norm.2", SiteKind.STATISTIC, eps**-0.5 * (1 + 2 * UNIT))
        else:
            made = rms_normalised(gain, a, once=self.layout.family.norm_rounds_once)
            if not self.layout.family.norm_rounds_once:
                self.note(f"{path}:to#2", SiteKind.NORMALISED, made.radius * (1 + UNIT))
            self.note(f"{path}:{self.layout.family.norm_site}", SiteKind.NORM, made.bound)
        square = gain.square() if shift is None else gain.square() + shift.square()
        self.inputs[path] = (entering, variances)
        self.outputs[path] = (made.bound, square)
        variance = float(variances.mean()) if width else 0.0
        self.norms[path] = NormRange(length, torch.tensor([[variance, 1.0]], dtype=torch.float64))
        if a.norms16:
            # A centred norm sums the components as well.
            most = max(length**2, math.sqrt(width) * length if centred else 0.0)
            self.note(f"{path} (sum of squares)", SiteKind.SQUARES, most * growth(width) + width * TINY)
        self.inner[f"{path}:input"] = largest(entering)
        return made, square

    def linear(self, path: str, kind: SiteKind, source: Normed) -> tuple[LinearBound, Tensor]:
        """Bound a linear on a norm's output; return it and the expected mean square of each output."""
        (read, square), (weight, bias) = source, self.weight(path)
        made = bound_linear(read, weight, bias, self.arithmetic, f"{path}.weight")
        expected = (made.norms / made.radius).square() + made.centre.square()
        if read.most is not None:
            expected = squared_matrix_vector(weight, square) + made.centre.square()
        self.inner[f"{path}:input"] = largest(read.bound)
        self.record(path, kind, (made.bound, made.partial), expected, (read.bound, square))
        return made, expected

    def linears(
        self, fused: Sequence[int], *reads: tuple[str, SiteKind, Normed]
    ) -> Iterator[tuple[LinearBound, Tensor]]:
        """Yield ``linear`` of each read. fused: the rows of each in one common matrix, () where each has its own."""
        if not fused:
            yield from (self.linear(*read) for read in reads)
            return
        made, expected = self.linear(*reads[0])
        yield from zip(made.split(fused), expected.split(fused), strict=True)

    def project(self, path: str, weight: Tensor, made: Projection, entering: Tensor, square: Tensor) -> Projected:
        """Record an output projection. entering, square: bounds, mean squares of its input."""
        expected = squared_matrix_vector(weight, square)
        self.record(path, SiteKind.OUTPUT, (made.bound, made.partial), expected, (entering, square))
        return made, expected
