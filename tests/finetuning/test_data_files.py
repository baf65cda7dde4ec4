"""Pairs and texts from files, folders and the Hub; span corruption and gap sentences."""

import gzip
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import END, PAD, Open, rebuilt, rng, same, taken
from support.words import rows_in

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning import objectives

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("own_cache")

ROWS = [{"input": f"question {k}", "target": "answer " * k + str(k), "note": k} for k in range(5)]


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_pairs_are_read_from_files(opened: Open, tmp_path: Path, kind: str) -> None:
    """How each kind of file is read is tested beside the probe's (measuring/test_id_choice.py)."""
    corpus = opened("t5", path=rows_in(tmp_path, kind, ROWS), batch_size=5)
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
    opened: Open, tmp_path: Path, row: dict[str, Any], columns: dict[str, str], text: str, target: str | None
) -> None:
    corpus = opened("byt5", path=rows_in(tmp_path, ".jsonl", [row]), **columns)
    assert corpus.objective == ("span-corruption" if target is None else "pairs")
    assert corpus.rows.read([0])[0][0] == text
    assert target is None or corpus.rows.read([0])[0][1] == target


def test_long_pairs_are_cut_with_their_end(opened: Open, tmp_path: Path) -> None:
    path = rows_in(tmp_path, ".jsonl", [{"input": "word " * 5000, "target": "other " * 900}])
    corpus = opened("t5", path=path, input_length=50, target_length=20)
    batch = next(corpus.training_batches())
    assert batch.labels is not None
    assert (batch.input_ids.shape[1], batch.labels.shape[1]) == (50, 20)
    assert batch.input_ids[0, -1] == batch.labels[0, -1] == END


def test_a_cell_is_text_whatever_it_looks_like(opened: Open, tmp_path: Path) -> None:
    cells = ["NA", "null", "12", "1e5", "2020-01-01", "true", "a b"]
    corpus = opened(path=rows_in(tmp_path, ".csv", [{"text": cell} for cell in cells]))
    assert [text for text, _ in corpus.rows.read(range(7))] == cells


def test_blank_rows_are_left_out_and_counted(opened: Open, tmp_path: Path) -> None:
    path = rows_in(tmp_path, ".jsonl", [{"text": text} for text in ("a b", "", "  ", "c d", "\u3000")])
    corpus = opened(path=path, batch_size=2)
    assert (corpus.describe()["rows"], corpus.describe()["blank"], corpus.describe()["training"]) == (5, 3, 2)
    assert {row for batch in taken(corpus.training_batches(), 4) for _, row in batch.examples} == {0, 3}


