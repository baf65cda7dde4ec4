"""AdamW for parameters kept in bf16 or fp16 with no fp32 copy.

The step is computed in fp32 from what is stored and only the last store is rounded: stochastically, so that updates far
below a weight's gap still add up; or to nearest; or to nearest with what was lost kept in a second 16-bit tensor
(Kahan). See ``rounding`` for the arithmetic.

The moments obey the same rule. A bf16 second moment rounded to nearest never decays, since 0.1% of it is less than half
its gap of 0.4 to 0.8%; here bf16 moments are rounded stochastically.

Random bits belong to (seed, step, parameter's position, element's index in the whole parameter). A DTensor's shard
knows its place in the whole, so FSDP2 gives the bits of a single process; under DDP every replica draws the same.

Parameters are cut into runs of consecutive elements and one function updates a run: on slices that stay in the
processor's caches in eager mode, with small ones packed together; or compiled into one kernel that reads and writes
everything once, by a C compiler for a CPU (see ``kernel``) and by torch.compile for an accelerator. On a CPU all give
the same bits, because every operation that is used is rounded correctly there: ``rsqrt`` is, while the eager ``sqrt``
of torch's Intel builds is not. On an accelerator compiled divisions are not, and the two agree only to rounding.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..errors import UserError
from . import kernel, rounding
from .moments import BLOCKED, MOMENTS, check_moments, is_blocked, new_moment, store

ROUNDINGS = ("stochastic", "nearest", "kahan")


# Up to this many elements are packed with others, and never given to torch.compile's kernel: calling it costs more.
_SMALL = 1 << 14


# An accelerator is kept busy by longer runs than a processor's caches hold (64 MB for each fp32 intermediate result).
_CHUNK_ON_ACCELERATOR = 1 << 24


# ---- one step of some elements -------------------------------------------------------------------------------------


class Coefficients(NamedTuple):
    """The scalars of a step, values of fp32."""

    unscale: float  # 1 / loss scale
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    minus_rate: float  # −lr · √(1 − β₂ᵗ) / (1 − β₁ᵗ)
    eps: float  # ε · √(1 − β₂ᵗ)
    decay: float  # 1 − lr · weight decay, where it is decoupled
    l2: float  # weight decay, where it is not


def _coefficients(group: dict[str, Any], step: int, unscale: float) -> Coefficients:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    root = math.sqrt(1 - beta2**step)
    rate, weight_decay = lr * root / (1 - beta1**step), group["weight_decay"]
    decay, l2 = (1 - lr * weight_decay, 0.0) if group["decoupled_weight_decay"] else (1.0, weight_decay)
    exact = unscale, beta1, 1 - beta1, beta2, 1 - beta2, -rate, group["eps"] * root, decay, l2
    return Coefficients(*torch.tensor(exact, dtype=torch.float32).tolist())


Scalar = float | Tensor
"""A tensor in a compiled kernel, which would be compiled anew for another number."""


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Parameter, gradient, both moments, and what Kahan's addition has lost (bf16): flat and of one length."""


