"""Outputs: they are on the disk before they appear, and --force replaces what this program wrote and nothing else."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.pipelines import contents
from support.program import refused

from bf16_to_fp16 import UserError, cli
from bf16_to_fp16.checkpoint import staging
from bf16_to_fp16.checkpoint.folder import carry_over
from bf16_to_fp16.checkpoint.staging import check_file, check_out, staged
from bf16_to_fp16.conversion.convert import convert


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    source = tiny.save(tiny.small("t5-encoder"), root / "source")
    (source / "special_tokens_map.json").write_text("{}")
    convert(source, root / "converted", run_model=False)
    convert(source, root / "packed.safetensors", layout="single", run_model=False)
    assert cli.main(["undo", str(root / "converted"), str(root / "back")]) == 0
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    capsys.readouterr()
    return tmp_path


def shell(line: str, folder: Path) -> None:
    subprocess.run(["sh", "-ec", line], cwd=folder, check=True)


NOT_OURS = (
    ("thesis", "mkdir thesis; echo mine > thesis/thesis.txt"),
    ("converted", "mkdir -p converted/notes/deep; echo mine > converted/notes/deep/mine.txt"),
    ("converted", "mkdir precious; ln -s ../precious converted/precious"),
    ("runs", "mkdir runs; cp -r converted runs/one"),
    ("original", "cp -r source original"),
)
"""Places for OUT, and how they come to be."""


@pytest.mark.parametrize(("out", "line"), NOT_OURS)
def test_force_replaces_no_folder_with_a_file_that_this_program_did_not_write(
    out: str, line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell(line, here)
    before = contents(here)
    said = refused(capsys, "convert", here / "source", here / out, "--no-audit", "--force")
    assert f"{here / out} exists and holds " in said and "choose another output path" in said and "--force" not in said
    assert contents(here) == before


def test_force_replaces_a_converted_folder_an_empty_one_and_a_packed_file(here: Path) -> None:
    (here / "empty" / "deeper").mkdir(parents=True)
    for out in ("converted", "empty"):
        assert cli.main(["convert", f"{here}/source", f"{here}/{out}", "--no-audit", "--force", "--margin", "2"]) == 0
        assert "--margin 2" in json.loads((here / out / "fp16_report.json").read_text())["command"]
    old = (here / "packed.safetensors").read_bytes()
    packed = ["convert", f"{here}/source", f"{here}/packed.safetensors", "--layout", "single", "--no-audit"]
    assert cli.main([*packed, "--force", "--margin", "2"]) == 0 and (here / "packed.safetensors").read_bytes() != old
    assert not [path for path in here.iterdir() if path.name.startswith(".")]


def test_swapped_arguments_cost_nothing_without_force(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(here)
    for options in ((), ("--force",)):
        said = refused(capsys, "convert", here / "converted", here / "source", "--no-audit", *options)
        assert "give the output path last" in said and "--force" not in said
    assert contents(here) == before


def test_force_replaces_nothing_that_the_source_was_made_from(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a finetune of a converted folder has that for its original."""
    (here / "child").mkdir()
    report = json.loads((here / "converted" / "fp16_report.json").read_text())
    report["source"]["sha256"] = {entry["name"]: entry["sha256"] for entry in report["output"]["files"]}
    shutil.copytree(here / "source", here / "child", dirs_exist_ok=True)
    (here / "child" / "fp16_report.json").write_text(json.dumps(report))
    before = contents(here)
    for command in ("convert", "undo"):
        said = refused(capsys, command, here / "child", here / "converted", "--force")
        assert "converted is what" in said and "was made from" in said
    assert contents(here) == before


@pytest.mark.parametrize(
    ("source", "out", "line"),
    [
        ("converted/model.safetensors", "link/converted", "ln -s . link"),
        ("converted/model.safetensors", "back/../converted", ":"),
        ("linked", "converted", "cp -r source linked; ln -sf ../converted/model.safetensors linked"),
    ],
)
def test_force_never_replaces_a_folder_that_holds_the_source(
    source: str, out: str, line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell(line, here)
    before = contents(here)
    assert "overlaps the source" in refused(capsys, "convert", here / source, f"{here}/{out}", "--no-audit", "--force")
    assert contents(here) == before


def test_a_replacement_that_fails_restores_the_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, replace = contents(here), os.replace

    def fail(old: Path, new: Path) -> None:
        if (old / "new").exists():
            raise OSError(5, "Input/output error")
        replace(old, new)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="Input/output"), staging.staged(here / "converted", force=True) as work:
        (work / "new").write_text("new")
    assert contents(here) == before


def test_a_file_that_appears_in_the_old_folder_meanwhile_is_kept(here: Path) -> None:
    with pytest.raises(UserError, match="thesis"), staging.staged(here / "converted", force=True) as work:
        (work / "new").write_text("new")
        (here / "converted" / "thesis").write_text("mine")
    assert (here / "converted" / "thesis").read_text() == "mine"
    (here / "converted" / "thesis").unlink()
    with staging.staged(here / "converted", force=True) as work:
        (work / "new").write_text("new")
    assert [path.name for path in (here / "converted").iterdir()] == ["new"]
    assert not [path for path in here.iterdir() if path.name.startswith(".")]


