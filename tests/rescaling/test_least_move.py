"""Plans move what they must and no more, and what norms alone read apart; what was converted is known again."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import exhaustive, tiny
from support.contract import outputs
from support.folders import rewritten

from bf16_to_fp16 import convert, make_fp16_safe, undo
from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.certificate import bound
from bf16_to_fp16.checkpoint.recorded import CONVERTED_KEY
from bf16_to_fp16.cli import main
from bf16_to_fp16.conversion.made_safe import set_eps
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.layout import Layout, TensorReader
from bf16_to_fp16.families.resolve import ModelTensors, resolve, source_weights
from bf16_to_fp16.families.signals import Kind, before
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.measuring.gradients import measure_gradients
from bf16_to_fp16.measuring.meter import observe_ranges
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.numerics import FP16_MAX, PROOF_LIMIT
from bf16_to_fp16.ranges import ModuleRange, NormRange
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.costs import NEARNESS
from bf16_to_fp16.rescaling.plan import OfChannels, Plan, composed
from bf16_to_fp16.rescaling.planner import TRAIN_MARGIN_BITS, PlanSearch, make_plan, with_smaller_gradients
from bf16_to_fp16.targets import MARGIN_BITS

T5 = Path(str(files("bf16_to_fp16") / "demo_data" / "t5-gated-bytes"))


def source_by(plan: Plan, source: Path, out: Path, *, eps: bool = True) -> Path:
    """Save a source's weights after a plan in bf16, as a source of its own."""
    model = load(source, torch.float32)
    layout = resolve(ModelTensors(model))
    apply(model, layout, plan)
    if eps:
        set_eps(model, layout, layout.eps * 4.0**plan.residual_exponent)
    return tiny.save(model, out)


def signals(source: Path, kind: Kind) -> list[str]:
    layout = resolve(ModelTensors(load(source, torch.float32)))
    return [signal.name for signal in layout.signals.values() if signal.kind is kind]


def nonzero(plan: Plan) -> dict[str, int]:
    exponents = {name: [e] if isinstance(e, int | float) else e for name, e in plan.exponents.items()}
    return {name: sum(e != 0 for e in each) for name, each in exponents.items() if any(each)}


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.small("gated"), tmp_path_factory.mktemp("gated"))