def _update(
    tensors: _Tensors,
    counter: Tensor | None,
    key: rounding.Key,
    c: Coefficients | Tensor,
    how: str,
) -> None:
    """Step some elements in place, eagerly or inside torch.compile; adamw.c does the same for ``kernel``.

    counter: int32, None for 0, 1, 2, …. key: as ``rounding`` takes it, for all elements or a column for each.
    c: ``Coefficients``, or a tensor of them.
    """
    parameter, grad, exp_avg, exp_avg_sq, compensation = tensors
    numbers = c.unbind() if isinstance(c, Tensor) else c
    unscale, beta1, one_minus_beta1, beta2, one_minus_beta2, minus_rate, eps, decay, l2 = numbers
    g, value = grad.to(torch.float32), parameter.to(torch.float32)
    if not isinstance(unscale, float) or unscale != 1:
        g = g * unscale
    if not isinstance(l2, float) or l2 != 0:
        g = g + value * l2
    m = _add_multiple(exp_avg.to(torch.float32).mul_(beta1), one_minus_beta1, g)
    v = _add_multiple(exp_avg_sq.to(torch.float32).mul_(beta2), one_minus_beta2, g * g)
    # Neither 0 nor inf, of which the product with rsqrt is NaN. Roots: 1e-19 and 2e19.
    square = v.clamp(torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)
    value = _add_quotient(value.mul_(decay), minus_rate, m, square.mul_(square.rsqrt()).add_(eps))

    stochastic = how == "stochastic" and parameter.dtype != torch.float32
    if stochastic or exp_avg.dtype != torch.float32:
        if counter is None:
            counter = rounding.counters(len(parameter), parameter.device)
        bits = rounding.random_bits(counter, key)
    if exp_avg.dtype != torch.float32:
        for_m, for_v = rounding.more_bits(bits, key)
        m, v = rounding.stochastic(m, exp_avg.dtype, for_m), rounding.stochastic(v, exp_avg.dtype, for_v)
    lost = None
    if stochastic:
        value = rounding.stochastic(value, parameter.dtype, bits)
    elif compensation is not None:
        value, lost = rounding.kahan_add(value, compensation.to(torch.float32), parameter.dtype)
    else:
        value = rounding.nearest(value, parameter.dtype)
    for tensor, result in ((parameter, value), (exp_avg, m), (exp_avg_sq, v), (compensation, lost)):
        if tensor is not None and result is not None and tensor is not result:
            tensor.copy_(result)


def _add_multiple(x: Tensor, factor: Scalar, a: Tensor) -> Tensor:
    """Return x + factor · a, in x itself where eager; in one pass over memory there, with both roundings kept.

    ``add`` with alpha rounds once in its vectors and twice at the end of a tensor; a product with 1 is the same.
    """
    if torch.compiler.is_compiling():
        return x + a * factor
    return x.addcmul_(a, torch.ones((), device=x.device), value=factor)  # type: ignore[arg-type]


def _add_quotient(x: Tensor, factor: Scalar, a: Tensor, b: Tensor) -> Tensor:
    """Return x + factor · a / b, as ``_add_multiple`` does."""
    if torch.compiler.is_compiling():
        return x + a * factor / b
    return x.addcdiv_(a, b, value=factor)  # type: ignore[arg-type]


@functools.cache
def _compiled(*variant: Any) -> Callable[..., None]:
    """Return a compiled ``_update`` for one combination of dtypes and options.

    torch.compile counts recompilations by code object and gives up after eight; each variant has a copy of its own,
    which is compiled once for all lengths.
    """
    code = _update.__code__.replace(co_name="_update_" + "_".join(map(str, variant)).replace(".", "_"))
    function = types.FunctionType(code, _update.__globals__, code.co_name)
    compiled: Callable[..., None] = torch.compile(function, dynamic=True, fullgraph=True)
    return compiled


# ---- runs of consecutive elements ----------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Views of consecutive elements, and where they lie."""

    tensors: _Tensors
    identity: tuple[int, int, int]  # seed, step, parameter
    start: int  # index of the first in the whole parameter

    @property
    def length(self) -> int:
        return len(self.tensors[0])

    @property
    def kind(self) -> tuple[torch.dtype | None, ...]:
        """What a kernel is made for."""
        return tuple(None if tensor is None else tensor.dtype for tensor in self.tensors)

    def cut(self, size: int) -> Iterator[tuple[tuple[int, int, int], _Tensors]]:
        """Yield the tensors in parts of at most ``size`` elements, each after its key."""
        for start, stop, block, first in rounding.index_blocks(self.start, self.start + self.length, size):
            key = rounding.make_key(*self.identity, block, first)
            whole = stop - start == self.length
            yield key, self.tensors if whole else _part(self.tensors, start - self.start, stop - self.start)


