"""Measurements that are also entries of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True)]
Real = Annotated[float, Field(strict=True)]
NumberOrNaN = Annotated[
    float,
    Field(strict=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}], "description": "null stands for NaN"}),
]
Infinite = Annotated[
    Real,
    BeforeValidator(lambda value: math.inf if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}], "description": "null stands for infinity"}),
]


class ReportObject(BaseModel):
    """A JSON object of a report. Keys that this release does not know are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")


def dump(part: BaseModel) -> dict[str, Any]:
    """Return a part of the report as JSON data: the keys that were set, in order."""
    return part.model_dump(by_alias=True, exclude_unset=True)


class Fidelity(ReportObject):
    """How far the bf16 source and the fp16 output are from the fp32 source, on the same tokens. ``top1``: the fraction
    of positions with the same most probable token. The bf16 fields are None if no bf16 model ran. A model that gives
    inf or NaN is infinitely far, which is null in JSON."""

    measure: str = Field(
        default="kl",
        description=(
            "kl: KL(fp32 ‖ x) per token, in nats; relative squared error: Σ(x − fp32)² / Σ fp32² of last states;"
            " top1 is then null"
        ),
    )
    kl_bf16: Infinite | None = None
    kl_fp16: Infinite = math.inf
    max_logit_error_bf16: Infinite | None = None
    max_logit_error_fp16: Infinite = math.inf
    top1_bf16: Real | None = None
    top1_fp16: Real | None = None
    positions: Count | None = None
    kl_fp32: Infinite | None = Field(default=None, description="KL of output against source, both run in fp32")
    squared_error_fp32: Infinite | None = Field(
        default=None, description="relative squared error of the output against the source, both run in fp32"
    )
    reference: str = "fp32 source"

    @property
    def exact(self) -> bool:
        """Whether source and output agree in fp32 bit for bit; a KL of 0 can come from rounding."""
        return self.kl_fp32 == 0 and self.squared_error_fp32 == 0

    @property
    def title(self) -> str:
        return "KL" if self.measure == "kl" else self.measure

    @property
    def unit(self) -> str:
        return "nats" if self.measure == "kl" else f"in {self.measure}"


class ExceptionEntry(ReportObject):
    """Token ids that edits harm: the divergence from the source is over 0.01, and over 10 times bf16's divergence."""

    ids: list[int] = Field(description="one id, put into rows of other ids; or several ids, which fill rows at random")
    tokens: list[str] = Field(default=[], description="the tokens of these ids, from the tokenizer")
    kl: Real = Field(description="fp32 divergence of 8 rows: mean if it shows harm, else upper quartile, else median")
    kl_bf16: Real = Field(description="divergence with activations rounded stochastically to bf16, mean of 8 draws")
    kl_run: Real = Field(description="divergence of the source run in bf16")


class CountedEntry(ReportObject):
    """Counts of elements that are non-finite or saturated, except those that transformers makes so by design."""

    nonfinite: Count
    saturated: Count

    @property
    def broken(self) -> bool:
        return bool(self.nonfinite or self.saturated)


class PlacedEntry(ReportObject):
    """Where in the model an entry belongs; keys that are unknown or do not apply are absent."""

    stack: str | None = Field(None, description="encoder or decoder, also if the model has only one")
    block: Count | None = Field(None, description="number of the block in the stack, from 0")
    role: str | None = Field(
        None, description="the part of the block, such as cross-attention; in a regime, the operation, such as product"
    )


class SiteEntry(PlacedEntry, CountedEntry):
    """One site as measured in one regime. ``amax`` is the largest |x|, 65536 for an overflow."""

    name: str
    amax: NumberOrNaN
    limit: Real | None = Field(description="null if the site is not in fp16")
    headroom_bits: Real | None = Field(description="null if the site is not in fp16")
    benign: str | None = Field(description="why values left out of the counts are harmless")
    dtype: str | None = None
    fp32: NumberOrNaN | None = Field(default=None, description="the largest |x| in fp32, if the site broke in fp16")

    @property
    def reached(self) -> float:
        return self.amax if self.fp32 is None else self.fp32


class RunEntry(ReportObject):
    """The batches that a regime ran with one implementation of attention: their number and kinds."""

    attention: str
    batches: Count
    kinds: list[str]


class GradientSiteEntry(ReportObject):
    """Gradients of one operation at the loss scale. ``amax``: the largest. ``flushed``: the fraction that becomes 0."""

    name: str
    amax: Real
    flushed: Real


class GradientsEntry(ReportObject):
    """The gradients of a backward pass under fp16 AMP."""

    loss_scale: Real | None = Field(description="largest loss scale without overflow; null: every scale overflows")
    flushed: Real = Field(description="the fraction of gradient elements that become 0")
    largest: GradientSiteEntry | None = Field(
        description="largest gradient; if loss_scale is null, the first that overflows; null: the loss is not finite"
    )
    sites: list[GradientSiteEntry] = Field(description="the operations with the largest flushed fractions")