def test_undo_replaces_what_convert_wrote_and_nothing_else(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(here)
    assert "which is not in a report there" in refused(capsys, "undo", here / "converted", here / "back", "--force")
    assert contents(here) == before
    convert(here / "source", here / "other", run_model=False)
    assert cli.main(["undo", str(here / "converted"), str(here / "other"), "--force"]) == 0


def test_a_packed_file_replaces_none_that_was_not_packed_here(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shell("cp -r source original; echo kept > text.safetensors", here)
    before = contents(here)
    places = [("source", out) for out in ("original/model.safetensors", "source/model.safetensors", "text.safetensors")]
    for source, out in (*places, ("packed.safetensors", "source/model.safetensors")):
        ask = ["convert", here / source, here / out, "--layout", "single", "--no-audit"]
        for options in ((), ("--force",)):
            assert "--force" not in refused(capsys, *ask, *options)
    assert contents(here) == before


def test_what_is_converted_is_not_converted_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("converted", "packed.safetensors"):
        for options in ((), ("--dry-run",), ("--plan", here / "converted")):
            said = refused(capsys, "convert", here / source, here / "again", "--no-audit", *options)
            assert f"{source} is converted already" in said and ("undo" in said) == (source == "converted")
        assert not (here / "again").exists()


@pytest.mark.parametrize("file", ["source/config.json", "converted/fp16_report.json", "thesis.txt", "recipe.json"])
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_report_overwrites_no_file_of_the_users(
    option: str, file: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "thesis.txt").write_text("the bf16-to-fp16 story")
    (here / "recipe.json").write_text('{"source": "x"}')
    target, before = here / file, contents(here)
    command = ["audit", here / "source", "--regime", "half", option, target]
    with tiny.no_models():
        assert f"choose another file for {option}" in refused(capsys, *command)
    if option == "--json":
        for each in (["families"], ["certify", here / "source"], ["verify", here / "converted"]):
            assert "choose another file" in refused(capsys, *each, option, target)
    assert contents(here) == before


def test_a_report_replaces_an_earlier_one_but_not_its_links(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "report.json").touch()
    assert cli.main(["families", "--json", str(here / "report.json")]) == 0
    os.link(here / "report.json", here / "kept.json")
    assert cli.main(["certify", str(here / "source"), "--json", str(here / "report.json")]) in (0, 1)
    assert "certificate" in json.loads((here / "report.json").read_text())
    assert "families" in json.loads((here / "kept.json").read_text())
    page = ["audit", str(here / "source"), "--regime", "stock", "--html", str(here / "page.html")]
    assert cli.main(page) in (0, 1) and cli.main(page) in (0, 1)


@pytest.mark.parametrize("folder", ["out/run", "source/run", ".", "run"])
def test_a_run_is_not_kept_over_other_files(folder: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the end of the run would replace it, or fail, or its start would replace them."""
    shell("mkdir -p run/start; echo mine > run/start/thesis.txt; yes some words | head -9 > text.txt", here)
    (here / "recipe.yaml").write_text(
        f"source: {here}/source\nout: {here}/out\ndata: {{path: {here}/text.txt}}\n"
        f"checkpointing: {{folder: {here / folder}}}\n"
    )
    before = contents(here)
    said = "holds other files" if folder == "run" else "give another checkpointing.folder"
    assert said in refused(capsys, "finetune", here / "recipe.yaml")
    assert contents(here).items() >= before.items() if folder == "run" else contents(here) == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convert source empty/deeper/.. --no-audit --force", "choose another output path"),
        ("convert source new --no-audit --json new", "--json"),
        ("convert source new --no-audit --json nowhere/report", "nowhere/report"),
        ("audit source --html nowhere/page", "nowhere/page"),
        ("convert source packed.safetensors --layout single --no-audit", "give --force to replace it"),
        ("convert source/model.safetensors source/model.safetensors --layout single --force", "overlaps the source"),
        ("convert source out --layout single", "ends in .safetensors"),
        ("demo --out file", "file is not a folder"),
        # Neither the Hub nor what is to be undone is looked at before.
        ("convert someone/model file --force", "choose another output path"),
        ("undo source file --force", "choose another output path"),
        ("audit source --json one --html one", "--json"),
        ("audit source --html -", "--html cannot write to standard output"),
    ],
)
def test_an_output_that_would_not_last_is_refused_by_its_name(
    command: str, words: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty" / "deeper").mkdir(parents=True)
    (here / "file").touch()
    monkeypatch.chdir(here)
    before = sorted(here.rglob("*"))
    with tiny.no_models():
        assert words in refused(capsys, *command.split())
    assert sorted(here.rglob("*")) == before


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
        ("../file", "exists and is not a folder"),
        ("../file/out", "file is not a folder"),
        ("../file/deep/out", "file is not a folder"),
        ("../link", "is a link"),
        ("../link/out", "link is not a folder"),
        ("../" + "x" * 300, "File name too long"),
        ("../" + "x" * 300 + "/out", "File name too long"),
        ("../here", "is the current folder"),
        (".", "is the current folder"),
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
    check_out(tmp_path / "out", force=False)
    check_file(tmp_path / "report.json", "choose another")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a superuser is refused nothing
    with pytest.raises(UserError, match="is not writable; choose another output path"):
        check_out(tmp_path / "out", force=False)
    with pytest.raises(UserError, match=r"report.json cannot be written; choose another"):
        check_file(tmp_path / "report.json", "choose another")


def test_a_report_may_replace_another_and_go_to_a_device(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"schema": 1, "verdict": "safe"}')
    check_file(tmp_path / "file", "choose another")
    check_file(Path("/dev/null"), "choose another")
    for path in (tmp_path, tmp_path / "nowhere" / "report.json"):
        with pytest.raises(UserError, match="choose another"):
            check_file(path, "choose another")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="only a report that stands alone"):
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
