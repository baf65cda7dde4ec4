"""Folders of sentence-transformers, saved and read by the library itself, whose import takes longer than most tests."""

from pathlib import Path
from typing import Any

import torch
from support import tiny
from torch import Tensor


def save(model: Any, folder: Path, *, dense: bool = False, pooling: str = "mean", **options: Any) -> Path:
    """Add a model to a folder with its tokenizer, and behind it pooling, a normalisation and, with ``dense``, a linear
    with tanh between them; options: of ``SentenceTransformer``."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    tiny.save(model, folder)
    torch.manual_seed(0)
    encoder = Transformer(str(folder))
    width = encoder.get_embedding_dimension()
    modules = [encoder, Pooling(width, pooling_mode=pooling)]
    if dense:
        modules.append(Dense(width, 16, activation_function=torch.nn.Tanh()))
        modules[-1].linear.weight.data.mul_(0.3)
    SentenceTransformer(modules=[*modules, Normalize()], device="cpu", **options).save(str(folder))
    for weights in folder.glob("*.safetensors"):  # it saves the class without a head, in fp32
        weights.unlink()
    return tiny.save(model, folder)


def embeddings(folder: Path, texts: list[str], dtype: torch.dtype, **options: Any) -> Tensor:
    """Return fp64 [texts, width] of modules that all compute in ``dtype``; options: of ``encode``."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    for module in model:
        module.to(dtype)
    return torch.tensor(model.encode(texts, **options)).double()
