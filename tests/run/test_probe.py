"""The probe covers what it says, and bad data is one line of what to do."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.run import texts
from bf16_to_fp16.run.batch import IGNORED_LABEL, SHORT, SWEEP, Batch, describe_batches, run_batch
from bf16_to_fp16.run.probe import audit_batches, batches, one_batch, random_rows, rows_of

TEXTS = ["the cat sat", "a dog ran far away", "the dog sat", "it rained"]


def config_of(kind: str, **changes: Any) -> Any:
    model = tiny.KINDS[kind](**changes)
    model.config.architectures = [type(model).__name__]
    return model.config


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a word tokenizer and the configuration it belongs to."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *sorted({word for text in TEXTS for word in text.split()})]
    words_tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    words_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("source")
    PreTrainedTokenizerFast(
        tokenizer_object=words_tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return tiny.save(tiny.build("t5"), folder)


def same(a: list[Batch], b: list[Batch]) -> bool:
    return all(
        torch.equal(x.input_ids, y.input_ids) and torch.equal(x.attention_mask, y.attention_mask)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("vocabulary", [97, 5000, 40000])
def test_the_sweep_shows_every_id_once_on_each_side(vocabulary: int) -> None:
    config = config_of("t5", vocab_size=vocabulary)
    sweep = [b for b in batches(config, None, None, sweep=True) if b.kind == SWEEP]
    encoder = torch.cat([b.input_ids.flatten() for b in sweep])
    decoder = torch.cat([b.decoder_input_ids.flatten() for b in sweep if b.decoder_input_ids is not None])
    assert torch.equal(encoder.sort().values, torch.arange(vocabulary))
    assert torch.equal(decoder.sort().values, torch.arange(vocabulary))


def test_the_probe_depends_on_the_seed_alone() -> None:
    config = config_of("t5")
    assert same(batches(config, None, None, seed=3), batches(config, None, None, seed=3))
    assert not same(batches(config, None, None, seed=3), batches(config, None, None, seed=4))


@pytest.mark.parametrize(("kind", "longest"), [("t5", 512), ("pegasus", 64)])
def test_no_sequence_is_longer_than_the_positions(kind: str, longest: int) -> None:
    made = batches(config_of(kind), None, None)
    assert max(b.input_ids.shape[1] for b in made) == longest


def test_the_probe_has_padding_on_both_sides_and_a_generation() -> None:
    made = batches(config_of("t5"), None, None)
    assert any((b.attention_mask == 0).any() for b in made)
    assert any(b.decoder_attention_mask is not None and (b.decoder_attention_mask == 0).any() for b in made)
    assert sum(b.generate for b in made) == 1


@pytest.mark.parametrize("kind", ["t5", "pegasus", "t5-encoder"])
def test_short_rows_have_every_length_and_special_token_with_and_without_end_and_padding_on_both_sides(
    kind: str,
) -> None:
    config = config_of(kind)
    right, left = (b for b in batches(config, None, None) if b.kind == SHORT)
    end = config.eos_token_id
    rows = [ids[mask == 1].tolist() for ids, mask in zip(right.input_ids, right.attention_mask, strict=True)]
    assert rows == [ids[mask == 1].tolist() for ids, mask in zip(left.input_ids, left.attention_mask, strict=True)]
    assert {len(row) for row in rows if row[-1] != end} == set(range(1, 9))
    assert {len(row) for row in rows if row[-1] == end} >= set(range(2, 9))
    for special in {config.pad_token_id, end, config.vocab_size - 1}:
        assert [special] in rows and [special, end] in rows
    assert bool(right.attention_mask[:, 0].all()) and bool(left.attention_mask[:, -1].all())
    assert not left.attention_mask[:, 0].all() and not right.attention_mask[:, -1].all()
    assert (right.decoder_input_ids is None) is (kind == "t5-encoder")
    assert right.input_ids.numel() + left.input_ids.numel() < 400


@pytest.mark.parametrize("kind", ["t5", "pegasus", "t5-encoder"])
def test_random_rows_have_all_lengths_and_ends_and_special_tokens(kind: str) -> None:
    config = config_of(kind)
    made = [random_rows(config, seed=seed, left=seed % 2 == 1) for seed in range(60)]
    rows = [ids[mask == 1].tolist() for b in made for ids, mask in zip(b.input_ids, b.attention_mask, strict=True)]
    # As many from 1 to 7 as from 8 to 63, end tokens apart.
    lengths = [len(row) - (row[-1] == config.eos_token_id) for row in rows]
    assert min(lengths) <= 1 and max(lengths) >= 60 and max(map(len, rows)) <= 65
    assert 0.4 < sum(length < 8 for length in lengths) / len(lengths) < 0.6
    assert 0.45 < sum(row[-1] == config.eos_token_id for row in rows) / len(rows) < 0.6
    specials = {config.pad_token_id, config.eos_token_id, config.vocab_size - 1}
    assert specials <= {token for row in rows for token in row[:-1]}
    for batch in made[:2]:
        first, last = batch.attention_mask[:, 0].all(), batch.attention_mask[:, -1].all()
        assert (bool(first), bool(last)) == ((True, False) if batch is made[0] else (False, True))
    assert torch.equal(made[3].input_ids, random_rows(config, seed=3, left=True).input_ids)
    if kind == "t5-encoder":
        assert made[0].decoder_input_ids is None
    else:
        decoders = [b.decoder_input_ids for b in made if b.decoder_input_ids is not None]
        assert len(decoders) == 60 and all((ids[:, 0] == config.decoder_start_token_id).all() for ids in decoders)


def test_random_rows_fit_the_positions() -> None:
    config = config_of("pegasus", max_position_embeddings=12)
    assert max(random_rows(config, seed=seed).input_ids.shape[1] for seed in range(20)) == 12


def test_given_rows_are_run_as_they_are() -> None:
    batch = rows_of(config_of("t5"), [([5, 6, 7], [0, 9]), ([8], [0, 3, 4])], "given")
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 0, 0]] and batch.attention_mask.sum() == 4
    assert batch.decoder_input_ids is not None and batch.decoder_input_ids.tolist() == [[0, 9, 0], [0, 3, 4]]


@pytest.mark.parametrize("kind", ["t5-encoder", "umt5-encoder"])
def test_an_encoder_gets_nothing_for_a_decoder(kind: str) -> None:
    made = batches(config_of(kind), None, None)
    assert len(made) > 4
    assert all(b.decoder_input_ids is None and not b.generate for b in made)


def test_an_encoder_is_known_by_its_class_where_the_flag_says_otherwise() -> None:
    config = config_of("t5")
    config.architectures = ["T5EncoderModel"]  # as published encoders are
    assert config.is_encoder_decoder
    assert all(b.decoder_input_ids is None for b in batches(config, None, None))


def test_labels_are_the_following_ids_without_padding() -> None:
    ids = torch.tensor([[0, 5, 6, 7], [0, 8, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    labels = Batch("", ids, mask, ids, mask).labels()
    skip = IGNORED_LABEL
    assert labels.tolist() == [[5, 6, 7, skip], [8, skip, skip, skip]]


def test_the_decoder_is_told_of_its_padding() -> None:
    model = tiny.KINDS["t5"]().eval()
    batch = batches(model.config, None, None)[3]
    told: list[torch.Tensor] = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: told.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        run_batch(model, batch)
    assert batch.decoder_attention_mask is not None
    assert torch.equal(told[0], batch.decoder_attention_mask)


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
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "txt"])
def test_each_kind_of_file_gives_the_same_tokens(kind: str, source: Path, tmp_path: Path) -> None:
    config = config_of("t5")
    path = write(kind, tmp_path, [{"text": text} for text in TEXTS])
    made = batches(config, source, str(path))
    assert len(made) == 2  # one batch, and a generation from it
    assert made[0].attention_mask.sum(1).tolist() == [2, 3, 3, 5]
    assert made[1].generate
    (tmp_path / "other.txt").write_text("\n".join(TEXTS))
    assert same(made, batches(config, source, str(tmp_path / "other.txt")))


def test_a_target_is_shifted_behind_the_start_token(source: Path, tmp_path: Path) -> None:
    path = write("jsonl", tmp_path, [{"input": TEXTS[0], "target": TEXTS[1]}])
    batch = batches(config_of("t5"), source, str(path))[0]
    words = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    assert batch.decoder_input_ids is not None
    assert batch.decoder_input_ids[0].tolist() == [0, *(words[w] for w in TEXTS[1].split()[:-1])]
    assert batch.labels()[0].tolist()[:3] == [words[w] for w in TEXTS[1].split()[:3]]


def test_the_column_input_goes_before_text_and_any_other(source: Path, tmp_path: Path) -> None:
    config = config_of("t5")
    rows = [{"title": "it", "text": "it rained", "input": "the cat sat"}]
    made = batches(config, source, str(write("jsonl", tmp_path, rows)))
    assert made[0].input_ids.shape[1] == 3
    made = batches(config, source, str(write("csv", tmp_path, [{"title": "it", "target": "the dog sat"}])))
    assert made[0].input_ids.shape[1] == 1


def test_examples_and_length_are_capped_and_drawn_from_the_whole_file(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("\n".join(["cat"] * 100 + ["the dog sat " * 50] * 100))
    made = batches(config_of("t5"), source, str(path), examples=20, length=30)
    data = [b for b in made if not b.generate]
    assert sum(len(b.input_ids) for b in data) == 20
    assert {1, 30} == {int(n) for b in data for n in b.attention_mask.sum(1)}


def test_a_large_vocabulary_gets_fewer_rows(source: Path, tmp_path: Path) -> None:
    path = write("jsonl", tmp_path, [{"text": text, "target": "the cat " * 150} for text in TEXTS * 2])
    made = batches(config_of("t5", vocab_size=250_000), source, str(path))
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
        batches(config_of("t5"), source, str(tmp_path / name))
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


def offline() -> tuple[bool, bool]:
    import datasets
    import huggingface_hub

    return datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE


def test_a_hub_out_of_reach_is_asked_once_and_is_one_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens at the tests' endpoint. The loader alone would try again, and sleep, for 23 seconds.
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits to try again"))
    with pytest.raises(UserError, match="no-such/dataset: neither a file here nor, the Hub being out of") as raised:
        batches(config_of("t5"), source, "no-such/dataset")
    assert "\n" not in str(raised.value)
    assert offline() == (False, False)


def test_a_dataset_in_the_cache_serves_where_the_hub_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    seen = []

    def load(name: str, streaming: bool) -> Any:
        seen.append(offline())
        return {"train": [{"text": text} for text in TEXTS]}

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(texts.texts("org/name")) == [(text, None) for text in TEXTS]
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    assert list(texts.texts("org/name")) == [(text, None) for text in TEXTS]
    assert seen == [(True, True), (False, False)]
    assert offline() == (False, False)


def test_a_dataset_that_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(name: str, streaming: bool) -> Any:
        raise ValueError("no split\nat all")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"org/name: neither .* readable dataset of the Hub \(no split\); check"):
        list(texts.texts("org/name"))


def test_the_inputs_are_listed_by_kind_with_their_shapes() -> None:
    made = batches(config_of("t5", vocab_size=5000), None, None, sweep=True)
    listed = describe_batches(made, seed=0)
    assert listed["seed"] == 0 and listed["data"] is None
    assert [tuple(entry.values()) for entry in listed["batches"]] == [
        ("random ids", 1, 4, 64, 32),
        ("long", 1, 1, 512, 128),
        ("repeated", 1, 2, 64, 32),
        ("padded", 1, 4, 48, 24),
        ("short", 2, 44, 8, 4),
        ("vocabulary sweep", 6, 40, 128, 128),
        ("generate", 1, 2, 48, None),
    ]
    assert list(listed["batches"][0]) == ["kind", "batches", "rows", "encoder", "decoder"]
    assert sum(len(b.input_ids) for b in made) == sum(entry["rows"] for entry in listed["batches"])
    encoder = describe_batches(batches(config_of("t5-encoder"), None, None), seed=0)
    assert {entry["decoder"] for entry in encoder["batches"]} == {None}


def test_the_inputs_digest_tells_the_same_tokens_from_others(source: Path, tmp_path: Path) -> None:
    config = config_of("t5")
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))

    def digest(seed: int = 0, data: str | None = None) -> str:
        return str(describe_batches(audit_batches(config, source, data, seed=seed), seed=seed, data=data)["sha256"])

    assert digest() == digest()
    assert digest(data=str(path)) == digest(data=str(path))
    assert len({digest(), digest(seed=1), digest(data=str(path))}) == 3
    first = digest(data=str(path))
    path.write_text("\n".join([*TEXTS[1:], "cat"]))
    assert digest(data=str(path)) != first
    one, other = batches(config, None, None)[:1], batches(config, None, None)[:1]
    other[0].attention_mask[0, -1] = 0
    assert describe_batches(one, seed=0)["sha256"] != describe_batches(other, seed=0)["sha256"]


@pytest.mark.parametrize(("memory", "left_out"), [(0, ["generate"]), (math.inf, [])])
def test_without_the_memory_of_a_decoder_nothing_is_generated_and_the_inputs_say_so(
    memory: float, left_out: list[str], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bf16_to_fp16.run.memory.available", lambda: memory)
    made = audit_batches(config_of("t5"), source, None)
    listed = describe_batches(made, seed=0, generates=True)
    assert listed["left_out"] == left_out
    assert ("generate" in [entry["kind"] for entry in listed["batches"]]) == (not left_out)


def test_of_data_the_inputs_name_the_file_without_its_folder_and_the_rows(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    listed = describe_batches(batches(config_of("t5"), source, str(path)), seed=3, data=str(path))
    assert listed["data"] == {"name": "texts.txt", "rows": 4}
    assert [entry["kind"] for entry in listed["batches"]] == ["data", "generate"]
    assert str(tmp_path) not in json.dumps(listed)
    assert describe_batches([], seed=0, data="org/name")["data"] == {"name": "org/name", "rows": 0}


def test_text_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    config = config_of("t5")
    config.save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="no tokenizer files") as raised:
        batches(config, tmp_path, str(tmp_path / "a.txt"))
    assert "\n" not in str(raised.value)


def test_a_damaged_tokenizer_is_one_line(tmp_path: Path) -> None:
    config = config_of("t5")
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="no usable tokenizer") as raised:
        batches(config, tmp_path, str(tmp_path / "a.txt"))
    assert "\n" not in str(raised.value)


def test_a_tokenizer_of_another_checkpoint_is_found_out(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    with pytest.raises(UserError, match="past the vocabulary of 5"):
        batches(config_of("t5", vocab_size=5), source, str(tmp_path / "a.txt"))


def test_rows_of_every_batch_fit_into_one_of_one_shape() -> None:
    config = config_of("t5")
    inputs = batches(config, None, None)
    one = one_batch(config, inputs, length=24, decoder_length=8)
    assert one.decoder_input_ids is not None and one.decoder_attention_mask is not None
    assert one.input_ids.shape[1] == 24 and one.decoder_input_ids.shape[1] == 8
    assert (one.decoder_input_ids[:, 0] == config.decoder_start_token_id).all()
    firsts = [batch.input_ids[0][batch.attention_mask[0].bool()][:24] for batch in inputs if not batch.generate]
    rows = [ids[mask.bool()] for ids, mask in zip(one.input_ids, one.attention_mask, strict=True)]
    assert all(any(torch.equal(first, row) for row in rows) for first in firsts)
    assert len(set(map(len, rows))) > 1
    config.vocab_size = 250_000
    assert len(one_batch(config, inputs).input_ids) == 4
