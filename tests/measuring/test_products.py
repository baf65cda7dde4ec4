"""Matrix products on a CPU are those of fp32 rounded once; what a mask must add at least, beside plain loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.origins import MASKED_REACH, ceiling, masked_span
from bf16_to_fp16.measuring.products import FastProducts


class Products(nn.Module):
    def forward(self, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = x.view(4, -1, x.shape[-1])
        return (nn.functional.linear(x, w), nn.functional.linear(x, w, b), torch.matmul(heads, heads.transpose(1, 2)))


def native_and_fast(x: Tensor, w: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    module = Products()
    native = module(x, w, b)
    with SiteObserver(module):
        fast = module(x, w, b)
    return list(zip(native, fast, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fast_products_are_fp32_products_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(64, 512).to(dtype), torch.randn(300, 512).to(dtype), torch.randn(300).to(dtype)
    in_fp32 = native_and_fast(x.float(), w.float(), b.float())
    for (_, fast), (_, expected) in zip(native_and_fast(x, w, b), in_fp32, strict=True):
        assert torch.equal(fast, expected.to(dtype))
    most = native_and_fast(x.abs().double(), w.abs().double(), b.abs().double())
    exact = native_and_fast(x.double(), w.double(), b.double())
    for (_, fast), (_, sums), (size, _) in zip(in_fp32, exact, most, strict=True):
        assert fast.dtype == torch.float32
        assert bool(((fast - sums).abs() <= 513 * 2.0**-24 * size).all())


def test_fast_products_of_fp32_weights_are_those_of_onednn_where_torch_has_it() -> None:
    x, linear = torch.randn(2, 6, 8), nn.Linear(8, 4)
    with Kernels() as kernels, torch.no_grad():
        for observed in (FastProducts(), SiteObserver(linear)):
            kernels.dtypes.clear()
            with observed:
                linear(x)
            assert kernels.dtypes == ([] if torch.backends.mkldnn.is_available() else [torch.float32])


def test_a_bias_with_gaps_and_a_whole_matrix_are_added_and_nothing_summed_as_by_torch() -> None:
    x, w, pairs = torch.ones(2, 8), torch.ones(4, 8), torch.arange(8.0).view(4, 2)
    for bias in (pairs[:, 1], pairs[0, :1].expand(4)):
        with FastProducts():
            assert torch.equal(nn.functional.linear(x, w, bias), 8 + bias.expand(2, 4))
    x, w, added = (torch.randint(-2, 3, shape).float() for shape in ((4, 8), (5, 8), (4, 5)))
    with FastProducts():
        both = torch.addmm(added, x, w.t()), nn.functional.linear(x[:, :0], w[:, :0].contiguous())
    assert torch.equal(both[0], x @ w.t() + added)
    assert torch.equal(both[1], torch.zeros(4, 5))


@pytest.mark.parametrize("of", [FastProducts, lambda: SiteObserver(nn.Identity())])
def test_operands_of_two_dtypes_are_refused_as_by_torch(of: Any) -> None:
    x, w = torch.ones(2, 8), torch.ones(4, 8)
    for one, other, bias in ((x.half(), w, None), (x, w.half(), None), (x.half(), w.half(), torch.ones(4))):
        with of(), pytest.raises(RuntimeError, match="dtype"):
            nn.functional.linear(one, other, bias)


def test_native_products_run_where_fast_ones_are_switched_off() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(512, 512).half(), torch.randn(64, 512).half()
    with torch.no_grad(), SiteObserver(module, fast_products=False):
        observed = module(x)
    assert torch.equal(observed, module(x))


class Kernels(TorchDispatchMode):
    """Dtypes of the operands of the matrix products that really run: entered before another mode, it is below it."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket._qualified_op_name.split("::")[1] in ("mm", "bmm", "addmm", "baddbmm"):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def forward_and_gradients(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    operands = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    out = Products()(*operands)
    sum((y * y.detach().sign()).sum() for y in out).backward()
    return [*out, *(t.grad for t in operands if t.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fast_products_run_in_fp32_forward_and_backward_and_equal_native_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Sums of small integers: exact in fp32, so that any order gives the same.
    x, w, b = (torch.randint(-2, 3, shape).to(dtype) for shape in ((64, 32), (48, 32), (48,)))
    with Kernels() as kernels:
        native = forward_and_gradients(x, w, b)
    assert set(kernels.dtypes) == {dtype}
    with Kernels() as kernels, FastProducts():
        fast = forward_and_gradients(x, w, b)
    assert set(kernels.dtypes) == {torch.float32}
    assert len(kernels.dtypes) >= 2 * 3
    assert len(fast) == 6
    for a, c in zip(native, fast, strict=True):
        assert a.dtype == c.dtype == dtype
        assert torch.equal(a, c)


def test_fast_products_leave_products_into_given_memory_alone() -> None:
    x = torch.randn(8, 8)
    out = torch.empty(8, 8, dtype=torch.float16)
    with FastProducts():
        assert torch.equal(x @ x, torch.mm(x, x))
        torch.mm(x.half(), x.half(), out=out)
        with SiteObserver(nn.Identity()):
            torch.mm(x.half(), x.half(), out=out)
    assert float((out.float() - x @ x).abs().max()) < 0.1
    with FastProducts():
        exact = x.half() @ x.half()
    assert torch.equal(exact, (x.half().float() @ x.half().float()).half())


WHOLE, SHARED = (torch.rand(2, n, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.5 for n in (3, 1))
MASKS = {
    "whole": WHOLE,
    "one for all heads": SHARED,
    "expanded over heads": SHARED.flip(0).expand(2, 3, 4, 5),
    "fewer dimensions": torch.ones(4, 5).triu(1).bool(),
    "keys alone": torch.arange(5) > 2,
    "expanded keys": (torch.arange(5) > 2).expand(2, 3, 4, 5),
    "a row for each query": (torch.arange(4)[:, None] > 1).expand(4, 5),
    "everything": torch.tensor(True),
    "nothing": torch.tensor(False).expand(2, 1, 1, 1),
    "one text": (torch.arange(5) > 2)[None, None, None].expand(1, 1, 4, 5),
}


def span_of(scores: Tensor, masked: Tensor) -> float:
    hidden = [x for x, hides in zip(scores.tolist(), masked.tolist(), strict=True) if hides]
    seen = [x for x, hides in zip(scores.tolist(), masked.tolist(), strict=True) if not hides and x > -math.inf]
    return max(0.0, max(hidden) - max(seen) + MASKED_REACH) if hidden and seen else 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", MASKS)
def test_what_a_mask_must_add_is_that_of_each_row(shape: str, dtype: torch.dtype) -> None:
    scores = (20 * torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(3))).to(dtype)
    scores[0, 1, 2] = -math.inf
    scores[1, 2, 3, :3] = 60000.0
    found = masked_span(scores, MASKS[shape])
    rows = zip(scores.reshape(-1, 5), MASKS[shape].expand(scores.shape).reshape(-1, 5), strict=True)
    assert found.dtype == torch.float32 and found.shape == (2, 3, 4)
    assert found.flatten().tolist() == pytest.approx([span_of(*row) for row in rows], rel=1e-6)


@pytest.mark.parametrize("shape", MASKS)
def test_a_ceiling_leaves_out_what_is_masked_and_nothing_else(shape: str) -> None:
    masked = MASKS[shape]
    before, scores = masked.clone(), torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(4))
    most = ceiling(masked, 0.0, torch.float16)
    assert most.dtype == torch.float16 and torch.equal(masked, before)
    assert torch.equal(scores.clamp(-most, most), scores.masked_fill(masked, 0.0))
    assert most.numel() <= masked.numel() and 0 not in most.stride()  # of its own memory, once


def test_no_gradient_goes_through_what_a_mask_leaves_out() -> None:
    scores = torch.tensor([[3.0, 1.0, 7.0, 2.0], [3.0, 1.0, 7.0, 2.0]], requires_grad=True)
    masked_span(scores, torch.tensor([[False, False, True, True], [True] * 4])).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[-1.0, 0.0, 1.0, 0.0], [0.0] * 4]
