"""Where eps is fixed or a reader has its own, or gains round, the output drifts by no more than is worth it."""

import json
import shutil
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from support import exhaustive, tiny, tools
from support.folders import compared
from support.forging import forge

from bf16_to_fp16 import UserError, convert, undo, verify
from bf16_to_fp16.bounds.arithmetic import full_precision
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion import planning
from bf16_to_fp16.conversion.convert import next_of
from bf16_to_fp16.conversion.options import Options
from bf16_to_fp16.conversion.planning import Opened, Search, decide, is_acceptable
from bf16_to_fp16.devices import Device
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.measuring.batch import Batch
from bf16_to_fp16.measuring.fidelity import compared as judged
from bf16_to_fp16.measuring.probe import batches, checkpoint_batches
from bf16_to_fp16.measuring.source_runs import drifted_outputs, observe_source
from bf16_to_fp16.measuring.stock import load, load_config
from bf16_to_fp16.numerics import headroom_bits
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.report.remedies import INEXACT, TOO_FEW_BITS
from bf16_to_fp16.report.schema import Report, read
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.results import Fidelity
from bf16_to_fp16.targets import MARGIN_BITS


def test_a_separated_pegasus_head_loads_in_stock_code(tmp_path: Path) -> None:
    """Stock Pegasus with tie_word_embeddings false ties nothing, so the embedding is written under all its names."""
    model = tiny.small("pegasus", encoder_layers=1)
    for parameter in model.model.decoder.layer_norm.parameters():
        parameter.data.mul_(2.0**18)
    source = tiny.save(model, tmp_path / "source")
    result = convert(source, tmp_path / "out", target="half", exact=True, run_model=False)
    assert result.plan.untied_head and result.out is not None
    names = set(load_file(result.out / "model.safetensors"))
    copies = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    assert {"lm_head.weight", "model.shared.weight"} | copies <= names
    assert compared(source, result.out) <= 1e-3
    back = load_file(undo(result.out, tmp_path / "back") / "model.safetensors")
    before = load_file(source / "model.safetensors")
    assert set(back) == set(before)
    (result.out / "fp16_report.json").unlink()  # now it is anyone's checkpoint with a head of its own
    again = convert(result.out, tmp_path / "again", run_model=False)
    assert again.out is not None and set(load_file(again.out / "model.safetensors")) == names
    assert compared(result.out, again.out) <= 1e-3
    assert set(load_file(undo(again.out, tmp_path / "first") / "model.safetensors")) == names


def test_a_gain_correction_takes_most_of_the_drift_out(first_batch: None, tmp_path: Path) -> None:
    source = tiny.save(small_early_large_late(), tmp_path / "source")
    corrected = convert(source, tmp_path / "out", margin_bits=3.25)
    again = convert(source, tmp_path / "again", plan=corrected.out, run_model=False)
    assert corrected.plan.residual_exponent == -6 and corrected.plan.gain_correction
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    report["plan"]["gain_correction"] = {}
    (tmp_path / "plain.json").write_text(json.dumps(report))
    plain = convert(source, tmp_path / "plain", plan=tmp_path / "plain.json", run_model=False)
    drifts: list[Any] = [each.plan.drift for each in (again, plain)]
    assert drifts[0].measured_kl <= drifts[1].measured_kl / 5
    one, other = (each.out / "model.safetensors" for each in (corrected, again) if each.out)
    assert one.read_bytes() == other.read_bytes()


def small_early_large_late() -> Any:
    """Return a Pegasus whose stream has a variance of about 1 in its first layers and passes 65504 only in its last."""
    model = tiny.small("pegasus", factor=1.0, encoder_layers=6, d_model=48, encoder_ffn_dim=64)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("shared.weight"):
                weight.normal_(0, 1 / 48**0.5)
            if "encoder.layers.5.fc2" in name:
                weight.mul_(190_000.0)
            weight.copy_(weight.bfloat16().float())
    return model


def test_a_pegasus_that_is_small_early_and_large_late_drifts_as_predicted(tmp_path: Path) -> None:
    source = tiny.save(small_early_large_late(), tmp_path / "source")
    result = convert(source, tmp_path / "out")
    drift: Any = result.plan.drift
    close = result.report["fidelity"]
    assert result.safe and result.plan.residual_exponent == -5
    # The least shrinking that clears the limits for every input: one step less would pass them.
    assert result.report["proof"] == "certified"
    stream = [s for s in result.report["certificate"]["sites"] if s["kind"] in ("residual", "output")]
    assert 0 <= min(s["headroom_bits"] for s in stream) < 1
    assert drift.measured_kl == close["kl_fp32"] != drift.predicted_kl
    assert 0 < drift.measured_max_logit_error <= 2 * drift.predicted_max_logit_error
    assert drift.predicted_kl <= close["kl_bf16"] / 64
    assert close["kl_fp16"] <= close["kl_bf16"] / 32


