"""The token batches on which a model is observed.

Two sources. Without data, a built-in probe needs no tokenizer and looks where activations differ: random ids, the
longest sequence, one that is longer than a sliding window, one repeated token, padded rows of mixed lengths, rows of a
few tokens, where nothing is averaged, on each side the ids that ``choice`` finds in the weights (of a small vocabulary
every id, as on request of a large one), a ``generate`` with cache and beams, and an image where the model reads any.
With data (JSONL, CSV, Parquet, text, or a dataset of the Hub) the checkpoint's own tokenizer makes the batches.
A causal language model has one side, on which rows begin with its start token and are padded on the left as well, as
people do who generate from several at once; a text and its target are one row.
Everything is seeded, so that two audits of one checkpoint see the same tokens.
"""

from __future__ import annotations

import hashlib
import math
import random
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checkpoint.reader import open_checkpoint
from ..errors import UserError, first_line
from ..families.known import class_named, of_model_type, projector_of, spare_padding
from ..families.layout import NOT_A_CHOICE, Layout, TensorSource
from ..families.resolve import resolve
from ..families.types import StockClass
from ..progress import Progress
from . import choice, memory
from .stock import described, setting, vocabulary_of
from .texts import texts

IGNORED_LABEL = -100
"""The label that stock losses leave out."""


_LOGIT_BUDGET = 2**27
"""Most logits of one batch (half a gigabyte in fp32): large vocabularies get fewer rows."""


_PROBE_LOGITS = 2**25
"""Most logits of the probe, random ids and short rows apart: those of about a thousand positions at a vocabulary of
32,128."""


GENERATION_SHARE = 1 / 4
"""Largest share of the memory at hand that a generation's weights may take."""


_SHORT, _SHORT_DECODER = 8, 4
"""Tokens of the longest of the short rows, and in the decoder, where each costs the vocabulary's logits."""


_BEYOND_WINDOW, _LONGEST_WINDOW = 16, 2048
"""Tokens by which a row is longer than a sliding window, so that its first ones are no longer seen, and the longest
window for which there is such a row: scores cost its square."""


_GENERATED = 4
"""Tokens that a generation makes."""


RANDOM, LONG, REPEATED, PADDED, SHORT, CHOSEN, SWEEP, IMAGE, GENERATE, DATA = BATCH_KINDS = (
    "random ids",
    "long",
    "repeated",
    "padded",
    "short",
    "chosen ids",
    "vocabulary sweep",
    "image",
    "generate",
    "data",
)
"""What a batch is there for; the report lists the batches by it."""


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "vocab.json",
)
"""Files of which a tokenizer has one."""


@dataclass(frozen=True)
class Batch:
    """One input of an audit: int64 ids and 0/1 masks, all of shape [rows, length].

    The decoder's fields are None for a model that takes none. ``head`` false leaves the logits out (a vocabulary
    of 250,000 swept with them would cost its square); ``generate`` asks for beam search from ``input_ids``
    instead of a forward. ``kind`` is one of ``BATCH_KINDS``, "given" for a batch that was made elsewhere. ``chosen``:
    the ids that were chosen, by reason, at the first batch of them. ``blind``: whether padding in it may see nothing.
    ``pixels``: fp32 [rows, channels, height, width] of an image in each row, whose tokens ``image_tokens`` marks, 0/1
    [rows, length].
    """

    description: str
    input_ids: Tensor
    attention_mask: Tensor
    decoder_input_ids: Tensor | None = None
    decoder_attention_mask: Tensor | None = None
    head: bool = True
    generate: bool = False
    kind: str = "given"
    chosen: Mapping[str, Sequence[int]] = field(default_factory=dict)
    blind: bool = False
    pixels: Tensor | None = None
    image_tokens: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """What it consists of, by name."""
        ids = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
        return {name: getattr(self, name) for name in (*ids, *(("pixels", "image_tokens") if self.has_image else ()))}

    @property
    def has_image(self) -> bool:
        """Whether there is an image in its rows."""
        return self.pixels is not None

    def rows(self, chosen: slice | Tensor) -> Batch:
        """Return the batch of some of its rows, at the same length."""
        found: dict[str, Any] = {name: x[chosen] for name, x in self.tensors.items() if x is not None}
        return replace(self, **found)

    def image_arguments(self, device: torch.device) -> dict[str, Tensor]:
        """Return what stock code takes of the images; empty where there are none."""
        if self.pixels is None or self.image_tokens is None:
            return {}
        return {"pixel_values": self.pixels.to(device), "token_type_ids": self.image_tokens.to(device)}

    def labels(self) -> Tensor:
        """Return what each position should predict, of the decoder where there is one: the next id, or -100 where that
        or the position itself is padding; int64 of the ids' shape."""
        ids, mask = self.decoder_input_ids, self.decoder_attention_mask
        if ids is None or mask is None:
            ids, mask = self.input_ids, self.attention_mask
        labels = torch.full_like(ids, IGNORED_LABEL)
        labels[:, :-1] = ids[:, 1:].masked_fill(mask[:, 1:] * mask[:, :-1] == 0, IGNORED_LABEL)
        return labels


