"""``recipes/survey.py``: every row is what a report says, a failure is one row, and a second run does what is left."""

import csv
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tiny

ROOT = Path(__file__).parents[1]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("survey", ROOT / "recipes" / "survey.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


survey = script()


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "survey.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_checkpoint_that_fails_is_a_row_and_the_next_run_does_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], warm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(warm_python))  # of which the peak is that of a bare interpreter
    hot = tiny.save(tiny.build("t5-encoder", num_layers=2), tmp_path / "pipe" / "hot")
    broken = tmp_path / "broken"
    tiny.save(tiny.build("t5-encoder", num_layers=2), broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-100])
    listing, out = tmp_path / "list.yaml", tmp_path / "out"
    listing.write_text(f"- source: {broken}\n- source: {hot.parent}\n  subfolder: hot\n")

    assert survey.main([str(listing), str(out), "--", "--device", "cpu"]) == 1
    failed, done = rows_of(out)
    assert (failed["status"], failed["verdict"], failed["source"]) == ("failed", "", "broken")
    assert "model.safetensors" in failed["error"] and not failed["error"].startswith("error")
    assert float(failed["seconds"]) > 0 and int(failed["peak_bytes"]) > 1e6
    (folder,) = (out / "checkpoints").glob("pipe-*")
    report = json.loads((folder / "fp16_report.json").read_text())
    largest = max(signal["before"] for signal in report["signals"])
    assert (done["status"], done["subfolder"], done["verdict"]) == ("done", "hot", report["verdict"])
    assert float(done["source_largest"]) == largest > survey.FP16_MAX
    assert float(done["bound_bits"]) == report["certificate"]["headroom_bits"]
    assert float(done["error_fp16"]) == report["fidelity"]["kl_fp16"]
    assert done["tiers"].split() == [f"{k}:{t['proof']}" for k, t in report["tiers"].items() if t["holds"]]
    assert not (folder / "converted").exists() and (folder / "log.txt").is_file()
    page = (out / "survey.html").read_text()
    assert "1 of 2 converted, 1 of them safe in fp16, 1 failed." in page and failed["error"][:20] in page
    (link,) = re.findall('href="(.+?)"', page)
    assert (out / link).read_text().startswith("<!DOCTYPE html>")
    assert str(tmp_path) not in page.replace(failed["error"], "")

    written = (folder / "fp16_report.json").stat().st_mtime_ns
    (broken / "model.safetensors").write_bytes(weights)
    assert survey.main([str(listing), str(out), "--keep", "--", "--device", "cpu"]) == 0
    assert [row["status"] for row in rows_of(out)] == ["done", "done"]
    assert (folder / "fp16_report.json").stat().st_mtime_ns == written
    assert next((out / "checkpoints").glob("broken-*/converted/model.safetensors")).is_file()
    assert capsys.readouterr().err.count("broken: ") == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a list is made of entries"),
        ("source: org/a", "a list is made of entries"),
        ("- org/a", "entry 1 is org/a; give text for source"),
        ("- source: org/a\n  revison: main", "entry 1 is {'source': 'org/a', 'revison': 'main'}"),
        ("- source: org/a\n  revision: 12", "entry 1 is"),
        ("- source: org/a\n- source: org/b\n- source: org/a", "entry 3 (org/a) is there twice"),
        ("- [", "while parsing"),
    ],
)
def test_a_bad_list_is_one_line_and_nothing_is_begun(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.yaml").write_text(text)
    assert survey.main([str(tmp_path / "list.yaml"), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "out").exists()


def test_every_source_and_every_set_of_options_has_a_folder_of_its_own() -> None:
    entries = [{"source": "org/a"}, {"source": "org/a", "subfolder": "b"}, {"source": "org/a", "revision": "v1"}]
    folders = [survey.folder_of(entry, options, Path()) for entry in entries for options in ([], ["--no-audit"])]
    assert len(set(folders)) == 6 and all(re.fullmatch(r"[\w.-]+", folder.name) for folder in folders)


def test_the_shipped_list_is_valid() -> None:
    entries = survey.read_list(ROOT / "recipes" / "published.yaml")
    assert len(entries) == 31 and all(re.fullmatch("main|[0-9a-f]{40}", entry["revision"]) for entry in entries)


def test_infinite_numbers_and_names_from_other_peoples_files_reach_the_page_as_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    row = dict.fromkeys(survey.COLUMNS) | {"name": evil, "source": evil, "status": "failed", "error": evil}
    done = row | {"status": "done", "source_largest": survey.real("1.7976931348623157e308"), "source_site": evil}
    survey.write(tmp_path, [row, done])
    page = (tmp_path / "survey.html").read_text()
    assert "<script>" not in page and page.count("&lt;script&gt;") == 4 and ">inf<" in page
    assert [row["source_largest"] for row in rows_of(tmp_path)] == ["", "inf"]