def test_simulated_drift_is_to_the_bit_the_rescaled_weights_under_the_stock_eps(tmp_path: Path) -> None:
    stock = tiny.KINDS["pegasus"]().eval()
    with torch.no_grad():  # eighths from −1 to 1, which every 16-bit format holds after small exponents
        for weight in stock.parameters():
            weight.copy_(torch.randint(-8, 9, weight.shape, generator=torch.Generator().manual_seed(0)) / 8)
    rescaled = deepcopy(stock)
    checkpoint = open_checkpoint(tiny.save(stock, tmp_path, torch.float32))
    layout = resolve(checkpoint)
    gains = {f"{layout.norms[0]}.weight": 1.3, f"{layout.norms[-1]}.weight": 0.7}
    plan = Plan(family="pegasus", residual_exponent=-6, gain_correction=gains)
    apply(rescaled, layout, plan)
    for path in layout.norms:
        norm: Any = rescaled.get_submodule(path)
        norm.eps = layout.eps
        norm.weight.data.copy_(norm.weight.data.half())
    ids = torch.arange(3, 63).view(3, 20)
    mask = torch.ones_like(ids)
    for model in (rescaled, stock):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        b, c = (m(input_ids=ids, decoder_input_ids=ids).logits.flatten(0, 1) for m in (rescaled, stock))
    (a,) = drifted_outputs(checkpoint, layout, plan, [Batch("ids", ids, mask, ids, mask)])
    assert torch.equal(a, b) and not torch.equal(a, c)


def searched(source: Path, most: int | None = None) -> Search:
    checkpoint, progress = open_checkpoint(source), Progress(quiet=True)
    inputs = judged(batches(load_config(source), None, None))[:most]
    observed = observe_source(checkpoint, inputs, progress, Device("cpu"))
    options = Options(margin_bits=1.25, target="half", max_length=512)
    return Search(Opened(checkpoint, resolve(checkpoint), inputs), options, progress, observed)


def test_a_drift_predicted_too_dear_is_tried_and_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.save(tiny.build("pegasus", encoder_layers=3, decoder_layers=2), tmp_path / "source")
    search, plans = searched(source, most=1), []
    for kl in (1.0, 0.0):
        with monkeypatch.context() as once:
            once.setattr(Search, "drift", lambda *_, kl=kl: Fidelity(kl_fp16=kl, kl_bf16=1.0))
            plans.append(search.best_plan()[1])
    refused, taken = plans
    assert [f.signal for f in refused.fallbacks] == ["residual"] and not taken.fallbacks
    assert taken.plan.residual_exponent < refused.plan.residual_exponent
    layout = search.opened.layout
    assert is_acceptable(search.drift(layout, taken.plan))
    assert not is_acceptable(search.drift(layout, taken.plan.model_copy(update={"residual_exponent": -9})))


def test_gains_are_corrected_only_where_outputs_come_nearer(tmp_path: Path) -> None:
    """What takes out the mean of the drift over all tokens can move the few on which the logits depend."""
    search = searched(tiny.save(tiny.build("bigbird_pegasus", 1), tmp_path / "source"))
    with patch.object(planning, "uncorrected", wraps=planning.uncorrected) as asked:
        chosen = search.best_plan()[1].plan
    corrected = asked.call_args.args[0].plan
    assert corrected.gain_correction and not chosen.gain_correction
    with_it, without = (search.drift(search.opened.layout, plan).kl_fp16 for plan in (corrected, chosen))
    assert without < with_it / 4


@pytest.mark.usefixtures("first_batch")
def test_a_stream_that_is_asked_for_is_not_moved_for_a_drift_that_may_be_taken(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("pegasus"), tmp_path / "source")
    assert convert(source, tmp_path / "out", stream=0, dry_run=True).plan.residual_exponent == 0


DEMOS = Path(str(files("bf16_to_fp16") / "demo_data"))


