"""AdamW for parameters kept in bf16 or fp16 with no fp32 copy.

A step is computed in fp32, and only its result is rounded, stochastically or to nearest (see ``rounding``). Random bits
depend on (seed, step, parameter's position, element's index in the whole parameter). FSDP2 therefore gives the bits of
a single process, and under DDP every replica draws the same bits.

On a CPU eager and compiled steps give the same bits. On an accelerator they differ by rounding, because compiled
divisions are not rounded correctly."""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..errors import UserError, first_line
from . import rounding

ROUNDINGS = ("stochastic", "nearest")
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

CHUNK = 1 << 16  # elements of an eager piece: small for a processor's caches, large for the cost of calling
LONGEST = 1 << 24  # elements of any other piece
COMPILED_FROM = 1 << 24  # parameters of a group from which a compiled step earns the seconds that compiling it takes


# ---- one step of some elements -------------------------------------------------------------------------------------


def _coefficients(group: dict[str, Any], unscale: float, step: int, device: torch.device) -> Tensor:
    lr, (beta1, beta2), weight_decay = float(group["lr"]), group["betas"], group["weight_decay"]
    root = math.sqrt(1 - beta2**step)
    rate = lr * root / (1 - beta1**step)
    decay = 1 - lr * weight_decay
    exact = unscale, beta1, 1 - beta1, beta2, 1 - beta2, -rate, group["eps"] * root, decay
    return torch.tensor(exact, dtype=torch.float32, device=device)


_Tensors = tuple[Tensor, ...]
"""The parameter, its gradient and both moments, flat and of one length."""


def _update(tensors: _Tensors, key: Tensor, coefficients: Tensor, how: str) -> None:
    """Take one AdamW step on some elements in place, eagerly or inside torch.compile. key: from ``rounding.make_key``.
    coefficients: from ``_coefficients``. how: "stochastic" or "nearest"."""
    parameter, grad, exp_avg, exp_avg_sq = tensors
    # Tensors, because torch.compile would compile again for a new Python number.
    unscale, beta1, one_minus_beta1, beta2, one_minus_beta2, minus_rate, eps, decay = coefficients.unbind()
    value = parameter.to(torch.float32)
    g = grad.to(torch.float32) * unscale
    m = exp_avg.to(torch.float32).mul_(beta1).add_(g * one_minus_beta1)
    v = exp_avg_sq.to(torch.float32).mul_(beta2).add_((g * g).mul_(one_minus_beta2))
    # rsqrt is rounded correctly on a CPU; the eager sqrt of torch's Intel builds is not.
    # rsqrt of 0 or inf would make the product NaN. An infinite v has an infinite root, and so a step of 0.
    square = v.clamp(min=torch.finfo(torch.float32).tiny)
    root = square.clamp(max=torch.finfo(torch.float32).max).rsqrt_().mul_(square)
    value = value.mul_(decay).addcdiv_(m * minus_rate, root.add_(eps))

    stochastic = how == "stochastic" and parameter.dtype != torch.float32
    if stochastic or exp_avg.dtype != torch.float32:
        bits = rounding.random_bits(rounding.counters(len(parameter), parameter.device), key)
    if exp_avg.dtype != torch.float32:
        # To nearest, a bf16 second moment would never decay: 0.1% of it is less than half its gap.
        for_m, for_v = rounding.more_bits(bits, key)
        m, v = rounding.stochastic(m, exp_avg.dtype, for_m), rounding.stochastic(v, exp_avg.dtype, for_v)
    if stochastic:
        value = rounding.stochastic(value, parameter.dtype, bits)
    else:
        value = rounding.nearest(value, parameter.dtype)
    for tensor, result in ((parameter, value), (exp_avg, m), (exp_avg_sq, v)):
        if tensor is not result:
            tensor.copy_(result)


