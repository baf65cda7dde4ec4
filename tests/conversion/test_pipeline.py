"""Whole pipelines: every text encoder is converted in its place, all else is there byte for byte."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support import pipelines, tiny
from support.folders import rewritten
from support.hub_server import HubServer
from support.pipelines import TRANSFORMER, contents
from support.program import refused
from transformers import AutoTokenizer, ByT5Tokenizer

from bf16_to_fp16 import UserError, convert, convert_pipeline
from bf16_to_fp16.checkpoint.pipeline_files import files_loaded, variant_of
from bf16_to_fp16.cli import main

IDS = torch.tensor([[5, 9, 2, 77, 1]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline like SD3's: two encoders of the T5 family, of which one has the variant fp16 and one is in shards."""
    folder = tmp_path_factory.mktemp("theirs") / "sd"
    encoders = {"text_encoder": pipelines.encoder(), "text_encoder_3": pipelines.encoder("umt5-encoder", seed=1)}
    pipelines.make(folder, encoders)
    shutil.rmtree(folder / "text_encoder_3")
    tiny.save(encoders["text_encoder_3"], folder / "text_encoder_3", max_shard_size="20KB")
    for name in ("text_encoder", "text_encoder_3"):
        encoders[name].to(torch.float16).save_pretrained(folder / name, variant="fp16", max_shard_size="20KB")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("theirs")
    return folder


