"""What a plan keeps and what it minimises."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from torch import Tensor

from bf16_to_fp16 import convert
from bf16_to_fp16.conversion.planning import uncorrected
from bf16_to_fp16.families.layout import Layout, ResolvedSignal, ResolvedTensor, TensorReader
from bf16_to_fp16.families.resolve import resolve
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
from bf16_to_fp16.measuring.batch import PADDED, RANDOM, REPEATED, Batch
from bf16_to_fp16.measuring.meter import observe_ranges
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.ranges import ChannelRange, ModuleRange, NormRange
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.channels import RESIDUAL_RANGE, ROUNDING, whole_log2
from bf16_to_fp16.rescaling.costs import EXCESS, PROOF_WORTH, RESTRAINT, RESTRAINT_OF_CHANNELS, UNWRITABLE
from bf16_to_fp16.rescaling.norm_drift import CHANNEL_RANGE
from bf16_to_fp16.rescaling.outputs import on_request
from bf16_to_fp16.rescaling.planner import INDIFFERENCE, PROOF_FIRST, PlanSearch, make_plan
from bf16_to_fp16.rescaling.rounding_loss import GRID, STEP_NOISE, LossTable, loss_table
from bf16_to_fp16.rescaling.weights import ModelTensors, source_weights


def shown_to(model: Any) -> list[Batch]:
    """Return what a tiny model is observed on, one batch of each shape: the others' values are no others."""
    return [b for b in batches(model.config, None, None) if b.kind in (RANDOM, PADDED, REPEATED)]


def observed(kind: str, **changes: Any) -> tuple[Any, ModelTensors, Layout, dict[str, ModuleRange]]:
    model = tiny.build(kind, **changes)
    source = ModelTensors(model)
    return model, source, resolve(source), dict(observe_ranges(model, shown_to(model)))


@pytest.mark.parametrize("kind", exhaustive.beyond(tiny.FIRST, tiny.KINDS))
def test_every_signal_and_weight_is_under_its_limit_with_the_margin(kind: str) -> None:
    model, source, layout, ranges = observed(kind, **tiny.few_layers(kind))
    planned = make_plan(layout, source_weights(source, layout), ranges, margin_bits=1.25)
    assert planned.violations == ()
    assert planned.plan.residual_exponent < 0
    apply(model, layout, planned.plan)
    after = observe_ranges(model, shown_to(model))
    peak = max(float(r.output.amax.max()) for r in after.values())
    assert peak <= FP16_MAX / 2**1.25
    assert all(float(t.abs().max()) <= FP16_MAX for t in model.state_dict().values())


@pytest.mark.parametrize("kind", ["gated", "pegasus"])
def test_the_residual_is_shrunk_no_more_than_its_limit_asks(kind: str) -> None:
    _, source, layout, ranges = observed(kind)
    r = make_plan(layout, source_weights(source, layout), ranges).plan.residual_exponent
    seen = [s for s in layout.signals[RESIDUAL].seen if s.sign > 0]
    peak = max(float((getattr(ranges[s.module], s.side)).amax.max()) for s in seen)
    assert peak * 2.0**r <= FP16_MAX / 2**1.25 < peak * 2.0 ** (r + 1)


def test_a_model_that_fits_is_left_alone() -> None:
    _, source, layout, ranges = observed("gated", factor=1.0)
    scaled = {path: r for path, r in ranges.items() if float(r.output.amax.max()) < FP16_MAX / 4}
    assert scaled.keys() == ranges.keys()
    assert make_plan(layout, source_weights(source, layout), ranges).plan.residual_exponent == 0


def test_norm_safe_keeps_the_norm_of_the_stream_under_256() -> None:
    model, source, layout, ranges = observed("gated")
    planned = make_plan(layout, source_weights(source, layout), ranges, target="norm-safe")
    apply(model, layout, planned.plan)
    after = observe_ranges(model, shown_to(model))
    assert all(r.norm.norm_max <= 256 / 2**1.25 for r in after.values() if r.norm is not None)
    half = make_plan(layout, source_weights(source, layout), ranges)
    assert planned.plan.residual_exponent < half.plan.residual_exponent


