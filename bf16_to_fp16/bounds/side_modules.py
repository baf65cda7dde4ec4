"""The bounds of what stands behind an encoder in a folder of sentence-transformers.

Pooling makes one vector of a row's tokens; linears, norms and a normalisation read it. What the tokens' channels are at
most is the certificate's bound of the encoder's output. The other end counts as well: a normalisation divides by the
vector's length, with an eps of 1e-12 that is 0 in fp16, so that a vector of zeros becomes NaN. That no input gives one
is proven from the least that its largest channel can be, or not claimed: of a token's own channels that is what the
encoder's last norm makes of them. ``docs/certificate.md`` has the lemmas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..checkpoint.side_modules import DENSE, DROPOUT, LAYER_NORM, MODES, NORM, POOLING, SideModule
from ..errors import UserError
from ..families.layout import Layout
from ..numerics import FP16_MAX, FP16_STEP
from .arithmetic import COMPUTED, TINY, UNIT, UNIT32, Arithmetic, Bound, growth, largest
from .findings import Certificate
from .kinds import SiteKind
from .linear import bound_box, layer_normalised

SHRINKING = ("Identity", "ReLU", "GELU", "SiLU", "Tanh")
"""Activations that give nothing larger than what they are given."""

CHOOSING = ("cls", "max", "lasttoken")  # ways to pool that give a token's own channels
EXACT_COUNT = 2048  # up to here fp16 counts in ones; from here on adding one more may be rounded away
LAYER_NORM_EPS = 1e-5  # of torch's ``LayerNorm``, which sentence-transformers makes with no other

LEAST_SQUARED = 2.0**-12
"""Numbers from here on have squares in fp16 that are not 0, at least two thirds of the true ones."""


@dataclass
class Vector:
    """What is known of a sentence's vector.

    ``caps``: the largest magnitude of each channel: fp64 [d]. ``least``: what its largest magnitude is at least, 0
    where nothing is known.
    """

    caps: Tensor
    least: float = 0.0


@dataclass
class Behind:
    """The sites behind an encoder, found module by module; ``tokens``: the bound of each channel of its output.
    ``least``: what the largest of a token's channels is at least, 0 where nothing is known."""

    tokens: Tensor
    arithmetic: Arithmetic
    least: float = 0.0
    sites: dict[str, Bound] = field(default_factory=dict)

    def note(self, name: str, kind: SiteKind, bound: Tensor | float, limit: float = FP16_MAX) -> None:
        """Record a site; of a folder that is listed twice the larger bound counts."""
        top, before = largest(bound), self.sites.get(name)
        if before is None or top >= before.bound:
            self.sites[name] = Bound(name, kind, top, top, limit)

    def run(self, module: SideModule, vector: Vector) -> Vector:
        """Record the sites of a module and return what it makes of a vector."""
        if module.is_aside:
            # What the next ones read is not known, and a site says so.
            self.note(module.name, SiteKind.OUTPUT, math.inf)
            self.tokens, self.least = torch.full_like(self.tokens, math.inf), 0.0
            vector = Vector(torch.full_like(vector.caps, math.inf))
        if module.kind == POOLING:  # of the tokens, whatever came before
            return self.pooled(module)
        steps = {DENSE: self.dense, LAYER_NORM: self.layer_norm, DROPOUT: self.dropout}
        return steps.get(module.kind, self.normalised)(module, vector)

    def pooled(self, module: SideModule) -> Vector:
        """Bound a pooling: what it sums in fp16, where it does, and what it gives."""
        made = [pooled(mode, self.tokens, self.arithmetic, prompt=module.includes_prompt) for mode in module.modes]
        caps = torch.cat([caps for caps, _ in made])
        self.note(module.name, SiteKind.NORM, caps)
        if self.arithmetic.norms16:
            self.note(f"{module.name}:sum", SiteKind.STATISTIC, max(total for _, total in made))
        # Behind a prompt that is cut off whole no token may be left, of which these ways make zeros.
        own = module.includes_prompt and any(mode in ("cls", "lasttoken") for mode in module.modes)
        return Vector(caps, self.least if own else 0.0)

    def dense(self, module: SideModule, vector: Vector) -> Vector:
        """Bound a linear with its activation and its residual.

        Raises UserError for one of another width than what it reads, or without a weight.
        """
        a, caps = self.arithmetic, vector.caps
        weight = matrix_of(module, "linear", caps)
        bias = module.tensors.get("linear.bias")
        made = bound_box(caps, weight, None if bias is None else bias.half(), a)
        # What is computed is off from the bias by at most what the bound adds to it.
        centre = torch.zeros_like(made) if bias is None or a.sums16 else bias.half().double()
        low = 2 * centre.abs() - made
        name = module.activation
        after = made * (1 + UNIT)
        if name == "Tanh":
            after, low = after.clamp(max=1), torch.tanh(low) * 0.9
        elif name == "Sigmoid":  # ½ of 0
            after, low = torch.ones_like(made), 0.9 * torch.sigmoid(-made)
        elif name in ("ReLU", "GELU", "SiLU"):  # at least half of what is positive
            low = torch.where(centre > 0, 0.45 * low, torch.zeros_like(low))
        elif name not in SHRINKING:
            after, low = torch.full_like(made, math.inf), torch.zeros_like(low)
        if module.config.get("use_residual"):
            projected = "residual.weight" in module.tensors or len(weight) != caps.numel()
            after = after + (bound_box(caps, matrix_of(module, "residual", caps), None, a) if projected else caps)
            after, low = after * (1 + UNIT), torch.zeros_like(low)
            made = torch.maximum(made, after)
        self.note(f"{module.name}.linear", SiteKind.OUTPUT, made)
        return Vector(after, at_least(low))

    def layer_norm(self, module: SideModule, vector: Vector) -> Vector:
        """Bound a LayerNorm of the vector; raises UserError as ``dense`` does."""
        a, caps = self.arithmetic, vector.caps
        weight, shift = (module.tensors.get(f"{NORM}.{name}") for name in ("weight", "bias"))
        if weight is None or shift is None or weight.shape != caps.shape or shift.shape != caps.shape:
            raise UserError(
                f"{module.name}: its norm has not a weight and a bias for each of the {caps.numel()} channels that come"
                " before it; use the config and weights of one checkpoint"
            )
        gain, shift = weight.half().double(), shift.half().double()
        if a.norms16:
            length = float(caps.norm())
            self.note_squares(module, max(length**2, math.sqrt(caps.numel()) * length), caps.numel())
        made = layer_normalised(gain, shift, min(float(caps.mean()), FP16_MAX), LAYER_NORM_EPS, a).bound
        if not caps.isfinite().all():
            made = torch.full_like(made, math.inf)
        self.note(f"{module.name}.{NORM}:layer_norm", SiteKind.NORM, made)
        return Vector(made, at_least(2 * shift.abs() - made))

    def dropout(self, module: SideModule, vector: Vector) -> Vector:
        """Bound a dropout, which does nothing but in training."""
        if not self.arithmetic.train:
            return vector
        rate = module.config.get("dropout", 0.2)
        known = isinstance(rate, (int, float)) and 0 <= rate < 1
        caps = self.arithmetic.rounded(vector.caps / (1 - rate if known else 0.0))
        self.note(f"{module.name}:mul", SiteKind.OUTPUT, caps)
        return Vector(caps)

    def normalised(self, module: SideModule, vector: Vector) -> Vector:
        """Bound a division by the vector's length: the length, its square where fp16 squares, and its inverse, which is
        infinite where the vector may be 0."""
        a, width, length = self.arithmetic, vector.caps.numel(), float(vector.caps.norm())
        self.note(f"{module.name}:norm", SiteKind.STATISTIC, length * (1 + 4 * UNIT))
        # A length under 2^-14 is rounded to fp16's step, which is at most half of what the largest channel is.
        least, longest, shortest = FP16_STEP, 1 + 4 * UNIT, (1 - 8 * UNIT) / 1.5
        if a.norms16:
            self.note_squares(module, length**2, width)
            # A sum of squares is at least the largest, of which fp16 has two thirds or more, and at most so many times.
            least, longest, shortest = LEAST_SQUARED, 1.25, 1 / math.sqrt(1.6 * growth(width))
        inverse = math.inf if vector.least == 0 else 1 / vector.least
        self.note(f"{module.name} ({SiteKind.ZERO_VECTOR})", SiteKind.ZERO_VECTOR, inverse, 1 / least)
        # A short vector becomes longer, so that what its channels were at most is of no use.
        return Vector(torch.full_like(vector.caps, longest), max(0.0, shortest / math.sqrt(width) - TINY))

    def note_squares(self, module: SideModule, most: float, width: int) -> None:
        """Record the largest sum of squares of a norm in fp16."""
        self.note(f"{module.name} (sum of squares)", SiteKind.SQUARES, most * growth(width) + width * TINY)


