"""What every operation of a model puts out: the one place that registers hooks or a dispatch mode.

Module hooks see a module's inputs and outputs, and an overflow between two modules (a score, a gated product, a
residual add that the next line clamps) is hidden from them. A dispatch mode sits below autograd and autocast
and sees each operation that runs, in the forward and in the backward, with the dtype that it really has. Each
output costs one ``aminmax``, which reads at memory speed and propagates NaN; only where that shows something
large are elements counted. What is infinite by design is told apart by where it comes from, not by the model's
name: attention masks are made of constants, and the cube inside ``gelu_new`` ends in a tanh.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import UserError
from .families.types import Attention, Ends, Layout, value
from .numerics import FP16_MAX, GELU_CUBE_BACKWARD_LIMIT, SATURATED_FROM, headroom_bits
from .probe import Batch, run

MASK_FROM = -FP16_MAX / 2
"""A constant at or below this is a mask, not a number: half of fp16's lowest value (-32752)."""

MASK_REASON = "attention mask: these positions are excluded"
CONSTANT_REASON = "constant: no activation enters it"
CUBE_REASON = "cube inside gelu_new: tanh takes its infinity to 1"

_TAG = "_bf16_to_fp16_tag"
_MATMULS = {"mm", "bmm", "addmm", "baddbmm", "linear"}
_FACTORIES = {
    "full_like",
    "zeros_like",
    "ones_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "zero_",
    "fill_",
    "lift_fresh",
}
_UNINITIALISED = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "resize_",
}
_MASKING = {
    "add": "pointwise",
    "sub": "pointwise",
    "mul": "pointwise",
    "minimum": "pointwise",
    "where": "where",
    "masked_fill": "masked_fill",
    "clone": "copy",
    "_to_copy": "copy",
}
_FRIENDLY = {
    "bmm": "matmul",
    "mm": "matmul",
    "addmm": "matmul",
    "baddbmm": "matmul",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_to_copy": "to",
    "native_layer_norm": "layer_norm",
}


@dataclass(slots=True)
class Site:
    """The outputs of one operation of one module, over every call.

    ``amax`` is the largest |x| (inf where one overflowed or was NaN) without masked positions. ``nonfinite``,
    ``saturated`` (finite |x| from 64504, fp16 only) and ``benign`` count elements; the first two leave out the
    benign ones, and NaN is never benign. ``order`` is the number of the output that first broke it (was not
    finite), else of its first output. ``limit`` is None where fp16's range does not bind: outputs of another
    dtype, constants, and the cube inside ``gelu_new``.
    """

    name: str
    dtype: torch.dtype
    limit: float | None
    amax: float = 0.0
    calls: int = 0
    nonfinite: int = 0
    saturated: int = 0
    benign: int = 0
    reason: str | None = None
    order: int = 0
    pending_nonfinite: int = 0
    pending_saturated: int = 0

    @property
    def headroom_bits(self) -> float | None:
        """log2(limit / amax), None where there is no limit."""
        return None if self.limit is None else headroom_bits(self.amax, self.limit)


@dataclass(slots=True)
class _Operator:
    """What the observer needs to know of one ATen operator, looked up once."""

    name: str
    view: bool
    inplace: bool
    uninitialised: bool
    factory: bool
    matmul: bool
    softmax: bool
    cube: str | None
    masking: str | None


@dataclass(slots=True)
class _Tag:
    """Where a tensor comes from; lives as an attribute on the tensor, and so as long as it does."""

    constant: bool = False
    masked: Tensor | None = None
    cube: "list[Site] | None" = None


@dataclass(slots=True)
class _Frame:
    """One call of one module: its path, how often each operation ran in it, and the sites of that path."""

    path: str
    linear: bool
    sites: dict[tuple[str, int, torch.dtype], Site]
    counts: dict[str, int] = field(default_factory=dict)
    after_softmax: bool = False


