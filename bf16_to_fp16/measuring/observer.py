"""Measure the output of every operation by a dispatch mode, below autograd and autocast. It also sees operations
between modules, such as a residual add."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..numerics import FP16_MAX, FP16_STEP, GELU_CUBE_BACKWARD_LIMIT, SATURATED_FROM
from ..ranges import ScoreRange
from . import origins
from .products import is_computed, is_matrix_product, product_in_fp32
from .sites import CONSTANT_REASON, CUBE_REASON, MASK_REASON, Call, Site, is_linear, site_name

_FRIENDLY = dict.fromkeys(("bmm", "mm", "addmm", "baddbmm"), "matmul")
_FRIENDLY |= {"_softmax": "softmax", "_safe_softmax": "softmax", "_to_copy": "to", "native_layer_norm": "layer_norm"}


@dataclass(slots=True)
class _Operator:
    name: str
    view: bool
    inplace: bool
    uninitialised: bool
    factory: bool
    matmul: bool
    softmax: bool
    padded: bool
    masking: str | None


@dataclass(slots=True)
class _Frame(Call):
    sites: dict[tuple[str, int, torch.dtype], Site] = field(default_factory=dict)
    measured: bool = True
    gelu: bool = False  # whether it is gelu_new
    cubing: bool = False  # whether it is between gelu_new's cube and the tanh that makes its infinities harmless
    unseen: bool = False  # whether a row of its attention weights is fully masked, and NaN
    pending: list[tuple[Site, int, int]] = field(default_factory=list)
    """NaN of fully masked rows, for ``_settle`` to decide on: the site, their number, and the output's number."""

    def site(self, name: str, count: int, dtype: torch.dtype, order: int) -> Site:
        site = self.sites.get((name, count, dtype))
        if site is None:
            limit = FP16_MAX if dtype == torch.float16 else None
            site = self.sites[name, count, dtype] = Site(site_name(self.path, name, count), dtype, limit, order=order)
        return site


