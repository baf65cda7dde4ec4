"""Texts of the demo, tokenizers of their words with every convention of sentinels, and how a text comes back."""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch, TrainingBatches

DEMO = Path(__file__).parents[2] / "bf16_to_fp16" / "demo_data"
TEXTS = (DEMO / "held_out.txt").read_text(encoding="utf-8").splitlines()
PAD, END = 0, 1
WORDS = sorted({piece for text in TEXTS for piece in re.findall(r"\w+|[^\w\s]", text)})
CHARACTERS = sorted({letter for text in TEXTS for letter in text if not letter.isspace()})
Open = Callable[..., Corpus]


def pieces(*special: str) -> list[tuple[str, float]]:
    """A unigram vocabulary of the demo text's words and characters."""
    words = [*(f"▁{word}" for word in WORDS), *WORDS, "▁", *CHARACTERS]
    scores = {piece: -float(rank) - 10 * (len(piece) < 2) for rank, piece in enumerate(dict.fromkeys(words))}
    return [(name, 0.0) for name in special] + [(p, s) for p, s in scores.items() if p not in special]


def t5_like(extra: int = 100) -> Any:
    vocabulary = pieces("<pad>", "</s>", "<unk>")
    vocabulary += [(f"<extra_id_{k}>", 0.0) for k in range(extra - 1, -1, -1)]
    return transformers.T5Tokenizer(vocab=vocabulary, extra_ids=extra)


def mt5_like() -> Any:
    vocabulary = pieces("<pad>", "</s>", "<unk>") + [(f"▁<extra_id_{k}>", 0.0) for k in range(99, -1, -1)]
    return transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0)


def pegasus_like() -> Any:
    names = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{k}>" for k in range(2, 103)), "<unk>"]
    return transformers.PegasusTokenizer(vocab=pieces(*names))


def mbart_like() -> Any:
    return transformers.MBartTokenizer(vocab=pieces("<pad>", "</s>", "<s>", "<unk>", "<mask>"), src_lang="ro_RO")


TOKENIZERS: dict[str, Callable[[], Any]] = {"t5": t5_like, "mt5": mt5_like, "pegasus": pegasus_like}
TOKENIZERS |= {"umt5": lambda: t5_like(300), "mbart": mbart_like}
TOKENIZERS |= {"byt5": lambda: transformers.ByT5Tokenizer(extra_ids=125)}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def rebuilt(source: Sequence[int], target: Sequence[int], sentinels: Sequence[int]) -> list[int]:
    """Put every span of the target where its sentinel is in the input; none of the text's ids may be a sentinel."""
    assert source[-1] == target[-1] == END
    used = [token for token in target if token in sentinels]
    assert used == list(sentinels[: len(used)]), "sentinels in order, each once"
    assert [token for token in source if token in sentinels] == used
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in sentinels:
            spans[token] = []
            latest = spans[token]
        else:
            latest.append(token)
    assert all(spans.values()), "no span is empty"
    return list(itertools.chain.from_iterable(spans.get(token, [token]) for token in source[:-1]))


def same(a: TrainingBatch, b: TrainingBatch) -> bool:
    tensors = [(a.input_ids, b.input_ids), (a.attention_mask, b.attention_mask), (a.labels, b.labels)]
    return a.examples == b.examples and all(torch.equal(x, y) for x, y in tensors if x is not None and y is not None)


def taken(training_batches: TrainingBatches, batches: int) -> list[TrainingBatch]:
    return list(itertools.islice(training_batches, batches))
