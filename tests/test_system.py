"""What differs between operating systems; progress on a terminal alone; and silence when called from Python."""

import ast
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path, PureWindowsPath
from typing import Any

import psutil
import pytest
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from support import parsed, tiny
from transformers.utils import logging as stock

from bf16_to_fp16 import UserError, convert, system
from bf16_to_fp16.checkpoint import files, reader, sources
from bf16_to_fp16.checkpoint import folder as folders
from bf16_to_fp16.checkpoint.staging import check_out
from bf16_to_fp16.progress import Progress, progress_of
from bf16_to_fp16.quiet import quiet


@pytest.mark.parametrize("name", ["C:x", "C:", "/x", "C:/x", "..\\x", "a\\..\\..\\x"])
def test_a_name_that_leaves_on_windows_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "Path", PureWindowsPath)
    with pytest.raises(UserError, match="is not inside the folder"):
        sources.contained(tmp_path, name)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": name, "type": "x.Normalize"}]))
    with pytest.raises(UserError, match="is not the name of a folder"):
        folders.side_modules(tmp_path)


def test_a_report_names_a_file_alike_on_every_system() -> None:
    root: Any = PureWindowsPath("C:/models/t5")
    checkpoint = reader.Checkpoint(root, "t5", None, {}, {}, (), None)
    file: Any = root / "text_encoder" / "model.safetensors"
    assert checkpoint.file_name(file) == "text_encoder/model.safetensors"


def test_the_source_by_a_name_in_other_letters_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that takes upper and lower case for the same: here a link above gives a folder a second name."""
    source = tmp_path / "models" / "t5" / "source"
    source.mkdir(parents=True)
    (tmp_path / "Models").symlink_to(tmp_path / "models")
    monkeypatch.setattr(Path, "resolve", Path.absolute)  # which keeps the letters that were typed
    for out in ("t5/source", "t5/source/out", "t5"):
        with pytest.raises(UserError, match="overlaps the source"):
            check_out(tmp_path / "Models" / out, source, force=True)
    check_out(tmp_path / "Models" / "t5" / "out", source, force=True)


def test_files_are_opened_and_flushed_as_windows_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary, real, opened = 1 << 27, os.open, dict[str, int]()

    def on_windows(path: Any, flags: int, mode: int = 0o777) -> int:
        assert flags & binary and not Path(path).is_dir()
        opened[Path(path).name] = flags & ~binary
        return real(path, flags & ~binary, mode)

    source = tiny.save(tiny.small("t5-encoder"), tmp_path / "source")
    convert(source, tmp_path / "here", run_model=False)
    monkeypatch.setattr(files, "BINARY", binary)
    monkeypatch.setattr(os, "open", on_windows)
    convert(source, tmp_path / "there", run_model=False)
    assert opened["model.safetensors"] == os.O_RDWR and opened["config.json"] == os.O_RDWR  # flushed at the end
    monkeypatch.undo()
    one, other = (path / "model.safetensors" for path in (tmp_path / "here", tmp_path / "there"))
    assert one.read_bytes() == other.read_bytes()


def test_the_memory_at_hand_is_what_a_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    free = psutil.virtual_memory().available
    assert 0.8 * free < system.available_memory() < 1.2 * free
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 3000000\nfile 9000000\ninactive_anon 1\n")
    assert system.available_memory() > 0.8 * free
    (tmp_path / "memory.max").write_text("10000000\n")
    assert system.available_memory() == 7_000_000


def test_text_is_written_with_its_encoding_and_its_ends_of_lines() -> None:
    wrong = [
        f"{path.name}:{node.lineno}"
        for path in parsed.package()
        for node in parsed.nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write_text"
        if {"encoding", "newline"} - {word.arg for word in node.keywords}
    ]
    assert not wrong


def test_a_library_call_shows_its_progress_where_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    given = Progress(quiet=True)
    assert progress_of(given) is given
    for asked, said in ((None, ""), (False, ""), (True, "Observing\n")):
        with progress_of(asked).step("Observing"):
            pass
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", said)


CALLS = """
import sys
from bf16_to_fp16 import audit, certify, cli, convert, verify
source, out = sys.argv[1:]
convert(source, out, run_model=False)
audit(out, regimes=("half",))
verify(out, run_model=False)
print("the command:", file=sys.stderr)
cli.main(["certify", source])
"""


def test_the_python_interface_prints_nothing_and_a_command_its_own_steps_and_no_more(tmp_path: Path) -> None:
    """In a process of its own, where the libraries are imported and warn for the first time."""
    source = tiny.save(tiny.build("t5-encoder", num_layers=1), tmp_path / "source")
    arguments = [sys.executable, "-c", CALLS, str(source), str(tmp_path / "out")]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and (tmp_path / "out").is_dir() and done.stdout.startswith("not certified")
    assert done.stderr.splitlines() == [
        "the command:",
        "Bounding every site in PyTorch",
        "Device: cpu",
        "Bounding every site in stricter arithmetic",
    ]


@pytest.mark.parametrize("bars", [True, False])
def test_what_a_program_has_set_is_as_before(bars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, torchao = logging.getLogger("DeepSpeed"), logging.getLogger("torchao")
    monkeypatch.setattr(stock, "_tqdm_active", bars)
    enable_progress_bars()
    monkeypatch.setattr(torchao, "level", logging.INFO)
    level = stock.get_verbosity()
    stock.set_verbosity(logging.INFO)
    filters, caught = list(logger.filters), list(warnings.filters)
    try:
        with pytest.raises(KeyError), quiet():
            assert not stock.is_progress_bar_enabled() and are_progress_bars_disabled()
            assert not logging.getLogger("transformers").isEnabledFor(logging.ERROR)
            assert not torchao.isEnabledFor(logging.WARNING)
            raise KeyError
        assert stock.get_verbosity() == logging.INFO and torchao.level == logging.INFO
        assert (stock.is_progress_bar_enabled(), are_progress_bars_disabled()) == (bars, False)
        assert logger.filters == filters and list(warnings.filters) == caught
    finally:
        stock.set_verbosity(level)
        enable_progress_bars()


def test_a_call_inside_another_leaves_the_outer_one_silent() -> None:
    logger = logging.getLogger("DeepSpeed")
    before = list(logger.filters)
    with quiet():
        with quiet():
            pass
        assert len(logger.filters) == len(before) + 1
    assert logger.filters == before
