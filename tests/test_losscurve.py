"""Events of known curves are found, named and placed; logs of every kind are read; bad ones get one line."""

import base64
import csv
import json
import math
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.losscurve import (
    KINDS,
    Curve,
    Detector,
    Divergence,
    Event,
    Plateau,
    ResumeBump,
    ScaleCollapse,
    Spike,
    events,
    picture,
    read_log,
)

WANDB_FILE = zlib.decompress(
    base64.b85decode(
        "c-qaDPe>F|9LM+VKiB7~>uWXH3S>1a7kB5+d$Y3z1s(&XOC<$uyR)P2y3X4E(X|k4kqC(nl@#KwOQ>O1<jtUq9l~>T6Av9*0uO~yZ&YwcnRX08"
        "k8kFEf4}ed_jxnC^VeHDR+mf<7AxmEO~3&@IU#fmWMw9o%i|ev0fu0J@$;;o@v)>wl%f(5*%&JksYeoIp6wCDC>Eo!7|Tnt#KmHqgzStz$WVdz"
        "`|5pK(_8>GUS}|rAWT26DDh06rpW}jwX;A#_JBceEv$z2@Nh(lMGL@uZ?pp_3G>jv1aLYw*2llvU1O_L^I!_Jc&tsJ4|wgopJn~QHv5*<gfkge"
        "a{2bWD1-(4Ji6i~)Q3gW_J$#C=Wx?!AJtktXJ9?rwuCCuIVBq(kP84Xum(E9CF^2f+&xbfHqQ)zji}^Z6>Y%rA`yZi5mq5vIFpqJH%qt>%%&r8"
        "C6G*IGV}>gg>_p`dXuSWB)PrS%rel8pt>uZks?W2)Fu$Z3($$IN-9g&7H{55i<?vZ1z^plb24l}FsvHLWFrH#Mm^0MA{^#|SQHq7c~SN;q0V24"
        "l?CeBj^@A-uw!s=$aHbzL{a5aVVKXK#g`x7P=&)Y3-oev|B<U%o6B9AD}-6B6AKH36$w`wi-kxFz{2_oDV}Y3Pi<GCc~Exq(aD9(4si17mj#s("
        "G|XuI+jLT8RHZW7x8u`V#|>J?0xNPlo(Y4=t|P|n`50Ke;quJni{z5Z$f+{ghwhLgQbuO?a^behsM;{2>C3-Qy`_p8&uh(r<o6uNu1J?&c6`v;"
        "3Bz-&UUrN*o`~tkYfnE=<F#l393@|6he$bDx+^43<>WHVDe==brgEy=#R>0e!T1Hed5{C22WE)w85QYBLSk=+^h4!@{=w-me3cy{<z)3e>V_(("
        "V}?1MYs0f6RN?mIU>&NIha$<HnuPYTE7Y<aL)Psd3RfnHNEksU3H?W40prpn<kG8m&qitgdNg8Caj-V&)NK6n)Wab4(4f7kwR-F>Q2wrVWwL!u"
        "o%wOYGrxJQ7-*)7#?2e5nBeo$-QaK}dnc|j@C2Ct0v|Hxhy"
    )
)
"""An offline run as wandb 0.31 wrote it: five losses, the fourth NaN, then an evaluation and a nested value."""


# ---- generated curves ------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("tails", "least"), [(False, 0.97), (True, 0.9)], ids=["normal", "long-tailed"])
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


def test_a_spike_has_its_steps_height_and_score() -> None:
    losses = noisy(2.0, 150)
    losses[100:103] = [3.0, 5.0, 4.0]
    (spike,) = run(losses)
    assert isinstance(spike, Spike)
    assert (spike.start, spike.recovery) == (101, "fast")
    assert spike.end is not None and 103 < spike.end <= 106
    assert spike.size == pytest.approx(3.0, abs=0.05)
    assert spike.z == pytest.approx(3.0 / 0.02, rel=0.35)


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


def test_an_event_is_told_when_it_starts_and_when_it_ends() -> None:
    detector = Detector()
    losses = noisy(2.0, 150)
    losses[100:103] = [3.0, 5.0, 4.0]
    told = {step: detector.update(step, loss) for step, loss in enumerate(losses, 1)}
    assert [step for step, found in told.items() if found] == [101, 105]
    (first,), (last,) = told[101], told[105]
    assert isinstance(first, Spike) and (first.end, first.recovery) == (None, "open")
    assert first.size == pytest.approx(1.0, abs=0.05)
    assert isinstance(last, Spike) and (last.start, last.end, last.recovery) == (101, 105, "fast")
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
    assert (plateau.start, plateau.end) == (1, None) or noise
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
    assert set(KINDS) == {"Spike", "Divergence", "Plateau", "ResumeBump", "ScaleCollapse"}
    assert all(len(kind.cause) > 60 for kind in KINDS.values())
    described = Spike(3, 7, 1.5, "fast", 8.0).to_json()
    wanted = {"kind": "Spike", "start": 3, "end": 7, "size": 1.5, "recovery": "fast", "z": 8.0, "cause": Spike.cause}
    assert described == wanted