def _part(tensors: _Tensors, start: int, stop: int) -> _Tensors:
    parameter, grad, exp_avg, exp_avg_sq, lost = tensors
    here = slice(start, stop)
    return parameter[here], grad[here], exp_avg[here], exp_avg_sq[here], None if lost is None else lost[here]


def local_runs(parameter: Tensor) -> list[tuple[int, int]]:
    """Return (start, length) of each run of consecutive indices in the elements that this rank has of a parameter.

    One run for a whole tensor and for shards of the first dimension, as FSDP2 makes; one for every row of the others.
    """
    whole = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return [(0, parameter.numel())] if parameter.numel() else []
    # Not documented, but torch's own distributed checkpoints are cut by it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(whole, parameter.device_mesh, parameter.placements)
    if math.prod(local) == 0:
        return []
    cut = max((dim for dim in range(len(whole)) if local[dim] != whole[dim]), default=0)
    strides = _strides(whole)
    starts = [
        sum(
            (first + row) * stride
            for first, row, stride in zip(offset, (*rows, *[0] * len(whole)), strides, strict=False)
        )
        for rows in itertools.product(*map(range, local[:cut]))
    ]
    return [(start, math.prod(local[cut:])) for start in starts]


def _run_compiled(runs: list[_Run], device: torch.device, c: Coefficients, how: str) -> None:
    """Update every run by one call of a kernel, which torch.compile makes."""
    numbers = torch.tensor(c, device=device)
    for run in runs:
        update = _compiled(how, device.type, *run.kind)
        for key, tensors in run.cut(1 << rounding.BLOCK_BITS):
            update(tensors, None, torch.tensor(key, dtype=torch.int32, device=device), numbers, how)


def _run_natively(runs: list[_Run], c: Coefficients, how: str) -> None:
    """Update every run by one call of ``kernel``, on a CPU."""
    numbers = torch.tensor(c)
    for run in runs:
        for key, tensors in run.cut(1 << rounding.BLOCK_BITS):
            kernel.run_step(tensors, functools.partial(rounding.advance, key), numbers, how)


def _is_native(run: _Run, group: dict[str, Any]) -> bool:
    """Return whether a run is stepped by ``kernel``."""
    if run.tensors[0].device.type != "cpu" or group["compile"] is False:
        return False
    # Where it was asked for, a compiler that fails is an error, which the step raises.
    return kernel.knows(run.kind) if group["compile"] else kernel.works(run.kind, group["rounding"])


def _run_eagerly(runs: list[_Run], device: torch.device, c: Coefficients, how: str) -> None:
    """Update runs in chunks."""
    counter = _counter(runs, device)
    for run in runs:
        for key, tensors in run.cut(_chunk(device)):
            _update(tensors, counter[: len(tensors[0])], key, c, how)


def _run_packed(runs: list[_Run], device: torch.device, c: Coefficients, how: str) -> None:
    """Update short runs, as many of a kind together as fill a chunk."""
    counter = _counter(runs, device)
    for _, alike in itertools.groupby(sorted(runs, key=lambda run: str(run.kind)), key=lambda run: run.kind):
        pack: list[_Run] = []
        filled = 0
        for run in alike:
            if pack and filled + run.length > _chunk(device):
                _step_pack(pack, counter, c, how)
                pack, filled = [], 0
            pack.append(run)
            filled += run.length
        _step_pack(pack, counter, c, how)


def _chunk(device: torch.device) -> int:
    return rounding.CHUNK if device.type == "cpu" else _CHUNK_ON_ACCELERATOR


def _counter(runs: list[_Run], device: torch.device) -> Tensor:
    """Return counters for the longest chunk of the runs."""
    return rounding.counters(min(max((run.length for run in runs), default=0), _chunk(device)), device)


