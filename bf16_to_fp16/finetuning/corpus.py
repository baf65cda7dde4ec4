"""Make training batches from text: given (input, target) pairs, or plain text turned into pairs by an objective.

Batches do not depend on the number of processes, and training resumes bit for bit. Random choices depend only on seed,
epoch, row and the number of examples in a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import UserError
from ..families.known import spare_padding
from ..measuring.batch import IGNORED_LABEL, stack
from ..measuring.stock import class_in, decoder_start, is_causal, longest_sequence, predicts_tokens, vocabulary_of
from ..measuring.texts import open_texts
from ..measuring.tokenizer import checked, load_tokenizer, without_end
from . import objectives
from .recipe import Data

_GROUP = 64  # steps of examples that are sorted by length together: long enough to group, short enough to stay shuffled
_CHARACTERS = 8  # characters of a long text that are tokenised for each token that is wanted

UNLIKE = Path(__file__).parents[1] / "demo_data" / "unlike.txt"

_TRAINING, _HELD_OUT, _SPLIT, _ORDER = range(4)  # what random numbers are for, so that no two uses share any


@dataclass(frozen=True)
class TrainingBatch:
    """The batch of one forward pass in one process; tensors have shape [rows, length]."""

    input_ids: Tensor  # int64
    attention_mask: Tensor  # 0 for padding
    labels: Tensor | None  # target id of each logits position, −100 for none; None if no tokens are predicted
    examples: tuple[tuple[int, int], ...]  # (epoch, row); empty for a batch that only keeps processes in step
    row_wise: bool = False  # whether the model gives one output for each row, not for each token
    causal: bool = False  # whether each position predicts the next of ``input_ids``

    def inputs(self) -> dict[str, Tensor]:
        """Return keyword arguments for the model. A causal model gets unshifted labels, which transformers shifts."""
        labels = self.labels.roll(1, dims=1) if self.labels is not None and self.causal else self.labels
        tensors = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "labels": labels}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


Row = tuple[str, str | None]  # text and target of a row; a row whose text is blank is left out


class _Rows:
    """A data set, and the numbers of its rows that are not blank, split into ``training`` and ``held_out``."""

    def __init__(self, data: Data, seed: int, *, all_held_out: bool = False) -> None:
        self.dataset, self.columns = open_texts(
            data.path,
            subset=data.subset,
            split=data.split,
            input_column=data.input_column,
            target_column=data.target_column,
        )
        contents = itertools.chain.from_iterable(map(self._rows, self.dataset.iter(batch_size=10_000)))
        sizes = (len(text) + len(target or "") if text and text.strip() else 0 for text, target in contents)
        self.sizes = np.fromiter(sizes, np.int64)
        rows = np.flatnonzero(self.sizes)
        if not len(rows):
            raise UserError(f"{data.path}: no examples in it; give data with at least one line of text")
        # At least one where any are wanted, and never all.
        share = min(max(1, round(len(rows) * data.held_out)), len(rows) - 1) if data.held_out else 0
        mixed = np.random.default_rng([seed, _SPLIT]).permutation(rows)
        count = len(rows) if all_held_out else share
        self.held_out, self.training = mixed[:count].tolist(), np.sort(mixed[count:])

    def _rows(self, part: Mapping[str, list[Any]]) -> Iterator[Row]:
        text, target = self.columns
        return zip(part[text], part[target] if target is not None else itertools.repeat(None), strict=False)

    def read(self, rows: Sequence[int]) -> list[Row]:
        return list(self._rows(self.dataset[[int(row) for row in rows]]))


def epoch_order(sizes: np.ndarray, step_examples: int, position: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random order of an epoch's examples, in which those of one step have similar sizes. position: the number
    of examples in earlier epochs."""
    order = rng.permutation(len(sizes))
    head = min(-position % step_examples, len(order))
    steps = (len(order) - head) // step_examples
    body = order[head : head + steps * step_examples]
    groups = []
    for first in range(0, len(body), _GROUP * step_examples):
        part = body[first : first + _GROUP * step_examples]
        groups.append(part[np.argsort(-sizes[part], kind="stable")])
    if groups:
        body = np.concatenate(groups).reshape(steps, step_examples)[rng.permutation(steps)].ravel()
    return np.concatenate([order[:head], body, order[head + steps * step_examples :]])


