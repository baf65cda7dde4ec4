"""The demonstration and the command line as a user runs them."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tiny
from support.forked import in_a_fork

from bf16_to_fp16 import __main__ as program
from bf16_to_fp16 import cli, convert
from bf16_to_fp16.environment import SCHEMA
from bf16_to_fp16.measuring.batch import run_batch
from bf16_to_fp16.measuring.probe import batches
from bf16_to_fp16.measuring.stock import load

DEMOS = ("t5-gated-bytes", "pegasus-bytes", "gemma3-bytes")
ROOT = Path(__file__).parent.parent
DATA = Path(str(files("bf16_to_fp16") / "demo_data"))


@pytest.fixture(scope="module")
def demo(
    tmp_path_factory: pytest.TempPathFactory, warm_python: Path, pytestconfig: pytest.Config
) -> tuple[dict[str, Any], str, str, Path]:
    """Return the demo's JSON by name, its standard output and error, and where it wrote; whole in ``make test-all``."""
    root, whole = tmp_path_factory.mktemp("demo"), pytestconfig.getoption("--exhaustive")
    words: list[str | Path] = [warm_python, "-m", "bf16_to_fp16", "demo", "--json", "report.json"]
    environment = os.environ | {"NO_COLOR": "1"} | ({"WHOLE_RUNS": "1"} if whole else {})
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    reports = {r["name"]: r for r in json.loads((root / "report.json").read_text())["demos"]}
    return reports, done.stdout, done.stderr, root / "fp16-demo"


@pytest.mark.parametrize("name", DEMOS)
def test_the_demos_files_compute_the_same_function(demo: Any, name: str) -> None:
    # Exact up to the order of fp32 sums for T5; Pegasus drifts with its eps and Gemma with the gains that round, by no
    # more than twice what was predicted.
    assert (DATA / name / "model.safetensors").stat().st_size < 4_000_000
    drift = demo[0][name]["plan"]["drift"]
    allowed = 2 * drift["predicted_max_logit_error"] if drift else 0.0
    source, out = load(DATA / name, torch.float32), load(demo[3] / name, torch.float32)
    for batch in batches(source.config, DATA / name, str(DATA / "held_out.txt")):
        if not batch.generate:
            with torch.no_grad():
                a, b = run_batch(source, batch).logits, run_batch(out, batch).logits
            assert float((a - b).abs().max()) <= allowed + 5e-6 * float(a.abs().max())


def test_the_demo_prints_before_and_after_and_commands_that_run_as_they_stand(demo: Any) -> None:
    _, out, err, folder = demo
    assert out.count("unsafe: overflows in ") == 3 and out.count("output: safe: proven for every input") == 3
    assert out.count("fp16_report.html") == 3 and (folder / DEMOS[0] / "fp16_report.html").is_file()
    assert "Auditing" in err and "Auditing" not in out
    assert "\x1b[" not in out
    lines = [line.partition(": bf16-to-fp16 ")[2] for line in out.splitlines() if line.startswith("next: ")]
    commands = [shlex.split(line) for line in lines]
    assert [words[0] for words in commands] == ["convert", "verify"] * len(DEMOS)
    for words in commands:
        assert (folder.parent / words[1]).is_dir()


WHATEVER_IS_RUN = ("converted, in fp16: ", "headroom: any input, ", "residual stream", "weights carried ")
"""The rows of the table that less of the probe does not change."""


def test_the_demo_ends_with_the_table_of_the_readme(demo: Any, pytestconfig: pytest.Config) -> None:
    """Counts of what overflows may differ between machines, and a last digit with them."""
    compared = ("",) if pytestconfig.getoption("--exhaustive") else WHATEVER_IS_RUN
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in readme.splitlines() if " | " in line]
    lines = [line.strip() for line in demo[1].splitlines()]
    printed = [re.split(r"  +", line) for line in lines[lines.index("the three checkpoints") + 1 :]]
    shown = table[next(i for i, row in enumerate(table) if row[-3:] == list(DEMOS)) :][: len(printed)]
    assert len(printed) == 9 and [row[0] for row in printed[1:]] == [row[0] for row in shown[1:]]
    rows = [pair for pair in zip(printed[1:], shown[1:], strict=True) if pair[0][0].startswith(compared)]
    assert len(rows) == (8 if compared == ("",) else 4)
    for ours, theirs in rows:
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            if "not proven" in (a, b) or a.startswith("2^"):
                assert a == b
                continue
            one, other = (float(cell.rstrip("% ×").replace(",", "")) for cell in (a, b))
            assert one == pytest.approx(other, rel=0.05)