def test_a_tenth_of_a_percent_of_inexact_weights_costs_a_rounding_at_every_norm() -> None:
    source = ModelTensors(tiny.build("gated"))
    layout = resolve(source)
    search = PlanSearch(layout, source_weights(source, layout), {})
    elements = sum(math.prod(tensor.shape) for tensor in layout.tensors.values())
    assert search.lossy_price * elements / 1000 == pytest.approx(ROUNDING * len(layout.norms)) and len(layout.norms) > 9


def test_the_loss_table_counts_what_fp16_loses() -> None:
    """Every exponent's count of inexact elements, and the energy of the errors within a factor, against casting to
    fp16."""
    torch.manual_seed(0)
    weight = (torch.randn(7, 400) * 2.0 ** torch.randint(-20, 4, (7, 400))).bfloat16()
    weight[0, :5] = torch.tensor([0.0, 2.0**-24, 2.0**-30, 1.0, -3.0])
    table = loss_table(weight, 0)
    torch.testing.assert_close(table.energy, weight.double().square().sum(1), rtol=2**-51, atol=0)
    for exponent in range(-GRID, 11):
        exact = weight.double() * 2.0**exponent
        if float(exact.abs().max()) > FP16_MAX:
            continue
        error = exact.half().double() - exact
        assert torch.equal(table.lossy[:, exponent + GRID].long(), (error != 0).sum(1))
        energy = error.square().sum() / 4.0**exponent
        # The table takes errors as uniform in a step; with one dropped bit they are all half a step, 3 times the
        # energy.
        assert float(energy) / 3 <= float(table.error[:, exponent + GRID].sum()) <= 2 * float(energy) + 1e-30


def test_shrinking_spares_small_weights_by_sharing_the_factor_between_o_and_v() -> None:
    """With o already near fp16's last bits, the shrinking that the stream asks for goes to v instead."""
    model = tiny.build("gated")
    attention = model.encoder.block[1].layer[0].SelfAttention
    with torch.no_grad():
        attention.o.weight.mul_(2.0**-19)
        attention.v.weight.mul_(2.0**10)
    source = ModelTensors(model)
    layout = resolve(source)
    ranges = observe_ranges(model, shown_to(model))
    plan = make_plan(layout, source_weights(source, layout), ranges).plan
    moved = plan.exponent("encoder.block.1.layer.0.SelfAttention.value")
    assert torch.as_tensor(moved, dtype=torch.float64).mean() < -1.5


def test_a_gain_moves_only_where_a_reader_would_lose() -> None:
    model = tiny.build("gated")
    norm = model.encoder.block[1].layer[1]
    with torch.no_grad():
        norm.layer_norm.weight.mul_(2.0**14)
        norm.DenseReluDense.wi_0.weight.mul_(2.0**-14)
        norm.DenseReluDense.wi_1.weight.mul_(2.0**-14)
    source = ModelTensors(model)
    layout = resolve(source)
    ranges = observe_ranges(model, shown_to(model))
    plan = make_plan(layout, source_weights(source, layout), ranges).plan
    moved = {name for name in plan.exponents if layout.signals[name].kind is Kind.NORM}
    assert "encoder.block.1.layer.1.layer_norm" in moved
    assert torch.as_tensor(plan.exponent("encoder.block.1.layer.1.layer_norm")).float().mean() < -4
    assert len(moved) <= 3


def test_rows_are_looked_at_with_the_exponents_that_their_columns_share() -> None:
    """Of the output projection, each of whose heads reads values that another one reads as well."""
    _, source, layout, ranges = observed("gemma3")
    search = PlanSearch(layout, source_weights(source, layout), ranges)
    tensor = layout.tensors["model.layers.0.self_attn.o_proj.weight"]
    carried = tensor.axes[1]
    assert carried is not None
    search.chosen[carried.signal] = torch.arange(20, dtype=torch.int32)
    shift = search.shift(tensor, 0)
    assert shift is not None
    # Two heads of values, each of 10 channels and read by two heads of queries.
    assert (-shift).tolist() == [*range(10), *range(10), *range(10, 20), *range(10, 20)]


