"""CTranslate2: its own converter from transformers, weights in fp16, and the log-probabilities of given tokens.

It computes in fp16 on GPUs only; its CPU backends take fp16 weights to fp32. It says so when a translator is made.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...families.layout import Layout
from ..batch import Batch
from ..runtime import FP16, Arithmetic, Outcome, Runtime


def token(number: int) -> str:
    """Return the word that stands for an id: the vocabulary is made here, so no tokenizer is needed."""
    return f"<{number}>"


class Vocabulary:
    """What the converter asks a tokenizer for: the words of a config's ids."""

    def __init__(self, config: Any) -> None:
        self.size = int(config.vocab_size)
        self.pad_token = self.bos_token = token(config.decoder_start_token_id)
        self.eos_token = token(config.eos_token_id)
        self.unk_token = token(self.size - 1)

    def get_vocab(self) -> dict[str, int]:
        return {token(number): number for number in range(self.size)}

    def convert_ids_to_tokens(self, number: int) -> str:
        return token(number)


def convert(folder: Path, layout: Layout, out: str) -> None:
    """Write the checkpoint in a folder as CTranslate2's, its weights in fp16."""
    import ctranslate2

    class Converter(ctranslate2.converters.TransformersConverter):
        """Stock, but for what transformers 5 makes of a config in memory."""

        def load_model(self, model_class: Any, path: str, **options: Any) -> Any:
            model = super().load_model(model_class, path, **options)
            # The converter takes "tied" for "scaled before the head", and transformers 5 says "tied" of every model.
            model.config.tie_word_embeddings = layout.head_scale != 1.0
            # Keys of published files, which transformers does not write.
            for key, value in {"normalize_before": True, "normalize_embedding": False}.items():
                setattr(model.config, key, getattr(model.config, key, value))
            return model

        def load_tokenizer(self, tokenizer_class: Any, path: str, **options: Any) -> Any:
            from transformers import AutoConfig

            return Vocabulary(AutoConfig.from_pretrained(path))

    Converter(str(folder)).convert(out, quantization=FP16, force=True)


def run(folder: Path, layout: Layout, batch: Batch) -> Outcome:
    """Convert, score the decoder's ids, and return their log-probabilities, [rows, longest]."""
    if batch.decoder_input_ids is None or batch.decoder_attention_mask is None:
        raise UserError(
            f"{folder}: CTranslate2 has no encoder of this family by itself, nor causal models here;"
            " choose another --runtime"
        )
    import ctranslate2

    sources = words(batch.input_ids, batch.attention_mask)
    targets = [row[1:] for row in words(batch.decoder_input_ids, batch.decoder_attention_mask)]
    device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
    has = sorted(ctranslate2.get_supported_compute_types(device))
    wanted = FP16 if FP16 in has else "float32"
    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-check-") as out:
        try:
            convert(folder, layout, out)
        except (ValueError, NotImplementedError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{folder}: CTranslate2's converter does not take it ({reason}); choose another --runtime"
            ) from error
        translator = ctranslate2.Translator(out, device=device, compute_type=wanted)
        scored = [torch.tensor(result.log_probs) for result in translator.score_batch(sources, targets)]
        taken = str(translator.compute_type)
    values = torch.nn.utils.rnn.pad_sequence(scored, batch_first=True)
    how = f"the translator's compute type; the device has {', '.join(has)}"
    return Outcome(values, device, Arithmetic({taken: None}, {taken: None}, how))


def words(ids: Tensor, mask: Tensor) -> list[list[str]]:
    """Return each row's words, without padding."""
    return [[token(number) for number in row[kept.bool()].tolist()] for row, kept in zip(ids, mask, strict=True)]


def log_probabilities(logits: Tensor, batch: Batch, config: Any) -> Tensor:
    """Return from stock logits what the translator gives, [rows, length]: of the ids behind the first, and of the one
    that ends a text, which it adds."""
    assert batch.decoder_input_ids is not None and batch.decoder_attention_mask is not None
    lengths = batch.decoder_attention_mask.sum(dim=1, keepdim=True)
    following = batch.decoder_input_ids.roll(-1, dims=1).scatter(1, lengths - 1, int(config.eos_token_id))
    return logits.log_softmax(-1).gather(-1, following[..., None])[..., 0]


RUNTIME = Runtime("ctranslate2", "ctranslate2", run, log_probabilities)
