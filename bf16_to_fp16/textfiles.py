"""Rows of text from JSONL, CSV, Parquet and text files, and from datasets of the Hub.

What the probe and the training corpus both need: one reader for each kind of file, one rule for which column holds the
text, and a Hub that is asked once instead of for half a minute where it does not answer.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError

TEXT_COLUMNS = ("input", "text")
"""Columns that are taken for the text before any other."""

TARGET_COLUMN = "target"
"""The column of what the model should answer."""

HUB_TIMEOUT = 10.0
"""Seconds that the Hub has to answer."""

_MOST_ROWS = 4096
"""Rows that are read of a dataset of the Hub, which may be larger than the disk."""


def texts(data: str) -> Iterator[tuple[str, str | None]]:
    """Yield text and target (None where there is none) of every row of ``data``.

    data: a path ending in .jsonl, .json, .csv, .parquet or .txt, else the id of a dataset on the Hub, of which the
    first 4096 rows are read. Raises UserError for what cannot be read.
    """
    path = Path(data)
    ending = path.suffix.lower()
    if ending == "" and not path.exists() and not path.is_absolute():
        yield from text_pairs(data, hub_rows(data))
        return
    if not path.is_file():
        raise UserError(f"{data}: no such file; give an existing .jsonl, .csv, .parquet or .txt")
    if ending not in (*READERS, ".parquet"):
        raise UserError(f"{data}: unknown kind of file {path.suffix!r}; use .jsonl, .csv, .parquet or .txt")
    try:
        if ending == ".txt":
            yield from ((line, None) for line in text_lines(path))
        else:
            yield from text_pairs(data, parquet_rows(path) if ending == ".parquet" else READERS[ending](path))
    except UnicodeDecodeError as error:
        raise UserError(f"{data}: not UTF-8 at byte {error.start}; convert it to UTF-8") from error


def text_column(names: Iterable[str], target: str | None = TARGET_COLUMN) -> str | None:
    """Return which of the columns of strings ``names`` holds the text: ``input``, else ``text``, else the first that is
    not ``target``; None where there is none."""
    others = [name for name in names if name != target]
    return next((name for name in TEXT_COLUMNS if name in others), others[0] if others else None)


def text_pairs(data: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str | None]]:
    """Yield text and target of ``rows``, whose first one decides on the column of the text.

    data: how errors name them. Raises UserError where no column holds strings, or one holds something else later on.
    """
    column: str | None = None
    for row in rows:
        if column is None:
            column = text_column(name for name, value in row.items() if isinstance(value, str))
            if column is None:
                names = ", ".join(map(str, row)) or "none"
                raise UserError(
                    f"{data}: no column of strings among {names}; put text into one named `input` or `text`"
                )
        text, target = row.get(column), row.get(TARGET_COLUMN)
        if not isinstance(text, str):
            raise UserError(f"{data}: column {column!r} holds something that is not text; make every row a string")
        yield text, target if isinstance(target, str) else None


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file that are not blank, without the spaces around them."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield line.strip()


def jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object on each line of a JSONL file; raise UserError for a line that holds none."""
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


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file by the names in its header; raise UserError for what is not CSV."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            yield from csv.DictReader(file)
        except csv.Error as error:
            raise UserError(f"{path}: not CSV ({error}); give a comma-separated file with a header") from error


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file; raise UserError where it cannot be read."""
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


READERS: Mapping[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": jsonl_rows,
    ".json": jsonl_rows,
    ".csv": csv_rows,
    ".txt": text_lines,
}
"""Readers of files that are read as text, by ending; ``text_lines`` yields strings, the others rows."""


def hub_rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield the first 4096 rows of the first split of a dataset of the Hub; raise UserError where it cannot be read."""
    import datasets

    try:
        with asking_the_hub(name):
            splits = datasets.load_dataset(name, streaming=True)
            for number, row in enumerate(splits[next(iter(splits))]):
                if number == _MOST_ROWS:
                    return
                yield row
    except UserError:
        raise
    except Exception as error:  # the Hub and its readers raise many kinds
        raise UserError(
            f"{name}: neither a file here nor a readable dataset of the Hub ({first_line(error)});"
            " check the name or give a local file"
        ) from error


@contextmanager
def asking_the_hub(name: str) -> Iterator[None]:
    """Let ``datasets`` read the dataset ``name`` of the Hub, from its own cache where the Hub does not answer.

    ``datasets`` alone would try again for half a minute first. Raises UserError where the Hub is out of reach and the
    cache has no such dataset.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT)
    except (HfHubHTTPError, ValueError):
        pass  # it answered, or the name is impossible; what is wrong is said better by the loader
    except Exception as error:  # each version of the client has its own errors of the network
        places: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
        before = [place.HF_HUB_OFFLINE for place in places]
        try:
            for place in places:
                place.HF_HUB_OFFLINE = True
            yield
        except ConnectionError:
            raise UserError(
                f"{name}: neither a file here nor, the Hub being out of reach, a dataset in the cache"
                f" ({first_line(error)}); check the name and the network, or give a local file"
            ) from error
        finally:
            for place, value in zip(places, before, strict=True):
                place.HF_HUB_OFFLINE = value
        return
    yield


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, else its kind."""
    lines: Sequence[str] = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
