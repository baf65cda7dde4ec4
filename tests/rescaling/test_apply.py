"""What a weight is after fp16, as a drift is predicted with it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from bf16_to_fp16.bounds.factored import chunks
from bf16_to_fp16.rescaling import apply
from bf16_to_fp16.rescaling.apply import through_fp16


def at_once(weight: Tensor, exponents: Tensor, offset: float) -> Tensor:
    """The formula on the whole weight: (w + offset)·2ᵉ − offset in fp16, and back."""
    factor = torch.ldexp(torch.ones((), dtype=torch.float64), exponents.double())
    if not offset:
        return ((weight.double() * factor).half().double() / factor).float()
    moved = bool((exponents != 0).any())
    scaled = ((weight.double() + offset) * factor - offset if moved else weight.double()).half().double()
    return ((scaled + offset) / factor - offset if moved else scaled).float()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(11, 5), (13,), (7, 3, 2)])
@pytest.mark.parametrize("by", ["one", "rows", "columns"])
def test_a_weight_comes_back_from_fp16_block_by_block_as_it_does_at_once(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], by: str, offset: float
) -> None:
    monkeypatch.setattr(apply, "chunks", partial(chunks, elements=12))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    size = {"one": (1,) * len(shape), "rows": (shape[0], *(1,) * (len(shape) - 1)), "columns": (1, *shape[1:])}[by]
    exponents = torch.randint(-9, 9, size, generator=generator, dtype=torch.int32)
    found = through_fp16(weight, exponents, offset)
    assert found.dtype == torch.float32 and torch.equal(found, at_once(weight, exponents, offset))
    # fp16 cannot hold the most of it.
    assert not torch.equal(found, weight)


def test_rows_of_a_table_come_back_as_the_table_does() -> None:
    """A walk reads of an embedding only the rows of its ids."""
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    exponents = torch.tensor([[3, -2, 0, 7]], dtype=torch.int32)
    assert torch.equal(through_fp16(table[2:5], exponents), through_fp16(table, exponents)[2:5])
