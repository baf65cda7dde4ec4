"""What differs between operating systems: names, the memory at hand, several GPUs, encodings."""

import ast
import json
import os
import resource
from pathlib import Path, PureWindowsPath
from typing import Any

import psutil
import pytest
import torch
from support import forked, parsed, tiny

from bf16_to_fp16 import UserError, convert, system
from bf16_to_fp16.checkpoint import disk, reader, sources
from bf16_to_fp16.checkpoint import folder as folders
from bf16_to_fp16.checkpoint.staging import check_out
from bf16_to_fp16.finetuning import run as finetuning
from bf16_to_fp16.finetuning.recipe import Recipe

# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["C:x", "C:", "/x", "C:/x", "..\\x", "a\\..\\..\\x"])
def test_a_name_that_leaves_the_folder_on_windows_is_refused_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "Path", PureWindowsPath)
    with pytest.raises(UserError, match="leaves the folder"):
        sources.contained(tmp_path, name)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": name, "type": "x.Normalize"}]))
    with pytest.raises(UserError, match="leaves the folder"):
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
    monkeypatch.setattr(disk, "BINARY", binary)
    monkeypatch.setattr(os, "open", on_windows)
    convert(source, tmp_path / "there", run_model=False)
    assert opened["model.safetensors"] == os.O_RDWR and opened["config.json"] == os.O_RDWR  # flushed at the end
    monkeypatch.undo()
    one, other = (path / "model.safetensors" for path in (tmp_path / "here", tmp_path / "there"))
    assert one.read_bytes() == other.read_bytes()


# --- memory and processes --------------------------------------------------------------------------------------------


def test_the_memory_at_hand_is_what_is_free_or_what_a_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    free = psutil.virtual_memory().available
    assert 0.8 * free < system.available_memory() < 1.2 * free
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 3000000\nfile 9000000\ninactive_anon 1\n")
    assert system.available_memory() > 0.8 * free
    (tmp_path / "memory.max").write_text("10000000\n")
    assert system.available_memory() == 7_000_000


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_limit_on_the_process_counts_where_there_are_such(kind: int, tmp_path: Path) -> None:
    room = 1 << 30

    def limited() -> None:
        used = psutil.Process().memory_info()
        resource.setrlimit(kind, ((used.vms if kind == resource.RLIMIT_AS else used.data) + room,) * 2)
        assert room - (1 << 26) < system.available_memory() <= room
        changed: Any = psutil.Process
        del changed.rlimit  # as on macOS
        assert system.available_memory() > 2 * room

    assert forked.in_a_fork(limited, tmp_path / "log")[0] == 0, (tmp_path / "log").read_text()


def test_several_gpus_without_nccl_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.model_validate({"source": "s", "out": str(tmp_path / "o"), "data": {"path": "t.txt"}})
    monkeypatch.setattr(finetuning, "find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    finetuning.check_recipe(recipe)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="several GPUs need NCCL, which torch has on Linux alone; launch one process"):
        finetuning.check_recipe(recipe)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    finetuning.check_recipe(recipe)


def test_text_is_written_with_its_encoding_and_its_ends_of_lines() -> None:
    wrong = [
        f"{path.name}:{node.lineno}"
        for path in parsed.package()
        for node in parsed.nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write_text"
        if {"encoding", "newline"} - {word.arg for word in node.keywords}
    ]
    assert not wrong