@pytest.fixture(scope="module")
def converted(gated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("least") / "gated"
    convert(gated, out, run_model=False)
    return out


def test_the_default_moves_the_stream_by_what_overflows_and_few_channels() -> None:
    plan = convert(T5, "unused", dry_run=True, run_model=False).plan
    strict = convert(T5, "unused", dry_run=True, run_model=False, target="norm-safe").plan
    assert plan.residual_exponent == -4 and strict.residual_exponent == -13
    assert sum(nonzero(plan).values()) < 10 < 100 < sum(nonzero(strict).values())


@pytest.mark.usefixtures("first_batch")
@pytest.mark.parametrize("run_model", [True, False])
def test_what_fits_and_is_proven_is_not_moved_at_all(run_model: bool, converted: Path, tmp_path: Path) -> None:
    model = load(converted, torch.float32)
    source = tiny.save(model, tmp_path / "source")
    with rewritten(source / "config.json") as config:
        config.pop(CONVERTED_KEY, None)
    done = convert(source, tmp_path / "out", run_model=run_model)
    assert done.report["proof"] == "certified" and not done.plan.moves and not done.plan.centred_keys
    assert not {"exceptions", "searched"} & done.report.keys()  # without edits
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after.keys() == config.keys()  # no key that tells of a conversion
    assert {key for key in config if after[key] != config[key]} <= {"dtype", "torch_dtype", "tie_word_embeddings"}
    written, own = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    assert all(torch.equal(written[name], own[name].half()) for name in written)


def test_what_overflows_in_sublayers_alone_leaves_the_stream_and_eps(gated: Path, tmp_path: Path) -> None:
    neurons: dict[str, OfChannels] = dict.fromkeys(signals(gated, Kind.NEURON), 9)
    plan = Plan(family="t5", residual_exponent=-8, exponents=neurons)
    source = source_by(plan, gated, tmp_path / "source")
    done = convert(source, tmp_path / "out", run_model=False)
    assert done.report["proof"] == "certified"
    assert done.plan.residual_exponent == 0 and done.plan.eps == 1e-6 * 4.0**-8
    assert nonzero(done.plan) and nonzero(done.plan).keys() <= set(neurons)


@pytest.mark.usefixtures("first_batch")
def test_what_only_a_norm_reads_moves_alone_and_drifts_by_less_than_a_rounding(tmp_path: Path) -> None:
    gemma = tiny.save(tiny.small("gemma3"), tmp_path / "gemma")
    loud: dict[str, OfChannels] = dict.fromkeys(signals(gemma, Kind.BEFORE_NORM), 12)
    source = source_by(
        Plan(family="gemma3", residual_exponent=-6, exponents=loud), gemma, tmp_path / "source", eps=False
    )
    done = convert(source, tmp_path / "out")
    moved = {name for name in done.plan.exponents if name.endswith(before(""))}
    assert done.report["verdict"] == "safe" and done.report["proof"] == "certified"
    assert done.plan.residual_exponent == 0 and 0 < len(moved) < len(loud)
    assert done.plan.drift is not None and done.plan.drift.relative_error < 2.0**-11
    # Where nothing may drift, or nothing tells how small a norm's input is, the stream is what moves.
    for exact in (True, False):
        plan = convert(source, "unused", dry_run=True, exact=exact, run_model=exact).plan
        assert plan.residual_exponent < 0 and not any(name.endswith(before("")) for name in plan.exponents)


def searching(model: Any) -> tuple[Layout, PlanSearch, dict[str, ModuleRange]]:
    source = ModelTensors(model)
    layout = resolve(source)
    weights = source_weights(source, layout)
    bounds = bound(layout, weights, Arithmetic(), target="half").ranges
    return layout, PlanSearch(layout, weights, bounds, margin_bits=0.0, bounds=bounds), dict(bounds)


@pytest.mark.parametrize("kind", ["gated", "llama", "glm4"])
def test_no_exponent_nearer_0_proves_as_much_at_little_more_cost(kind: str) -> None:
    layout, search, bounds = searching(tiny.build(kind))
    plan = make_plan(layout, search.weights, bounds, margin_bits=0.0, bounds=bounds).plan
    search.stream = layout.streams[0]
    search.tried = candidates = search.candidates()
    totals = {r: search.total_cost(r) for r in candidates}
    best = min(totals.values(), key=lambda total: total.cost)
    allowed = best.cost + NEARNESS * len(layout.norms)
    assert totals[plan.residual_exponent].cost <= allowed
    for r in range(-abs(plan.residual_exponent) + 1, abs(plan.residual_exponent)):
        assert r not in totals or totals[r].cost > allowed or totals[r].unproven > best.unproven
    assert {*range(min(plan.residual_exponent, 0), 1)} <= set(candidates)


def test_what_holds_unmoved_keeps_every_channel_whatever_each_would_gain() -> None:
    model = tiny.build("gated", factor=1.0)
    with torch.no_grad():  # a few weights of one channel that fp16 rounds, until they are 32 times as large
        model.encoder.block[0].layer[0].SelfAttention.v.weight[0, :4] = 1.296875 * 2.0**-22
    _, search, _ = searching(model)
    search.spare = 0.0
    assert search.holds_unmoved() and any(
        bool((each.index != 24).any()) for known in search.solved.values() for each in known.values()
    )
    _, search, _ = searching(model)
    search.spare = 0.0
    assert not search.run({}).plan.moves


def test_channels_stay_whose_loss_together_is_little() -> None:
    _, search, _ = searching(tiny.build("gated"))
    costs = torch.ones(1000, 49, dtype=torch.float64)
    costs[:, 24] = 0.0
    costs[:4, 20], lost = 0.0, torch.tensor([0.2, 0.25, 0.3, 2.0], dtype=torch.float64)
    costs[:4, 24] = NEARNESS * lost  # of which half pays for the first two together
    assert (search.restrained(costs)[:5] - 24).tolist() == [0, 0, -4, -4, 0]
    search.moves_least = False
    assert (search.restrained(costs)[:5] - 24).tolist() == [-4, -4, -4, -4, 0]


def test_a_fixed_stream_is_taken_and_told_what_it_proves(
    gated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = convert(gated, tmp_path / "further", stream=-6, run_model=False)
    assert done.plan.residual_exponent == -6 and done.report["proof"] == "certified"
    assert "--stream -6" in done.report["command"]
    kept = convert(gated, tmp_path / "kept", stream=0, run_model=False)
    assert kept.plan.residual_exponent == 0 and kept.report["verdict"] == "unsafe"
    for given in (["--stream", "25"], ["--stream", "0", "--plan", str(tmp_path / "further")]):
        assert main(["convert", str(gated), str(tmp_path / "no"), *given]) == 2
    assert "--stream" in capsys.readouterr().err and not (tmp_path / "no").exists()
    with pytest.raises(UserError, match="stream"):
        convert(gated, tmp_path / "no", stream=99)


@pytest.mark.usefixtures("first_batch")
def test_a_move_for_the_proof_alone_is_told(gated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(gated), str(tmp_path / "out")]) == 0
    assert "proof: observed values need only --stream -3, but a proof needs residual to" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "fp16_report.json").read_text())["for_proof"] == {"residual": -3}


