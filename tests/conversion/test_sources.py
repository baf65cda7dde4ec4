"""What convert takes and gives back: dtypes, shards, pickles, parts that a file lacks, and values that it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny
from support.folders import rewritten

from bf16_to_fp16 import UserError, cli, convert, undo, verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.checkpoint.writer import TensorStats, Written
from bf16_to_fp16.conversion.undo import config_before
from bf16_to_fp16.devices import Device
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.source_runs import observe_source
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.report.build import weight_counts
from bf16_to_fp16.report.schema import Source
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.results import dump


def test_a_true_fp32_source_is_converted_and_its_ratio_reported(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("gated", dtype=torch.float32), tmp_path / "source", torch.float32)
    report = convert(source, tmp_path / "out", run_model=False).report
    assert report["verdict"] == "safe" and report["source"]["dtype"] == "F32"
    assert report["weights"]["lossless_fraction"] < 0.5
    assert report["fidelity"]["kl_fp16"] <= report["fidelity"]["kl_bf16"] / 24


def test_mixed_dtypes_come_back_as_they_were(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    norms = [n for n in tensors if "layer_norm" in n]
    save_file({n: t.float() if n in norms else t for n, t in tensors.items()}, source / "model.safetensors")
    out: Any = convert(source, tmp_path / "out", run_model=False).out
    back = load_file(undo(out, tmp_path / "back") / "model.safetensors")
    assert {back[n].dtype for n in norms} == {torch.float32}
    assert all(torch.equal(back[n].float(), tensors[n].float()) for n in back)
    assert not (tmp_path / "back" / "README.md").exists()  # the source had none, and the conversion's card is not its


def test_the_probe_runs_a_decoder_deeper_than_the_encoder() -> None:
    """Stock code cannot generate with a cache then: it makes one layer of cache per encoder layer."""
    model = tiny.small("gated", num_layers=1, num_decoder_layers=3)
    probe = batches(model.config, None, None)
    assert any(batch.generate for batch in probe)
    for batch in probe:
        run_batch(model, batch)


def test_a_pickled_checkpoint_is_read_safely_and_left_behind(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    torch.save(tensors | {"lm_head.weight": tensors["shared.weight"]}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    result = convert(source, tmp_path / "out", run_model=False)
    assert result.safe and result.out is not None
    assert not (result.out / "pytorch_model.bin").exists()
    assert "lm_head.weight" in result.report["source"]["dropped"]


def test_positions_that_a_file_lacks_are_made_scaled_and_written(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("pegasus", factor=60000.0, encoder_layers=1), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if "embed_positions" not in n and n != "final_logits_bias"}
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    result = convert(source, tmp_path / "out", run_model=False)
    assert result.plan.residual_exponent < 0 and result.out is not None
    written = load_file(result.out / "model.safetensors")
    name = "model.encoder.embed_positions.weight"
    exact = load(source, torch.float32).model.encoder.embed_positions.weight
    scaled = (exact.double() * 2.0**result.plan.residual_exponent).half()
    assert torch.equal(written[name], scaled)
    assert set(result.report["source"]["made"]) == {name, name.replace("encoder", "decoder")}
    weights = result.report["weights"]  # of what the file has
    assert weights["elements"] == sum(t.numel() for t in kept.values()) and 0.9 < weights["lossless_fraction"] <= 1
    back = load_file(undo(result.out, tmp_path / "back") / "model.safetensors")
    assert set(back) == set(kept)


def test_generated_tensors_do_not_count_as_carried_over() -> None:
    """Positions that a file lacks have no source to be equal to; only the largest written weight is theirs too."""
    source = ModelTensors(tiny.small("pegasus"))
    source.tensors = {name: info for name, info in source.tensors.items() if "embed_positions" not in name}
    layout = resolve(source)
    made = [name for name, tensor in layout.tensors.items() if tensor.source is None]
    stats = dict.fromkeys(layout.tensors, TensorStats(10, 9, 6, 1, 0, 3.0, 8))
    stats |= dict.fromkeys(made, TensorStats(1000, 300, 200, 500, 7, 5.0, 900))
    stored = len(layout.tensors) - 2
    assert len(made) == 2 and dump(weight_counts(layout, Plan(family="t5"), Written(stats, (), {}))) == {
        "elements": 10 * stored,
        "lossless_fraction": 0.9,
        "normal_fraction": 0.75,
        "flushed_to_zero": stored,
        "nonfinite": 0,
        "amax": 5.0,
    }


@pytest.mark.parametrize(("up", "value"), [(1.0, float("nan")), (1e30, 1e30)], ids=["NaN weight", "finite weights"])
def test_a_source_not_finite_in_fp32_is_refused_where_it_breaks(up: float, value: float, tmp_path: Path) -> None:
    model = tiny.small("t5-encoder")
    broken = model.encoder.block[1].layer[1].DenseReluDense
    broken.wi_1.weight.data.mul_(up)
    broken.wo.weight.data[0, 0] = value
    checkpoint = open_checkpoint(tiny.save(model, tmp_path / "source", torch.float32))
    inputs = batches(model.config, None, None)[:1]
    with pytest.raises(UserError, match=r"encoder\.block\.1\.layer\.1\.DenseReluDense\.wo gives inf or NaN in fp32"):
        observe_source(checkpoint, inputs, Progress(quiet=True), Device("cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_not_finite_is_named_though_a_replayed_plan_observes_nothing(value: float, tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5-encoder"), tmp_path / "source")
    with rewritten(source / "model.safetensors") as tensors:
        name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors[name][0, 0] = value
    (tmp_path / "plan.json").write_text(json.dumps({"plan": Plan(family="t5", residual_exponent=-5).model_dump()}))
    with pytest.raises(UserError, match=rf"tensor {name}: 1 of 27 weights are inf, NaN"):
        convert(source, tmp_path / "out", plan=tmp_path / "plan.json")
    assert not (tmp_path / "out").exists()


def test_a_replayed_plan_that_takes_a_weight_past_65504_is_what_the_error_names(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5"), tmp_path / "source")
    (tmp_path / "plan.json").write_text(json.dumps({"plan": Plan(family="t5", residual_exponent=-24).model_dump()}))
    with pytest.raises(UserError, match=r"\d+ of 24 weights are .* over 65504 under this plan; .*leave out --plan"):
        convert(source, tmp_path / "out", plan=tmp_path / "plan.json")
    assert not (tmp_path / "out").exists()


def test_undo_brings_the_sources_card_back_and_not_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, back = tiny.save(tiny.small("t5-encoder"), tmp_path / "source"), tmp_path / "back"
    (source / "README.md").write_text("the publisher's words")
    convert(source, tmp_path / "out", run_model=False)
    assert cli.main(["undo", str(tmp_path / "out"), str(back)]) == 0
    assert (back / "README.md").read_text() == "the publisher's words" and not (back / "SOURCE_README.md").exists()
    assert "bit for bit" in capsys.readouterr().out


def test_a_config_that_names_no_class_is_read_as_the_one_that_is_asked_for(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5-encoder"), tmp_path / "source")
    with rewritten(source / "config.json") as config:
        config["architectures"] = None
    with pytest.raises(UserError, match=r"config\.json names no class; add"):
        convert(source, tmp_path / "out", run_model=False)
    convert(source, tmp_path / "out", as_class="T5EncoderModel", run_model=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["T5EncoderModel"]


def test_the_command_in_the_report_names_no_folders_of_this_machine(tmp_path: Path) -> None:
    """Two folders of one name would be one, seen from another place."""
    source = tiny.save(tiny.small("t5-encoder"), tmp_path / "source")
    report = convert(source, tmp_path / "beside" / "source", max_length=64, run_model=False).report
    assert report["command"] == "bf16-to-fp16 convert source source-fp16 --no-audit --max-length 64"
    assert report["certificate"]["max_length"] == 64 and report["inputs"] is None
    assert verify(tmp_path / "beside" / "source", run_model=False)["certificate"]["max_length"] == 64


@pytest.mark.parametrize(("kind", "exponent"), [("t5", 40), ("pegasus", 61)])
def test_weights_that_no_exponent_holds_are_one_line(kind: str, exponent: int, tmp_path: Path) -> None:
    model = tiny.small(kind)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 2:
                tensor.mul_(2.0**exponent / float(tensor.abs().max()))
    source = tiny.save(model, tmp_path / "source")
    with pytest.raises(UserError, match=r"no exponent (brings|can)") as caught:
        convert(source, tmp_path / "out", run_model=False)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_frequencies_that_older_files_hold_are_dropped_as_stock_code_does(tmp_path: Path) -> None:
    """Files of the first Llamas have one for each layer (transformers #35255)."""
    source = tiny.save(tiny.small("llama"), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_emb.inv_freq")
    save_file(weights | {name: torch.ones(4) for name in names}, source / "model.safetensors", {"format": "pt"})
    done = convert(source, tmp_path / "out", run_model=False)
    assert done.safe and done.report["source"]["dropped"] == dict.fromkeys(names, "transformers classes ignore it")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights.keys()
    (file := tmp_path / "out" / "fp16_report.json").write_text(file.read_text().replace("ignore it", "leave it out"))
    assert verify(tmp_path / "out", original=source, run_model=False)["checks"]["replay"] == "passed"
    for name in ("model.layers.99.self_attn.rotary_emb.inv_freq", "other.rotary_emb.inv_freq"):
        save_file(weights | {name: torch.ones(4)}, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=f"tensor {name} is not part of"):
            convert(source, tmp_path / "other", run_model=False)


def test_keys_of_the_config_that_were_changed_added_or_taken_out_come_back() -> None:
    changes: dict[str, Any] = {"dtype": {"before": "bfloat16", "after": "float16"}, "added": {"after": 1}}
    changes["taken"] = {"before": 2}
    before = config_before({"dtype": "float16", "added": 1, "d_ff": 3}, Source(config_changes=changes))
    assert before == {"dtype": "bfloat16", "d_ff": 3, "taken": 2}


def test_further_chat_templates_are_carried_over(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("llama"), tmp_path / "source")
    for name, text in (("chat_template.jinja", "plain"), ("additional_chat_templates/tool_use.jinja", "tools")):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    (source / "onnx").mkdir()
    done = convert(source, tmp_path / "out", run_model=False)
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert done.report["source"]["left_out"] == ["model.safetensors", "onnx/"]
    assert verify(tmp_path / "out", run_model=False)["verified"]
    undo(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