def batches(
    config: Any,
    source: Path | None,
    data: str | None,
    *,
    seed: int = 0,
    examples: int = 32,
    length: int = 512,
    sweep: bool = False,
    chosen: Mapping[str, Sequence[int]] | None = None,
) -> list[Batch]:
    """Return the batches of ``data`` tokenised with the tokenizer in ``source``, or the built-in probe where
    ``data`` is None.

    config: the model's transformers configuration; source: folder of the checkpoint, read only with ``data``;
    data: a path ending in .jsonl, .json, .csv, .parquet or .txt, else the id of a dataset on the Hub; examples,
    length: caps, in examples and tokens. sweep: have the probe run every id of the vocabulary. chosen: the ids by
    reason that it runs instead, as ``chosen_ids`` gives them; None draws them at random. Raises ``UserError`` for data
    or a tokenizer that cannot be used.
    """
    length = min(length, longest_sequence(config))
    if data is None:
        made = _probe(config, seed, length, sweep, chosen)
    elif source is None:
        raise UserError(f"{data}: text needs the checkpoint's tokenizer; give a checkpoint folder")
    else:
        made = _tokenised(config, source, data, seed, examples, length)
    borne = [batch for whole in made for batch in _bearable(config, whole)]
    return [replace(_readable(config, batch), blind=_is_blind(config, batch)) for batch in borne]


def _is_blind(config: Any, batch: Batch) -> bool:
    """Whether padding may see no position: left of a row under a causal mask, or half a sliding window away from it,
    which is as far as one sees that looks both ways."""
    family, empty = of_model_type(config.model_type), batch.attention_mask == 0
    if family is None or not family.blind_padding or not bool(empty.any()):
        return False
    before, behind = (mask.cumprod(1).sum(1).amax() for mask in (empty.long(), empty.flip(1).long()))
    causal = not takes_decoder_ids(config) and not getattr(config, "use_bidirectional_attention", False)
    windows = [setting(part, "sliding_window") for part in (config, getattr(config, "encoder", None))]
    window = min((window for window in windows if window is not None), default=math.inf)
    return bool(causal and before > 0) or 2 * int(torch.maximum(before, behind)) >= window


def seen_padding(inputs: Sequence[Batch], attention: str) -> list[Batch]:
    """Return what a claim in fp16 stands for under an attention: eager, where padding that sees nothing may be NaN, of
    batches with such padding the rows that have none."""
    if attention != "eager":
        return list(inputs)
    whole = [(batch, batch.attention_mask.bool().all(1)) for batch in inputs]
    return [batch.rows(full) if batch.blind else batch for batch, full in whole if full.any() or not batch.blind]


def _bearable(config: Any, batch: Batch) -> list[Batch]:
    """The batch as stock code can run it in fp16: where that asks for more padding than none, with as much; where it
    bears none, as one batch for each length of the encoder's rows."""
    spare, lengths = spare_padding(config.to_dict()), batch.attention_mask.sum(1)
    if spare == 0 or bool(batch.attention_mask.all()):
        return [batch]
    if "left" in batch.description:  # the same rows again
        return []
    if spare < math.inf:
        return [_filled(batch, int(spare), _pad(config))]
    parts = [(n, (lengths == n).nonzero()[:, 0]) for n in lengths.unique(sorted=True).tolist()]
    return [
        replace(part, input_ids=part.input_ids[:, :n], attention_mask=part.attention_mask[:, :n])
        for n, rows in parts
        for part in [batch.rows(rows)]
    ]


def spared(config: Any, batch: Batch) -> Batch:
    """Return the batch with as much padding as stock code asks for in fp16.

    A backward pass needs it in every batch, since what fills up a last block must see something as well.
    """
    spare = spare_padding(config.to_dict())
    return _filled(batch, int(spare), _pad(config)) if 0 < spare < math.inf else batch


def _filled(batch: Batch, columns: int, padding: int) -> Batch:
    """A batch whose encoder's rows have so many more positions of padding on the right."""
    ids = functional.pad(batch.input_ids, (0, columns), value=padding)
    return replace(batch, input_ids=ids, attention_mask=functional.pad(batch.attention_mask, (0, columns)))