def test_pegasus_drift_grows_fourfold_with_each_halving_and_weighs_in_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, source, layout, ranges = observed("pegasus")
    search = PlanSearch(layout, source_weights(source, layout), ranges)
    assert search.residual_cost(-12) > search.drift(-12) > 0
    corrected = search.drift(-5)
    monkeypatch.setattr(search, "gain_correction", lambda *_: 1.0)
    drifts = [math.sqrt(search.drift(r)) for r in (-3, -4, -5)]
    assert corrected < drifts[2] ** 2
    assert drifts[1] / drifts[0] == pytest.approx((4**4 - 1) / (4**3 - 1), rel=0.05)
    assert drifts[2] / drifts[1] == pytest.approx((4**5 - 1) / (4**4 - 1), rel=0.05)


def test_without_corrections_the_drift_is_what_it_would_be_if_none_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _, source, layout, ranges = observed("pegasus")
    found = make_plan(layout, source_weights(source, layout), ranges, held={"residual": -6})
    assert found.plan.gain_correction and found.plan.drift is not None
    monkeypatch.setattr(PlanSearch, "gain_correction", lambda *_: 1.0)
    wanted = make_plan(layout, source_weights(source, layout), ranges, held={"residual": -6}).plan.drift
    plan = uncorrected(found).plan
    assert wanted is not None and plan.drift is not None and not plan.gain_correction
    assert plan.drift.relative_error == pytest.approx(wanted.relative_error)
    assert plan.drift.relative_error > 1.01 * found.plan.drift.relative_error


def test_a_corrected_gain_is_one_that_fp16_holds() -> None:
    """So far down the stream goes where nothing is run that eps leaves little of any norm's output."""
    _, source, layout, ranges = observed("pegasus", factor=1.0)
    search = PlanSearch(layout, source_weights(source, layout), ranges)
    factors = search.gain_corrections(-24)
    largest = {name: float(source.read(name).abs().max()) * factor for name, factor in factors.items()}
    # The tied head's norm carries 2^24 already, which alone is more than fp16 holds.
    assert len(factors) == len(layout.norms) - 1 and max(largest.values()) == pytest.approx(FP16_MAX)
    gains = source.read("model.decoder.layer_norm.weight").abs().max()
    assert search.largest_gain("model.decoder.layer_norm", -24) == pytest.approx(float(gains) * 2.0**24)
    # Each is the best or the largest: without the limit some would be far beyond it.
    best = [(s * k).sum() / (s * k.square()).sum() for k, s in (search.kept(n, -24) for n in layout.norms)]
    assert max(map(float, best)) > 1.5 * max(factors.values())


def test_stacks_that_nothing_ties_have_an_exponent_each() -> None:
    """A large stream is scaled down, and a small one, which would drift, is not; each as if it were alone."""
    model = tiny.build("mbart", factor=1.0)
    with torch.no_grad():
        for name, weight in model.model.decoder.named_parameters():
            weight.mul_(0.02 if name.endswith(("fc2.weight", "out_proj.weight")) else 1)
        model.model.encoder.layers[1].fc2.weight[:2] *= 1e5
    source = ModelTensors(model)
    layout = resolve(source)
    ranges = observe_ranges(model, shown_to(model))
    found = make_plan(layout, source_weights(source, layout), ranges)
    plan, (encoder, decoder) = found.plan, layout.streams
    assert not found.violations and plan.stream_exponent(encoder) < -6 and plan.stream_exponent(decoder) == 0
    assert plan.drift is not None and plan.gain_correction.keys() <= {f"{n}.weight" for n in layout.norms}
    assert not any("decoder" in name for name in plan.gain_correction)
    # With one exponent for both, the decoder would drift.
    search = PlanSearch(layout, source_weights(source, layout), ranges)
    search.stream = decoder
    for names in ([signal.name for signal in search.of_stream()], search.norms()):
        assert names and all(name.startswith("model.decoder.") for name in names)
    assert search.total_cost(plan.residual_exponent).cost > 100 * search.total_cost(0).cost
    held = make_plan(layout, source_weights(source, layout), ranges, held={decoder: -5}).plan
    assert held.residual_exponents == [plan.stream_exponent(encoder), -5] and held.drift is not None
    assert held.drift.relative_error > plan.drift.relative_error


