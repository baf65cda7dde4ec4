"""sentence-transformers gives the same embeddings from a converted folder, also where its config names a class with a
head: it loads the class without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from support import exhaustive, tiny, words
from torch import Tensor

from bf16_to_fp16 import convert

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "gemma3": {},
    "gemma2": {},
    "llama": {},
    "t5-encoder": {},
    "t5": {},  # sentence-t5: of a whole model, the encoder alone is loaded
}


def save(kind: str, folder: Path) -> Path:
    """Save a model with a tokenizer, and modules behind it: mean pooling, a linear with tanh, a normalisation."""
    words.save(folder)
    model = tiny.small(kind, **KINDS[kind])
    tiny.save(model, folder)
    with torch.no_grad():
        torch.manual_seed(0)
        encoder = Transformer(str(folder))
        width = encoder.get_embedding_dimension()
        dense = Dense(width, 16, activation_function=torch.nn.Tanh())
        dense.linear.weight.mul_(0.3)
    SentenceTransformer(modules=[encoder, Pooling(width), dense, Normalize()], device="cpu").save(str(folder))
    for weights in folder.glob("*.safetensors"):  # it saves the class without a head, in fp32
        weights.unlink()
    tiny.save(model, folder)
    return folder


def embeddings(folder: Path, dtype: torch.dtype) -> Tensor:
    """Return the embeddings of a few texts, in float64."""
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    for module in model:
        module.to(dtype)
    return torch.tensor(model.encode(words.TEXTS, convert_to_numpy=True)).double()


@pytest.mark.parametrize("kind", exhaustive.beyond(["qwen3", "gemma3", "t5-encoder"], KINDS))
def test_an_embedding_in_fp16_is_that_of_the_source_in_fp32(kind: str, tmp_path: Path) -> None:
    source = save(kind, tmp_path / "source")
    convert(source, tmp_path / "out")
    wanted = embeddings(source, torch.float32)

    def cosine(folder: Path, dtype: torch.dtype) -> Tensor:
        return torch.cosine_similarity(embeddings(folder, dtype), wanted).min()

    for dtype in (torch.float32, torch.float16):
        assert cosine(tmp_path / "out", dtype) > 0.99999
    assert not cosine(source, torch.float16) > 0.9999  # NaN; T5 clamps its stream
