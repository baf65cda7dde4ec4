"""One file of weights is a source like a folder, and what ``convert --layout`` writes, which other tools load."""

import base64
import json
import shutil
import zlib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import tiny, tools
from support.forging import flip
from support.program import refused
from support.tools import encoder

from bf16_to_fp16 import audit, certify, convert, undo, verify
from bf16_to_fp16.checkpoint.headers import TensorInfo
from bf16_to_fp16.checkpoint.naming import WAN
from bf16_to_fp16.checkpoint.packing import tensors_sha256
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.checkpoint.recorded import TENSORS
from bf16_to_fp16.checkpoint.single_file import inferred_config
from bf16_to_fp16.cli import main
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.measuring.stock import load

IDS = torch.tensor([[5, 9, 2, 77, 1]])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        kind: tools.write(folder / f"{kind}.safetensors", tools.stored(encoder(f"{kind}-encoder")) | tools.SPIECE_MODEL)
        for kind in ("t5", "umt5")
    }


@pytest.fixture(scope="module")
def files(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what was converted to each layout: the source's kind, the file, and what ``convert`` returned."""
    folder = tmp_path_factory.mktemp("files")
    made = {}
    for layout, kind in (("wan", "umt5"), ("single", "t5")):
        out = folder / f"{layout}.safetensors"
        made[layout] = kind, out, convert(sources[kind], out, layout=layout)
    return made


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tools.write(tmp_path_factory.mktemp("single") / "t5xxl_bf16.safetensors", tools.stored(encoder()))


def same(one: Path, other: Any) -> None:
    found, wanted = load_file(one / "model.safetensors"), tools.stored(other)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name].view(torch.int16), wanted[name].view(torch.int16)) for name in found)


def test_a_file_converts_like_the_folder_of_the_same_weights_and_undo_gives_them_back(t5: Path, tmp_path: Path) -> None:
    result = convert(t5, tmp_path / "out")
    whole = tiny.save(encoder(), tmp_path / "folder")
    convert(whole, tmp_path / "beside", run_model=False)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "beside/model.safetensors").read_bytes()
    assert result.safe
    source = result.report["source"]
    assert source["path"] == t5.name and list(source["sha256"]) == [t5.name]
    assert t5.name in result.report["command"] and t5.name in (tmp_path / "out/README.md").read_text()
    undo(tmp_path / "out", tmp_path / "back")
    same(tmp_path / "back", encoder())
    assert load(tmp_path / "out", torch.float16).config.architectures == ["T5EncoderModel"]
    written = [path for path in (tmp_path / "out").iterdir() if path.suffix in (".json", ".md", ".html")]
    assert len(written) == 4 and not any("bf16-to-fp16-" in path.read_text() for path in written)


def test_a_file_with_a_tokenizer_is_the_folders_model_and_comes_out_byte_for_byte(sources: Any, tmp_path: Path) -> None:
    umt5, whole = sources["umt5"], tiny.save(encoder("umt5-encoder"), tmp_path / "folder")
    with torch.no_grad():
        one, other = (load(place, torch.float32)(IDS)[0] for place in (open_checkpoint(umt5).folder, whole))
    assert torch.equal(one, other)
    convert(umt5, tmp_path / "out", run_model=False)
    assert (tmp_path / "out/spiece.model").read_bytes() == tools.SPIECE
    undo(tmp_path / "out", tmp_path / "back")
    same(tmp_path / "back", encoder("umt5-encoder"))


def test_wans_own_names_are_the_same_model(tmp_path: Path) -> None:
    name = "models_t5_umt5-xxl-enc-bf16.pth"
    source = tools.write(tmp_path / name, tools.stored(tools.as_wan(encoder("umt5-encoder"))))
    assert convert(source, tmp_path / "out").safe
    undo(tmp_path / "out", tmp_path / "back")
    same(tmp_path / "back", encoder("umt5-encoder"))
    assert verify(tmp_path / "out", original=source, run_model=False)["verified"]