# ---- logs ------------------------------------------------------------------------------------------------------------

ROWS = [{"step": 10 * k, "loss": 3.0 / k, "loss_scale": 1024.0} for k in range(1, 6)]
CURVE = Curve((10, 20, 30, 40, 50), tuple(3.0 / k for k in range(1, 6)), (1024.0,) * 5)


def test_a_trainers_state_is_read(tmp_path: Path) -> None:
    history: list[dict[str, Any]] = [{"loss": row["loss"], "step": row["step"], "learning_rate": 1e-4} for row in ROWS]
    history.insert(3, {"eval_loss": 9.0, "step": 30})
    history.append({"train_loss": 1.0, "train_runtime": 5.0, "step": 50})
    folder = tmp_path / "run" / "checkpoint-50"
    folder.mkdir(parents=True)
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 50, "log_history": history}), encoding="utf-8")
    wanted = Curve(CURVE.steps, CURVE.losses, (None,) * 5)
    assert read_log(path) == read_log(folder) == read_log(tmp_path / "run") == wanted


def test_rows_of_csv_and_json_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "log.jsonl"
    lines.write_text("\n".join(map(json.dumps, ROWS)) + '\n{"step": 60, "lo', encoding="utf-8")  # killed in a write
    assert read_log(lines) == CURVE
    array = tmp_path / "log.json"
    array.write_text(json.dumps(ROWS), encoding="utf-8")
    assert read_log(array) == CURVE
    array.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    assert read_log(array) == CURVE
    table = tmp_path / "log.csv"
    with table.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["step", "note", "loss", "loss_scale"])
        writer.writeheader()
        writer.writerows({"note": "a, b", **row} for row in ROWS)
        writer.writerow({"step": 55, "loss": ""})
    assert read_log(table) == CURVE


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("loss\n1.5\nnan\ninf\n", Curve((0, 1, 2), (1.5, math.nan, math.inf), (None,) * 3)),
        ("train/loss,_step\n1.5,7\n", Curve((7,), (1.5,), (None,))),
        ("train_loss,global_step\n1.5,7.0\n", Curve((7,), (1.5,), (None,))),
        ("step,loss,scale\n1,,64\n2,1.5,\n3,1.5,32\n", Curve((2, 3), (1.5, 1.5), (64.0, 32.0))),
    ],
)
def test_usual_names_and_numbers_are_known(tmp_path: Path, text: str, wanted: Curve) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text, encoding="utf-8")
    assert repr(read_log(path)) == repr(wanted)  # NaN is not equal to itself


def test_a_step_that_a_finetune_skipped_and_infinity_are_no_numbers_in_its_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": None, "skipped_examples": [[3, 4]]},
        {"step": 2, "loss": None, "evaluation": {"step": 2}},
        {"step": 3, "loss": 1.7976931348623157e308},
        {"step": 4, "loss": -1.7976931348623157e308},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert repr(read_log(path)) == repr(Curve((1, 2, 3, 4), (2.0, math.nan, math.inf, -math.inf), (None,) * 4))


def test_an_offline_run_of_wandb_is_read_without_wandb(tmp_path: Path) -> None:
    path = tmp_path / "run-abc.wandb"
    path.write_bytes(WANDB_FILE)
    wanted = Curve((10, 20, 30, 40, 50), (3.0, 1.5, 1.0, math.nan, 0.6), (65536.0,) * 5)
    assert repr(read_log(path)) == repr(read_log(tmp_path)) == repr(wanted)
    path.write_bytes(WANDB_FILE[:-300])  # killed while it wrote
    assert read_log(path).steps == (10, 20, 30, 40, 50)
    path.write_bytes(WANDB_FILE[:1200])
    assert read_log(path).steps == (10, 20)
    damaged = bytearray(WANDB_FILE)
    damaged[900] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.raises(UserError, match="damaged at byte"):
        read_log(path)


def field(number: int, value: bytes) -> bytes:
    assert len(value) < 2**21
    size = len(value)
    length = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
    return (
        bytes([number << 3 & 127 | 2 | (128 if number > 15 else 0)])
        + (b"\x01" if number > 15 else b"")
        + length
        + value
    )


def log_of(records: list[bytes]) -> bytes:
    """The records as leveldb's writer lays them out in blocks, with wandb's head."""
    content = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        first = True
        while True:
            room = 32768 - len(content) % 32768
            if room < 7:
                content += bytes(room)
                continue
            part, record = record[: room - 7], record[room - 7 :]
            kind = (1 if first else 4) if not record else (2 if first else 3)
            checksum = zlib.crc32(bytes([kind]) + part)
            content += struct.pack("<IHB", checksum, len(part), kind) + part
            first = False
            if not record:
                break
    return bytes(content)