class FastProducts(TorchDispatchMode):
    """Context manager under which 16-bit matrix products on the CPU, in the forward and in the backward, are fp32
    products of the same operands rounded once.

    A sum that is exact in fp32 comes out identical; otherwise the native kernel differs only by the order of its fp32
    summation, that is in under one element of a hundred and there by one rounding. Native fp16 kernels on a CPU are 4
    to 100 times slower, bf16 ones a few times. Other devices, other dtypes, convolutions and the fused SDPA are left
    alone. The backward must run inside too, or its products are native ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._matmuls: dict[Any, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        matmul = self._matmuls.get(func)
        if matmul is None:
            matmul = self._matmuls[func] = _is_matmul(func)
        if matmul and _is_cpu_half(args):
            return _product(func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)


class SiteObserver(TorchDispatchMode):
    """Context manager under which every floating-point output inside ``model``'s forward, and its backward, is
    measured.

    Sites are named by module path and operation: ``<path>`` for the output of a linear module, else ``<path>:add``,
    ``<path>:add#2`` for the second in one call, ``<path>:scores`` and ``<path>:context`` for the two products of an
    attention, ``<site>:grad`` for the backward of a site. May be entered again; the sites accumulate.

    fast_products: compute 16-bit matrix products on the CPU as ``FastProducts`` does.
    """

    def __init__(self, model: nn.Module, *, fast_products: bool = True) -> None:
        super().__init__()
        self.model = model
        self.fast_products = fast_products
        self.outputs = 0
        """Floating-point op outputs seen in the model, without views."""
        self.views = 0
        """Floating-point outputs that only show another output's memory: seen, not measured twice."""
        self._sites: dict[str, dict[tuple[str, int, torch.dtype], Site]] = {}
        self._operators: dict[Any, _Operator] = {}
        self._stack: list[_Frame] = []
        self._frame: _Frame | None = None
        self._handles: list[Any] = []
        self._by_sequence: dict[int, str] = {}
        self._sequence = -1
        self._node = -1
        self._node_frame: _Frame | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper against torch.compile costs more per operation than a small measurement does.
        return False

    def __enter__(self) -> "SiteObserver":
        training = self.model.training
        try:
            for path, module in self.model.named_modules():
                if isinstance(module, nn.Dropout) and not training:
                    continue
                self._hook(path or "model", module)
            super().__enter__()
        except BaseException:
            self._unhook()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._unhook()

    def _hook(self, path: str, module: nn.Module) -> None:
        sites = self._sites.setdefault(path, {})
        linear = isinstance(module, nn.Linear)
        stack = self._stack

        def enter(module: nn.Module, args: Any) -> None:
            self._frame = _Frame(path, linear, sites)
            stack.append(self._frame)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            stack.pop()
            self._frame = stack[-1] if stack else None

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
        self._frame = None
        self._by_sequence.clear()
        for site in self.sites():
            # A cube that never met its tanh is an ordinary overflow.
            site.nonfinite += site.pending_nonfinite
            site.saturated += site.pending_saturated
            site.pending_nonfinite = site.pending_saturated = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let a hook compute something of its own unmeasured, while the observer is active."""
        frame, self._frame = self._frame, None
        try:
            yield
        finally:
            self._frame = frame

    def sites(self) -> list[Site]:
        """Return the sites in the order of their modules."""
        return [site for sites in self._sites.values() for site in sites.values()]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _describe(func)
        if operator.matmul and self.fast_products and _is_cpu_half(args):
            out = _product(func, args, kwargs)
        elif kwargs:
            out = func(*args, **kwargs)
        else:
            out = func(*args)

        if isinstance(out, Tensor):
            if operator.view:
                self._carry(func, args, out)
            elif out.is_floating_point():
                self._see(operator, args, kwargs, out, 0)
        elif isinstance(out, (tuple, list)):
            for i, item in enumerate(out):
                if isinstance(item, Tensor) and item.is_floating_point():
                    if operator.view:
                        self.views += 1
                    else:
                        self._see(operator, args, kwargs, item, i)
        return out

    def _carry(self, func: Any, args: tuple[Any, ...], out: Tensor) -> None:
        """A view keeps the origin of what it shows."""
        if not out.is_floating_point():
            return
        self.views += 1
        tag = getattr(args[0], _TAG, None)
        if tag is not None:
            masked = tag.masked
            if masked is not None and not tag.constant:
                try:
                    masked = func(masked, *args[1:])
                except RuntimeError:  # an expanded mask has strides that not every view accepts
                    masked = func(masked.contiguous(), *args[1:])
            setattr(out, _TAG, _Tag(tag.constant, None if tag.constant else masked, tag.cube))
        frame = self._frame
        if frame is not None:
            number = torch.autograd._get_sequence_nr() - 1
            if number > self._sequence:
                self._sequence = number
                self._by_sequence[number] = frame.path

    def _see(
        self,
        operator: _Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        out: Tensor,
        index: int,
    ) -> None:
        constant = operator.factory or _only_constants(args)
        if constant:
            setattr(out, _TAG, _Tag(constant=True))
        elif operator.inplace:
            _untag(out)
        if operator.uninitialised:
            return
        node: Any = torch._C._current_autograd_node()
        frame = self._frame if node is None else self._backward_frame(node)
        if frame is None:
            return
        self.outputs += 1
        name = operator.name
        if frame.linear and operator.matmul:
            name = ""
        elif operator.softmax:
            frame.after_softmax = True
        elif operator.matmul:
            name = "context" if frame.after_softmax else "scores" if name == "matmul" else name
        if index:
            name = f"{name}.{index}"
        if node is not None:
            name = ""
        if constant:
            # Kept apart, so that a layer that builds a mask numbers its other operations like one that does not.
            name = f"constant {operator.name}"
        count = frame.counts[name] = frame.counts.get(name, 0) + 1
        dtype = out.dtype
        key = (name, count, dtype)
        site = frame.sites.get(key)
        if site is None:
            site = frame.sites[key] = _new_site(frame, name, count, dtype, self.outputs)
        if node is None:
            number = torch.autograd._get_sequence_nr() - 1
            if number > self._sequence:
                self._sequence = number
                self._by_sequence[number] = site.name
        site.calls += 1
        if not out.numel():
            return
        low_tensor, high_tensor = torch.aminmax(out)
        low, high = float(low_tensor), float(high_tensor)
        cube = not constant and self._cube(operator, args, out, site, node is None)
        if low > MASK_FROM and high < -MASK_FROM:
            amax = max(high, -low)
            if amax > site.amax:
                site.amax = amax
            if constant:
                site.reason, site.limit = CONSTANT_REASON, None
            return
        whole = site.nonfinite == 0
        masked = None
        if low <= MASK_FROM and operator.masking is not None and not constant:
            masked = _masked(operator.masking, args, kwargs)
        if constant:
            _note_constant(site, out)
        elif masked is not None:
            _note_masked(site, out, high, masked)
        else:
            _note(site, out, low, high, cube)
        if whole and site.nonfinite:
            site.order = self.outputs

    def _backward_frame(self, node: Any) -> _Frame | None:
        number = node._sequence_nr()
        if number != self._node:
            self._node = number
            forward = self._by_sequence.get(number)
            if forward is None:
                self._node_frame = None
            else:
                path = f"{forward}:grad"
                self._node_frame = _Frame(path, True, self._sites.setdefault(path, {}))
        return self._node_frame

    def _cube(self, operator: _Operator, args: tuple[Any, ...], out: Tensor, site: Site, forward: bool) -> bool:
        """Follow x**3 to the tanh that makes its infinity harmless; true while on the way."""
        kind = operator.cube
        if kind is None or not forward:
            return False
        if kind == "pow":
            if args[1] != 3:
                return False
            if torch.is_grad_enabled():
                self._see_cubed(args[0], site)
            setattr(out, _TAG, _Tag(cube=[site]))
            return True
        for operand in args[:2]:
            tag = getattr(operand, _TAG, None)
            if tag is not None and tag.cube is not None:
                if kind == "tanh":
                    for cubed in tag.cube:
                        cubed.benign += cubed.pending_nonfinite + cubed.pending_saturated
                        cubed.pending_nonfinite = cubed.pending_saturated = 0
                        cubed.reason, cubed.limit = CUBE_REASON, None
                    return False
                setattr(out, _TAG, _Tag(cube=[*tag.cube, site]))
                return True
        return False

    def _see_cubed(self, operand: Tensor, cube: Site) -> None:
        """In training the derivative of x³ overflows first: hold x itself to that limit."""
        if operand.dtype != torch.float16 or self._frame is None:
            return
        key = ("cubed", 1, operand.dtype)
        sites = self._frame.sites
        site = sites.get(key)
        if site is None:
            site = Site(
                f"{self._frame.path}:cubed",
                operand.dtype,
                GELU_CUBE_BACKWARD_LIMIT,
                order=cube.order,
            )
            sites[key] = site
        site.calls += 1
        low, high = (float(x) for x in torch.aminmax(operand))
        amax = max(high, -low)
        site.amax = max(site.amax, amax if math.isfinite(amax) else math.inf)


def _describe(func: Any) -> _Operator:
    schema = func._schema
    base = schema.name.split("::")[1]
    returns = [r.alias_info for r in schema.returns]
    inplace = any(alias is not None and alias.is_write for alias in returns)
    name = base.rstrip("_") if inplace else base
    view = base == "_unsafe_view" or any(alias is not None and not alias.is_write for alias in returns)
    attention = "scaled_dot_product" in base and "backward" not in base
    cube = {"pow": "pow", "mul": "through", "add": "through", "tanh": "tanh"}.get(name)
    return _Operator(
        name="context" if attention else _FRIENDLY.get(name, name),
        view=view and not inplace and base not in _FACTORIES,
        inplace=inplace,
        uninitialised=base in _UNINITIALISED,
        factory=base in _FACTORIES,
        matmul=_is_matmul(func),
        softmax=base in ("_softmax", "_safe_softmax"),
        cube=cube,
        masking=_MASKING.get(name),
    )


def _is_matmul(func: Any) -> bool:
    # The other overloads write into an operand or name the dtype of the result.
    return func._schema.name.split("::")[1] in _MATMULS and func._overloadname == "default"


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    """A matrix product of 16-bit operands, computed in fp32 and rounded once."""
    exact = func(*(a.float() if isinstance(a, Tensor) else a for a in args), **(kwargs or {}))
    return exact.to(args[0].dtype)


def _is_cpu_half(args: tuple[Any, ...]) -> bool:
    first = args[0]
    return first.dtype in (torch.float16, torch.bfloat16) and first.device.type == "cpu"


def _only_constants(args: Iterable[Any]) -> bool:
    """Whether no floating tensor among an operation's operands stems from an activation or a parameter."""
    for operand in args:
        if isinstance(operand, Tensor):
            if operand.is_floating_point():
                tag = getattr(operand, _TAG, None)
                if tag is None or not tag.constant:
                    return False
        elif isinstance(operand, (list, tuple)) and not _only_constants(operand):
            return False
    return True


