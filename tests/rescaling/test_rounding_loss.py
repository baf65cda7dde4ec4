"""The tables of what a power of two costs, each entry worked out by hand."""

from __future__ import annotations

import pytest
import torch

from bf16_to_fp16.rescaling import rounding_loss as losses
from bf16_to_fp16.rescaling.rounding_loss import GRID, STEP_NOISE, LossTable, loss_table, signal_noise


def at(table: LossTable, exponent: int) -> list[float]:
    """Return the number of inexact elements and the error of the first channel at an exponent."""
    return [float(table.lossy[0, exponent + GRID]), float(table.error[0, exponent + GRID])]


def test_a_weight_that_vanishes_costs_all_its_energy() -> None:
    """2⁻²⁰ is on the grid down to −4, half a step at −5 and nothing below; 1 lasts 20 exponents longer."""
    table = loss_table(torch.tensor([[2.0**-20, 1.0, 0.0], [0.0, 0.0, 0.0]]), 0)
    assert at(table, GRID) == at(table, 0) == at(table, -4) == [0, 0]
    assert at(table, -5) == pytest.approx([1, STEP_NOISE * 4.0**5], rel=1e-6, abs=0)
    assert at(table, -6) == at(table, -24) == [1, 2.0**-40]
    assert at(table, -25) == pytest.approx([2, 2.0**-40 + STEP_NOISE * 4.0**25], rel=1e-6, abs=0)
    assert at(table, -26) == at(table, -GRID) == [2, 1]
    assert table.energy.tolist() == [1 + 2.0**-40, 0] and table.amax.tolist() == [1, 0] and table.count == 6
    assert not table.lossy[1].any() and not table.error[1].any()


def test_a_rounded_weight_costs_a_twelfth_of_a_step_squared() -> None:
    table = loss_table(torch.tensor([[1 + 2.0**-7, 1.0]]), 0)
    assert at(table, -17) == [0, 0]
    assert at(table, -18) == pytest.approx([1, STEP_NOISE * 4.0**18], rel=1e-6, abs=0)


def test_bits_that_fp16_has_at_no_exponent_are_no_loss() -> None:
    """Of 1 + 2⁻²³ fp16 keeps 11 bits: the last of them, 2⁻¹⁰, is on the grid down to −14."""
    table = loss_table(torch.tensor([[1 + 2.0**-23]]), 0)
    assert [at(table, e)[0] for e in (GRID, 0, -14, -15)] == [0, 0, 0, 1]


def test_what_the_other_axis_does_is_in_energy_and_largest_weight() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 0.5]])
    other = torch.tensor([3, -2], dtype=torch.int32)
    rows, columns = loss_table(weight, 0, other), loss_table(weight, 1, other)
    assert rows.energy.tolist() == [8.0**2 + 0.5**2, 24.0**2 + 0.125**2] and rows.amax.tolist() == [8, 24]
    assert columns.energy.tolist() == [8.0**2 + 0.75**2, 16.0**2 + 0.125**2] and columns.amax.tolist() == [8, 16]


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
    total = table.total()
    assert at(total, -7) == [2, 2.0**-40 + 2.0**-42]
    assert total.energy.tolist() == [17 + 2.0**-40 + 2.0**-42] and total.amax.tolist() == [4] and total.count == 4


def test_a_signals_noise_is_the_last_step_against_its_mean_square() -> None:
    noise = signal_noise(torch.tensor([1.0, 4.0, 0.0]), torch.tensor([0, -3]))
    assert noise.tolist() == [[STEP_NOISE, STEP_NOISE * 64], [STEP_NOISE / 4, STEP_NOISE * 16], [0, 0]]