def test_records_of_older_wandb_that_cross_blocks_are_read(tmp_path: Path) -> None:
    """Values as JSON (field 16), nested names, and rows as large as several blocks."""
    records = []
    for k in range(1, 40):
        items = [
            field(1, b"train/loss") + field(16, json.dumps(3.0 / k).encode()),
            field(2, b"train") + field(2, b"global_step") + field(16, str(k).encode()),
            field(1, b"table") + field(16, json.dumps("x" * (k * 2531 % 90000)).encode()),
        ]
        records.append(field(2, b"".join(field(1, item) for item in items)))
        records.append(field(3, b"a summary"))
    path = tmp_path / "run.wandb"
    path.write_bytes(log_of(records))
    assert path.stat().st_size > 20 * 32768
    curve = read_log(path)
    assert curve.steps == tuple(range(1, 40))
    assert curve.losses == tuple(3.0 / k for k in range(1, 40))


def test_records_may_end_at_any_place_of_a_block(tmp_path: Path) -> None:
    path = tmp_path / "run.wandb"
    row = field(2, field(1, field(1, b"loss") + field(16, b"1.5")))
    for left in range(12):
        # 7 of the head of the file and 7 of the record's; field 4 is a run's output.
        filler = field(4, bytes(32768 - 7 - 7 - 4 - left))
        path.write_bytes(log_of([filler, row, row]))
        assert read_log(path).losses == (1.5, 1.5), left


def test_values_of_newer_wandb_have_types(tmp_path: Path) -> None:
    values = [
        (b"loss", bytes([6 << 3 | 1]) + struct.pack("<d", 2.5)),
        (b"step", bytes([5 << 3, 0x90, 0x03])),  # 200, zigzag
        (b"loss_scale", field(8, b"512")),
        (b"ok", bytes([4 << 3, 1])),
        (b"note", field(7, b"text")),
        (b"nothing", field(3, b"")),
    ]
    first = b"".join(field(1, field(1, name) + value) for name, value in values)
    second = field(1, field(1, b"loss") + field(16, b'"NaN"')) + field(1, field(1, b"step") + bytes([5 << 3, 1]))
    path = tmp_path / "run.wandb"
    path.write_bytes(log_of([field(2, first), field(2, second)]))
    assert repr(read_log(path)) == repr(Curve((200, -1), (2.5, math.nan), (512.0, 512.0)))


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("none.csv", None, "No such file"),
        ("empty.csv", b"", "the log is empty"),
        ("blank.jsonl", b" \n", "the log is empty"),
        ("head.csv", b"step,loss\n", "no column of losses among none"),
        ("other.csv", b"step,accuracy\n1,0.5\n", "no column of losses among step, accuracy; name one loss"),
        ("gaps.csv", b"step,loss\n1,\n", "the column 'loss' has no losses in it"),
        ("word.csv", b"step,loss\n1,2.0\n2,low\n", "row 2: loss is 'low', which is no number"),
        ("list.jsonl", b'{"loss": [1]}\n', "row 1: loss is [1], which is no number"),
        ("step.csv", b"step,loss\nnan,2.0\n", "row 1: the step is nan"),
        ("quote.csv", b'step,loss\n1,"2\n', "not CSV"),
        ("torn.json", b'{"log_history": [', "not JSON at line 1"),
        ("number.json", b"3", "no list of rows in it"),
        ("state.json", b'{"log_history": 3}', "no list of rows in it"),
        ("bad.jsonl", b'{"loss": 1}\n{"loss"\n{"loss": 2}\n', "line 2 is not JSON"),
        ("utf.csv", b"loss\n\xff\n", "not UTF-8 at byte 5"),
        ("log.txt", b"loss 3\n", "unknown kind of log '.txt'"),
        ("run.wandb", b"PK\x03\x04 not wandb", "not a wandb file"),
        ("run.wandb", WANDB_FILE[:7], "no column of losses among none"),
    ],
)
def test_a_bad_log_is_one_line_of_what_to_do(tmp_path: Path, name: str, content: bytes | None, wanted: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_log(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert wanted in message


def test_a_folder_without_a_log_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no trainer_state\.json and no \.wandb in the folder"):
        read_log(tmp_path)


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_shows_curve_scale_and_events() -> None:
    curve, _, _, _ = story("collapse", 0)
    found = [*events(curve), Spike(400, 500, 1.0, "fast"), Spike(900, 950, 1.0, "fast"), Plateau(2000, None, 0.0)]
    drawn = picture(curve, found, title="a run")
    assert drawn == picture(curve, found, title="a run")  # nothing in it depends on the hour
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    texts = [text.text for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"a run", "loss", "loss scale", "step", "spike", "plateau", "scale collapse"} <= set(texts)
    assert texts.count("spike") == 1
    alone = picture(Curve(curve.steps, (math.nan, *curve.losses[1:]), (None,) * SAMPLES), [])
    assert "loss scale" not in alone and "spike" not in alone
    assert "no number" in alone and "no number" not in texts
