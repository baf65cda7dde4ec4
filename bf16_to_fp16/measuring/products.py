"""Compute the CPU's 16- and 32-bit matrix products in fp32, and round them once. torch's 16-bit products take up to 100
times as long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..bounds.spectral import onednn_linear

MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear"}  # operations that multiply two matrices


class FastProducts(TorchDispatchMode):
    """Context manager that computes the CPU's 16- and 32-bit matrix products in fp32, and rounds them once. A backward
    must run inside it too. An element of a product is the same as torch's if fp32 can sum its terms without rounding.
    In 16 bits, under 1% of all other elements differ, by one rounding."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_matrix_product(func) and is_computed(args):
            return product_in_fp32(func, args, kwargs)
        return func(*args, **(kwargs or {}))


@cache
def is_matrix_product(func: Any) -> bool:
    # The other overloads write into an operand or name the dtype of the result.
    return func._schema.name.split("::")[1] in MATRIX_PRODUCTS and func._overloadname == "default"


def product_in_fp32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    operands = [_widened(a) if isinstance(a, Tensor) else a for a in args]
    *bias, x, weight = operands
    plain = func in _OF_LINEARS and not kwargs and _is_weight(weight)
    # oneDNN ignores a bias's strides.
    plain = plain and all(b.shape == weight.shape[1:] and b.is_contiguous() for b in bias)
    if plain and (linear := onednn_linear()) is not None:
        exact: Tensor = linear(x, weight.t(), bias[0] if bias else None, "none", [], "")
    else:
        exact = func(*operands, **(kwargs or {}))
    return exact.to(args[0].dtype)


_OF_LINEARS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)  # for oneDNN: on AMD, MKL is half as fast


def _is_weight(operand: Tensor) -> bool:
    """Return whether a factor looks like a linear's weight: [inputs, outputs], and contiguous when transposed."""
    return operand.dim() == 2 and not operand.is_contiguous() and operand.t().is_contiguous()


Widened = dict[tuple[int, torch.Size], tuple[Tensor, Tensor]]
"""16-bit weights with their fp32 copies, by address and shape. The weight is kept so that no other tensor gets its
address."""

_kept: Widened | None = None


@contextmanager
def weights_widened_once() -> Iterator[Widened]:
    """Yield a dictionary in which ``product_in_fp32`` keeps fp32 copies of 16-bit weights. Clear it to free them."""
    global _kept
    before, _kept = _kept, {}
    try:
        yield _kept
    finally:
        _kept = before


def _widened(operand: Tensor) -> Tensor:
    if _kept is None or operand.dtype == torch.float32 or not _is_weight(operand):
        return operand.float()
    key = operand.data_ptr(), operand.shape
    if key not in _kept:
        _kept[key] = operand, operand.float()
    return _kept[key][1]


def is_computed(args: tuple[Any, ...]) -> bool:
    first = args[0]
    if first.dtype not in (torch.float16, torch.bfloat16, torch.float32) or first.device.type != "cpu":
        return False
    return all(a.dtype == first.dtype for a in args if isinstance(a, Tensor))  # torch refuses others, and says so
