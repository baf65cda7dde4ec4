"""Matrix products on a CPU, computed in fp32 and rounded once: the same numbers but for the order of sums, much faster.

A CPU accumulates 16-bit products in fp32 and overflows to inf as tensor cores do, but the layouts of the backward run
10 to 50 times slower than in fp32. A linear's product in fp32 is oneDNN's: MKL takes twice as long on AMD's processors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .onednn import onednn_linear

_ELEMENTS_AT_A_TIME = 1 << 18  # of two weights that are compared: 1 MB in fp32

MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear"}  # operations that multiply two matrices


class FastProducts(TorchDispatchMode):
    """Context manager under which matrix products of 16 or 32 bits on the CPU, in the forward and in the backward, are
    fp32 products of the same operands rounded once. A sum that is exact in fp32 comes out identical; otherwise under
    one element in a hundred of 16 bits differs from the native kernel, by one rounding. Native fp16 kernels on a CPU
    are 4 to 100 times slower, bf16 ones a few times. Other devices, other dtypes, convolutions and the fused SDPA are
    left alone. The backward must run inside too."""

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
            matmul = self._matmuls[func] = is_matrix_product(func)
        if matmul and is_computed(args):
            return product_in_fp32(func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)


def is_matrix_product(func: Any) -> bool:
    # The other overloads write into an operand or name the dtype of the result.
    return func._schema.name.split("::")[1] in MATRIX_PRODUCTS and func._overloadname == "default"


def product_in_fp32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    """Return a matrix product of operands that ``is_computed`` knows, computed in fp32 and rounded once."""
    operands = [_widened(a) if isinstance(a, Tensor) else a for a in args]
    *bias, x, weight = operands
    plain = func in _OF_LINEARS and not kwargs and _is_weight(weight) and all(_is_bias(b, weight) for b in bias)
    if plain and (linear := onednn_linear()) is not None:
        exact: Tensor = linear(x, weight.t(), bias[0] if bias else None, "none", [], "")
    else:
        exact = func(*operands, **(kwargs or {}))
    return exact.to(args[0].dtype)


_OF_LINEARS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _is_weight(operand: Tensor) -> bool:
    """Whether a factor is a weight as a linear multiplies with it, [inputs, outputs] and contiguous the other way."""
    return operand.dim() == 2 and not operand.is_contiguous() and operand.t().is_contiguous()


def _is_bias(summand: Tensor, weight: Tensor) -> bool:
    """Whether a summand is one number per output, side by side: oneDNN does not heed a bias's strides."""
    return summand.shape == weight.shape[1:] and summand.is_contiguous()


class Widened:
    """fp32 copies of 16-bit weights (transposed, as a linear multiplies them), made at first use and kept until
    ``clear``. A copy whose values are those of an fp32 weight that was ``offer``ed is that weight."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}
        self._offered: list[Tensor] = []
        self._making = threading.Lock()

    def of(self, weight: Tensor) -> Tensor:
        key = (weight.data_ptr(), weight.shape)
        with self._making:
            if key not in self._copies:
                known = next((x.t() for x in self._offered if _has_values_of(weight.t(), x)), None)
                # With the weight itself, so that nothing else comes to lie where it does.
                self._copies[key] = (weight, weight.float() if known is None else known)
            return self._copies[key][1]

    def offer(self, weight: Tensor) -> None:
        self._offered.append(weight)

    def clear(self) -> None:
        self._copies.clear()
        self._offered.clear()


def _has_values_of(narrow: Tensor, wide: Tensor) -> bool:
    """Whether two contiguous weights are equal, compared part by part: a second wide one is not made."""
    parts = (weight.flatten().split(_ELEMENTS_AT_A_TIME) for weight in (narrow, wide))
    return narrow.shape == wide.shape and all(torch.equal(x.float(), y) for x, y in zip(*parts, strict=True))


_kept: Widened | None = None


@contextmanager
def weights_widened_once() -> Iterator[Widened]:
    """Yield the copies of weights that products of 16-bit operands then share, in every thread."""
    global _kept
    before, _kept = _kept, Widened()
    try:
        yield _kept
    finally:
        _kept = before


def _widened(operand: Tensor) -> Tensor:
    if _kept is None or operand.dtype == torch.float32 or not _is_weight(operand):
        return operand.float()
    return _kept.of(operand)


def is_computed(args: tuple[Any, ...]) -> bool:
    """Return whether an operation's operands are tensors of one dtype of 16 or 32 bits, the first on the CPU."""
    first = args[0]
    if first.dtype not in (torch.float16, torch.bfloat16, torch.float32) or first.device.type != "cpu":
        return False
    return all(a.dtype == first.dtype for a in args if isinstance(a, Tensor))  # torch refuses others, and says so
