"""A layout's live weights, and linears on a norm's output as functions of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..families.layout import Layout, TensorReader
from ..families.resolve import effective
from ..numerics import FP16_MAX
from .arithmetic import Arithmetic
from .linear import NormOutput, layer_normalised, rms_normalised
from .power_iteration import SMALL, lengths


@dataclass(frozen=True)
class Rows:
    """The rows of a linear on a norm's output. ``matrix``: weight times gain, [m, d]. Of each row, [m]: ``norms`` is
    radius·‖row‖, ``centre`` the part that does not depend on the input, ``partial`` the bound of the result and its
    partial sums."""

    matrix: Tensor
    radius: float | Tensor
    norms: Tensor
    centre: Tensor
    partial: Tensor

    def split(self, rows: Sequence[int]) -> list[Rows]:
        """Return the linears of one common matrix; rows: of each."""
        parts = zip(*(x.split(rows) for x in (self.matrix, self.norms, self.centre, self.partial)), strict=True)
        return [Rows(matrix, self.radius, *others) for matrix, *others in parts]


@dataclass
class LiveWeights:
    """read: gives a live tensor as stored. means: of LayerNorms' inputs. finds_means: measure them anew."""

    layout: Layout
    read: TensorReader
    a: Arithmetic
    means: dict[str, float]
    finds_means: bool

    def weight(self, name: str) -> Tensor | None:
        return effective(self.layout.tensors[name], wide(self.read(name))) if name in self.layout.tensors else None

    def pair(self, path: str) -> tuple[Tensor, Tensor | None]:
        weight = self.weight(f"{path}.weight")
        assert weight is not None
        return weight, self.weight(f"{path}.bias")

    def linear_error(self, width: int) -> float:
        """Relative error of a linear on a norm's output, with the rounding of both."""
        return 4 * self.a.unit + self.a.gamma(width)

    def linear(self, path: str, source: NormOutput, at: Tensor | slice | None = None) -> Rows:
        """Return the rows of a linear on a norm's output, all or those at the indices ``at``."""
        weight, bias = self.pair(path)
        if at is not None:
            weight, bias = weight[at], None if bias is None else bias[at]
        return rows_of(weight, bias, source)

    def linears(self, fused: Sequence[int], *reads: tuple[str, NormOutput]) -> list[Rows]:
        """Return the rows of each linear on its source. fused: the rows of each in one common matrix."""
        if fused:
            return self.linear(*reads[0]).split(fused)
        return [self.linear(path, source) for path, source in reads]

    def normalised(self, path: str, amax: Tensor | None = None) -> NormOutput:
        """Return a norm's output. amax: of its input's components, needed for the means of LayerNorms' inputs."""
        gain, shift = self.pair(path)
        if not self.layout.family.centred_norm:
            return rms_normalised(gain, self.a, once=self.layout.family.norm_rounds_once)
        if self.finds_means:
            assert amax is not None
            self.means[path] = min(float(amax.mean()), FP16_MAX)
        return layer_normalised(gain, shift, self.means[path], self.layout.eps_of(path), self.a)


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rows_of(weight: Tensor, bias: Tensor | None, source: NormOutput) -> Rows:
    matrix = weight * source.gain
    norms = source.radius * lengths(matrix)
    centre, partial = torch.zeros_like(norms), norms
    if source.shift is not None:
        centre, partial = weight @ source.shift, partial + weight.abs() @ source.shift.abs()
    if bias is not None:
        centre, partial = centre + bias, partial + bias.abs()
    return Rows(matrix, source.radius, norms, centre, partial)


def homogeneous(one: Rows, other: Rows) -> tuple[Rows, Rows]:
    """Return two linears as maps alone: shift and bias become one more column, as in the certificate."""
    centres, norms = (torch.cat(both).abs().sum() for both in ((one.centre, other.centre), (one.norms, other.norms)))
    share = (centres / norms.clamp(min=SMALL)).clamp(2.0**-20, 2.0**20)
    length, radius = one.radius * share.sqrt(), one.radius * (1 + share).sqrt()

    def joined(made: Rows) -> Rows:
        matrix = torch.cat([made.matrix, made.centre[:, None] / length], 1)
        return replace(made, matrix=matrix, radius=radius, norms=radius * lengths(matrix))

    return joined(one), joined(other)


def directions(rows: Rows) -> Tensor:
    """Return the rows at unit length; zero rows stay as they are."""
    return rows.matrix / (rows.norms / rows.radius).clamp(min=SMALL)[:, None]
