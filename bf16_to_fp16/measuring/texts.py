"""Read rows of text from JSONL, CSV, Parquet, text files and Hub datasets. Files are not read by ``datasets``, which
changes texts (2020-01-01 becomes a time) and does not name the line of an error."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from ..checkpoint.sources import local_path
from ..errors import UserError, first_line

TARGET_COLUMN = "target"  # the column of what the model should answer
_MOST_HUB_ROWS = 4096  # rows that are read of a dataset of the Hub, which may be larger than the disk


def texts(data: str) -> Iterator[tuple[str, str | None]]:
    """Yield text and target of each row of a file, or of a Hub dataset's first 4096 rows."""
    file = local_file(data)
    yield from text_pairs(data, hub_rows(data) if file is None else file_rows(file))


def choose_columns(
    data: str,
    names: Iterable[str],
    strings: Iterable[str],
    input_column: str | None = None,
    target_column: str | None = None,
) -> tuple[str, str | None]:
    """Return the names of the text column and the target column. strings: the columns that hold text. If no target
    column is given, the name is ``target``, or None if this is the text column; the caller must check that the column
    exists. Raises UserError if a given column is missing, or if no column holds text."""
    listed = ", ".join(map(str, names)) or "none"
    for wanted in (target_column, input_column):
        if wanted is not None and wanted not in names:
            raise UserError(f"{data}: no column {wanted!r} among {listed}; mend the column's name in the recipe")
    target = target_column or (TARGET_COLUMN if input_column != TARGET_COLUMN else None)
    others = [name for name in strings if name != target]
    column = input_column or next((name for name in ("input", "text", *others) if name in others), None)
    if column is None:
        raise UserError(f"{data}: no column of strings among {listed}; put text into one named `input` or `text`")
    return column, target


def text_pairs(
    data: str, rows: Iterable[Mapping[str, Any]], input_column: str | None = None, target_column: str | None = None
) -> Iterator[tuple[str, str | None]]:
    """Yield the text and target of each row. Columns that are not given are chosen from the first row. A target that is
    no string becomes None. data: the source, for errors. Raises UserError for a missing column, or a text that is no
    string."""
    columns: tuple[str, str | None] | None = None
    for row in rows:
        if columns is None:
            strings = [name for name, value in row.items() if isinstance(value, str)]
            columns = choose_columns(data, row, strings, input_column, target_column)
        column, target = columns
        text, answer = row.get(column), None if target is None else row.get(target)
        if not isinstance(text, str):
            raise UserError(f"{data}: column {column!r} holds something that is not text; make every row a string")
        yield text, answer if isinstance(answer, str) else None