@pytest.mark.parametrize(("demo", "affordable"), [("t5-gated-bytes", True), ("gemma3-bytes", False)])
def test_gains_that_would_round_further_than_bf16_keep_no_margin_for_training(demo: str, affordable: bool) -> None:
    checkpoint = open_checkpoint(DEMOS / demo)
    layout = resolve(checkpoint)
    opened = Opened(checkpoint, layout, judged(checkpoint_batches(checkpoint, layout, None, 0))[:1])
    decided = decide(opened, Options(target="train"), Progress(quiet=True))
    assert decided.observed is not None
    reached = max(float(decided.observed.ranges[path].input.amax.max()) for path in opened.layout.streams_read)
    kept = headroom_bits(reached * 2.0**decided.plan.residual_exponent)
    assert kept >= MARGIN_BITS and (kept >= MARGIN_BITS + 2) == affordable


def test_a_proof_stands_for_the_margin_where_gains_would_round_further(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(DEMOS / "gemma3-bytes")
    layout = resolve(checkpoint)
    opened = Opened(checkpoint, layout, judged(checkpoint_batches(checkpoint, layout, None, 0))[:1])
    exponents = []
    for acceptable in (True, False):
        monkeypatch.setattr(planning, "is_acceptable", lambda drift, share=1.0, acceptable=acceptable: acceptable)
        decided = decide(opened, Options(target="half"), Progress(quiet=True))
        assert decided.planned is not None and not decided.planned.violations and not decided.planned.fallbacks
        exponents.append(decided.plan.residual_exponent)
    assert exponents == [-4, -3]


WIDE = tools.SHAPE | {"d_model": 128, "d_ff": 192, "d_kv": 16, "num_heads": 4, "num_layers": 3}
IDS = torch.arange(2, 90).view(4, 22)


def quiet_at_first(kind: str, eps: float = 1e-6) -> Any:
    """Return an encoder whose stream begins so small, beside what it comes to, that its first norm feels eps."""
    model = tiny.build(f"{kind}-encoder", **WIDE, layer_norm_epsilon=eps)
    with torch.no_grad():
        shared = model.shared.weight
        shared.mul_(0.25 / shared.square().mean().sqrt())
        shared.copy_(shared.bfloat16())
    return model


def read_by_wan(config: Any, file: Path) -> Any:
    made = tools.Wan(config)
    made.load_state_dict(load_file(file), strict=True)
    return made


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).double().square().sum() / wanted.double().square().sum())


@pytest.mark.usefixtures("first_batch")
def test_wan_with_an_eps_of_its_own_is_at_most_a_sixteenth_as_far_off_as_bf16(tmp_path: Path) -> None:
    model = quiet_at_first("umt5")
    out = tmp_path / "out.safetensors"
    result = convert(tiny.save(model, tmp_path / "source"), out, layout="wan")
    assert result.safe and result.plan.eps_held and result.plan.eps == 1e-6
    with torch.no_grad(), full_precision():
        wanted = model(IDS)[0]
        bf16 = error(model.bfloat16()(IDS)[0].float(), wanted)
        reader = read_by_wan(model.config, out)
        wide = error(reader(IDS), wanted)
        half = error(reader.half()(IDS).float(), wanted)
    assert wide < bf16 / 16 and half < bf16 / 16


def test_a_target_that_costs_more_than_bf16_is_never_safe(first_batch: None, tmp_path: Path) -> None:
    source = tiny.save(quiet_at_first("t5"), tmp_path / "source")
    result = convert(source, tmp_path / "out", eps="fixed", target="norm-safe")
    close = result.report["fidelity"]
    assert close["kl_fp16"] > close["kl_bf16"] and not result.safe
    entry, *_ = [entry for entry in result.report["unsafe"] if entry["kind"] == "inexact"]
    assert entry["reason"] == TOO_FEW_BITS and entry["remedy"] == INEXACT


def test_a_config_with_another_eps_than_the_tool_is_planned_for_the_tool(first_batch: None, tmp_path: Path) -> None:
    model, out = quiet_at_first("umt5", eps=3e-6), tmp_path / "out.safetensors"
    result = convert(tiny.save(model, tmp_path / "source"), out, layout="wan")
    assert result.plan.eps == open_checkpoint(out).config["layer_norm_epsilon"] == 1e-6
    with torch.no_grad(), full_precision():
        found = error(read_by_wan(model.config, out)(IDS), model(IDS)[0])
        assert found < error(model.bfloat16()(IDS)[0].float(), model.float()(IDS)[0])


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("held")
    source = tiny.save(tiny.small("llama"), folder / "source")
    return source, convert(source, folder / "out", eps="fixed")


