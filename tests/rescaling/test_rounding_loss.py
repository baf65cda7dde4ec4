"""The tables of what a power of two costs, each entry worked out by hand."""

from functools import partial

import pytest
import torch
from torch import Tensor

from bf16_to_fp16.bounds.factored import chunks
from bf16_to_fp16.rescaling import apply
from bf16_to_fp16.rescaling import rounding_loss as losses
from bf16_to_fp16.rescaling.apply import through_fp16
from bf16_to_fp16.rescaling.rounding_loss import GRID, STEP_NOISE, LossTable, channel_energy, loss_table, signal_noise


def at(table: LossTable, exponent: int) -> list[float]:
    return [float(table.lossy[0, exponent + GRID]), float(table.error[0, exponent + GRID])]


def test_a_table_does_not_depend_on_how_the_weight_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5) * 2.0 ** torch.randint(-25, 5, (7, 5))
    whole = loss_table(weight, 0)
    monkeypatch.setattr(losses, "_CHUNK", 10)  # a weight of many real parts has millions of elements
    cut = loss_table(weight, 0)
    for field in ("lossy", "error", "energy", "amax"):
        assert torch.equal(getattr(whole, field), getattr(cut, field))


def test_the_total_of_a_table_is_one_channel() -> None:
    table = loss_table(torch.tensor([[2.0**-20, 1.0], [2.0**-21, 4.0]]), 0)
    total = table.total
    assert at(total, -7) == [2, 2.0**-40 + 2.0**-42]
    assert total.energy.tolist() == [17 + 2.0**-40 + 2.0**-42] and total.amax.tolist() == [4] and total.count == 4


def test_a_signals_noise_is_the_last_step_against_its_mean_square() -> None:
    noise = signal_noise(torch.tensor([1.0, 4.0, 0.0]), torch.tensor([0, -3]))
    assert noise.tolist() == [[STEP_NOISE, STEP_NOISE * 64], [STEP_NOISE / 4, STEP_NOISE * 16], [0, 0]]


def naive(weight: torch.Tensor, axis: int, other: torch.Tensor, exponent: int) -> tuple[torch.Tensor, ...]:
    """Return the losses at an exponent and the energy and largest weight, element by element as they are defined."""
    x = weight.double() * 2.0 ** (other if axis == 0 else other[:, None]).double()
    mantissa, above = torch.frexp(weight.float())
    bits = torch.where(mantissa == 0, 0, (mantissa.double().abs() * 2**24).long())
    lowest = torch.log2((bits & -bits).clamp(min=1).double()).long() - 24 + above
    lowest = torch.maximum(lowest, above - 11) + (other if axis == 0 else other[:, None])
    lossy = (x != 0) & (lowest < -24 - exponent)
    vanished = lossy & (x.abs() * 2.0**exponent < 2.0**-25)
    error = torch.where(vanished, x.square(), torch.where(lossy, STEP_NOISE * 0.25**exponent, 0.0))
    return lossy.sum(1 - axis), error.sum(1 - axis), x.square().sum(1 - axis), x.abs().amax(1 - axis)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_tables_are_their_definition_on_subnormals_zeros_and_huge_weights(dtype: torch.dtype, axis: int) -> None:
    torch.manual_seed(0)
    reach = 14 if dtype == torch.float16 else 110
    weight = (torch.randn(6, 40) * 2.0 ** torch.randint(-reach, reach, (6, 40))).to(dtype)
    weight[:, :20] = torch.randn(6, 20).to(dtype)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    weight[2, :40] = 2.0 ** torch.arange(7.0, -33, -1)  # the ends of binades
    weight[0], weight[:, 1] = 0, 0
    weight[1, :4] = torch.tensor([smallest, 0, -3 * smallest, torch.finfo(dtype).max], dtype=torch.float64).to(dtype)
    other = torch.randint(-20, 20, (weight.shape[1 - axis],), dtype=torch.int32)
    for shift in (torch.zeros_like(other), other):
        table = loss_table(weight, axis, shift)
        assert torch.equal(table.amax, naive(weight, axis, shift, 0)[3])
        for exponent in (-GRID, -40, -26, -13, 0, 7, 40, GRID):
            lossy, error, energy, _ = naive(weight, axis, shift, exponent)
            assert torch.equal(table.lossy[:, exponent + GRID].long(), lossy)
            torch.testing.assert_close(table.error[:, exponent + GRID], error.float(), rtol=2e-7, atol=1e-44)
            torch.testing.assert_close(table.energy, energy, rtol=1e-14, atol=0)
        torch.testing.assert_close(channel_energy(weight, axis, shift), energy, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_weight_that_is_looked_at_stays_as_it_is(dtype: torch.dtype) -> None:
    """Conversions to the dtype that it has already copy nothing."""
    weight = torch.randn(6, 40).to(dtype)
    before, shift = weight.clone(), torch.arange(6, dtype=torch.int32)
    loss_table(weight, 1, shift)
    channel_energy(weight, 1, shift)
    assert torch.equal(weight, before)


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