def file_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .jsonl, .json, .csv, .parquet or .txt file. All but Parquet may be compressed (.gz). Raises
    UserError for an unreadable file."""
    if (ending := _ending(path)) == ".parquet":
        yield from parquet_rows(path)
        return
    packed = path.suffix.lower() == ".gz"
    try:
        # The ends of lines stay as they are, as csv asks for.
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", newline="") as lines:
            yield from READERS[ending](path, lines)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; convert it to UTF-8") from error
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give an undamaged file") from error


def text_rows(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.strip():
            yield {"text": line.strip()}


def jsonl_rows(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "\\u" in line:  # a lone surrogate is valid JSON, but UTF-8 cannot encode it
                json.dumps(row, ensure_ascii=False).encode()
        except ValueError as error:
            reason = f"is not JSON ({first_line(error)})"
            raise UserError(f"{path}: line {number} {reason}; put one JSON object on each line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is not a JSON object; put one on each line")
        yield row


def csv_rows(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    try:
        yield from csv.DictReader(lines)
    except csv.Error as error:
        raise UserError(f"{path}: not CSV ({error}); give a comma-separated file with a header") from error


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for part in file.iter_batches(batch_size=256):
                yield from part.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}); write it again"
        ) from error


READERS: Mapping[str, Callable[[Path, Iterable[str]], Iterator[dict[str, Any]]]] = {
    ".jsonl": jsonl_rows,
    ".json": jsonl_rows,
    ".csv": csv_rows,
    ".txt": text_rows,
}
"""Functions that yield the rows in a file's lines, by the file's ending. The path is for errors."""

KINDS = (*READERS, ".parquet")  # endings of the files that can be read


def local_file(path: str) -> Path | None:
    """Return the file at ``path``; None for a Hub dataset. Raises UserError for a missing file or an unknown kind."""
    file = local_path(path)
    if not (file.exists() or file.is_absolute() or file.suffix in (*KINDS, ".gz")):
        return None
    if not file.is_file():
        where = "" if file.is_absolute() else f" in {Path.cwd()}"
        problem = "is a folder" if file.is_dir() else f"no such file{where}"
        raise UserError(f"{path}: {problem}; give an existing .jsonl, .csv, .parquet or .txt")
    if (ending := _ending(file)) not in KINDS:
        raise UserError(f"{path}: unknown kind of file {ending!r}; use .jsonl, .csv, .parquet or .txt (.gz too)")
    return file


def _ending(path: Path) -> str:
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def hub_rows(name: str) -> Iterator[dict[str, Any]]:
    import datasets

    with _plain_errors(name):
        splits = datasets.load_dataset(name, streaming=True)
        yield from islice(splits[next(iter(splits))], _MOST_HUB_ROWS)


def open_texts(
    path: str,
    *,
    subset: str | None = None,
    split: str = "train",
    input_column: str | None = None,
    target_column: str | None = None,
) -> tuple[Any, tuple[str, str | None]]:
    """Return a ``datasets.Dataset`` and a pair: the name of its text column, and the name of its target column or None.
    path: a file, or a Hub dataset, of which ``subset`` and ``split`` are read. Raises UserError for unreadable data."""
    import datasets

    named = (input_column, target_column)
    file = local_file(path)
    with _plain_errors(path), ExitStack() as before:
        before.callback(datasets.logging.set_verbosity, datasets.logging.get_verbosity())
        if not datasets.utils.are_progress_bars_disabled():
            before.callback(datasets.enable_progress_bars)
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        if file is None:
            dataset = datasets.load_dataset(path, subset, split=split)
            kinds = {name: getattr(feature, "dtype", None) for name, feature in dataset.features.items()}
            strings = [name for name, kind in kinds.items() if kind in ("string", "large_string")]
            column, target = choose_columns(path, kinds, strings, *named)
            if other := next((name for name in named if name in kinds and name not in strings), None):
                raise UserError(f"{path}: column {other!r} holds something that is not text; name a column of strings")
            columns = column, target if target in strings else None
            return dataset.select_columns([name for name in columns if name is not None]), columns
        features = datasets.Features({"text": datasets.Value("string"), "target": datasets.Value("string")})
        rows: dict[str, Any] = {
            "path": path,
            "file": str(file.absolute()),
            "columns": (None, None) if _ending(file) == ".txt" else named,
            "stamp": (file.stat().st_size, file.stat().st_mtime_ns),
        }
        first = next(_local_rows(**rows), None)
        if first is None:
            raise UserError(f"{path}: no examples in it; give data with at least one line of text")
        table = datasets.Dataset.from_generator(_local_rows, features=features, gen_kwargs=rows)
        return table, ("text", "target" if first["target"] is not None else None)


def _local_rows(path: str, file: str, columns: tuple[str | None, str | None], stamp: Any) -> Iterator[dict[str, Any]]:
    """Yield a file's rows with the keys "text" and "target". stamp: lets ``datasets`` notice a changed file."""
    for text, target in text_pairs(path, file_rows(Path(file)), *columns):
        yield {"text": text, "target": target}


@contextmanager
def _plain_errors(path: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            deepest, cause = cause, cause.__cause__
        raise UserError(
            f"{path}: neither a readable file nor a readable dataset of the Hub"
            f" ({first_line(deepest)}); check the name, the file or the split"
        ) from error
