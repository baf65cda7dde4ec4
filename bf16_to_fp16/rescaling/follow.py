"""Make an optimizer step in the source's units while the weights in memory are rescaled. Before each step weights and
gradients are brought to the source's scale, exactly; after it the weights go back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UserError
from ..families.layout import Layout
from .apply import scale
from .exponents import Exponents, check_plan_fits, exponents_of
from .plan import Plan

STEPPING = "_fp16_stepping"  # attribute of a model while its weights are at the source's scale for a step


def exponents_by_parameter(model: torch.nn.Module, layout: Layout, plan: Plan) -> dict[torch.nn.Parameter, Exponents]:
    check_plan_fits(layout, plan)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    scaled = {name: tensor for name, tensor in layout.tensors.items() if name in parameters}
    return {parameters[name]: exponents_of(tensor, plan) for name, tensor in scaled.items()}


def follow(
    optimizer: torch.optim.Optimizer,
    exponents: Mapping[torch.nn.Parameter, Exponents],
    model: torch.nn.Module,
    max_grad_norm: float | None = None,
) -> None:
    """Make each step of ``optimizer`` act at the source's scale, although ``exponents`` scale the weights in memory.

    max_grad_norm: the L2 norm to which gradients are clipped at the source's scale; None for no clipping. Raises
    UserError if it is not positive. A step raises UserError for a closure, for a sharded parameter (FSDP, ZeRO-3) or
    copied parameters (ZeRO-1 and 2), and after a step that failed."""
    if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
        raise UserError(f"max_grad_norm is {max_grad_norm}; give a positive number, or None for no clipping")
    shapes = {parameter: parameter.shape for parameter in exponents}
    placed: dict[tuple[torch.nn.Parameter, torch.device], Exponents] = {}
    own = set(model.parameters()).intersection(parameters_of(optimizer))

    def move(sign: int, *, gradients: bool) -> None:
        for parameter in parameters_of(optimizer):
            if parameter in exponents and parameter.grad is not None:
                place = parameter, parameter.device
                placed[place] = placed.get(place) or exponents[parameter].to(parameter.device)
                full = placed[place].full(parameter.shape, parameter.device)
                scale(parameter.data, sign * full, placed[place].offset)
                if gradients:
                    scale(parameter.grad, -sign * full)

    def before(_: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        parameters = parameters_of(optimizer)
        check_whole(model)
        if any(map(callable, (*args[1:], options.get("closure")))):
            raise UserError(
                "step was given a closure, whose gradients cannot be rescaled; call backward before step, or do not"
                " call follow()"
            )
        if own and own.isdisjoint(parameters):
            raise UserError(
                "the optimizer has copies instead of the model's weights, as under DeepSpeed; train under DDP, or do"
                " not call follow()"
            )
        if any(parameter.shape != shapes.get(parameter, parameter.shape) for parameter in parameters):
            raise UserError(
                "a parameter is sharded, so the plan's exponents do not fit its shape; train in one process or under"
                " DDP, or do not call follow()"
            )
        model.__dict__[STEPPING] = True
        move(-1, gradients=True)
        if max_grad_norm is not None:
            # torch's scaler leaves the gradients of fused optimizers scaled, and tells by how much.
            scaled = getattr(optimizer, "grad_scale", None)
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm * (1.0 if scaled is None else float(scaled)))

    def after(*_: Any) -> None:
        move(1, gradients=False)  # not the gradients, which are thrown away after a step
        del model.__dict__[STEPPING]

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_whole(model: torch.nn.Module) -> None:
    if STEPPING in model.__dict__:
        raise UserError(
            "a step of the optimizer failed half-way, and left the weights between two scales; load the last"
            " saved checkpoint"
        )
