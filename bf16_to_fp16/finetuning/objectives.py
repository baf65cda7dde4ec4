"""Pretraining objectives that turn plain text into training pairs.

Span corruption (Raffel et al. 2020, §3.1.4): spans of tokens become sentinels, and the target lists the spans. Gap
sentences (Zhang et al. 2020, PEGASUS, "Random"): some sentences are masked, and the target lists them. Denoising (Liu
et al. 2020, mBART): spans become one mask each, and the target is the text; here sentences keep their order. Next
token: the target is the text after its first token."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import UserError

Objective = Literal["pairs", "span-corruption", "gap-sentences", "denoising", "next-token", "text"]
"""How an example is made: "pairs" are given with their targets, and "text" has no target, for an encoder. The first
lines of this module describe the others."""

SENTINELS = 100  # most sentinels of one example: what T5 was pretrained with

BYTE_SENTINEL = 258
"""First sentinel of ByT5 (Xue et al. 2022), which counts down through byte ids: no UTF-8 text has bytes from 248."""

SUBWORDS, BYTES, WHOLE_TEXT = (0.15, 3.0), (0.15, 20.0), (0.35, 3.5)
"""The share of a text's tokens that is noise, and the mean length of a noise span: T5's, ByT5's, and mBART's."""

GAP_RATIO = 0.3  # share of the sentences that gap sentences take out, between Pegasus's 0.15 and 0.45


def noise_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Return how many of ``length`` tokens are noise, and in how many spans they lie. A text of one token is all noise;
    in a longer one, a token that is not noise stands before every span."""
    if length < 2:
        return length, length
    noise = min(max(round(length * density), 1), length - 1)
    return noise, min(max(round(noise / mean_span), 1), noise, length - noise)


