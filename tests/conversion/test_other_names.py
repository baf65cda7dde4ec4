"""Tensors under the names of another class: refused, with how to save them in a form that converts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import tiny
from support.folders import rewritten

from bf16_to_fp16 import UserError
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.measuring.agreement import agreed_layout

IDS = torch.tensor([[5, 9, 2, 77, 1]])


def logits(folder: Path, name: str) -> torch.Tensor:
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=IDS)[0]


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
    source = tiny.save(tiny.stock("LlamaModel", tiny.LLAMA_SHAPE)(), tmp_path / "source")
    file = source / "config.json"
    said = json.loads(file.read_text()) | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    file.write_text(json.dumps(said))
    with pytest.raises(UserError, match=r'no head; write "architectures": \["LlamaModel"\]'):
        agreed_layout(open_checkpoint(source))
    file.write_text(json.dumps(said | {"architectures": ["LlamaModel"]}))
    assert agreed_layout(open_checkpoint(source)).stock.names[0] == "LlamaModel"


def test_a_missing_embedding_is_still_a_file_that_is_not_whole(tmp_path: Path) -> None:
    source = tiny.save(tiny.stock("LlamaForCausalLM", tiny.LLAMA_SHAPE)(), tmp_path / "source")
    with rewritten(source / "model.safetensors") as weights:
        del weights["model.embed_tokens.weight"]
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is missing; take the whole"):
        agreed_layout(open_checkpoint(source))
