"""Ranges of modules' inputs and outputs by channel: observed, or bounded for every input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .numerics import FP16_MAX, NORM_FLOOR


@dataclass(frozen=True)
class ChannelRange:
    """The largest |x| and mean x² of each channel, fp32 [channels], over ``rows`` vectors."""

    amax: Tensor
    mean_square: Tensor
    rows: int


@dataclass(frozen=True)
class NormRange:
    """The range of a norm's input: the largest ‖x‖₂ of a token, and the tokens' variances, fp64 [k, 2]. A row is a
    variance (rounded to an eighth of a binade) and the fraction of tokens with it; only ``nn.LayerNorm`` subtracts the
    mean."""

    norm_max: float
    variances: Tensor

    def kept(self, eps: float, exponent: int, fixed: float | None = None) -> tuple[Tensor, Tensor]:
        """Return the factor on a norm's output if its input is scaled by 2^exponent but eps is not: [k], by row of
        ``variances``, and the rows' fractions of tokens. fixed: the eps of a tool that ignores the model's."""
        variance, shares = self.variances.unbind(1)
        scaled = (eps if fixed is None else fixed) * 4.0**-exponent
        return ((variance + eps) / (variance + scaled)).sqrt(), shares

    def drift(self, eps: float, exponent: int) -> float:
        """Return the relative RMS change of the norm's output if its input is scaled by 2^exponent but eps is not."""
        kept, shares = self.kept(eps, exponent)
        power = shares * self.variances[:, 0] / (self.variances[:, 0] + eps)  # far under eps no output is left
        return float((power * (kept - 1).square()).sum() / power.sum()) ** 0.5 if power.any() else 0.0


@dataclass(frozen=True)
class ScoreRange:
    """An attention's largest |score|. ``product``: of the bare QKᵀ. ``biased``: of any value up to the softmax (scaled,
    with position bias, before the mask). ``excess_bits``: by head, log2 of the factor by which queries must shrink for
    bounds to fit, fp64 [heads]; None if observed."""

    product: float
    biased: float
    excess_bits: Tensor | None = None

    @property
    def largest(self) -> float:
        return max(self.product, self.biased)


@dataclass(frozen=True)
class ModuleRange:
    """The ranges of a module's input and output. ``norm``: only of a norm. ``scores``: only of an eager attention. The
    input of an embedding has the shape [0]."""

    input: ChannelRange
    output: ChannelRange
    norm: NormRange | None = None
    scores: ScoreRange | None = None


Ranges = dict[str, ModuleRange]  # ranges by module path


@dataclass(frozen=True)
class Squares:
    """For a norm that squares its input in fp16: the largest sum of squares, and the least mean square of any token."""

    largest: float
    least: float

    @property
    def fits(self) -> bool:
        return self.largest <= FP16_MAX and self.least >= NORM_FLOOR
