"""Of a large vocabulary the probe runs ids that stand for the rest; texts become tokens; bad data is one line."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.contract import layout_of
from support.words import TEXTS, rows_in

from bf16_to_fp16.checkpoint.reader import Checkpoint, open_checkpoint
from bf16_to_fp16.conversion.convert import convert
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.families.layout import TensorSource
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.measuring import id_choice, probe, texts
from bf16_to_fp16.measuring.batch import CHOSEN, Batch, describe_batches, run_batch
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.probe import audit_batches, batches, chosen_ids

pytestmark = pytest.mark.usefixtures("whole_probe")

VOCABULARY = 3000
LONG, SHORT, HIGH, LOW, CHANNEL = 1234, 77, 2021, 2022, 5


def model_of(kind: str = "gated") -> Any:
    """A model with a row that is longer than the others, one that is shorter, and one channel that stands out."""
    torch.manual_seed(0)
    model = tiny.KINDS[kind](vocab_size=VOCABULARY).eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.copy_(torch.randn_like(table).bfloat16())
        table[LONG] *= 20
        table[SHORT] /= 64
        table[:, CHANNEL] *= 4
        table[HIGH, CHANNEL], table[LOW, CHANNEL] = 40, -40
    return model


def ids_of(model: Any, source: TensorSource | None = None, seed: int = 0) -> dict[str, list[int]]:
    source = source or ModelTensors(model)
    found = chosen_ids(model.config, source, resolve(source), seed=seed)
    assert found is not None
    return found


def largest(model: Any, inputs: Sequence[Batch]) -> dict[str, float]:
    observer = SiteObserver(model)
    with torch.no_grad(), observer:
        for batch in inputs:
            run_batch(model, batch)
    return {site.name: site.amax for site in observer.sites() if site.calls}


@pytest.mark.parametrize(
    "kind", ["t5", "gated", "umt5", "mbart", "t5-encoder", "gemma3", "llama-biased", "qwen3", "switch"]
)
def test_extreme_rows_are_chosen_and_every_id_once(kind: str) -> None:
    model = model_of(kind)
    found = ids_of(model)
    reasons = ["special", "largest norm", "smallest norm", "outlier channels", "largest alone"]
    assert list(found)[: len(reasons)] == reasons
    ids = [i for reason in found.values() for i in reason]
    assert len(ids) == len(set(ids)) == id_choice.CHOSEN
    assert found["largest norm"][0] == LONG and found["smallest norm"][0] == SHORT
    assert {HIGH, LOW} <= set(found["largest norm"] + found["outlier channels"])
    assert VOCABULARY - 1 in found["special"] and all(found.values())


@pytest.mark.parametrize(
    "kind",
    ["t5", "gated", "umt5", "pegasus", "mbart", "t5-encoder", "gemma3", "glm4", "llama-biased", "qwen3", "switch"],
)
def test_a_token_alone_is_what_stock_code_makes_of_a_row_of_one(kind: str) -> None:
    model = model_of(kind)
    source = ModelTensors(model)
    steps = list(id_choice.forward(id_choice.Weights(source, resolve(source)), [LONG, HIGH]))
    seen: dict[str, torch.Tensor] = {}
    for step in steps:
        module = model.get_submodule(step.norm)
        module.register_forward_hook(lambda module, args, output, at=step.norm: seen.__setitem__(at, output[:, 0]))
    ids = torch.tensor([[LONG], [HIGH]])
    mask = torch.ones_like(ids)
    decoder, decoder_mask = (ids, mask) if len(layout_of(model).stacks()) > 1 else (None, None)
    with torch.no_grad():
        run_batch(model, Batch("", ids, mask, decoder, decoder_mask, head=False))
    for step in steps:
        assert torch.allclose(step.outputs[0], seen[step.norm], rtol=1e-3, atol=1e-4), step.norm


def test_the_id_that_drives_the_strongest_neuron_is_chosen() -> None:
    model = model_of()
    inside = model.encoder.block[1].layer[1]
    with torch.no_grad():
        # A direction that no row comes near, then one row along it.
        direction = torch.randn(24, generator=torch.Generator().manual_seed(1))
        for linear in (inside.DenseReluDense.wi_0, inside.DenseReluDense.wi_1):
            linear.weight[3] = direction * 50 / inside.layer_norm.weight
        model.shared.weight[1500] = direction
    assert 1500 in [i for ids in ids_of(model).values() for i in ids]


def test_the_choice_depends_on_weights_and_seed_and_without_weights_is_random() -> None:
    model = model_of()
    first = ids_of(model)
    assert ids_of(model) == first
    assert ids_of(model, seed=1) != first
    config = model_of().config
    (drawn,) = (b.chosen for b in batches(config, None, None) if b.chosen)
    assert list(drawn) == ["special", "random"]
    ids = [i for reason in drawn.values() for i in reason]
    assert len(ids) == len(set(ids)) == id_choice.CHOSEN


def test_the_table_is_read_once_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    folder = tiny.save(model, tmp_path / "source")
    monkeypatch.setattr(id_choice, "_ELEMENTS", 24 * 700)
    read: list[tuple[str, int, int]] = []
    rows = Checkpoint.read_rows

    def counted(self: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
        read.append((name, start, stop))
        return rows(self, name, start, stop)

    monkeypatch.setattr(Checkpoint, "read_rows", counted)
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: rows(self, name, 0, self.tensors[name].shape[0]))
    in_parts = ids_of(model, open_checkpoint(folder))
    parts = [(start, stop) for _, start, stop in read if stop - start > 1]
    assert parts == [(i, min(i + 700, VOCABULARY)) for i in range(0, 3000, 700)]
    monkeypatch.setattr(id_choice, "_ELEMENTS", 1 << 22)
    assert ids_of(model, open_checkpoint(folder)) == in_parts


def test_what_is_chosen_reaches_nearly_as_far_as_every_id_at_every_site(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    with monkeypatch.context() as patch:
        patch.setattr(id_choice, "WHOLE", VOCABULARY)
        swept = largest(model, batches(model.config, None, None))

    def ratios(ids: Any) -> torch.Tensor:
        found = largest(model, batches(model.config, None, None, chosen=ids))
        return torch.tensor([found[name] / amax for name, amax in swept.items() if amax and "norm:" not in name])

    chosen, drawn = ratios(ids_of(model)), ratios(None)
    assert float(chosen.median()) > 0.95 and float(chosen.min()) > 0.7
    assert float(drawn.min()) < 0.7


def test_chosen_ids_are_run_in_long_rows_in_pairs_and_alone() -> None:
    model = model_of()
    ids = ids_of(model)
    made = [b for b in batches(model.config, None, None, chosen=ids) if b.kind == CHOSEN]
    assert [tuple(b.input_ids.shape) for b in made] == [(2, 128), (128, 2), (256, 1)]
    for batch in made:
        assert batch.decoder_input_ids is not None
        assert torch.equal(batch.decoder_input_ids, batch.input_ids.flip(1))
    assert describe_batches(made, seed=0)["chosen"] == ids


@pytest.mark.parametrize("vocabulary", [32128, 250112])
def test_logits_fit_a_budget_that_the_vocabulary_does_not_change(vocabulary: int) -> None:
    config = tiny.KINDS["gated"]().config
    config.vocab_size = vocabulary
    made = [b for b in batches(config, None, None) if b.head and not b.generate]
    positions = [b.decoder_input_ids.numel() for b in made if b.decoder_input_ids is not None]
    assert positions and max(positions) * vocabulary <= 2**25
    assert 2**23 < sum(positions) * vocabulary <= 2**26
    assert any(b.kind == "random ids" for b in made)


def test_a_report_lists_the_ids_that_verify_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bf16_to_fp16.conversion.verify import verify

    model = tiny.KINDS["t5-encoder"](vocab_size=VOCABULARY, num_layers=1)
    source = tiny.save(model, tmp_path / "source")
    report = convert(source, tmp_path / "out").report
    inputs = report["inputs"]
    assert sum(map(len, inputs["chosen"].values())) == id_choice.CHOSEN
    ran: list[Sequence[Batch]] = []

    def kept(*given: Any, **options: Any) -> list[Batch]:
        ran.append(audit_batches(*given, **options))
        return list(ran[-1])

    monkeypatch.setattr(probe, "audit_batches", kept)
    assert verify(tmp_path / "out")["verified"]
    assert describe_batches(ran[0], seed=0) == inputs


@pytest.mark.parametrize("listed", [{}, {"cover": [3000]}, {"cover": list(range(257))}])
def test_ids_that_a_report_cannot_mean_are_not_run(listed: dict[str, list[int]]) -> None:
    config = model_of().config
    assert probe.usable(listed, config) is None
    assert probe.usable({"cover": [2999]}, config) == {"cover": [2999]}


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet", ".txt"])
def test_each_kind_of_file_gives_the_same_tokens(kind: str, source: Path, tmp_path: Path) -> None:
    config = tiny.config("t5")
    path = rows_in(tmp_path, kind, [{"text": text} for text in TEXTS])
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


def test_a_target_is_shifted_and_input_is_the_first_column(source: Path, tmp_path: Path) -> None:
    path = rows_in(tmp_path, ".jsonl", [{"input": TEXTS[0], "target": TEXTS[1]}])
    batch = batches(tiny.config("t5"), source, str(path))[0]
    words = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    assert batch.decoder_input_ids is not None
    assert batch.decoder_input_ids[0].tolist() == [0, *(words[w] for w in TEXTS[1].split()[:-1])]
    assert batch.labels()[0].tolist()[:3] == [words[w] for w in TEXTS[1].split()[:3]]
    config = tiny.config("t5")
    rows = [{"title": "it", "text": "it rained", "input": "the cat sat"}]
    made = batches(config, source, str(rows_in(tmp_path, ".jsonl", rows)))
    assert made[0].input_ids.shape[1] == 3
    made = batches(config, source, str(rows_in(tmp_path, ".csv", [{"title": "it", "target": "the dog sat"}])))
    assert made[0].input_ids.shape[1] == 1


def test_examples_and_length_are_capped_and_drawn_from_the_whole_file(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("\n".join(["cat"] * 100 + ["the dog sat " * 50] * 100))
    made = batches(tiny.config("t5"), source, str(path), examples=20, length=30)
    data = [b for b in made if not b.generate]
    assert sum(len(b.input_ids) for b in data) == 20
    assert {1, 30} == {int(n) for b in data for n in b.attention_mask.sum(1)}
    path = rows_in(tmp_path, ".jsonl", [{"text": text, "target": "the cat " * 150} for text in TEXTS * 2])
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
        ("list.jsonl", b'["text"]\n', "line 1 is not a JSON object"),
        ("mixed.jsonl", b'{"text": "a"}\n{"text": 3}\n', "holds something that is not text"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), "not UTF-8"),
        ("latin.csv", "text\ncaf\u00e9".encode("latin-1"), "not UTF-8"),
        ("not.parquet", b"not parquet", "not a readable Parquet file"),
        ("data.xlsx", b"x", "unknown kind of file '.xlsx'"),
    ],
)
def test_unusable_data_is_one_line(name: str, content: bytes | None, says: str, source: Path, tmp_path: Path) -> None:
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
