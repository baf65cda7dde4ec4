"""Make batches of texts with a checkpoint's tokenizer. A causal model gets the text and its target as one row."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.folder import check_tokenizer
from ..errors import UserError, first_line
from .batch import DATA, LOGIT_BUDGET, Batch, padded, seeded
from .stock import decoder_start, is_causal, pad_id, vocabulary_of
from .texts import texts


def tokenised(config: Any, source: Path, data: str, *, seed: int, examples: int, length: int) -> list[Batch]:
    """Return a random sample of the rows of ``data``, a file or Hub dataset, as batches of token ids, shortest first.
    source: the tokenizer's folder. examples: the most rows. length: the most tokens of a row. Raises UserError for
    unusable data or an unusable tokenizer."""
    chosen = _sample(texts(data), examples, random.Random(seed))
    if not chosen:
        raise UserError(f"{data}: no examples in it; give a file with at least one")
    tokenizer = load_tokenizer(source)
    vocabulary, causal = vocabulary_of(config), is_causal(config)
    generator = seeded(seed)

    def encode(text: str, **options: Any) -> Tensor:
        tokens = tokenizer(text, truncation=True, max_length=length, **options)["input_ids"]
        return torch.tensor(checked(tokens, vocabulary, source) or [pad_id(config)], dtype=torch.int64)

    def pair(text: str, target: str | None) -> tuple[Tensor, Tensor]:
        encoder = encode(text)
        if not causal and target is not None:
            ids = encode(target)  # of which the first may be the token that a decoder is given anyway
            return encoder, ids[1:] if len(ids) > 1 and ids[0] == decoder_start(config) else ids
        if not causal:
            return encoder, torch.randint(0, vocabulary, (min(32, length),), generator=generator)
        if target is not None:
            encoder = torch.cat([without_end(encoder, tokenizer), encode(target, add_special_tokens=False)])[:length]
        return encoder, encoder

    pairs = [pair(text, target) for text, target in chosen]
    pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])))
    longest = max(len(target) for _, target in pairs)
    rows = max(1, min(8, LOGIT_BUDGET // (longest * vocabulary)))
    return [
        padded(
            config,
            [text for text, _ in pairs[i : i + rows]],
            [target for _, target in pairs[i : i + rows]],
            f"{Path(data).name}, batch {i // rows + 1}",
            DATA,
        )
        for i in range(0, len(pairs), rows)
    ]


def _sample(items: Iterable[tuple[str, str | None]], count: int, rng: random.Random) -> list[tuple[str, str | None]]:
    """Return a uniform sample of at most ``count`` items in one pass (Vitter's algorithm R)."""
    kept: list[tuple[str, str | None]] = []
    for seen, item in enumerate(items):
        if len(kept) < count:
            kept.append(item)
        elif (place := rng.randrange(seen + 1)) < count:
            kept[place] = item
    return kept


def checked(ids: list[int], vocabulary: int, source: str | Path) -> list[int]:
    if ids and max(ids) >= vocabulary:
        raise UserError(
            f"{source}: its tokenizer gives id {max(ids)}, past the vocabulary of {vocabulary};"
            " the tokenizer belongs to another checkpoint"
        )
    return ids


def without_end(ids: Tensor, tokenizer: Any) -> Tensor:
    return ids[:-1] if len(ids) > 1 and int(ids[-1]) == tokenizer.eos_token_id else ids


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    check_tokenizer(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        tokenizer("a")  # some faults of its config show only here
        return tokenizer
    except Exception as error:  # transformers raises many kinds, from OSError to TypeError
        raise UserError(
            f"{folder}: no usable tokenizer ({first_line(error)}); put the original's tokenizer there"
        ) from error
