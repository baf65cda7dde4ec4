"""What the modules of a model take in and give out, channel by channel: observed, or bounded for every input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .numerics import FP16_MAX, NORM_FLOOR


@dataclass(frozen=True)
class ChannelRange:
    """What a signal of ``rows`` vectors reached: fp32 [channels] largest |x| and mean x² of each channel."""

    amax: Tensor
    mean_square: Tensor
    rows: int


@dataclass(frozen=True)
class NormRange:
    """What entered a norm, per token: the largest ‖x‖₂, and how the variances are spread.

    ``variances``: fp64 [k, 2], a variance and the share of tokens near it (within a sixteenth of a binade); the
    shares sum to 1. The variance is what the norm divides by: the mean square of an RMS norm, the centred variance of
    ``nn.LayerNorm``.
    """

    norm_max: float
    variances: Tensor

    def kept(self, eps: float, exponent: int, fixed: float | None = None) -> tuple[Tensor, Tensor]:
        """Return what an eps that does not follow leaves of the norm's output where what enters is multiplied by 2 to
        the exponent, and the share of tokens of which it leaves that; fixed: another eps, which a tool has."""
        variance, shares = self.variances.unbind(1)
        met = (eps if fixed is None else fixed) * 4.0**-exponent
        return ((variance + eps) / (variance + met)).sqrt(), shares

    def drift(self, eps: float, exponent: int) -> float:
        """Return the root mean square of what that changes, relative to the norm's output before its gains."""
        kept, shares = self.kept(eps, exponent)
        power = shares * self.variances[:, 0] / (self.variances[:, 0] + eps)  # of tokens under eps hardly any is left
        return float((power * (kept - 1).square()).sum() / power.sum()) ** 0.5 if power.any() else 0.0


@dataclass(frozen=True)
class ScoreRange:
    """Largest |score| of an attention: the bare product QKᵀ, and any value from there to the softmax.

    The second covers the scaled product and the product with its position bias; positions are left out from
    where the mask is added. ``excess_bits``: of a bound, by how many bits the queries of each head have to fall for all
    its limits to hold, fp64 [heads]; None where it was observed.
    """

    product: float
    biased: float
    excess_bits: Tensor | None = None

    @property
    def largest(self) -> float:
        return max(self.product, self.biased)


@dataclass(frozen=True)
class ModuleRange:
    """What entered and left a module; an embedding's input, being ids, has no channels (shape [0]).

    ``norm`` is set for norm modules, ``scores`` for attentions that ran eagerly.
    """

    input: ChannelRange
    output: ChannelRange
    norm: NormRange | None = None
    scores: ScoreRange | None = None


Ranges = dict[str, ModuleRange]  # ranges by module path


@dataclass(frozen=True)
class Squares:
    """The largest sum of squares that a norm makes, as fp16 may sum it, and the least mean of any token."""

    largest: float
    least: float

    @property
    def fits(self) -> bool:
        """Whether the sum neither overflows nor the mean falls where squares lose more than bf16 does."""
        return self.largest <= FP16_MAX and self.least >= NORM_FLOOR
