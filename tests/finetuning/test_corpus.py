"""Denoising is exact, every example is seen once, and a stream continues bit for bit."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support import causal, tiny
from support.corpora import END, PAD, TEXTS, TOKENIZERS, WORDS, Open, rebuilt, rng, same, t5_like, taken

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.finetuning.corpus import Corpus, TrainingBatch, epoch_order
from bf16_to_fp16.finetuning.objectives import conventions, noise_counts, split_sentences
from bf16_to_fp16.finetuning.recipe import Data
from bf16_to_fp16.measuring.stock import decoder_start

pytest.importorskip("datasets")
torch.set_num_threads(1)


pytestmark = pytest.mark.usefixtures("own_cache")


def test_sentinels_are_those_that_each_family_was_trained_with(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    found = {}
    for kind, (folder, config) in checkpoints.items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        found[kind] = conventions(tokenizer, config.vocab_size)
        assert (found[kind].pad, found[kind].end, found[kind].bytes) == (PAD, END, kind == "byt5")
        if kind in ("t5", "umt5", "mt5"):
            prefix = "▁" if kind == "mt5" else ""
            names = [f"{prefix}<extra_id_{k}>" for k in range(100)]
            assert list(found[kind].sentinels) == tokenizer.convert_tokens_to_ids(names)
            assert len(set(found[kind].sentinels)) == 100
    top = checkpoints["t5"][1].vocab_size - 1
    assert found["t5"].sentinels == tuple(range(top, top - 100, -1))  # 32099 and down in T5
    assert found["byt5"].sentinels == tuple(range(258, 158, -1))
    assert (found["pegasus"].sentinels, found["pegasus"].mask) == ((), 2)
    assert all(found[kind].mask is None for kind in found if kind != "pegasus")
    language = transformers.AutoTokenizer.from_pretrained(checkpoints["mbart"][0]).convert_tokens_to_ids("ro_RO")
    assert (found["mbart"].sentinels, found["mbart"].span_mask) == ((), 4)
    assert (found["mbart"].before, found["mbart"].after) == ((), (END, language))
    assert all(found[kind].span_mask is None for kind in found if kind != "mbart")


def test_a_first_sentinel_counts_down_and_must_be_in_the_vocabulary() -> None:
    tokenizer = transformers.ByT5Tokenizer(extra_ids=125)
    assert conventions(tokenizer, 384, 383).sentinels == tuple(range(383, 283, -1))
    with pytest.raises(UserError, match=r"data\.first_sentinel is 384, past the vocabulary of 384; give"):
        conventions(tokenizer, 384, 384)


@pytest.mark.parametrize(
    ("kind", "objective"),
    [(kind, "gap-sentences" if kind == "pegasus" else "span-corruption") for kind in TOKENIZERS if kind != "mbart"],
)
def test_every_row_of_plain_text_rebuilds_within_the_lengths(opened: Open, kind: str, objective: str) -> None:
    corpus = opened(kind, input_length=60, target_length=24, mean_span_length=3.0)
    assert corpus.objective == objective
    for row, text in enumerate([*TEXTS[:30], "word", "a b", "One. Two", "x" * 300, "A. B! C? D."]):
        source, target = corpus.example(row, (text, None), epoch=row % 3)
        assert len(source) <= 60 and len(target) <= 24
        if objective == "span-corruption":
            tokens = corpus.tokens(text)
            # ByT5's later sentinels are bytes that text has; these rows use the first few.
            again = rebuilt(source, target, corpus.conventions.sentinels[:11])
            assert len(again) == min(len(tokens), corpus.window)
            assert any(again == tokens[k : k + len(again)] for k in range(len(tokens) - len(again) + 1))
            continue
        tokens = list(itertools.chain.from_iterable(map(corpus.tokens, split_sentences(text))))
        mask = corpus.conventions.mask
        assert source[-1] == target[-1] == END and len(target) > 1 and mask in source
        shown = Counter(token for token in [*source, *target] if token not in (mask, END))
        window = shown.total()
        assert any(shown == Counter(tokens[k : k + window]) for k in range(len(tokens) - window + 1))
        if len(tokens) <= corpus.window:
            assert window == len(tokens)


def test_a_denoised_text_is_the_target_and_keeps_its_order_under_masks(opened: Open) -> None:
    corpus = opened("mbart", input_length=60, target_length=50, noise_density=0.3, mean_span_length=3.0)
    assert corpus.objective == "denoising" and corpus.describe()["noise_density"] == 0.3
    mask, after = corpus.conventions.span_mask, list(corpus.conventions.after)
    assert mask is not None
    for row, text in enumerate([*TEXTS[:30], "word", "a b", "One. Two", "A. B! C? D."]):
        source, target = corpus.example(row, (text, None), epoch=row % 3)
        assert source[-2:] == target[-2:] == after and len(target) <= 50
        source, target = source[:-2], target[:-2]
        tokens = corpus.tokens(text)
        assert len(target) == min(len(tokens), corpus.window) and not {mask, *after} & {*target}
        assert any(target == tokens[k : k + len(target)] for k in range(len(tokens) - len(target) + 1))
        kept = [token for token in source if token != mask]
        noise, spans = noise_counts(len(target), 0.3, 3.0)
        assert (len(target) - len(kept), source.count(mask)) == (noise, spans) and not Counter(kept) - Counter(target)
        places = iter(target)
        assert all(token in places for token in kept)
    plain = opened("mbart")
    assert (plain.density, plain.mean_span) == (0.35, 3.5)


def test_a_target_ends_and_does_not_begin_with_what_a_decoder_is_given(tmp_path: Path) -> None:
    """Gemma's tokenizer puts a token before every text and none behind it."""
    tokenizer = causal.tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"input": "abc", "target": "defghij"}))
    (tmp_path / "text.txt").write_text("a text of some length that is cut")
    model = tiny.t5gemma(vocab_size=260, bos_token_id=2, eos_token_id=1, pad_token_id=0)
    for name, most in (("pairs.jsonl", 6), ("pairs.jsonl", 20), ("text.txt", 9)):
        data = Data(path=str(tmp_path / name), target_length=most, held_out=0.0, batch_size=1)
        corpus = Corpus(data, tmp_path, model.config)
        batch = next(corpus.training_batches())
        assert corpus.objective == ("denoising" if most == 9 else "pairs") and batch.labels is not None
        (ids,), (labels,) = batch.input_ids.tolist(), batch.labels.tolist()
        assert ids[0] == 2 and ids[-1] != 1
        assert labels[-1] == 1 and 2 not in labels and len(labels) == min(most, 8 if most == 20 else 9)
        given = model.prepare_decoder_input_ids_from_labels(labels=batch.labels)
        assert given.tolist() == [[decoder_start(model.config), *labels[:-1]]] and given[0, 0] == 2


