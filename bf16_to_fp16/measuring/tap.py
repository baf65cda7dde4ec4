"""Hand out the observer's sites as differentiable tensors, as the penalty needs them. The tap sees the calls of torch
functions from outside: autograd and autocast act within these calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import UserError
from . import origins
from .products import MATRIX_PRODUCTS
from .sites import Call, is_linear, site_name

_KEEPING_SHAPE = {"bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "to"}
_KEEPING_SHAPE |= {"type", "type_as"}
_MOVING = (
    {"__get__", "__getitem__", "alias", "cat", "chunk", "diagonal", "expand", "expand_as", "flatten", "movedim"}
    | {"narrow", "pad", "permute", "repeat", "repeat_interleave", "requires_grad_", "reshape", "select", "split"}
    | {"squeeze", "stack", "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"}
    | _KEEPING_SHAPE
    | origins.UNINITIALISED
)
"""Functions that only view or copy values, so their outputs are no sites."""

# The dispatcher's name of a function, where it differs.
_BELOW = {
    "__rdiv__": "mul",
    "__rpow__": "pow",
    "__rsub__": "rsub",
    "true_divide": "div",
    "square": "pow",
    "log_softmax": "_log_softmax",
    "scaled_dot_product_attention": "context",
}

_WRAPPING = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_COMPILED = "a compiled model hides its operations; use the model without torch.compile"


@dataclass(slots=True)
class _Function:
    name: str
    moving: bool
    keeping_shape: bool
    factory: bool
    inplace: bool
    matmul: bool
    softmax: bool
    dropout: bool
    masking: str | None


@dataclass(slots=True, kw_only=True)
class _Call(Call):
    """One call of one module. tapped: whether ``on_site`` gets the outputs inside this call. names: maps (operation,
    n), the nth use of an operation in the call, to the full name of its site, or to None if the site is not wanted."""

    module: nn.Module
    tapped: bool
    names: dict[tuple[str, int], str | None]
    hidden: Tensor | None = None
    """Positions hidden by a mask that is −inf in fp16, under which a fully masked row is NaN."""


class _TapMode(TorchFunctionMode):
    def __init__(self, tap: Tap) -> None:
        super().__init__()
        self.tap = tap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        call = self.tap._call
        if call is not None:
            outputs = out if isinstance(out, (tuple, list)) else (out,)
            for i, item in enumerate(outputs):
                if isinstance(item, Tensor) and item.is_floating_point():
                    self.tap._see(call, func, args, kwargs or {}, item, i)
        return out


class Tap:
    """Context manager that calls ``on_site(name, tensor)`` with every floating-point output inside ``model``'s
    forwards. The tensors are differentiable. Names are those of ``SiteObserver`` with eager attention. For
    ``<path>:masked`` the tensor holds, for each query, how far the mask must lower scores to hide the masked keys.

    Masked positions are zero. Use a tensor at once, because an in-place operation may change it. Forwards without
    gradients are not tapped. Forwards that gradient checkpointing runs again in the backward are not tapped either, so
    tensors that ``on_site`` saves for the backward stay in memory.

    only: returns whether a site is wanted; it is asked once per name. glance: is called first, with the detached
    tensor; if it returns False, ``on_site`` is not called.

    Left out are copies, constants, operations without gradients, the statistics of ``layer_norm``, dropout's noise, and
    the inside of fused functions except SDPA's context. The x of x³, as in tanh-GELU, is a site (``:cubed``). Raises
    UserError for a compiled model and for reentrant gradient checkpointing."""

    def __init__(
        self,
        model: nn.Module,
        on_site: Callable[[str, Tensor], None],
        *,
        only: Callable[[str], bool] | None = None,
        glance: Callable[[str, Tensor], bool] | None = None,
    ) -> None:
        self.model = model
        self.on_site = on_site
        self.only = only
        self.glance = glance
        self._mode = _TapMode(self)
        self._names: dict[str, dict[tuple[str, int], str | None]] = {}
        self._stack: list[_Call] = []
        self._call: _Call | None = None
        self._handing_over = False
        self._hooks = ExitStack()
        self._modules: list[nn.Module] = []

    def __enter__(self) -> Tap:
        if self._modules:
            raise UserError("this tap is active already; leave it before you enter it again")
        try:
            for path, module in paths(self.model):
                self._modules.append(module)
                self._hook(path, module)
        except BaseException:
            self._unhook()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._unhook()

    def _hook(self, path: str, module: nn.Module) -> None:
        _check_not_compiled(module)
        names = self._names.setdefault(path, {})
        linear = is_linear(module)
        stack = self._stack

        def enter(module: nn.Module, args: Any) -> None:
            outer = stack[-1] if stack else None
            # Inside a node of the backward the forward runs only to be recomputed.
            tapped = torch._C._current_autograd_node() is None and not self._handing_over
            if tapped and not torch.is_grad_enabled():
                if (outer is None or outer.tapped) and _is_called_by("CheckpointFunction.forward"):
                    raise UserError(
                        "reentrant gradient checkpointing hides the gradient of every site;"
                        " use gradient_checkpointing_kwargs={'use_reentrant': False}"
                    )
                tapped = False
            if outer is None and tapped:
                # A model may be compiled after the tap was entered.
                for known in self._modules:
                    for inner in (known, *known._modules.values()):
                        if inner is not None:
                            _check_not_compiled(inner)
                if _is_called_by("compile_wrapper"):
                    raise UserError(_COMPILED)
            call = _Call(path, linear, module=module, tapped=tapped, names=names)
            if tapped and (outer is None or not outer.tapped):
                self._mode.__enter__()
            stack.append(call)
            self._call = call if tapped else None

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            # ``enter`` was not called where this tap was entered inside the module, or an earlier hook failed.
            if not stack or stack[-1].module is not module:
                return
            call = stack[-1]
            if linear and call.tapped and "" not in call.counts and isinstance(output, Tensor):
                # Its product is no torch function: ZeRO-3 puts an autograd function of its own there.
                name = self._wanted(call, "", 1)
                if name is not None:
                    self._hand_over(name, output, _itself)
            stack.pop()
            outer = stack[-1] if stack else None
            if call.tapped and (outer is None or not outer.tapped):
                self._mode.__exit__(None, None, None)
            self._call = outer if outer is not None and outer.tapped else None

        self._hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
        self._hooks.enter_context(module.register_forward_hook(leave, always_call=True))

    def _unhook(self) -> None:
        self._hooks.close()
        self._modules.clear()
        # Left in the middle of a forward: the modules that are still running will not call ``leave`` any more.
        if self._stack and self._stack[-1].tapped:
            self._mode.__exit__(None, None, None)
        self._stack.clear()
        self._call = None

    def _see(self, call: _Call, func: Any, args: Any, kwargs: dict[str, Any], out: Tensor, index: int) -> None:
        function = _describe_function(func)
        if function.factory or (origins.only_constants(args) and origins.only_constants(kwargs.values())):
            origins.set_origin(out, origins.of_constants((*args, *kwargs.values())))
            return
        if function.moving:
            _carry_mask(function, func, args, kwargs, out)
            return
        # What a wrapper does without gradients is no part of the forward: ZeRO-3 gathers weights, and detaches what
        # enters a module, masks too, in an autograd function of its own.
        if not torch.is_grad_enabled():
            return
        if function.inplace:
            origins.forget_origin(out)
        elif args and out is args[0]:  # a dropout that does nothing
            return
        masked = None
        if function.masking is not None and len(args) > 1:
            masked = origins.masked_positions(function.masking, args, kwargs)
            if masked is not None:
                origins.set_origin(out, origins.Origin(masked=masked.expand(out.shape)))
                if function.name == "add" and call.before_softmax:
                    self._see_masked(call, function, args, masked)
        name = function.name
        if function.matmul:
            name = call.product(sums=origins.has_constant_tensor(args))
        elif function.softmax:
            call.after_softmax = True
        elif function.dropout:
            name = "native_dropout" if out.is_cuda else "mul"
        if index:
            name = f"{name}.{index}"
        full = self._wanted(call, name, call.count(name))
        if full is not None and out.numel():
            shown: Callable[[Tensor], Tensor] = _itself if masked is None else partial(_unmasked, masked=masked)
            if call.after_softmax and call.hidden is not None:
                shown = partial(_seen, hidden=call.hidden)
            if function.name == "einsum":
                # Stock code adds to these scores in place, which would change saved tensors.
                shown = torch.clone if shown is _itself else shown
            self._hand_over(full, out, shown)
        if name == "pow" and len(args) > 1 and isinstance(args[1], (int, float)) and args[1] == 3:
            # tanh takes an infinite x³ to 1, but an infinite 3x² in the backward gives NaN.
            full = self._wanted(call, "cubed", 1)
            if full is not None:
                self._hand_over(full, args[0], _itself)

    def _see_masked(self, call: _Call, function: _Function, args: tuple[Any, ...], masked: Tensor) -> None:
        scores = None if function.inplace else origins.scores_of_mask(args)
        if scores is None:
            call.hidden = masked
            return
        full = self._wanted(call, "masked", 1)
        if full is not None:
            self._hand_over(full, scores, partial(origins.masked_span, masked=masked))

    def _wanted(self, call: _Call, name: str, count: int) -> str | None:
        try:
            return call.names[name, count]
        except KeyError:
            full = site_name(call.path, name, count)
            wanted = full if self.only is None or self.only(full) else None
            call.names[name, count] = wanted
            return wanted

    def _hand_over(self, name: str, out: Tensor, shown: Callable[[Tensor], Tensor]) -> None:
        call, self._call, self._handing_over = self._call, None, True
        try:
            if self.glance is not None and not self.glance(name, shown(out.detach())):
                return
            # In a checkpointed region what is saved is thrown away and made again by running the region again; what
            # on_site saves would not be made again, so it is kept.
            with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
                self.on_site(name, shown(out))
        finally:
            self._call, self._handing_over = call, False


@cache
def _describe_function(func: Any) -> _Function:
    own = getattr(func, "__name__", "")
    inplace = own.endswith("_") and not own.endswith("__")
    name = own.rstrip("_") if inplace else own
    return _Function(
        name=_BELOW.get(name, name),
        moving=own in _MOVING,
        keeping_shape=own in _KEEPING_SHAPE,
        factory=own in origins.FACTORIES,
        inplace=inplace,
        matmul=name in {"matmul", "einsum"} | MATRIX_PRODUCTS,
        softmax=name == "softmax",
        dropout=name == "dropout",
        masking=origins.MASKING.get(name),
    )


def _carry_mask(function: _Function, func: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
    if function.masking in ("cat", "pad"):
        masked = origins.masked_positions(function.masking, args, kwargs)
        origins.set_origin(out, None if masked is None else origins.Origin(masked=masked))
        return
    origin = origins.origin_of(args[0]) if args else None
    if origin is None or origin.masked is None or origin.constant:
        return
    masked = origin.masked if function.keeping_shape else func(origin.masked, *args[1:], **kwargs)
    if isinstance(masked, Tensor) and masked.shape == out.shape:
        origins.set_origin(out, origins.Origin(masked=masked))


def _unmasked(out: Tensor, masked: Tensor) -> Tensor:
    # A positive value or a NaN where a mask was added does not come from the mask.
    return out.masked_fill(masked & (out < 0), 0.0)


def _seen(out: Tensor, hidden: Tensor) -> Tensor:
    # A branch on this would make the device wait.
    return out.masked_fill(out.isnan() & hidden.all(-1).any().to(out.device), 0.0)


def _itself(x: Tensor) -> Tensor:
    return x


def paths(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module with its path. Names that wrappers such as DDP add are left out, and the root is "model"."""
    prefix, inner = "", model
    # A wrapper that has nothing but a ``module``: DDP, DeepSpeed.
    while [name for name, _ in inner.named_children()] == ["module"]:
        prefix, inner = f"{prefix}module.", inner.get_submodule("module")
    named = []
    for path, module in model.named_modules():
        parts = f"{path}.".removeprefix(prefix).split(".")
        named.append((".".join(part for part in parts if part and part not in _WRAPPING) or "model", module))
    return named


def _check_not_compiled(module: nn.Module) -> None:
    if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
        raise UserError(_COMPILED)


def _is_called_by(function: str) -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_qualname.endswith(function):
            return True
        frame = frame.f_back
    return False
