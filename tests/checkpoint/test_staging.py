"""A folder that appears is on the disk: what a crash right after the rename would leave."""

import os
from pathlib import Path
from typing import Any

import pytest

from bf16_to_fp16 import UserError
from bf16_to_fp16.checkpoint.folder import carry_over
from bf16_to_fp16.checkpoint.staging import check_file, check_out, staged


@pytest.mark.parametrize("force", [False, True])
def test_all_is_on_the_disk_before_the_rename(force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, replace = os.fsync, os.replace
    synced: list[int] = []
    before: list[int] = []

    def see_sync(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    def see_replace(old: Any, new: Any) -> None:
        replace(old, new)
        if Path(new) == tmp_path / "out":
            before.extend(synced)
            synced.clear()

    monkeypatch.setattr(os, "fsync", see_sync)
    monkeypatch.setattr(os, "replace", see_replace)
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


def test_the_folder_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    """While it is made it is nobody else's business."""
    umask = os.umask(0o027)
    try:
        with staged(tmp_path / "out") as work:
            (work / "file").write_text("")
            assert work.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("/proc/out", "/proc is not writable"),
        ("/proc/deep/out", "/proc is not writable"),
        ("../file", "exists and is not a folder"),
        ("../file/out", "file is not a folder"),
        ("../file/deep/out", "file is not a folder"),
        ("../link", "is a link"),
        ("../link/out", "link is not a folder"),
        ("../" + "x" * 300, "File name too long"),
        ("../" + "x" * 250, "File name too long"),  # fits, but not while it is being made
        ("../" + "x" * 300 + "/out", "File name too long"),
        ("../here", "is where this runs"),
        (".", "is where this runs"),
        ("/dev/shm", "is a mount point"),
    ],
)
def test_an_impossible_place_is_refused(out: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path / "here")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(UserError, match=says) as raised:
        check_out(Path(out), force=True)
    assert "choose" in str(raised.value) and "\n" not in str(raised.value)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, mode: int = 0) -> None:
        raise PermissionError(13, "Permission denied")

    check_out(tmp_path / "out", force=False)
    check_file(tmp_path / "report.json", "choose another")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "mkdir", refuse)  # a superuser is refused nothing
    with pytest.raises(UserError, match=r"is not writable \(Permission denied\); choose another output path"):
        check_out(tmp_path / "out", force=False)
    with pytest.raises(UserError, match=r"report.json: cannot be written there \(Permission denied\); choose another"):
        check_file(tmp_path / "report.json", "choose another")


def test_a_report_may_replace_another_and_go_to_a_device(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"schema": 1, "verdict": "safe"}')
    check_file(tmp_path / "file", "choose another")
    check_file(Path("/dev/null"), "choose another")
    for path in (tmp_path, tmp_path / "nowhere" / "report.json", Path("/proc/report.json")):
        with pytest.raises(UserError, match="choose another"):
            check_file(path, "choose another")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is no report of this program"):
        check_file(tmp_path / "file", "choose another")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["notes.txt", "README.md"])
def test_what_lies_outside_is_not_carried_over_by_a_link(tmp_path: Path, name: str) -> None:
    for folder in ("source", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "source" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"outside the folder") as raised:
        carry_over(tmp_path / "source", tmp_path / "out")
    assert name in str(raised.value) and list((tmp_path / "out").iterdir()) == []
    (tmp_path / "source" / name).unlink()
    (tmp_path / "source" / "blob").write_text("theirs")
    (tmp_path / "source" / name).symlink_to("blob")
    carry_over(tmp_path / "source", tmp_path / "out")
    copied = tmp_path / "out" / name.replace("README", "SOURCE_README")
    assert copied.read_text() == "theirs" and not copied.is_symlink()
