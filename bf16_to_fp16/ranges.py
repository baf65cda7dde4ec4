"""What a model's modules take in and give out, channel by channel: observed, or bounded for every input."""

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
    """A norm's input per token: the largest ‖x‖₂, and the spread of variances. ``variances``: fp64 [k, 2], a variance
    and the share of tokens within a sixteenth of a binade. The variance is an RMS norm's mean square,
    ``nn.LayerNorm``'s centred one."""

    norm_max: float
    variances: Tensor

    def kept(self, eps: float, exponent: int, fixed: float | None = None) -> tuple[Tensor, Tensor]:
        """Return what a fixed eps leaves of the norm's output for an input times 2^exponent, and the share of tokens;
        fixed: another eps, which a tool has."""
        variance, shares = self.variances.unbind(1)
        met = (eps if fixed is None else fixed) * 4.0**-exponent
        return ((variance + eps) / (variance + met)).sqrt(), shares

    def drift(self, eps: float, exponent: int) -> float:
        """Return the root mean square of that change, relative to the norm's output before gains."""
        kept, shares = self.kept(eps, exponent)
        power = shares * self.variances[:, 0] / (self.variances[:, 0] + eps)  # of tokens under eps hardly any is left
        return float((power * (kept - 1).square()).sum() / power.sum()) ** 0.5 if power.any() else 0.0


@dataclass(frozen=True)
class ScoreRange:
    """An attention's largest |score|: the bare product QKᵀ, and any value to the softmax (scaled, with position bias,
    before the mask). ``excess_bits``: by how many bits a bound's queries must fall per head, fp64 [heads]; None where
    observed."""

    product: float
    biased: float
    excess_bits: Tensor | None = None

    @property
    def largest(self) -> float:
        return max(self.product, self.biased)


@dataclass(frozen=True)
class ModuleRange:
    """A module's input and output ranges; an embedding's input has no channels (shape [0]). ``norm``: of norms.
    ``scores``: of eager attentions."""

    input: ChannelRange
    output: ChannelRange
    norm: NormRange | None = None
    scores: ScoreRange | None = None


Ranges = dict[str, ModuleRange]  # ranges by module path


@dataclass(frozen=True)
class Squares:
    """The largest sum of squares in a norm, as fp16 may sum it, and the least mean of any token."""

    largest: float
    least: float

    @property
    def fits(self) -> bool:
        return self.largest <= FP16_MAX and self.least >= NORM_FLOOR
