"""A folder that appears is on the disk: what a crash right after the rename would leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bf16_to_fp16.folder import staged


@pytest.mark.parametrize("force", [False, True])
def test_every_file_and_folder_is_on_the_disk_before_the_rename_and_its_parent_after(
    force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, rename = os.fsync, os.rename
    synced: list[int] = []
    before: list[int] = []

    def see_sync(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    def see_rename(old: Any, new: Any) -> None:
        rename(old, new)
        if Path(new) == tmp_path / "out":
            before.extend(synced)
            synced.clear()

    monkeypatch.setattr(os, "fsync", see_sync)
    monkeypatch.setattr(os, "rename", see_rename)
    if force:
        (tmp_path / "out").mkdir()
    with staged(tmp_path / "out", force=force) as work:
        (work / "model.safetensors").write_bytes(b"weights")
        (work / "1_Pooling" / "inner").mkdir(parents=True)
        (work / "1_Pooling" / "config.json").write_text("{}")
        (work / "1_Pooling" / "inner" / "file").write_text("")
    out = tmp_path / "out"
    assert set(before) == {path.stat().st_ino for path in (out, *out.rglob("*"))}
    assert synced == [tmp_path.stat().st_ino]