class RegimeEntry(CountedEntry):
    """The result of one regime, a way to run in fp16. ``amax`` and ``headroom_bits`` are those of the tightest site."""

    amax: Real
    headroom_bits: Real
    nonfinite_logits: Count = Field(default=0, description="non-finite outputs that a user would see")
    runs: list[RunEntry] = Field(default=[], description="batches run, by implementation of attention")
    sites: list[SiteEntry] = Field(description="those with the least headroom first")
    gradients: GradientsEntry | None = Field(default=None, description="gradients under amp in training")

    @property
    def reached(self) -> float:
        """The largest |x| of a broken site, from an fp32 run if there was one; ``amax`` if no site is broken."""
        broken = self.broken_sites
        limited = [site for site in broken if site.limit is not None] or broken
        return max((site.reached for site in limited), default=self.amax)

    @property
    def broken_sites(self) -> list[SiteEntry]:
        return sorted((site for site in self.sites if site.broken), key=lambda site: not site.nonfinite)

    @property
    def tightest(self) -> str | None:
        return next((site.name for site in self.sites if site.headroom_bits is not None), None)

    @property
    def measured(self) -> str:
        """What is measured at the tightest site, in a word: "gradient" or "value"."""
        return "gradient" if ":grad" in (self.tightest or "") else "value"


class BoundEntry(PlacedEntry):
    """The bound of one site: no input makes its value larger than ``bound``, or a partial sum larger than
    ``partial``."""

    name: str
    kind: str
    bound: NumberOrNaN
    partial: NumberOrNaN
    limit: Real
    headroom_bits: Real
    observed: Real | None = Field(description="the largest value found; null if nothing was run")
    holds: Flag

    @property
    def largest(self) -> float:
        return max(self.bound, self.partial)


class CertificateEntry(ReportObject):
    """The bounds of all sites, and the inputs and arithmetic for which they hold."""

    holds: Flag
    headroom_bits: Real
    max_length: Count = Field(description="largest number of positions in a sequence")
    splits: Count = Field(description="largest number of fp16 partial sums of one matrix product")
    train_mode: Flag = Field(default=False, description="whether the bounds include dropout")
    sites: list[BoundEntry] = Field(default=[], description="bounds by site; verify leaves them out")

    @property
    def over(self) -> list[BoundEntry]:
        return sorted((site for site in self.sites if not site.holds), key=lambda site: site.headroom_bits)


class AttackedSite(ReportObject):
    """The largest |x| that an attack reached at a site. In fp32, ``random`` is for random inputs, ``tokens`` for the
    token ids that the search found, and ``embeddings`` for the mixtures of token embeddings that it found. In fp16,
    ``half`` is for the same ids and mixtures. ``worst`` is the largest of the four values."""

    name: str
    worst: NumberOrNaN
    random: NumberOrNaN
    tokens: NumberOrNaN
    embeddings: NumberOrNaN
    half: NumberOrNaN
    limit: Real
    headroom_bits: Real
    ids: tuple[list[Count], list[Count]] | None = Field(description="ids of the worst input: encoder's, decoder's")

    @property
    def fp32(self) -> float:
        """The largest value found in fp32, which does not overflow where fp16 does."""
        return max(self.random, self.tokens, self.embeddings)


class AttackEntry(ReportObject):
    """The result of an attack, a gradient search for the worst input. The site with the least headroom comes first."""

    steps: Count
    seed: Count
    worst_headroom_bits: Real
    sites: list[AttackedSite]


class InexactEntry(ReportObject):
    """An edit: a factor on weights that changes the model's function. The divergences are None if no model ran. Edits
    of columns may be measured together; each then has the divergence of all of them."""

    site: str = Field(description="the site whose limit needs the edit")
    exponent: int | float = Field(description="log2 of the edit's factor, the least over its channels")
    columns: Count = Field(default=0, description="number of input channels scaled; 0 if it scales output channels")
    predicted: Real | None = Field(default=None, description="divergence in fp32 if the source had this edit alone")
    measured: Real | None = Field(default=None, description="the same in the written files")


class SearchEntry(ReportObject):
    """The search for token ids on which the edits do harm."""

    ids: Count = Field(description="number of token ids tried")
    covered: float | None = Field(
        default=None,
        description=(
            "fraction of token ids (in attention, of pairs of ids) whose values an edit changes by at most bf16's"
            " rounding error; the smallest over edited feed-forwards and attention heads; null if none is edited"
        ),
    )
    further: float = Field(description="fraction of rows of two random ids on which edits diverge more than bf16")


MAX_ERROR_RATIO = 4.0  # to bf16's relative squared error; an edit may cost 1.75 of it
MAX_ERROR_WITHOUT_DRIFT = 1 / 8  # a wrong factor of 2 gives a relative squared error of 1/4 at least
BF16_NOISE = 2.0**-20  # the relative squared error of bf16 where it happens to be exact


class OutputEntry(ReportObject):
    """One output of the transformers class, compared with the source's. If it has several layers, the worst counts.
    Errors are None if no model ran or none returned the output."""

    factor_log2: int | float | Sequence[int | float] = Field(
        description="log2 of the factor that rescaling put on the output, for all channels or for each"
    )
    error: Real | None = Field(default=None, description="relative squared error in fp32, after division by the factor")
    error_bf16: Real | None = Field(default=None, description="relative squared error of the source in bf16")

    @property
    def ratio(self) -> float:
        return (self.error or 0.0) / max(BF16_NOISE, self.error_bf16 or 0.0)

    def fits(self, *, drifts: bool) -> bool:
        """Return whether ``error`` is at most 4 times ``error_bf16``. If the plan keeps the model's function, ``error``
        must also be at most 1/8. drifts: whether the plan changes the function."""
        return self.ratio <= MAX_ERROR_RATIO and (drifts or (self.error or 0.0) <= MAX_ERROR_WITHOUT_DRIFT)
