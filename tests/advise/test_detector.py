"""Events of known curves are found, named and placed."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support import exhaustive

from bf16_to_fp16.advise.detector import Event, events

STORIES = ("calm", "fast", "slow", "divergence", "drift", "nonfinite", "plateau")
SAMPLES = 1200
Curve = list[tuple[int, float]]


def story(kind: str, seed: int, *, tails: bool = True) -> tuple[Curve, np.ndarray, str | None, int]:
    """A power-law curve with correlated noise and one event: curve, loss without noise, truth, sample.

    tails: noise of Student's t with 6 degrees of freedom, of which one in 5000 is past six standard deviations.
    """
    chance = np.random.default_rng([seed, STORIES.index(kind)])
    time = np.arange(SAMPLES)
    start = chance.uniform(2, 10)
    floor = chance.uniform(0.2, 0.6) * start
    clean = floor + (start - floor) * (1 + time / chance.uniform(80, 400)) ** -chance.uniform(0.3, 0.7)
    deviation, memory = chance.uniform(0.005, 0.03), chance.uniform(0, 0.5)
    noise = chance.standard_t(6, SAMPLES) / math.sqrt(1.5) if tails else chance.standard_normal(SAMPLES)
    for k in range(1, SAMPLES):
        noise[k] = memory * noise[k - 1] + math.sqrt(1 - memory**2) * noise[k]
    steps = 10 * (time + 1)
    at = int(chance.integers(300, 800))
    level, since = clean[at], np.arange(SAMPLES - at)
    truth: str | None = None
    if kind == "fast":
        clean[at : at + int(chance.integers(1, 7))] += level * chance.uniform(0.3, 2)
        truth = "Spike"
    elif kind == "slow":
        clean[at:] += level * chance.uniform(0.5, 2) * np.exp(-since / chance.uniform(12, 30))
        truth = "Spike"
    elif kind == "divergence":
        clean[at:] += level * chance.uniform(0.4, 2) * np.minimum(1, (since + 1) / chance.integers(1, 30))
        truth = "Divergence"
    elif kind == "drift":
        clean[at:] += level * chance.uniform(0.3, 1) * since / 400
        truth = "Divergence"
    elif kind == "plateau":
        clean[at:], deviation = level, chance.uniform(0.003, 0.012)
        truth = "Plateau"
    losses = clean * (1 + deviation * noise)
    if kind == "nonfinite":
        losses[at:], truth = math.nan, "Divergence"
    return list(zip(steps.tolist(), losses.tolist(), strict=True)), clean, truth, at


def is_flat(curve: Curve, clean: np.ndarray, event: Event) -> bool:
    """Whether a reported plateau is one: the loss without noise hardly moves there, whatever the story is about."""
    place = {step: k for k, step in enumerate(step for step, _ in curve)}
    part = clean[place[event.start] : (place[event.end] if event.end is not None else SAMPLES)]
    return event.kind == "Plateau" and float(np.abs(part / part.mean() - 1).max()) < 0.02


@pytest.mark.parametrize(
    ("tails", "least"), exhaustive.beyond([(True, 0.9)], [(False, 0.97), (True, 0.9)]), ids=["normal", "long-tailed"]
)
def test_precision_and_recall_on_curves_with_known_events(tails: bool, least: float) -> None:
    seeds = 8
    hits: Counter[str] = Counter()
    false: Counter[str] = Counter()
    for kind in STORIES:
        for seed in range(seeds):
            curve, clean, truth, at = story(kind, seed, tails=tails)
            place = {step: k for k, step in enumerate(step for step, _ in curve)}
            near = 160 if kind in ("drift", "plateau") else 20
            found = events(curve)
            right = [event for event in found if event.kind == truth and abs(place[event.start] - at) <= near]
            hits[kind] += bool(right)
            for event in found:
                if event not in right[:1] and not is_flat(curve, clean, event):
                    false[event.kind] += 1
    total, wrong = sum(hits.values()), sum(false.values())
    assert total / (total + wrong) >= least, false
    assert all(hits[kind] == seeds for kind in STORIES[1:]), hits


def noisy(level: float | np.ndarray, count: int, seed: int = 0, deviation: float = 0.01) -> list[float]:
    return (level * (1 + deviation * np.random.default_rng(seed).standard_normal(count))).tolist()


def run(losses: list[float], **options: Any) -> list[Event]:
    return events(enumerate(losses, 1), **options)


def test_a_spike_on_a_steep_fall_is_seen_and_the_fall_is_none() -> None:
    fall = [3 * math.exp(-i / 80) + 1 for i in range(300)]
    losses = [*fall]
    losses[119:123] = [loss + 2.0 for loss in losses[119:123]]
    (spike,) = run(losses)
    assert spike.kind == "Spike" and spike.start == 120 and spike.end is not None
    for seed in range(30):
        chance = np.random.default_rng(seed)
        time, tau, height = np.arange(400), 10 ** chance.uniform(0.7, 2.7), 10 ** chance.uniform(-0.5, 1)
        shape = np.exp(-time / tau) if seed % 2 else (1 + time / tau) ** -0.5
        losses = (1 + height * shape + 10 ** chance.uniform(-3, -1) * chance.standard_normal(400)).tolist()
        assert not [event for event in run(losses) if event.kind != "Plateau"]


def test_where_a_fall_ends_nothing_rises_and_a_small_spike_on_it_does() -> None:
    for dip in (False, True):
        losses = [max(1.0, 5 - 0.04 * i) for i in range(200)]
        if dip:
            losses[70] = 0.9
        assert not [event for event in run(losses) if event.kind != "Plateau"]
    losses = [3 * math.exp(-i / 80) + 1 for i in range(300)]
    losses[119:123] = [loss + 0.5 for loss in losses[119:123]]
    assert [event.start for event in run(losses) if event.kind == "Spike"] == [120]


def test_a_rise_that_comes_back_is_a_spike() -> None:
    for length in (1, 8, 30):
        losses = noisy(2.0, 200)
        losses[100 : 100 + length] = noisy(4.0, length)
        (spike,) = run(losses)
        assert spike.kind == "Spike" and spike.start == 101 and spike.end in range(101 + length, 105 + length)


def test_a_spike_has_the_height_that_it_reached_and_one_that_stays_becomes_a_divergence() -> None:
    losses = noisy(2.0, 150)
    losses[100:103] = [3.0, 5.0, 4.0]
    (spike,) = run(losses)
    assert (spike.kind, spike.start, spike.end) == ("Spike", 101, 105) and spike.size == pytest.approx(3.0, abs=0.05)
    stays = noisy(2.0, 100) + noisy(3.0, 150, 1)
    for length, kind in ((164, "Spike"), (165, "Divergence"), (250, "Divergence")):
        (event,) = run(stays[:length])
        assert (event.kind, event.start, event.end) == (kind, 101, None)
    assert event.size == pytest.approx(1.0, abs=0.15)


def test_losses_that_are_no_numbers() -> None:
    once = noisy(2.0, 150)
    once[100] = math.nan
    (spike,) = run(once)
    assert spike.kind == "Spike" and (spike.start, spike.size) == (101, math.inf) and spike.end
    (gone,) = run(noisy(2.0, 100) + [math.nan] * 12)
    assert gone.kind == "Divergence" and (gone.start, gone.end, gone.size) == (101, None, math.inf)
    # From the first step on, and at a place where nothing is known yet.
    (never,) = run([math.nan] * 20)
    assert never.kind == "Divergence" and never.start == 1
    (early,) = run([2.0, 2.1, math.inf, *noisy(2.0, 60)])
    assert early.kind == "Spike" and early.start == 3 and early.end


def test_losses_from_the_step_on_to_which_a_run_went_back_are_judged_without_those_that_they_replace() -> None:
    calm, low = noisy(2.0, 161), noisy(1.0, 60)
    assert events([*enumerate(calm[:100], 1), (101, 9.0), *enumerate(calm[90:], 91), (152, 2.0)]) == []
    again = [*enumerate(calm[:100], 1), *enumerate(low, 101), *enumerate(calm[100:], 101)]
    assert events(again) == []
    found = events([*again, (162, 2.5)])
    assert [(event.kind, event.start, event.end) for event in found] == [("Spike", 162, None)]


def test_a_slow_rise_is_a_divergence_from_its_lowest_point() -> None:
    rise = np.concatenate([np.linspace(3, 2, 300), np.linspace(2, 2.6, 600)])
    (drift,) = run(noisy(rise, 900))
    assert drift.kind == "Divergence" and drift.end is None
    assert 280 <= drift.start <= 350
    assert drift.size == pytest.approx(0.6, abs=0.05)
    back = np.concatenate([rise, np.linspace(2.6, 1.9, 400)])
    (over,) = run(noisy(back, 1300))
    assert over.end is not None and 1000 < over.end < 1200


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.01])
def test_a_standstill_is_a_plateau_and_slow_progress_is_not(noise: float) -> None:
    (plateau,) = run(noisy(2.0, 600, deviation=noise))
    assert plateau.kind == "Plateau"
    assert (plateau.start, plateau.end) == (1, None)
    assert abs(plateau.size) < 0.01
    assert run(noisy(np.linspace(2.0, 1.9, 600), 600, deviation=noise)) == []  # 2% in 256 losses
    assert run(noisy(np.linspace(2.0, 1.97, 600), 600, deviation=noise / 10)) == []  # less, but past all doubt


def test_a_noisier_standstill_takes_longer_to_believe_and_ends_where_the_loss_moves_on() -> None:
    still = noisy(2.0, 2400, deviation=0.03)
    assert run(still[:511]) == [] and [event.kind for event in run(still)] == ["Plateau"]
    losses = noisy(np.concatenate([np.full(500, 2.0), np.linspace(2.0, 1.5, 300)]), 800, deviation=0.003)
    (plateau,) = run(losses)
    assert plateau.kind == "Plateau"
    assert plateau.end is not None and 480 <= plateau.end <= 560


def test_constant_and_tiny_losses_are_no_trouble() -> None:
    assert [event.kind for event in run([0.0] * 600)] == ["Plateau"]
    assert [event.kind for event in run([1e-5] * 100 + [1e-4] + [1e-5] * 50)] == ["Spike"]
    assert run([3.0] * 10) == []
    assert run([]) == []
