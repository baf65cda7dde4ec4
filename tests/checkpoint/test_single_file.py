"""One file of weights is a source like a folder: the config told from it, and foreign names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tiny, tools
from support.program import refused
from support.tools import encoder

from bf16_to_fp16 import convert, undo
from bf16_to_fp16.checkpoint.headers import TensorInfo
from bf16_to_fp16.checkpoint.naming import WAN
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.checkpoint.single_file import inferred_config
from bf16_to_fp16.conversion.verify import verify
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.measuring.stock import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("single")


@pytest.fixture(scope="module")
def t5(folder: Path) -> Path:
    return tools.write(folder / "t5xxl_bf16.safetensors", tools.stored(encoder()))


@pytest.fixture(scope="module")
def umt5(folder: Path) -> Path:
    tensors = tools.stored(encoder("umt5-encoder")) | tools.SPIECE_MODEL
    return tools.write(folder / "umt5_xxl_bf16.safetensors", tensors)


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


def test_a_file_with_a_tokenizer_is_the_folders_model_and_comes_out_byte_for_byte(umt5: Path, tmp_path: Path) -> None:
    whole, ids = tiny.save(encoder("umt5-encoder"), tmp_path / "folder"), torch.tensor([[3, 5, 7, 1]])
    with torch.no_grad():
        one, other = (load(place, torch.float32)(ids)[0] for place in (open_checkpoint(umt5).folder, whole))
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
