"""What an exponent costs, on a few weights by hand, and the tables of what a power of two costs."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import tiny
from torch import Tensor

from bf16_to_fp16.bounds.factored import chunks
from bf16_to_fp16.families.layout import Layout, ResolvedSignal, ResolvedTensor, TensorReader
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.families.signals import (
    RESIDUAL,
    Axis,
    Kind,
    ObservationPoint,
    carried_by,
    divided_by,
    input_of,
    multiplied_by,
    output_of,
)
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.ranges import ChannelRange, ModuleRange, NormRange
from bf16_to_fp16.rescaling import apply
from bf16_to_fp16.rescaling import rounding_loss as losses
from bf16_to_fp16.rescaling.apply import through_fp16
from bf16_to_fp16.rescaling.channels import ROUNDING
from bf16_to_fp16.rescaling.costs import EXCESS, RESTRAINT, RESTRAINT_OF_CHANNELS, UNWRITABLE
from bf16_to_fp16.rescaling.planner import PlanSearch, make_plan
from bf16_to_fp16.rescaling.rounding_loss import GRID, STEP_NOISE, LossTable, channel_energy, loss_table, signal_noise
from bf16_to_fp16.rescaling.weight_losses import CHANNEL_RANGE

SIGNALS: dict[str, tuple[Kind, tuple[ObservationPoint, ...]]] = {
    RESIDUAL: (Kind.RESIDUAL, (output_of("embed"), input_of("norm"), output_of("o"))),
    "norm": (Kind.NORM, (output_of("norm"),)),
    "value": (Kind.VALUE, (output_of("v"), input_of("o"))),
    "query_key": (Kind.QUERY_KEY, (output_of("q"), output_of("k", -1))),
}
AXES: dict[str, tuple[Axis | None, ...]] = {
    "embed": (None, multiplied_by(RESIDUAL)),
    "norm": (multiplied_by("norm"),),
    "v": (multiplied_by("value"), divided_by("norm")),
    "o": (multiplied_by(RESIDUAL), divided_by("value")),
    "q": (multiplied_by("query_key"), divided_by("norm")),
    "k": (divided_by("query_key"), divided_by("norm")),
    "gate": (None, divided_by("norm")),
}
GAINS, ONES = [1.0, 1.0], [[1.0, 1.0], [1.0, 1.0]]
LIMIT = FP16_MAX / 2**1.25
Weights = dict[str, list[Any]]


def by_hand(
    weights: Weights,
    amax: dict[str, float] | None = None,
    squares: dict[str, list[float]] | None = None,
    norm_max: float = 1.0,
) -> tuple[Layout, TensorReader, dict[str, ModuleRange]]:
    """Return a layout, weights and ranges; amax, squares: by ``module:side``, else 1; norm_max: largest ‖h‖₂."""

    def reached(place: str) -> ChannelRange:
        largest = torch.full((2,), (amax or {}).get(place, 1.0))
        return ChannelRange(largest, torch.tensor((squares or {}).get(place, [1.0, 1.0])), rows=1)

    values = {name: torch.tensor(weight) for name, weight in weights.items()}
    signals = {name: ResolvedSignal(name, kind, 2, seen) for name, (kind, seen) in SIGNALS.items()}
    norm = NormRange(norm_max, torch.tensor([[1.0, 1.0]], dtype=torch.float64))
    ranges = {
        name: ModuleRange(reached(f"{name}:input"), reached(f"{name}:output"), norm if name == "norm" else None)
        for name in values
    }
    tensors = {name: ResolvedTensor(name, name, tuple(value.shape), AXES[name]) for name, value in values.items()}
    layout = replace(resolve(ModelTensors(tiny.build("gated"))), tensors=tensors, signals=signals)
    return layout, values.__getitem__, ranges


def price(search: PlanSearch) -> float:
    """Return what one inexact weight costs: a thousandth of them all as much as one rounding in the one sublayer."""
    return 1000 * ROUNDING / sum(math.prod(t.shape) for t in search.layout.tensors.values())


def test_a_channel_weighs_what_its_readers_make_of_it() -> None:
    """Mean square times the energy of what reads it; for queries and keys the product of mean squares."""
    weights: Weights = {"norm": GAINS, "v": [[3.0, 1.0], [0.0, 0.0]], "o": [[1.0, 2.0], [1.0, 0.0]], "gate": [GAINS]}
    squares = {"o:input": [4.0, 1.0], "norm:output": [1.0, 9.0], "q:output": [1.0, 2.0], "k:output": [3.0, 4.0]}
    search = PlanSearch(*by_hand(weights, squares=squares))
    signals = search.layout.signals
    assert search.importance(signals["value"]).tolist() == pytest.approx([8 / 12, 4 / 12], rel=1e-12, abs=0)
    assert search.importance(signals["norm"]).tolist() == pytest.approx(
        [(0.5 + 0.1) / 2, (0.5 + 0.9) / 2], rel=1e-12, abs=0
    )
    assert search.importance(signals["query_key"]).tolist() == [0.5, 0.5]
    search = PlanSearch(*by_hand(weights | {"q": ONES, "k": ONES}, squares=squares))
    assert search.importance(signals["query_key"]).tolist() == pytest.approx([3 / 11, 8 / 11], rel=1e-12, abs=0)


def test_a_channel_costs_lost_energy_and_noise_by_its_share_and_each_inexact_weight() -> None:
    weights: Weights = {"norm": GAINS, "v": [[1.0, 2.0**-10], [0.5, 0.5]], "o": [[1.0, 2.0], [1.0, 0.0]]}
    squares = {"v:output": [4.0, 1.0], "o:input": [4.0, 1.0]}
    search = PlanSearch(*by_hand(weights, squares=squares))
    costs = next(search.channel_costs(search.layout.signals["value"], [-3]))
    # At −16 v's 2⁻¹⁰ vanishes, o is exact, and the signal, seen at both ends, stands 2¹⁶ times nearer to the last step.
    lost, noise = 2.0**-20 / (1 + 2.0**-20), 2 * STEP_NOISE * 4.0**16 / 4
    expected = 8 / 12 * (lost + noise) + price(search) + RESTRAINT * 16 / 2
    assert float(costs[0, CHANNEL_RANGE - 16]) == pytest.approx(expected, rel=1e-9, abs=0)
    # At 15 both ends of the signal reach 2¹⁵ and the weights fit; at −18 o's 2 becomes 2·2¹⁸⁻³ and the signal fits.
    assert float(costs[1, CHANNEL_RANGE + 15]) == pytest.approx(2 * EXCESS * math.log2(2**15 / LIMIT), rel=1e-9, abs=0)
    over = EXCESS * math.log2(2**16 / LIMIT) + UNWRITABLE * math.log2(2**16 / FP16_MAX)
    assert float(costs[1, CHANNEL_RANGE - 18]) == pytest.approx(over, rel=1e-9, abs=0)


def test_a_channel_moves_for_more_than_its_restraint_and_streams_are_decided_without() -> None:
    search = PlanSearch(*by_hand({"norm": GAINS, "v": ONES, "o": ONES}))
    signal = search.layout.signals["value"]
    costs = torch.ones(signal.size, 2 * CHANNEL_RANGE + 1, dtype=torch.float64)
    costs[:, CHANNEL_RANGE - 1] = 0
    costs[:, CHANNEL_RANGE] = torch.tensor([0.9, 1.1]) * RESTRAINT_OF_CHANNELS / signal.size
    solution = search.solution(signal, costs, torch.zeros_like(costs))
    assert (solution.index - CHANNEL_RANGE).tolist() == [0, -1] and solution.cost == 0


def test_the_residual_exponent_costs_the_streams_noise_and_what_the_weights_it_alone_scales_lose() -> None:
    weights: Weights = {"embed": [[1.0, 1.0], [1.0, 2.0**-16]], "norm": GAINS, "v": [[1.0, 2.0], [0.0, 0.0]], "o": ONES}
    search = PlanSearch(*by_hand(weights, squares={"norm:input": [2.0**-16, 1.0]}))
    # At −10 the embedding's 2⁻¹⁶ vanishes; channels weigh 1 : 4, as v reads them.
    lost = 2.0**-32 / (3 + 2.0**-32)
    noise = STEP_NOISE * 4.0**10 * (0.2 * 2.0**16 + 0.8)
    expected = noise + lost + price(search) + RESTRAINT * 10
    assert search.residual_cost(-10) == pytest.approx(expected, rel=1e-9, abs=0)


def test_a_stream_whose_norm_no_exponent_brings_under_256_is_named() -> None:
    """‖h‖₂ of 2³⁵ at the smallest exponent, −24, is 2¹¹: over 2⁸ with its margin by 4.25 bits."""
    model = by_hand({"embed": ONES, "norm": GAINS, "v": ONES, "o": ONES}, norm_max=2.0**35)
    planned = make_plan(*model, target="norm-safe")
    assert planned.plan.residual_exponent == -24
    assert {v.signal: v.excess_bits for v in planned.violations} == {"norm (input)": pytest.approx(4.25, abs=1e-2)}
    assert make_plan(*model).violations == ()


def test_once_a_signal_is_settled_the_tables_of_its_weights_other_axes_are_of_the_scaled_weights() -> None:
    weights: Weights = {"norm": GAINS, "v": [[1.0, 2.0**-20], [1.0, 1.0]], "o": [[1.0, 2.0], [3.0, 4.0]]}
    search = PlanSearch(*by_hand(weights, amax={"v:output": 2.0**20, "o:input": 2.0**20}))
    v, o = search.layout.tensors["v"], search.layout.tensors["o"]

    def table(tensor: ResolvedTensor, axis: int) -> LossTable:
        (carried,) = carried_by(tensor.axes[axis])
        return search.table(tensor, axis, carried)

    assert table(v, 1).amax.tolist() == [1.0, 1.0] and table(o, 0).amax.tolist() == [2.0, 4.0]
    search.settle(search.layout.signals["value"], 0)
    moved = search.chosen["value"]
    assert moved.tolist() == [-6, -6]
    for tensor, axis, shift in ((v, 1, moved), (o, 0, -moved)):
        known, fresh = table(tensor, axis), loss_table(search.weights(tensor.name), axis, shift)
        assert torch.equal(known.amax, fresh.amax) and torch.equal(known.lossy, fresh.lossy)


def test_what_a_moved_gain_makes_needless_moves_back() -> None:
    """Values alone could move up by 3, but the gain must for the gate's bits at 2⁻²⁷, and then serves both."""
    small = [[2.0**-20 * (1 + 2.0**-7)] * 2] * 2
    layout, weights, ranges = by_hand({"embed": ONES, "norm": GAINS, "v": small, "o": ONES, "gate": small})
    assert make_plan(layout, weights, ranges).plan.exponents == {"norm": -3}
    without = {name: tensor for name, tensor in layout.tensors.items() if name != "gate"}
    assert make_plan(replace(layout, tensors=without), weights, ranges).plan.exponents == {"value": 3}


