"""Logs of every kind are read, and a bad one gets one line."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bf16_to_fp16.advise.losses import read_log
from bf16_to_fp16.errors import UserError

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
        ("train_loss,global_step\n1.5,7.0\n", [(7, 1.5)]),
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
        ("empty.csv", b"", "no losses in it; name their column loss"),
        ("other.csv", b"step,accuracy\n1,0.5\n", "no losses in it"),
        ("word.csv", b"step,loss\n1,2.0\n2,low\n", "could not convert string to float: 'low'"),
        ("list.jsonl", b'{"loss": [1]}\n', "cannot be read as a log"),
        ("step.csv", b"step,loss\nnan,2.0\n", "cannot convert float NaN to integer"),
        ("torn.json", b'{"log_history": [', "cannot be read as a log"),
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