def _repeated(config: Any, batch: Batch) -> Batch:
    """One batch as stock code can run it in fp16: where it bears no padding, the encoder's rows begin again in its
    place."""
    spare, lengths = spare_padding(config.to_dict()), batch.attention_mask.sum(1, keepdim=True)
    if spare == 0 or bool(batch.attention_mask.all()):
        return batch
    if spare < math.inf:
        return _filled(batch, int(spare), _pad(config))
    places = torch.arange(batch.input_ids.shape[1]) % lengths
    ids = batch.input_ids.gather(1, places)
    return replace(batch, input_ids=ids, attention_mask=torch.ones_like(batch.attention_mask))


def generation_bytes(layout: Layout) -> int:
    """Return the most memory that the weights take with which a model generates in a walk: those of the decoder and the
    head, to which it comes back, in fp32 and cast to fp16 by autocast."""
    if not layout.stock.is_language_model or layout.head is None:
        return 0
    at, heads = layout.stacks()[-1].ends.at + ".", [linear.weight for linear in layout.head.linears]
    return 6 * sum(math.prod(t.shape) for name, t in layout.tensors.items() if name.startswith(at) or name in heads)


def audit_batches(
    config: Any,
    folder: Path,
    data: str | None,
    *,
    seed: int = 0,
    sweep: bool = False,
    chosen: Mapping[str, Sequence[int]] | None = None,
    opened: tuple[TensorSource, Layout] | None = None,
    progress: Progress | None = None,
) -> list[Batch]:
    """Return what an audit runs on: the built-in probe, its ids chosen by the weights in ``folder`` unless they are
    given or all are wanted, and ``data`` where given; without generation where its weights would take more than
    ``GENERATION_SHARE`` of the memory at hand.

    opened: the checkpoint in ``folder`` and its layout, where the caller has them. progress: says what is left out.
    Other arguments and errors are those of ``batches``.
    """
    if opened is None:
        checkpoint = open_checkpoint(folder)
        opened = checkpoint, resolve(checkpoint)
    if chosen is None and not sweep:
        chosen = chosen_ids(config, *opened, seed=seed)
    inputs = batches(config, None, None, seed=seed, sweep=sweep, chosen=chosen)
    if data is not None:
        inputs += batches(config, folder, data, seed=seed)
    if generation_bytes(opened[1]) <= GENERATION_SHARE * memory.available():
        return inputs
    inputs = [batch for batch in inputs if not batch.generate]
    if progress is not None:
        progress.say("Not enough memory to run generate, which needs the whole decoder at once: it is left out")
    return inputs