def with_side_modules(certificate: Certificate, layout: Layout, modules: Sequence[SideModule]) -> Certificate:
    """Return an encoder's certificate with the sites of the modules behind it, for their weights in fp16.

    Where a module reads or gives anything but the sentence's vector, nothing behind it has a bound. Raises UserError
    for a linear or norm of another width than what it reads, or without a weight.
    """
    return replace(certificate, sites=(*certificate.sites, *sites_behind(certificate, layout, modules)))


def sites_behind(certificate: Certificate, layout: Layout, modules: Sequence[SideModule]) -> Sequence[Bound]:
    """Return the sites that ``with_side_modules`` adds to a certificate."""
    if not modules:
        return ()
    behind = Behind(tokens_of(certificate, layout), certificate.arithmetic, least_token(certificate, layout))
    vector = Vector(behind.tokens, behind.least)
    for module in modules:
        vector = behind.run(module, vector)
    return tuple(behind.sites.values())


def tokens_of(certificate: Certificate, layout: Layout) -> Tensor:
    """Return the bound of each channel of what is pooled: fp64 [d].

    Of most models with a decoder sentence-transformers runs the encoder alone, of others the whole, whose stacks have
    one width; both are covered.
    """
    bounds = []
    for stack in layout.stacks():
        # Kept in fp32, which may have rounded it down.
        bound = certificate.ranges[stack.ends.norm].output.amax.double() * (1 + 2.0**-20)
        dropped = certificate.at(f"{stack.ends.dropouts[-1]}:mul") if stack.ends.dropouts else None
        if certificate.arithmetic.train and dropped is not None:
            bound = certificate.arithmetic.rounded(bound * max(1.0, dropped / largest(bound)) * COMPUTED)
        bounds.append(bound)
    return torch.stack([bound for bound in bounds if bound.shape == bounds[0].shape]).amax(0)


