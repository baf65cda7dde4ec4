"""Whatever is given or closed, a command ends in a promised status and one line, and prints no control character."""

import io
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from rich.table import Table
from support import tiny
from support.program import refused
from transformers import ByT5Tokenizer

from bf16_to_fp16 import UserError, audit, certify, cli
from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.checkpoint.hub import explain
from bf16_to_fp16.conversion.options import FLAGS, PUBLISHED, Options
from bf16_to_fp16.measuring.texts import file_rows
from bf16_to_fp16.progress import Progress, VisibleConsole, visible
from bf16_to_fp16.report.screen import console
from bf16_to_fp16.targets import AUTO, TARGETS, AskedTarget


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save(tiny.small("t5-encoder", num_layers=1, vocab_size=384), tmp_path_factory.mktemp("s") / "source")
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder


def test_a_length_that_no_double_bounds_is_not_certified(source: Path) -> None:
    report = certify(source, max_length=1_000_000_000, target="fp16-accumulate")
    assert report["verdict"] == "unsafe" and not report["certificate"]["holds"]


@pytest.mark.parametrize("length", ["1" + "0" * 30, "1" + "0" * 400, "0", "-1"])
def test_a_length_that_no_sequence_has_is_refused(
    length: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, "certify", source, "--max-length", length)
    refused(capsys, "convert", source, tmp_path / "out", "--no-audit", "--max-length", length)
    with pytest.raises(UserError, match="maximum length"):
        Arithmetic(int(length))


def test_a_seed_of_more_than_64_bits_is_refused(source: Path) -> None:
    for seed in (10**30, -(10**30)):
        with pytest.raises(UserError, match="64 bits"):
            audit(source, regimes=("half",), seed=seed)


@pytest.mark.parametrize("command", ["convert", "audit", "certify", "verify", "undo", "publish", "finetune"])
def test_a_name_of_300_letters_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"convert": ["out"], "undo": ["out"], "publish": ["me/x"]}
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "recipe.yaml").write_text(f"source: {'x' * 300}/y\nout: out\ndata: {{path: {tmp_path}/text.txt}}\n")
    assert "File name too long" in refused(capsys, "finetune", tmp_path / "recipe.yaml")
    said = refused(capsys, command, tmp_path / ("x" * 300), *others.get(command, []))
    assert "File name too long" in said and len(said) < 250


@pytest.mark.parametrize("line", ['{"text": "\\ud800"}', '{"text": 1' + "0" * 5000 + "}"])
def test_a_line_of_json_that_cannot_be_used_is_named(
    line: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    said = refused(capsys, "audit", source, "--regime", "half", "--data", tmp_path / "data.jsonl")
    assert "line 2 is not JSON" in said
    said = refused(capsys, "advise", "losses", tmp_path / "data.jsonl")
    assert "line 2" in said or "losses" in said


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"text": "x"}'), ("a.csv", "text\nx"), ("a.txt", "x")):
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        assert list(file_rows(tmp_path / name)) == [{"text": "x"}]


def in_a_shell(line: str, **names: object) -> subprocess.CompletedProcess[str]:
    """Run the program in a shell; ``$B`` stands for it."""
    environment = {**os.environ, "B": f"{sys.executable} -m bf16_to_fp16", **{k: str(v) for k, v in names.items()}}
    return subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("$B families > /dev/full", "No space left"),
        ("$B families --json - > /dev/full", "No space left"),
        ("PYTHONUNBUFFERED=1 $B --help > /dev/full", "No space left"),
        ("ulimit -f 0; $B families > $OUT", "File too large"),
    ],
)
def test_a_standard_output_that_is_full_is_no_bug(line: str, says: str, tmp_path: Path) -> None:
    done = in_a_shell(line, OUT=tmp_path / "out")
    assert done.returncode == 2, done
    assert says in done.stderr and "Traceback" not in done.stderr and "bug" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_second_sigterm_leaves_the_cleaning_up_alone(tmp_path: Path) -> None:
    script = (
        "import atexit, os, signal, sys, time\n"
        "from bf16_to_fp16 import __main__\n"
        "from bf16_to_fp16.cli import program\n"
        "out = open(sys.argv.pop(), 'a')\n"
        "def slow(**_):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); out.write('cleaned ')\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), out.write('up')))\n"
        "program.app.commands['families'].callback = slow\n"
        "sys.argv[1:] = ['families']\n"
        "sys.exit(__main__.main())\n"
    )
    (tmp_path / "script.py").write_text(script)
    words: list[str | Path] = [sys.executable, tmp_path / "script.py", tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "out").read_text() == "cleaned up"