def test_the_names_of_wan_and_of_stock_code_are_each_others_inverse() -> None:
    stock = {n for n in encoder("umt5-encoder").state_dict() if not n.endswith("embed_tokens.weight")}
    wan = set(tools.as_wan(encoder("umt5-encoder")).state_dict())
    assert {WAN.to_stock(name) for name in wan} == stock and {WAN.from_stock(name) for name in stock} == wan
    with pytest.raises(UserError, match=r"no tensor for lm_head\.weight"):
        WAN.from_stock("lm_head.weight")


def test_what_stock_code_does_not_read_is_left_out_and_said(tmp_path: Path) -> None:
    others = {"logit_scale": torch.ones(()), "spiece_model": torch.ones(3)}
    file = tools.write(tmp_path / "clip.safetensors", tools.stored(encoder()) | others)
    told, left_out = open_checkpoint(file).notes
    assert told.startswith("clip.safetensors: T5EncoderModel, told from names")
    assert left_out == "clip.safetensors: leaves out logit_scale, spiece_model, which stock code does not read"


PUBLISHED = {
    "t5-v1_1-xxl": ("t5", 32_128, 4096, 64, 64, 10_240, True, "gated-gelu"),
    "umt5-xxl": ("umt5", 256_384, 4096, 64, 64, 10_240, True, "gated-gelu"),
    "mt5-xl": ("mt5", 250_112, 2048, 32, 64, 5120, True, "gated-gelu"),
    "t5-11b": ("t5", 32_128, 1024, 128, 128, 65_536, False, "relu"),
    "byt5-small": ("t5", 384, 1472, 6, 64, 3584, True, "gated-gelu"),
    "flan-ul2": ("t5", 32_128, 4096, 16, 256, 16_384, True, "gated-silu"),
}
"""Model type, vocabulary, widths and activation of published configs."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_give_the_published_configs(name: str) -> None:
    kind, vocabulary, width, heads, size, hidden, gated, activation = PUBLISHED[name]
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (vocabulary, width)}
    for i in range(3):
        at = f"encoder.block.{i}.layer"
        shapes[f"{at}.0.SelfAttention.q.weight"] = (heads * size, width)
        if i == 0 or kind == "umt5":
            shapes[f"{at}.0.SelfAttention.relative_attention_bias.weight"] = (32, heads)
        shapes[f"{at}.1.DenseReluDense.{'wi_0' if gated else 'wi'}.weight"] = (hidden, width)
    tensors = {n: TensorInfo(n, "BF16", shape, Path("f"), 0, 0) for n, shape in shapes.items()}
    config = inferred_config(tensors, "f")
    keys = ("model_type", "vocab_size", "d_model", "num_heads", "d_kv", "d_ff", "feed_forward_proj", "num_layers")
    assert [config[key] for key in keys] == [kind, vocabulary, width, heads, size, hidden, activation, 3]


def without(*endings: str) -> Any:
    return lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(endings)}


BIASES = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"

BROKEN = {
    "no bias table": (without("bias.weight"), "no matrix encoder.block.0.layer.0.SelfAttention.relative"),
    "UMT5's vocabulary": (
        lambda t: t | {"shared.weight": torch.zeros(256_384, 24, dtype=torch.bfloat16)},
        "relative_attention_bias.weight is missing",
    ),
    "no heads": (lambda t: t | {BIASES: torch.zeros(32, 0, dtype=torch.bfloat16)}, f"no matrix {BIASES}"),
    "a block missing": (lambda t: {n.replace("block.1.", "block.2."): v for n, v in t.items()}, "is missing"),
    "two encoders": (lambda t: {f"{at}.{n}": v.clone() for n, v in t.items() for at in "ab"}, "the text encoder alone"),
    "a tensor missing": (without("block.1.layer.1.DenseReluDense.wo.weight"), "wo.weight is missing"),
    "a stranger": (lambda t: t | {"vision.weight": torch.ones(2)}, "vision.weight is not part of"),
    "codes": (
        lambda t: t | {"encoder.x": torch.ones(2, dtype=torch.int8)},
        "is I8, quantised; give the checkpoint it was quantised from",
    ),
    "no T5": (lambda t: {"model.weight": torch.ones(2)}, "no T5 in it by its stock names or Wan's"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_file_lacks_is_told(name: str, t5: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, said = BROKEN[name]
    source = tools.write(tmp_path / "t5.safetensors", change(load_file(t5)))
    assert said in refused(capsys, "convert", source, tmp_path / "out", "--no-audit")
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit_a_file_are_refused(
    t5: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "leave out --subfolder" in refused(capsys, "certify", t5, "--subfolder", "a")


def test_wans_own_class_loads_every_key_and_computes_the_source_in_fp16(files: Any) -> None:
    _, file, result = files["wan"]
    tensors = load_file(file)
    assert {t.dtype for t in tensors.values()} == {torch.float16}
    model = tools.Wan(encoder("umt5-encoder").config)
    model.load_state_dict(tensors, strict=True)
    with torch.no_grad():
        wide, half = model(IDS), model.half()(IDS).float()
        wanted = encoder("umt5-encoder")(IDS)[0]
    scale = wanted.square().mean()
    # eps is the tool's, for which the exponents were chosen; the rest is exact.
    assert (wide - wanted).square().mean() / scale < 1e-5
    assert torch.isfinite(half).all() and (half - wanted).square().mean() / scale < 1e-4
    assert result.safe and result.report["target"] == "half"


@pytest.mark.parametrize("layout", ["wan", "single"])
def test_undo_of_a_file_gives_the_sources_bits_back(layout: str, files: Any, sources: Any, tmp_path: Path) -> None:
    kind, file, _ = files[layout]
    undo(file, tmp_path / "back.safetensors")
    back, source = load_file(tmp_path / "back.safetensors"), load_file(sources[kind])
    if layout == "wan":
        source = tools.stored(tools.as_wan(encoder("umt5-encoder")))  # Wan's tools have a tokenizer of their own
    assert set(back) == set(source)
    assert all(torch.equal(back[n].view(torch.uint8), source[n].view(torch.uint8)) for n in source)
    undo(file, tmp_path / "folder")
    config = json.loads((tmp_path / "folder/config.json").read_text())
    assert config["layer_norm_epsilon"] == 1e-6 and config["torch_dtype"] == "bfloat16"
    stock = load_file(tmp_path / "folder/model.safetensors")
    wanted = tools.stored(encoder(f"{kind}-encoder"))
    assert all(torch.equal(stock[n].view(torch.uint8), wanted[n].view(torch.uint8)) for n in wanted)


def test_a_files_metadata_say_where_it_is_from_and_how_it_was_judged(files: Any, sources: Any) -> None:
    kind, file, result = files["wan"]
    metadata = metadata_of(file)
    said = json.loads(metadata["bf16_to_fp16"])
    assert said["source"]["path"] == sources[kind].name
    assert said["source"]["sha256"] == {sources[kind].name: sha256(sources[kind].read_bytes()).hexdigest()}
    assert said["verdict"] == "safe" and said["tiers"]["torch"]["holds"] and said["layout"] == "wan"
    assert said["drift_of_eps"] == result.plan.drift.measured_kl < 1e-5
    assert said["command"].endswith("wan.safetensors --layout wan") and said["eps"] == 1e-6
    back = json.loads(zlib.decompress(base64.b64decode(metadata["bf16_to_fp16.undo"])))
    assert back["plan"]["residual_exponent"] == result.plan.residual_exponent == said["residual_exponent"] < 0
    entry = result.report["output"]["files"][0]
    assert entry == {"name": file.name, "nbytes": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()}


def test_a_file_holds_what_the_folder_holds_and_is_itself_a_source(files: Any, sources: Any, tmp_path: Path) -> None:
    kind, file, _ = files["single"]
    convert(sources[kind], tmp_path / "out")
    one, other = load_file(file), load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(one.pop("spiece_model"), tools.SPIECE_MODEL["spiece_model"])
    assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
    # With the eps that its config inside says, not the published one.
    eps = json.loads((tmp_path / "out/config.json").read_text())["layer_norm_epsilon"]
    assert open_checkpoint(file).config["layer_norm_epsilon"] == eps != 1e-6
    assert certify(file)["certificate"] == certify(tmp_path / "out")["certificate"]
    assert audit(file, regimes=("half",))["verdict"] == "safe"


def test_a_command_says_what_the_tool_needs_to_know(sources: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.safetensors"
    assert main(["convert", str(sources["umt5"]), str(out), "--layout", "wan", "--no-audit"]) in (0, 1)
    said = capsys.readouterr().out
    assert f"written: {out}" in said
    assert main(["undo", str(out), str(tmp_path / "back.safetensors"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] == "the source's weights, all of them bit for bit"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.safetensors", "out.safetensors"]


@pytest.mark.parametrize(
    ("kind", "changes", "options", "said"),
    [
        ("umt5", {}, "--layout wan", "Wan's tools read only encoders"),
        ("umt5-encoder", {"feed_forward_proj": "relu"}, "--layout wan", "use the activation gelu_new, and the config"),
    ],
)
def test_what_a_tool_cannot_read_is_refused_before_the_work(
    kind: str, changes: dict[str, Any], options: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    source = tiny.save(tiny.small(kind, **changes), tmp_path / "source")
    assert said in refused(capsys, "convert", source, tmp_path / "out.safetensors", *options.split())
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("damage", ["not base64!", base64.b64encode(zlib.compress(b"{}")).decode(), "cut short", ""])
def test_a_file_whose_way_back_is_missing_or_damaged_is_refused(damage: str, files: Any, tmp_path: Path) -> None:
    metadata = metadata_of(files["single"][1])
    whole = base64.b64decode(metadata["bf16_to_fp16.undo"])
    metadata["bf16_to_fp16.undo"] = base64.b64encode(whole[:-2]).decode() if damage == "cut short" else damage
    if not damage:
        del metadata["bf16_to_fp16.undo"]
    save_file(load_file(files["single"][1]), tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(UserError, match="damaged" if damage else "convert --layout did not write it"):
        undo(tmp_path / "x.safetensors", tmp_path / "back.safetensors")
    assert not (tmp_path / "back.safetensors").exists()


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


def rewritten(file: Path, out: Path, others: Mapping[str, torch.Tensor | None], **said: Any) -> Path:
    """Copy a converted file with other tensors, None for one to leave out, other claims, and the hash of these."""
    metadata = metadata_of(file)
    tensors = {name: tensor for name, tensor in {**load_file(file), **others}.items() if tensor is not None}
    metadata |= {"bf16_to_fp16": json.dumps(json.loads(metadata["bf16_to_fp16"]) | said)}
    save_file(tensors, out, metadata)
    save_file(tensors, out, metadata | {TENSORS: tensors_sha256(out)})
    return out


@pytest.mark.parametrize("layout", ["wan", "single"])
def test_a_file_is_verified_by_its_metadata_and_against_its_source(layout: str, files: Any, sources: Any) -> None:
    kind, file, result = files[layout]
    found = verify(file, original=sources[kind])
    checks = ("files", "plan", "replay", "certificate", "audit", "tiers")
    assert found["problems"] == [] and {found["checks"][name] for name in checks} == {"passed"}
    left_out = "is left out: Wan's own T5 has no place for it"
    assert any(left_out in note for note in result.notes) == (layout == "wan")
    assert found["tiers"].keys() == result.report["tiers"].keys() and found["report"]["proof"] == "certified"


def test_a_file_that_is_not_what_it_says_is_found_out(files: Any, sources: Any, tmp_path: Path) -> None:
    _, file, _ = files["single"]
    name = "encoder.block.0.layer.0.SelfAttention.o.weight"
    weight, one = (load_file(file)[name] for _ in range(2))
    one[0, 0] += 0.5
    changed = verify(rewritten(file, tmp_path / "a.safetensors", {name: one}), original=sources["t5"], run_model=False)
    assert changed["checks"]["replay"] == "failed" and changed["problems"][0]["name"] == name
    large = verify(rewritten(file, tmp_path / "b.safetensors", {name: weight * 3e4}))
    assert large["checks"]["certificate"] == large["checks"]["tiers"] == "failed"
    honest = verify(rewritten(file, tmp_path / "c.safetensors", {}, verdict="unsafe"), run_model=False)
    assert not honest["verified"] and [p["check"] for p in honest["problems"]] == ["report"]
    for wrong in ({"max_length": "long"}, {"target": "quarter"}, {"tiers": 3}, {"eps": 1e-3}):
        with pytest.raises(UserError, match="its metadata are damaged"):
            verify(rewritten(file, tmp_path / "d.safetensors", {}, **wrong), run_model=False)
    with pytest.raises(UserError, match="convert --layout did not write it"):
        verify(sources["t5"], run_model=False)


def test_other_tensors_than_those_that_were_hashed_are_found(files: Any, tmp_path: Path) -> None:
    file, bad = files["single"][1], tmp_path / "bad.safetensors"
    flip(Path(shutil.copy(file, bad)), -2)
    flipped = verify(bad, run_model=False)
    tensors, metadata = load_file(file), metadata_of(file)
    one, other = (f"encoder.block.0.layer.0.SelfAttention.{name}.weight" for name in "kv")
    save_file(tensors | {one: tensors[other], other: tensors[one]}, bad, metadata)
    swapped = verify(bad, run_model=False)
    for found in (flipped, swapped):
        assert any("were changed or damaged" in problem["reason"] for problem in found["problems"])
    del metadata[TENSORS]
    save_file(tensors, bad, metadata)
    assert verify(bad, run_model=False)["checks"]["files"] == "failed"


def test_a_file_with_tensors_that_convert_does_not_write_is_found_out(files: Any, sources: Any, tmp_path: Path) -> None:
    """A loader that finds a scale beside a matrix multiplies with it."""
    _, file, _ = files["single"]
    name = "encoder.block.0.layer.0.SelfAttention.q"

    words = tools.SPIECE_MODEL["spiece_model"]
    for layout, held, reason in (
        ("single", words.flip(0), "is not the original's tokenizer"),
        ("single", None, "is not the original's tokenizer"),
        ("single", words[None], "is not among the tensors that convert writes"),
        ("wan", words, "is not among the tensors that convert writes"),
    ):
        kind, of_layout, _ = files[layout]
        changed = rewritten(of_layout, tmp_path / "y.safetensors", {"spiece_model": held})
        found = verify(changed, original=sources[kind], run_model=False)
        assert (p := found["problems"][0])["name"] == "spiece_model" and p["reason"] == reason
    scaled = {"scaled_fp8": torch.zeros(2), f"{name}.scale_weight": torch.tensor(9.0)}
    wide = {f"{name}.weight": load_file(file)[f"{name}.weight"].float()}
    for more, names in ((scaled, [f"{name}.scale_weight", "scaled_fp8"]), (wide, [f"{name}.weight"])):
        found = verify(rewritten(file, tmp_path / "x.safetensors", more), run_model=False)
        assert [p["name"] for p in found["problems"] if p["check"] == "files"] == names
        assert found["verdict"] == "unsafe" and found["checks"]["files"] == "failed"


def test_a_file_with_another_config_inside_is_found_out(tmp_path: Path) -> None:
    source = tiny.save(encoder("t5-encoder"), tmp_path / "source", max_shard_size="10KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2
    file = tmp_path / "out.safetensors"
    convert(source, file, layout="single", run_model=False)
    assert verify(file, original=source, run_model=False)["verified"]
    assert set(load_file(file)) == set(tools.stored(encoder("t5-encoder")))
    metadata = metadata_of(file)
    inside = json.loads(zlib.decompress(base64.b64decode(metadata["bf16_to_fp16.undo"])))
    inside["config"]["relative_attention_max_distance"] = 64
    metadata["bf16_to_fp16.undo"] = base64.b64encode(zlib.compress(json.dumps(inside).encode())).decode()
    save_file(load_file(file), tmp_path / "x.safetensors", metadata=metadata)
    found = verify(tmp_path / "x.safetensors", original=source, run_model=False)
    assert [p["name"] for p in found["problems"]] == ["config.json, relative_attention_max_distance"]
