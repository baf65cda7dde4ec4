"""What is refused and can be saved in a form that converts: Gemma 3 with images, and names of another class."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import tiny

from bf16_to_fp16 import UserError, convert
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.cli import main
from bf16_to_fp16.run.agreement import agreed_layout

IDS = torch.tensor([[5, 9, 2, 77, 1]])
PAGE = Path(__file__).parents[2] / "docs" / "converting.md"
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def logits(folder: Path, name: str) -> torch.Tensor:
    """Return what the stock class of this name in a folder gives first, in fp32."""
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=IDS)[0]


def with_images(folder: Path) -> Path:
    """Save a small Gemma 3 with a vision tower, and a tokenizer."""
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=tiny.GEMMA3_SHAPE, vision_config=VISION, mm_tokens_per_image=4, image_token_index=96
    )
    transformers.Gemma3ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    transformers.ByT5Tokenizer().save_pretrained(folder)
    return folder


def test_gemma_3_with_images_is_refused_and_its_text_stack_converts_as_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text, out = with_images(tmp_path / "source"), tmp_path / "text", tmp_path / "out"
    capsys.readouterr()
    assert main(["convert", str(source), str(out)]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("error: ") and "\n" not in line and not out.exists()
    assert "vision tower" in line and "AutoModelForImageTextToText" in line and "Gemma3ForCausalLM" in line

    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "save_text" in code]
    names: dict[str, Any] = {}
    exec(code, names)
    names["save_text_stack"](str(source), str(text))
    wanted = logits(source, "Gemma3ForConditionalGeneration")
    assert torch.equal(logits(text, "Gemma3ForCausalLM"), wanted)
    assert {"tokenizer_config.json", "generation_config.json"} <= {path.name for path in text.iterdir()}
    convert(text, out, run_model=False)
    # Gains that move are rounded.
    assert (logits(out, "Gemma3ForCausalLM") - wanted).square().mean() < 1e-5 * wanted.square().mean()


def test_stock_code_fills_the_text_stack_of_a_folder_with_images_at_random(tmp_path: Path) -> None:
    """Why the page warns of the shorter way."""
    source = with_images(tmp_path / "source")
    _, info = transformers.Gemma3ForCausalLM.from_pretrained(source, output_loading_info=True)
    assert "model.embed_tokens.weight" in info["missing_keys"]


def under_names_of_another(model: Any, folder: Path) -> Path:
    """Save a model whose tensors have the prefix of a class with a head where its own has none, and the other way
    round."""
    weights = load_file(tiny.save(model, folder) / "model.safetensors")
    within = any(name.startswith("model.") for name in weights)
    moved = {n.removeprefix("model.") if within else f"model.{n}": weight for n, weight in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "tied"),
    [("LlamaModel", False), ("LlamaForCausalLM", False), ("Qwen3ForCausalLM", True), ("Gemma3TextModel", True)],
)
def test_under_the_names_of_another_class_it_is_refused_and_saved_again_it_resolves(
    name: str, tied: bool, tmp_path: Path
) -> None:
    kind: Any = getattr(transformers, name)
    shape = tiny.GEMMA3_SHAPE if "Gemma" in name else tiny.LLAMA_SHAPE
    source = under_names_of_another(kind(kind.config_class(**shape, tie_word_embeddings=tied)), tmp_path / "source")
    with pytest.raises(UserError, match=rf"embed_tokens\.weight is missing and its names .* {name}\.from_pretrained"):
        agreed_layout(open_checkpoint(source))
    kind.from_pretrained(source, dtype="auto").save_pretrained(tmp_path / "again")
    layout = agreed_layout(open_checkpoint(tmp_path / "again"))
    assert layout.stock.names[0] == name and layout.tied is (tied if layout.stock.is_language_model else None)
    assert torch.equal(logits(tmp_path / "again", name), logits(source, name))


def test_where_a_head_would_be_filled_at_random_the_class_without_one_is_named(tmp_path: Path) -> None:
    source = tiny.save(tiny.llama("LlamaModel"), tmp_path / "source")
    file = source / "config.json"
    said = json.loads(file.read_text()) | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    file.write_text(json.dumps(said))
    with pytest.raises(UserError, match=r'no head; write "architectures": \["LlamaModel"\]'):
        agreed_layout(open_checkpoint(source))
    file.write_text(json.dumps(said | {"architectures": ["LlamaModel"]}))
    assert agreed_layout(open_checkpoint(source)).stock.names[0] == "LlamaModel"


def test_a_missing_embedding_is_still_a_file_that_is_not_whole(tmp_path: Path) -> None:
    source = tiny.save(tiny.llama("LlamaForCausalLM"), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is missing; take the whole"):
        agreed_layout(open_checkpoint(source))
