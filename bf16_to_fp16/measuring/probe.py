"""Seeded batches of token ids for measuring a model. The built-in probe needs no tokenizer; ``_probe`` lists its
rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.folder import has_tokenizer, tokenizer_beside
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..errors import UserError
from ..families.known import of_model_type, spare_padding
from ..families.layout import Layout, TensorSource
from ..families.resolve import resolve
from . import batch as kinds
from . import id_choice, stock
from .batch import (
    GENERATED_TOKENS,
    Batch,
    ended,
    is_blind,
    padded,
    padded_left,
    runnable,
    runnable_as_one,
    seeded,
    stack,
)
from .products import FastProducts
from .tokenizer import tokenised

_PROBE_LOGITS = 2**25
"""Most logits of the probe, random and short rows aside. At a vocabulary of 32,128 they are a thousand positions."""

_SHORT, _SHORT_DECODER = 8, 4
"""Most tokens of a short row, and of its decoder row. Each token costs the logits of the whole vocabulary."""

_BEYOND_WINDOW, _LONGEST_WINDOW = 16, 2048
"""The number of tokens by which a row exceeds a sliding window, and the longest window that gets such a row. Scores
grow with the square of the window."""


def batches(
    config: Any,
    source: Path | None,
    data: str | None,
    *,
    seed: int = 0,
    examples: int = 32,
    length: int = 512,
    chosen: Mapping[str, Sequence[int]] | None = None,
) -> list[Batch]:
    """Return the batches of the text in ``data``, or the built-in probe without data. source: the folder with the
    tokenizer. examples: the largest number of rows of text. length: the largest number of tokens in a row. chosen: maps
    reasons to the ids that the probe runs; None for random ids. Raises UserError for unusable data or tokenizer."""
    length = min(length, stock.longest_sequence(config))
    if data is None:
        inputs = _probe(config, seed, length, chosen)
    elif source is None:
        raise UserError(f"{data}: text needs the checkpoint's tokenizer; give a checkpoint folder")
    else:
        inputs = tokenised(config, source, data, seed=seed, examples=examples, length=length)
        if stock.predicts_tokens(config):
            inputs.append(generation(config, inputs[0]))
    runs = [batch for whole in inputs for batch in runnable(config, whole)]
    return [replace(_with_end_token(config, batch), blind=is_blind(config, batch)) for batch in runs]


def audit_batches(
    config: Any,
    folder: Path,
    data: str | None,
    *,
    seed: int = 0,
    chosen: Mapping[str, Sequence[int]] | None = None,
    opened: tuple[TensorSource, Layout] | None = None,
) -> list[Batch]:
    """Return the batches of the built-in probe, then those of the text in ``data``. chosen: for each reason, the ids
    that the probe runs for it; ``chosen_ids`` by default. opened: ``folder``'s checkpoint and layout, if known."""
    if opened is None:
        checkpoint = open_checkpoint(folder)
        opened = checkpoint, resolve(checkpoint)
    if chosen is None:
        chosen = chosen_ids(config, *opened, seed=seed)
    inputs = batches(config, None, None, seed=seed, chosen=chosen)
    if data is not None:
        inputs += batches(config, folder, data, seed=seed)
    return inputs


def chosen_ids(config: Any, source: TensorSource, layout: Layout, *, seed: int = 0) -> dict[str, list[int]] | None:
    """Return the ids of a large vocabulary that the probe runs, by the reason for choosing them. For a small vocabulary
    return None: the probe then runs every id."""
    if stock.vocabulary_of(config) <= id_choice.WHOLE:
        return None
    with FastProducts():
        return id_choice.chosen(source, layout, stock.special_ids(config), seeded(seed))


def usable(by_reason: Mapping[str, Sequence[int]], config: Any) -> Mapping[str, Sequence[int]] | None:
    ids = [i for chosen in by_reason.values() for i in chosen]
    fits = 0 < len(ids) <= id_choice.CHOSEN and max(ids) < stock.vocabulary_of(config)
    return by_reason if fits else None


