"""One file of weights is a source like a folder, and what ``convert --layout`` writes, which other tools load."""

import json
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import tiny, tools
from support.program import refused
from support.tools import encoder

from bf16_to_fp16 import audit, certify, convert, undo, verify
from bf16_to_fp16.checkpoint.headers import TensorInfo
from bf16_to_fp16.checkpoint.naming import WAN
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.checkpoint.single_file import inferred_config
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
    result = convert(t5, tmp_path / "out", run_model=False)
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
    assert convert(source, tmp_path / "out", run_model=False).safe
    undo(tmp_path / "out", tmp_path / "back")
    same(tmp_path / "back", encoder("umt5-encoder"))
    assert verify(tmp_path / "out", original=source, run_model=False)["verified"]


def test_the_names_of_wan_and_of_stock_code_are_each_others_inverse() -> None:
    stock = {n for n in encoder("umt5-encoder").state_dict() if not n.endswith("embed_tokens.weight")}
    wan = set(tools.as_wan(encoder("umt5-encoder")).state_dict())
    assert {WAN.to_stock(name) for name in wan} == stock and {WAN.from_stock(name) for name in stock} == wan
    with pytest.raises(UserError, match=r"no place for tensor lm_head\.weight"):
        WAN.from_stock("lm_head.weight")


def test_what_stock_code_does_not_read_is_left_out_and_said(tmp_path: Path) -> None:
    others = {"logit_scale": torch.ones(()), "spiece_model": torch.ones(3)}
    file = tools.write(tmp_path / "clip.safetensors", tools.stored(encoder()) | others)
    told, left_out = open_checkpoint(file).notes
    assert told.startswith("clip.safetensors: class T5EncoderModel, as names")
    assert left_out == "clip.safetensors: leaves out logit_scale, spiece_model, which transformers does not read"


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
    "no T5": (lambda t: {"model.weight": torch.ones(2)}, "holds no T5 encoder with the tensor names of"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_file_lacks_is_told(name: str, t5: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, said = BROKEN[name]
    source = tools.write(tmp_path / "t5.safetensors", change(load_file(t5)))
    assert said in refused(capsys, "convert", source, tmp_path / "out", "--no-audit")
    assert not (tmp_path / "out").exists()


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


def test_a_source_in_shards_becomes_one_file_of_the_same_weights(tmp_path: Path) -> None:
    source, file = tiny.save(encoder(), tmp_path / "source", max_shard_size="10KB"), tmp_path / "one.safetensors"
    convert(source, tmp_path / "out", run_model=False)
    convert(source, file, layout="single", run_model=False)
    shards, packed = [load_file(shard) for shard in (tmp_path / "out").glob("model-*.safetensors")], load_file(file)
    weights = {name: weight for shard in shards for name, weight in shard.items()}
    assert len(shards) > 2 and packed.keys() == weights.keys()
    assert all(torch.equal(packed[name], weight) for name, weight in weights.items())


def test_a_files_metadata_say_where_it_is_from_and_how_it_was_judged(files: Any, sources: Any) -> None:
    kind, file, result = files["wan"]
    metadata = metadata_of(file)
    said = json.loads(metadata["bf16_to_fp16"])
    assert said["source"]["path"] == sources[kind].name
    assert said["source"]["sha256"] == {sources[kind].name: sha256(sources[kind].read_bytes()).hexdigest()}
    assert said["verdict"] == "safe" and said["tiers"]["torch"]["holds"] and said["layout"] == "wan"
    assert said["drift_of_eps"] == result.plan.drift.measured_kl < 1e-5
    assert said["command"].endswith("wan.safetensors --layout wan") and said["eps"] == 1e-6
    assert result.plan.residual_exponent == said["residual_exponent"] < 0
    assert any("is left out: Wan's own T5 has no place for it" in note for note in result.notes)
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


@pytest.mark.parametrize(
    ("kind", "changes", "options", "said"),
    [
        ("umt5", {}, "--layout wan", "Wan's tools can load only encoders"),
        ("t5-encoder", {}, "--layout wan", "Wan's tools can load only an encoder of umt5, and this model is 't5'"),
        ("t5-encoder", {}, "--layout single --as Other", "/config.json: Other is no class that reads a t5 checkpoint"),
    ],
)
def test_what_a_tool_cannot_read_is_refused_before_the_work(
    kind: str, changes: dict[str, Any], options: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    source = tiny.save(tiny.small(kind, **changes), tmp_path / "source")
    assert said in refused(capsys, "convert", source, tmp_path / "out.safetensors", *options.split())
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("damage", ["{}", '{"layout": "wan"', ""])
def test_a_file_whose_metadata_are_damaged_is_refused(damage: str, files: Any, tmp_path: Path) -> None:
    metadata = metadata_of(files["single"][1]) | {"bf16_to_fp16": damage}
    save_file(load_file(files["single"][1]), tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(UserError, match=r"x\.safetensors: .*; (convert|fetch)"):
        certify(tmp_path / "x.safetensors")


def test_a_file_is_not_verified_and_not_undone_and_holds_no_subfolder(files: Any, tmp_path: Path) -> None:
    for command in (verify, partial(undo, out=tmp_path / "back")):
        with pytest.raises(UserError, match="is not a folder; give"):
            command(files["single"][1])
    with pytest.raises(UserError, match="leave out --subfolder"):
        certify(files["single"][1], subfolder="a")


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())
