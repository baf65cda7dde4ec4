"""sentence-transformers gives the same embeddings from a converted folder, also where its config names a class with a
head: it loads the class without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import exhaustive, sentences, tiny, words
from torch import Tensor

from bf16_to_fp16 import convert

KINDS: dict[str, dict[str, Any]] = {"qwen3": {"tie_word_embeddings": True}}
# Of t5 as of sentence-t5, which is a whole model, the encoder alone is loaded.
KINDS |= {kind: {} for kind in ("gemma3", "gemma2", "llama", "t5-encoder", "t5")}


@pytest.mark.parametrize("kind", exhaustive.beyond(["qwen3", "gemma3", "t5-encoder"], KINDS))
def test_an_embedding_in_fp16_is_that_of_the_source_in_fp32(kind: str, tmp_path: Path) -> None:
    source = sentences.save(tiny.small(kind, **KINDS[kind]), words.save(tmp_path / "source"), dense=True)
    convert(source, tmp_path / "out")
    wanted = sentences.embeddings(source, words.TEXTS, torch.float32)

    def cosine(folder: Path, dtype: torch.dtype) -> Tensor:
        return torch.cosine_similarity(sentences.embeddings(folder, words.TEXTS, dtype), wanted).min()

    for dtype in (torch.float32, torch.float16):
        assert cosine(tmp_path / "out", dtype) > 0.99999
    assert not cosine(source, torch.float16) > 0.9999  # NaN; T5 clamps its stream
