"""What a plan keeps and what it minimises."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exhaustive, tiny
from torch import Tensor

from bf16_to_fp16 import convert
from bf16_to_fp16.conversion.planning import uncorrected
from bf16_to_fp16.families.layout import Layout, TensorReader
from bf16_to_fp16.families.resolve import ModelTensors, resolve, source_weights
from bf16_to_fp16.families.signals import RESIDUAL, Kind
from bf16_to_fp16.measuring.batch import PADDED, RANDOM, REPEATED, Batch
from bf16_to_fp16.measuring.meter import observe_ranges
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.ranges import ChannelRange, ModuleRange
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.channels import RESIDUAL_RANGE, ROUNDING, known_points, whole_log2
from bf16_to_fp16.rescaling.costs import PROOF_WORTH, UNWRITABLE, Total
from bf16_to_fp16.rescaling.exponents import on_request
from bf16_to_fp16.rescaling.planner import INDIFFERENCE, PROOF_FIRST, PlanSearch, make_plan


def shown_to(model: Any) -> list[Batch]:
    """Return what a tiny model is observed on, one batch of each shape: the others' values are no others."""
    return [b for b in batches(model.config, None, None) if b.kind in (RANDOM, PADDED, REPEATED)]


def observed(model: Any, *, untie: bool = False) -> tuple[Layout, TensorReader, dict[str, ModuleRange]]:
    source = ModelTensors(model)
    layout = resolve(source, untie=untie)
    return layout, source_weights(source, layout), dict(observe_ranges(model, shown_to(model)))


@pytest.mark.parametrize(
    "kind", exhaustive.beyond(["t5", "longt5", "switch", "mbart", "gemma4", "t5gemma"], tiny.KINDS)
)
def test_every_signal_and_weight_is_under_its_limit_with_the_margin(kind: str) -> None:
    layout, weights, ranges = observed(model := tiny.build(kind, **tiny.few_layers(kind)))
    planned = make_plan(layout, weights, ranges, margin_bits=1.25)
    assert planned.violations == ()
    assert planned.plan.residual_exponent < 0
    apply(model, layout, planned.plan)
    after = observe_ranges(model, shown_to(model))
    peak = max(float(r.output.amax.max()) for r in after.values())
    assert peak <= FP16_MAX / 2**1.25
    assert all(float(t.abs().max()) <= FP16_MAX for t in model.state_dict().values())


@pytest.mark.parametrize(
    ("bound", "enough", "exponent"), [(1.1, True, -3), (None, True, -4), (2, True, -4), (1.1, False, -4)]
)
def test_a_proof_can_stand_for_a_streams_margin(bound: float | None, enough: bool, exponent: int) -> None:
    """At 2^-3 the stream reaches 60% of the limit. bound: in units of what was observed."""
    layout, weights, ranges = observed(tiny.build("t5", factor=1.0))
    stream = [each for each in known_points(ranges, layout.signals[RESIDUAL]) if each[0].sign > 0]
    top = max(float(reached.amax.max()) for _, reached in stream)

    def scaled(factor: float) -> dict[str, ModuleRange]:
        changed = dict(ranges)
        for point, reached in stream:
            larger: dict[str, Any] = {point.side: replace(reached, amax=reached.amax * factor)}
            changed[point.module] = replace(changed[point.module], **larger)
        return changed

    at_limit = 0.6 * FP16_MAX * 8 / top
    planned = make_plan(
        layout,
        weights,
        scaled(at_limit),
        bounds=None if bound is None else scaled(at_limit * bound),
        proof_is_enough=enough,
    )
    assert planned.plan.residual_exponent == exponent and not planned.violations


def test_a_tenth_of_a_percent_of_inexact_weights_costs_a_rounding_at_every_norm() -> None:
    layout = resolve(source := ModelTensors(tiny.build("gated")))
    search = PlanSearch(layout, source_weights(source, layout), {})
    elements = sum(math.prod(tensor.shape) for tensor in layout.tensors.values())
    assert search.lossy_price * elements / 1000 == pytest.approx(ROUNDING * len(layout.norms)) and len(layout.norms) > 8


