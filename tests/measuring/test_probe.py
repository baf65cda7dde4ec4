"""The probe covers what it says, and causal models are probed as they are used."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny
from support.observed import model_of
from support.words import TEXTS

from bf16_to_fp16.measuring import id_choice, stock
from bf16_to_fp16.measuring.batch import (
    DATA,
    GENERATE,
    IGNORED_LABEL,
    LONG,
    PADDED,
    SHORT,
    SWEEP,
    Batch,
    describe_batches,
    run_batch,
)
from bf16_to_fp16.measuring.fidelity import fidelity, output_on
from bf16_to_fp16.measuring.probe import audit_batches, batches, images, random_rows, rows_of
from bf16_to_fp16.measuring.regimes import LOSS_SCALE, audit_model

pytestmark = pytest.mark.usefixtures("whole_probe")


def rows(batch: Batch) -> list[list[int]]:
    return [ids[mask == 1].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


@pytest.mark.parametrize("vocabulary", [97, 5000, 40000])
def test_a_vocabulary_run_whole_shows_every_id_once_on_each_side(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_choice, "WHOLE", vocabulary)
    config = tiny.config("t5", vocab_size=vocabulary)
    sweep = [b for b in batches(config, None, None) if b.kind == SWEEP]
    encoder = torch.cat([b.input_ids.flatten() for b in sweep])
    decoder = torch.cat([b.decoder_input_ids.flatten() for b in sweep if b.decoder_input_ids is not None])
    assert torch.equal(encoder.sort().values, torch.arange(vocabulary))
    assert torch.equal(decoder.sort().values, torch.arange(vocabulary))


@pytest.mark.parametrize(("kind", "longest"), [("t5", 512), ("pegasus", 64)])
def test_no_sequence_is_longer_than_the_positions(kind: str, longest: int) -> None:
    made = batches(tiny.config(kind), None, None)
    assert max(b.input_ids.shape[1] for b in made) == longest
    config = tiny.config("pegasus", max_position_embeddings=12)
    assert max(random_rows(config, seed=seed).input_ids.shape[1] for seed in range(20)) == 12


@pytest.mark.parametrize("kind", ["t5", "pegasus", "t5-encoder"])
def test_short_rows_have_every_length_and_special_token_with_and_without_end_padded_on_both_sides(kind: str) -> None:
    config = tiny.config(kind)
    right, left = (b for b in batches(config, None, None) if b.kind == SHORT)
    end = config.eos_token_id
    short = rows(right)
    assert short == rows(left)
    assert {len(row) for row in short if row[-1] != end} == set(range(1, 9))
    assert {len(row) for row in short if row[-1] == end} >= set(range(2, 9))
    for special in {config.pad_token_id, end, config.vocab_size - 1}:
        assert [special] in short and [special, end] in short
    assert bool(right.attention_mask[:, 0].all()) and bool(left.attention_mask[:, -1].all())
    assert not left.attention_mask[:, 0].all() and not right.attention_mask[:, -1].all()
    assert (right.decoder_input_ids is None) is (kind == "t5-encoder")
    assert right.input_ids.numel() + left.input_ids.numel() < 400


@pytest.mark.parametrize("kind", ["t5", "pegasus", "t5-encoder"])
def test_random_rows_have_all_lengths_and_ends_and_special_tokens(kind: str) -> None:
    config = tiny.config(kind)
    made = [random_rows(config, seed=seed, left=seed % 2 == 1) for seed in range(60)]
    drawn = [row for batch in made for row in rows(batch)]
    # As many from 1 to 7 as from 8 to 63, end tokens apart.
    lengths = [len(row) - (row[-1] == config.eos_token_id) for row in drawn]
    assert min(lengths) <= 1 and max(lengths) >= 60 and max(map(len, drawn)) <= 65
    assert 0.4 < sum(length < 8 for length in lengths) / len(lengths) < 0.6
    assert 0.45 < sum(row[-1] == config.eos_token_id for row in drawn) / len(drawn) < 0.6
    specials = {config.pad_token_id, config.eos_token_id, config.vocab_size - 1}
    assert specials <= {token for row in drawn for token in row[:-1]}
    for batch in made[:2]:
        first, last = batch.attention_mask[:, 0].all(), batch.attention_mask[:, -1].all()
        assert (bool(first), bool(last)) == ((True, False) if batch is made[0] else (False, True))
    assert torch.equal(made[3].input_ids, random_rows(config, seed=3, left=True).input_ids)
    if kind == "t5-encoder":
        assert made[0].decoder_input_ids is None
    else:
        decoders = [b.decoder_input_ids for b in made if b.decoder_input_ids is not None]
        assert len(decoders) == 60 and all((ids[:, 0] == config.decoder_start_token_id).all() for ids in decoders)


def test_given_rows_are_run_as_they_are() -> None:
    batch = rows_of(tiny.config("t5"), [([5, 6, 7], [0, 9]), ([8], [0, 3, 4])], "given")
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 0, 0]] and batch.attention_mask.sum() == 4
    assert batch.decoder_input_ids is not None and batch.decoder_input_ids.tolist() == [[0, 9, 0], [0, 3, 4]]


@pytest.mark.parametrize("kind", ["t5-encoder", "umt5-encoder", "t5"])
def test_an_encoder_gets_nothing_for_a_decoder_whatever_the_flag_says(kind: str) -> None:
    config = tiny.config(kind)
    if kind == "t5":  # as published encoders are
        config.architectures = ["T5EncoderModel"]
        assert config.is_encoder_decoder
    made = batches(config, None, None)
    assert len(made) > 4
    assert all(b.decoder_input_ids is None and not b.generate for b in made)


def test_labels_are_the_following_ids_without_padding() -> None:
    ids = torch.tensor([[0, 5, 6, 7], [0, 8, 0, 0], [0, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]])
    labels = Batch("", ids, mask, ids, mask).labels()
    skip = IGNORED_LABEL
    assert labels.tolist() == [[5, 6, 7, skip], [8, skip, skip, skip], [skip, 6, 7, skip]]


def test_the_decoder_is_told_of_its_padding_with_and_without_the_head() -> None:
    model = tiny.KINDS["t5"]().eval()
    batch = batches(model.config, None, None)[3]
    told: list[torch.Tensor] = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: told.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        run_batch(model, batch)
        run_batch(model, replace(batch, head=False))
    assert batch.decoder_attention_mask is not None and len(told) == 2
    assert all(torch.equal(mask, batch.decoder_attention_mask) for mask in told)


def test_the_inputs_are_listed_by_kind_with_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_choice, "WHOLE", 5000)
    made = batches(tiny.config("t5", vocab_size=5000), None, None)
    listed = describe_batches(made, seed=0)
    assert listed["seed"] == 0 and listed["data"] is None
    assert [tuple(entry.values()) for entry in listed["batches"]] == [
        ("random ids", 1, 4, 64, 32),
        ("long", 1, 1, 512, 128),
        ("repeated", 1, 2, 64, 32),
        ("padded", 1, 4, 48, 24),
        ("short", 2, 44, 8, 4),
        ("vocabulary sweep", 2, 40, 128, 128),
        ("generate", 1, 2, 48, None),
    ]
    assert list(listed["batches"][0]) == ["kind", "batches", "rows", "encoder", "decoder"]
    assert sum(len(b.input_ids) for b in made) == sum(entry["rows"] for entry in listed["batches"])
    encoder = describe_batches(batches(tiny.config("t5-encoder"), None, None), seed=0)
    assert {entry["decoder"] for entry in encoder["batches"]} == {None}
    assert describe_batches([], seed=0, data="org/name")["data"] == {"name": "org/name", "rows": 0}


def test_the_inputs_digest_tells_the_same_tokens_from_others(source: Path, tmp_path: Path) -> None:
    config = tiny.config("t5")
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


def test_the_row_about_an_image_is_dealt_out_whole() -> None:
    (batch,) = images(tiny.build("gemma3-images").config)
    assert batch.rows(slice(0, None, 4)) is batch


@pytest.mark.parametrize("kind", ["gemma3", "llama", "qwen3"])
def test_the_probe_of_a_causal_model_is_run_by_it_and_has_both_paddings_and_a_generation(kind: str) -> None:
    model = model_of(kind)
    made = batches(model.config, None, None)
    assert all(batch.decoder_input_ids is None for batch in made)
    for what in (PADDED, SHORT):
        right, left = (batch for batch in made if batch.kind == what)
        assert rows(right) == rows(left)
        assert bool(right.attention_mask[:, 0].all()) and bool(left.attention_mask[:, -1].all())
        assert not left.attention_mask[:, 0].all() and not right.attention_mask[:, -1].all()
    (generated,) = [batch for batch in made if batch.generate]
    # What is generated follows the last id, which must be no padding.
    assert not generated.attention_mask.all() and bool(generated.attention_mask[:, -1].all())
    with torch.no_grad():
        given = {batch.kind: run_batch(model, batch) for batch in made}
    assert given.pop(GENERATE) is None and all(out.logits.shape[-1] == 97 for out in given.values())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # one names its first token, one its end
def test_rows_of_texts_begin_where_the_model_has_a_token_for_it(kind: str) -> None:
    config = model_of(kind, bos_token_id=5 if kind == "llama" else None, eos_token_id=[7, 8]).config
    made = batches(config, None, None)
    firsts = {row[0] for batch in made if batch.kind in (LONG, PADDED) for row in rows(batch)}
    assert (firsts == {5}) == (kind == "llama")
    short = rows(next(batch for batch in made if batch.kind == SHORT))
    framed = [[5, 7], [5, 8], [5, 96]] if kind == "llama" else [[8, 7], [96, 7]]
    assert all(row in short and row[0 if kind == "qwen3" else 1 :][:1] in short for row in framed)
    assert max(map(len, short)) == 8
    drawn = rows(random_rows(config, seed=3))
    assert sum((row[0] == 5 if kind == "llama" else row[-1] == 7) for row in drawn) >= 8
    if kind == "qwen3":
        assert [row for row in drawn if row[-1] == 7] != drawn


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        # Past a window of 16 most rows are.
        *(({"sliding_window": n}, longest) for n, longest in ((16, 512), (512, 528), (600, 616), (4096, 512))),
        ({"sliding_window": 600, "max_position_embeddings": 610}, 512),
    ],
)
def test_one_row_is_longer_than_a_sliding_window(changes: dict[str, Any], longest: int) -> None:
    made = batches(model_of("gemma3", **changes).config, None, None)
    assert max(batch.input_ids.shape[1] for batch in made) == longest


def test_the_head_is_left_out_where_logits_pass_the_budget_and_only_the_head() -> None:
    model = model_of("llama", vocab_size=100_000)
    made = [batch for batch in batches(model.config, None, None) if not batch.generate]
    without = [batch for batch in made if not batch.head]
    assert without and made[0].head and any(batch.kind == SHORT and batch.head for batch in made)
    ran: list[str] = []
    for name in ("model.layers.1", "lm_head"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    with torch.no_grad():
        assert run_batch(model, min(without, key=lambda batch: batch.input_ids.numel())) is None
    assert ran == ["model.layers.1"]


def test_a_text_and_its_target_are_one_row(tmp_path: Path) -> None:
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)  # which ends every text with 1
    lines = [{"text": "ab", "target": "cde"}, {"text": "ab"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = model_of("llama", vocab_size=259).config
    given, generated = batches(config, tmp_path, str(tmp_path / "data.jsonl"))
    assert given.kind == DATA and sorted(rows(given)) == [[100, 101, 1], [100, 101, 102, 103, 104]]
    assert generated.generate and bool(generated.attention_mask[:, -1].all())
    short, _ = batches(config, tmp_path, str(tmp_path / "data.jsonl"), length=4)
    assert [100, 101, 102, 103] in rows(short)


def test_the_divergence_of_a_causal_model_is_that_of_its_next_tokens() -> None:
    model = model_of("gemma3", initializer_range=0.02)
    given = [batch for batch in batches(model.config, None, None) if batch.kind == PADDED]
    with torch.no_grad():
        exact = [output_on(batch, run_batch(model, batch)) for batch in given]
        low = [output_on(batch, run_batch(deepcopy(model).bfloat16(), batch)) for batch in given]
    found = fidelity(exact, None, low, probabilities=stock.gives_probabilities(stock.config_of(model)))
    assert found.measure == "kl" and found.positions == sum(int(batch.attention_mask.sum()) for batch in given)
    assert 0 < found.kl_fp16 < 1e-3
    assert fidelity(exact, None, exact, probabilities=True).kl_fp16 == 0


def test_in_training_it_is_pulled_by_its_next_tokens_and_a_token_alone_has_none() -> None:
    model = model_of("llama")
    model.lm_head.weight.data.mul_(1e3)
    given = batches(model.config, None, None)[0]
    alone = Batch("one token", given.input_ids[:, :1], given.attention_mask[:, :1])
    pulls: list[torch.Tensor] = []
    handle = model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: pulls.append(outputs[0]))
    audit_model(model, [given], regime="stock", loss_scale=LOSS_SCALE, attention=("eager",))
    handle.remove()
    # A cross-entropy pulls by at most 1 over the number of tokens; what pulls logits to zero grows with them.
    count = int((given.labels() != IGNORED_LABEL).sum())
    assert len(pulls) == 1 and 0.5 < float(pulls[0].abs().max()) * count / LOSS_SCALE < 1.001
    assert not pulls[0][:, -1].any()  # nothing follows the last
    shown = audit_model(model, [alone], regime="stock", loss_scale=LOSS_SCALE, attention=("eager",))
    assert shown.nonfinite == 0 and any(site.name.endswith(":grad") for site in shown.sites)


@pytest.mark.parametrize(
    ("name", "decoder", "predicts", "ends"),
    [
        *((name, False, True, False) for name in ("Gemma3ForCausalLM", "GPT2LMHeadModel", "BartForCausalLM")),
        ("BartForConditionalGeneration", True, True, False),
        ("BartModel", True, False, False),
        ("BartForSequenceClassification", False, False, True),
        *((name, False, False, False) for name in ("T5EncoderModel", "Gemma3TextModel")),
    ],
)
def test_a_class_says_itself_what_it_takes_and_gives(name: str, decoder: bool, predicts: bool, ends: bool) -> None:
    config = transformers.PretrainedConfig(architectures=[name], is_encoder_decoder=not decoder)
    assert (stock.takes_decoder_ids(config), stock.predicts_tokens(config)) == (decoder, predicts)
    assert stock.is_causal(config) == (predicts and not decoder)
    known = stock.by_signature(name)
    assert known is not None and known.reads_end_token == ends
