"""The user's own files: --force replaces what this program wrote and nothing else, and no report overwrites a file."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support import tiny
from support.pipelines import contents
from support.program import refused

from bf16_to_fp16 import cli
from bf16_to_fp16.checkpoint import staging
from bf16_to_fp16.conversion.convert import convert
from bf16_to_fp16.errors import UserError


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
        assert "the output comes last" in said and "--force" not in said
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
    assert "did not write" in refused(capsys, "undo", here / "converted", here / "back", "--force")
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
            assert f"{source} is converted already" in said and "bf16-to-fp16 undo" in said
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
        ("convert source converted/deeper/out --no-audit", "of this program; choose an output path outside it"),
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
        ("audit source --html -", "--html writes a file"),
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