def test_rows_are_looked_at_with_the_exponents_that_their_columns_share() -> None:
    """Of the output projection, each of whose heads reads values that another one reads as well."""
    layout, weights, ranges = observed(tiny.build("gemma3"))
    search = PlanSearch(layout, weights, ranges)
    tensor = layout.tensors["model.layers.0.self_attn.o_proj.weight"]
    carried = tensor.axes[1]
    assert carried is not None
    search.chosen[carried.signal] = torch.arange(20, dtype=torch.int32)
    shift = search.shift(tensor, 0)
    assert shift is not None
    # Two heads of values, each of 10 channels and read by two heads of queries.
    assert (-shift).tolist() == [*range(10), *range(10), *range(10, 20), *range(10, 20)]


def test_pegasus_drift_grows_fourfold_with_each_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, weights, ranges = observed(tiny.build("pegasus"))
    search = PlanSearch(layout, weights, ranges)
    assert search.residual_cost(-12) > search.drift(-12) > 0
    corrected = search.drift(-5)
    monkeypatch.setattr(search, "gain_correction", lambda *_: 1.0)
    drifts = [math.sqrt(search.drift(r)) for r in (-3, -4, -5)]
    assert corrected < drifts[2] ** 2
    assert drifts[1] / drifts[0] == pytest.approx((4**4 - 1) / (4**3 - 1), rel=0.05)
    assert drifts[2] / drifts[1] == pytest.approx((4**5 - 1) / (4**4 - 1), rel=0.05)


def test_without_corrections_the_drift_is_what_it_would_be_if_none_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, weights, ranges = observed(tiny.build("pegasus"))
    found = make_plan(layout, weights, ranges, held={"residual": -6})
    assert found.plan.gain_correction and found.plan.drift is not None
    monkeypatch.setattr(PlanSearch, "gain_correction", lambda *_: 1.0)
    wanted = make_plan(layout, weights, ranges, held={"residual": -6}).plan.drift
    plan = uncorrected(found).plan
    assert wanted is not None and plan.drift is not None and not plan.gain_correction
    assert plan.drift.relative_error == pytest.approx(wanted.relative_error)
    assert plan.drift.relative_error > 1.01 * found.plan.drift.relative_error


def test_a_corrected_gain_is_one_that_fp16_holds_with_all_that_it_carries() -> None:
    """So far down the stream goes where nothing is run that eps leaves little of any norm's output."""
    layout, weights, ranges = observed(tiny.build("pegasus", factor=1.0))
    search = PlanSearch(layout, weights, ranges)
    factors = search.gain_corrections(-24)
    largest = {name: float(weights(name).abs().max()) * factor for name, factor in factors.items()}
    # The tied head's norm carries 2^24 already, which alone is more than fp16 holds.
    assert len(factors) == len(layout.norms) - 1 and max(largest.values()) == pytest.approx(FP16_MAX)
    gains = weights("model.decoder.layer_norm.weight").abs().max()
    assert search.largest_gain("model.decoder.layer_norm", -24) == pytest.approx(float(gains) * 2.0**24)
    # Each is the best or the largest: without the limit some would be far beyond it.
    best = [(s * k).sum() / (s * k.square()).sum() for k, s in (search.kept(n, -24) for n in layout.norms)]
    assert max(map(float, best)) > 1.5 * max(factors.values())
    norm = next(s for s in layout.signals.values() if s.kind is Kind.NORM and s.name in layout.norms)
    least = float(weights(f"{norm.name}.weight").abs().max())
    search.chosen[norm.name] = torch.full((norm.size,), math.floor(math.log2(FP16_MAX / least)), dtype=torch.int32)
    assert search.gain_correction(norm.name, -12) == pytest.approx(FP16_MAX / search.largest_gain(norm.name, -12))
    assert FP16_MAX / 2 < search.largest_gain(norm.name, -12) <= FP16_MAX


def test_stacks_that_nothing_ties_have_an_exponent_each() -> None:
    """A large stream is scaled down, and a small one, which would drift, is not; each as if it were alone."""
    model = tiny.build("mbart", factor=1.0)
    with torch.no_grad():
        for name, weight in model.model.decoder.named_parameters():
            weight.mul_(0.02 if name.endswith(("fc2.weight", "out_proj.weight")) else 1)
        model.model.encoder.layers[1].fc2.weight[:2] *= 1e5
    layout, weights, ranges = observed(model)
    found = make_plan(layout, weights, ranges)
    plan, (encoder, decoder) = found.plan, layout.streams
    assert not found.violations and plan.stream_exponent(encoder) < -6 and plan.stream_exponent(decoder) == 0
    assert plan.drift is not None and plan.gain_correction.keys() <= {f"{n}.weight" for n in layout.norms}
    assert not any("decoder" in name for name in plan.gain_correction)
    # With one exponent for both, the decoder would drift.
    search = PlanSearch(layout, weights, ranges)
    search.stream = decoder
    for names in ([signal.name for signal in search.of_stream()], search.norms()):
        assert names and all(name.startswith("model.decoder.") for name in names)
    assert search.total_cost(plan.residual_exponent).cost > 100 * search.total_cost(0).cost
    held = make_plan(layout, weights, ranges, held={decoder: -5}).plan
    assert held.residual_exponents == [plan.stream_exponent(encoder), -5] and held.drift is not None
    assert held.drift.relative_error > plan.drift.relative_error


