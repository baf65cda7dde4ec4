"""The bounds of an edit's error that docs/edits.md proves: no input passes them, and the figures there are theirs."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "gelu": (gelu, 0.1700),
    "gelu_new": (partial(gelu, approximate="tanh"), 0.1701),
    "silu": (silu, 0.2785),
}
EXPONENTS = (1, 2, 5, 10)


def scores(seed: int, size: float) -> Tensor:
    return size * torch.randn(256, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaps(rows: Tensor) -> Tensor:
    """Return how far below the largest of its row each score is."""
    return rows.amax(1, keepdim=True) - rows


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_a_relu_up_to_the_figure_that_is_given(name: str) -> None:
    act, most = ACTIVATIONS[name]
    x = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    below = x.clamp(min=0) - act(x)
    assert float(below.amin()) >= -1e-12 and most - 1e-4 <= float(below.amax()) <= most


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("k", EXPONENTS)
def test_a_gate_that_is_edited_is_off_by_no_more_than_its_bound(name: str, k: int) -> None:
    act, most = ACTIVATIONS[name]
    x = torch.linspace(-30, 30, 600_001, dtype=torch.float64) * 2.0**k
    off = (2.0**k * act(x * 2.0**-k) - act(x)).abs()
    assert 0.9 * 2.0**k * most - most <= float(off.amax()) <= 2.0**k * most


@pytest.mark.parametrize("k", EXPONENTS)
@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e5])
def test_softmax_rows_that_are_edited_keep_their_leader_and_their_bounds(k: int, size: float) -> None:
    rows = scores(k, size)
    before, after = rows.softmax(1), (rows * 2.0**-k).softmax(1)
    assert torch.equal(rows.argmax(1), (rows * 2.0**-k).argmax(1))
    others = torch.exp(-gaps(rows) * 2.0**-k).sum(1) - 1
    moved = (after - before).clamp(min=0).sum(1)
    assert bool((moved <= others + 1e-12).all())
    divergence = (before * (rows.log_softmax(1) - (rows * 2.0**-k).log_softmax(1))).sum(1)
    assert bool((divergence <= torch.log1p(others) + 1e-12).all())


@pytest.mark.parametrize("k", EXPONENTS)
def test_a_tanh_that_is_edited_is_off_by_no_more_than_its_bound(k: int) -> None:
    x = torch.linspace(-200, 200, 400_001, dtype=torch.float64)
    off = (torch.tanh(x) - torch.tanh(x * 2.0**-k)).abs()
    assert bool((off <= 2 * torch.exp(-2 * x.abs() * 2.0**-k) + 1e-15).all())


def test_a_gap_of_17_doubled_k_times_leaves_less_than_fp16_holds_of_a_weight() -> None:
    assert math.exp(-17) < 2.0**-24 < math.exp(-16)
