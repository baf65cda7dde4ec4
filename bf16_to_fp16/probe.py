"""The token batches on which a model is observed.

Two sources. Without data, a built-in probe needs no tokenizer and looks where activations differ: random ids,
the longest sequence, one repeated token, padded rows of mixed lengths, every id of the vocabulary once on each
side, and a ``generate`` with cache and beams. With data (JSONL, CSV, Parquet, text, or a dataset of the Hub)
the checkpoint's own tokenizer makes the batches. Everything is seeded, so that two audits of one checkpoint see
the same tokens.
"""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError

IGNORED_LABEL = -100
"""The label that stock losses leave out."""

_LOGIT_BUDGET = 2**27
"""Most logits of one batch (half a gigabyte in fp32): large vocabularies get fewer rows."""

_TEXT_COLUMNS = ("input", "text")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Batch:
    """One input of an audit: int64 ids and 0/1 masks, all of shape [rows, length].

    The decoder's fields are None for an encoder-only model. ``head`` false leaves the logits out (a vocabulary
    of 250,000 swept with them would cost its square); ``generate`` asks for beam search from the encoder's ids
    instead of a forward.
    """

    description: str
    input_ids: Tensor
    attention_mask: Tensor
    decoder_input_ids: Tensor | None = None
    decoder_attention_mask: Tensor | None = None
    head: bool = True
    generate: bool = False

    def labels(self) -> Tensor:
        """Return what each decoder position should predict, int64 of the decoder's shape: the next id, or -100."""
        if self.decoder_input_ids is None or self.decoder_attention_mask is None:
            raise ValueError("an encoder-only batch has no labels")
        labels = torch.full_like(self.decoder_input_ids, IGNORED_LABEL)
        following = self.decoder_input_ids[:, 1:]
        labels[:, :-1] = following.masked_fill(self.decoder_attention_mask[:, 1:] == 0, IGNORED_LABEL)
        return labels


def batches(
    config: Any,
    source: Path | None,
    data: str | None,
    *,
    seed: int = 0,
    examples: int = 32,
    length: int = 512,
) -> list[Batch]:
    """Return the batches of ``data`` tokenised with the tokenizer in ``source``, or the built-in probe where
    ``data`` is None.

    config: the model's transformers configuration; source: folder of the checkpoint, read only with ``data``;
    data: a path ending in .jsonl, .json, .csv, .parquet or .txt, else the id of a dataset on the Hub; examples,
    length: caps, in examples and tokens. Raises ``UserError`` for data or a tokenizer that cannot be used.
    """
    length = min(length, _longest(config))
    if data is None:
        return _probe(config, seed, length)
    if source is None:
        raise UserError(f"{data}: text needs the checkpoint's tokenizer; give a checkpoint folder")
    return _tokenised(config, source, data, seed, examples, length)


def run(model: nn.Module, batch: Batch, *, labels: bool = False) -> Any:
    """Run ``model`` on ``batch`` and return the stock output object (None for a batch that generates or has no head).

    The batch is moved to the model's device. With ``labels`` the output carries the stock loss.
    """
    device = next(model.parameters()).device
    ids, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
    stock: Any = model
    if batch.generate:
        stock.generate(
            input_ids=ids,
            attention_mask=mask,
            num_beams=2,
            do_sample=False,
            max_new_tokens=8,
            min_new_tokens=8,
            use_cache=_cacheable(stock.config),
        )
        return None
    if batch.decoder_input_ids is None or batch.decoder_attention_mask is None:
        return stock(input_ids=ids, attention_mask=mask)
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
    decoder = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None)
    return decoder is None or int(decoder) <= int(config.num_hidden_layers)


def has_decoder(config: Any) -> bool:
    """Whether the checkpoint's class is a sequence-to-sequence model.

    An encoder-only one names an ``...EncoderModel``; its ``is_encoder_decoder`` is often still true.
    """
    encoders = any(name.endswith("EncoderModel") for name in config.architectures or ())
    return bool(config.is_encoder_decoder) and not encoders


