"""Span corruption and gap sentences: every token is kept, and the lengths and places are those of T5 and Pegasus."""

import itertools
import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import END, rebuilt, rng

from bf16_to_fp16.finetuning.objectives import (
    GAP_RATIO,
    gap_sentences,
    noise_counts,
    noise_spans,
    span_corruption,
    split_sentences,
    window_length,
)

DENSITIES = st.floats(0.01, 0.9)
SPANS = st.floats(1.0, 30.0)
SEEDS = st.integers(0, 2**32 - 1)


@given(length=st.integers(1, 700), density=DENSITIES, mean_span=SPANS, seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_every_token_is_kept_or_in_the_target_and_the_spans_rebuild_the_text(
    length: int, density: float, mean_span: float, seed: int
) -> None:
    tokens = list(range(2, 2 + length))
    sentinels = list(range(5000, 4000, -1))
    spans = noise_spans(length, density, mean_span, rng(seed))
    source, target = span_corruption(tokens, spans, sentinels, END)
    kept = [token for token in source if token in set(tokens)]
    taken = [token for token in target if token in set(tokens)]
    assert sorted(kept + taken) == tokens
    assert rebuilt(source, target, sentinels) == tokens
    noise, count = noise_counts(length, density, mean_span)
    assert (len(taken), len(spans)) == (noise, count)
    assert (len(source), len(target)) == (length - noise + count + 1, noise + count + 1)
    if length > 1:
        assert kept[0] == tokens[0], "a text begins with kept tokens, as in T5"
        assert all(a < b for (_, a), (b, _) in itertools.pairwise(spans)), "kept tokens separate spans"


@given(length=st.integers(2, 5000), density=DENSITIES, mean_span=SPANS)
def test_density_and_mean_length_are_the_nearest_there_are(length: int, density: float, mean_span: float) -> None:
    noise, spans = noise_counts(length, density, mean_span)
    assert 1 <= noise < length
    assert 1 <= spans <= min(noise, length - noise)
    assert abs(noise - length * density) <= 0.5 or noise in (1, length - 1)
    assert abs(spans - noise / mean_span) <= 0.5 or spans in (1, length - noise)


def test_the_lengths_are_those_of_t5() -> None:
    # 512 ids of input are made from 568 of text and leave 114 of target: t5.data's random_spans_helper.
    assert window_length(512, 114, 0.15, 3.0, 100) == 568
    assert noise_counts(568, 0.15, 3.0) == (85, 28)
    assert 568 - 85 + 28 + 1 == 512
    assert 85 + 28 + 1 == 114


@given(
    input_length=st.integers(4, 600),
    target_length=st.integers(4, 200),
    density=DENSITIES,
    mean_span=SPANS,
    sentinels=st.integers(1, 100),
)
@settings(max_examples=100, deadline=None)
def test_the_window_is_the_longest_that_fits(
    input_length: int, target_length: int, density: float, mean_span: float, sentinels: int
) -> None:
    def fits(length: int) -> bool:
        noise, spans = noise_counts(length, density, mean_span)
        lengths = (length - noise + spans + 1, noise + spans + 1, spans)
        return all(a <= b for a, b in zip(lengths, (input_length, target_length, sentinels), strict=True))

    window = window_length(input_length, target_length, density, mean_span, sentinels)
    assert all(fits(length) for length in range(1, window + 1))
    assert not fits(window + 1)


def test_all_ways_to_place_the_spans_are_equally_likely() -> None:
    # 7 tokens, 3 of noise in 2 spans: 2 ways to cut the noise times 3 to cut the rest.
    assert noise_counts(7, 0.43, 1.5) == (3, 2)
    draws = 6000
    seen = Counter(tuple(noise_spans(7, 0.43, 1.5, rng(k))) for k in range(draws))
    assert len(seen) == 6
    spread = math.sqrt(draws / 6 * (5 / 6))
    assert all(abs(count - draws / 6) < 5 * spread for count in seen.values())


@given(st.text(alphabet="aA.!?。 \n\"')ß", max_size=60))
def test_sentences_joined_are_the_text(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert all(sentences)


def test_sentences_end_where_people_would_end_them() -> None:
    text = 'It rained. "Why?" She left (at 3.5 p.m. or so!) Then 今日は。明日も。\n\nEnd'
    assert split_sentences(text) == [
        "It rained. ",
        '"Why?" ',
        "She left (at 3.5 p.m. or so!) ",
        "Then 今日は。",
        "明日も。\n\n",
        "End",
    ]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    room=st.integers(0, 100),
    seed=SEEDS,
)
@settings(max_examples=150, deadline=None)
def test_masked_sentences_are_the_target_and_rebuild_the_text(sizes: list[int], room: int, seed: int) -> None:
    mask, tokens = 7, itertools.count(10)
    sentences = [[next(tokens) for _ in range(size)] for size in sizes]
    limit = max(sizes) + 1 + room
    source, target = gap_sentences(sentences, mask=mask, end=END, most=limit, rng=rng(seed))
    if len(sizes) == 1 and sizes[0] > 1:
        half = sizes[0] // 2
        sentences = [sentences[0][:half], sentences[0][half:]]
    wanted = max(1, min(round(len(sentences) * GAP_RATIO), len(sentences) - 1))
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
    drawn = [gap_sentences(sentences, mask=7, end=END, most=9, rng=rng(k))[1] for k in range(400)]
    assert all(80 < sum(ids[0] in target for target in drawn) < 120 for ids in sentences)
