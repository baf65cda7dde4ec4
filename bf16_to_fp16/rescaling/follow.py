"""Make an optimizer step in the source's units while the weights in memory are rescaled. Rescaling multiplies a weight
by 2^e and its gradient by 2^-e. Around each step both are brought to the source's scale and back, exactly, so that any
optimizer sees and remembers the source's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UserError
from ..families.layout import Layout
from .apply import scale
from .exponents import Exponents, check_plan_fits, exponents_of
from .plan import Plan


def exponents_by_parameter(model: torch.nn.Module, layout: Layout, plan: Plan) -> dict[torch.nn.Parameter, Exponents]:
    check_plan_fits(layout, plan)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    scaled = {name: tensor for name, tensor in layout.tensors.items() if name in parameters}
    return {parameters[name]: exponents_of(tensor, plan) for name, tensor in scaled.items()}


def follow(
    optimizer: torch.optim.Optimizer,
    exponents: Mapping[torch.nn.Parameter, Exponents],
    max_grad_norm: float | None = None,
) -> None:
    """Make ``optimizer`` step in the source's units, with gradients clipped there to the L2 norm ``max_grad_norm``.

    Raises UserError from a step with a closure, whose gradients come too late, with a sharded parameter (FSDP, ZeRO-3)
    or with none of the parameters (ZeRO-1 and 2 step flat copies).
    """
    shapes = {parameter: parameter.shape for parameter in exponents}
    placed: dict[tuple[torch.nn.Parameter, torch.device], Exponents] = {}

    def move(sign: int, *, gradients: bool) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in exponents or parameter.grad is None:
                    continue
                if parameter.shape != shapes[parameter]:
                    raise UserError(
                        "a sharded parameter has not the shape that its exponents are for; train in one process or"
                        " under DDP, or leave out follow"
                    )
                place = parameter, parameter.device
                placed[place] = placed.get(place) or exponents[parameter].to(parameter.device)
                full = placed[place].full(parameter.shape, parameter.device)
                scale(parameter.data, sign * full, placed[place].offset)
                if gradients:
                    scale(parameter.grad, -sign * full)

    def before(_: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if any(map(callable, (*args[1:], options.get("closure")))):
            raise UserError(
                "step was given a closure, whose gradients are not in the source's units; call backward before step,"
                " or leave out follow"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if exponents and exponents.keys().isdisjoint(parameters):
            raise UserError(
                "the optimizer has none of the rescaled weights, but copies such as DeepSpeed makes; train under DDP,"
                " or leave out follow"
            )
        move(-1, gradients=True)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)

    # Gradients are not scaled back: after the step they are thrown away.
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: move(1, gradients=False))