@functools.cache
def _compiled(kind: tuple[torch.dtype, ...], device: str, how: str) -> Callable[..., None] | str:
    """Return ``_update`` compiled for one combination of dtypes, device and rounding, or the first line of the
    error."""
    name = "_".join(map(str, (*kind, device, how))).replace(".", "_")
    # torch.compile gives up after eight recompilations of one code object, so each combination has its own.
    code = _update.__code__.replace(co_name=f"_update_{name}")
    function = types.FunctionType(code, _update.__globals__, code.co_name)
    update: Callable[..., None] = torch.compile(function, dynamic=True, fullgraph=True)
    tensors = [torch.zeros(64, dtype=dtype, device=device) for dtype in kind]
    key, numbers = torch.zeros(3, dtype=torch.int32, device=device), torch.ones(8, device=device)
    try:
        update(tuple(tensors), key, numbers, how)
    except Exception as error:  # no compiler, a failing one, a full disk: its exceptions are not documented
        return first_line(error)
    return update


def first_index(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 0
    # Not documented, but torch's own distributed checkpoints are cut by it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = parameter.shape
    _, offset = compute_local_shape_and_global_offset(whole, parameter.device_mesh, parameter.placements)
    return offset[0] * math.prod(whole[1:]) if offset else 0


# ---- the optimizer -------------------------------------------------------------------------------------------------


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) for parameters stored in bf16 or fp16 with no fp32 copy.

    params: parameters or groups of them, in bf16, fp16 or fp32 (which is not rounded); plain tensors or DTensors. Every
    option may be set per group.

    rounding: how a step is stored, ``"stochastic"`` or ``"nearest"``. moments: ``"float32"`` (8 bytes per element) or
    ``"bfloat16"`` (4, rounded stochastically). seed: of all random bits, from 0 to 2⁶³ − 1. compile: whether
    torch.compile makes one kernel; by default for groups of 2²⁴ elements or more, where a compiler works.

    ``torch.amp.GradScaler`` works with fp16 gradients: a step with inf or NaN changes nothing. ``GradScaler.unscale_``
    refuses fp16 gradients, so clip before the step at max_norm · scale.

    A resumed run equals an uninterrupted one, bit for bit. The state of torch.optim.AdamW can be loaded too. Raises
    UserError for bad options and parameters, and for a step at a loss scale that is 0 or not finite."""

    # GradScaler then sets grad_scale and found_inf as attributes before step(), as for torch's fused optimizers.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rounding: str = "stochastic",
        moments: str = "float32",
        seed: int = 0,
        compile: bool | None = None,
    ) -> None:
        # As many parameters as torch.optim.AdamW has, so that only the name changes; this class's own are keywords.
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"rounding": rounding, "moments": moments, "seed": seed, "compile": compile}
        try:
            super().__init__(params, defaults)
        except (TypeError, ValueError) as error:
            raise UserError(f"AdamW: {str(error).splitlines()[0]}") from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except UserError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the closure's result. If GradScaler has set
        ``grad_scale``, it divides the gradients. If its ``found_inf`` is not 0, nothing is updated."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0:
            return loss
        scale = 1.0 if grad_scale is None else float(grad_scale)
        if not 0 < scale < math.inf:
            raise UserError(
                f"AdamW: the loss scale is {scale:g}, so the gradients are lost; find what overflows, or restart from a"
                " checkpoint with a new GradScaler"
            )
        places = itertools.count()
        for group in self.param_groups:
            compiles = group["compile"]
            if compiles is None:
                compiles = sum(parameter.numel() for parameter in group["params"]) >= COMPILED_FROM
            coefficients = functools.cache(functools.partial(_coefficients, group, 1 / scale))
            for parameter, place in zip(group["params"], places, strict=False):
                if parameter.grad is not None:
                    self._advance(parameter, place, group, coefficients, compiles)
        return loss

    def _advance(
        self,
        parameter: Tensor,
        place: int,
        group: dict[str, Any],
        coefficients: Callable[[int, torch.device], Tensor],
        compiles: bool,
    ) -> None:
        state, local = self.state[parameter], _local(parameter)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                zeros = torch.zeros(local.shape, dtype=MOMENTS[group["moments"]], device=local.device)
                state[name] = _like(parameter, zeros)
        state["step"] += 1
        moments = (_local(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        tensors = tuple(t.contiguous().view(-1) for t in (local, _gradient(parameter), *moments))
        step, device = int(state["step"]), local.device
        update: Any = _update
        if compiles:
            update = _compiled(tuple(tensor.dtype for tensor in tensors), device.type, group["rounding"])
        if isinstance(update, str):
            if group["compile"]:
                raise UserError(f"AdamW: torch.compile fails here ({update}); leave compile at None")
            update = _update  # by default such a step is eager
        begin = first_index(parameter)
        longest = CHUNK if update is _update and device.type == "cpu" else LONGEST
        for start, stop, block, first in rounding.index_blocks(begin, begin + local.numel(), longest):
            key = rounding.make_key(int(group["seed"]), step, place, block, first)
            piece = tuple(tensor[start - begin : stop - begin] for tensor in tensors)
            words = torch.tensor(key, dtype=torch.int32, device=device)
            update(piece, words, coefficients(step, device), group["rounding"])
        if not local.is_contiguous():
            local.copy_(tensors[0].view(local.shape))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that ``state_dict()`` has returned. Its options replace the present ones, except ``compile``.
        The moments get the dtype of the option ``moments``."""
        before = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, options, saved_group in zip(self.param_groups, before, state_dict["param_groups"], strict=True):
            group |= {name: options[name] for name in options if name not in group or name == "compile"}
            _check(group)
            # torch has cast every floating tensor to its parameter's dtype: take the saved ones again.
            for parameter, saved_id in zip(group["params"], saved_group["params"], strict=True):
                saved = state_dict["state"].get(saved_id, {})
                if "step" in saved:
                    self.state[parameter]["step"] = torch.tensor(float(saved["step"]))
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in saved:
                        self.state[parameter][name] = _restored(name, saved[name], parameter, group)


