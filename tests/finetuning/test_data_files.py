"""Pairs and texts from files, folders and the Hub: columns, blank rows, and one line for what cannot be read."""

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.corpora import END, PAD, Open, same, taken

from bf16_to_fp16.errors import UserError

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_cache")

ROWS = [{"input": f"question {k}", "target": "answer " * k + str(k), "note": k} for k in range(5)]


def written(folder: Path, kind: str, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / f"data{kind}"
    if kind == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    elif kind == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".csv", ".parquet"])
def test_pairs_are_read_from_every_kind_of_file(opened: Open, tmp_path: Path, kind: str) -> None:
    corpus = opened("t5", path=written(tmp_path, kind, ROWS), batch_size=5)
    assert corpus.objective == "pairs"
    batch = next(corpus.training_batches())
    assert batch.labels is not None and sorted(row for _, row in batch.examples) == list(range(len(ROWS)))
    for k, (_, row) in enumerate(batch.examples):
        source = batch.input_ids[k][batch.attention_mask[k] == 1].tolist()
        target = batch.labels[k][batch.labels[k] != -100].tolist()
        assert source == corpus.tokenizer(f"question {row}")["input_ids"] and source[-1] == END
        assert target == corpus.tokenizer(ROWS[row]["target"])["input_ids"] and target[-1] == END
        assert bool((batch.labels[k] != PAD).all())


NAMED = {"text": "not me", "document": "d", "summary": "s", "target": "t", "number": 1}


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("row", "columns", "text", "target"),
    [
        (NAMED, {"input_column": "document", "target_column": "summary"}, "d", "s"),
        (NAMED, {"target_column": "summary"}, "not me", "s"),
        (NAMED, {"input_column": "document"}, "d", "t"),
        # A target that is named as the input is not its own answer, nor is a named target the input.
        (NAMED, {"input_column": "target"}, "t", None),
        ({"answer": "a", "question": "q", "other": "o"}, {"target_column": "answer"}, "q", "a"),
        ({"target": "t", "answer": "a"}, {"target_column": "answer"}, "t", "a"),
    ],
)
def test_columns_may_have_any_name(
    opened: Open,
    tmp_path: Path,
    kind: str,
    row: dict[str, Any],
    columns: dict[str, str],
    text: str,
    target: str | None,
) -> None:
    corpus = opened("byt5", path=written(tmp_path, kind, [row]), **columns)
    assert corpus.objective == ("span-corruption" if target is None else "pairs")
    assert corpus.rows.read([0])[0][0] == text
    assert target is None or corpus.rows.read([0])[0][1] == target


def test_long_pairs_are_cut_with_their_end(opened: Open, tmp_path: Path) -> None:
    path = written(tmp_path, ".jsonl", [{"input": "word " * 5000, "target": "other " * 900}])
    corpus = opened("t5", path=path, input_length=50, target_length=20)
    batch = next(corpus.training_batches())
    assert batch.labels is not None
    assert (batch.input_ids.shape[1], batch.labels.shape[1]) == (50, 20)
    assert batch.input_ids[0, -1] == batch.labels[0, -1] == END


@pytest.mark.parametrize("kind", [".csv", ".jsonl"])
def test_a_cell_is_text_whatever_it_looks_like(opened: Open, tmp_path: Path, kind: str) -> None:
    cells = ["NA", "null", "12", "1e5", "2020-01-01", "true", "a b"]
    corpus = opened(path=written(tmp_path, kind, [{"text": cell} for cell in cells]))
    assert [text for text, _ in corpus.rows.read(range(7))] == cells


def test_blank_rows_are_left_out_and_counted(opened: Open, tmp_path: Path) -> None:
    path = written(tmp_path, ".jsonl", [{"text": text} for text in ("a b", "", "  ", "c d", "\u3000")])
    corpus = opened(path=path, batch_size=2)
    assert (corpus.describe()["rows"], corpus.describe()["blank"], corpus.describe()["training"]) == (5, 3, 2)
    assert {row for batch in taken(corpus.training_batches(), 4) for _, row in batch.examples} == {0, 3}


