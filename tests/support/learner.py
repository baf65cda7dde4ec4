"""A tiny T5 of bytes that learns a sentence in a few steps, and the sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it "


def tiny_model(seed: int = 0, dropout: float = 0.1) -> Any:
    """Return it with random weights, under eager attention."""
    torch.manual_seed(seed)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=384,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            dropout_rate=dropout,
        )
    )
    model.set_attn_implementation("eager")
    return model


def saved(folder: Path, lines: int, dropout: float = 0.1, dtype: torch.dtype = torch.float32, layers: int = 2) -> Path:
    """Save the model with its tokenizer and so many lines of ``text.txt``, and return the folder."""
    tiny_model(dropout=dropout).to(dtype).save_pretrained(folder)
    transformers.ByT5Tokenizer(extra_ids=125).save_pretrained(folder)
    (folder / "text.txt").write_text("".join(f"{TEXT}{i}\n" for i in range(lines)))
    return folder


def recipe_tree(source: Path, out: Path) -> dict[str, Any]:
    """Return what recipes of a short training of the model on its text have in common."""
    return {
        "source": str(source),
        "out": str(out),
        "data": {
            "path": str(source / "text.txt"),
            "first_sentinel": 383,
            "input_length": 48,
            "target_length": 24,
            "batch_size": 4,
            "held_out": 0.1,
        },
        "schedule": {"steps": 6, "learning_rate": 0.003, "warmup": 2},
        "checkpointing": {"every": 2},
        "logging": {"every": 1},
    }
