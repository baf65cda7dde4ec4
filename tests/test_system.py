"""What differs between operating systems: as Windows and macOS would have it, faked, since neither is at hand."""

import ast
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path, PureWindowsPath
from typing import Any

import psutil
import pytest
import torch
from support import exhaustive, faults, forked, parsed, tiny
from transformers import ByT5Tokenizer

from bf16_to_fp16 import UserError, cli, system
from bf16_to_fp16.checkpoint import folder as folders
from bf16_to_fp16.checkpoint import places, reader
from bf16_to_fp16.checkpoint.staging import check_out
from bf16_to_fp16.finetuning import run as finetuning
from bf16_to_fp16.finetuning.recipe import Recipe

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {"num_layers": 1, "vocab_size": 384, "dropout_rate": 0.0}


def elsewhere(name: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run an interpreter on a faked system, its output in an encoding of one language as on Windows."""
    faked = {"FAKED_SYSTEM": name, "PYTHONIOENCODING": "cp1252", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-X", "warn_default_encoding", *words]
    return subprocess.run(command, cwd=cwd, env=os.environ | faked, capture_output=True, encoding="cp1252", timeout=300)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a T5 in two shards that overflows, and an encoder in torch's own format."""
    root = tmp_path_factory.mktemp("sources")
    tiny.save(tiny.build("t5", factor=4.0, num_decoder_layers=1, **SMALL), root / "source", max_shard_size="20KB")
    ByT5Tokenizer(extra_ids=125).save_pretrained(root / "source")
    encoder = tiny.build("t5-encoder", factor=4.0, **SMALL)
    tiny.save(encoder, root / "encoder")
    torch.save(encoder.state_dict(), root / "encoder" / "pytorch_model.bin")
    (root / "encoder" / "model.safetensors").unlink()
    return root


COMMANDS = (
    ("convert", "{root}/source", "out", "--no-audit"),
    ("convert", "{root}/source", "out", "--force", "--no-audit"),
    ("certify", "out"),
    ("audit", "out", "--html", "page.html"),
    ("verify", "out"),
    ("undo", "out", "Ωback"),  # a letter that the output of the faked systems lacks
    ("convert", "{root}/encoder", "one.safetensors", "--layout", "single", "--no-audit"),
    ("undo", "one.safetensors", "back-from-one"),
)


@pytest.fixture(scope="module")
def here(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    place = tmp_path_factory.mktemp("here")

    def run() -> int:
        os.chdir(place)
        return max(cli.main([word.format(root=sources) for word in words]) for words in COMMANDS)

    assert forked.in_a_fork(run, place / "log")[0] == 0, (place / "log").read_text()
    return {made.name: faults.content(made) for made in place.iterdir() if made.is_dir()}


EMPTY_AND_ALL = """
import json
import os
import sys
import support.brief

support.brief.all_runs()
os.mkdir("out")
support.elsewhere.main(json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize("name", exhaustive.beyond(["win32"], ["win32", "darwin"]))
def test_convert_certify_audit_verify_and_undo_work_elsewhere_and_write_the_same_bytes(
    name: str, sources: Path, here: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """Every module of the package is imported, too."""
    commands = [[word.format(root=sources) for word in words] for words in COMMANDS]
    script = f"import support.elsewhere\n{EMPTY_AND_ALL}"
    done = elsewhere(name, "-c", script, json.dumps(commands), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall("^done: (.*)$", done.stdout, re.MULTILINE) == [words[0] for words in COMMANDS]
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {*here, "one.safetensors", "page.html"}
    assert {folder: faults.content(tmp_path / folder) for folder in here} == here
    texts = [path for path in tmp_path.rglob("*") if path.suffix in (".json", ".html", ".md", ".txt")]
    assert texts and not [path for path in texts if b"\r" in path.read_bytes()]


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["C:x", "C:", "/x", "C:/x", "..\\x", "a\\..\\..\\x"])
def test_a_name_that_leaves_the_folder_on_windows_is_refused_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "Path", PureWindowsPath)
    with pytest.raises(UserError, match="leaves the folder"):
        places.contained(tmp_path, name)
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
        del changed.rlimit  # as on macOS and Windows
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


# --- one place -------------------------------------------------------------------------------------------------------

OF_ONE_SYSTEM = re.compile(
    r"\bfcntl\b|\bresource\b\.|^import (resource|pwd|grp|termios|msvcrt)|/proc/|sys\.platform|os\.name\b"
    r"|platform\.system|os\.(p?readv?|p?writev?|rename|link|symlink|fork|posix_\w+|sched_\w+|sysconf|nice|fdatasync|O_(?!WRONLY))\b"
    r"|\.rename\(|signal\.SIG(?!INT|TERM|_)|is_mount\(|CDLL\(None\)|str\([^)]*relative_to",
    re.MULTILINE,
)


def test_one_module_alone_asks_what_the_system_has() -> None:
    found = {
        path.relative_to(parsed.PACKAGE).as_posix(): sorted({match[0] for match in OF_ONE_SYSTEM.finditer(text)})
        for path in parsed.package()
        if OF_ONE_SYSTEM.search(text := parsed.text(path))
    }
    assert set(found) == {"system.py"}, found


def test_text_is_written_with_its_encoding_and_its_ends_of_lines() -> None:
    wrong = [
        f"{path.name}:{node.lineno}"
        for path in parsed.package()
        for node in parsed.nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write_text"
        if {"encoding", "newline"} - {word.arg for word in node.keywords}
    ]
    assert not wrong
