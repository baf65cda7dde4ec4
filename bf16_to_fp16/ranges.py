"""The ranges of modules' inputs and outputs by channel. A range is observed in a run, or is a bound for every input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .numerics import FP16_MAX, NORM_FLOOR


@dataclass(frozen=True)
class ChannelRange:
    """The largest |x| (``amax``) and the mean x² of each channel over ``rows`` vectors, both fp32 [channels]."""

    amax: Tensor
    mean_square: Tensor
    rows: int


@dataclass(frozen=True)
class NormRange:
    """The range of a norm's input. A variance is a token's mean square (in ``nn.LayerNorm``, about the mean)."""

    norm_max: float  # the largest ‖x‖₂ of a token
    variances: Tensor  # fp64 [k, 2], a histogram: variances (observed: rounded to 2^(n/8)), fractions of tokens

    def kept(self, eps: float, exponent: int, fixed: float | None = None) -> tuple[Tensor, Tensor]:
        """Return the factors [k] by which a norm's output changes if its input is scaled by 2^exponent, and the
        fraction of tokens with each factor [k]. If eps were scaled by 4^exponent, each factor would be 1. eps, fixed:
        the norm's eps before and after the scaling, equal if ``fixed`` is None."""
        variance, shares = self.variances.unbind(1)
        scaled = (eps if fixed is None else fixed) * 4.0**-exponent
        return ((variance + eps) / (variance + scaled)).sqrt(), shares

    def drift(self, eps: float, exponent: int) -> float:
        """Return the norm output's relative RMS change if the input, but not eps, is scaled by 2^exponent."""
        kept, shares = self.kept(eps, exponent)
        power = shares * self.variances[:, 0] / (self.variances[:, 0] + eps)  # far under eps no output is left
        return float((power * (kept - 1).square()).sum() / power.sum()) ** 0.5 if power.any() else 0.0


@dataclass(frozen=True)
class ScoreRange:
    """The largest |score| of an attention, over all heads."""

    product: float  # of QKᵀ alone
    biased: float  # of the scores after any later step, such as a bias, before the mask
    excess_bits: Tensor | None = None  # fp64 [heads]: bits by which queries must shrink to fit; None if observed

    @property
    def largest(self) -> float:
        return max(self.product, self.biased)


@dataclass(frozen=True)
class ModuleRange:
    """The ranges of a module's input and output. An embedding's input has none: its tensors have the shape [0]."""

    input: ChannelRange
    output: ChannelRange
    norm: NormRange | None = None  # of a norm
    scores: ScoreRange | None = None  # of an eager attention


Ranges = dict[str, ModuleRange]  # ranges by module path


@dataclass(frozen=True)
class Squares:
    """Extremes of the token vectors whose squares a norm sums in fp16. ``largest``: a bound on the largest sum of
    squares, as computed in fp16 with its rounding errors. ``least``: the smallest mean square."""

    largest: float
    least: float

    @property
    def fits(self) -> bool:
        return self.largest <= FP16_MAX and self.least >= NORM_FLOOR
