"""Pipelines that read inner states of their encoders: a linear carries the inverse of their factor, a norm is named,
and what is not known is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import exhaustive, pipelines, tiny
from support.contract import layout_of
from support.pipelines import contents
from support.program import refused
from transformers import LlamaModel

from bf16_to_fp16 import UserError, convert_pipeline, undo_pipeline
from bf16_to_fp16.checkpoint.linears import rescale_columns
from bf16_to_fp16.checkpoint.pipeline import Pipeline, open_pipeline
from bf16_to_fp16.checkpoint.pipeline_classes import HIDREAM, PIPELINES, READ_OTHERWISE, Linear, Norm, Reading
from bf16_to_fp16.cli import main
from bf16_to_fp16.commands.convert import entered
from bf16_to_fp16.conversion.pipelines import met, of_norm
from bf16_to_fp16.ranges import ChannelRange, ModuleRange, NormRange
from bf16_to_fp16.report.answers import PipelineReport
from bf16_to_fp16.report.schema import Report, read

PROJECTION, POOLED = (each.weight for each in PIPELINES["HunyuanVideoPipeline"][0].meets if isinstance(each, Linear))
FILES = ("diffusion_pytorch_model-00001-of-00002.safetensors", "diffusion_pytorch_model-00002-of-00002.safetensors")
VARIANT = "diffusion_pytorch_model.fp16.safetensors"
WIDTH = 24  # of a Llama here


def hunyuan(folder: Path, dtype: torch.dtype = torch.bfloat16, projection: torch.Tensor | None = None) -> Path:
    """Write a pipeline like HunyuanVideo's, its transformer in two shards and a variant, and return it.

    projection: the weight of the linear that reads states position by position.
    """
    pipelines.make(folder, {"text_encoder": pipelines.llama()}, _class_name="HunyuanVideoPipeline")
    torch.manual_seed(0)
    small = torch.randn(16, WIDTH) / 256 if projection is None else projection
    first = {PROJECTION: small, "other.weight": torch.randn(1000, 600)}
    second = {POOLED: torch.randn(8, WIDTH) / 256, "last.bias": torch.randn(7)}
    shards = [{name: t.to(dtype) for name, t in shard.items()} for shard in (first, second)]
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    for name, tensors in zip(FILES, shards, strict=True):
        save_file(tensors, folder / "transformer" / name, {"format": "pt"})
    index = {name: file for file, shard in zip(FILES, shards, strict=True) for name in shard}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    both = {name: t.half() for shard in shards for name, t in shard.items()}
    save_file(both, folder / "transformer" / VARIANT)
    return folder


def set_index(folder: Path, **entries: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with such a pipeline, ``source``, and what it was converted to, ``out``."""
    folder = tmp_path_factory.mktemp("hunyuan")
    convert_pipeline(hunyuan(folder / "source"), folder / "out", run_model=False)
    return folder


# --- linears ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", exhaustive.beyond([torch.bfloat16], [torch.bfloat16, torch.float16, torch.float32]), ids=str
)
def test_both_linears_carry_the_inverse_and_give_the_same_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    source, out = hunyuan(tmp_path / "source", dtype), tmp_path / "out"
    before = contents(source)
    done = convert_pipeline(source, out, run_model=False)
    assert done.safe and contents(source) == before
    factor = done.encoders["text_encoder"].report["outputs"]["hidden_states"]["factor_log2"]
    assert factor < 0
    for name in (*FILES, VARIANT):
        theirs, ours = (load_file(folder / "transformer" / name) for folder in (source, out))
        for key, weight in theirs.items():
            assert ours[key].dtype == weight.dtype
            wanted = weight * 2.0**-factor if key in (PROJECTION, POOLED) else weight
            assert torch.equal(ours[key], wanted)
        assert not (out / "transformer" / name).samefile(source / "transformer" / name)
    states = []
    for folder in (source, out):
        model = LlamaModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
        with torch.no_grad():
            inner = model(torch.tensor([[5, 9, 2, 77]]), output_hidden_states=True).hidden_states[-3]
        states.append(inner @ load_file(folder / "transformer" / FILES[0])[PROJECTION].float().T)
    assert (states[1] - states[0]).norm() < 1e-5 * states[0].norm()