def least_token(certificate: Certificate, layout: Layout) -> float:
    """Return what the largest channel of what is pooled is at least, 0 where nothing is known: in training a dropout
    may leave none."""
    stacks = layout.stacks()
    if certificate.arithmetic.train and any(stack.ends.dropouts for stack in stacks):
        return 0.0
    return min(certificate.least.get(stack.ends.norm, 0.0) for stack in stacks)


def matrix_of(module: SideModule, name: str, caps: Tensor) -> Tensor:
    """Return a linear's weight in fp16; raise UserError where it has none for so many channels."""
    weight = module.tensors.get(f"{name}.weight")
    if weight is None or weight.dim() != 2:
        raise UserError(f"{module.name}: its {name} has no weight; fetch the whole checkpoint again")
    if weight.shape[1] != caps.numel():
        raise UserError(
            f"{module.name}: its {name} reads {weight.shape[1]} channels, and {caps.numel()} come before it;"
            " use the config and weights of one checkpoint"
        )
    return weight.half()


def at_least(low: Tensor) -> float:
    """Return what the largest magnitude is at least after rounding, where each is at least ``low``."""
    most = float(low.max()) * (1 - 2 * UNIT) - TINY if low.numel() else 0.0
    return most if math.isfinite(most) and most > 0 else 0.0


def pooled(mode: str, caps: Tensor, arithmetic: Arithmetic, *, prompt: bool = True) -> tuple[Tensor, float]:
    """Return the bounds of what a way to pool makes of tokens whose channels are at most ``caps``, and of the sums that
    it makes in fp16; prompt: whether the tokens of a prompt are pooled too.

    A mean of n tokens, weighted or not, is a sum over a sum of the weights. In fp32 both are off by n + 8 units of
    2⁻²⁴ at most. Where norms compute in fp16 both are fp16 numbers, and with sums in fp16 the first may be larger by
    ``growth``, the second stops growing at 2048 ones.
    """
    a, n = arithmetic, arithmetic.max_length
    if mode not in MODES or not gives_numbers(mode, a, prompt):
        return torch.full_like(caps, math.inf), math.inf
    if mode in CHOOSING:
        return caps, 0.0
    weighted = mode == "weightedmean"
    weights = n * (n + 1) / 2 if weighted else float(n)
    more, less = 1 + (n + 8) * UNIT32, 1 - (n + 8) * UNIT32
    if a.sums16:
        more, less = growth(n), 1 / (1 + n * UNIT) if weighted else min(n, EXACT_COUNT) / n
    if a.norms16:
        more, less = more * (1 + UNIT) ** 3, less * (1 - UNIT) ** 3
    if less <= 0:
        return torch.full_like(caps, math.inf), math.inf
    total = max(largest(caps), 1.0) * weights * more
    divisor = math.sqrt(weights * less) if mode == "mean_sqrt_len_tokens" else weights * less
    return a.rounded(caps * (weights * more / divisor) * COMPUTED), total


def gives_numbers(mode: str, arithmetic: Arithmetic, prompt: bool) -> bool:
    """Return whether a way to pool gives numbers even where no token is left, as behind a prompt that is cut off: of
    none the maximum is −inf, and a mean 0/0 where the 1e-9 that it divides by at least is 0 in fp16."""
    return prompt or mode in ("cls", "lasttoken") or (mode != "max" and not arithmetic.norms16)
