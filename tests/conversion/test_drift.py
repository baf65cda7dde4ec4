"""Where eps is fixed or gains round, the output drifts: by what was predicted, and by no more than is worth it."""

import json
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tiny
from support.folders import compared

from bf16_to_fp16 import convert, undo
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion import planning
from bf16_to_fp16.conversion.options import Options
from bf16_to_fp16.conversion.planning import Opened, Search, decide, is_acceptable
from bf16_to_fp16.devices import Device
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.measuring.batch import Batch
from bf16_to_fp16.measuring.fidelity import compared as judged
from bf16_to_fp16.measuring.probe import batches, checkpoint_batches
from bf16_to_fp16.measuring.source_runs import drifted_outputs, observe_source
from bf16_to_fp16.measuring.stock import load_config
from bf16_to_fp16.numerics import headroom_bits
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.rescaling.apply import apply
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.results import Fidelity
from bf16_to_fp16.targets import MARGIN_BITS


def test_a_separated_pegasus_head_loads_in_stock_code(tmp_path: Path) -> None:
    """Stock Pegasus with tie_word_embeddings false ties nothing, so the embedding is written under all its names."""
    model = tiny.small("pegasus")
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


@pytest.mark.usefixtures("first_batch")
def test_a_gain_correction_takes_most_of_the_drift_out(tmp_path: Path) -> None:
    source = tiny.save(small_early_large_late(), tmp_path / "source")
    corrected = convert(source, tmp_path / "out", margin_bits=3.25)
    assert corrected.plan.residual_exponent == -6 and corrected.plan.gain_correction
    report = json.loads((tmp_path / "out" / "fp16_report.json").read_text())
    report["plan"]["gain_correction"] = {}
    (tmp_path / "plain.json").write_text(json.dumps(report))
    plain = convert(source, tmp_path / "plain", plan=tmp_path / "plain.json")
    drifts: list[Any] = [each.plan.drift for each in (corrected, plain)]
    assert drifts[0].measured_kl <= drifts[1].measured_kl / 5
    again = convert(source, tmp_path / "again", plan=corrected.out, run_model=False)
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


def searched(source: Path) -> Search:
    checkpoint, progress = open_checkpoint(source), Progress(quiet=True)
    inputs = batches(load_config(source), None, None)
    observed = observe_source(checkpoint, inputs, progress, Device("cpu"))
    options = Options(margin_bits=1.25, target="half", max_length=512)
    return Search(Opened(checkpoint, resolve(checkpoint), inputs), options, progress, observed)


def test_a_drift_predicted_too_dear_is_tried_and_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.save(tiny.build("pegasus", encoder_layers=3, decoder_layers=2), tmp_path / "source")
    search, plans = searched(source), []
    for kl in (1.0, 0.0):
        with monkeypatch.context() as patch:
            patch.setattr(Search, "drift", lambda *_, kl=kl: Fidelity(kl_fp16=kl, kl_bf16=1.0))
            plans.append(search.best_plan()[1])
    refused, taken = plans
    assert [f.signal for f in refused.fallbacks] == ["residual"] and not taken.fallbacks
    assert taken.plan.residual_exponent < refused.plan.residual_exponent
    layout = search.opened.layout
    assert is_acceptable(search.drift(layout, taken.plan))
    assert not is_acceptable(search.drift(layout, taken.plan.model_copy(update={"residual_exponent": -9})))


def test_gains_are_corrected_only_where_outputs_come_nearer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes out the mean of the drift over all tokens can move the few on which the logits depend."""
    search = searched(tiny.save(tiny.build("bigbird_pegasus", 1), tmp_path / "source"))
    chosen = search.best_plan()[1].plan
    monkeypatch.setattr(planning, "uncorrected", lambda planned: planned)
    corrected = search.best_plan()[1].plan
    assert corrected.gain_correction and not chosen.gain_correction
    with_it, without = (search.drift(search.opened.layout, plan).kl_fp16 for plan in (corrected, chosen))
    assert without < with_it / 4


@pytest.mark.usefixtures("first_batch")
def test_a_stream_that_is_asked_for_is_not_moved_for_a_drift_that_may_be_taken(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("pegasus"), tmp_path / "source")
    assert convert(source, tmp_path / "out", stream=0).plan.residual_exponent == 0


DEMOS = Path(str(files("bf16_to_fp16") / "demo_data"))


@pytest.mark.parametrize(("demo", "affordable"), [("t5-gated-bytes", True), ("gemma3-bytes", False)])
def test_gains_that_would_round_further_than_bf16_keep_no_margin_for_training(demo: str, affordable: bool) -> None:
    checkpoint = open_checkpoint(DEMOS / demo)
    layout = resolve(checkpoint)
    opened = Opened(checkpoint, layout, judged(checkpoint_batches(checkpoint, layout, None, 0))[:1])
    decided = decide(opened, Options(target="train"), Progress(quiet=True))
    assert decided.observed is not None and [("no further margin" in note) for note in decided.notes] == (
        [] if affordable else [True]
    )
    reached = max(float(decided.observed.ranges[path].input.amax.max()) for path in opened.layout.streams_read)
    kept = headroom_bits(reached * 2.0**decided.plan.residual_exponent)
    assert kept >= MARGIN_BITS and (kept >= MARGIN_BITS + 2) == affordable
