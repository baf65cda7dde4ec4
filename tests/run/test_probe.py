"""The probe covers what it says."""

import math
from pathlib import Path

import pytest
import torch
from support import tiny

from bf16_to_fp16.run.batch import SHORT, SWEEP, Batch, describe_batches
from bf16_to_fp16.run.probe import audit_batches, batches, one_batch, random_rows, rows_of


def same(a: list[Batch], b: list[Batch]) -> bool:
    return all(
        torch.equal(x.input_ids, y.input_ids) and torch.equal(x.attention_mask, y.attention_mask)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("vocabulary", [97, 5000, 40000])
def test_the_sweep_shows_every_id_once_on_each_side(vocabulary: int) -> None:
    config = tiny.config("t5", vocab_size=vocabulary)
    sweep = [b for b in batches(config, None, None, sweep=True) if b.kind == SWEEP]
    encoder = torch.cat([b.input_ids.flatten() for b in sweep])
    decoder = torch.cat([b.decoder_input_ids.flatten() for b in sweep if b.decoder_input_ids is not None])
    assert torch.equal(encoder.sort().values, torch.arange(vocabulary))
    assert torch.equal(decoder.sort().values, torch.arange(vocabulary))


def test_the_probe_depends_on_the_seed_alone() -> None:
    config = tiny.config("t5")
    assert same(batches(config, None, None, seed=3), batches(config, None, None, seed=3))
    assert not same(batches(config, None, None, seed=3), batches(config, None, None, seed=4))


@pytest.mark.parametrize(("kind", "longest"), [("t5", 512), ("pegasus", 64)])
def test_no_sequence_is_longer_than_the_positions(kind: str, longest: int) -> None:
    made = batches(tiny.config(kind), None, None)
    assert max(b.input_ids.shape[1] for b in made) == longest


def test_the_probe_has_padding_on_both_sides_and_a_generation() -> None:
    made = batches(tiny.config("t5"), None, None)
    assert any((b.attention_mask == 0).any() for b in made)
    assert any(b.decoder_attention_mask is not None and (b.decoder_attention_mask == 0).any() for b in made)
    assert sum(b.generate for b in made) == 1


@pytest.mark.parametrize("kind", ["t5", "pegasus", "t5-encoder"])
def test_short_rows_have_every_length_and_special_token_with_and_without_end_and_padding_on_both_sides(
    kind: str,
) -> None:
    config = tiny.config(kind)
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
    config = tiny.config(kind)
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
    config = tiny.config("pegasus", max_position_embeddings=12)
    assert max(random_rows(config, seed=seed).input_ids.shape[1] for seed in range(20)) == 12


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


@pytest.mark.parametrize(("memory", "left_out"), [(0, ["generate"]), (math.inf, [])])
def test_without_the_memory_of_a_decoder_nothing_is_generated_and_the_inputs_say_so(
    memory: float, left_out: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bf16_to_fp16.system.available_memory", lambda: memory)
    made = audit_batches(tiny.config("t5"), tiny.save(tiny.build("t5"), tmp_path), None)
    listed = describe_batches(made, seed=0, generates=True)
    assert listed["left_out"] == left_out
    assert ("generate" in [entry["kind"] for entry in listed["batches"]]) == (not left_out)


def test_rows_of_every_batch_fit_into_one_of_one_shape() -> None:
    config = tiny.config("t5")
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