def test_the_tied_heads_norm_bounds_the_shrinking_from_the_other_side() -> None:
    """Where the final norm times 1/s would overflow, the limits hold only with the head apart."""
    model = tiny.build("t5", factor=30000.0)
    model.decoder.final_layer_norm.weight.data.mul_(2.0**19)
    assert make_plan(*observed(model)).violations != ()
    planned = make_plan(*observed(model, untie=True))
    assert [v for v in planned.violations if "lm_head" not in v.signal] == []
    assert planned.plan.untied_head


def with_large_last_gains(kind: str) -> Any:
    """Return a model with a tied head and last gains of 5,952 but for one, whose stream asks for 2^-9."""
    model = tiny.build(kind)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.shared.weight
    model.shared.weight.data[:, 0] = 30000
    model.shared.weight.data[:, 1:] /= 100
    for name, weight in model.named_parameters():
        if name.endswith((".o.weight", ".wo.weight")):
            weight.data[0] *= 20
            weight.data[1:] /= 100
    model.decoder.final_layer_norm.weight.data.fill_(5952)
    model.decoder.final_layer_norm.weight.data[0] = 2.0**-10
    return model


@pytest.mark.parametrize("kind", ["t5", "longt5-tied", "umt5"])
def test_no_plan_takes_a_weight_past_65504(kind: str) -> None:
    """A tied head's gains bear 2^3 at most: the head goes apart for 2^-9, or where it cannot the stream stays above."""
    model = with_large_last_gains(kind)
    layout, weights, ranges = observed(model)
    tied = make_plan(layout, weights, ranges)
    assert tied.plan.residual_exponent >= -3 and tied.violations
    if layout.family.untie:
        planned = make_plan(*observed(model, untie=True))
        assert planned.plan.residual_exponent < -3 and not planned.violations
    apply(model, layout, tied.plan)
    assert all(float(t.abs().max()) <= FP16_MAX for t in model.state_dict().values())


def test_the_least_exponent_that_can_be_written_is_tried() -> None:
    model = with_large_last_gains("umt5")
    layout, weights, ranges = observed(model)
    search = PlanSearch(layout, weights, ranges)
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
    layout, weights, ranges = observed(tiny.build(kind))
    bounds = reachable(factor, dict(ranges))
    search = PlanSearch(layout, weights, ranges, bounds=bounds)
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
    planned = make_plan(layout, weights, ranges, bounds=bounds)
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
    layout, weights, ranges = observed(tiny.build("gated"))
    free = make_plan(layout, weights, ranges)
    assert free.fallbacks == ()
    # What flows through a neuron cannot be brought from 2⁶⁰ under 65504 and leave the weights in fp16.
    huge = make_plan(layout, weights, ranges, bounds=reachable(2.0**60, dict(ranges)))
    given_up = {f.signal: f for f in huge.fallbacks}
    assert RESIDUAL in given_up and any(name.endswith(".neuron") for name in given_up)
    assert huge.plan.exponents == free.plan.exponents
    assert huge.plan.residual_exponent == free.plan.residual_exponent
    assert not huge.violations


def test_where_a_proof_is_asked_for_no_bound_is_too_dear_and_an_impossible_one_is_still_given_up() -> None:
    layout, weights, ranges = observed(tiny.build("gated"))
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


@pytest.mark.parametrize("unproven, chosen", [(0, -1), (1, -4)])
def test_the_exponent_nearest_0_gives_up_no_proof_of_the_cheapest(
    unproven: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, weights, ranges = observed(tiny.build("t5"))
    totals = {-4: Total(1.0, True, 0), -1: Total(1.0, True, unproven)}
    monkeypatch.setattr(PlanSearch, "total_cost", lambda search, r: totals[r])
    search = PlanSearch(layout, weights, ranges)
    search.stream = layout.streams[0]
    assert search.decide_stream(sorted(totals)) == totals
    assert search.decided == {search.stream: chosen}