def test_a_config_with_an_eps_has_no_drift() -> None:
    _, source, layout, ranges = observed("gated")
    plan = make_plan(layout, source_weights(source, layout), ranges).plan
    assert plan.drift is None and plan.gain_correction == {}
    assert plan.eps == 1e-6 * 4.0**plan.residual_exponent


def test_the_tied_heads_norm_bounds_the_shrinking_from_the_other_side() -> None:
    """Where the final norm times 1/s would overflow, the limits cannot all hold with the head tied, and can with it
    apart."""
    model = tiny.build("t5", factor=30000.0)
    with torch.no_grad():
        model.decoder.final_layer_norm.weight.mul_(2.0**19)
    source = ModelTensors(model)
    ranges = observe_ranges(model, shown_to(model))
    tied, apart = resolve(source), resolve(source, untie=True)
    assert make_plan(tied, source_weights(source, tied), ranges).violations != ()
    planned = make_plan(apart, source_weights(source, apart), ranges)
    assert [v for v in planned.violations if "lm_head" not in v.signal] == []
    assert planned.plan.untied_head


def with_large_last_gains(kind: str) -> Any:
    """Return a model with a tied head whose last gains are 5,952 but for one, of the channel that outweighs all others
    in the stream, so that no signal is large; the stream asks for 2^-9."""
    model = tiny.build(kind)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.shared.weight
    with torch.no_grad():
        model.shared.weight[:, 0] = 30000
        model.shared.weight[:, 1:] /= 100
        for name, weight in model.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):
                weight[0] *= 20
                weight[1:] /= 100
        model.decoder.final_layer_norm.weight.fill_(5952)
        model.decoder.final_layer_norm.weight[0] = 2.0**-10
    return model


@pytest.mark.parametrize("kind", ["t5", "longt5-tied", "umt5"])
def test_no_plan_takes_a_weight_past_65504(kind: str) -> None:
    """A tied head's gains bear 2^3 at most: the head goes apart for 2^-9, or where it cannot the stream stays above."""
    model = with_large_last_gains(kind)
    source = ModelTensors(model)
    ranges = observe_ranges(model, shown_to(model))
    layout = resolve(source)
    tied = make_plan(layout, source_weights(source, layout), ranges)
    assert tied.plan.residual_exponent >= -3 and tied.violations
    if layout.family.untie:
        apart = resolve(source, untie=True)
        planned = make_plan(apart, source_weights(source, apart), ranges)
        assert planned.plan.residual_exponent < -3 and not planned.violations
    apply(model, layout, tied.plan)
    assert all(float(t.abs().max()) <= FP16_MAX for t in model.state_dict().values())


def test_the_least_exponent_that_can_be_written_is_tried() -> None:
    model = with_large_last_gains("umt5")
    source = ModelTensors(model)
    layout = resolve(source)
    ranges = observe_ranges(model, shown_to(model))
    search = PlanSearch(layout, source_weights(source, layout), ranges)
    assert search.unwritable_bits(-4) == pytest.approx(math.log2(5952 * 16 / FP16_MAX))
    assert search.unwritable_bits(-3) == 0 and -3 in search.candidates()
    assert min(search.candidates()) < -4  # what the stream asks for
    assert search.residual_cost(-4) > search.residual_cost(-3) + UNWRITABLE / 4