def _step_pack(pack: list[_Run], counter: Tensor, c: Coefficients, how: str) -> None:
    """Update several short runs with as many operations as one takes: on copies end to end, which are copied back."""
    parts = [part for run in pack for part in run.cut(_SMALL)]  # one of each, or two at a block's border
    if len(parts) == 1:
        key, tensors = parts[0]
        return _update(tensors, counter[: len(tensors[0])], key, c, how)
    lengths = [len(tensors[0]) for _, tensors in parts]
    columns = [[t for t in column if t is not None] for column in zip(*(tensors for _, tensors in parts), strict=True)]
    parameter, grad, exp_avg, exp_avg_sq, lost = (torch.cat(column) if column else None for column in columns)
    assert parameter is not None and grad is not None and exp_avg is not None and exp_avg_sq is not None
    keys = torch.tensor([key for key, _ in parts], dtype=torch.int32, device=counter.device).T
    keys = keys.repeat_interleave(torch.tensor(lengths, device=counter.device), dim=1, output_size=sum(lengths))
    joined = parameter, grad, exp_avg, exp_avg_sq, lost
    _update(joined, torch.cat([counter[:length] for length in lengths]), keys, c, how)
    for column, source in zip(columns, joined, strict=True):
        if source is not None and source is not grad:
            torch._foreach_copy_(column, list(source.split(lengths)))