class SiteObserver(TorchDispatchMode):
    """Context manager that measures every floating-point output of ``model``'s forward and backward. Entering it again
    adds to the same sites.

    The site of a linear has the linear's path as its name. Other names add the operation, as in ``<path>:add``, or
    ``<path>:add#2`` for the second in a call. An attention has ``:scores``, ``:context`` and ``:masked``. The site
    ``:masked`` measures the amount that a mask must subtract from scores so that masked positions get no attention
    weight. Gradients are named ``<site>:grad``. only: the paths of modules to measure. fast_products: compute the CPU's
    matrix products as ``FastProducts`` does."""

    def __init__(self, model: nn.Module, *, fast_products: bool = True, only: Collection[str] | None = None) -> None:
        super().__init__()
        self.model = model
        self.only = only
        self.fast_products = fast_products
        self.outputs = 0
        """Number of floating-point outputs seen in the model, without views."""
        self._sites: dict[str, dict[tuple[str, int, torch.dtype], Site]] = {}
        self._stack: list[_Frame] = []
        self._frame: _Frame | None = None
        self._hooks = ExitStack()
        self._by_sequence: dict[int, str] = {}
        self._sequence = -1
        self._node = -1
        self._node_frame: _Frame | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper against torch.compile costs more per operation than a small measurement does.
        return False

    def __enter__(self) -> SiteObserver:
        for path, module in self.model.named_modules():
            if isinstance(module, nn.Dropout) and not self.model.training:
                continue
            self._hook(path or "model", module)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._unhook()

    def _hook(self, path: str, module: nn.Module) -> None:
        sites = self._sites.setdefault(path, {})
        linear, gelu = is_linear(module), type(module).__name__ == "NewGELUActivation"
        measured = self.only is None or path in self.only
        stack = self._stack

        def enter(module: nn.Module, args: Any) -> None:
            self._frame = _Frame(path, linear, sites=sites, measured=measured, gelu=gelu)
            stack.append(self._frame)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            _settle(stack.pop(), output)
            self._frame = stack[-1] if stack else None

        self._hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
        self._hooks.enter_context(module.register_forward_hook(leave, always_call=True))

    def _unhook(self) -> None:
        self._hooks.close()
        self._stack.clear()
        self._frame = None
        self._by_sequence.clear()

    def sites(self) -> list[Site]:
        return [site for sites in self._sites.values() for site in sites.values()]

    def score_ranges(self) -> dict[str, ScoreRange]:
        """Return the largest scores of each attention, before and after scale and bias, by the attention's path."""
        ranges = {}
        for path, sites in self._sites.items():
            amax: dict[str, float] = {}
            for (name, *_), site in sites.items():  # in the order in which they first ran
                if name == "scores" or amax:
                    amax[name] = max(amax.get(name, 0.0), site.amax)
            if amax:
                after = [amax[name] for name in ("mul", "div", "add") if name in amax]
                ranges[path] = ScoreRange(amax["scores"], max(after, default=amax["scores"]))
        return ranges

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        operator = _describe(func)
        if operator.matmul and self.fast_products and is_computed(args):
            out = product_in_fp32(func, args, kwargs)
        else:
            out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            if operator.view:
                self._carry(func, args, out)
            elif out.is_floating_point():
                self._see(operator, args, kwargs, out, 0)
        elif isinstance(out, (tuple, list)):
            # CUDA's fused attention also returns values for its backward, padded with inf.
            for i, item in enumerate(out[:1] if operator.padded else out):
                if isinstance(item, Tensor) and item.is_floating_point() and not operator.view:
                    self._see(operator, args, kwargs, item, i)
        return out

    def _carry(self, func: Any, args: tuple[Any, ...], out: Tensor) -> None:
        if not out.is_floating_point():
            return
        origin = origins.origin_of(args[0])
        if origin is not None:
            masked = origin.masked
            if masked is not None and not origin.constant:
                try:
                    masked = func(masked, *args[1:])
                except RuntimeError:  # an expanded mask has strides that not every view accepts
                    masked = func(masked.contiguous(), *args[1:])
            origins.set_origin(out, replace(origin, masked=None if origin.constant else masked))
        if self._frame is not None:
            self._remember(self._frame.path)

    def _remember(self, name: str) -> None:
        """Record that the newest autograd node is the backward of site ``name``."""
        number = torch.autograd._get_sequence_nr() - 1
        if number > self._sequence:
            self._sequence = number
            self._by_sequence[number] = name

    def _see(self, operator: _Operator, args: Any, kwargs: dict[str, Any] | None, out: Tensor, index: int) -> None:
        constant = operator.factory or origins.only_constants(args)
        if constant:
            origins.set_origin(out, origins.of_constants((*args, *(kwargs or {}).values())))
        elif operator.inplace:
            origins.forget_origin(out)
        if operator.uninitialised:
            return
        node: Any = torch._C._current_autograd_node()
        frame = self._frame if node is None else self._backward_frame(node)
        if frame is None or not frame.measured:
            return
        self.outputs += 1
        name = _name(operator, args, frame, index, constant=constant, backward=node is not None)
        site = frame.site(name, frame.count(name), out.dtype, self.outputs)
        if node is None:
            self._remember(site.name)
        site.calls += 1
        if not out.numel():
            return
        if node is not None:
            site.elements += out.numel()
            site.zeros += out.numel() - int(out.count_nonzero())
        low, high = _extremes(out)
        if frame.gelu and operator.name in ("pow", "tanh"):
            frame.cubing = operator.name == "pow"
            if frame.cubing and torch.is_grad_enabled():
                self._see_cubed(args[0], site)
        masked = None
        # ``low`` is NaN where any element is.
        if operator.masking is not None and not constant and (not low > origins.MASK_FROM or frame.before_softmax):
            masked = origins.masked_positions(operator.masking, args, kwargs)
            if masked is not None and not bool(masked.any()):
                masked = None
            elif masked is not None and frame.before_softmax and operator.name == "add" and not operator.inplace:
                self._see_masked(frame, args, out.dtype, masked)
        if operator.softmax:
            _count_masked(frame, args, out)
            frame.unseen = math.isnan(high) and origins.sees_nothing(args[0])
        whole = site.nonfinite == 0
        if constant:
            _note_constant(site, out)
        elif masked is not None:
            _note_masked(site, out, high, masked)
        elif frame.unseen and node is None:
            _note_unseen(frame, site, out, self.outputs)
        else:
            _note(site, out, low, high, harmless=frame.cubing)
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
                self._node_frame = _Frame(path, True, sites=self._sites.setdefault(path, {}))
        return self._node_frame

    def _see_masked(self, frame: _Frame, args: tuple[Any, ...], dtype: torch.dtype, masked: Tensor) -> None:
        """Measure how far a mask must lower scores so that they get no attention weight."""
        scores = origins.scores_of_mask(args)
        if scores is None:
            return
        site = frame.site("masked", 1, dtype, self.outputs)
        site.calls += 1
        site.amax = max(site.amax, float(origins.masked_span(scores, masked).amax()))

    def _see_cubed(self, operand: Tensor, cube: Site) -> None:
        """Measure the input x of a cube x³. The limit of |x| is 147.8, because a backward computes 3x² in fp16."""
        if operand.dtype != torch.float16 or self._frame is None:
            return
        site = self._frame.site("cubed", 1, operand.dtype, cube.order)
        site.limit = GELU_CUBE_BACKWARD_LIMIT
        site.calls += 1
        low, high = _extremes(operand)
        amax = max(high, -low)
        site.amax = max(site.amax, amax if math.isfinite(amax) else math.inf)


