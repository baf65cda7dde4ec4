"""The bounds of what stands behind an encoder in a folder of sentence-transformers.

Pooling makes one vector of a row's tokens, none of whose channels is larger than the tokens' are; a linear and a
normalisation read it. What the tokens' channels are at most is the certificate's bound of the encoder's output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.side_modules import DENSE, NORMALIZE, POOLING, SideModule
from ..errors import UserError
from ..families.types import Layout
from ..numerics import FP16_MAX
from .arithmetic import UNIT, Arithmetic, Bound, largest
from .certificate import Certificate
from .linear import bound_box

LIMITED_BY_ONE = ("Tanh", "Sigmoid")
"""Activations that give at most 1."""


SHRINKING = ("Identity", "ReLU", "GELU", "SiLU", *LIMITED_BY_ONE)
"""Activations that give nothing larger than what they are given."""


def with_side_modules(certificate: Certificate, layout: Layout, modules: Sequence[SideModule]) -> Certificate:
    """Return an encoder's certificate with the sites of the modules behind it, for their weights in fp16.

    A module of another class than pooling, linear and normalisation ends it: what stands behind it has no bound, and a
    linear there fails. Raises UserError for a linear of another width than what it reads.
    """
    if not modules or layout.head is not None:
        return certificate
    arithmetic, sites = certificate.arithmetic, list[Bound]()
    norm = layout.stacks()[-1].ends.norm
    # Kept in fp32, which may have rounded it down.
    caps = certificate.ranges[norm].output.amax.double() * (1 + 2.0**-20)
    for module in modules:
        if module.kind == POOLING:
            caps = torch.cat([caps * factor(mode, arithmetic.max_length) for mode in module.modes]) * (1 + 4 * UNIT)
            sites.append(Bound(module.name, "norm", largest(caps), largest(caps), FP16_MAX))
        elif module.kind == DENSE:
            made, caps = dense(module, caps, arithmetic)
            sites.append(Bound(f"{module.name}.linear", "output", made, made, FP16_MAX))
        elif module.kind == NORMALIZE:
            length = float(caps.norm()) * (1 + 4 * UNIT)
            sites.append(Bound(f"{module.name}:norm", "statistic", length, length, FP16_MAX))
            caps = caps.clamp(max=1 + 4 * UNIT)
        else:
            caps = torch.full_like(caps, math.inf)
    return replace(certificate, sites=(*certificate.sites, *sites))


def tiers_with(tiers: Mapping[str, bool], encoder: Certificate, whole: Certificate) -> dict[str, bool]:
    """Return which tiers hold of a folder, given which do of its encoder alone, and both certificates."""
    behind = all(site.holds for site in whole.sites[len(encoder.sites) :])
    return {name: held and behind for name, held in tiers.items()}


def factor(mode: str, longest: int) -> float:
    """Return how many times a token's largest channel the pooled one may be: 1 for a mean, however it is weighted, a
    maximum and a choice, √n for a sum over the root of the length."""
    return math.sqrt(longest) if mode == "mean_sqrt_len_tokens" else 1.0


def dense(module: SideModule, caps: Tensor, arithmetic: Arithmetic) -> tuple[float, Tensor]:
    """Return the largest bound of a linear on channels of at most ``caps``, and the bounds of what its activation
    gives, with the residual where there is one."""
    weight, bias = module.tensors["linear.weight"].half(), module.tensors.get("linear.bias")
    if weight.shape[1] != caps.numel():
        raise UserError(
            f"{module.name}: its linear reads {weight.shape[1]} channels, and {caps.numel()} come before it;"
            " use the config and weights of one checkpoint"
        )
    made = bound_box(caps, weight, None if bias is None else bias.half(), arithmetic)
    name = module.activation
    after = made.clamp(max=1) if name in LIMITED_BY_ONE else made * (1 + UNIT)
    if name not in SHRINKING:
        after = torch.full_like(made, math.inf)
    if module.config.get("use_residual"):
        other = module.tensors.get("residual.weight")
        after = after + (caps if other is None else bound_box(caps, other.half(), None, arithmetic))
        after = after * (1 + UNIT)
        made = torch.maximum(made, after)
    return largest(made), after