class Corpus:
    """Makes training and held-out batches of a recipe's ``data``, for the model of ``config`` and the tokenizer in
    ``folder``. Raises UserError for unusable data, tokenizers and objectives."""

    def __init__(self, data: Data, folder: str | Path, config: Any, *, seed: int = 0) -> None:
        self.data, self.folder, self.seed = data, folder, seed
        self.vocabulary = vocabulary_of(config)
        self.tokenizer = load_tokenizer(Path(folder))
        self.conventions = objectives.conventions(self.tokenizer, self.vocabulary, data.first_sentinel)
        own = data if data.held_out_path is None else data.model_copy(update={"held_out": 0.0})
        self.rows = self.held_out_rows = _Rows(own, seed)
        if data.held_out_path is not None:
            self.held_out_rows = _Rows(data.model_copy(update={"path": data.held_out_path}), seed, all_held_out=True)
        spare = spare_padding(config.to_dict())
        self.spare = int(spare) if spare < math.inf else 0
        self.predicts, self.causal = predicts_tokens(config), is_causal(config)
        stock = class_in(config)
        self.row_wise = stock is not None and stock.row_wise
        self.objective = self._objective()
        longest = longest_sequence(config)
        self.target_length = min(data.target_length, longest)
        if self.causal and self.objective == "pairs":  # both are in one row
            self.target_length = min(self.target_length, max(1, longest // 2))
            longest -= self.target_length
        self.input_length = min(data.input_length, longest)
        before, after = self.conventions.before, self.conventions.after
        # A decoder begins with a token that it is given, and must learn to end, whatever the tokenizer puts there.
        self.target_frame = before[before[:1] == (decoder_start(config),) :], after or (self.conventions.end,)
        density, span = self.conventions.noise
        self.density, self.mean_span = data.noise_density or density, data.mean_span_length or span
        self.window = self._window()

    def _objective(self) -> objectives.Objective:
        if not self.predicts:
            return "text"
        if all(rows.columns[1] is not None for rows in (self.rows, self.held_out_rows)):
            return "pairs"
        if self.causal:
            return "next-token"
        if self.conventions.objective is None:
            raise UserError(
                f"{self.folder}: the tokenizer has neither sentinel tokens nor a mask token; give the first sentinel's"
                " id as data.first_sentinel, or give target texts"
            )
        return self.conventions.objective

    def _window(self) -> int:
        if self.objective == "span-corruption":
            lengths, count = (self.input_length, self.target_length), len(self.conventions.sentinels)
            return objectives.window_length(*lengths, self.density, self.mean_span, count)
        window = self.input_length - max(1, len(self.conventions.before) + len(self.conventions.after))
        if self.objective == "denoising":
            window = min(window, self.target_length - sum(map(len, self.target_frame)))
        return max(1, window)

    def tokens(self, text: str) -> list[int]:
        """Return a text's token ids, without special tokens around them."""
        return checked(self.tokenizer(text, add_special_tokens=False)["input_ids"], self.vocabulary, self.folder)

    def example(self, row: int, content: Row, epoch: int, *, held_out: bool = False) -> tuple[list[int], list[int]]:
        """Return the (input, target) ids that a row has in an epoch. The target is empty for models that predict no
        tokens. content: the row's text and target."""
        text, target = content
        if self.objective == "pairs":
            if target is None:
                raise UserError(f"{self.data.path}: row {row} has no target; give every row one")
            return self._pair(text, target)
        rng = np.random.default_rng([self.seed, _HELD_OUT if held_out else _TRAINING, epoch, row])
        if len(text) > (most := self.window * _CHARACTERS):
            first = _window_start(len(text), most, rng)
            text = text[first : first + most]
        if self.objective == "gap-sentences":
            return self._of_sentences(text, rng)
        tokens, given = self.tokens(text), self.conventions
        if self.objective == "next-token":
            tokens = [*tokens, given.end]
        first = _window_start(len(tokens), self.window, rng)
        tokens = tokens[first : first + self.window]
        if self.objective == "next-token":
            tokens, known = [*given.before, *tokens], max(1, len(given.before))
            return tokens[:known], tokens[known:]
        if self.objective == "text":
            return [*given.before, *tokens, *given.after], []
        spans = objectives.noise_spans(len(tokens), self.density, self.mean_span, rng)
        if given.span_mask is None or self.objective != "denoising":
            return objectives.span_corruption(tokens, spans, given.sentinels, given.end)
        (*masked, _), _ = objectives.span_corruption(tokens, spans, itertools.repeat(given.span_mask), given.end)
        before, after = self.target_frame
        return [*given.before, *masked, *given.after], [*before, *tokens, *after]

    def _pair(self, text: str, target: str) -> tuple[list[int], list[int]]:
        source = self._cut(text, self.input_length)
        if self.causal:
            answer = self._cut(target, self.target_length - 1, add_special_tokens=False)
            return without_end(torch.tensor(source), self.tokenizer).tolist(), [*answer, self.conventions.end]
        before, after = self.target_frame
        room = max(1, self.target_length - len(before) - len(after))
        return source, [*before, *self._cut(target, room, add_special_tokens=False), *after]

    def _cut(self, text: str, length: int, **options: Any) -> list[int]:
        # No token is longer than this, so that the cut text has the same first ids.
        ids = self.tokenizer(text[: 64 * length], truncation=True, max_length=length, **options)["input_ids"]
        return checked(list(ids), self.vocabulary, self.folder)

    def _of_sentences(self, text: str, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        sentences = [self.tokens(sentence) for sentence in objectives.split_sentences(text)]
        first = _window_start(sum(map(len, sentences)), self.window, rng)
        pieces, place = [], 0
        for ids in sentences:
            pieces.append(ids[max(0, first - place) : max(0, first + self.window - place)])
            place += len(ids)
        given = self.conventions
        assert given.mask is not None
        return objectives.gap_sentences(
            pieces, mask=given.mask, end=given.end, target_length=self.target_length, rng=rng
        )

    def batch(self, rows: Sequence[tuple[int, int, Row]], *, held_out: bool = False) -> TrainingBatch:
        pairs = [self.example(row, content, epoch, held_out=held_out) for epoch, row, content in rows]
        if self.causal:
            # Input and target in one row, with labels from the input's last position on.
            none = [IGNORED_LABEL]
            pairs = [([*source, *target], [*none * (len(source) - 1), *target, *none]) for source, target in pairs]
        ids, mask = stack([torch.tensor(source) for source, _ in pairs], self.conventions.pad)
        if self.spare:
            ids = functional.pad(ids, (0, self.spare), value=self.conventions.pad)
            mask = functional.pad(mask, (0, self.spare))
        labels = None
        if self.predicts:
            labels, _ = stack([torch.tensor(target) for _, target in pairs], IGNORED_LABEL)
        examples = tuple((epoch, row) for epoch, row, _ in rows)
        return TrainingBatch(ids, mask, labels, examples, row_wise=self.row_wise, causal=self.causal)

    def training_batches(self, rank: int = 0, world: int = 1) -> TrainingBatches:
        return TrainingBatches(self, rank, world)

    def held_out(self, examples: int | None = None, rank: int = 0, world: int = 1) -> list[TrainingBatch]:
        """Return one process's share of the held-out batches. Every process gets the same number. examples: the most to
        use, None for all of them."""
        numbers = self.held_out_rows.held_out[:examples]
        contents = self.held_out_rows.read(numbers) if numbers else []
        rows = [(0, row, content) for row, content in zip(numbers, contents, strict=True)]
        rows.sort(key=lambda item: -len(item[2][0]))
        size = self.data.batch_size * world
        batches = []
        for first in range(0, len(rows), size):
            part = rows[first : first + size][rank::world]
            batch = self.batch(part or rows[first : first + 1], held_out=True)
            if not part:
                labels = None if batch.labels is None else torch.full_like(batch.labels, IGNORED_LABEL)
                batch = replace(batch, labels=labels, examples=(), row_wise=False)
            batches.append(batch)
        return batches

    def unlike(self) -> list[TrainingBatch]:
        """Return batches of packaged text unlike most training data: code, figures and other languages."""
        lines = UNLIKE.read_text(encoding="utf-8").splitlines()
        rows = [(0, row, (line, line if self.objective == "pairs" else None)) for row, line in enumerate(lines)]
        size = self.data.batch_size
        return [self.batch(rows[first : first + size], held_out=True) for first in range(0, len(rows), size)]

    def describe(self) -> dict[str, Any]:
        sizes = self.rows.sizes
        described: dict[str, Any] = {
            "rows": len(sizes),
            "blank": int((sizes == 0).sum()),
            "training": len(self.rows.training),
            "held_out": len(self.held_out_rows.held_out),
            "characters": int(sizes.sum()),
            "path": self.data.path,
            "objective": self.objective,
            "input_length": self.input_length,
            "target_length": self.target_length,
            "window": self.window,
            "seed": self.seed,
        }
        if self.objective in ("span-corruption", "denoising"):
            described |= {"noise_density": self.density, "mean_span_length": self.mean_span}
        if self.objective == "span-corruption":
            described["first_sentinel"] = self.conventions.sentinels[0]
        return described


def _window_start(length: int, most: int, rng: np.random.Generator) -> int:
    beyond = most // 2
    place = int(rng.integers(-beyond, max(1, length - most + 1) + beyond))
    return max(0, min(place, length - most))


class TrainingBatches(Iterator[TrainingBatch]):
    """Endless training batches for one process. The examples of a step do not depend on the number of processes."""

    def __init__(self, corpus: Corpus, rank: int, world: int) -> None:
        self.corpus, self.rank, self.world = corpus, rank, world
        share = corpus.data.share(world)
        self.passes, self.pass_examples = share.gradient_accumulation, share.batch_size * world
        self.step_examples = self.pass_examples * self.passes
        self.steps = self._pass = 0
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def _example(self, place: int) -> tuple[int, int]:
        rows = self.corpus.rows
        epoch, index = divmod(place, len(rows.training))
        if epoch != self._epoch:
            rng = np.random.default_rng([self.corpus.seed, _ORDER, epoch, 0])
            first = epoch * len(rows.training)
            self._order = epoch_order(rows.sizes[rows.training], self.step_examples, first, rng)
            self._epoch = epoch
        return epoch, int(rows.training[self._order[index]])

    def __next__(self) -> TrainingBatch:
        first = self.steps * self.step_examples + self._pass * self.pass_examples
        examples = [self._example(place) for place in range(first, first + self.pass_examples)[self.rank :: self.world]]
        contents = self.corpus.rows.read([row for _, row in examples])
        batch = self.corpus.batch([(*each, content) for each, content in zip(examples, contents, strict=True)])
        self._pass += 1
        if self._pass == self.passes:
            self.steps, self._pass = self.steps + 1, 0
        return batch

    def state_dict(self) -> dict[str, Any]:
        settings = self.corpus.describe() | {"step_examples": self.step_examples, "path": None}
        return {"steps": self.steps, "settings": settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume bit for bit from ``state``; raise UserError if data or settings have changed since."""
        now, then = self.state_dict()["settings"], state["settings"]
        changed = [key for key in sorted({*now, *then}) if now.get(key) != then.get(key)]
        if changed:
            shown = ", ".join(f"{key} was {then.get(key)} and is {now.get(key)}" for key in changed[:3])
            raise UserError(
                f"the checkpoint was written with other data settings ({shown}); restore them or start anew"
            )
        self.steps = int(state["steps"])