def _untag(out: Tensor) -> None:
    """A constant that an activation was written into is one no longer, nor is the memory that it shows."""
    for tensor in (out, out._base):
        if tensor is not None and getattr(tensor, _TAG, None) is not None:
            setattr(tensor, _TAG, None)


def _new_site(frame: _Frame, name: str, count: int, dtype: torch.dtype, order: int) -> Site:
    full = f"{frame.path}:{name}" if name else frame.path
    if count > 1:
        full = f"{full}#{count}"
    return Site(full, dtype, FP16_MAX if dtype == torch.float16 else None, order=order)


def _positions(operand: Any) -> Tensor | bool:
    """Where an operand is a mask: bool of its shape, or one bool for all of it."""
    if isinstance(operand, (int, float)):
        return operand <= MASK_FROM
    tag = getattr(operand, _TAG, None)
    if tag is None:
        return False
    if tag.masked is None and tag.constant:
        tag.masked = operand <= MASK_FROM
    return False if tag.masked is None else tag.masked


def _masked(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor | None:
    """The positions of an output that stem from a mask, broadcastable to it, or None where there are none."""
    if kind == "copy":
        found = _positions(args[0])
    elif kind == "pointwise":
        found = _either(_positions(args[0]), _positions(args[1]) if len(args) > 1 else False)
    elif kind == "where":
        chosen, yes, no = args[0], _positions(args[1]), _positions(args[2])
        found = _either(_both(chosen, yes), _both(~chosen, no))
    else:
        found = _either(_both(args[1], _positions(args[2])), _positions(args[0]))
    return found if isinstance(found, Tensor) else None


def _either(a: Tensor | bool, b: Tensor | bool) -> Tensor | bool:
    if a is False:
        return b
    if b is False:
        return a
    return a | b


def _both(a: Tensor, b: Tensor | bool) -> Tensor | bool:
    if b is False:
        return False
    return a if b is True else a & b


def _note(site: Site, out: Tensor, low: float, high: float, pending: bool = False) -> None:
    """Count what is not finite or saturated in an output that holds something large."""
    amax = max(high, -low)
    half = out.dtype == torch.float16
    if math.isfinite(amax) and not (half and amax >= SATURATED_FROM):
        site.amax = max(site.amax, amax)
        return
    nans = int(out.isnan().sum())
    infinite = int(out.isinf().sum())
    saturated = int((out.abs() >= SATURATED_FROM).sum()) - infinite if half else 0
    site.amax = math.inf if nans or infinite else max(site.amax, amax)
    site.nonfinite += nans
    if pending:
        site.pending_nonfinite += infinite
        site.pending_saturated += saturated
    else:
        site.nonfinite += infinite
        site.saturated += saturated


def _note_masked(site: Site, out: Tensor, high: float, masked: Tensor) -> None:
    # A positive value or a NaN where a mask was added is no mask's doing.
    if not high < -MASK_FROM:
        masked = masked & (out < 0)
    kept = out.masked_fill(masked, 0.0)
    low, high = (float(x) for x in torch.aminmax(kept))
    _note(site, kept, low, high)
    site.benign += int(masked.sum()) * (out.numel() // masked.numel())
    site.reason = MASK_REASON
    setattr(out, _TAG, _Tag(masked=masked.expand(out.shape)))


def _note_constant(site: Site, out: Tensor) -> None:
    site.reason, site.limit = CONSTANT_REASON, None
    nans = int(out.isnan().sum())
    site.nonfinite += nans
    extreme = out.abs() >= -MASK_FROM
    site.benign += int(extreme.sum())
    rest = out.masked_fill(extreme, 0.0)
    site.amax = math.inf if nans else max(site.amax, float(rest.abs().max()))


_MOVING = {
    "__get__",
    "__getitem__",
    "alias",
    "bfloat16",
    "cat",
    "chunk",
    "clone",
    "contiguous",
    "cpu",
    "cuda",
    "detach",
    "diagonal",
    "double",
    "expand",
    "expand_as",
    "flatten",
    "float",
    "half",
    "movedim",
    "narrow",
    "permute",
    "repeat",
    "repeat_interleave",
    "requires_grad_",
    "reshape",
    "select",
    "split",
    "squeeze",
    "stack",
    "swapaxes",
    "t",
    "to",
    "transpose",
    "type",
    "type_as",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
    "view_as",
}
"""Functions that show or copy what is there: no sites of their own."""
_KEEPING_SHAPE = {"bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "to", "type"}
# What the dispatcher calls a function, where it is not the function's own name.
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


@dataclass(slots=True)
class _Function:
    """What the tap needs to know of one Python-level function, looked up once."""

    name: str
    moving: bool
    keeping_shape: bool
    factory: bool
    inplace: bool
    matmul: bool
    softmax: bool
    dropout: bool
    masking: str | None


@dataclass(slots=True)
class _Call:
    """One call of one module under a tap; ``names``: full names of the sites of its path, None for unwanted ones."""

    module: nn.Module
    path: str
    linear: bool
    tapped: bool
    names: dict[tuple[str, int], str | None]
    counts: dict[str, int] = field(default_factory=dict)
    after_softmax: bool = False


class _TapMode(TorchFunctionMode):
    """Passes every call of a Python-level torch function to its tap."""

    def __init__(self, tap: "Tap") -> None:
        super().__init__()
        self.tap = tap

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        # What a wrapper does to its weights without gradients is no part of the forward.
        call = self.tap._call
        if call is not None and torch.is_grad_enabled():
            self.tap._look(call, func, args, kwargs, out)
        return out


class Tap:
    """Context manager under which ``on_site(name, tensor)`` is called with every floating-point output inside
    ``model``'s forwards, differentiable, under the name that ``SiteObserver`` gives it with eager attention.

    It sits above autograd and autocast, so that a tensor is the output itself and carries its gradient; positions that
    an attention mask excludes are zero. A tensor is handed over while the forward runs: use it at once, an in-place
    operation may change it later. What ``on_site`` computes is not tapped, and what it saves for its own backward is
    not thrown away by gradient checkpointing, so that a loss made of it has the same gradient there. A module that
    runs again inside a backward (non-reentrant checkpointing) is not tapped a second time, and a forward without
    gradients is not tapped at all. May stay active over a whole training loop, backward included: it works only while
    a module of ``model`` runs. Train and eval mode may change meanwhile.

    only: whether a site is wanted, asked once for each name; an unwanted one costs a look-up. glance: called first,
    with the detached tensor; only where it is true ``on_site`` is called, and graph nodes are made. Wrappers such as
    DDP, FSDP or a checkpointed module add nothing to the names, whether ``model`` is the wrapper or what it wraps.

    Not handed over, though ``SiteObserver`` sees them: copies (``to``, ``clone``, ``cat``), constants, what stock code
    runs without gradients (Pegasus's fixed positions), the statistics of ``layer_norm``, the noise of a dropout, and
    what is inside a fused function (a loss, SDPA apart from its context). A linear is one site with its bias, also
    where a kernel adds the bias apart. The input of a cube (``:cubed``) is handed over in every dtype, not in fp16
    alone.

    Raises ``UserError`` for a compiled model, which hides its operations, and in the forward for reentrant gradient
    checkpointing, under which they have no gradient.
    """

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
        self._functions: dict[Any, _Function] = {}
        self._stack: list[_Call] = []
        self._call: _Call | None = None
        self._handing_over = False
        self._handles: list[Any] = []
        self._modules: list[nn.Module] = []

    def __enter__(self) -> "Tap":
        if self._handles:
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
        _refuse_compiled(module)
        names = self._names.setdefault(path, {})
        linear = isinstance(module, nn.Linear)
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
                            _refuse_compiled(inner)
                if _is_called_by("compile_wrapper"):
                    raise UserError(_COMPILED)
            call = _Call(module, path, linear, tapped, names)
            if tapped and (outer is None or not outer.tapped):
                self._mode.__enter__()
            stack.append(call)
            self._call = call if tapped else None

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            # It is called too where this tap was entered, or a hook before ``enter`` failed, inside the module.
            if not stack or stack[-1].module is not module:
                return
            call = stack[-1]
            if linear and call.tapped and "" not in call.counts and isinstance(output, Tensor):
                # Its product is no torch function: ZeRO-3 puts an autograd function of its own there.
                name = self._wanted(call, "", 1)
                if name is not None:
                    self._hand_over(name, output, None)
            stack.pop()
            outer = stack[-1] if stack else None
            if call.tapped and (outer is None or not outer.tapped):
                self._mode.__exit__(None, None, None)
            self._call = outer if outer is not None and outer.tapped else None

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules.clear()
        # Left in the middle of a forward: the modules that are still running will not call ``leave`` any more.
        if self._stack and self._stack[-1].tapped:
            self._mode.__exit__(None, None, None)
        self._stack.clear()
        self._call = None

    def _look(self, call: _Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        if isinstance(out, Tensor):
            if out.is_floating_point():
                self._see(call, func, args, kwargs, out, 0)
        elif isinstance(out, (tuple, list)) and type(out) is not torch.Size:
            for i, item in enumerate(out):
                if isinstance(item, Tensor) and item.is_floating_point():
                    self._see(call, func, args, kwargs, item, i)

    def _see(
        self,
        call: _Call,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        out: Tensor,
        index: int,
    ) -> None:
        function = self._functions.get(func)
        if function is None:
            function = self._functions[func] = _describe_function(func)
        if function.factory or (_only_constants(args) and (not kwargs or _only_constants(kwargs.values()))):
            setattr(out, _TAG, _Tag(constant=True))
            return
        if function.moving:
            _carry_mask(function, func, args, kwargs, out)
            return
        if function.inplace:
            _untag(out)
        elif args and out is args[0]:  # a dropout that does nothing
            return
        masked = None
        if function.masking is not None and len(args) > 1:
            masked = _masked(function.masking, args, kwargs)
            if masked is not None:
                setattr(out, _TAG, _Tag(masked=masked.expand(out.shape)))
        name = function.name
        if function.matmul:
            name = "" if call.linear else "context" if call.after_softmax else "scores"
        elif function.softmax:
            call.after_softmax = True
        elif function.dropout:
            name = "native_dropout" if out.is_cuda else "mul"
        if index:
            name = f"{name}.{index}"
        count = call.counts[name] = call.counts.get(name, 0) + 1
        full = self._wanted(call, name, count)
        if full is not None:
            self._hand_over(full, out, masked)
        if name == "pow" and len(args) > 1 and isinstance(args[1], (int, float)) and args[1] == 3:
            # Its derivative overflows before it does.
            full = self._wanted(call, "cubed", 1)
            if full is not None:
                self._hand_over(full, args[0], None)

    def _wanted(self, call: _Call, name: str, count: int) -> str | None:
        """The full name of a site that is wanted."""
        try:
            return call.names[name, count]
        except KeyError:
            full = f"{call.path}:{name}" if name else call.path
            full = f"{full}#{count}" if count > 1 else full
            wanted = full if self.only is None or self.only(full) else None
            call.names[name, count] = wanted
            return wanted

    def _hand_over(self, name: str, out: Tensor, masked: Tensor | None) -> None:
        call, self._call, self._handing_over = self._call, None, True
        try:
            if self.glance is not None and not self.glance(name, _unmasked(out.detach(), masked)):
                return
            if not out.requires_grad:
                self.on_site(name, _unmasked(out, masked))
                return
            # In a checkpointed region what is saved is thrown away and made again by running the region again; what
            # on_site saves would not be made again, so it is kept.
            with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
                self.on_site(name, _unmasked(out, masked))
        finally:
            self._call, self._handing_over = call, False


def _describe_function(func: Any) -> _Function:
    own = getattr(func, "__name__", "")
    inplace = own.endswith("_") and not own.endswith("__")
    name = own.rstrip("_") if inplace else own
    matmul = name == "matmul" or name in _MATMULS
    return _Function(
        name=_BELOW.get(name, name),
        moving=own in _MOVING or own in _UNINITIALISED,
        keeping_shape=own in _KEEPING_SHAPE or own == "type_as",
        factory=own in _FACTORIES,
        inplace=inplace,
        matmul=matmul,
        softmax=name == "softmax",
        dropout=name == "dropout",
        masking=_MASKING.get(name),
    )


def _carry_mask(
    function: _Function, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Tensor
) -> None:
    """What is only moved keeps its masked positions."""
    tag = getattr(args[0], _TAG, None) if args else None
    if tag is None or tag.masked is None or tag.constant:
        return
    masked = tag.masked if function.keeping_shape else func(tag.masked, *args[1:], **(kwargs or {}))
    if isinstance(masked, Tensor) and masked.shape == out.shape:
        setattr(out, _TAG, _Tag(masked=masked))


def _unmasked(out: Tensor, masked: Tensor | None) -> Tensor:
    # A positive value or a NaN where a mask was added is no mask's doing.
    return out if masked is None else out.masked_fill(masked & (out < 0), 0.0)


def _itself(x: Tensor) -> Tensor:
    return x


def paths(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module with its path, free of what wrappers (DDP, FSDP, checkpointing) add; the root is "model"."""
    prefix, inner = "", model
    # A wrapper that has nothing but a ``module``: DDP, DeepSpeed.
    while [name for name, _ in inner.named_children()] == ["module"]:
        prefix, inner = f"{prefix}module.", inner.get_submodule("module")
    found = []
    for path, module in model.named_modules():
        parts = f"{path}.".removeprefix(prefix).split(".")
        found.append((".".join(part for part in parts if part and part not in _WRAPPING) or "model", module))
    return found


_COMPILED = "a compiled model hides its operations; use the model without torch.compile"


def _refuse_compiled(module: nn.Module) -> None:
    if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
        raise UserError(_COMPILED)


def _is_called_by(function: str) -> bool:
    """Whether a function of this qualified name, or with this end, is running."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_qualname.endswith(function):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class ChannelRange:
    """What a signal of ``rows`` vectors reached: fp32 [channels] largest |x| and mean x² of each channel."""

    amax: Tensor
    mean_square: Tensor
    rows: int


_STEPS_IN_A_BINADE = 8


@dataclass(frozen=True)
class NormRange:
    """What entered a norm, per token: the largest ‖x‖₂, and how the variances are spread.

    ``variances``: fp64 [k, 2], a variance and the share of tokens near it (within a sixteenth of a binade); the
    shares sum to 1. The variance is what the norm divides by: the mean square of an RMS norm, the centred variance of
    ``nn.LayerNorm``.
    """

    norm_max: float
    variances: Tensor


@dataclass(frozen=True)
class ScoreRange:
    """Largest |score| of an attention: the bare product QKᵀ, and any value from there to the softmax.

    The second covers the scaled product and the product with its position bias; positions are left out from
    where the mask is added.
    """

    product: float
    biased: float


@dataclass(frozen=True)
class ModuleRange:
    """What entered and left a module; an embedding's input, being ids, has no channels (shape [0]).

    ``norm`` is set for norm modules, ``scores`` for attentions that ran eagerly.
    """

    input: ChannelRange
    output: ChannelRange
    norm: NormRange | None = None
    scores: ScoreRange | None = None


Ranges = dict[str, ModuleRange]
"""Ranges by module path."""


def observe_ranges(model: nn.Module, batches: Iterable[Batch]) -> Ranges:
    """Return what every linear, embedding, norm and attention module of an fp32 ``model`` took in and gave out.

    Every position counts, padding too: the network computes them, and fp16 must hold them. Scores are seen only under
    ``attn_implementation="eager"``. The planner's ranges come from here.
    """
    meters: dict[str, _Meter] = {}
    handles = []
    observer = SiteObserver(model)
    for path, module in model.named_modules():
        if _is_measured(module):
            meters[path] = meter = _Meter(module, observer)
            handles.append(module.register_forward_hook(meter, with_kwargs=True))
    try:
        with torch.no_grad(), observer:
            for batch in batches:
                run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    scores = _scores(observer)
    return {path: meter.result(scores.get(path)) for path, meter in meters.items() if meter.output.rows}


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` normalises its input: ``nn.LayerNorm`` or a class named ...LayerNorm or ...RMSNorm."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


def _is_measured(module: nn.Module) -> bool:
    attention = type(module).__name__.endswith("Attention") and not type(module).__name__.endswith(
        ("SelfAttention", "CrossAttention")
    )
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_norm(module) or attention


def _scores(observer: SiteObserver) -> dict[str, ScoreRange]:
    found = {}
    for path, sites in observer._sites.items():
        amax: dict[str, float] = {}
        for (name, *_), site in sites.items():
            amax[name] = max(amax.get(name, 0.0), site.amax)
        if "scores" in amax:
            after = [amax[name] for name in ("scores", "mul", "add") if name in amax]
            found[path] = ScoreRange(amax["scores"], max(after[1:] or after))
    return found


class _Channels:
    """Running per-channel maximum and sum of squares."""

    def __init__(self) -> None:
        self.rows = 0
        self.amax = torch.zeros(0)
        self.squares = torch.zeros(0, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1])
        amax = torch.maximum(flat.amax(0), -flat.amin(0)).float()
        squares = (flat.float() * flat.float()).sum(0, dtype=torch.float64)
        if self.rows:
            amax, squares = torch.maximum(amax, self.amax), squares + self.squares
        self.amax, self.squares, self.rows = amax, squares, self.rows + len(flat)

    def result(self) -> ChannelRange:
        mean = (self.squares / max(self.rows, 1)).float()
        return ChannelRange(self.amax.cpu(), mean.cpu(), self.rows)


class _Meter:
    """The forward hook of one module."""

    def __init__(self, module: nn.Module, observer: SiteObserver) -> None:
        self.observer = observer
        self.input = _Channels()
        self.output = _Channels()
        self.norm = is_norm(module)
        self.centred = isinstance(module, nn.LayerNorm)
        self.norm_max = 0.0
        self.binades: dict[int, int] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = args[0] if args else kwargs.get("hidden_states")
        y = output[0] if isinstance(output, tuple) else output
        with self.observer.paused():
            if isinstance(x, Tensor) and x.is_floating_point():
                self.input.add(x.detach())
                if self.norm:
                    self._add_norm(x.detach())
            self.output.add(y.detach())

    def _add_norm(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).double()
        variance = x.var(-1, correction=0) if self.centred else x.square().mean(-1)
        self.norm_max = max(self.norm_max, float(x.norm(dim=-1).max()))
        steps = (variance.clamp(min=1e-30).log2() * _STEPS_IN_A_BINADE).round().int()
        for step, count in zip(*steps.unique(return_counts=True), strict=True):
            self.binades[int(step)] = self.binades.get(int(step), 0) + int(count)

    def result(self, scores: ScoreRange | None) -> ModuleRange:
        norm = None
        if self.norm:
            shares = [(2.0 ** (k / _STEPS_IN_A_BINADE), n / self.input.rows) for k, n in sorted(self.binades.items())]
            norm = NormRange(self.norm_max, torch.tensor(shares, dtype=torch.float64))
        return ModuleRange(self.input.result(), self.output.result(), norm, scores)


@contextmanager
def watched(model: nn.Module, layout: Layout) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that each forward fills with differentiable values of the sites that can overflow, by the
    audit's names: linears, scores, context, gated products, the residual stream before each norm, norms' outputs.

    Scores are recomputed from queries and keys, [rows, heads, queries, keys]; everything else has the channels last.
    """
    found: dict[str, Tensor] = {}
    handles = []

    def output(name: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            found[name] = result[0] if isinstance(result, tuple) else result

        return hook

    def entering(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            found[name] = args[0]

        return hook

    def scores(wiring: Attention, heads: int) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            q, k = (found[p].unflatten(-1, (heads, -1)).transpose(1, 2) for p in (wiring.query, wiring.key))
            found[f"{wiring.at}:scores"] = q @ k.transpose(-1, -2)

        return hook

    def watch(path: str, *, before: str = "", after: str = "", also: Any = None) -> None:
        module = model.get_submodule(path)
        if before:
            handles.append(module.register_forward_pre_hook(entering(before)))
        if after:
            handles.append(module.register_forward_hook(output(after)))
        if also is not None:
            handles.append(module.register_forward_hook(also))

    stream = ""
    for wiring in layout.wiring:
        if isinstance(wiring, Ends):
            stream = f"{wiring.at}:add" if wiring.positions else f"{wiring.embedding}:embedding"
            watch(wiring.norm, after=f"{wiring.norm}:{layout.family.norm_site}")
            continue
        watch(wiring.norm, before=stream, after=f"{wiring.norm}:{layout.family.norm_site}")
        stream = wiring.add
        if isinstance(wiring, Attention):
            heads = int(str(value(layout.family, layout.config, wiring.heads)))
            watch(wiring.value, after=wiring.value)
            watch(wiring.query, after=wiring.query)
            watch(wiring.key, after=wiring.key)
            watch(wiring.output, before=f"{wiring.at}:context", after=wiring.output)
            watch(wiring.at, also=scores(wiring, heads))
        else:
            watch(wiring.linear, after=wiring.linear)
            if wiring.gate:
                watch(wiring.gate, after=wiring.gate)
                watch(wiring.output, before=f"{wiring.at}:mul")
            watch(wiring.output, after=wiring.output)
    # The last stream of each stack enters its final norm.
    for ends, last in zip(ends_of(layout), last_adds(layout), strict=True):
        watch(ends.norm, before=last)
    if not layout.encoder_only:
        head = layout.family.head.removesuffix(".weight")
        watch(head, after=head)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def ends_of(layout: Layout) -> list[Ends]:
    """Return the ends of each stack, the encoder's first."""
    return [w for w in layout.wiring if isinstance(w, Ends)]


def last_adds(layout: Layout) -> list[str]:
    """Return the site of the last residual add of each stack."""
    found: list[str] = []
    for wiring in layout.wiring:
        if isinstance(wiring, Ends):
            found.append("")
        else:
            found[-1] = wiring.add
    return found