def test_a_folder_for_a_reader_with_a_fixed_eps_keeps_the_configs(held: Any) -> None:
    source, result = held
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, result.out))
    assert before["rms_norm_eps"] == after["rms_norm_eps"] == result.plan.eps
    assert result.safe and result.plan.residual_exponent < 0 and result.report["plan"]["eps_held"] is True
    drift = result.plan.drift
    assert drift.predicted_kl == pytest.approx(drift.measured_kl, rel=0.1, abs=1e-12)
    assert drift.measured_kl < result.report["fidelity"]["kl_bf16"] / 128
    assert result.report["command"].endswith(" --eps fixed")
    # Where it ends unsafe the way out is to let the eps go.
    report = read(Report, result.report)
    assert next_of(Options(eps="fixed"), report, "source", "out").startswith("leave out --eps fixed, ")
    assert "--eps" not in next_of(Options(), report, "source", "out")


def test_its_drift_is_that_of_stock_code_with_the_eps_that_the_exponents_ask_for(held: Any) -> None:
    source, result = held
    norms, r = resolve(open_checkpoint(source)).norms, result.plan.residual_exponent
    ours, theirs = load(result.out, torch.float32), load(source, torch.float32)
    for path in norms:
        norm = theirs.get_submodule(path)
        norm.variance_epsilon *= 4.0**-r
    with torch.no_grad(), full_precision():
        assert error(ours(IDS).logits, theirs(IDS).logits) < 1e-12


def test_verify_and_undo_hold_the_eps_too(held: Any, tmp_path: Path) -> None:
    source, result = held
    found = verify(result.out, original=source, run_model=False)
    assert found["problems"] == [] and found["checks"]["replay"] == "passed"
    back = undo(result.out, tmp_path / "back")
    one, other = (load_file(folder / "model.safetensors") for folder in (source, back))
    lost, weights = sum(int((one[name] != other[name]).sum()) for name in other), result.report["weights"]
    assert set(one) == set(other) and lost <= round(weights["elements"] * (1 - weights["lossless_fraction"]))
    assert json.loads((back / "config.json").read_text())["rms_norm_eps"] == result.plan.eps


def test_a_plan_is_replayed_with_its_own_eps_and_refused_for_another_reader(held: Any, tmp_path: Path) -> None:
    source, result = held
    again = convert(source, tmp_path / "again", plan=result.out, run_model=False)
    assert again.out is not None
    assert again.plan.eps_held and again.plan.eps == result.plan.eps
    assert (again.out / "model.safetensors").read_bytes() == (result.out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="already decides what --eps sets; leave out one of the two"):
        convert(source, tmp_path / "x", plan=result.out, eps="fixed", run_model=False)
    encoder = tiny.save(tiny.build("umt5-encoder", num_layers=1), tmp_path / "encoder")
    rescaled = convert(encoder, tmp_path / "rescaled", run_model=False)
    with pytest.raises(UserError, match=r"the plan is for norms with .*; leave out --plan"):
        convert(encoder, tmp_path / "x.safetensors", plan=rescaled.out, layout="wan", run_model=False)
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.safetensors").exists()


def test_a_plan_whose_eps_is_not_what_it_says_is_found_out(held: Any, tmp_path: Path) -> None:
    _, result = held
    folder = Path(shutil.copytree(result.out, tmp_path / "out"))
    forge(folder, {"plan": result.report["plan"] | {"eps_held": False}})
    found = verify(folder, run_model=False)["problems"]
    assert any(problem["reason"].startswith(f"has an eps of {result.plan.eps}, not ") for problem in found)


@pytest.mark.parametrize("kind", exhaustive.beyond(["qwen3"], ["qwen3", "t5gemma", "pegasus"]))
def test_other_families_take_it_as_well(first_batch: None, kind: str, tmp_path: Path) -> None:
    """Norms of queries and keys, norms behind a sublayer, and norms whose eps no config can say at any rate."""
    source = tiny.save(tiny.small(kind), tmp_path / "source")
    result = convert(source, tmp_path / "out", eps="fixed")
    close = result.report["fidelity"]
    assert result.safe and close["kl_fp16"] < close["kl_bf16"]
    assert result.plan.eps_held == (kind != "pegasus")
    assert verify(tmp_path / "out", original=source, run_model=False)["problems"] == []


@pytest.mark.usefixtures("first_batch")
def test_gains_stored_less_1_are_corrected_as_was_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "uncorrected", lambda planned: planned)  # which is nearer here
    result = convert(tiny.save(tiny.small("gemma"), tmp_path / "source"), tmp_path / "out", eps="fixed")
    drift = result.plan.drift
    assert result.plan.gain_correction and drift is not None
    assert drift.measured_kl == pytest.approx(drift.predicted_kl, rel=1e-3)