def test_queries_and_keys_that_both_carry_the_stream_bound_its_exponent(tmp_path: Path) -> None:
    """Their own exponents move one up and the other down, so that no channel makes up for both."""
    model = tiny.small("longt5", seed=2, factor=1.0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and "final" not in name:
                weight *= 5952 / weight.abs().max()
            if name.endswith((".o.weight", ".wo.weight")):
                weight *= 30000 / weight.abs().max()
    result = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out", target="half", run_model=False)
    assert result.plan.residual_exponent > -24 and result.report["weights"]["nonfinite"] == 0
    assert result.report["weights"]["amax"] <= FP16_MAX and not result.safe  # and no error


def test_a_correction_leaves_room_for_what_a_gain_carries() -> None:
    _, source, layout, ranges = observed("pegasus", factor=1.0)
    weights = source_weights(source, layout)
    search = PlanSearch(layout, weights, ranges)
    norm = next(s for s in layout.signals.values() if s.kind is Kind.NORM and s.name in layout.norms)
    least = float(weights(f"{norm.name}.weight").abs().max())
    search.chosen[norm.name] = torch.full((norm.size,), math.floor(math.log2(FP16_MAX / least)), dtype=torch.int32)
    assert search.gain_correction(norm.name, -12) == pytest.approx(FP16_MAX / search.largest_gain(norm.name, -12))
    assert FP16_MAX / 2 < search.largest_gain(norm.name, -12) <= FP16_MAX


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
ONES = [[1.0, 1.0], [1.0, 1.0]]
LIMIT = FP16_MAX / 2**1.25


def by_hand(
    weights: Mapping[str, list[Any]],
    amax: dict[str, float] | None = None,
    squares: dict[str, list[float]] | None = None,
    norm_max: float = 1.0,
) -> tuple[Layout, TensorReader, dict[str, ModuleRange]]:
    """Return the layout of the named weights, their values, and ranges.

    amax, squares: largest value and mean squares by ``module:side``, 1 where not given; norm_max: largest ‖h‖₂.
    """

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
    """Mean square times the energy of the weights that read it, all readers alike; for queries and keys the product of
    the mean squares; where nothing was seen, all channels alike."""
    weights: dict[str, list[Any]] = {
        "norm": [1.0, 1.0],
        "v": [[3.0, 1.0], [0.0, 0.0]],
        "o": [[1.0, 2.0], [1.0, 0.0]],
        "gate": [[1.0, 1.0]],
    }
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
    weights: dict[str, list[Any]] = {
        "norm": [1.0, 1.0],
        "v": [[1.0, 2.0**-10], [0.5, 0.5]],
        "o": [[1.0, 2.0], [1.0, 0.0]],
    }
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
    search = PlanSearch(*by_hand({"norm": [1.0, 1.0], "v": ONES, "o": ONES}))
    signal = search.layout.signals["value"]
    costs = torch.ones(signal.size, 2 * CHANNEL_RANGE + 1, dtype=torch.float64)
    costs[:, CHANNEL_RANGE - 1] = 0
    costs[:, CHANNEL_RANGE] = torch.tensor([0.9, 1.1]) * RESTRAINT_OF_CHANNELS / signal.size
    solution = search.solution(signal, costs, torch.zeros_like(costs))
    assert (solution.index - CHANNEL_RANGE).tolist() == [0, -1] and solution.cost == 0


def test_the_residual_exponent_costs_the_streams_noise_and_what_the_weights_it_alone_scales_lose() -> None:
    weights: dict[str, list[Any]] = {
        "embed": [[1.0, 1.0], [1.0, 2.0**-16]],
        "norm": [1.0, 1.0],
        "v": [[1.0, 2.0], [0.0, 0.0]],
        "o": ONES,
    }
    search = PlanSearch(*by_hand(weights, squares={"norm:input": [2.0**-16, 1.0]}))
    # At −10 the embedding's 2⁻¹⁶ vanishes; channels weigh 1 : 4, as v reads them.
    lost = 2.0**-32 / (3 + 2.0**-32)
    noise = STEP_NOISE * 4.0**10 * (0.2 * 2.0**16 + 0.8)
    expected = noise + lost + price(search) + RESTRAINT * 10
    assert search.residual_cost(-10) == pytest.approx(expected, rel=1e-9, abs=0)


def test_a_stream_whose_norm_no_exponent_brings_under_256_is_named() -> None:
    """‖h‖₂ of 2³⁵ at the smallest exponent, −24, is 2¹¹: over 2⁸, less what fp16 adds in
    summing two squares, with its margin by 4.25 bits."""
    model = by_hand({"embed": ONES, "norm": [1.0, 1.0], "v": ONES, "o": ONES}, norm_max=2.0**35)
    planned = make_plan(*model, target="norm-safe")
    assert planned.plan.residual_exponent == -24
    assert {v.signal: v.excess_bits for v in planned.violations} == {"norm (input)": pytest.approx(4.25, abs=1e-2)}
    assert make_plan(*model).violations == ()


def test_once_a_signal_is_settled_the_tables_of_its_weights_other_axes_are_of_the_scaled_weights() -> None:
    weights: dict[str, list[Any]] = {
        "norm": [1.0, 1.0],
        "v": [[1.0, 2.0**-20], [1.0, 1.0]],
        "o": [[1.0, 2.0], [3.0, 4.0]],
    }
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
    """Values and gate both have bits at 2⁻²⁷; values alone could move up by 3, but the gain must for the gate, and then
    serves both."""
    small = [[2.0**-20 * (1 + 2.0**-7)] * 2] * 2
    layout, weights, ranges = by_hand({"embed": ONES, "norm": [1.0, 1.0], "v": small, "o": ONES, "gate": small})
    assert make_plan(layout, weights, ranges).plan.exponents == {"norm": -3}
    without = {name: tensor for name, tensor in layout.tensors.items() if name != "gate"}
    assert make_plan(replace(layout, tensors=without), weights, ranges).plan.exponents == {"value": 3}


MOVES = (Kind.RESIDUAL, Kind.VALUE, Kind.NEURON)


def reachable(factor: float, ranges: dict[str, ModuleRange]) -> dict[str, ModuleRange]:
    """Return ranges ``factor`` times as large, as bounds would be."""

    def times(channel: ChannelRange) -> ChannelRange:
        return ChannelRange(channel.amax * factor, channel.mean_square, channel.rows)

    return {
        path: replace(
            r,
            input=times(r.input),
            output=times(r.output),
            norm=r.norm and replace(r.norm, norm_max=r.norm.norm_max * factor),
        )
        for path, r in ranges.items()
    }


CASES = [(kind, factor) for factor in (1.0, 6.0) for kind in ("gated", "t5", "pegasus")]


@pytest.mark.parametrize(("kind", "factor"), exhaustive.beyond([("gated", 1.0), ("pegasus", 6.0)], CASES))
def test_the_plan_is_the_best_of_all_exponents_found_by_exhaustive_search(kind: str, factor: float) -> None:
    """Given r, each channel's exponent is the best of all 49, bounds and their price included; and so is r."""
    _, source, layout, ranges = observed(kind)
    bounds = reachable(factor, dict(ranges))
    search = PlanSearch(layout, source_weights(source, layout), ranges, bounds=bounds)
    movable = {name: search.proof_costs(s) for name, s in layout.signals.items() if s.kind in (Kind.VALUE, Kind.NEURON)}

    def least(costs: Tensor) -> float:
        return sum(min(channel) for channel in costs.tolist())

    def total(r: int) -> float:
        cost = search.residual_cost(r)
        if search.residual_excess(r) > 0:
            cost += PROOF_WORTH * len(layout.signals[RESIDUAL].seen)
        for signal, proof in movable.items():
            free = next(search.channel_costs(layout.signals[signal], [r]))
            cost += min(least(free + proof), least(free) + PROOF_WORTH * len(layout.signals[signal].seen))
        return cost

    every = {r: total(r) for r in range(-24, 25)}
    planned = make_plan(layout, source_weights(source, layout), ranges, bounds=bounds)
    assert planned.cost == pytest.approx(every[planned.plan.residual_exponent], rel=1e-9)
    assert planned.cost <= min(every.values()) + INDIFFERENCE * (1 + 1e-9)
    certain = [f.signal for f in planned.fallbacks]
    for name, r in bounds.items():
        for side, channel in (("input", r.input), ("output", r.output)):
            for signal in layout.signals.values():
                for seen in signal.seen:
                    if (seen.module, seen.side) == (name, side) and signal.name not in certain and signal.kind in MOVES:
                        e = torch.as_tensor(planned.plan.exponent(signal.name), dtype=torch.float64)
                        assert bool((channel.amax.double() * 2.0 ** (seen.sign * e) <= 65504).all())


def test_a_bound_that_no_exponent_holds_or_that_is_too_dear_is_given_up_by_name() -> None:
    _, source, layout, ranges = observed("gated")
    weights = source_weights(source, layout)
    free = make_plan(layout, weights, ranges)
    assert free.fallbacks == ()
    # What flows through a neuron cannot be brought from 2⁶⁰ under 65504 and leave the weights in fp16.
    huge = make_plan(layout, weights, ranges, bounds=reachable(2.0**60, dict(ranges)))
    given_up = {f.signal: f for f in huge.fallbacks}
    assert RESIDUAL in given_up and any(name.endswith(".neuron") for name in given_up)
    assert all(f.cost_certified > f.cost_observed for f in huge.fallbacks)
    assert huge.plan.exponents == free.plan.exponents
    assert huge.plan.residual_exponent == free.plan.residual_exponent
    assert not huge.violations


def test_where_a_proof_is_asked_for_no_bound_is_too_dear_and_an_impossible_one_is_still_given_up() -> None:
    _, source, layout, ranges = observed("gated")
    weights = source_weights(source, layout)
    bounds = reachable(2.0**14, dict(ranges))
    dear = make_plan(layout, weights, ranges, bounds=bounds, proof_worth=1e-12)
    assert dear.fallbacks and not any(f.impossible for f in dear.fallbacks)
    proven = make_plan(layout, weights, ranges, bounds=bounds, proof_worth=PROOF_FIRST)
    assert proven.fallbacks == () and proven.plan != dear.plan
    huge = make_plan(layout, weights, ranges, bounds=reachable(2.0**60, dict(ranges)), proof_worth=PROOF_FIRST)
    assert any(f.impossible for f in huge.fallbacks) and not huge.violations


def test_the_exponent_of_no_number_is_the_end_on_its_side() -> None:
    assert [whole_log2(x) for x in (1.0, 1.99, 0.75, 3e-5)] == [0, 0, -1, -16]
    assert whole_log2(math.inf) == RESIDUAL_RANGE and whole_log2(0.0) == whole_log2(math.nan) == -RESIDUAL_RANGE


def test_what_is_chosen_for_the_other_axis_of_a_reader_changes_what_a_channel_weighs() -> None:
    search = PlanSearch(*by_hand({"norm": [1.0, 1.0], "v": [[1.0, 0.0], [0.0, 1.0]], "o": ONES}))
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
    layout, weights, ranges = by_hand({"norm": [1.0, 1.0], "v": ONES, "o": ONES})
    for eps, drifting in ((None, (False, False)), (layout.eps, (False, True)), (4 * layout.eps, (True, False))):
        search = PlanSearch(replace(layout, held_eps=eps), weights, ranges)
        assert (search.drifts(0), search.drifts(1)) == drifting


@pytest.mark.parametrize(
    ("name", "others", "asked"),
    [
        ("encoder_hidden_states", (), True),
        ("cross_attentions", (), True),
        ("image_hidden_states", (), False),
        ("last_hidden_state", (), False),
        ("last_hidden_state", ("logits",), True),
        ("logits", ("logits",), False),
    ],
)
def test_what_a_class_gives_on_request_alone(name: str, others: tuple[str, ...], asked: bool) -> None:
    assert on_request(name, (name, *others)) is asked