def _restored(name: str, saved: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    saved, local = _local(saved), _local(parameter)
    if saved.shape != local.shape:
        raise UserError(
            f"AdamW: the saved {name} of a parameter has shape {tuple(saved.shape)}, here it has {tuple(local.shape)};"
            " load the state of the same model, sharded in the same way"
        )
    new = torch.empty(local.shape, dtype=MOMENTS[group["moments"]], device=local.device)
    return _like(parameter, new.copy_(saved))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    strides = tuple(math.prod(parameter.shape[dim + 1 :]) for dim in range(parameter.dim()))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=strides)


def _gradient(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise UserError("AdamW: a gradient is sparse; make the embedding with sparse=False")
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return _local(grad)


def _check(group: dict[str, Any]) -> None:
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise UserError(f"AdamW: betas is {betas!r}; give two numbers, for example (0.9, 0.999)")
    numbers = [(name, group[name], math.inf) for name in ("lr", "eps", "weight_decay")]
    for name, value, below in (*numbers, *(("a beta", beta, 1) for beta in betas)):
        number = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(number, int | float) or not 0 <= number < below:
            limit = "" if below == math.inf else f" and below {below:g}"
            raise UserError(f"AdamW: {name} is {number!r}; give a finite number, at least 0{limit}")
    for name, choices in (("rounding", ROUNDINGS), ("moments", tuple(MOMENTS))):
        if group[name] not in choices:
            raise UserError(f"AdamW: {name} is {group[name]!r}; choose from {', '.join(map(repr, choices))}")
    seed = group["seed"]
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise UserError(f"AdamW: seed is {seed!r}; give an integer from 0 to 2**63 - 1")
    for parameter in group["params"]:
        if parameter.dtype not in (*rounding.NARROW_DTYPES, torch.float32) or parameter.layout != torch.strided:
            kind = f"{parameter.dtype}, {parameter.layout}"
            raise UserError(f"AdamW: a parameter of shape {tuple(parameter.shape)} is {kind}; give bf16, fp16 or fp32")
        if isinstance(parameter, DTensor) and not all(p in (Shard(0), Replicate()) for p in parameter.placements):
            raise UserError(f"AdamW: a parameter is placed as {parameter.placements}; use Shard(0) or Replicate")
