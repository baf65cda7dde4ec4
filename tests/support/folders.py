"""Checkpoints side by side, as stock code loads them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.probe import batches, images
from bf16_to_fp16.measuring.stock import load


def compared(source: Path, out: Path, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest difference between the outputs of two folders in fp32, relative to the largest output."""
    reference, other = load(source, torch.float32), load(out, dtype)
    worst = 0.0
    for batch in batches(reference.config, None, None):
        if batch.generate or (batch.decoder_input_ids is not None and not batch.head):
            continue
        with torch.no_grad():
            inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            if batch.decoder_input_ids is not None:
                inputs["decoder_input_ids"] = batch.decoder_input_ids
            a, b = (next(iter(m(**inputs).values())).float() for m in (reference, other))
        worst = max(worst, float((a - b).abs().max() / a.abs().max()))
    return worst


def seen(folder: Path, dtype: torch.dtype = torch.float32, in_fp32: Sequence[str] = ()) -> torch.Tensor:
    """Return the logits of an image and the ids about it, as stock users load a folder."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    for path in in_fp32:
        model.get_submodule(path).float()
    (batch,) = images(model.config)
    with torch.no_grad():
        found: torch.Tensor = run_batch(model, batch).logits.float()
    return found


@contextmanager
def rewritten(file: Path) -> Iterator[Any]:
    """Give what a file of JSON or of tensors holds, and write what becomes of it."""
    stored = file.suffix == ".safetensors"
    content: Any = load_file(file) if stored else json.loads(file.read_text())
    yield content
    if stored:
        save_file(content, file, {"format": "pt"})
    else:
        file.write_text(json.dumps(content))