@cache
def _describe(func: Any) -> _Operator:
    schema = func._schema
    base = schema.name.split("::")[1]
    returns = [r.alias_info for r in schema.returns]
    inplace = any(alias is not None and alias.is_write for alias in returns)
    name = base.rstrip("_") if inplace else base
    view = base == "_unsafe_view" or any(alias is not None and not alias.is_write for alias in returns)
    attention = "scaled_dot_product" in base and "backward" not in base
    return _Operator(
        name="context" if attention else _FRIENDLY.get(name, name),
        view=view and not inplace and base not in origins.FACTORIES,
        inplace=inplace,
        uninitialised=base in origins.UNINITIALISED,
        factory=base in origins.FACTORIES,
        matmul=is_matrix_product(func),
        softmax=base in ("_softmax", "_safe_softmax"),
        padded=base == "_scaled_dot_product_efficient_attention",
        masking=origins.MASKING.get(name),
    )


def _name(operator: _Operator, args: Any, frame: _Frame, index: int, *, constant: bool, backward: bool) -> str:
    frame.after_softmax |= operator.softmax
    if constant:
        # Kept apart, so that a layer that builds a mask numbers its other operations like one that does not.
        return f"constant {operator.name}"
    name = operator.name
    if operator.matmul:
        name = frame.product(sums=origins.has_constant_tensor(args))
    elif name == "to" and isinstance(args[0], nn.Parameter):
        name = "weight"  # autocast casts one now and then, which must not number what is cast in every call
    if backward:
        return ""
    return f"{name}.{index}" if index else name


def _extremes(x: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(x)
    return float(low), float(high)


def _note(site: Site, out: Tensor, low: float, high: float, *, harmless: bool = False) -> None:
    if harmless:
        site.reason, site.limit = CUBE_REASON, None
    amax = max(high, -low)
    half = out.dtype == torch.float16
    if math.isfinite(amax) and not (half and amax >= SATURATED_FROM):
        site.amax = max(site.amax, amax)
        return
    size = out.abs()
    nans = out.numel() - _count(size <= math.inf)
    infinite = _count(size == math.inf)
    saturated = _count(size >= SATURATED_FROM) - infinite if half else 0
    site.amax = math.inf if nans or infinite else max(site.amax, amax)
    site.nonfinite += nans
    if harmless:
        site.benign += infinite + saturated
    else:
        site.nonfinite += infinite
        site.saturated += saturated


def _count(chosen: Tensor) -> int:
    """Count the true elements. ``sum`` would first make an int64 of each."""
    return int(torch.count_nonzero(chosen))


def _count_masked(frame: _Frame, args: tuple[Any, ...], weights: Tensor) -> None:
    """Count as saturated each masked position that keeps an attention weight, unless its whole row is masked."""
    site = next((site for (name, *_), site in frame.sites.items() if name == "masked"), None)
    origin = origins.origin_of(args[0])
    if site is not None and origin is not None and origin.masked is not None:
        weighted = (weights > FP16_STEP) & origin.masked
        if bool(weighted.any()):
            site.saturated += _count(weighted & ~origin.masked.all(-1, keepdim=True))


def _note_masked(site: Site, out: Tensor, high: float, masked: Tensor) -> None:
    origins.set_origin(out, origins.Origin(masked=masked.expand(out.shape)))
    # A positive value or a NaN where a mask was added does not come from the mask.
    if not high < -origins.MASK_FROM:
        masked = masked & (out < 0)
    most = origins.ceiling(masked, 0.0, out.dtype)
    kept = out.clamp(-most, most)
    _note(site, kept, *_extremes(kept))
    site.benign += _count(masked) * (out.numel() // masked.numel())
    site.reason = MASK_REASON


def _note_unseen(frame: _Frame, site: Site, out: Tensor, order: int) -> None:
    """Measure an output without its NaN, which come from fully masked rows. ``_settle`` counts these NaN later."""
    nans = out.isnan()
    kept = out.masked_fill(nans, 0.0)
    _note(site, kept, *_extremes(kept))
    if (count := _count(nans)) > 0:
        frame.pending.append((site, count, order))


def _settle(frame: _Frame, output: Any) -> None:
    """Count the NaN of fully masked rows when a module returns. They are benign if the module's output has no NaN."""
    if not frame.pending:
        return
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    cut_off = isinstance(first, Tensor) and not bool(first.isnan().any())
    for site, count, order in frame.pending:
        if cut_off:
            site.benign += count
            site.reason = MASK_REASON
            continue
        if not site.nonfinite:
            site.order = order
        site.nonfinite += count
        site.amax = math.inf


def _note_constant(site: Site, out: Tensor) -> None:
    site.reason, site.limit = CONSTANT_REASON, None
    nans = _count(out.isnan())
    site.nonfinite += nans
    extreme = out.abs() >= -origins.MASK_FROM
    site.benign += _count(extreme)
    rest = out.masked_fill(extreme, 0.0)
    site.amax = math.inf if nans else max(site.amax, float(rest.abs().max()))
