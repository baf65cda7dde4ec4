"""What norms alone read, and how large a plan for training keeps it."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from support import tiny
from support.contract import outputs

from bf16_to_fp16 import convert
from bf16_to_fp16.cli import main
from bf16_to_fp16.families.layout import Layout, TensorReader
from bf16_to_fp16.families.resolve import ModelTensors, resolve, source_weights
from bf16_to_fp16.families.signals import before
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.measuring.gradients import measure_gradients
from bf16_to_fp16.measuring.meter import observe_ranges
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.numerics import FP16_MAX, PROOF_LIMIT
from bf16_to_fp16.ranges import ModuleRange, NormRange
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.rescaling.planner import TRAIN_MARGIN_BITS, make_plan, with_smaller_gradients
from bf16_to_fp16.targets import MARGIN_BITS

GEMMA = Path(str(files("bf16_to_fp16") / "demo_data" / "gemma3-bytes"))
LIMIT = FP16_MAX * 2.0 ** -(MARGIN_BITS + TRAIN_MARGIN_BITS)


def plan_for_training(
    layout: Layout,
    weights: TensorReader,
    ranges: Mapping[str, ModuleRange],
    bounds: Mapping[str, ModuleRange] | None = None,
) -> Plan:
    plan = make_plan(layout, weights, ranges, target="train", bounds=bounds).plan
    return with_smaller_gradients(plan, layout, weights, ranges, bounds)


def test_without_a_run_nothing_tells_how_small_it_is_and_it_goes_with_the_stream(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("olmo2"), tmp_path / "source")
    done = convert(source, tmp_path / "out", target="train", run_model=False)
    assert done.plan.residual_exponent < 0 and done.plan.drift is None
    assert not any(name.endswith(before("")) for name in done.plan.exponents)


@pytest.mark.parametrize("kind", ["gemma3", "olmo2", "glm4"])
def test_it_is_as_large_as_in_the_source_up_to_its_limit_and_only_in_training(kind: str) -> None:
    model = tiny.build(kind, num_hidden_layers=3)
    layout = resolve(ModelTensors(model))
    inputs = batches(model.config, None, None)[:3]
    loud = next(part for part in layout.topology if isinstance(part, Attention))
    seen = observe_ranges(model, inputs)
    missing = math.floor(math.log2(4 * LIMIT / float(seen[loud.output].output.amax.max())))
    for linear, exponent in ((loud.value, missing // 2), (loud.output, missing - missing // 2)):
        model.get_parameter(f"{linear}.weight").data.mul_(2.0**exponent)
    ranges = observe_ranges(model, inputs)
    weights = source_weights(ModelTensors(model), layout)
    plan = plan_for_training(layout, weights, ranges)
    assert plan.residual_exponent < -3 and plan.drift is not None and plan.drift.relative_error < 2.0**-11
    if not any(tensor.offset for tensor in layout.tensors.values()):
        norms = [(ranges[path].norm, plan.stream_exponent(before(path))) for path in layout.streams_read]
        squares = [norm.drift(layout.eps, e) ** 2 for norm, e in norms if norm is not None]
        assert plan.drift.relative_error == pytest.approx(math.sqrt(sum(squares) / len(layout.norms)))
    totals = {
        path: plan.residual_exponent + plan.stream_exponent(before(path))
        for path in layout.streams_read
        if before(path) in layout.signals
    }
    room = {path: math.floor(math.log2(LIMIT / float(ranges[path].input.amax.max()))) for path in totals}
    assert totals == {path: min(0, most) for path, most in room.items()}
    assert totals[loud.post_norm] == -2 and 0 in totals.values()
    held = replace(layout, held_eps=layout.eps)
    for other in (make_plan(layout, weights, ranges).plan, plan_for_training(held, weights, ranges)):
        assert not any(before(path) in other.exponents for path in totals)


def test_a_bound_a_weight_and_an_eps_hold_it_back() -> None:
    model = tiny.build("olmo2")
    layout, own = resolve(ModelTensors(model)), source_weights(ModelTensors(model), resolve(ModelTensors(model)))
    ranges = observe_ranges(model, batches(model.config, None, None)[:1])
    attention = next(part for part in layout.topology if isinstance(part, Attention))
    norm, weight = attention.query_norm, f"{attention.query}.weight"

    def total(
        seen: Mapping[str, ModuleRange] = ranges, bounds: Mapping[str, ModuleRange] | None = None, factor: float = 1.0
    ) -> int:
        read = lambda name: own(name) * factor if name == weight else own(name)  # noqa: E731
        plan = plan_for_training(layout, read, seen, bounds)
        return plan.residual_exponent + plan.stream_exponent(before(norm))

    assert total() == 0
    bound = replace(ranges[attention.query].output, amax=torch.full((1,), 3 * PROOF_LIMIT))
    assert total(bounds={attention.query: replace(ranges[attention.query], output=bound)}) == -2
    r = make_plan(layout, own, ranges, target="train").plan.residual_exponent
    # What reads the smaller stream and gives as much as before has the larger weights.
    assert total(factor=3 * LIMIT * 2.0**r / float(own(weight).abs().max())) == -2
    quiet = replace(ranges[norm], norm=NormRange(1.0, torch.tensor([[layout.eps, 1.0]], dtype=torch.float64)))
    assert total(seen={**ranges, norm: quiet}) < 0


@pytest.mark.parametrize("kind", ["olmo2", "glm4"])
def test_in_memory_every_norm_has_the_eps_that_makes_it_exact(kind: str) -> None:
    model = tiny.build(kind)
    layout, before_it = resolve(ModelTensors(model)), outputs(model)
    ranges = observe_ranges(model, batches(model.config, None, None)[:1])
    plan = plan_for_training(layout, source_weights(ModelTensors(model), layout), ranges)
    assert any(name.endswith(before("")) for name in plan.exponents)
    apply(model, layout, plan)
    assert all(map(torch.equal, outputs(model), before_it))


@pytest.mark.usefixtures("first_batch")
def test_gradients_need_a_larger_loss_scale_and_the_function_hardly_moves(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(GEMMA), str(out), "--target", "train"]) == 0
    report = json.loads((out / "fp16_report.json").read_text())
    plan, scales = report["plan"], []
    moved = {name: e for name, e in plan["exponents"].items() if name.endswith(before(""))}
    assert len(moved) == 4 * 4
    for taken_back in (False, True):
        model = load(out, torch.float32).train()
        layout = resolve(ModelTensors(model))
        if taken_back:
            apply(model, layout, Plan(family=layout.family.name, exponents={name: -e for name, e in moved.items()}))
        scales.append(measure_gradients(model, batches(model.config, out, None)[:1]).loss_scale or 0.0)
    assert scales[0] >= 8 * scales[1] > 0 and report["verdict"] == "safe"
    assert plan["drift"]["measured_kl"] < report["fidelity"]["kl_bf16"] / 500
    assert plan["drift"]["measured_kl"] == pytest.approx(plan["drift"]["predicted_kl"], rel=1e-3)
    assert main(["verify", str(out), "--original", str(GEMMA), "--no-audit"]) == 0
