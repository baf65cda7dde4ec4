"""Texts become the tokens that the checkpoint's tokenizer makes of them, and bad data is one line of what to do."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from support import tiny
from support.words import TEXTS

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.measuring import texts
from bf16_to_fp16.measuring.batch import describe_batches
from bf16_to_fp16.measuring.probe import batches

pytestmark = pytest.mark.usefixtures("whole_probe")


def write(kind: str, folder: Path, rows: list[dict[str, str]]) -> Path:
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif kind == "csv":
        lines = [",".join(row.values()) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *lines]))
    elif kind == "txt":
        path.write_text("\n".join(row["text"] for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "txt"])
def test_each_kind_of_file_gives_the_same_tokens(kind: str, source: Path, tmp_path: Path) -> None:
    config = tiny.config("t5")
    path = write(kind, tmp_path, [{"text": text} for text in TEXTS])
    made = batches(config, source, str(path))
    assert len(made) == 2  # one batch, and a generation from it
    assert made[0].attention_mask.sum(1).tolist() == [2, 3, 3, 5]
    assert made[1].generate
    (tmp_path / "other.txt").write_text("\n".join(TEXTS))
    other = batches(config, source, str(tmp_path / "other.txt"))
    assert describe_batches(made, seed=0)["sha256"] == describe_batches(other, seed=0)["sha256"]


@pytest.mark.parametrize("kind", ["longt5", "longt5-local"])
def test_texts_are_run_whatever_their_file_is_called(kind: str, source: Path, tmp_path: Path) -> None:
    """Where stock code bears little padding, the probe's rows that are padded on the left are left out."""
    data = tmp_path / "left.txt"
    data.write_text("\n".join(TEXTS))
    made = [batch for batch in batches(tiny.config(kind), source, str(data)) if not batch.generate]
    assert sum(len(batch.input_ids) for batch in made) == len(TEXTS)


def test_a_target_is_shifted_behind_the_start_token_and_input_goes_before_text_and_any_other_column(
    source: Path, tmp_path: Path
) -> None:
    path = write("jsonl", tmp_path, [{"input": TEXTS[0], "target": TEXTS[1]}])
    batch = batches(tiny.config("t5"), source, str(path))[0]
    words = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    assert batch.decoder_input_ids is not None
    assert batch.decoder_input_ids[0].tolist() == [0, *(words[w] for w in TEXTS[1].split()[:-1])]
    assert batch.labels()[0].tolist()[:3] == [words[w] for w in TEXTS[1].split()[:3]]
    config = tiny.config("t5")
    rows = [{"title": "it", "text": "it rained", "input": "the cat sat"}]
    made = batches(config, source, str(write("jsonl", tmp_path, rows)))
    assert made[0].input_ids.shape[1] == 3
    made = batches(config, source, str(write("csv", tmp_path, [{"title": "it", "target": "the dog sat"}])))
    assert made[0].input_ids.shape[1] == 1


def test_examples_and_length_are_capped_and_drawn_from_the_whole_file_and_a_large_vocabulary_gets_fewer_rows(
    source: Path, tmp_path: Path
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("\n".join(["cat"] * 100 + ["the dog sat " * 50] * 100))
    made = batches(tiny.config("t5"), source, str(path), examples=20, length=30)
    data = [b for b in made if not b.generate]
    assert sum(len(b.input_ids) for b in data) == 20
    assert {1, 30} == {int(n) for b in data for n in b.attention_mask.sum(1)}
    path = write("jsonl", tmp_path, [{"text": text, "target": "the cat " * 150} for text in TEXTS * 2])
    made = batches(tiny.config("t5", vocab_size=250_000), source, str(path))
    assert max(len(b.input_ids) for b in made) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", b"", "no examples"),
        ("blank.jsonl", b"\n\n", "no examples"),
        ("columns.jsonl", b'{"n": 1}\n', "no column of strings among n"),
        ("broken.jsonl", b'{"text": \n', "line 1 is not JSON"),
        ("list.jsonl", b'["text"]\n', "line 1 is not an object"),
        ("mixed.jsonl", b'{"text": "a"}\n{"text": 3}\n', "holds something that is not text"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), "not UTF-8"),
        ("latin.csv", "text\ncaf\u00e9".encode("latin-1"), "not UTF-8"),
        ("not.parquet", b"not parquet", "not a readable Parquet file"),
        ("data.xlsx", b"x", "unknown kind of file '.xlsx'"),
    ],
)
def test_unusable_data_is_one_line_that_names_the_file(
    name: str, content: bytes | None, says: str, source: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        batches(tiny.config("t5"), source, str(tmp_path / name))
    message = str(raised.value)
    assert says in message
    assert name in message
    assert "\n" not in message


def test_packed_text_is_read_as_it_is_unpacked(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    plain, packed = (list(texts.texts(str(tmp_path / name))) for name in ("a.txt", "a.txt.gz"))
    assert plain == packed and len(packed) == len(TEXTS)
    (tmp_path / "a.gz").write_bytes(b"x")
    with pytest.raises(UserError, match=r"unknown kind of file ''; use .jsonl, .csv, .parquet or .txt \(.gz too\)"):
        list(texts.texts(str(tmp_path / "a.gz")))


def test_a_dataset_that_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, streaming: bool) -> Any:
        raise ValueError("no split\nat all")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"org/name: neither .* readable dataset of the Hub \(no split\); check"):
        list(texts.texts("org/name"))


@pytest.mark.parametrize(("damaged", "says"), [(False, "no tokenizer files"), (True, "no usable tokenizer")])
def test_text_without_a_tokenizer_is_one_line(damaged: bool, says: str, tmp_path: Path) -> None:
    config = tiny.config("t5")
    config.save_pretrained(tmp_path)
    if damaged:
        (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=says) as raised:
        batches(config, tmp_path, str(tmp_path / "a.txt"))
    assert "\n" not in str(raised.value)


def test_a_tokenizer_of_another_checkpoint_is_found_out(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    with pytest.raises(UserError, match="past the vocabulary of 5"):
        batches(tiny.config("t5", vocab_size=5), source, str(tmp_path / "a.txt"))
