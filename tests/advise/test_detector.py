"""Logs of every kind are read, and events of known curves are found, named and placed."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bf16_to_fp16.advise.detector import Event, events
from bf16_to_fp16.advise.losses import read_log
from bf16_to_fp16.errors import UserError


def noisy(level: float | np.ndarray, count: int, seed: int = 0, deviation: float = 0.01) -> list[float]:
    return (level * (1 + deviation * np.random.default_rng(seed).standard_normal(count))).tolist()


def run(losses: list[float]) -> list[Event]:
    return events(enumerate(losses, 1))


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


def test_a_spike_has_the_height_that_it_reached_and_one_that_stays_becomes_a_divergence() -> None:
    losses = noisy(2.0, 150)
    losses[100:103] = [3.0, 5.0, 4.0]
    (spike,) = run(losses)
    assert (spike.kind, spike.start, spike.end) == ("Spike", 101, 105) and spike.size == pytest.approx(3.0, abs=0.05)
    for length in (1, 30):
        (spike,) = run(noisy(2.0, 100) + noisy(4.0, length, 1) + noisy(2.0, 70, 2))
        assert (spike.kind, spike.start) == ("Spike", 101) and spike.end in range(101 + length, 105 + length)
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


def test_noise_with_long_tails_on_a_falling_loss_gives_few_false_alarms() -> None:
    """Of Student's t with 6 degrees of freedom: of 28,800 losses four are taken for spikes."""
    fall = 1 + 4 * (1 + np.arange(1200) / 200) ** -0.5
    noise = [np.random.default_rng(seed).standard_t(6, 1200) / math.sqrt(1.5) for seed in range(24)]
    alarms = [event for each in noise for event in run((fall * (1 + 0.02 * each)).tolist()) if event.kind != "Plateau"]
    assert len(alarms) <= 5


def test_constant_and_tiny_losses_are_no_trouble() -> None:
    assert [event.kind for event in run([0.0] * 600)] == ["Plateau"]
    assert [event.kind for event in run([1e-5] * 100 + [1e-4] + [1e-5] * 50)] == ["Spike"]
    assert run([3.0] * 10) == []
    assert run([]) == []


ROWS = [{"step": 10 * k, "loss": 3.0 / k, "loss_scale": 1024.0} for k in range(1, 6)]
CURVE = [(10 * k, 3.0 / k) for k in range(1, 6)]


def test_a_trainers_state_is_read(tmp_path: Path) -> None:
    history: list[dict[str, Any]] = [{"loss": row["loss"], "step": row["step"], "learning_rate": 1e-4} for row in ROWS]
    history.insert(3, {"eval_loss": 9.0, "step": 30})
    history.append({"train_loss": 1.0, "train_runtime": 5.0, "step": 50})
    folder = tmp_path / "run" / "checkpoint-50"
    folder.mkdir(parents=True)
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 50, "log_history": history}), encoding="utf-8")
    assert read_log(path) == read_log(folder) == read_log(tmp_path / "run") == CURVE


def test_rows_of_csv_and_jsonl_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "log.jsonl"
    lines.write_text("\n".join(map(json.dumps, ROWS)) + '\n{"step": 60, "lo', encoding="utf-8")  # killed in a write
    assert read_log(lines) == CURVE
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
        ("loss\n1.5\nnan\ninf\n", [(0, 1.5), (1, math.nan), (2, math.inf)]),
        ("train/loss,_step\n1.5,7\n", [(7, 1.5)]),
        ("step,loss,scale\n1,,64\n2,1.5,\n3,1.5,32\n", [(2, 1.5), (3, 1.5)]),
    ],
)
def test_usual_names_and_numbers_are_known(tmp_path: Path, text: str, wanted: list[tuple[int, float]]) -> None:
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
    assert repr(read_log(path)) == repr([(1, 2.0), (2, math.nan), (3, math.inf), (4, -math.inf)])


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("none.csv", None, "No such file"),
        ("empty.csv", b"", "no losses in it; their column must be called loss"),
        ("word.csv", b"step,loss\n1,2.0\n2,low\n", "could not convert string to float: 'low'"),
        ("list.jsonl", b'{"loss": [1]}\n', "cannot be read as a log"),
        ("step.csv", b"step,loss\nnan,2.0\n", "cannot convert float NaN to integer"),
        ("bad.jsonl", b'{"loss": 1}\n{"loss"\n{"loss": 2}\n', "cannot be read as a log"),
        ("utf.csv", b"loss\n\xff\n", "can't decode byte 0xff"),
        ("log.txt", b"loss 3\n", "unknown kind of log '.txt'"),
        ("", None, "no trainer_state.json and no log.jsonl in the folder"),
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