def _with_end_token(config: Any, batch: Batch) -> Batch:
    """Return the batch with one end token in each row if the model's class reads its answer at that token. Raises
    UserError if the config has no end token."""
    kind = stock.class_in(config)
    if kind is None or not kind.reads_end_token:
        return batch
    end = stock.end_ids(config)
    if not end:
        raise UserError(
            f"{config.name_or_path}/config.json: {kind.names[0]} reads the end token's state, but eos_token_id is"
            f" {stock.setting(config, 'eos_token_id')!r}; take eos_token_id from the original checkpoint"
        )
    return ended(batch, end[0])


def _begun(config: Any, ids: Tensor) -> Tensor:
    if first := stock.first_ids(config):
        ids = ids.clone()
        ids[..., 0] = first[0]
    return ids


def _probe(config: Any, seed: int, length: int, chosen: Mapping[str, Sequence[int]] | None) -> list[Batch]:
    generator, vocabulary = seeded(seed), stock.vocabulary_of(config)

    def ids(rows: int, columns: int) -> Tensor:
        return torch.randint(0, vocabulary, (rows, min(columns, length)), generator=generator)

    def batch(kind: str, description: str, encoder: Tensor, decoder: Tensor) -> Batch:
        started = decoder.clone()
        started[:, 0] = stock.decoder_start(config)
        return _unpadded(config, kind, description, encoder, started)

    repeated = ids(2, 1).repeat(1, min(64, length))
    inputs = [
        batch(kinds.RANDOM, "random ids", _begun(config, ids(4, 64)), ids(4, 32)),
        batch(kinds.LONG, f"one sequence of {length} tokens", _begun(config, ids(1, length)), ids(1, min(length, 128))),
        batch(kinds.REPEATED, "one token repeated", repeated, repeated[:, :32]),
        padded(config, [_begun(config, ids(1, n)[0]) for n in (48, 20, 7, 1)], [ids(1, n)[0] for n in (5, 24, 2, 16)]),
    ]
    if stock.is_causal(config):
        inputs.append(padded_left(config, inputs[-1]))
    window = stock.setting(config, "sliding_window")
    past = window + _BEYOND_WINDOW if isinstance(window, int) and length <= window <= _LONGEST_WINDOW else 0
    if 0 < past <= stock.longest_sequence(config) and not stock.takes_decoder_ids(config):
        row = _begun(config, torch.randint(0, vocabulary, (1, past), generator=generator))
        inputs.append(_unpadded(config, kinds.LONG, f"one sequence of {past} tokens", row, row))
    inputs += [*_short(config, min(length, _SHORT), generator), *images(config)]
    if vocabulary <= id_choice.WHOLE:
        inputs += _sweep(config, vocabulary, min(length, 128))
    else:
        ids_by_reason = id_choice.drawn(vocabulary, stock.special_ids(config), generator) if chosen is None else chosen
        inputs += _chosen(config, ids_by_reason, min(length, 128))
    if not stock.predicts_tokens(config):
        return inputs
    inputs = _within_budget(inputs, vocabulary)
    return [*inputs, generation(config, next(batch for batch in inputs if batch.kind == kinds.PADDED))]


def _unpadded(config: Any, kind: str, description: str, encoder: Tensor, decoder: Tensor, **options: Any) -> Batch:
    whole = Batch(description, encoder, torch.ones_like(encoder), kind=kind, **options)
    if not stock.takes_decoder_ids(config):
        return whole
    return replace(whole, decoder_input_ids=decoder, decoder_attention_mask=torch.ones_like(decoder))