INTERRUPTED_WHILE_IMPORTING = """
import os, runpy, signal, sys, time, tomllib

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                if {swallowed}:
                    raise ImportError("cannot load module more than once per process")
                raise

sys.meta_path.insert(0, Interrupt())
sys.argv = ["bf16-to-fp16", "audit", {source!r}]
if {script!r}:
    module, function = {script!r}.split(":")
    sys.exit(getattr(__import__(module, fromlist=[function]), function)())
runpy.run_module("bf16_to_fp16", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("entry", "module", "swallowed"),
    [
        ("module", "click", False),
        ("script", "bf16_to_fp16.cli", False),
        ("module", "numpy", True),  # its compiled part, interrupted, says ImportError
        ("script", "torch", False),
    ],
)
def test_an_interrupt_while_importing_is_status_130(entry: str, module: str, swallowed: bool, tmp_path: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["bf16-to-fp16"]
    code = INTERRUPTED_WHILE_IMPORTING.format(
        module=module, swallowed=swallowed, source=str(DATA / DEMOS[0]), script=declared if entry == "script" else ""
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130
    assert [line for line in done.stderr.splitlines() if line and "Auditing" not in line] == ["interrupted"]
    assert done.stdout == ""


@pytest.mark.parametrize(("given", "used"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_leave_their_core(given: str | None, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        del os.environ["OMP_WAIT_POLICY"]
    monkeypatch.setattr(sys, "argv", ["bf16-to-fp16", "--version"])
    assert program.main() == 0
    assert os.environ["OMP_WAIT_POLICY"] == used


def test_a_bug_is_status_70_and_one_line_that_names_the_file_with_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bf16_to_fp16.report.screen.print_families", lambda *_: 1 / 0)
    monkeypatch.setattr("sys.argv", ["bf16-to-fp16", "families"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert program.main() == 70
    printed = capsys.readouterr()
    (written,) = tmp_path.iterdir()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("bug: ZeroDivisionError: ") and str(written) in printed.err
    assert "please report it" in printed.err and "Traceback" not in printed.err
    assert "print_families" in written.read_text() and "ZeroDivisionError" in written.read_text()


@pytest.mark.parametrize("arguments", [["families", "--json", "-"], ["certify", str(DATA / DEMOS[0])]])
def test_a_reader_that_has_gone_is_status_141(arguments: list[str], tmp_path: Path, warm_python: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            [warm_python, "-m", "bf16_to_fp16", *arguments], cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 141
    assert not any(word in done.stderr for word in ("unsafe", "Traceback", "BrokenPipe", "bug: "))


def test_closed_streams_are_opened_before_a_file_takes_their_numbers(tmp_path: Path) -> None:
    words = 'exec "$0" -m bf16_to_fp16 families --json families.json <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", words, sys.executable], cwd=tmp_path).returncode == 0
    assert json.loads((tmp_path / "families.json").read_text())["families"]


@pytest.mark.parametrize("name", ["audit", "convert"])
def test_a_dataset_out_of_reach_is_one_line_and_status_2(name: str, tmp_path: Path) -> None:
    out = ["out"] if name == "convert" else []
    here = tmp_path / "here"
    here.mkdir()

    def run_there() -> int:
        os.chdir(here)
        time.sleep = lambda seconds: None  # between the libraries' own attempts
        return cli.main([name, str(DATA / DEMOS[0]), *out, "--data", "some/dataset"])

    # A process of its own, whose libraries' messages are seen too.
    status, _ = in_a_fork(run_there, tmp_path / "out", tmp_path / "errors")
    assert status == 2 and (tmp_path / "out").read_text() == ""
    said = (tmp_path / "errors").read_text()
    assert said.startswith("error: some/dataset: ") and said.count("\n") == 1
    assert not list(here.iterdir())


def test_every_json_names_the_version_of_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(tiny.save(tiny.build("t5-encoder"), tmp_path / "source"))
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    for arguments in (
        ["families"],
        ["convert", source, out, "--dry-run"],
        ["convert", source, out, "--no-audit"],
        ["certify", out],
        ["undo", out, back],
    ):
        capsys.readouterr()
        assert cli.main([*arguments, "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == SCHEMA


def test_a_dry_run_prints_plan_and_size_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.save(tiny.build("gated"), tmp_path / "source")
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "residual" in out and re.search(r"^to write: .* of weights$", out, re.M)
    planned = convert(source, tmp_path / "out", dry_run=True, run_model=False)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    assert convert(source, tmp_path / "out", run_model=False).nbytes is None
    assert planned.nbytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "out/model.safetensors").values())