def test_the_report_names_what_is_read_and_the_files_that_were_written(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = read(PipelineReport, json.loads((converted / "out" / "fp16_pipeline.json").read_text()))
    assert [(e.encoder, e.states, e.component, e.linear) for e in report.readings] == [
        ("text_encoder", [-3], "transformer", PROJECTION),
        ("text_encoder", [-3], "transformer", POOLED),
    ]
    assert sorted(entry.name for entry in report.rescaled) == [f"transformer/{name}" for name in (*FILES, VARIANT)]
    listed = {entry.name: entry.sha256 for entry in report.output.files}
    assert all(listed[entry.name] == entry.sha256 != entry.source_sha256 for entry in report.rescaled)
    assert report.linked == 0 and not report.assumed and report.pipeline == "HunyuanVideoPipeline"
    assert main(["convert", str(converted / "source"), str(tmp_path / "out"), "--no-audit"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "HunyuanVideoPipeline reads hidden_states[-3] of text_encoder, 2^" in said
    assert "carry the inverse, so that the function is the same" in said and f"transformer/{FILES[0]}" in said


def test_undo_brings_the_linears_back_bit_for_bit_and_says_what_was_changed_since(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(converted / "out", tmp_path / "out"))
    back = undo_pipeline(out, tmp_path / "back")
    before, after = contents(converted / "source"), contents(back.out)
    assert {n: d for n, d in after.items() if n.startswith("transformer/")} == {
        n: d for n, d in before.items() if n.startswith("transformer/")
    }
    assert {*back.rescaled} == {f"transformer/{name}" for name in (*FILES, VARIANT)} and not back.changed
    file = out / "transformer" / FILES[1]
    save_file(load_file(file) | {"last.bias": torch.zeros(7)}, file)
    assert main(["undo", str(out), str(tmp_path / "again")]) == 0
    said = capsys.readouterr().out
    assert f"{FILES[1]} is without the powers of two again, was changed since" in said
    assert f"{FILES[0]} is without the powers of two again, bit for bit" in said


def test_columns_are_multiplied_by_the_layer_that_they_read(tmp_path: Path) -> None:
    file, weight = tmp_path / "model.safetensors", torch.randn(5, 12).bfloat16()
    save_file({"a": torch.arange(9.0), "w": weight, "z": torch.ones(2, 2)}, file)
    before = file.read_bytes()
    done = rescale_columns(file, {"w": [3, 0, -2]})
    after = load_file(file)
    factors = torch.tensor([8.0] * 4 + [1.0] * 4 + [0.25] * 4)
    assert torch.equal(after["w"], (weight * factors).bfloat16()) and torch.equal(after["a"], torch.arange(9.0))
    looked = rescale_columns(file, {"w": [-3, 0, 2]}, write=False)
    assert (looked.before, looked.after) == (done.after, done.before) and file.read_bytes() != before
    rescale_columns(file, {"w": [-3, 0, 2]})
    assert file.read_bytes() == before


def test_each_listed_layer_has_a_linear_of_its_own_and_the_last_state_keeps_its_factor() -> None:
    readings = HIDREAM[1].each({"transformer": {"llama_layers": [0, 2, 3, 3, -2]}})
    assert [reading.states for reading in readings] == [(1,), (3,), (4,), (4,), (-2,)]
    names = [what.weight for reading in readings for what in reading.meets if isinstance(what, Linear)]
    assert names == [f"caption_projection.{i}.linear.weight" for i in range(5)]


@pytest.mark.parametrize(
    ("dtype", "weight", "words"),
    [
        (torch.float16, torch.full((16, WIDTH), 60000.0), "would leave the range of F16"),
        (torch.int8, torch.ones(16, WIDTH), "is I8, quantised"),
        (torch.bfloat16, torch.ones(16, 1, WIDTH), "a matrix with 1 equal block of columns belongs there"),
    ],
    ids=["overflow", "quantised", "no matrix"],
)
def test_a_linear_that_cannot_carry_it_exactly_is_refused_and_nothing_is_left(
    dtype: torch.dtype, weight: torch.Tensor, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hunyuan(tmp_path / "source", projection=weight)
    save_file({PROJECTION: weight.to(dtype)}, source / "transformer" / FILES[0])
    (source / "transformer" / VARIANT).unlink()
    before = contents(source)
    assert words in refused(capsys, "convert", source, tmp_path / "out", "--no-audit")
    assert [path.name for path in tmp_path.iterdir()] == ["source"] and contents(source) == before


def test_a_component_that_passes_fp16_there_is_to_be_loaded_in_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hunyuan(tmp_path / "source", projection=torch.ones(16, WIDTH))
    (source / "transformer" / VARIANT).unlink()
    assert main(["convert", str(source), str(tmp_path / "out"), "--no-audit", "--target", "norm-safe"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "transformer reaches over 65,504 there, so load it in bf16 or fp32" in said
    assert 'torch_dtype={"transformer": torch.bfloat16, "default": torch.float16})' in said


def test_a_linear_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hunyuan(tmp_path / "source")
    for name in (FILES[1], VARIANT):
        (source / "transformer" / name).rename(source / "transformer" / f"{name}.bin")
    for word in ("--no-audit", "--dry-run"):
        assert main(["convert", str(source), str(tmp_path / "out"), word]) == 2
        said = capsys.readouterr().err
        assert f"no safetensors file here has {POOLED}" in said and "--subfolder" in said
        assert "Bounding" not in said  # refused before the work


# --- norms -----------------------------------------------------------------------------------------------------------


def test_a_norm_is_named_with_the_eps_of_its_component_and_what_that_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pipelines.make(tmp_path / "z", {"text_encoder": pipelines.llama()}, _class_name="ZImagePipeline")
    (folder / "transformer" / "config.json").write_text('{"norm_eps": 0.001}')
    done = convert_pipeline(folder, tmp_path / "out", run_model=False)
    (entry,) = done.report["readings"]
    assert (entry["norm"], entry["eps"], entry["states"]) == ("cap_embedder.0", 0.001, [-2])
    assert entry.get("predicted") is None and not done.report["rescaled"]
    assert main(["convert", str(folder), str(tmp_path / "ran")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "through a norm with eps 0.001 (transformer's cap_embedder.0), which drifts: by about" in said


def test_the_cost_of_an_eps_is_what_the_norm_then_gives_otherwise() -> None:
    torch.manual_seed(0)
    states = torch.randn(500, 64, dtype=torch.float64) * torch.rand(500, 1, dtype=torch.float64)
    variances = torch.stack([states.square().mean(1), torch.full((500,), 1 / 500)], 1).double()
    eps, factor = 1e-5, -7

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(1, keepdim=True) + eps).sqrt()

    wanted = norm(states)
    measured = float((norm(states * 2.0**factor) - wanted).norm() / wanted.norm())
    assert NormRange(0.0, variances).drift(eps, factor) == pytest.approx(measured, rel=1e-9) and measured > 0.01


# --- what is not known -----------------------------------------------------------------------------------------------


def test_of_an_unknown_class_an_encoder_read_at_its_end_is_assumed_and_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = pipelines.make(tmp_path / "t5", {"text_encoder": pipelines.encoder()}, _class_name="NewPipeline")
    assert main(["convert", str(known), str(tmp_path / "out"), "--no-audit"]) == 0
    # Before the work, and in the result.
    for said in capsys.readouterr():
        assert "what NewPipeline reads of text_encoder is not known; taken to be its last states" in " ".join(
            said.split()
        )
    assert json.loads((tmp_path / "out" / "fp16_pipeline.json").read_text())["assumed"] == ["text_encoder"]
    other = pipelines.make(
        tmp_path / "llama", {"text_encoder": pipelines.llama()}, _class_name=["its_code", "NewPipeline"]
    )
    said = refused(capsys, "convert", other, tmp_path / "new")
    assert said.startswith("error: what NewPipeline reads of text_encoder is not known here, and inner states")
    assert f"bf16-to-fp16 convert {other} OUT --subfolder text_encoder" in said and not (tmp_path / "new").exists()
    whole = pipelines.make(tmp_path / "whole", {"text_encoder": tiny.build("t5")}, _class_name="NewPipeline")
    assert "inner states of a T5ForConditionalGeneration change" in refused(capsys, "convert", whole, tmp_path / "new")
    alone = ("convert", str(other), str(tmp_path / "new"), "--subfolder", "text_encoder", "--no-audit")
    assert main([*alone]) == 0


@pytest.mark.parametrize(
    "loaded",
    [
        ["transformers", "UMT5EncoderModel"],
        ["evil", "Class"],
        ["transformers", "AutoModel"],
        ["diffusers", "T5EncoderModel"],
    ],
    ids=".".join,
)
def test_a_class_that_does_not_fit_the_config_is_refused(
    loaded: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pipelines.make(tmp_path / "flux", {"text_encoder_2": pipelines.encoder()})
    set_index(folder, text_encoder_2=loaded)
    said = refused(capsys, "convert", folder, tmp_path / "out")
    assert f"loads text_encoder_2 as {'.'.join(loaded)}, which is no supported class for its config (t5: " in said
    assert "--subfolder text_encoder_2" in said


def test_a_class_that_reads_what_nothing_makes_up_for_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, reason in READ_OTHERWISE.items():
        encoders = {"text_encoder": tiny.small("qwen3_vl")}
        folder = pipelines.make(tmp_path / kind, encoders, _class_name=kind)
        assert f"{kind} {reason}; convert it alone" in refused(capsys, "convert", folder, tmp_path / "out")


def test_the_same_code_under_another_name_fits_and_is_planned_for_as_the_config_calls_it(tmp_path: Path) -> None:
    folder = pipelines.make(tmp_path / "dit", {"text_encoder_2": pipelines.encoder("mt5-encoder")})
    set_index(folder, _class_name="HunyuanDiTPipeline", text_encoder_2=["transformers", "T5EncoderModel"])
    done = convert_pipeline(folder, tmp_path / "out", run_model=False)
    assert done.safe and "--as" not in done.encoders["text_encoder_2"].report["command"]


def test_as_is_for_one_model(tmp_path: Path) -> None:
    folder = pipelines.make(tmp_path / "flux", {"text_encoder_2": pipelines.encoder()})
    with pytest.raises(UserError, match=r"--as is for one model.*--subfolder text_encoder_2"):
        convert_pipeline(folder, tmp_path / "out", as_class="T5EncoderModel")


def pipeline_of(converted: Path) -> tuple[Pipeline, Report]:
    """Return the source of a conversion as a pipeline, and the report of its encoder."""
    pipeline = open_pipeline(converted / "source", lambda _, name, config: config.get("model_type") == "llama")
    assert pipeline is not None
    return pipeline, read(Report, json.loads((converted / "out" / "text_encoder" / "fp16_report.json").read_text()))


def test_the_last_states_are_known_by_either_number(converted: Path) -> None:
    pipeline, report = pipeline_of(converted)
    linear = (Linear("transformer", PROJECTION),)
    for last, inner in ((-1, -2), (4, 3)):
        assert not met(pipeline, "text_encoder", [Reading("text_encoder", (last,), linear)], report, ())
        (entry,) = met(pipeline, "text_encoder", [Reading("text_encoder", (inner,), linear)], report, ())
        assert entry.factors_log2 == [report.outputs["hidden_states"].factor_log2] != [0]


def test_last_states_that_moved_are_refused_with_the_class_that_leaves_them(converted: Path) -> None:
    pipeline, report = pipeline_of(converted)
    moved = {**report.outputs, "last_hidden_state": report.outputs["hidden_states"]}
    with pytest.raises(UserError, match=r"reads the last states of text_encoder, which become 2\^-\d+ times"):
        met(pipeline, "text_encoder", [Reading("text_encoder")], report.model_copy(update={"outputs": moved}), ())


def test_states_whose_channels_have_factors_of_their_own_are_refused(converted: Path) -> None:
    pipeline, report = pipeline_of(converted)
    uneven = report.outputs["hidden_states"].model_copy(update={"factor_log2": [-3] * (WIDTH - 1) + [-4]})
    changed = report.model_copy(update={"outputs": {**report.outputs, "hidden_states": uneven}})
    with pytest.raises(
        UserError, match="hidden_states of text_encoder change by a factor that is not the same for all"
    ):
        met(pipeline, "text_encoder", [Reading("text_encoder", (-2,))], changed, ())


def test_what_a_norm_costs_is_that_of_the_states_that_enter_it() -> None:
    norm = Norm("transformer", "norm", 1e-3)
    states = [NormRange(1.0, torch.tensor([[10.0**-layer, 1.0]], dtype=torch.float64)) for layer in range(4)]
    for number, layer in ((-2, 3), (3, 3), (-5, 0), (0, 0), (-4, 1)):
        said = of_norm(norm, {}, [number], [-6], states)
        assert said["predicted"] == pytest.approx(states[layer].drift(1e-3, -6), rel=1e-12)
    assert of_norm(norm, {}, [-1], [0], states)["predicted"] is None
    worst = of_norm(norm, {}, [0, 3, -1], [-6, -6, 0], states)["predicted"]
    assert worst == max(states[layer].drift(1e-3, -6) for layer in (0, 3)) > states[0].drift(1e-3, -6)


def test_what_enters_a_layer_is_what_its_first_norm_sees() -> None:
    layout = layout_of(pipelines.llama())
    norms = [sublayer.norm for sublayer in layout.stacks()[0].sublayers]
    assert len(norms) == 8
    none = ChannelRange(torch.zeros(0), torch.zeros(0), 0)
    variances = torch.ones(1, 2, dtype=torch.float64)
    ranges = {name: ModuleRange(none, none, NormRange(float(i), variances)) for i, name in enumerate(norms)}
    assert [state.norm_max for state in entered(layout, ranges)] == [0.0, 2.0, 4.0, 6.0]
    assert entered(layout, None) == ()


def test_states_that_an_encoder_has_not_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pipelines.make(tmp_path / "klein", {"text_encoder": pipelines.llama()}, _class_name="Flux2KleinPipeline")
    save_file({"context_embedder.weight": torch.ones(4, 3 * WIDTH)}, folder / pipelines.TRANSFORMER)
    said = refused(capsys, "convert", folder, tmp_path / "out", "--no-audit")
    assert "reads hidden_states 9, 18, 27 of text_encoder, which has 4 layers" in said


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_states_of_an_encoder_that_sees_images_are_the_sources_or_it_is_refused(
    tied: bool, tmp_path: Path
) -> None:
    """Qwen-Image reads them of a class with a head, whose last states change where the embedding is the head."""
    model = tiny.build("qwen2_5_vl", tie_word_embeddings=tied)
    source = pipelines.make(tmp_path / "source", {"text_encoder": model}, _class_name="QwenImagePipeline")
    if tied:
        mend = r"reads the last states of text_encoder, .*; name Qwen2_5_VLModel for it in model_index.json, or "
        with pytest.raises(UserError, match=mend):
            convert_pipeline(source, tmp_path / "out", run_model=False)
        return
    done = convert_pipeline(source, tmp_path / "out", run_model=False)
    outputs = done.encoders["text_encoder"].report["outputs"]
    assert done.safe and done.report["readings"] == [] and outputs["hidden_states"]["factor_log2"] < 0
    assert outputs["last_hidden_state"]["factor_log2"] == 0