def images(config: Any) -> list[Batch]:
    """Return one batch with an image of uniform noise in [−1, 1] between random text ids, or [] for a model without
    vision. The text ids never include the image token's id."""
    family = of_model_type(config.model_type)
    projector = None if family is None else family.projector
    if projector is None:
        return []
    generator, vocabulary, w = torch.Generator().manual_seed(0), stock.vocabulary_of(config), projector.image

    def value(key: str, otherwise: int = 1) -> int:
        return int(attrgetter(key)(config)) if key else otherwise

    token, channels, patch = value(w.token), value(w.channels, 3), value(w.patch)
    tokens, across = value(w.tokens, 4), 2 * value(w.merged)
    before, after = (torch.randint(0, vocabulary, (1, 4), generator=generator) for _ in range(2))
    before, after = (x.where(x != token, (token + 1) % vocabulary) for x in (_begun(config, before), after))
    ids = torch.cat([before, torch.full((1, tokens), token), after], 1)
    marks = torch.cat([torch.zeros_like(before), torch.ones(1, tokens, dtype=torch.int64), torch.zeros_like(after)], 1)
    side = value(w.size, across * patch)
    shape, sizes = [1, channels, side, side], [[side, side]]
    if w.frames:
        shape, sizes = [across**2, channels * value(w.frames) * patch**2], [[1, across, across]]
    if w.places:
        shape = [1, across**2, channels * patch**2]
    image = {"pixel_values": torch.rand(*shape, generator=generator) * 2 - 1}
    if w.marks:
        image[w.marks] = marks
    if w.sizes:
        image[w.sizes] = torch.tensor(sizes)
    if w.places:
        image[w.places] = torch.cartesian_prod(torch.arange(across), torch.arange(across)).flip(1)[None]
    return [Batch("an image", ids, torch.ones_like(ids), kind=kinds.IMAGE, image=image)]


def _within_budget(inputs: Sequence[Batch], vocabulary: int) -> list[Batch]:
    """Return the batches, with logits turned off where ``_PROBE_LOGITS`` would be exceeded."""
    left = _PROBE_LOGITS // vocabulary
    result: list[Batch] = []
    unseen = {kinds.RANDOM, kinds.SHORT}
    for batch in inputs:
        positions = (batch.input_ids if batch.decoder_input_ids is None else batch.decoder_input_ids).numel()
        # The first random batch and the first short batch keep their logits even if these do not fit.
        kept = batch.head and (positions <= left or batch.kind in unseen)
        left -= positions if kept else 0
        unseen.discard(batch.kind)
        result.append(batch if kept else replace(batch, head=False))
    return result


def random_rows(config: Any, *, seed: int, left: bool = False) -> Batch:
    """Return a batch of 16 rows of random ids, with log-uniform lengths from 1 to 64 (decoder: 1 to 16). Half of the
    rows get a start or end token, and about one in four a special token. left: pad the encoder's rows on the left, if
    stock code can run that in fp16."""
    generator, vocabulary = seeded(seed), stock.vocabulary_of(config)
    most, special = stock.longest_sequence(config), stock.special_ids(config)

    def drawn(longest: int, *, framed: bool) -> Tensor:
        share = float(torch.rand((), generator=generator))
        length = math.floor(min(longest, most) ** share * (1 + 1e-9))
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        place, chance, index = (int(torch.randint(0, n, (), generator=generator)) for n in (length, 4, len(special)))
        if chance == 0:
            ids[place] = special[index]
        return torch.tensor(_with_start_or_end(config, ids.tolist(), most)) if framed else ids

    encoder = [drawn(64, framed=row % 2 == 1) for row in range(16)]
    decoder = [drawn(16, framed=False) for _ in range(16)]
    right = padded(config, encoder, decoder, "random ids of all lengths", kinds.RANDOM)
    if spare_padding(config.to_dict()):
        return _with_end_token(config, runnable_as_one(config, right))
    return _with_end_token(config, padded_left(config, right) if left else right)


def few_rows(config: Any) -> Batch:
    """Return a batch of eight rows for comparing checkpoints, or of 32 for a model that predicts no tokens. A row has
    eight random ids (decoder: four) and a start or end token. There is no padding."""
    generator, vocabulary = torch.Generator().manual_seed(0), stock.vocabulary_of(config)
    most = stock.longest_sequence(config)

    def drawn(length: int) -> list[int]:
        return torch.randint(0, vocabulary, (min(length, most),), generator=generator).tolist()

    started = [stock.decoder_start(config)] if stock.takes_decoder_ids(config) else []
    rows = [
        (_with_start_or_end(config, drawn(_SHORT), most), [*started, *drawn(_SHORT_DECODER)][:most])
        for _ in range(8 if stock.predicts_tokens(config) else 32)
    ]
    return rows_of(config, rows, "a few short rows")


def whole_rows(config: Any, ids: Tensor, description: str) -> Batch:
    """Return ids [rows, length] as one unpadded batch. A decoder gets them shifted right, after its start token."""
    started = ids.roll(1, dims=1)
    started[:, 0] = stock.decoder_start(config)
    return _with_end_token(config, _unpadded(config, kinds.RANDOM, description, ids, started))