@pytest.fixture(scope="module")
def out(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ours") / "sd-fp16"
    assert main(["convert", str(source), str(out), "--no-audit"]) == 0
    return out


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return pipelines.make(tmp_path / "flux", {"text_encoder_2": pipelines.encoder()})


def states(folder: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    library, kind = json.loads((folder / "model_index.json").read_text())[name]
    assert library == "transformers"
    model = getattr(transformers, kind).from_pretrained(folder, subfolder=name, dtype=dtype).to(dtype)
    with torch.no_grad():
        return model.eval()(IDS)[0].float()


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_3"])
def test_stock_code_loads_the_converted_encoder(name: str, source: Path, out: Path) -> None:
    assert not list((out / name).glob("*fp16.*safetensors"))  # the source's variant, which overflows
    wanted = states(source, name, torch.float32)
    # The stock class clamps what overflows, so that the source's are wrong and finite.
    for folder, least, most in ((source, 0.2, 2), (out, 0, 0.01)):
        error = (states(folder, name, torch.float16) - wanted).norm() / wanted.norm()
        assert least <= error < most


def test_the_rest_is_byte_for_byte_and_large_files_take_no_space(source: Path, out: Path) -> None:
    before, after = contents(source), contents(out)
    rest = {name for name in before if not name.startswith(("text_encoder/", "text_encoder_3/", ".git/"))}
    assert len(rest) > 10 and {n: before[n] for n in rest} == {n: after[n] for n in rest}
    assert {n for n in after if not n.startswith(("text_encoder/", "text_encoder_3/"))} == {*rest, "fp16_pipeline.json"}
    assert (out / TRANSFORMER).samefile(source / TRANSFORMER)
    # What people edit is not shared, and nothing is a symbolic link, which a move would break.
    assert not (out / "model_index.json").samefile(source / "model_index.json")
    assert not [path for path in out.rglob("*") if path.is_symlink()]


def test_report_page_card_and_path_name_the_subfolder(out: Path) -> None:
    for name in ("text_encoder", "text_encoder_3"):
        report = json.loads((out / name / "fp16_report.json").read_text())
        assert (report["source"]["path"], report["source"]["subfolder"]) == (f"sd/{name}", name)
        assert f"<title>sd/{name}" in (out / name / "fp16_report.html").read_text()
        assert f"# `sd/{name}` in fp16" in (out / name / "README.md").read_text()
    whole = json.loads((out / "fp16_pipeline.json").read_text())
    verdicts = {entry["subfolder"]: entry["verdict"] for entry in whole["encoders"]}
    assert verdicts == {"text_encoder": "safe", "text_encoder_3": "safe"}
    assert whole["left_out"] == [".git/"] and whole["command"] == "bf16-to-fp16 convert sd sd-fp16 --no-audit"


def test_every_part_is_verified_by_its_name(out: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "verify", out)
    assert said.endswith(
        f"has no fp16_report.json, but folders inside it do; give {out / 'text_encoder'} or {out / 'text_encoder_3'}"
    )
    original = ("--original", str(source / "text_encoder_3"))
    assert main(["verify", str(out), "--subfolder", "text_encoder_3", "--no-audit", *original]) == 0
    assert main(["certify", str(out), "--subfolder", "text_encoder"]) == 0
    for command in ("audit", "certify"):
        assert "name one with --subfolder: text_encoder or text_encoder_3" in refused(capsys, command, out)
    assert str(out / "text_encoder_3") in refused(capsys, "publish", out, "me/sd", "--dry-run")
    assert "is a converted pipeline already" in refused(capsys, "convert", out, f"{out}-2")


def test_one_unsafe_encoder_makes_the_whole_pipeline_unsafe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = pipelines.encoder(seed=2)
    with torch.no_grad():  # scores, which no exponent moves
        for part in ("q", "k"):
            getattr(broken.encoder.block[0].layer[0].SelfAttention, part).weight.mul_(2000)
    folder = pipelines.make(tmp_path / "sd", {"text_encoder": pipelines.encoder(), "text_encoder_2": broken})
    told = tmp_path / "told.json"
    assert main(["convert", str(folder), str(tmp_path / "out"), "--no-audit", "--json", str(told)]) == 1
    said = json.loads(told.read_text())
    assert said["verdict"] == "unsafe"
    assert [said["reports"][e["subfolder"]]["verdict"] for e in said["encoders"]] == ["safe", "unsafe"]
    printed = capsys.readouterr().out
    assert "pipeline: unsafe: text_encoder_2 is not safe" in printed
    assert f"bf16-to-fp16 convert {folder} OUT --subfolder text_encoder_2" in printed


def test_text_is_read_with_the_tokenizer_that_the_pipeline_has_for_the_encoder(small: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a lighthouse in a storm\nthree red cubes\n")
    other = ByT5Tokenizer(extra_ids=0)  # another encoder's, to which these words are one token each
    other.add_tokens(["lighthouse", "storm", "three", "cubes"])
    other.save_pretrained(small / "tokenizer")
    done = convert_pipeline(small, tmp_path / "out", data=str(tmp_path / "text.txt"))
    report = done.encoders["text_encoder_2"].report
    assert report["inputs"]["data"]["rows"] == 2 and report["regimes"]["half"]["nonfinite"] == 0
    (batch,) = [batch for batch in report["inputs"]["batches"] if batch["kind"] == "data"]
    assert batch["encoder"] == len(b"a lighthouse in a storm") + 1
    carried = AutoTokenizer.from_pretrained(tmp_path / "out" / "text_encoder_2")
    assert len(carried("three").input_ids) == len(b"three") + 1


def test_one_encoder_is_brought_back_by_its_name_and_a_whole_pipeline_says_so(
    source: Path, out: Path, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["undo", str(out / "text_encoder"), str(tmp_path / "one"), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == str(tmp_path / "one") and told["holds"].startswith("the weights from before")
    assert contents(tmp_path / "one")["model.safetensors"] == contents(source)["text_encoder/model.safetensors"]
    whole = refused(capsys, "undo", out, tmp_path / "back")
    assert f"give {out}/text_encoder or {out}/text_encoder_3" in whole
    assert "convert did not write it; give a converted folder" in refused(capsys, "undo", small, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_copies_where_no_link_can_be(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        copied = convert_pipeline(small, tmp_path / "copied", run_model=False)
    assert not (tmp_path / "copied" / TRANSFORMER).samefile(small / TRANSFORMER) and copied.report["linked"] == 0
    assert (tmp_path / "copied" / TRANSFORMER).read_bytes() == (small / TRANSFORMER).read_bytes()


def test_what_is_in_the_way_is_one_line(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "older").write_text("older")
    for options in ((), ("--force",)):
        said = refused(capsys, "convert", small, tmp_path / "out", *options)
        assert "out exists and holds older" in said and "--force" not in said
    for out in (small, small / "out"):
        assert "overlaps the source" in refused(capsys, "convert", small, out, "--force")
    said = refused(capsys, "convert", small, tmp_path / "new", "--finetune", small / "model_index.json")
    assert "--finetune takes one model" in said
    one = small / "text_encoder_2"
    with pytest.raises(UserError, match=r"has no model_index\.json, so it is not a pipeline"):
        convert_pipeline(one, tmp_path / "new")
    with pytest.raises(UserError, match=r"--as works on one model.*--subfolder text_encoder_2"):
        convert_pipeline(small, tmp_path / "new", as_class="T5EncoderModel")
    (tmp_path / "out" / "older").unlink()
    assert main(["convert", str(small), str(tmp_path / "out"), "--no-audit"]) == 0
    assert "give --force to replace it" in refused(capsys, "convert", small, tmp_path / "out")
    assert main(["convert", str(small), str(tmp_path / "out"), "--no-audit", "--force"]) == 0
    (tmp_path / "out" / "text_encoder_2" / "mine.txt").write_text("mine")
    before = contents(tmp_path / "out")
    assert "holds text_encoder_2/mine.txt" in refused(capsys, "convert", small, tmp_path / "out", "--force")
    assert contents(tmp_path / "out") == before
    (tmp_path / "taken").write_text("mine")
    assert main(["convert", str(small), str(tmp_path / "taken"), "--dry-run", "--no-audit"]) == 0
    assert main(["convert", str(small), "--dry-run", "--no-audit"]) == 0
    assert "text_encoder_2" in capsys.readouterr().out and not (tmp_path / "new").exists()


WEIGHTS = "text_encoder_2/model.safetensors"
REFUSED: tuple[tuple[Callable[[Path], object], str], ...] = (
    (lambda folder: (folder / WEIGHTS).write_bytes(b"cut short"), WEIGHTS),
    (
        lambda folder: (folder / WEIGHTS).rename(folder / "text_encoder_2/model.fp16.safetensors"),
        "rename model.fp16.safetensors to model.safetensors",
    ),
    (lambda folder: (folder / "vae" / "notes.txt").symlink_to(__file__), "outside the folder"),
    (lambda folder: (folder / "vae" / "loop").symlink_to(folder), "is a link to a folder; put"),
    (lambda folder: shutil.rmtree(folder / "text_encoder_2"), "this pipeline has no text encoder that convert knows"),
    (
        lambda folder: (folder / "model_index.json").write_text('{"../vae": ["diffusers", "AModel"]}'),
        "'../vae' is not the name of a folder",
    ),
)


@pytest.mark.parametrize(("damage", "said"), REFUSED)
def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(
    damage: Callable[[Path], object], said: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(small)
    before = sorted(small.rglob("*"))
    assert said in refused(capsys, "convert", small, tmp_path / "out", "--no-audit")
    assert [path.name for path in tmp_path.iterdir()] == [small.name] and sorted(small.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("model-00001-of-00002.safetensors", None),
        ("model.safetensors.index.json", None),
        ("model.fp16-00001-of-00002.safetensors", "fp16"),
        ("model-00001-of-00002.fp16.safetensors", "fp16"),
        ("model.safetensors.index.fp16.json", "fp16"),
        ("diffusion_pytorch_model.non_ema.bin", "non_ema"),
    ],
)
def test_the_variant_of_a_file_is_in_its_name(name: str, variant: str | None) -> None:
    assert variant_of(name) == variant


def test_of_a_repository_only_what_from_pretrained_uses_is_wanted() -> None:
    names = [
        *("model_index.json", "README.md", "flux1-dev.safetensors", "picture.png", "LICENSE.md"),
        *("vae/config.json", "vae/diffusion_pytorch_model.bin", "vae/diffusion_pytorch_model.safetensors"),
        *("vae/diffusion_pytorch_model.fp16.safetensors", "vae/flax_model.msgpack", "vae/onnx/model.onnx"),
        *("unet/config.json", "unet/diffusion_pytorch_model.fp16.bin", "vae_decoder/model.onnx"),
        *("tokenizer_2/spiece.model", "tokenizer_2/tokenizer.json", "old/x.json"),
    ]
    assert files_loaded(names, ["vae", "unet", "tokenizer_2"]) == sorted(
        [
            *("model_index.json", "README.md", "LICENSE.md"),
            *("vae/config.json", "vae/diffusion_pytorch_model.safetensors"),
            *("unet/config.json", "unet/diffusion_pytorch_model.fp16.bin"),
            *("tokenizer_2/spiece.model", "tokenizer_2/tokenizer.json"),
        ]
    )


def test_a_pipeline_on_the_hub_is_fetched_as_far_as_it_is_used_and_linked_from_the_cache(
    small: Path, tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    files = contents(small)
    unused = ("flux1.safetensors", "vae/diffusion_pytorch_model.bin", "text_encoder_2/model.fp16.safetensors")
    repo = hub.add("me/flux", files | dict.fromkeys(unused, b"other weights"))
    assert main(["convert", "me/flux@main", str(tmp_path / "out"), "--no-audit"]) == 0
    assert hub.count(r"resolve/.*(flux1\.safetensors|\.bin|fp16\.safetensors)") == 0
    after = contents(tmp_path / "out")
    rest = {name for name in files if not name.startswith("text_encoder_2/")}
    assert {n: files[n] for n in rest} == {n: after[n] for n in rest}
    blobs = {path.stat().st_ino for path in (tmp_path / "cache").rglob("blobs/*")}
    assert (tmp_path / "out" / TRANSFORMER).stat().st_ino in blobs
    assert "text_encoder_2/model.fp16.safetensors" not in after
    source = json.loads(after["text_encoder_2/fp16_report.json"])["source"]
    assert source["subfolder"] == "text_encoder_2" and source["revision"] == repo.resolve("main")
    card = after["text_encoder_2/README.md"].decode()
    assert "base_model: me/flux\n" in card and "sub-folder `text_encoder_2`" in card
    assert json.loads(after["fp16_pipeline.json"])["source"]["revision"] == repo.resolve("main")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]


def test_what_changes_on_the_hub_meanwhile_is_noticed(
    small: Path, tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = hub.add("me/flux", contents(small))

    def pushed() -> None:
        if "resolve" in hub.seen[-1] and TRANSFORMER in hub.seen[-1] and len(repo.commits) == 1:
            repo.commit(contents(small) | {"text_encoder_2/README.md": b"another"}, "meanwhile", "main")

    words = ("convert", "me/flux", tmp_path / "out", "--no-audit")
    hub.before = pushed
    assert "me/flux was changed on the Hub meanwhile" in refused(capsys, *words)
    assert not (tmp_path / "out").exists() and len(repo.commits) == 2
    assert main([*map(str, words)]) == 0


@pytest.mark.parametrize(
    ("encoder", "kind", "held"),
    [
        ("llama", "NewPipeline", True),
        ("llama", "SanaPipeline", False),  # which reads its last states alone
        ("umt5-encoder", "NewPipeline", False),
        ("umt5-encoder", "LongCatAudioDiTPipeline", True),  # which reads its embedding
    ],
)
def test_a_stream_is_held_where_the_pipeline_may_read_it(encoder: str, kind: str, held: bool, tmp_path: Path) -> None:
    model = pipelines.llama(factor=900.0) if encoder == "llama" else pipelines.encoder(encoder)
    folder = pipelines.make(tmp_path / "one", {"text_encoder": model}, _class_name=kind)
    outputs = convert_pipeline(folder, tmp_path / "out", run_model=False).encoders["text_encoder"].report["outputs"]
    assert outputs["last_hidden_state"]["factor_log2"] == 0
    assert (outputs["hidden_states"]["factor_log2"] == 0) == held
    moved = partial(convert_pipeline, folder, tmp_path / "out", stream=-4, run_model=False, dry_run=True)
    if held:
        with pytest.raises(UserError, match="so --stream could change its results; leave out --stream, or "):
            moved()
    else:
        assert moved().encoders["text_encoder"].plan.residual_exponent == -4


@pytest.mark.usefixtures("first_batch")
def test_a_held_stream_that_overflows_is_converted_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoders = {"text_encoder": pipelines.llama(factor=9000.0)}
    folder = pipelines.make(tmp_path / "one", encoders, _class_name="NewPipeline")
    command = f"bf16-to-fp16 convert {folder} OUT --subfolder text_encoder"
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 1
    assert f"next: convert it alone: {command}" in " ".join(capsys.readouterr().out.split())
    assert convert(folder, tmp_path / "alone", subfolder="text_encoder", run_model=False).safe
    assert (tmp_path / "alone" / "tokenizer_config.json").is_file()  # from the pipeline's folder beside the encoder


def test_a_model_with_a_decoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = pipelines.make(tmp_path / "whole", {"text_encoder": tiny.build("t5")}, _class_name="NewPipeline")
    said = refused(capsys, "convert", whole, tmp_path / "new")
    assert "rescaling a T5ForConditionalGeneration changes its inner states" in said and not (tmp_path / "new").exists()
    assert f"bf16-to-fp16 convert {whole} OUT --subfolder text_encoder" in said


@pytest.mark.parametrize(
    "loaded", [["transformers", "UMT5EncoderModel"], ["transformers", "AutoModel"], ["diffusers", "T5EncoderModel"]]
)
def test_a_class_that_does_not_fit_the_config_is_refused(
    loaded: list[str], small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rewritten(small / "model_index.json") as index:
        index["text_encoder_2"] = loaded
    said = refused(capsys, "convert", small, tmp_path / "out")
    assert f"loads text_encoder_2 as {'.'.join(loaded)}, but its config is for T5" in said
    assert "--subfolder text_encoder_2" in said


def test_the_same_code_under_another_name_fits_and_is_planned_for_as_the_config_calls_it(tmp_path: Path) -> None:
    folder = pipelines.make(tmp_path / "dit", {"text_encoder_2": pipelines.encoder("mt5-encoder")})
    with rewritten(folder / "model_index.json") as index:
        index |= {"_class_name": "HunyuanDiTPipeline", "text_encoder_2": ["transformers", "T5EncoderModel"]}
    done = convert_pipeline(folder, tmp_path / "out", run_model=False)
    assert done.safe and "--as" not in done.encoders["text_encoder_2"].report["command"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_states_of_an_encoder_of_images_are_the_sources_or_it_is_refused(tied: bool, tmp_path: Path) -> None:
    """Qwen-Image reads them of a class with a head, whose last states change where the embedding is the head."""
    model = tiny.build("qwen2_5_vl", tie_word_embeddings=tied)
    source = pipelines.make(tmp_path / "source", {"text_encoder": model}, _class_name="QwenImagePipeline")
    if tied:
        mend = r"reads the last states of text_encoder, .*; write Qwen2_5_VLModel as the class of text_encoder in "
        with pytest.raises(UserError, match=mend):
            convert_pipeline(source, tmp_path / "out", run_model=False)
        assert not (tmp_path / "out").exists()
        return
    done = convert_pipeline(source, tmp_path / "out", run_model=False)
    outputs = done.encoders["text_encoder"].report["outputs"]
    assert done.safe and outputs["hidden_states"]["factor_log2"] < 0 == outputs["last_hidden_state"]["factor_log2"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_was_not_converted_is_loaded_in_its_own_dtype(
    dtype: torch.dtype, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of other components nothing is claimed: a transformer can overflow fp16 as well."""
    save_file({"weight": torch.randn(600, 900, dtype=dtype)}, small / TRANSFORMER)
    assert main(["convert", str(small), str(tmp_path / "out"), "--no-audit"]) == 0
    each = f'{{"text_encoder_2": torch.float16, "default": {dtype}}}'
    shown = "torch.float16" if dtype is torch.float16 else each
    assert f"torch_dtype={shown})" in " ".join(capsys.readouterr().out.split())