def test_a_long_text_is_cut_at_random_and_the_whole_of_it_is_reached(opened: Open) -> None:
    corpus = opened(input_length=40, target_length=24, mean_span_length=3.0)
    text = "".join(chr(97 + k // 40 % 26) for k in range(1000))
    seen = {corpus.example(0, (text, None), epoch=epoch)[0][0] for epoch in range(300)}
    assert seen == {byte + 3 for byte in text[: 1000 - corpus.window + 1].encode()}


def test_any_sentence_of_a_long_text_is_reached(opened: Open) -> None:
    corpus = opened("pegasus", input_length=40, target_length=40)
    words = [word for word in WORDS if len(word) > 8][:30]
    text = " ".join(f"The {word} is a thing of its own." for word in words)
    seen = {token for epoch in range(150) for side in corpus.example(0, (text, None), epoch=epoch) for token in side}
    assert seen >= set(corpus.tokenizer.convert_tokens_to_ids([f"▁{word}" for word in words]))


def test_grouping_makes_steps_of_like_lengths_in_a_mixed_order() -> None:
    sizes = rng(1).integers(10, 1000, 4000)
    position = 5  # three examples of the first step came from the epoch before
    order = epoch_order(sizes, 8, position, rng(2))
    steps = sizes[order[3 : 3 + 8 * 499]].reshape(-1, 8)
    mixed = sizes[rng(2).permutation(4000)[: 8 * 499]].reshape(-1, 8)

    def padding(parts: np.ndarray) -> float:
        return 1 - parts.sum() / (parts.max(axis=1) * 8).sum()

    assert padding(steps) < 0.03 < 0.3 < padding(mixed)
    means = steps.mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.15


@pytest.mark.parametrize(("world", "accumulation", "size"), [(1, 1, 3), (2, 1, 3), (3, 2, 2)])
def test_every_example_is_seen_once_by_all_ranks(opened: Open, world: int, accumulation: int, size: int) -> None:
    corpus = opened(batch_size=size, gradient_accumulation=accumulation * world, held_out=0.0)
    step = world * accumulation * size
    steps = math.lcm(40, step) // step
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(world):
        for batch in taken(corpus.training_batches(rank, world), steps * accumulation):
            assert len(batch.examples) == size
            seen.update(batch.examples)
    assert seen == Counter({(epoch, row): 1 for epoch in range(steps * step // 40) for row in range(40)})


def test_a_step_has_the_same_examples_however_it_is_shared(opened: Open) -> None:
    def steps(world: int, size: int, accumulation: int) -> list[dict[tuple[int, int], list[int]]]:
        corpus = opened(batch_size=size, gradient_accumulation=accumulation)
        streams = [corpus.training_batches(rank, world) for rank in range(world)]
        made = []
        for _ in range(11):
            step = {}
            for batch in itertools.chain.from_iterable(
                taken(training_batches, training_batches.passes) for training_batches in streams
            ):
                for k, example in enumerate(batch.examples):
                    step[example] = batch.input_ids[k][batch.attention_mask[k] == 1].tolist()
            made.append(step)
        return made

    alone = steps(1, 12, 1)
    assert steps(2, 12, 1) == steps(3, 2, 6) == steps(1, 3, 4) == steps(2, 4, 3) == alone


def test_a_stream_continues_bit_for_bit_from_any_step(opened: Open) -> None:
    data = {"batch_size": 3, "gradient_accumulation": 4, "held_out": 0.1}
    whole = opened(**data).training_batches(rank=1, world=2)
    states, batches = [], list[TrainingBatch]()
    for _ in range(9):  # past the second epoch
        states.append(json.dumps(whole.state_dict()))
        batches += taken(whole, 2)  # the passes of a step
    assert batches[-1].examples[0][0] >= 2
    corpus = opened(**data)
    for k, state in enumerate(states):
        again = corpus.training_batches(rank=1, world=2)
        again.load_state_dict(json.loads(state))
        assert json.dumps(again.state_dict()) == state
        assert all(same(a, b) for a, b in zip(taken(again, 18 - 2 * k), batches[2 * k :], strict=True))


def test_a_checkpoint_of_other_data_is_refused(opened: Open, text_file: Path, tmp_path: Path) -> None:
    state = opened(batch_size=2).training_batches().state_dict()
    fewer = tmp_path / "fewer.txt"
    fewer.write_text("\n".join(text_file.read_text(encoding="utf-8").splitlines()[:-1]), encoding="utf-8")
    for changes, named in (
        ({"batch_size": 3}, "step_examples was 2 and is 3"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"path": fewer}, "rows was 40 and is 39"),
        ({"noise_density": 0.2}, "noise_density was 0.15 and is 0.2"),
    ):
        with pytest.raises(UserError, match="other data settings") as caught:
            opened(**({"batch_size": 2} | changes)).training_batches().load_state_dict(state)
        assert named in str(caught.value)


def test_noise_depends_on_seed_epoch_and_row_alone(opened: Open) -> None:
    corpus = opened()
    first = corpus.example(3, (TEXTS[3], None), epoch=0)
    corpus.example(4, (TEXTS[4], None), epoch=0)
    assert corpus.example(3, (TEXTS[3], None), epoch=0) == first
    assert opened(batch_size=1).example(3, (TEXTS[3], None), epoch=0) == first
    others = [
        corpus.example(3, (TEXTS[3], None), epoch=1),
        corpus.example(5, (TEXTS[3], None), epoch=0),
        opened(seed=1).example(3, (TEXTS[3], None), epoch=0),
        corpus.example(3, (TEXTS[3], None), epoch=0, held_out=True),
    ]
    assert all(other != first for other in others)


def test_orders_differ_between_epochs_and_seeds(opened: Open) -> None:
    def rows(seed: int) -> list[list[int]]:
        batches = taken(opened(seed=seed, batch_size=8).training_batches(), 10)
        return [[row for batch in batches for epoch, row in batch.examples if epoch == k] for k in range(2)]

    assert rows(0) == rows(0)
    assert rows(0)[0] != rows(0)[1]
    assert rows(0)[0] != rows(1)[0]


def test_a_corpus_smaller_than_a_step_repeats_evenly(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("one text\nanother text\n", encoding="utf-8")
    batch = next(opened(path=path, batch_size=7).training_batches())
    assert sorted(batch.examples) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, batch.examples[-1][1])]


def test_held_out_rows_are_never_trained_on(opened: Open) -> None:
    corpus = opened(held_out=0.25, batch_size=4)
    out = {row for batch in corpus.held_out() for _, row in batch.examples}
    seen = {row for batch in taken(corpus.training_batches(), 30) for _, row in batch.examples}
    assert out and out.isdisjoint(seen)
    assert out | seen == set(range(40))
    assert len(out) == 10
    assert opened(seed=5, held_out=0.25).held_out()[0].examples != corpus.held_out()[0].examples


def test_held_out_batches_are_the_same_each_time_and_shared_evenly(opened: Open) -> None:
    corpus = opened(held_out=0.25, batch_size=2)
    alone = corpus.held_out()
    assert all(same(a, b) for a, b in zip(alone, corpus.held_out(), strict=True))
    shared = [corpus.held_out(rank=rank, world=3) for rank in range(3)]
    assert [len(batches) for batches in shared] == [2, 2, 2]
    examples = [example for batches in shared for batch in batches for example in batch.examples]
    assert sorted(examples) == sorted(example for batch in alone for example in batch.examples)
    lonely = opened(held_out=0.05, batch_size=4)  # two rows for three processes
    parts = [lonely.held_out(rank=rank, world=3) for rank in range(3)]
    assert [len(part) for part in parts] == [1, 1, 1]
    assert [len(part[0].examples) for part in parts] == [1, 1, 0]
    labels = parts[2][0].labels
    assert labels is not None and bool((labels == -100).all()) and len(parts[2][0].input_ids)
    assert sum(len(batch.examples) for batch in corpus.held_out(3)) == 3


def test_held_out_data_may_be_a_file_of_their_own(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "held.txt"
    path.write_text("some words to hold out\nand some more of them\n", encoding="utf-8")
    corpus = opened(held_out=0.5, held_out_path=str(path), batch_size=4)
    assert {row for batch in taken(corpus.training_batches(), 10) for _, row in batch.examples} == set(range(40))
    assert sorted(example for batch in corpus.held_out() for example in batch.examples) == [(0, 0), (0, 1)]
    assert corpus.describe()["held_out"] == 2


def test_one_row_is_trained_on_and_none_is_held_out(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("a single line of text\n", encoding="utf-8")
    corpus = opened(path=path, held_out=0.9)
    assert corpus.held_out() == []
    assert len(next(corpus.training_batches()).examples) == 8


def test_a_checkpoint_that_text_cannot_be_made_for_is_refused(
    opened: Open, checkpoints: dict[str, tuple[Path, Any]], tmp_path: Path, text_file: Path
) -> None:
    _, config = checkpoints["t5"]
    with pytest.raises(UserError, match="no tokenizer files, and text needs them"):
        Corpus(Data(path=str(text_file)), tmp_path, config)
    t5_like(extra=0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"nor a mask token; .* data\.first_sentinel, or give target texts"):
        Corpus(Data(path=str(text_file)), tmp_path, config)
    with pytest.raises(UserError, match="past the vocabulary of 50; the tokenizer belongs to another checkpoint"):
        next(opened("t5", changes={"vocab_size": 50}, first_sentinel=40).training_batches())


def test_an_encoder_gets_inputs_alone(opened: Open) -> None:
    corpus = opened("t5", changes={"architectures": ["T5EncoderModel"]}, input_length=30, held_out=0.1)
    batch = next(corpus.training_batches())
    assert corpus.objective == "text" and batch.labels is None
    assert sorted(batch.inputs()) == ["attention_mask", "input_ids"]
    assert batch.input_ids.shape[1] <= 30
    ends = batch.attention_mask.sum(1) - 1
    assert bool((batch.input_ids[torch.arange(8), ends] == END).all())
    assert corpus.held_out()[0].labels is None


def test_no_side_is_longer_than_the_positions(opened: Open) -> None:
    for batch in taken(opened(changes={"max_position_embeddings": 32}).training_batches(), 10):
        assert batch.labels is not None
        assert batch.input_ids.shape[1] <= 32 and batch.labels.shape[1] <= 32