def test_a_file_that_changed_is_read_again(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "changing.txt"
    path.write_text("one\ntwo\n", encoding="utf-8")
    assert opened(path=path).describe()["rows"] == 2
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")
    assert opened(path=path).describe()["rows"] == 3


def test_a_dataset_is_asked_for_by_name_subset_and_split(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("blank.jsonl", b'{"text": ""}\n', "no examples in it"),
        ("bad.txt", b"ab\xff\n", "not UTF-8 at byte 2; convert it to UTF-8"),
        ("torn.txt.gz", gzip.compress(b"text\n" * 900, mtime=0)[:-20], "cannot be read"),
    ],
)
def test_bad_data_is_one_line_of_what_to_do(
    opened: Open, tmp_path: Path, name: str, content: bytes, wanted: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        taken(opened(path=path).training_batches(), 3)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    assert wanted in message


@pytest.mark.parametrize(("side", "column"), [("input", "body"), ("target", "body"), ("input", "note")])
def test_a_missing_column_is_named(opened: Open, tmp_path: Path, side: str, column: str) -> None:
    with pytest.raises(UserError, match=f"column '{column}'") as caught:
        opened(path=rows_in(tmp_path, ".jsonl", ROWS), **{f"{side}_column": column})
    wanted = "holds something that is not text" if column == "note" else "input, target, note"
    assert wanted in str(caught.value)


def test_a_row_without_a_target_is_named(opened: Open, tmp_path: Path) -> None:
    path = rows_in(tmp_path, ".jsonl", [{"input": "a", "target": "b"}, {"input": "c"}])
    with pytest.raises(UserError, match="row 1 has no target; give every row one"):
        next(opened(path=path).training_batches())


DENSITIES = st.floats(0.01, 0.9)
SPANS = st.floats(1.0, 30.0)
SEEDS = st.integers(0, 2**32 - 1)


@given(length=st.integers(1, 700), density=DENSITIES, mean_span=SPANS, seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_every_token_is_kept_and_spans_rebuild_texts(length: int, density: float, mean_span: float, seed: int) -> None:
    tokens = list(range(2, 2 + length))
    sentinels = list(range(5000, 4000, -1))
    spans = objectives.noise_spans(length, density, mean_span, rng(seed))
    source, target = objectives.span_corruption(tokens, spans, sentinels, END)
    kept = [token for token in source if token in set(tokens)]
    taken = [token for token in target if token in set(tokens)]
    assert sorted(kept + taken) == tokens
    assert rebuilt(source, target, sentinels) == tokens
    noise, count = objectives.noise_counts(length, density, mean_span)
    assert (len(taken), len(spans)) == (noise, count)
    assert (len(source), len(target)) == (length - noise + count + 1, noise + count + 1)
    if length > 1:
        assert kept[0] == tokens[0], "a text begins with kept tokens, as in T5"
        assert all(a < b for (_, a), (b, _) in itertools.pairwise(spans)), "kept tokens separate spans"


@given(length=st.integers(2, 5000), density=DENSITIES, mean_span=SPANS)
def test_density_and_mean_length_are_the_nearest_there_are(length: int, density: float, mean_span: float) -> None:
    noise, spans = objectives.noise_counts(length, density, mean_span)
    assert 1 <= noise < length
    assert 1 <= spans <= min(noise, length - noise)
    assert abs(noise - length * density) <= 0.5 or noise in (1, length - 1)
    assert abs(spans - noise / mean_span) <= 0.5 or spans in (1, length - noise)


@given(st.integers(4, 600), st.integers(4, 200), DENSITIES, SPANS, st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_the_window_is_the_longest_that_fits(
    input_length: int, target_length: int, density: float, mean_span: float, sentinels: int
) -> None:
    def fits(length: int) -> bool:
        noise, spans = objectives.noise_counts(length, density, mean_span)
        lengths = (length - noise + spans + 1, noise + spans + 1, spans)
        return all(a <= b for a, b in zip(lengths, (input_length, target_length, sentinels), strict=True))

    window = objectives.window_length(input_length, target_length, density, mean_span, sentinels)
    assert all(fits(length) for length in range(1, window + 1))
    assert not fits(window + 1)


def test_all_ways_to_place_the_spans_are_equally_likely() -> None:
    # 7 tokens, 3 of noise in 2 spans: 2 ways to cut the noise times 3 to cut the rest.
    assert objectives.noise_counts(7, 0.43, 1.5) == (3, 2)
    draws = 6000
    seen = Counter(tuple(objectives.noise_spans(7, 0.43, 1.5, rng(k))) for k in range(draws))
    assert len(seen) == 6
    spread = math.sqrt(draws / 6 * (5 / 6))
    assert all(abs(count - draws / 6) < 5 * spread for count in seen.values())


@given(st.text(alphabet="aA.!?。 \n\"')ß", max_size=60))
def test_sentences_joined_are_the_text(text: str) -> None:
    sentences = objectives.split_sentences(text)
    assert "".join(sentences) == text
    assert all(sentences)


def test_sentences_end_where_people_would_end_them() -> None:
    text = 'It rained. "Why?" She left (at 3.5 p.m. or so!) Then 今日は。明日も。\n\nEnd'
    sentences = ["It rained. ", '"Why?" ', "She left (at 3.5 p.m. or so!) ", "Then 今日は。", "明日も。\n\n", "End"]
    assert objectives.split_sentences(text) == sentences


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20), room=st.integers(0, 100), seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_masked_sentences_are_the_target_and_rebuild_the_text(sizes: list[int], room: int, seed: int) -> None:
    mask, tokens = 7, itertools.count(10)
    sentences = [[next(tokens) for _ in range(size)] for size in sizes]
    limit = max(sizes) + 1 + room
    source, target = objectives.gap_sentences(sentences, mask=mask, end=END, target_length=limit, rng=rng(seed))
    if len(sizes) == 1 and sizes[0] > 1:
        half = sizes[0] // 2
        sentences = [sentences[0][:half], sentences[0][half:]]
    wanted = max(1, min(round(len(sentences) * objectives.GAP_RATIO), len(sentences) - 1))
    assert 1 <= source.count(mask) <= wanted
    if sum(sizes) < limit:
        assert source.count(mask) == wanted
    assert len(target) <= limit
    # Whole sentences stand between the masks, so that the target's order alone tells which went where.
    gone = [ids for ids in sentences if ids[0] in target]
    assert target == [*itertools.chain.from_iterable(gone), END]
    again = iter(gone)
    filled = itertools.chain.from_iterable(next(again) if token == mask else [token] for token in source[:-1])
    assert list(filled) == list(itertools.chain.from_iterable(sentences))


def test_every_sentence_is_as_likely_to_be_masked() -> None:
    sentences = [[10], [11, 12], [13], [14, 15]]
    drawn = [objectives.gap_sentences(sentences, mask=7, end=END, target_length=9, rng=rng(k))[1] for k in range(400)]
    assert all(80 < sum(ids[0] in target for target in drawn) < 120 for ids in sentences)
