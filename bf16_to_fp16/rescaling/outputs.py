"""The power of two on each output of a stock class under a plan. Logits keep every bit; states between layers have the
stream's exponent, last states that of the last norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..families.layout import Layout
from ..families.signals import LOGITS
from .channels import folded
from .exponents import OfChannels, exponents_of
from .plan import Plan

LAST = "last_hidden_state"
"""The output of the class without a head, and the last of ``hidden_states``, the decoder's if there is one."""


def output_factors(layout: Layout, plan: Plan) -> dict[str, OfChannels]:
    """Return the log2 of the factor on each output: one number, or one for each channel or choice. ``hidden_states``
    are all but the last, with the stack's name before it where there are two."""
    # At the ends of a soft cap a logit is the same after an edit.
    capped = layout.head is not None and layout.cap(layout.head) is not None
    factors: dict[str, OfChannels] = dict.fromkeys(layout.stock.gives, 0 if capped else plan.exponent(LOGITS))
    stacks = layout.stacks()
    for stack in stacks:
        whose = "" if len(stacks) == 1 else "encoder_" if stack.is_encoder else "decoder_"
        norm = layout.tensors[f"{stack.ends.norm}.weight"]
        last = exponents_of(norm, plan).full(norm.shape)
        factors[LAST if stack.is_last else f"{whose}{LAST}"] = folded(last)
        factors[f"{whose}hidden_states"] = plan.stream_exponent(layout.streams_read[stack.ends.norm])
        factors[f"{whose}attentions"] = 0
    if len(stacks) > 1:
        factors["cross_attentions"] = 0
    brought = [projector.gives for projector in layout.projectors if projector.gives]
    return factors | dict.fromkeys(brought, plan.stream_exponent(layout.streams[0]))


def input_factor(layout: Layout, plan: Plan) -> OfChannels:
    table = layout.tensors[layout.table(layout.stacks()[0].ends)]
    return folded(exponents_of(table, plan).full(table.shape)[0])


def on_request(name: str, outputs: Iterable[str]) -> bool:
    """Return whether a class gives an output only on request: inner states, attentions, and the last states of a class
    with logits among its ``outputs``."""
    inner = name.endswith(("hidden_states", "attentions")) and not name.startswith("image_")
    return inner or (name == LAST and any(each.endswith("logits") for each in outputs))


def moved(factors: Mapping[str, OfChannels]) -> dict[str, OfChannels]:
    return {name: factor for name, factor in factors.items() if factor}


def joined(one: OfChannels, other: OfChannels) -> OfChannels:
    return folded(torch.as_tensor(one) + torch.as_tensor(other))