def test_an_answer_that_is_no_hubs_is_not_put_down_to_a_full_disk() -> None:
    with pytest.raises(ValueError) as raised:
        time.strptime("nonsense", "%Y")  # as the client reads a date
    said = explain(raised.value, "me/x", "https://hub", None, None, writing=False)
    assert "hub did not answer as a Hub does" in said and "free" not in said


HOSTILE = "a\x1b[31mb\x9b2Jc\u202ed\u2066e\x07f\ud800g\u2028h\u200bi"
SEEN = r"a\x1b[31mb\x9b2Jc\u202ed\u2066e\x07f\ud800g\u2028h\u200bi"


def test_what_cannot_be_seen_is_escaped_and_all_else_is_as_it_was() -> None:
    assert visible(HOSTILE) == SEEN
    for plain in ("", "täglich 2⁻¹¹ × σ", "two\nlines\tand a tab", "模型"):
        assert visible(plain) == plain


def test_no_control_character_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cli.program.complain(HOSTILE)
    progress = Progress()
    progress.say(HOSTILE)
    with progress.step(HOSTILE):
        pass
    table = Table("name", title=HOSTILE)
    table.add_row(HOSTILE)
    console(stderr=True).print(table)
    file = io.StringIO()
    screen = VisibleConsole(file=file, force_terminal=True, width=500, highlight=False)
    screen.print(HOSTILE, style="bold", markup=False)
    shown = file.getvalue()
    assert shown.startswith("\x1b[1m") and shown.count("\x1b") == 2  # its own alone
    said = capsys.readouterr().err + shown.replace("\x1b", "")
    assert said.count(r"\x1b[31mb\x9b2Jc\u202ed\u2066e") == 5  # the table folds its cell
    assert not set(said) & set("\x1b\x9b\u202e\u2066\x07\u2028\u200b")


GIVEN = (
    "--target half --data x.txt --no-audit --subfolder encoder --plan r.json --layout single"
    " --eps fixed --margin 0.5 --max-length 512"
)
"""Every option that changes the output, in the order of the fields."""


def test_every_flag_is_an_option_of_convert() -> None:
    flags = {option for parameter in cli.app.commands["convert"].params for option in parameter.opts}
    assert flags >= {flag.name for flag in FLAGS.values()}
    assert set(FLAGS) - set(PUBLISHED) == {"device"}
    assert get_args(AskedTarget) == (AUTO, *TARGETS)  # which a recipe takes too


def test_a_published_command_asks_for_the_very_same_options() -> None:
    words = shlex.split(GIVEN)
    with cli.app.commands["convert"].make_context("convert", ["source", "out", *words]) as context:
        options = Options(**{name: context.params[name] for name in FLAGS})
    assert options.command("source", Path("out")) == f"bf16-to-fp16 convert source out {GIVEN}"
    assert Options().command("source", Path("out")) == "bf16-to-fp16 convert source out"


@pytest.mark.parametrize("accepted", [math.inf, math.nan, 0.0, -1.0])
def test_what_is_no_distance_is_refused(accepted: float) -> None:
    """Without an end every output would be near enough, and a report could not say so."""
    with pytest.raises(UserError, match="give a finite number over 0"):
        Options(max_kl=accepted).check()
    Options(max_kl=0.01).check()
