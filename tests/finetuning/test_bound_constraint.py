"""The certificate as a constraint of the training: where bounds are brought, by what least change, and for good."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import learner, tiny
from support.contract import layout_of
from support.exhaustive import beyond
from support.launching import two_ranks
from support.learner import Damage, kept, recipe_tree, rows_of, saved, tiny_model, without_edits

from bf16_to_fp16.cli import main
from bf16_to_fp16.conversion.convert import Conversion, convert_by
from bf16_to_fp16.conversion.options import Destination, Options
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.finetuning.bound_constraint import MARGIN_BITS, TOLERANCE_BITS, BoundConstraint
from bf16_to_fp16.finetuning.recipe import Recipe, parse_recipe, read_recipe
from bf16_to_fp16.finetuning.run import convert_or_finetune
from bf16_to_fp16.finetuning.start import options_of
from bf16_to_fp16.finetuning.states import RunFolder
from bf16_to_fp16.finetuning.trainer import Trainer
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.rescaling.plan import Plan

pytestmark = pytest.mark.usefixtures("first_batch")
PEGASUS = Path("bf16_to_fp16/demo_data/pegasus-bytes")
SCORES = "encoder.block.0.layer.0.SelfAttention:scores"
GATE = "encoder.block.0.layer.1.DenseReluDense.wi_0"
HEAD = "lm_head"


def hard_model(seed: int = 0) -> Any:
    """The tiny gated T5, tied, with one head, three gate rows and the logits past fp16's limit."""
    model = tiny_model(seed)
    block = model.encoder.block[0]
    block.layer[0].SelfAttention.q.weight.data[:8] *= 1e5
    block.layer[1].DenseReluDense.wi_0.weight.data[:3] *= 3e5
    block.layer[1].DenseReluDense.wi_1.weight.data[:3] /= 3e5
    model.decoder.final_layer_norm.weight.data.mul_(3e5)
    return model


def begun(model: Any) -> BoundConstraint:
    constraint = BoundConstraint(layout_of(model), model)
    constraint.begin(0)
    return constraint


def held_to_the_end(model: Any, steps: int = 4) -> BoundConstraint:
    constraint = begun(model)
    for step in range(1, steps + 1):
        constraint.hold(step, steps)
    return constraint


def worst(constraint: BoundConstraint) -> float:
    return max(float(bits.max()) for bits in constraint.excess().values())


def test_bounds_over_the_lid_come_down_to_it_and_the_certificate_then_holds_them() -> None:
    """And processes that have the same weights keep the same. Bounds that hold have no lid to come down."""
    assert begun(tiny_model()).start == 0
    model, other = hard_model(), hard_model()
    twin, constraint = begun(other), begun(model)
    assert {SCORES, GATE, HEAD} <= {site.name for site in constraint.over()}
    start = worst(constraint)
    assert start == constraint.start > 2
    for step in range(1, 7):
        constraint.hold(step, 6)
        twin.hold(step, 6)
        # Down by as many bits in each of three steps, then it stays.
        assert worst(constraint) == pytest.approx(start * max(0.0, 1 - step / 3), abs=2 * TOLERANCE_BITS)
    assert constraint.over() == []
    assert constraint.headroom == pytest.approx(MARGIN_BITS, abs=TOLERANCE_BITS)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def test_a_head_of_queries_comes_down_without_the_keys_that_it_shares() -> None:
    """Turned by rotary positions: of four heads of queries one is too loud, and its keys are those of another too."""
    model = tiny.build("llama-biased", factor=1.0)
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight.data[10:20] *= 1e4
    before = {name: x.clone() for name, x in attention.state_dict().items()}
    site = "model.layers.0.self_attn:scores"
    assert site in {each.name for each in begun(model).over()}
    assert site not in {each.name for each in held_to_the_end(model).over()}
    after = attention.state_dict()
    assert torch.equal(after["k_proj.weight"], before["k_proj.weight"])
    kept = torch.cat([torch.arange(10), torch.arange(20, 40)])
    moved, was = after["q_proj.weight"], before["q_proj.weight"]
    assert torch.equal(moved[kept], was[kept]) and not torch.equal(moved[10:20], was[10:20])