def test_what_is_chosen_for_the_other_axis_of_a_reader_changes_what_a_channel_weighs() -> None:
    search = PlanSearch(*by_hand({"norm": GAINS, "v": [[1.0, 0.0], [0.0, 1.0]], "o": ONES}))
    norm, v = search.layout.signals["norm"], search.layout.tensors["v"]
    assert search.importance(norm).tolist() == [0.5, 0.5]
    search.chosen["value"] = torch.tensor([2, 0], dtype=torch.int32)
    search.forget(v, 1)
    assert search.importance(norm).tolist() == pytest.approx([16 / 17, 1 / 17], rel=1e-12, abs=0)


def test_gains_that_are_stored_less_one_cost_what_their_rounding_takes() -> None:
    gains = 1 + torch.tensor([0.1, 0.25]).bfloat16().double()  # as a reader gives them
    layout, weights, ranges = by_hand({"norm": gains.tolist(), "v": ONES, "o": ONES})
    norm = replace(layout.tensors["norm"], offset=1.0)
    search = PlanSearch(replace(layout, tensors={**layout.tensors, "norm": norm}), weights, ranges)
    exponents = torch.tensor([-3, 0])
    moved = gains * 2.0**exponents
    lost, whole = (((moved - 1).half().double() + 1 - moved) / 2.0**exponents).square().sum(), gains.square().sum()
    assert lost > 0 and search.rounded_gains("norm", exponents) == pytest.approx(float(lost / whole), rel=1e-6, abs=0)
    assert search.rounded_gains("norm", torch.tensor([0, 0])) == 0


def test_norms_drift_unless_the_fixed_eps_is_that_of_the_stream() -> None:
    layout, weights, ranges = by_hand({"norm": GAINS, "v": ONES, "o": ONES})
    for eps, drifting in ((None, (False, False)), (layout.eps, (False, True)), (4 * layout.eps, (True, False))):
        search = PlanSearch(replace(layout, held_eps=eps), weights, ranges)
        assert (search.drifts(0), search.drifts(1)) == drifting


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
    assert [float(each[0, GRID - 7]) for each in (total.lossy, total.error)] == [2, 2.0**-40 + 2.0**-42]
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
