"""Logs of every kind are read, and a bad one gets one line."""

import base64
import csv
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.losses.events import Curve
from bf16_to_fp16.losses.logs import read_log

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