def test_what_is_under_the_lid_keeps_every_bit() -> None:
    """Only the one head's queries and keys, the three rows and the head's rows that are over move."""
    model, before = hard_model(), hard_model().state_dict()
    held_to_the_end(model, 1)
    after = model.state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    attention = "encoder.block.0.layer.0.SelfAttention"
    tied = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    biased = {f"{attention}.relative_attention_bias.weight"}
    assert moved - biased == {f"{attention}.q.weight", f"{attention}.k.weight", f"{GATE}.weight"} | tied
    for name, rows in ((f"{attention}.q.weight", 8), (f"{attention}.k.weight", 8), (f"{GATE}.weight", 3)):
        assert torch.equal(after[name][rows:], before[name][rows:]), name
        assert not torch.equal(after[name][:rows], before[name][:rows]), name
    # The least change that does it leaves what a head's largest direction does not see.
    change = (after[f"{attention}.q.weight"] - before[f"{attention}.q.weight"])[:8]
    values = torch.linalg.svdvals(change)
    assert float(values[1]) < float(values[0])


@pytest.mark.parametrize("scaled", [False, True])
def test_a_gain_that_is_stored_less_1_is_made_smaller_itself(scaled: bool) -> None:
    """Made smaller instead, what is stored would come to 0, and all gains to 1."""
    model = tiny.build("gemma3", factor=1.0)
    attention = model.model.layers[0].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data.copy_(torch.tensor([0.0, -0.5, -0.75, 0.25, -0.9375] * 2))
        norm.weight.data[3] = 1.0
    layout = layout_of(model)
    constraint = BoundConstraint(layout, model)
    before = [1 + norm.weight.detach().clone() for norm in (attention.q_norm, attention.k_norm)]
    constraint.target = float(constraint.bounds.measure()["model.layers.0.self_attn:scores"][0]) / 2
    bits = constraint.excess()["model.layers.0.self_attn:scores"]
    constraint.project("model.layers.0.self_attn:scores", bits, scaled=scaled)
    for norm, old in zip((attention.q_norm, attention.k_norm), before, strict=True):
        share = (1 + norm.weight.detach()) / old
        assert float(share[3]) < 0.9
        if scaled:
            assert torch.allclose(share, share[3].expand(10), rtol=1e-5)
    assert float(constraint.excess()["model.layers.0.self_attn:scores"][0]) < 0.7


def test_what_is_frozen_stays_and_is_still_over_at_the_end() -> None:
    model = hard_model()
    gate = model.encoder.block[0].layer[1].DenseReluDense.wi_0.weight.requires_grad_(False)
    before = gate.clone()
    assert [site.name for site in held_to_the_end(model).over()] == [GATE]
    assert torch.equal(gate, before)


def test_the_lid_never_rises() -> None:
    constraint = begun(hard_model())
    constraint.hold(10, 10)
    assert constraint.lowest == 0 and constraint.lid(10, 100) > 0
    state = constraint.state_dict()
    constraint.hold(11, 100)  # a run that goes on
    assert constraint.lowest == 0 and worst(constraint) <= TOLERANCE_BITS
    # So it is from a state, by weights that the steps in between have let grow.
    grown = hard_model()
    again = BoundConstraint(layout_of(grown), grown)
    again.load_state_dict(state)
    again.hold(11, 100)
    assert again.lowest == 0 and worst(again) < MARGIN_BITS


def test_most_steps_measure_the_bounds_near_the_lid_alone_and_each_eighth_and_the_last_all_of_them() -> None:
    model = tiny.build("gated", factor=1.0)
    constraint, measured = begun(model), list[int]()
    measure, every = constraint.bounds.measure, len(constraint.excess())

    def counted(**given: Any) -> dict[str, torch.Tensor]:
        found = measure(**given)
        measured.append(len(found))
        return found

    constraint.bounds.measure = counted  # type: ignore[method-assign]
    loudest = worst(constraint)
    constraint.target *= 2.0 ** (loudest + 0.5)
    measured.clear()
    for step in range(1, 12):
        constraint.hold(step, 11)
        assert constraint.headroom == pytest.approx(MARGIN_BITS + 0.5, abs=1e-4)
    assert [count == every for count in measured] == [step in (1, 8, 11) for step in range(1, 12)]
    again = BoundConstraint(constraint.layout, model)
    again.load_state_dict(constraint.state_dict())
    assert again.near == constraint.near


def test_the_stream_is_held_only_where_the_start_does_not_hold_it() -> None:
    """Pegasus's eps is not in its config, so that no exponent brings its stream down for nothing."""
    assert not any(site.endswith(":add#2") for site in begun(tiny.build("pegasus", 0, factor=1.0)).excess())
    model = tiny.build("pegasus", 0, factor=100.0, encoder_layers=3, decoder_layers=2)
    constraint = begun(model)
    assert "residual" in [site.kind for site in constraint.certificate().sites if not site.holds]
    again = BoundConstraint(layout_of(model), model)
    again.load_state_dict(constraint.state_dict())
    assert again.excess().keys() == constraint.excess().keys()
    constraint = held_to_the_end(model, 8)
    kinds = {site.kind for site in constraint.certificate().sites if not site.holds}
    assert not kinds & {"residual", "output", "scores", "masked scores", "logits"}, kinds