def _longest(config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    return int(positions) if positions else 2**30


def _start(config: Any) -> int:
    for name in ("decoder_start_token_id", "pad_token_id"):
        token = getattr(config, name, None)
        if token is not None:
            return int(token)
    return 0


def _pad(config: Any) -> int:
    token = getattr(config, "pad_token_id", None)
    return 0 if token is None else int(token)


def _probe(config: Any, seed: int, length: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary, decodes = int(config.vocab_size), has_decoder(config)

    def ids(rows: int, columns: int) -> Tensor:
        return torch.randint(0, vocabulary, (rows, min(columns, length)), generator=generator)

    def batch(description: str, encoder: Tensor, decoder: Tensor, **extra: Any) -> Batch:
        if not decodes:
            return Batch(description, encoder, torch.ones_like(encoder), head=False)
        started = decoder.clone()
        started[:, 0] = _start(config)
        return Batch(
            description,
            encoder,
            torch.ones_like(encoder),
            started,
            torch.ones_like(started),
            **extra,
        )

    repeated = ids(2, 1).repeat(1, min(128, length))
    made = [
        batch("random ids", ids(4, 64), ids(4, 32)),
        batch(f"one sequence of {length} tokens", ids(1, length), ids(1, min(length, 128))),
        batch("one token repeated", repeated, repeated[:, :64]),
        _padded(config, [ids(1, n)[0] for n in (48, 20, 7, 1)], [ids(1, n)[0] for n in (5, 24, 2, 16)]),
    ]
    made += _sweep(config, vocabulary, min(length, 128))
    if decodes:
        made.append(_generation(made[3]))
    return made


def _sweep(config: Any, vocabulary: int, length: int) -> list[Batch]:
    """Every id once in the encoder and, in reverse order, once in the decoder, in chunks of eight sequences."""
    decodes = has_decoder(config)
    rows = max(1, min(8, _LOGIT_BUDGET // (length * vocabulary)))
    head = vocabulary <= 2**15
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
            other = vocabulary - 1 - encoder
            mask = torch.ones_like(encoder)
            name = f"vocabulary {int(part[0])} to {int(part[-1])}"
            made.append(
                Batch(name, encoder, mask, other, mask, head=head)
                if decodes
                else Batch(name, encoder, mask, head=False)
            )
    return made


def _generation(batch: Batch) -> Batch:
    return Batch("generate with cache and beams", batch.input_ids, batch.attention_mask, generate=True)


def _stack(rows: Sequence[Tensor], padding: int) -> tuple[Tensor, Tensor]:
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
) -> Batch:
    ids, mask = _stack(encoder, _pad(config))
    if not has_decoder(config):
        return Batch(description, ids, mask, head=False)
    start = torch.tensor([_start(config)])
    shifted = [torch.cat([start, row[:-1]]) for row in decoder]
    return Batch(description, ids, mask, *_stack(shifted, _pad(config)))


def _tokenised(config: Any, source: Path, data: str, seed: int, examples: int, length: int) -> list[Batch]:
    chosen = _sample(_texts(data), examples, random.Random(seed))
    if not chosen:
        raise UserError(f"{data}: no examples in it; give a file with at least one")
    tokenizer = _tokenizer(source)
    vocabulary = int(config.vocab_size)
    generator = torch.Generator().manual_seed(seed)

    def encode(text: str) -> Tensor:
        tokens = tokenizer(text, truncation=True, max_length=length)["input_ids"]
        ids = torch.tensor(tokens or [_pad(config)], dtype=torch.int64)
        if int(ids.max()) >= vocabulary:
            raise UserError(
                f"{source}: its tokenizer gives id {int(ids.max())}, past the vocabulary of {vocabulary};"
                " the tokenizer belongs to another checkpoint"
            )
        return ids

    pairs = [
        (
            encode(text),
            torch.randint(0, vocabulary, (min(32, length),), generator=generator) if target is None else encode(target),
        )
        for text, target in chosen
    ]
    pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])))
    longest = max(len(target) for _, target in pairs)
    rows = max(1, min(8, _LOGIT_BUDGET // (longest * vocabulary)))
    made = [
        _padded(
            config,
            [text for text, _ in pairs[i : i + rows]],
            [target for _, target in pairs[i : i + rows]],
            f"{Path(data).name}, batch {i // rows + 1}",
        )
        for i in range(0, len(pairs), rows)
    ]
    if has_decoder(config):
        made.append(_generation(made[0]))
    return made


def _tokenizer(source: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((source / name).is_file() for name in _TOKENIZER_FILES):
        # Stock code then makes an empty tokenizer, which turns every text into unknown tokens.
        raise UserError(f"{source}: no tokenizer files; put the tokenizer there or leave the data out")
    try:
        return AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    except Exception as error:  # transformers raises many kinds, from OSError to TypeError
        reason = str(error).strip().splitlines()
        raise UserError(
            f"{source}: no usable tokenizer ({reason[0] if reason else type(error).__name__});"
            " put the tokenizer's files there or leave the data out"
        ) from error


def _sample(texts: Iterable[tuple[str, str | None]], count: int, chance: random.Random) -> list[tuple[str, str | None]]:
    """A uniform sample of at most ``count`` in one pass (Vitter's algorithm R), so that a large file is never held."""
    kept: list[tuple[str, str | None]] = []
    for seen, item in enumerate(texts):
        if len(kept) < count:
            kept.append(item)
        elif (place := chance.randrange(seen + 1)) < count:
            kept[place] = item
    return kept


def _texts(data: str) -> Iterator[tuple[str, str | None]]:
    path = Path(data)
    readers = {
        ".jsonl": _jsonl,
        ".json": _jsonl,
        ".csv": _csv,
        ".parquet": _parquet,
        ".txt": _lines,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None and not path.exists() and not path.is_absolute() and path.suffix == "":
        yield from _columns(data, _hub(data))
        return
    if not path.is_file():
        raise UserError(f"{data}: no such file; give an existing .jsonl, .csv, .parquet or .txt")
    if reader is None:
        raise UserError(f"{data}: unknown kind of file {path.suffix!r}; use .jsonl, .csv, .parquet or .txt")
    try:
        if reader is _lines:
            yield from ((line, None) for line in _lines(path))
        else:
            yield from _columns(data, reader(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{data}: not UTF-8 at byte {error.start}; convert it to UTF-8") from error


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield line.strip()


def _jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}: line {number} is not JSON ({error.msg}); put one object on each line"
                ) from error
            if not isinstance(row, dict):
                raise UserError(f"{path}: line {number} is not an object; put one object on each line")
            yield row


def _csv(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8", newline="") as file:
        try:
            yield from csv.DictReader(file)
        except csv.Error as error:
            raise UserError(f"{path}: not CSV ({error}); give a comma-separated file with a header") from error


def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet needs pyarrow; run `pip install pyarrow`") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for part in file.iter_batches(batch_size=256):
                yield from part.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}); write it again"
        ) from error


def _hub(name: str) -> Iterator[Any]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{name}: a Hub dataset needs `pip install datasets`; or give a local file") from error
    try:
        splits = datasets.load_dataset(name, streaming=True)
        rows = splits[next(iter(splits))]
        for number, row in enumerate(rows):
            if number == 4096:
                return
            yield row
    except Exception as error:  # the Hub and its readers raise many kinds
        reason = str(error).strip().splitlines()
        raise UserError(
            f"{name}: neither a file here nor a readable dataset of the Hub"
            f" ({reason[0] if reason else type(error).__name__}); check the name or give a local file"
        ) from error


def _columns(data: str, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str | None]]:
    column: str | None = None
    for row in rows:
        if column is None:
            strings = [name for name, value in row.items() if isinstance(value, str)]
            known = [name for name in _TEXT_COLUMNS if name in strings]
            others = [name for name in strings if name != "target"]
            if not known and not others:
                names = ", ".join(map(str, row)) or "none"
                raise UserError(
                    f"{data}: no column of strings among {names}; put text into one named `input` or `text`"
                )
            column = (known or others)[0]
        text, target = row.get(column), row.get("target")
        if not isinstance(text, str):
            raise UserError(f"{data}: column {column!r} holds something that is not text; make every row a string")
        yield text, target if isinstance(target, str) else None
