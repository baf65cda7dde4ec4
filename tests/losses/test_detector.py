"""Events of known curves are found, named, placed and drawn."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support import exhaustive

from bf16_to_fp16.losses.detector import Detector, events
from bf16_to_fp16.losses.events import EVENT_KINDS, Curve, Divergence, Event, Plateau, ResumeBump, ScaleCollapse, Spike
from bf16_to_fp16.losses.report import write_picture

STORIES = ("calm", "fast", "slow", "divergence", "drift", "nonfinite", "plateau", "bump", "collapse")
SAMPLES = 1200
Truth = tuple[type[Event], str | None]


def story(kind: str, seed: int, *, tails: bool = True) -> tuple[Curve, np.ndarray, Truth | None, int]:
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
    scale = 2.0 ** (16 - np.cumsum(chance.random(SAMPLES) < 0.003) + time // 200)
    at = int(chance.integers(300, 800))
    level, since = clean[at], np.arange(SAMPLES - at)
    truth: Truth | None = None
    if kind == "fast":
        clean[at : at + int(chance.integers(1, 7))] += level * chance.uniform(0.3, 2)
        truth = (Spike, "fast")
    elif kind == "slow":
        clean[at:] += level * chance.uniform(0.5, 2) * np.exp(-since / chance.uniform(12, 30))
        truth = (Spike, "slow")
    elif kind == "divergence":
        clean[at:] += level * chance.uniform(0.4, 2) * np.minimum(1, (since + 1) / chance.integers(1, 30))
        truth = (Divergence, None)
    elif kind == "drift":
        clean[at:] += level * chance.uniform(0.3, 1) * since / 400
        truth = (Divergence, None)
    elif kind == "plateau":
        clean[at:], deviation = level, chance.uniform(0.003, 0.012)
        truth = (Plateau, None)
    elif kind == "bump":
        clean[at:] += level * chance.uniform(0.15, 0.6) * np.exp(-since / chance.uniform(10, 40))
        steps[at:] -= 10 * int(chance.integers(2, 20))
        truth = (ResumeBump, None)
    losses = clean * (1 + deviation * noise)
    if kind == "nonfinite":
        losses[at:], truth = math.nan, (Divergence, None)
    elif kind == "collapse":
        scale[at:] = scale[at] * 0.5 ** (since + 1)
        scale[scale < 1e-30], truth = 0.0, (ScaleCollapse, None)
    return Curve(tuple(steps.tolist()), tuple(losses.tolist()), tuple(scale.tolist())), clean, truth, at


def is_flat(curve: Curve, clean: np.ndarray, event: Event) -> bool:
    """Whether a reported plateau is one: the loss without noise hardly moves there, whatever the story is about."""
    place = {step: k for k, step in enumerate(curve.steps)}
    part = clean[place[event.start] : (place[event.end] if event.end is not None else SAMPLES)]
    return isinstance(event, Plateau) and float(np.abs(part / part.mean() - 1).max()) < 0.02


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
            place = {step: k for k, step in enumerate(curve.steps)}
            near = 160 if kind in ("drift", "plateau") else 20
            found = events(curve)
            right = [
                event
                for event in found
                if truth is not None
                and type(event) is truth[0]
                and (truth[1] is None or getattr(event, "recovery", None) == truth[1])
                and abs(place[event.start] - at) <= near
            ]
            hits[kind] += bool(right)
            for event in found:
                if event not in right[:1] and not is_flat(curve, clean, event):
                    false[event.kind] += 1
    total, wrong = sum(hits.values()), sum(false.values())
    precision, recall = total / (total + wrong), total / (seeds * (len(STORIES) - 1))
    print(f"\nprecision {precision:.3f}, recall {recall:.3f} over {seeds * len(STORIES)} curves; false: {dict(false)}")
    for kind in STORIES[1:]:
        print(f"  {kind:<12} recall {hits[kind] / seeds:.2f}")
    assert precision >= least
    assert all(hits[kind] == seeds for kind in STORIES[1:])


def noisy(level: float | np.ndarray, count: int, seed: int = 0, deviation: float = 0.01) -> list[float]:
    return (level * (1 + deviation * np.random.default_rng(seed).standard_normal(count))).tolist()


def run(losses: list[float], scales: list[float] | None = None, **options: Any) -> list[Event]:
    count = len(losses)
    return events(Curve(tuple(range(1, count + 1)), tuple(losses), tuple(scales or [None] * count)), **options)


def test_a_spike_on_a_steep_fall_is_seen_and_the_fall_is_none() -> None:
    fall = [3 * math.exp(-i / 80) + 1 for i in range(300)]
    losses = [*fall]
    losses[119:123] = [loss + 2.0 for loss in losses[119:123]]
    (spike,) = run(losses)
    assert isinstance(spike, Spike) and (spike.start, spike.recovery) == (120, "fast")
    for seed in range(30):
        chance = np.random.default_rng(seed)
        time, tau, height = np.arange(400), 10 ** chance.uniform(0.7, 2.7), 10 ** chance.uniform(-0.5, 1)
        shape = np.exp(-time / tau) if seed % 2 else (1 + time / tau) ** -0.5
        losses = (1 + height * shape + 10 ** chance.uniform(-3, -1) * chance.standard_normal(400)).tolist()
        assert not [event for event in run(losses) if not isinstance(event, Plateau)]


def test_where_a_fall_ends_nothing_rises_and_a_small_spike_on_it_does() -> None:
    for dip in (False, True):
        losses = [max(1.0, 5 - 0.04 * i) for i in range(200)]
        if dip:
            losses[70] = 0.9
        assert not [event for event in run(losses) if not isinstance(event, Plateau)]
    losses = [3 * math.exp(-i / 80) + 1 for i in range(300)]
    losses[119:123] = [loss + 0.5 for loss in losses[119:123]]
    assert [event.start for event in run(losses) if isinstance(event, Spike)] == [120]


def test_fast_ends_at_an_eighth_of_the_window() -> None:
    for length, recovery in ((1, "fast"), (8, "fast"), (9, "slow"), (30, "slow")):
        losses = noisy(2.0, 200)
        losses[100 : 100 + length] = noisy(4.0, length)
        (spike,) = run(losses)
        assert isinstance(spike, Spike) and spike.recovery == recovery, length


def test_an_event_is_told_when_it_starts_and_when_it_ends_with_its_height_and_score() -> None:
    detector = Detector()
    losses = noisy(2.0, 150)
    losses[100:103] = [3.0, 5.0, 4.0]
    told = {step: detector.update(step, loss) for step, loss in enumerate(losses, 1)}
    assert [step for step, found in told.items() if found] == [101, 105]
    (first,), (last,) = told[101], told[105]
    assert isinstance(first, Spike) and (first.end, first.recovery) == (None, "open")
    assert first.size == pytest.approx(1.0, abs=0.05)
    assert isinstance(last, Spike) and (last.start, last.end, last.recovery) == (101, 105, "fast")
    assert last.size == pytest.approx(3.0, abs=0.05) and last.z == pytest.approx(3.0 / 0.02, rel=0.35)
    assert detector.events == (last,)


def test_a_spike_that_stays_becomes_a_divergence() -> None:
    detector = Detector()
    for step, loss in enumerate(noisy(2.0, 100), 1):
        assert detector.update(step, loss) == ()
    told = [(step, event) for step, loss in enumerate(noisy(3.0, 150, 1), 101) for event in detector.update(step, loss)]
    assert [type(event) for _, event in told] == [Spike, Divergence]
    assert told[1][0] - told[0][0] == 64
    assert (told[1][1].start, told[1][1].end) == (101, None)
    assert told[1][1].size == pytest.approx(1.0, abs=0.15)


def test_losses_that_are_no_numbers() -> None:
    once = noisy(2.0, 150)
    once[100] = math.nan
    (spike,) = run(once)
    assert isinstance(spike, Spike) and (spike.start, spike.size, spike.recovery) == (101, math.inf, "fast")
    (gone,) = run(noisy(2.0, 100) + [math.nan] * 12)
    assert isinstance(gone, Divergence) and (gone.start, gone.end, gone.size) == (101, None, math.inf)
    # From the first step on, and at a place where nothing is known yet.
    (never,) = run([math.nan] * 20)
    assert isinstance(never, Divergence) and never.start == 1
    (early,) = run([2.0, 2.1, math.inf, *noisy(2.0, 60)])
    assert isinstance(early, Spike) and (early.start, early.recovery) == (3, "fast")
    assert early.to_json()["size"] is None
    json.dumps(early.to_json(), allow_nan=False)


def test_the_same_rise_is_a_bump_after_a_resume_and_a_spike_elsewhere() -> None:
    rise = 2.0 + 0.5 * np.exp(-np.arange(100) / 10)
    losses = noisy(2.0, 100) + (rise * (1 + 0.01 * np.random.default_rng(1).standard_normal(100))).tolist()

    def found(steps: list[int]) -> list[Event]:
        return events(Curve(tuple(steps), tuple(losses), (None,) * 200))

    (spike,) = found(list(range(1, 201)))
    assert isinstance(spike, Spike)
    (back,) = found([*range(1, 101), *range(81, 181)])
    assert isinstance(back, ResumeBump) and back.start == 81
    (hole,) = found([*range(1, 101), *range(401, 501)])
    assert isinstance(hole, ResumeBump) and hole.start == 401
    detector = Detector()
    for step, loss in enumerate(losses, 1):
        if step == 101:
            detector.resumed(step)
        detector.update(step, loss)
    assert [type(event) for event in detector.events] == [ResumeBump]


@pytest.mark.parametrize(("lines", "kind"), [(1, Spike), (3, Spike), (4, ResumeBump)])
def test_a_hole_is_more_than_three_lines_of_the_log(lines: int, kind: type[Event]) -> None:
    losses = noisy(2.0, 150)
    losses[100:103] = [3.0, 5.0, 4.0]
    steps = [10 * k + (10 * (lines - 1) if k >= 100 else 0) for k in range(150)]
    (event,) = events(Curve(tuple(steps), tuple(losses), (None,) * 150))
    assert type(event) is kind and event.start == steps[100]


def test_a_bump_lower_than_a_spike_is_seen_after_a_resume() -> None:
    losses = [*noisy(2.0, 100), *noisy(2.09, 60, 1), *noisy(2.0, 60, 2)]
    assert run(losses) == []
    (bump,) = events(Curve((*range(1, 101), *range(91, 211)), tuple(losses), (None,) * 220))
    assert isinstance(bump, ResumeBump) and bump.start == 91
    assert bump.end is not None and 140 < bump.end < 165
    calm = [*noisy(2.0, 100), *noisy(2.0, 120, 1)]
    assert events(Curve((*range(1, 101), *range(91, 211)), tuple(calm), (None,) * 220)) == []


def test_what_came_after_the_checkpoint_no_longer_counts() -> None:
    """A run that went wrong and was rewound is judged by the losses before the checkpoint."""
    detector = Detector()
    for step, loss in enumerate(noisy(2.0, 100), 1):
        detector.update(step, loss)
    assert isinstance(detector.update(101, 9.0)[0], Spike)
    detector.resumed(90)
    assert [event.end for event in detector.events] == [101]
    for step, loss in enumerate(noisy(2.0, 60, 3), 91):
        assert detector.update(step, loss) == ()
    assert isinstance(detector.update(151, 2.5)[0], Spike)


def test_calm_losses_after_the_checkpoint_do_not_count_either() -> None:
    detectors = [Detector(), Detector()]
    losses = noisy(np.concatenate([np.full(100, 2.0), np.full(60, 1.0), np.full(60, 2.0)]), 220)
    for step, loss in enumerate(losses, 1):
        assert detectors[0].update(step if step <= 160 else step - 60, loss) == ()
        if step <= 160:
            detectors[1].update(step, loss)
    assert isinstance(detectors[1].update(101, 2.5)[0], ResumeBump)


def test_a_slow_rise_is_a_divergence_from_its_lowest_point() -> None:
    rise = np.concatenate([np.linspace(3, 2, 300), np.linspace(2, 2.6, 600)])
    (drift,) = run(noisy(rise, 900))
    assert isinstance(drift, Divergence) and drift.end is None
    assert 280 <= drift.start <= 350
    assert drift.size == pytest.approx(0.6, abs=0.05)
    back = np.concatenate([rise, np.linspace(2.6, 1.9, 400)])
    (over,) = run(noisy(back, 1300))
    assert over.end is not None and 1000 < over.end < 1200


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.01])
def test_a_standstill_is_a_plateau_and_slow_progress_is_not(noise: float) -> None:
    (plateau,) = run(noisy(2.0, 600, deviation=noise))
    assert isinstance(plateau, Plateau)
    assert (plateau.start, plateau.end) == (1, None)
    assert abs(plateau.size) < 0.01
    assert run(noisy(np.linspace(2.0, 1.9, 600), 600, deviation=noise)) == []  # 2% in 256 losses
    assert run(noisy(np.linspace(2.0, 1.97, 600), 600, deviation=noise / 10)) == []  # less, but past all doubt


def test_a_noisier_standstill_takes_longer_to_believe() -> None:
    detector = Detector()
    told = [step for step, loss in enumerate(noisy(2.0, 2400, deviation=0.03), 1) if detector.update(step, loss)]
    assert len(told) == 1 and told[0] >= 512
    assert isinstance(detector.events[0], Plateau)


def test_a_plateau_ends_where_the_loss_moves_on() -> None:
    losses = noisy(np.concatenate([np.full(500, 2.0), np.linspace(2.0, 1.5, 300)]), 800, deviation=0.003)
    (plateau,) = run(losses)
    assert isinstance(plateau, Plateau)
    assert plateau.end is not None and 480 <= plateau.end <= 560


def test_a_collapsing_scale_is_found_before_it_is_zero() -> None:
    scales = [65536.0] * 80 + [65536.0 * 0.5**k for k in range(1, 40)]
    detector = Detector()
    told = []
    for step, scale in enumerate(scales, 1):
        told += [(step, event) for event in detector.update(step, 2.0 + step % 7 / 100, scale)]
    ((step, event),) = [(step, event) for step, event in told if isinstance(event, ScaleCollapse)]
    assert step == 90  # ten halvings
    assert (event.start, event.size) == (80, 10.0)
    (last,) = [event for event in detector.events if isinstance(event, ScaleCollapse)]
    assert (last.end, last.size) == (None, 39.0)


@pytest.mark.parametrize(
    ("scales", "collapses"),
    [
        ([65536.0] * 100 + [32768.0] * 100 + [65536.0] * 100, 0),
        ([2.0 ** max(16, 32 - k) for k in range(300)], 0),  # settling from 2^32, as in DeepSpeed
        ([2.0 ** (16 - k // 60) for k in range(300)], 0),
        ([1024.0] * 100 + [0.0] * 50, 1),
        ([2.0 ** (3 - k) for k in range(60)], 1),  # under 1 before it could settle
        ([0.5] * 300, 0),  # a fixed scale
        ([65536.0] * 100 + [2.0 ** (16 - k) for k in range(14)] + [65536.0] * 100, 1),
    ],
)
def test_only_a_collapse_is_a_collapse(scales: list[float], collapses: int) -> None:
    found = [event for event in run(noisy(2.0, len(scales)), scales) if isinstance(event, ScaleCollapse)]
    assert len(found) == collapses
    if len(scales) == 214:
        assert (found[0].start, found[0].end, found[0].size) == (101, 115, 13.0)


def test_constant_and_tiny_losses_are_no_trouble() -> None:
    assert [type(event) for event in run([0.0] * 600)] == [Plateau]
    assert [type(event) for event in run([1e-5] * 100 + [1e-4] + [1e-5] * 50)] == [Spike]
    assert run([3.0] * 10) == []
    assert run([]) == []


def test_the_threshold_is_the_callers() -> None:
    losses = noisy(2.0, 150)
    losses[100] = 2.2  # ten deviations of 0.02
    assert [type(event) for event in run(losses)] == [Spike]
    assert run(losses, z=20.0) == []
    assert [type(event) for event in run(losses[80:], window=16)] == [Spike]
    with pytest.raises(ValueError, match="at least 16"):
        Detector(window=8)


@pytest.mark.parametrize("kind", STORIES)
def test_a_detector_continues_from_its_state(kind: str) -> None:
    curve, _, _, at = story(kind, 3)
    rows = list(zip(curve.steps, curve.losses, curve.scales, strict=True))
    whole = Detector()
    told = [whole.update(*row) for row in rows]
    for cut in (10, 300, at + 1, at + 5, at + 40, 1100):
        first, second = Detector(), Detector(z=3.0, window=32)
        for row in rows[:cut]:
            first.update(*row)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [second.update(*row) for row in rows[cut:]] == told[cut:]
        assert second.events == whole.events


def test_every_kind_says_what_causes_it() -> None:
    assert set(EVENT_KINDS) == {"Spike", "Divergence", "Plateau", "ResumeBump", "ScaleCollapse"}
    assert all(len(kind.cause) > 60 for kind in EVENT_KINDS.values())
    described = Spike(3, 7, 1.5, "fast", 8.0).to_json()
    wanted = {"kind": "Spike", "start": 3, "end": 7, "size": 1.5, "recovery": "fast", "z": 8.0, "cause": Spike.cause}
    assert described == wanted


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_shows_curve_scale_and_events(tmp_path: Path) -> None:
    def drawn_as_svg(curve: Curve, found: Sequence[Event], title: str = "") -> str:
        write_picture(tmp_path / "curve.svg", curve, found, title)
        return (tmp_path / "curve.svg").read_text(encoding="utf-8")

    curve, _, _, _ = story("collapse", 0)
    found = [*events(curve), Spike(400, 500, 1.0, "fast"), Spike(900, 950, 1.0, "fast"), Plateau(2000, None, 0.0)]
    drawn = drawn_as_svg(curve, found, title="a run")
    assert drawn == drawn_as_svg(curve, found, title="a run")  # nothing in it depends on the hour
    assert ElementTree.fromstring(drawn).tag.endswith("svg") and drawn.count("prefers-color-scheme: dark") == 1
    texts = [text.text for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a run", "loss", "loss scale", "step", "spike", "plateau", "scale collapse"} <= set(texts)
    assert texts.count("spike") == 1
    alone = drawn_as_svg(Curve(curve.steps, (math.nan, *curve.losses[1:]), (None,) * SAMPLES), [])
    assert "loss scale" not in alone and "spike" not in alone
    assert "no number" in alone and "no number" not in texts