def test_what_products_cancel_in_the_stream_still_cancels_when_its_bounds_come_down() -> None:
    """The demo's largest channels are bounded hundreds of times over what they reach: neurons undo each other there."""
    model = load(PEGASUS, torch.float32)
    ids = torch.tensor(list((PEGASUS.parent / "held_out.txt").read_bytes()[:512])).view(8, 64) + 3

    def predicted() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, decoder_input_ids=ids[:, :32]).logits.log_softmax(-1)

    constraint, before = begun(model), predicted()
    assert constraint.start > 8
    constraint.target, constraint.start = constraint.target * 2.0 ** (constraint.start - 0.3), 0.3
    for step in range(1, 5):
        constraint.hold(step, 8)
    assert abs(worst(constraint)) <= TOLERANCE_BITS
    assert float((before.exp() * (before - predicted())).sum(-1).mean()) < 0.03  # nats a token


# ---- in a run ------------------------------------------------------------------------------------------------------


def recipe(folder: Path, precision: str = "fp32", data: dict[str, Any] | None = None, **penalty: Any) -> Recipe:
    changes: dict[str, Any] = {"device": "cpu", "precision": precision, "data": data or {}, "schedule": {"steps": 4}}
    changes |= {"checkpointing": {"every": 2}, "evaluation": {"every": 100}}
    changes |= {"penalty": {"form": "none", "certify": True} | penalty}
    return parse_recipe(learner.changed(recipe_tree(folder, folder / "out"), changes))


def trainer(recipe: Recipe, folder: Path, run: Path, model: Any = None, damage: Damage = kept) -> Trainer:
    return learner.trainer_of(recipe, folder, run, model or hard_model(), hard_model(), damage)


def test_a_run_ends_with_bounds_that_hold_and_logs_them(folder: Path, tmp_path: Path) -> None:
    made = trainer(recipe(folder), folder, tmp_path / "run")
    first, last = made.train().evaluations
    assert first["bounds_over"] > 3 and first["bound_excess_bits"] > 2
    assert last["bounds_over"] == last["bound_excess_bits"] == 0
    logged = [row["bound_bits"] for row in rows_of(tmp_path / "run", "bound_bits")]
    assert len(logged) == 4 and logged == pytest.approx(sorted(logged), abs=2 * TOLERANCE_BITS)
    assert logged[-1] == pytest.approx(MARGIN_BITS, abs=2 * TOLERANCE_BITS)
    assert made.constraint is not None and made.constraint.first == 0


def test_accumulated_passes_and_steps_that_are_skipped_are_held_as_well(folder: Path, tmp_path: Path) -> None:
    wanted = recipe(folder, "fp16", {"batch_size": 2, "gradient_accumulation": 2})
    outcome = trainer(wanted, folder, tmp_path / "run").train()
    assert outcome.skipped and outcome.evaluations[-1]["bounds_over"] == 0


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(folder: Path, tmp_path: Path) -> None:
    wanted = recipe(folder, form="smooth-max", headroom_bits=2.0)
    whole = trainer(wanted, folder, tmp_path / "whole")
    outcome = whole.train()
    with pytest.raises(learner.Killed):
        trainer(wanted, folder, tmp_path / "cut", damage=learner.killed_at(3)).train()
    assert RunFolder(tmp_path / "cut").steps() == [0, 2]
    again = trainer(wanted, folder, tmp_path / "cut", model=hard_model(seed=9))
    assert again.train() == outcome
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name
    assert (tmp_path / "cut" / "log.jsonl").read_text() == (tmp_path / "whole" / "log.jsonl").read_text()


