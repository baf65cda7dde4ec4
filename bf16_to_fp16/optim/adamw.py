"""AdamW for parameters kept in bf16 or fp16 with no fp32 copy.

The step is computed in fp32 from what is stored and only the last store is rounded: stochastically, so that updates far
below a weight's gap still add up, or to nearest. See ``rounding`` for the arithmetic. The moments obey the same rule: a
bf16 second moment that is rounded to nearest never decays, since 0.1% of it is less than half its gap.

Random bits belong to (seed, step, parameter's position, element's index in the whole parameter). A DTensor's shard
knows its place in the whole, so FSDP2 gives the bits of a single process; under DDP every replica draws the same.

One function updates a piece of consecutive elements: eagerly, on pieces that stay in a processor's caches; or compiled
by torch.compile into one kernel that reads and writes everything once. Small pieces are packed together. On a CPU all
give the same bits, because every operation that is used is rounded correctly there: ``rsqrt`` is, while the eager
``sqrt`` of torch's Intel builds is not. On an accelerator compiled divisions are not, and the two agree to rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..errors import UserError, first_line
from . import rounding

ROUNDINGS = ("stochastic", "nearest")
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

COMPILED_FROM = 1 << 24  # parameters of a group from which a compiled step earns the seconds that compiling it takes


class _Sizes(NamedTuple):
    """Elements of the longest piece, of a pack of pieces, and of the longest piece that is packed."""

    piece: int
    pack: int
    packed: int


def _sizes(device: torch.device, compiled: bool) -> _Sizes:
    # Eager pieces stay in a CPU's caches; a call on an accelerator costs as much as copying a million elements.
    if device.type == "cpu":
        return _Sizes(1 << 24 if compiled else rounding.CHUNK, rounding.CHUNK, 1 << 14)
    return _Sizes(1 << 24, 1 << 22, 1 << 20)


# ---- one step of some elements -------------------------------------------------------------------------------------


def _coefficients(group: dict[str, Any], step: int, unscale: float, device: torch.device) -> Tensor:
    lr, (beta1, beta2), weight_decay = float(group["lr"]), group["betas"], group["weight_decay"]
    root = math.sqrt(1 - beta2**step)
    rate = lr * root / (1 - beta1**step)
    decay = 1 - lr * weight_decay
    exact = unscale, beta1, 1 - beta1, beta2, 1 - beta2, -rate, group["eps"] * root, decay
    return torch.tensor(exact, dtype=torch.float32, device=device)


_Tensors = tuple[Tensor, ...]
"""Parameter, gradient and both moments: flat and of one length."""


def _update(tensors: _Tensors, counter: Tensor | None, key: Tensor, coefficients: Tensor, how: str) -> None:
    """Step some elements in place, eagerly or inside torch.compile.

    counter: int32, None for 0, 1, 2, …. key: as ``rounding`` takes it, for all elements or a column for each.
    What changes is in tensors: for a number a kernel is compiled anew.
    """
    parameter, grad, exp_avg, exp_avg_sq = tensors
    unscale, beta1, one_minus_beta1, beta2, one_minus_beta2, minus_rate, eps, decay = coefficients.unbind()
    value = parameter.to(torch.float32)
    g = grad.to(torch.float32) * unscale
    m = exp_avg.to(torch.float32).mul_(beta1).add_(g * one_minus_beta1)
    v = exp_avg_sq.to(torch.float32).mul_(beta2).add_((g * g).mul_(one_minus_beta2))
    # rsqrt of neither 0 nor inf, of which the product would be NaN; of inf it is inf, so that the step is 0.
    square = v.clamp(min=torch.finfo(torch.float32).tiny)
    root = square.clamp(max=torch.finfo(torch.float32).max).rsqrt_().mul_(square)
    value = value.mul_(decay).addcdiv_(m * minus_rate, root.add_(eps))

    stochastic = how == "stochastic" and parameter.dtype != torch.float32
    if stochastic or exp_avg.dtype != torch.float32:
        if counter is None:
            counter = rounding.counters(len(parameter), parameter.device)
        bits = rounding.random_bits(counter, key)
    if exp_avg.dtype != torch.float32:
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
    """Return ``_update`` compiled for one combination of dtypes and options, or in a line why it cannot be.

    torch.compile counts recompilations by code object and gives up after eight; each variant has a copy of its own,
    which is compiled once for all lengths.
    """
    name = "_".join(map(str, (*kind, device, how))).replace(".", "_")
    code = _update.__code__.replace(co_name=f"_update_{name}")
    function = types.FunctionType(code, _update.__globals__, code.co_name)
    update: Callable[..., None] = torch.compile(function, dynamic=True, fullgraph=True)
    tensors = [torch.zeros(64, dtype=dtype, device=device) for dtype in kind]
    key, numbers = torch.zeros(3, dtype=torch.int32, device=device), torch.ones(8, device=device)
    try:
        update(tuple(tensors), None, key, numbers, how)
    except Exception as error:  # no compiler, one that fails, a full disk: what it raises is not said
        return first_line(error)
    return update


# ---- pieces of consecutive elements --------------------------------------------------------------------------------


class _Piece(NamedTuple):
    tensors: _Tensors
    key: tuple[int, int, int]

    @property
    def length(self) -> int:
        return len(self.tensors[0])

    @property
    def kind(self) -> tuple[torch.dtype, ...]:
        return tuple(tensor.dtype for tensor in self.tensors)


def local_runs(parameter: Tensor) -> list[tuple[int, int]]:
    """Return (start, length) of each run of consecutive indices in the elements that this rank has of a parameter.

    One run for a whole tensor and for shards of the first dimension, as FSDP2 makes; one for every row of the others.
    """
    whole = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return [(0, parameter.numel())]
    # Not documented, but torch's own distributed checkpoints are cut by it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(whole, parameter.device_mesh, parameter.placements)
    if math.prod(local) == 0:
        return []
    cut = max((dim for dim in range(len(whole)) if local[dim] != whole[dim]), default=0)
    strides = _strides(whole)
    first = sum(place * stride for place, stride in zip(offset, strides, strict=True))
    starts = [
        first + sum(row * stride for row, stride in zip(rows, strides, strict=False))
        for rows in itertools.product(*map(range, local[:cut]))
    ]
    return [(start, math.prod(local[cut:])) for start in starts]


def _pieces(
    tensors: _Tensors, runs: Iterable[tuple[int, int]], identity: tuple[int, int, int], size: int
) -> list[_Piece]:
    """Cut a parameter's flat tensors, which lie at the indices of ``runs``, into pieces of at most ``size`` elements.

    identity: seed, step, parameter.
    """
    pieces, done = [], 0
    for run, length in runs:
        for start, stop, block, first in rounding.index_blocks(run, run + length, size):
            part = tuple(tensor[done : done + stop - start] for tensor in tensors)
            pieces.append(_Piece(part, rounding.make_key(*identity, block, first)))
            done += stop - start
    return pieces


def _packs(pieces: Iterable[_Piece], sizes: _Sizes) -> Iterator[list[_Piece]]:
    packs: dict[Any, list[_Piece]] = {}
    filled: dict[Any, int] = {}
    for piece in pieces:
        if piece.length > sizes.packed:
            yield [piece]
            continue
        if piece.kind in packs and filled[piece.kind] + piece.length > sizes.pack:
            yield packs.pop(piece.kind)
        pack = packs.setdefault(piece.kind, [])
        filled[piece.kind] = piece.length + (filled[piece.kind] if pack else 0)
        pack.append(piece)
    yield from packs.values()


def _step_pack(pack: list[_Piece], update: Callable[..., None], *rest: Any) -> None:
    """Update a piece, or several with as many operations: on copies end to end, which are copied back."""
    device, lengths = pack[0].tensors[0].device, [piece.length for piece in pack]
    keys = torch.tensor([piece.key for piece in pack], dtype=torch.int32, device=device)
    if len(pack) == 1:
        return update(pack[0].tensors, None, keys[0], *rest)
    columns = [list(column) for column in zip(*(p.tensors for p in pack), strict=True)]
    joined = [torch.cat(column) for column in columns]
    counts, counter = torch.tensor(lengths, device=device), rounding.counters(max(lengths), device)
    keys = keys.T.repeat_interleave(counts, dim=1, output_size=sum(lengths))
    update(tuple(joined), torch.cat([counter[:length] for length in lengths]), keys, *rest)
    for place, (column, source) in enumerate(zip(columns, joined, strict=True)):
        if place != 1:  # of the gradient nothing has changed
            torch._foreach_copy_(column, list(source.split(lengths)))


def _kernel(tensors: _Tensors, group: dict[str, Any], compiles: bool) -> Callable[..., None]:
    """Return what updates such tensors: ``_update``, or it compiled.

    Raises UserError where ``compile`` was asked for and fails; by default such a step is eager.
    """
    kind = tuple(tensor.dtype for tensor in tensors)
    update = _compiled(kind, tensors[0].device.type, group["rounding"]) if compiles else _update
    if isinstance(update, str) and group["compile"]:
        raise UserError(f"AdamW: torch.compile makes no step here ({update}); leave it to compile=None")
    return _update if isinstance(update, str) else update


def _advance(pieces: Sequence[_Piece], group: dict[str, Any], step: int, unscale: float, compiles: bool) -> None:
    if not pieces:
        return
    device = pieces[0].tensors[0].device
    coefficients = _coefficients(group, step, unscale, device)
    for pack in _packs(pieces, _sizes(device, compiles)):
        update = _kernel(pack[0].tensors, group, compiles)
        _step_pack(pack, update, coefficients, group["rounding"])


# ---- the optimizer -------------------------------------------------------------------------------------------------


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) whose parameters are stored in bf16 or fp16 and nowhere else.

    params: parameters or groups of them, in bf16, fp16 or fp32 (which is not rounded); plain tensors or DTensors. Every
    option may be set per group.

    rounding: how a step is stored, ``"stochastic"`` or ``"nearest"``. moments: ``"float32"`` (8 bytes per element) or
    ``"bfloat16"`` (4, rounded stochastically). seed: from 0 to 2⁶³ − 1, of all random bits. compile: one kernel by
    torch.compile instead of eager chunks; by default for groups of 2²⁴ elements or more, where a compiler works. It
    changes speed only, and is not taken from a loaded state.

    Under ``torch.amp.GradScaler`` fp16 gradients work: the scale is divided out in fp32, and a step with inf or NaN
    changes nothing. ``GradScaler.unscale_`` refuses fp16 gradients, so clip before the step at max_norm · scale.

    state_dict() and load_state_dict() keep every bit, the step and the seed, so a resumed run equals an uninterrupted
    one; the state of torch.optim.AdamW loads too. Raises UserError for bad options and parameters, and when a step is
    asked for at a loss scale of 0.
    """

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
        # As many parameters as torch.optim.AdamW has, so that only its name changes, and this one's own as keywords.
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
        """Update every parameter that has a gradient, and return the closure's result.

        Where GradScaler has set the attributes ``grad_scale`` and ``found_inf``, gradients are divided by the first,
        and nothing is changed if the second is not 0. Reading them waits for the device, as GradScaler does itself
        for any other optimizer.
        """
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
        place = itertools.count()
        for group in self.param_groups:
            compiles = group["compile"]
            if compiles is None:
                compiles = sum(parameter.numel() for parameter in group["params"]) >= COMPILED_FROM
            copies: list[tuple[Tensor, Tensor]] = []
            work: dict[tuple[torch.device, int], list[_Piece]] = {}
            for parameter in group["params"]:
                index = next(place)
                if parameter.grad is None:
                    continue
                tensors, step, strided = self._tensors(parameter, group)
                size = _sizes(tensors[0].device, _kernel(tensors, group, compiles) is not _update).piece
                pieces = _pieces(tensors, local_runs(parameter), (int(group["seed"]), step, index), size)
                work.setdefault((tensors[0].device, step), []).extend(pieces)
                if strided is not None:
                    copies.append((strided, tensors[0]))
            for (_, step), pieces in work.items():
                _advance(pieces, group, step, 1 / scale, compiles)
            for target, value in copies:
                target.copy_(value.view(target.shape))
        return loss

    def _tensors(self, parameter: Tensor, group: dict[str, Any]) -> tuple[_Tensors, int, Tensor | None]:
        """Return the flat local tensors of a parameter's step, its number from 1, and the parameter to copy back to.

        The last is None for a contiguous one, which is stepped in place.
        """
        state, local = self.state[parameter], _local(parameter)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                zeros = torch.zeros(local.shape, dtype=MOMENTS[group["moments"]], device=local.device)
                state[name] = _like(parameter, zeros)
        state["step"] += 1
        flat = local.contiguous().view(-1)
        tensors = (flat, _gradient(parameter).contiguous().view(-1))
        moments = (_local(state[name]).view(-1) for name in ("exp_avg", "exp_avg_sq"))
        return (*tensors, *moments), int(state["step"]), None if local.is_contiguous() else local

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict() returned, in the dtypes in which it was saved.

        Options but ``compile`` are taken from the saved groups where they have them.
        """
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
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=_strides(parameter.shape)
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


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
        if isinstance(parameter, DTensor) and not all(type(p) in (Shard, Replicate) for p in parameter.placements):
            raise UserError(
                f"AdamW: a parameter is placed as {parameter.placements}; only Shard and Replicate are known"
            )
