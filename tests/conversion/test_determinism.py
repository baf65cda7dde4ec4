"""Same input, same bytes out: whatever the number of threads, the source's shards, or the order of the file system."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import exhaustive, faults, tiny

from bf16_to_fp16 import convert

INDEX = "model.safetensors.index.json"
ONE_FILE = 10**12


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.small("gated")


@pytest.fixture(scope="module")
def source(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save(model, tmp_path_factory.mktemp("determinism") / "source")
    for name in ("tokenizer.json", "spiece.model", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text(json.dumps({"name": name}))
    return folder


@pytest.fixture(scope="module")
def reference(source: Path) -> dict[str, str]:
    return converted(source, source.parent / "reference")


def converted(source: Path, out: Path, **options: Any) -> dict[str, str]:
    result = convert(source, out, **{"run_model": False, "max_shard_size": ONE_FILE} | options)
    assert result.out is not None
    return faults.content(result.out) | {"plan": result.plan.model_dump_json()}


@pytest.mark.parametrize("run_model", exhaustive.beyond([True], [False, True]))
def test_the_number_of_threads_changes_no_byte(run_model: bool, tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5-encoder", num_layers=1), tmp_path / "source")
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(converted(source, tmp_path / f"out{threads}", run_model=run_model))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_the_sources_shards_change_no_byte(model: Any, source: Path, reference: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    tiny.save(model, tmp_path / "source", max_shard_size="6KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 3
    assert converted(tmp_path / "source", tmp_path / "out") == reference


def backwards(file: Path) -> None:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    body, entries, parts, at = data[8 + length :], {}, [], 0
    for name, entry in sorted(header.items(), key=lambda item: item[0], reverse=True):
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        entries[name] = {**entry, "data_offsets": [at, at + end - begin]}
        parts.append(body[begin:end])
        at += end - begin
    text = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def test_the_order_of_the_sources_tensors_changes_no_byte(
    source: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "source")
    backwards(tmp_path / "source" / "model.safetensors")
    assert (tmp_path / "source" / "model.safetensors").read_bytes() != (source / "model.safetensors").read_bytes()
    assert converted(tmp_path / "source", tmp_path / "out") == reference


def test_the_order_of_the_file_system_changes_no_byte(
    source: Path, reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, asked = os.listdir, []

    def reversed_order(path: Any = ".") -> list[str]:
        asked.append(str(path))
        return sorted(listed(path), reverse=True)

    monkeypatch.setattr(os, "listdir", reversed_order)
    other: Callable[[Path], dict[str, str]] = lambda out: converted(source, out)  # noqa: E731
    assert other(tmp_path / "out") == reference
    assert str(source) in asked
    monkeypatch.setattr(os, "listdir", lambda path=".": sorted(listed(path)))
    assert other(tmp_path / "again") == reference