def held_for_a_while(model: Any, layout: Layout, whole: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
    """What comes of bounds that are held between steps that make all weights larger."""
    constraint = BoundConstraint(layout, model)
    constraint.begin(0)
    for step in range(1, 5):
        for parameter in model.parameters():
            parameter.data.mul_(1.05)
        constraint.hold(step, 4)
    weights = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    return {"over": len(constraint.over()), "lowest": constraint.lowest, "weights": weights}


def on_a_rank(rank: int) -> dict[str, Any]:
    model = hard_model()
    layout = layout_of(model)
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in (*model.encoder.block, *model.decoder.block, model):
        torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    embedding = model.shared.weight
    part = embedding.to_local().numel() / embedding.numel()
    held = held_for_a_while(model, layout, lambda x: x.full_tensor())
    return held | {"part": part, "weights": {name: tensor.tolist() for name, tensor in held["weights"].items()}}


@pytest.mark.parametrize("count", beyond([2], [2, 4]))
def test_processes_with_parts_hold_the_bounds_of_the_whole(count: int, tmp_path: Path, warm_python: Path) -> None:
    model = hard_model()
    alone = held_for_a_while(model, layout_of(model), lambda x: x)
    assert alone["over"] == 0
    for held in two_ranks(warm_python, __file__, tmp_path, count):
        assert held["part"] == 1 / count and held["over"] == 0 and held["lowest"] == alone["lowest"] == 0.0
        assert set(held["weights"]) == set(alone["weights"])
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(torch.tensor(held["weights"][name]), tensor, rtol=1e-5, atol=0.0, msg=name)


# ---- the verdict ---------------------------------------------------------------------------------------------------


def written(folder: Path) -> Path:
    """The hard model in bf16 and five lines that ask for a certificate."""
    model = folder / "hard"
    saved(model, 120)
    hard_model().to(torch.bfloat16).save_pretrained(model)
    path = folder / "recipe.yaml"
    five = [
        f"source: {model}",
        f"out: {folder / 'out'}",
        f"data: {{path: {model / 'text.txt'}, input_length: 48, target_length: 24, batch_size: 4, held_out: 0.1}}",
        "schedule: {steps: 4}",
        "penalty: {certify: true, headroom_bits: 0}",
    ]
    path.write_text("\n".join([*five, "quality: {max_kl: null}", "device: cpu", ""]))
    return path


def test_a_proof_that_a_tied_head_stands_in_the_way_of_takes_a_head_apart(tmp_path: Path) -> None:
    """The last norm takes back what the stream is scaled by; two neurons that undo each other only bounds see."""
    model = tiny.pegasus(encoder_layers=1).eval()
    with torch.no_grad():
        last = model.model.decoder.layers[-1]
        last.fc1.weight[1], last.fc1.bias[1] = last.fc1.weight[0], last.fc1.bias[0]
        last.fc2.weight[:, 0] = 1e6
        last.fc2.weight[:, 1] = -1e6
        model.model.decoder.layer_norm.weight.fill_(1000.0)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "tied")
    for prove in (False, True):  # without a run a proof alone is left
        place = Destination(tmp_path / f"out-{prove}")
        report = convert_by(Options(target="half", prove=prove, run_model=not prove), tmp_path / "tied", place).report
        assert (report["proof"] == "certified", report["plan"]["untied_head"]) == (prove, prove)
        assert report["verdict"] == "safe"


def test_a_recipe_that_asks_for_a_certificate_ends_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_edits(monkeypatch)  # which mend the start
    assert main(["finetune", str(written(tmp_path))]) == 0
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    assert report["verdict"] == "safe" and report["proof"] == "certified" and report["certificate"]["holds"]
    assert report["uncertified"] == []
    first, last = report["finetune"]["evaluations"]
    assert first["bounds_over"] > 3 and last["bounds_over"] == 0
    (*_, row) = rows_of(tmp_path / "out.run", "bound_bits")
    assert row["bound_bits"] == pytest.approx(MARGIN_BITS, abs=2 * TOLERANCE_BITS)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trained the bounds of what no rescaling moves" in card
    # The start moved weights, and the last conversion none.
    assert not report["plan"]["exponents"] and "make_fp16_safe" in card
    assert main(["certify", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("certify", "proof", "finetuned"), [(True, "observed", 1), (True, "certified", 0), (False, "observed", 0)]
)
def test_convert_finetunes_what_is_safe_and_not_certified_where_the_recipe_asks_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certify: bool, proof: str, finetuned: int
) -> None:
    path, called = written(tmp_path), []
    assert options_of(read_recipe(path, [f"penalty.certify={str(certify).lower()}"])).prove is certify

    def converted(options: Options, source: Path, place: Destination, **_: Any) -> Conversion:
        assert options.prove == certify and options.target == ("half" if certify else "auto")
        place.out.mkdir(parents=True)
        report = {"verdict": "safe", "proof": proof, "unsafe": []}
        return Conversion(report, place.out, None, Plan(family="t5"))

    def instead(*given: Any, **options: Any) -> Conversion:
        called.append(given)
        return Conversion({"verdict": "safe"}, tmp_path, None, Plan(family="t5"))

    path.write_text(path.read_text().replace("certify: true", f"certify: {str(certify).lower()}"))
    monkeypatch.setattr("bf16_to_fp16.finetuning.run.convert_by", converted)
    monkeypatch.setattr("bf16_to_fp16.finetuning.run.finetune", instead)
    convert_or_finetune(path, Options(), tmp_path / "hard", Destination(tmp_path / "out"))
    assert len(called) == finetuned