def one_batch(config: Any, inputs: Sequence[Batch], *, length: int = 64, decoder_length: int = 32) -> Batch:
    """Return rows of every batch but one that generates as a single batch of one shape, for what is built for a shape.

    Rows are taken from each batch in turn, as many as their logits allow, cut to ``length`` and ``decoder_length``
    positions and filled up with padding; the decoder's begin with the start token.
    """
    each = [list(_rows(batch)) for batch in inputs if not (batch.generate or batch.has_image)]
    turns = [row for rows in zip_longest(*each) for row in rows if row is not None]
    positions = length if is_causal(config) else decoder_length
    count = max(4, min(16, _PROBE_LOGITS // (vocabulary_of(config) * positions)))
    encoder, decoder = zip(*turns[:count], strict=True)
    ids, mask = stack([row[:length] for row in encoder], _pad(config))
    if not takes_decoder_ids(config):
        return _readable(config, _repeated(config, Batch("rows of every kind", ids, mask)))
    decoder_ids, decoder_mask = stack([row[:decoder_length] for row in decoder], _pad(config))
    decoder_ids[:, 0] = decoder_start(config)
    return Batch("rows of every kind", ids, mask, decoder_ids, decoder_mask)


def _rows(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of a batch without padding, for the encoder and for the decoder; of one stack alone twice the same."""
    decoder, decoder_mask = batch.decoder_input_ids, batch.decoder_attention_mask
    if decoder is None or decoder_mask is None:
        decoder, decoder_mask = batch.input_ids, batch.attention_mask
    for ids, mask, other, other_mask in zip(batch.input_ids, batch.attention_mask, decoder, decoder_mask, strict=True):
        yield ids[mask.bool()], other[other_mask.bool()]


def is_small(config: Any) -> bool:
    """Return whether a vocabulary is so small that the probe runs every id."""
    return vocabulary_of(config) <= choice.WHOLE


def chosen_ids(config: Any, source: TensorSource, layout: Layout, *, seed: int = 0) -> dict[str, list[int]] | None:
    """Return which ids of a large vocabulary the probe should run, by reason, chosen by the weights of a checkpoint or
    model of this layout; None for a small one, of which it runs all."""
    if is_small(config):
        return None
    return choice.chosen(source, layout, _special(config), torch.Generator().manual_seed(seed))


def usable(by_reason: Mapping[str, Sequence[int]], config: Any) -> Mapping[str, Sequence[int]] | None:
    """Return the ids that a report lists where they are some, no more than are chosen and all in the vocabulary; else
    None."""
    ids = [i for chosen in by_reason.values() for i in chosen]
    fits = 0 < len(ids) <= choice.CHOSEN and max(ids) < vocabulary_of(config)
    return by_reason if fits else None


def describe_batches(
    inputs: Sequence[Batch], *, seed: int, data: str | None = None, generates: bool = False
) -> dict[str, Any]:
    """Return the report's ``inputs``, from which the same can be run again and be told from anything else.

    ``batches``: in their order, each run of one kind as one entry: kind, number of batches, rows of them all, and the
    longest encoder and decoder in tokens (None without a decoder's input). ``data``: the last part of the path, or the
    name of a dataset of the Hub, and how many rows of it were drawn; None without data. ``chosen``: ids by the reason
    that each was chosen for, empty where every id is run. ``left_out``: ``generate`` of a model that ``generates``
    where no batch does, as memory was short. ``sha256``: of all ids and masks.
    """
    digest = hashlib.sha256()
    entries: list[dict[str, Any]] = []
    for batch in inputs:
        for tensor in batch.tensors.values():
            shape = None if tensor is None else tuple(tensor.shape)
            digest.update(repr(shape).encode())
            if tensor is not None:
                kind = "<f4" if tensor.is_floating_point() else "<i8"
                digest.update(tensor.cpu().contiguous().numpy().astype(kind).tobytes())
        rows, encoder = batch.input_ids.shape
        decoder = None if batch.decoder_input_ids is None else batch.decoder_input_ids.shape[1]
        if entries and entries[-1]["kind"] == batch.kind:
            last = entries[-1]
            last["batches"] += 1
            last["rows"] += rows
            last["encoder"] = max(last["encoder"], encoder)
            last["decoder"] = decoder if last["decoder"] is None else max(last["decoder"], decoder or 0)
        else:
            entries.append({"kind": batch.kind, "batches": 1, "rows": rows, "encoder": encoder, "decoder": decoder})
    drawn = sum(entry["rows"] for entry in entries if entry["kind"] == DATA)
    shown = data if data is None or not Path(data).exists() else Path(data).name
    return {
        "seed": seed,
        "data": None if data is None else {"name": shown, "rows": drawn},
        "batches": entries,
        "chosen": {reason: list(ids) for batch in inputs for reason, ids in batch.chosen.items()},
        "left_out": [GENERATE] if generates and not any(batch.generate for batch in inputs) else [],
        "sha256": digest.hexdigest(),
    }


def run_batch(model: nn.Module, batch: Batch, *, labels: bool = False) -> Any:
    """Run ``model`` on ``batch`` and return the stock output object (None for a batch that generates or has no head).

    The batch is moved to the model's device. With ``labels`` the output carries the stock loss. Raises UserError where
    stock code fails, as it does for impossible settings that it did not look at when it loaded them.
    """
    try:
        return _run(model, batch, labels)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("transformers", "torch"):
            raise
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        raise UserError(
            f"{name}: stock code cannot run it ({first_line(error)}); mend its config.json or generation_config.json"
        ) from error


def _run(model: nn.Module, batch: Batch, labels: bool) -> Any:
    device = next(model.parameters()).device
    ids, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
    stock: Any = model
    if batch.generate:
        stock.generate(
            input_ids=ids,
            attention_mask=mask,
            num_beams=2,
            do_sample=False,
            max_new_tokens=_GENERATED,
            min_new_tokens=_GENERATED,
            use_cache=_cacheable(stock.config),
        )
        return None
    if batch.decoder_input_ids is None or batch.decoder_attention_mask is None:
        if not is_causal(config_of(stock)):
            return stock(input_ids=ids, attention_mask=mask)
        images = batch.image_arguments(device)
        if not batch.head:
            stock.base_model(input_ids=ids, attention_mask=mask, use_cache=False, **images)
            return None
        # Stock code compares what a position gives with the label of the next.
        shifted = {"labels": batch.labels().roll(1, dims=1).to(device)} if labels else {}
        return stock(input_ids=ids, attention_mask=mask, use_cache=False, **images, **shifted)
    decoder_mask = batch.decoder_attention_mask.to(device)
    decoder: dict[str, Tensor | bool] = {"use_cache": False}
    if not bool(decoder_mask.all()):
        decoder["decoder_attention_mask"] = decoder_mask
    if not batch.head:
        states = stock.get_encoder()(input_ids=ids, attention_mask=mask)[0]
        stock.get_decoder()(
            input_ids=batch.decoder_input_ids.to(device),
            encoder_hidden_states=states,
            encoder_attention_mask=mask,
            attention_mask=decoder.get("decoder_attention_mask"),
            use_cache=False,
        )
        return None
    if labels:
        decoder["labels"] = batch.labels().to(device)
    return stock(
        input_ids=ids,
        attention_mask=mask,
        decoder_input_ids=batch.decoder_input_ids.to(device),
        **decoder,
    )


def _cacheable(config: Any) -> bool:
    """Whether stock code can generate with a cache: it makes one with as many layers as the encoder has."""
    family = of_model_type(config.model_type)
    decoder = setting(config, family.decoder.layers) if family and family.decoder else None
    return decoder is None or int(decoder) <= int(config.num_hidden_layers)


def class_in(config: Any) -> StockClass | None:
    """Return the stock class that a transformers configuration names, as its family declares it, else as it describes
    itself; None where it names none."""
    names = getattr(config, "architectures", None) or ()
    return next((found for look in (class_named, described) for name in names if (found := look(name))), None)


def config_of(model: Any) -> Any:
    """Return the configuration of a stock model in memory with the name of its class, which one that was never saved
    lacks."""
    config = copy(model.config)
    config.architectures = [type(model).__name__]
    return config


def takes_decoder_ids(config: Any) -> bool:
    """Return whether a model must be given ids for a decoder.

    Encoders, and classes that make them from the encoder's, are known by their names: ``is_encoder_decoder`` is often
    still true.
    """
    stock = class_in(config)
    return bool(config.is_encoder_decoder) if stock is None else stock.takes_decoder_ids


def predicts_tokens(config: Any) -> bool:
    """Return whether a model gives logits of the next token, so that it has a loss of its own and can generate."""
    stock = class_in(config)
    return takes_decoder_ids(config) if stock is None else stock.is_language_model


def is_causal(config: Any) -> bool:
    """Return whether a model predicts the next token of the very ids that it is given, with no decoder beside it."""
    return predicts_tokens(config) and not takes_decoder_ids(config)


def gives_probabilities(config: Any) -> bool:
    """Return whether a model's logits are of a choice among several tokens or labels, one for a position or a row."""
    stock = class_in(config)
    if stock is None or stock.is_language_model:
        return predicts_tokens(config)
    choices = config.num_labels > 1 and config.problem_type not in NOT_A_CHOICE
    return stock.gives == ("logits",) and choices


def ended(batch: Batch, end: int) -> Batch:
    """Return the batch with the end token in the last place of every row that is not padding, and nowhere else."""
    ids = batch.input_ids.clone()
    ids[ids == end] = end - 1 if end else 1
    places = torch.arange(ids.shape[1]) * batch.attention_mask
    ids[torch.arange(len(ids)), places.amax(1)] = end
    return replace(batch, input_ids=ids)


def _readable(config: Any, batch: Batch) -> Batch:
    """The batch as the model's head can read it: with one end token in every row, where it reads that."""
    stock = class_in(config)
    if stock is None or not stock.reads_end_token:
        return batch
    end = _end(config)
    if not end:
        raise UserError(
            f"config.json: {stock.names[0]} reads the end token, and eos_token_id is"
            f" {setting(config, 'eos_token_id')!r}; take it from the original checkpoint"
        )
    return ended(batch, end[0])


def values_of(output: Any) -> Tensor:
    """Return what a stock output holds for its users: logits, the logits of a span's start and end as [rows, positions,
    2], or what comes first, which of a model without a head are its last hidden states."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    values: Tensor = output["logits"] if "logits" in output else output[0]
    return values


def longest_sequence(config: Any) -> int:
    """Return the most positions that a model of ``config`` has; 2³⁰ where nothing bounds them."""
    positions = setting(config, "max_position_embeddings")
    return int(positions) if positions else 2**30


def decoder_start(config: Any) -> int:
    """Return the token with which a decoder begins, as ``generate`` takes it; T5's is the padding's."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((token for name in names for token in _named(config, name)), 0)


def _pad(config: Any) -> int:
    token = setting(config, "pad_token_id")
    return 0 if token is None else int(token)


def _special(config: Any) -> list[int]:
    """The ids with a meaning of their own: those that the config names, and the last, the first of T5's sentinels."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "decoder_start_token_id")
    return sorted({vocabulary_of(config) - 1, *(i for name in names for i in _named(config, name))})


def _named(config: Any, name: str) -> list[int]:
    """The ids of the vocabulary that a config gives under a name: none, one, or several ends of a text."""
    found = setting(config, name)
    several = found if isinstance(found, list) else [found]
    return [i for i in several if isinstance(i, int) and 0 <= i < vocabulary_of(config)]


def _end(config: Any) -> list[int]:
    """The end token, where the config names one of the vocabulary."""
    return _named(config, "eos_token_id")[:1]


def _first(config: Any) -> list[int]:
    """The token with which a causal language model's texts begin, where the config names one."""
    return _named(config, "bos_token_id")[:1] if is_causal(config) else []


def _begun(config: Any, ids: Tensor) -> Tensor:
    """Ids [..., length] whose first is the token with which texts begin, where there is one."""
    if first := _first(config):
        ids = ids.clone()
        ids[..., 0] = first[0]
    return ids


def _probe(config: Any, seed: int, length: int, sweep: bool, chosen: Mapping[str, Sequence[int]] | None) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary, decodes = vocabulary_of(config), takes_decoder_ids(config)

    def ids(rows: int, columns: int) -> Tensor:
        return torch.randint(0, vocabulary, (rows, min(columns, length)), generator=generator)

    def batch(kind: str, description: str, encoder: Tensor, decoder: Tensor) -> Batch:
        if not decodes:
            return Batch(description, encoder, torch.ones_like(encoder), kind=kind)
        started = decoder.clone()
        started[:, 0] = decoder_start(config)
        return Batch(
            description,
            encoder,
            torch.ones_like(encoder),
            started,
            torch.ones_like(started),
            kind=kind,
        )

    repeated = ids(2, 1).repeat(1, min(64, length))
    made = [
        batch(RANDOM, "random ids", _begun(config, ids(4, 64)), ids(4, 32)),
        batch(LONG, f"one sequence of {length} tokens", _begun(config, ids(1, length)), ids(1, min(length, 128))),
        batch(REPEATED, "one token repeated", repeated, repeated[:, :32]),
        _padded(config, [_begun(config, ids(1, n)[0]) for n in (48, 20, 7, 1)], [ids(1, n)[0] for n in (5, 24, 2, 16)]),
    ]
    if is_causal(config):
        made.append(_padded_left(config, made[-1]))
    if past := _past_window(config, length):
        row = _begun(config, torch.randint(0, vocabulary, (1, past), generator=generator))
        made.append(Batch(f"one sequence of {past} tokens", row, torch.ones_like(row), kind=LONG))
    made += [*_short(config, min(length, _SHORT), generator), *images(config)]
    if sweep or is_small(config):
        made += _sweep(config, vocabulary, min(length, 128))
    else:
        ids_by_reason = choice.drawn(vocabulary, _special(config), generator) if chosen is None else chosen
        made += _chosen(config, ids_by_reason, min(length, 128))
    if not predicts_tokens(config):
        return made
    made = _within_budget(made, vocabulary)
    return [*made, generation(config, next(batch for batch in made if batch.kind == PADDED))]


def _past_window(config: Any, length: int) -> int | None:
    """How long a row must be for its first tokens to be beyond a sliding window, None where one of ``length`` tokens is
    or none can be."""
    window = setting(config, "sliding_window")
    if not isinstance(window, int) or not length <= window <= _LONGEST_WINDOW or takes_decoder_ids(config):
        return None
    return past if (past := window + _BEYOND_WINDOW) <= longest_sequence(config) else None


def images(config: Any) -> list[Batch]:
    """Return a row of ids about an image of noise, as bright as images are once prepared; none for a model that
    reads no images. Drawn apart, so that the other rows are those of a text model; no id about it is an image's."""
    w = projector_of(of_model_type(config.model_type))
    if w is None:
        return []
    generator, vocabulary = torch.Generator().manual_seed(0), vocabulary_of(config)
    token, tokens, channels, size = (attrgetter(key)(config) for key in (w.token, w.tokens, *w.image))
    before, after = (torch.randint(0, vocabulary, (1, 4), generator=generator) for _ in range(2))
    before, after = (x.where(x != token, (token + 1) % vocabulary) for x in (_begun(config, before), after))
    ids = torch.cat([before, torch.full((1, tokens), token), after], 1)
    marks = torch.cat([torch.zeros_like(before), torch.ones(1, tokens, dtype=torch.int64), torch.zeros_like(after)], 1)
    pixels = torch.rand(1, channels, size, size, generator=generator) * 2 - 1
    return [Batch("an image", ids, torch.ones_like(ids), kind=IMAGE, pixels=pixels, image_tokens=marks)]


def _within_budget(made: Sequence[Batch], vocabulary: int) -> list[Batch]:
    """The batches with logits as far as the budget suffices, random ids and the first short rows in any case."""
    left = _PROBE_LOGITS // vocabulary
    result: list[Batch] = []
    unseen = {RANDOM, SHORT}
    for batch in made:
        positions = (batch.input_ids if batch.decoder_input_ids is None else batch.decoder_input_ids).numel()
        kept = batch.head and (positions <= left or batch.kind in unseen)
        left -= positions if kept else 0
        unseen.discard(batch.kind)
        result.append(batch if kept else replace(batch, head=False))
    return result


def random_rows(
    config: Any, *, seed: int, rows: int = 16, longest: int = 64, longest_decoder: int = 16, left: bool = False
) -> Batch:
    """Return rows of random ids whose lengths are log-uniform from 1 to ``longest``, in the decoder from 1 to
    ``longest_decoder``: half of them before the end token, or behind the one with which texts begin, and one in four
    with a special token among them.

    left: the encoder's are filled up on the left.
    """
    generator, vocabulary = torch.Generator().manual_seed(seed), vocabulary_of(config)
    most, special = longest_sequence(config), _special(config)

    def drawn(longest: int, *, framed: bool) -> Tensor:
        share = float(torch.rand((), generator=generator))
        length = math.floor(min(longest, most) ** share * (1 + 1e-9))
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        place, chance, which = (int(torch.randint(0, n, (), generator=generator)) for n in (length, 4, len(special)))
        if chance == 0:
            ids[place] = special[which]
        return torch.tensor(_framed(config, ids.tolist(), most)) if framed else ids

    encoder = [drawn(longest, framed=row % 2 == 1) for row in range(rows)]
    decoder = [drawn(longest_decoder, framed=False) for _ in range(rows)]
    right = _padded(config, encoder, decoder, "random ids of all lengths", RANDOM)
    if spare_padding(config.to_dict()):
        return _readable(config, _repeated(config, right))
    return _readable(config, _padded_left(config, right) if left else right)


def _framed(config: Any, ids: list[int], most: int) -> list[int]:
    """Ids with what stands at the edge of a text, the token with which it begins, else its end, and of them at most so
    many from there on."""
    first = _first(config)
    return [*first, *ids][:most] if first else [*ids, *_end(config)][-most:]


def rows_of(config: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]], description: str) -> Batch:
    """Return given ids of the encoder and the decoder (start token included) as one batch, filled up on the right."""
    ids, mask = stack([torch.tensor(row) for row, _ in rows], _pad(config))
    if not takes_decoder_ids(config):
        return _readable(config, _repeated(config, Batch(description, ids, mask)))
    decoder = stack([torch.tensor(row) for _, row in rows], _pad(config))
    return _repeated(config, Batch(description, ids, mask, *decoder))


def _padded_left(config: Any, right: Batch) -> Batch:
    """A batch with its encoder's rows, or its only ones, filled up on the left."""
    ids = torch.full_like(right.input_ids, _pad(config))
    mask = right.attention_mask.flip(1)
    ids[mask.bool()] = right.input_ids[right.attention_mask.bool()]
    return replace(right, description=f"{right.description}, padded on the left", input_ids=ids, attention_mask=mask)


def _short(config: Any, longest: int, generator: torch.Generator) -> list[Batch]:
    """Rows of one token to ``longest``, and every special token alone, as they are and with what stands at the edge of
    a text: filled up on the right, then the same rows filled up on the left; the decoder's, which are shorter, on the
    right."""
    vocabulary = vocabulary_of(config)
    drawn = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in range(1, longest + 1)]
    rows: list[list[int]] = []
    for ids in [*drawn, *([i] for i in _special(config))]:
        framed = _framed(config, ids, longest)
        rows += [ids] if framed == ids else [ids, framed]
    encoder = [torch.tensor(row) for row in rows]
    right = _padded(config, encoder, [row[-_SHORT_DECODER:] for row in reversed(encoder)], "short rows", SHORT)
    return [right, _padded_left(config, right)]


def _chosen(config: Any, by_reason: Mapping[str, Sequence[int]], length: int) -> list[Batch]:
    """The chosen ids in the encoder and, the other way round in each row, in the decoder: in long rows, in pairs, and
    each alone, with no other to be averaged with."""
    ids = torch.tensor([i for chosen in by_reason.values() for i in chosen], dtype=torch.int64)
    decodes = takes_decoder_ids(config)
    made: list[Batch] = []
    for columns in dict.fromkeys(min(n, length, len(ids)) for n in (length, 2, 1)):
        full = len(ids) // columns * columns
        for rows in (ids[:full].view(-1, columns), ids[full:].view(1, -1)):
            if not rows.numel():
                continue
            mask = torch.ones_like(rows)
            name = f"chosen ids in rows of {rows.shape[1]}"
            reasons = by_reason if not made else {}
            decoder, decoder_mask = (rows.flip(1), mask) if decodes else (None, None)
            made.append(Batch(name, rows, mask, decoder, decoder_mask, kind=CHOSEN, chosen=reasons))
    return made


def _sweep(config: Any, vocabulary: int, length: int) -> list[Batch]:
    """Every id once in the encoder and, in reverse order, once in the decoder, in chunks of eight sequences."""
    decodes = takes_decoder_ids(config)
    rows = max(1, min(8, _LOGIT_BUDGET // (length * vocabulary)))
    chunk = rows * length
    made = []
    for first in range(0, vocabulary, chunk):
        ids = torch.arange(first, min(first + chunk, vocabulary))
        columns = min(length, len(ids))
        full = len(ids) // columns * columns
        for part in (ids[:full], ids[full:]):
            if not len(part):
                continue
            encoder = part.view(-1, min(columns, len(part)))
            mask = torch.ones_like(encoder)
            decoder, decoder_mask = (vocabulary - 1 - encoder, mask) if decodes else (None, None)
            name = f"vocabulary {int(part[0])} to {int(part[-1])}"
            made.append(Batch(name, encoder, mask, decoder, decoder_mask, kind=SWEEP))
    return made


def generation(config: Any, batch: Batch) -> Batch:
    """Return the first two rows of a batch, from which beam search makes a few tokens; a causal model goes on from the
    ends of its rows, which are therefore filled up on the left and leave it positions."""
    if is_causal(config):
        kept = slice(-max(1, longest_sequence(config) - _GENERATED), None)
        batch = _padded_left(config, batch)
        batch = replace(batch, input_ids=batch.input_ids[:, kept], attention_mask=batch.attention_mask[:, kept])
    ids, mask = batch.input_ids[:2], batch.attention_mask[:2]
    return Batch("generate with cache and beams", ids, mask, generate=True, kind=GENERATE)


def stack(rows: Sequence[Tensor], padding: int) -> tuple[Tensor, Tensor]:
    """Return ids and 0/1 mask, int64 [rows, longest], of one-dimensional ``rows`` filled up with ``padding``."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), padding, dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return ids, mask


def _padded(
    config: Any,
    encoder: Sequence[Tensor],
    decoder: Sequence[Tensor],
    description: str = "padded, mixed lengths",
    kind: str = PADDED,
) -> Batch:
    ids, mask = stack(encoder, _pad(config))
    if not takes_decoder_ids(config):
        return Batch(description, ids, mask, kind=kind)
    start = torch.tensor([decoder_start(config)])
    shifted = [torch.cat([start, row[:-1]]) for row in decoder]
    return Batch(description, ids, mask, *stack(shifted, _pad(config)), kind=kind)


def _tokenised(config: Any, source: Path, data: str, seed: int, examples: int, length: int) -> list[Batch]:
    chosen = _sample(texts(data), examples, random.Random(seed))
    if not chosen:
        raise UserError(f"{data}: no examples in it; give a file with at least one")
    tokenizer = load_tokenizer(source)
    vocabulary, causal = vocabulary_of(config), is_causal(config)
    generator = torch.Generator().manual_seed(seed)

    def encode(text: str, **options: Any) -> Tensor:
        tokens = tokenizer(text, truncation=True, max_length=length, **options)["input_ids"]
        ids = torch.tensor(tokens or [_pad(config)], dtype=torch.int64)
        if int(ids.max()) >= vocabulary:
            raise UserError(
                f"{source}: its tokenizer gives id {int(ids.max())}, past the vocabulary of {vocabulary};"
                " the tokenizer belongs to another checkpoint"
            )
        return ids

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
    rows = max(1, min(8, _LOGIT_BUDGET // (longest * vocabulary)))
    made = [
        _padded(
            config,
            [text for text, _ in pairs[i : i + rows]],
            [target for _, target in pairs[i : i + rows]],
            f"{Path(data).name}, batch {i // rows + 1}",
            DATA,
        )
        for i in range(0, len(pairs), rows)
    ]
    if predicts_tokens(config):
        made.append(generation(config, made[0]))
    return made


def without_end(ids: Tensor, tokenizer: Any) -> Tensor:
    """Return the ids of a text that goes on: without the end token that some tokenizers set behind every text."""
    return ids[:-1] if len(ids) > 1 and int(ids[-1]) == tokenizer.eos_token_id else ids


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has any file of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in ``folder``; nothing is fetched. Raises UserError where there is none or it is damaged."""
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        # Stock code then makes an empty tokenizer, which turns every text into unknown tokens.
        raise UserError(f"{folder}: no tokenizer files, and text needs them; put the original's tokenizer there")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds, from OSError to TypeError
        raise UserError(
            f"{folder}: no usable tokenizer ({first_line(error)}); put the original's tokenizer there"
        ) from error


def _sample(items: Iterable[tuple[str, str | None]], count: int, rng: random.Random) -> list[tuple[str, str | None]]:
    """A uniform sample of at most ``count`` in one pass (Vitter's algorithm R), so that a large file is never held."""
    kept: list[tuple[str, str | None]] = []
    for seen, item in enumerate(items):
        if len(kept) < count:
            kept.append(item)
        elif (place := rng.randrange(seen + 1)) < count:
            kept[place] = item
    return kept