def test_a_folder_saved_again_is_known(converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = json.loads((converted / "config.json").read_text())[CONVERTED_KEY]
    assert mark["stream_exponents"] == [-5]
    again = tmp_path / "again"
    load(converted, torch.float32).save_pretrained(again)
    assert json.loads((again / "config.json").read_text())[CONVERTED_KEY] == mark
    for command in (["undo", str(again), str(tmp_path / "no")], ["verify", str(again)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "that was saved again, without" in said and f"undo {again} OUT --plan CONVERTED" in said
    assert main(["convert", str(again), str(tmp_path / "twice"), "--no-audit"]) == 0
    assert "was converted before, then saved again or merged" in capsys.readouterr().err
    with pytest.raises(UserError, match="load it from the folder that convert wrote"):
        make_fp16_safe(load(again, torch.float32))


@pytest.mark.parametrize(
    "kind",
    exhaustive.beyond(["t5", "gemma3", "pegasus", "edited"], ["gated", "t5", "gemma3", "qwen3", "pegasus", "edited"]),
)
def test_what_was_trained_comes_back_in_scale(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By any script, and saved by it in fp32, or merged in fp16."""
    source = tiny.small("t5-encoder" if kind == "edited" else kind)
    if kind == "edited":
        for name, weight in source.named_parameters():
            if name.endswith("wi_0.weight"):
                weight.data.mul_(1e5)
    options: dict[str, Any] = {"max_kl": 1.0} if kind == "edited" else {"stream": -3, "run_model": False}
    plan = convert(tiny.save(source, tmp_path / "source"), tmp_path / "out", **options).plan
    model = load(tmp_path / "out", torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 2.0**-4 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)))
    for dtype in (torch.float32, torch.float16):
        trained, back = tmp_path / f"trained-{dtype}", tmp_path / f"back-{dtype}"
        model.to(dtype).save_pretrained(trained)
        command = ["undo", str(trained), str(back), "--plan", str(tmp_path / "out")]
        assert main([*command[:-1], str(tmp_path / "source")]) == 2
        assert main(command) == 0
        assert ("These edits stay" in capsys.readouterr().err) is (kind == "edited")
        one, two = outputs(load(trained, torch.float32)), outputs(load(back, torch.float32))
        if kind in ("gemma3", "pegasus", "qwen3"):  # whose gains less 1, and eps, no power of two moves
            assert all((a - b).abs().max() <= 1e-4 * a.abs().max() for a, b in zip(one, two, strict=True))
        else:
            assert all(map(torch.equal, one[:1], two[:1]))
        config = json.loads((back / "config.json").read_text())
        assert CONVERTED_KEY not in config and config.get("layer_norm_epsilon", 1e-6) == 1e-6
        made, wanted = load(back, torch.float32).state_dict(), source.state_dict()
        ratio = {n: float((made[n].norm() / t.norm()).log2()) for n, t in wanted.items() if n in made and t.norm()}
        assert plan.moves and (kind == "edited" or all(abs(bits) < 0.2 for bits in ratio.values()))
        with pytest.raises(UserError, match="was not trained from the conversion"):
            undo(back, tmp_path / "twice", plan=tmp_path / "out")


def test_what_was_moved_further_or_holds_no_numbers_is_not_taken_back(converted: Path, tmp_path: Path) -> None:
    model, name = load(converted, torch.float32), "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    folder, eps = tmp_path / "trained", model.config.layer_norm_epsilon
    for factor, value, said in ((2.0**-4, 1.0, "was not trained from"), (1.0, torch.nan, "holds inf or NaN")):
        model.config.layer_norm_epsilon = factor * eps
        model.get_parameter(name).data[0, 0] = value
        model.save_pretrained(folder)
        with pytest.raises(UserError, match=said):
            undo(folder, tmp_path / "back", plan=converted)
    model.get_parameter(name).data[0, 0] = 1.0
    model.save_pretrained(folder)
    (folder / "README.md").write_text("mine")
    command = ["undo", str(folder), str(tmp_path / "back"), "--plan", str(converted / "fp16_report.json")]
    assert main(command) == 0 and (tmp_path / "back" / "README.md").read_text() == "mine"


def test_a_converted_folder_is_undone_to_the_originals_scale(gated: Path, converted: Path) -> None:
    """Its weights are the source's as fp16 holds them, so these are what the original is trained from."""
    model, source = load(converted, torch.float32), load(gated, torch.float32)
    safe = make_fp16_safe(model)
    assert safe.plan.residual_exponent <= -4
    assert str(safe).startswith(f"the residual stream is 2^{safe.plan.residual_exponent} times the original's")
    safe.undo(model)
    assert model.config.layer_norm_epsilon == source.config.layer_norm_epsilon
    assert CONVERTED_KEY not in model.config.to_dict()  # of what is saved now nothing is to be undone
    pairs = zip(source.parameters(), model.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=2.0**-11, atol=1e-4) for a, b in pairs)


def test_plans_that_follow_each_other_are_one() -> None:
    first = Plan(family="t5", residual_exponent=-4, exponents={"a": [1, 0], "b": 2}, gain_correction={"n": 2.0})
    second = Plan(family="t5", residual_exponent=-2, exponents={"a": 3, "c": [0, 5]}, eps=1e-9)
    both = composed(first, second)
    assert both.residual_exponent == -6 and both.eps == 1e-9 and both.gain_correction == {"n": 2.0}
    assert both.exponents == {"a": [4, 3], "b": 2, "c": [0, 5]}


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
        def read(name: str) -> torch.Tensor:
            return own(name) * factor if name == weight else own(name)

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
    source, out = tiny.save(tiny.small("gemma3"), tmp_path / "source"), tmp_path / "out"
    assert main(["convert", str(source), str(out), "--target", "train"]) == 0
    report = json.loads((out / "fp16_report.json").read_text())
    plan, scales = report["plan"], []
    moved = {name: e for name, e in plan["exponents"].items() if name.endswith(before(""))}
    assert len(moved) == 2 * 4
    for taken_back in (False, True):
        model = load(out, torch.float32).train()
        layout = resolve(ModelTensors(model))
        if taken_back:
            apply(model, layout, Plan(family=layout.family.name, exponents={name: -e for name, e in moved.items()}))
        scales.append(measure_gradients(model, batches(model.config, out, None)[:1]).loss_scale or 0.0)
    assert scales[0] >= 8 * scales[1] > 0 and report["verdict"] == "safe"
    assert plan["drift"]["measured_kl"] < report["fidelity"]["kl_bf16"] / 500
    assert plan["drift"]["measured_kl"] == pytest.approx(plan["drift"]["predicted_kl"], rel=1e-3)
    assert main(["verify", str(out), "--original", str(source), "--no-audit"]) == 0