def test_a_folder_and_a_pattern_are_all_their_files(opened: Open, tmp_path: Path) -> None:
    for k in range(3):
        (tmp_path / f"part{k}.txt").write_text(f"line {k} a\nline {k} b\n", encoding="utf-8")
    (tmp_path / "notes.md").write_text("not data", encoding="utf-8")
    assert opened(path=tmp_path).describe()["rows"] == 6
    assert opened(path=tmp_path / "part*.txt").describe()["rows"] == 6
    (tmp_path / "more.csv").write_text("text\nx\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"files of several kinds \(\.csv, \.txt\)"):
        opened(path=tmp_path)


def test_a_file_that_changed_is_read_again(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "changing.txt"
    path.write_text("one\ntwo\n", encoding="utf-8")
    assert opened(path=path).describe()["rows"] == 2
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")
    assert opened(path=path).describe()["rows"] == 3


def test_a_dataset_of_the_hub_is_asked_for_by_name_subset_and_split(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(*names: Any, **options: Any) -> Any:
        asked.append((*names, options))
        return datasets.Dataset.from_list([{"id": k, "text": f"row {k} of it"} for k in range(6)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    corpus = opened(path="org/name", subset="en", split="train[:6]", batch_size=2)
    assert asked[0] == ("org/name", "en", {"split": "train[:6]"})
    training_batches = corpus.training_batches()
    taken(training_batches, 4)
    again = corpus.training_batches()
    again.load_state_dict(json.loads(json.dumps(training_batches.state_dict())))
    assert all(same(a, b) for a, b in zip(taken(again, 7), taken(training_batches, 7), strict=True))


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("blank.txt", b"\n \n", "no examples in it"),
        ("empty.jsonl", b"", "no examples in it"),
        ("blank.jsonl", b'{"text": ""}\n', "no examples in it"),
        ("empty.csv", b"", "no examples in it"),
        ("bad.txt", b"ab\xff\n", "not UTF-8 at byte 2; convert it to UTF-8"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("mixed.jsonl", b'{"text": "a"}\n{"text": 3}\n', "column 'text' holds something that is not text"),
        ("bad.parquet", b"PAR1zz", "not a readable Parquet file"),
        ("bad.txt.gz", b"zz", "cannot be read"),
        ("torn.txt.gz", gzip.compress(b"text\n" * 900, mtime=0)[:-20], "cannot be read"),
        ("*.jsonl", None, "no file is called so"),
    ],
)
def test_bad_data_is_one_line_of_what_to_do(
    opened: Open, tmp_path: Path, name: str, content: bytes | None, wanted: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        taken(opened(path=path).training_batches(), 3)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    assert wanted in message


@pytest.mark.parametrize(
    ("kind", "side", "column"),
    [
        *itertools.product((".jsonl", ".csv", ".parquet"), ("input", "target"), ("body",)),
        (".jsonl", "input", "note"),
        (".parquet", "input", "note"),
    ],
)
def test_a_column_that_is_not_there_or_no_text_is_named(
    opened: Open, tmp_path: Path, kind: str, side: str, column: str
) -> None:
    with pytest.raises(UserError, match=f"column '{column}'") as caught:
        opened(path=written(tmp_path, kind, ROWS), **{f"{side}_column": column})
    wanted = "holds something that is not text" if column == "note" else "input, target, note"
    assert wanted in str(caught.value)


def test_a_row_without_a_target_is_named(opened: Open, tmp_path: Path) -> None:
    path = written(tmp_path, ".jsonl", [{"input": "a", "target": "b"}, {"input": "c"}])
    with pytest.raises(UserError, match="row 1 has no target; give every row one"):
        next(opened(path=path).training_batches())