def _with_start_or_end(config: Any, ids: list[int], most: int) -> list[int]:
    """Return the ids with the start token or, if there is none, the end token, cut to ``most``."""
    first = stock.first_ids(config)
    return [*first, *ids][:most] if first else [*ids, *stock.end_ids(config)][-most:]


def rows_of(config: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]], description: str) -> Batch:
    """Return pairs of encoder and decoder ids as one right-padded batch. Decoder ids must include the start token."""
    ids, mask = stack([torch.tensor(row) for row, _ in rows], stock.pad_id(config))
    if not stock.takes_decoder_ids(config):
        return _with_end_token(config, runnable_as_one(config, Batch(description, ids, mask)))
    decoder = stack([torch.tensor(row) for _, row in rows], stock.pad_id(config))
    return runnable_as_one(config, Batch(description, ids, mask, *decoder))


def _short(config: Any, longest: int, generator: torch.Generator) -> list[Batch]:
    """Return two batches of short rows, padded on the right and on the left. A row has 1 to ``longest`` random ids or
    one special id, and comes with and without a start or end token."""
    vocabulary = stock.vocabulary_of(config)
    drawn = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in range(1, longest + 1)]
    rows: list[list[int]] = []
    for ids in [*drawn, *([i] for i in stock.special_ids(config))]:
        framed = _with_start_or_end(config, ids, longest)
        rows += [ids] if framed == ids else [ids, framed]
    encoder = [torch.tensor(row) for row in rows]
    right = padded(config, encoder, [row[-_SHORT_DECODER:] for row in reversed(encoder)], "short rows", kinds.SHORT)
    return [right, padded_left(config, right)]


def _chosen(config: Any, by_reason: Mapping[str, Sequence[int]], length: int) -> list[Batch]:
    ids = torch.tensor([i for chosen in by_reason.values() for i in chosen], dtype=torch.int64)
    inputs: list[Batch] = []
    for columns in dict.fromkeys(min(n, length, len(ids)) for n in (length, 2, 1)):
        for rows in _in_rows(ids, columns):
            name, reasons = f"chosen ids in rows of {rows.shape[1]}", {} if inputs else by_reason
            inputs.append(_unpadded(config, kinds.CHOSEN, name, rows, rows.flip(1), chosen=reasons))
    return inputs


def _in_rows(ids: Tensor, columns: int) -> list[Tensor]:
    full = len(ids) // columns * columns
    return [rows for rows in (ids[:full].view(-1, columns), ids[full:].view(1, -1)) if rows.numel()]


def _sweep(config: Any, vocabulary: int, length: int) -> list[Batch]:
    return [
        _unpadded(config, kinds.SWEEP, f"ids {int(ids[0, 0])} to {int(ids[-1, -1])}", ids, vocabulary - 1 - ids)
        for ids in _in_rows(torch.arange(vocabulary), min(length, vocabulary))
    ]


def generation(config: Any, batch: Batch) -> Batch:
    """Return two rows of a batch for beam search. A causal model's are padded on the left, with room for new tokens."""
    if stock.is_causal(config):
        kept = slice(-max(1, stock.longest_sequence(config) - GENERATED_TOKENS), None)
        batch = padded_left(config, batch)
        batch = replace(batch, input_ids=batch.input_ids[:, kept], attention_mask=batch.attention_mask[:, kept])
    ids, mask = batch.input_ids[:2], batch.attention_mask[:2]
    return Batch("generate with cache and beams", ids, mask, generate=True, kind=kinds.GENERATE)


def checkpoint_batches(checkpoint: Checkpoint, layout: Layout, data: str | None, seed: int) -> list[Batch]:
    config, opened, folder = stock.load_config(checkpoint.folder), (checkpoint, layout), checkpoint.folder
    beside = tokenizer_beside(checkpoint.home, checkpoint.subfolder)  # where pipelines have it
    if beside is not None and has_tokenizer(beside) and not has_tokenizer(folder):
        folder = beside
    return audit_batches(config, folder, data, seed=seed, opened=opened)
