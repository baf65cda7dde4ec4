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
    """The range of a norm's input. A variance is the mean square, except in ``nn.LayerNorm``."""

    norm_max: float  # the largest ‖x‖₂ of a token
    variances: Tensor  # fp64 [k, 2]: variances, to an eighth of a binade, and the fractions of tokens

    def kept(self, eps: float, exponent: int, fixed: float | None = None) -> tuple[Tensor, Tensor]:
        """Return the factors on a norm's output, [k], if its input is scaled by 2^exponent but eps is not. Return also
        the fractions of tokens, [k]. fixed: eps after scaling, by default ``eps``."""
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
    """An attention's largest |score|."""

    product: float  # of QKᵀ alone
    biased: float  # of every later value before the mask
    excess_bits: Tensor | None = None  # fp64 [heads]: bits by which queries must shrink to fit; None if observed

    @property
    def largest(self) -> float:
        return max(self.product, self.biased)


@dataclass(frozen=True)
class ModuleRange:
    """The ranges of a module's input and output. The tensors of an embedding's input have the shape [0]."""

    input: ChannelRange
    output: ChannelRange
    norm: NormRange | None = None  # of a norm
    scores: ScoreRange | None = None  # of an eager attention


Ranges = dict[str, ModuleRange]  # ranges by module path


@dataclass(frozen=True)
class Squares:
    """A token's largest sum of squares and least mean square, in the input of a norm that squares it in fp16."""

    largest: float
    least: float

    @property
    def fits(self) -> bool:
        return self.largest <= FP16_MAX and self.least >= NORM_FLOOR