# ---- the optimizer -------------------------------------------------------------------------------------------------


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) whose parameters are stored in bf16 or fp16 and nowhere else.

    params: parameters or groups of them, in bf16, fp16 or fp32 (which is not rounded); plain tensors or DTensors. Every
    option may be set per group.

    rounding: how a step is stored, ``"stochastic"``, ``"nearest"`` or ``"kahan"`` (2 bytes more per element).
    moments: ``"float32"`` (8 bytes per element), ``"bfloat16"`` (4, rounded stochastically), ``"8bit"``, ``"fp8"`` (2)
    or ``"4bit"`` (1): the last three are torchao's block formats, rounded stochastically; a shard's blocks are its
    own. seed: from 0 to 2⁶³ − 1, of all random bits. compile: one fused kernel instead of eager chunks, on a CPU by a C
    compiler, on an accelerator by torch.compile; by default on a CPU where a C compiler is found. foreach: pack small
    parameters together in eager mode (the default). offload: keep the moments in the machine's memory and take the step
    there, parameter by parameter; not for DTensors. The last three change speed and memory only, and are not taken from
    a loaded state.

    Under ``torch.amp.GradScaler`` fp16 gradients work: the scale is divided out in fp32, and a step with inf or NaN
    changes nothing. ``GradScaler.unscale_`` refuses fp16 gradients, so clip before the step at max_norm · scale.

    state_dict() and load_state_dict() keep every bit, the step and the seed, so a resumed run equals an uninterrupted
    one; the state of torch.optim.AdamW loads too. Raises UserError for bad options and parameters, and when a step is
    asked for at a loss scale of 0.
    """

    _decoupled = True

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
        foreach: bool = True,
        offload: bool = False,
    ) -> None:
        # As many parameters as torch.optim.AdamW has, so that only its name changes, and this one's own as keywords.
        options = {"rounding": rounding, "moments": moments, "seed": seed}
        options |= {"compile": compile, "foreach": foreach, "offload": offload}
        options["decoupled_weight_decay"] = self._decoupled  # under torch's name
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options}
        try:
            super().__init__(params, defaults)
        except (TypeError, ValueError) as error:
            raise UserError(f"AdamW: {str(error).splitlines()[0]}") from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose random bits follow from its place after the others."""
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
            work: dict[tuple[torch.device, int], list[_Run]] = {}
            for parameter in group["params"]:
                index = next(place)
                if parameter.grad is None:
                    continue
                copies: list[tuple[Tensor, Tensor]] = []
                tensors, step = self._tensors(parameter, group, copies)
                runs = _split(tensors, local_runs(parameter), (int(group["seed"]), step, index))
                if not copies:
                    work.setdefault((tensors[0].device, step), []).extend(runs)
                    continue
                # At once, so that memory holds the copies of one parameter only.
                _advance(runs, tensors[0].device, group, _coefficients(group, step, 1 / scale))
                _put_back(copies, runs)
            for (device, step), runs in work.items():
                _advance(runs, device, group, _coefficients(group, step, 1 / scale))
        return loss

    def _tensors(
        self, parameter: Tensor, group: dict[str, Any], copies: list[tuple[Tensor, Tensor]]
    ) -> tuple[_Tensors, int]:
        """Return the flat local tensors of one parameter's step and its number, from 1; makes the state if new.

        What cannot be stepped in place is stepped as a copy, which ``copies`` gets with the tensor that it belongs to.
        """
        state, local = self.state[parameter], _local(parameter)
        home = _home(local, group)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                state[name] = _like(parameter, new_moment(local, group["moments"], signed, home))
        kahan = group["rounding"] == "kahan" and parameter.dtype != torch.float32
        if kahan and "compensation" not in state:
            state["compensation"] = _like(parameter, torch.zeros_like(local, dtype=torch.bfloat16, device=home))
        state["step"] += 1

        def flat(tensor: Tensor) -> Tensor:
            if is_blocked(tensor):
                copies.append((tensor, tensor.dequantize()))
            elif tensor.device != home or not tensor.is_contiguous():
                copies.append((tensor, tensor.to(home).contiguous()))
            else:
                return tensor.view(-1)
            return copies[-1][1].view(-1)

        grad = _gradient(parameter).to(home).contiguous().view(-1)
        exp_avg, exp_avg_sq = flat(_local(state["exp_avg"])), flat(_local(state["exp_avg_sq"]))
        lost = flat(_local(state["compensation"])) if kahan else None
        return (flat(local), grad, exp_avg, exp_avg_sq, lost), int(state["step"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict() returned, in the dtypes in which it was saved.

        Options are taken from the saved groups where they have them (not compile, foreach, offload or the kind of
        decay); the moments come in the format that ``moments`` then names, whatever they were saved in.
        """
        before = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, options, saved_group in zip(self.param_groups, before, state_dict["param_groups"], strict=True):
            group |= {name: options[name] for name in options if name not in group or name in _OWN}
            _check(group)
            # torch has cast every floating tensor to its parameter's dtype: take the saved ones again.
            for parameter, saved_id in zip(group["params"], saved_group["params"], strict=True):
                saved = state_dict["state"].get(saved_id, {})
                if "step" in saved:
                    self.state[parameter]["step"] = torch.tensor(float(saved["step"]))
                for name in ("exp_avg", "exp_avg_sq", "compensation"):
                    if name in saved:
                        self.state[parameter][name] = _restored(name, saved[name], parameter, group)


class Adam(AdamW):
    """Adam (Kingma and Ba, arXiv:1412.6980) with everything that ``AdamW`` here has.

    weight_decay: added to the gradient times the weight (L2), as in torch.optim.Adam; by default none.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        """Take what ``AdamW`` takes."""
        super().__init__(params, lr, betas, eps, weight_decay, **options)


_OWN = ("compile", "foreach", "offload", "decoupled_weight_decay")
"""Options that a loaded state does not change."""


def _put_back(copies: list[tuple[Tensor, Tensor]], runs: list[_Run]) -> None:
    """Write what was stepped as copies to the tensors that it belongs to, to both moments or none in blocks."""
    moments = [(target, source.view(-1)) for target, source in copies if is_blocked(target)]
    if moments:
        # The bits that moments in bf16 are rounded by; of a shard from its first element on.
        (_, first), start = moments[0], runs[0].start
        drawn = []
        for begin, end, block, offset in rounding.index_blocks(start, start + len(first), _chunk(first.device)):
            key = rounding.make_key(*runs[0].identity, block, offset)
            bits = rounding.random_bits(rounding.counters(end - begin, first.device), key)
            drawn.append(rounding.more_bits(bits, key))
        for (moment, value), parts in zip(moments, zip(*drawn, strict=True), strict=True):
            store(moment, value, torch.cat(parts))
    for target, source in copies:
        if not is_blocked(target):
            target.copy_(source.view(target.shape))


def _home(local: Tensor, group: dict[str, Any]) -> torch.device:
    """Return the device on which a parameter's moments are, and its step is taken."""
    return torch.device("cpu") if group["offload"] else local.device


def _advance(runs: list[_Run], device: torch.device, group: dict[str, Any], c: Coefficients) -> None:
    """Step runs that are on one device and whose step has one number, each in the way that suits it."""
    native: list[_Run] = []
    long: list[_Run] = []
    short: list[_Run] = []
    for run in runs:
        if _is_native(run, group):
            native.append(run)
        else:
            (long if run.length > _SMALL else short).append(run)
    _run_natively(native, c, group["rounding"])
    fused = group["compile"] and device.type != "cpu"
    (_run_compiled if fused else _run_eagerly)(long, device, c, group["rounding"])
    (_run_packed if group["foreach"] else _run_eagerly)(short, device, c, group["rounding"])


def _restored(name: str, saved: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Return a copy of a saved state tensor as this optimizer keeps it; a change of dtype rounds to nearest, once."""
    saved, local = _local(saved), _local(parameter)
    if saved.shape != local.shape:
        raise UserError(
            f"AdamW: the saved {name} of a parameter has shape {tuple(saved.shape)}, here it has {tuple(local.shape)};"
            " load the state of the same model, sharded in the same way"
        )
    home = _home(local, group)
    if name == "compensation":
        new = torch.empty_like(local, dtype=torch.bfloat16, device=home)
    else:
        new = new_moment(local, group["moments"], name == "exp_avg", home)
    if is_blocked(saved) and type(saved) is not type(new):
        saved = saved.dequantize()
    if is_blocked(new) and not is_blocked(saved):
        saved = saved.to(home, torch.float32).contiguous()
    return _like(parameter, new.copy_(saved))


def _split(tensors: _Tensors, lie: list[tuple[int, int]], identity: tuple[int, int, int]) -> list[_Run]:
    """Return the runs of a parameter's flat tensors, which lie at the indices that ``local_runs`` gave."""
    ends = itertools.accumulate(length for _, length in lie)
    return [
        _Run(_part(tensors, end - length, end), identity, start) for (start, length), end in zip(lie, ends, strict=True)
    ]


def _local(tensor: Tensor) -> Tensor:
    """Return the tensor, or this rank's part of a DTensor, outside autograd."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` distributed as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=_strides(parameter.shape)
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _gradient(parameter: Tensor) -> Tensor:
    """Return the local gradient of a parameter that has one."""
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise UserError("AdamW: a gradient is sparse; make the embedding with sparse=False")
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return _local(grad)


def _check(group: dict[str, Any]) -> None:
    """Raise UserError for an option or a parameter that cannot be used."""

    def number(name: str, value: Any, below: float = math.inf) -> None:
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)
        if not isinstance(value, int | float) or not 0 <= value < below:
            limit = "" if below == math.inf else f" and below {below:g}"
            raise UserError(f"AdamW: {name} is {value!r}; give a finite number, at least 0{limit}")

    for name in ("lr", "eps", "weight_decay"):
        number(name, group[name])
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise UserError(f"AdamW: betas is {betas!r}; give two numbers, for example (0.9, 0.999)")
    for beta in betas:
        number("a beta", beta, below=1)
    for name, choices in (("rounding", ROUNDINGS), ("moments", MOMENTS)):
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
    on = {parameter.device.type for parameter in group["params"]}
    if group["offload"]:
        if any(isinstance(parameter, DTensor) for parameter in group["params"]):
            raise UserError("AdamW: offload is for whole parameters; offload sharded ones by FSDP's CPUOffloadPolicy")
        on = {"cpu"}
    if group["moments"] in BLOCKED and group["compile"]:
        raise UserError(f"AdamW: moments={group['moments']!r} has no compiled kernel; leave it to compile=None")
    check_moments(group["moments"], on)
    if group["compile"] and "cpu" in on:
        kernel.check_compiler()
