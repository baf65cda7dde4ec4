"""The bounds of what stands behind an encoder in a folder of sentence-transformers.

Pooling makes one vector of a row's tokens, none of whose channels is larger than the tokens' are; a linear and a
normalisation read it. What the tokens' channels are at most is the certificate's bound of the encoder's output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.side_modules import DENSE, MODES, NORMALIZE, POOLING, SideModule
from ..errors import UserError
from ..families.layout import Layout
from ..numerics import FP16_MAX
from .arithmetic import UNIT, Arithmetic, Bound, largest
from .findings import Certificate
from .linear import bound_box

SHRINKING = ("Identity", "ReLU", "GELU", "SiLU", "Tanh")
"""Activations that give nothing larger than what they are given."""


def with_side_modules(certificate: Certificate, layout: Layout, modules: Sequence[SideModule]) -> Certificate:
    """Return an encoder's certificate with the sites of the modules behind it, for their weights in fp16.

    A module of another class than pooling, linear and normalisation, or one that reads or gives anything but the
    sentence's vector, ends it: what stands behind it has no bound, and a linear there fails. Raises UserError for a
    linear of another width than what it reads, or without a weight.
    """
    if not modules:
        return certificate
    arithmetic, sites = certificate.arithmetic, list[Bound]()
    # The encoder's, whatever else a file holds: sentence-transformers runs no decoder. Kept in fp32, which may have
    # rounded it down.
    tokens = certificate.ranges[layout.stacks()[0].ends.norm].output.amax.double() * (1 + 2.0**-20)
    caps = tokens
    for module in modules:
        if module.is_aside:
            caps, tokens = torch.full_like(caps, math.inf), torch.full_like(tokens, math.inf)
        if module.kind == POOLING:  # of the tokens, whatever came before
            caps = torch.cat([tokens * factor(mode, arithmetic.max_length) for mode in module.modes]) * (1 + 4 * UNIT)
            sites.append(Bound(module.name, "norm", largest(caps), largest(caps), FP16_MAX))
        elif module.kind == DENSE:
            made, caps = dense(module, caps, arithmetic)
            sites.append(Bound(f"{module.name}.linear", "output", made, made, FP16_MAX))
        elif module.kind == NORMALIZE:
            length = float(caps.norm()) * (1 + 4 * UNIT)
            sites.append(Bound(f"{module.name}:norm", "statistic", length, length, FP16_MAX))
            caps = caps.clamp(max=1 + 4 * UNIT)
        else:
            caps, tokens = torch.full_like(caps, math.inf), torch.full_like(tokens, math.inf)
    most: dict[str, Bound] = {}
    for site in sites:  # a folder may be listed twice
        before = most.get(site.name)
        most[site.name] = site if before is None or site.largest >= before.largest else before
    return replace(certificate, sites=(*certificate.sites, *most.values()))


def factor(mode: str, longest: int) -> float:
    """Return how many times a token's largest channel the pooled one may be: 1 for a mean, however it is weighted, a
    maximum and a choice, √n for a sum over the root of the length, infinity for what is not known."""
    if mode not in MODES:
        return math.inf
    return math.sqrt(longest) if mode == "mean_sqrt_len_tokens" else 1.0


def dense(module: SideModule, caps: Tensor, arithmetic: Arithmetic) -> tuple[float, Tensor]:
    """Return the largest bound of a linear on channels of at most ``caps``, and the bounds of what its activation
    gives, with the residual where there is one."""
    if "linear.weight" not in module.tensors:
        raise UserError(f"{module.name}: its linear has no weight; fetch the whole checkpoint again")
    weight, bias = module.tensors["linear.weight"].half(), module.tensors.get("linear.bias")
    if weight.shape[1] != caps.numel():
        raise UserError(
            f"{module.name}: its linear reads {weight.shape[1]} channels, and {caps.numel()} come before it;"
            " use the config and weights of one checkpoint"
        )
    made = bound_box(caps, weight, None if bias is None else bias.half(), arithmetic)
    name = module.activation
    after = made.clamp(max=1) if name == "Tanh" else made * (1 + UNIT)
    if name == "Sigmoid":  # ½ of 0
        after = torch.ones_like(made)
    elif name not in SHRINKING:
        after = torch.full_like(made, math.inf)
    if module.config.get("use_residual"):
        other = module.tensors.get("residual.weight")
        after = after + (caps if other is None else bound_box(caps, other.half(), None, arithmetic))
        after = after * (1 + UNIT)
        made = torch.maximum(made, after)
    return largest(made), after