def noise_spans(length: int, density: float, mean_span: float, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Return the (start, end) of each span of noise, in order. Lengths of spans and gaps are random, as in T5."""
    noise, spans = noise_counts(length, density, mean_span)
    if noise == length:
        return [(0, length)] if length else []
    lengths = _parts(noise, spans, rng)
    places, place = [], 0
    for kept, taken in zip(_parts(length - noise, spans, rng), lengths, strict=True):
        places.append((place + kept, place + kept + taken))
        place += kept + taken
    return places


def span_corruption(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], sentinels: Iterable[int], end: int
) -> tuple[list[int], list[int]]:
    """Return (input, target) ids: each span becomes a sentinel, and the target lists each sentinel with its span."""
    source: list[int] = []
    target: list[int] = []
    place = 0
    for (start, stop), sentinel in zip(spans, sentinels, strict=False):
        source += [*tokens[place:start], sentinel]
        target += [sentinel, *tokens[start:stop]]
        place = stop
    return [*source, *tokens[place:], end], [*target, end]


def window_length(input_length: int, target_length: int, density: float, mean_span: float, sentinels: int) -> int:
    """Return how many tokens of text one example of span corruption can hold at most. Its input, its target and the
    number of ``sentinels`` set the limit."""

    def fits(length: int) -> bool:
        noise, spans = noise_counts(length, density, mean_span)
        return length - noise + spans < input_length and noise + spans < target_length and spans <= sentinels

    # Every term grows with the length, so the first that does not fit ends the search.
    return next(length for length in itertools.count(1) if not fits(length + 1))


def _parts(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """Return ``parts`` positive lengths with the sum ``total``; every division is equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1 if parts > 1 else np.empty(0, int)
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(int).tolist()


def split_sentences(text: str) -> list[str]:
    """Return a text's sentences, each with its trailing space. An abbreviation may count as a sentence's end."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)]) if start < end]


_SENTENCE_END = re.compile(r"""[.!?]+["'”’»)\]]*\s+(?![a-zß-öø-ÿ\s])|[。！？]+[」』”’）]*\s*|\s*\n\s*""")


def gap_sentences(
    sentences: Sequence[Sequence[int]], *, mask: int, end: int, target_length: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Return (input, target) ids: some sentences become one ``mask`` each, and the target lists them."""
    # A sentence too long for the target is cut into several. A single sentence is cut into halves.
    room = target_length - 1
    parts = [ids[k : k + room] for ids in sentences for k in range(0, len(ids), room)]
    if len(parts) == 1 and len(parts[0]) > 1:
        half = len(parts[0]) // 2
        parts = [parts[0][:half], parts[0][half:]]
    wanted = max(1, min(round(len(parts) * GAP_RATIO), len(parts) - 1))
    chosen: set[int] = set()
    for k in rng.permutation(len(parts)):
        if len(chosen) < wanted and len(parts[k]) <= room:
            chosen.add(k)
            room -= len(parts[k])
    source: list[int] = []
    target: list[int] = []
    for k, ids in enumerate(parts):
        if k in chosen:
            target += ids
        source += [mask] if k in chosen else ids
    return [*source, end], [*target, end]


@dataclass(frozen=True)
class Conventions:
    """The special token ids of a tokenizer, with which objectives make examples."""

    sentinels: tuple[int, ...]  # in order of use
    mask: int | None  # replaces a whole sentence, Pegasus only
    pad: int
    end: int
    bytes: bool  # whether each token is a byte, as in ByT5
    span_mask: int | None = None  # replaces a span where there are neither sentinels nor ``mask``
    before: tuple[int, ...] = ()  # what the tokenizer puts before a text, such as mBART's language
    after: tuple[int, ...] = ()  # what it puts after a text

    @property
    def objective(self) -> Objective | None:
        """The objective to train an encoder-decoder on, set by its tokenizer's special ids, or None if none fits."""
        if self.mask is not None:
            return "gap-sentences"
        if self.span_mask is not None:
            return "denoising"
        return "span-corruption" if self.sentinels else None

    @property
    def noise(self) -> tuple[float, float]:
        """Return the share of tokens that become noise, and the mean length of a span of noise."""
        return WHOLE_TEXT if self.objective == "denoising" else BYTES if self.bytes else SUBWORDS


def conventions(tokenizer: Any, vocabulary: int, first_sentinel: int | None = None) -> Conventions:
    """Return the special token ids of ``tokenizer``. Raises UserError for a ``first_sentinel`` outside the vocabulary,
    and for a tokenizer without an end token."""
    known: dict[str, int] = tokenizer.get_vocab()
    of_bytes = type(tokenizer).__name__.startswith("ByT5")
    if first_sentinel is not None:
        if first_sentinel >= vocabulary:
            raise UserError(
                f"data.first_sentinel is {first_sentinel}, past the vocabulary of {vocabulary}; give an id below that"
            )
        ids = [first_sentinel - k for k in range(min(SENTINELS, first_sentinel + 1))]
    elif of_bytes:
        ids = [BYTE_SENTINEL - k for k in range(SENTINELS)]
    else:
        # A tokenizer of mT5 may have had T5's names added on top, with ids that the model never saw.
        prefix = "▁<extra_id_" if "▁<extra_id_0>" in known else "<extra_id_"
        names = itertools.takewhile(known.__contains__, (f"{prefix}{k}>" for k in itertools.count()))
        ids = [known[name] for name in names]
    mask = known.get(str(getattr(tokenizer, "mask_token_sent", None) or "<mask_1>"))
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-sequence token, which targets need; use the original's tokenizer")
    sentinels = tuple(sentinel for sentinel in ids[:SENTINELS] if 0 <= sentinel < vocabulary)
    pad, end = int(tokenizer.pad_token_id or 0), int(tokenizer.eos_token_id)
    text, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    start = next((k for k in range(len(whole)) if whole[k : k + len(text)] == text), 0)
    before, after = tuple(whole[:start]), tuple(whole[start + len(text) :])
    span_mask = None if sentinels or mask is not None else tokenizer.mask_token_id
    span_mask = span_mask if span_mask is None or span_mask < vocabulary else None
    return Conventions(sentinels, mask, pad, end, of_bytes, span_mask, before, after)
