"""A survey of a list: every row is what the reports say, whatever becomes of a process is one row, and a survey that
was killed goes on."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from huggingface_hub import constants
from support import tiny
from support.hub_server import HubServer

from bf16_to_fp16 import UserError, cli
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.survey.checkpoints import Listed, read_list
from bf16_to_fp16.survey.page import render
from bf16_to_fp16.survey.rows import HEADER, Row
from bf16_to_fp16.survey.run import Room, Settings, survey
from bf16_to_fp16.survey.worker import check_disk
from bf16_to_fp16.wording import headroom, headroom_by_bound, reached, scientific

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable


def olmo2(folder: Path) -> Path:
    """Save a small OLMo 2, which no family has, that overflows."""
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 24, "intermediate_size": 32}
    ids = {"vocab_size": 97, "pad_token_id": 0, "eos_token_id": [1]}
    model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**ids, **shape, rms_norm_eps=1e-12))
    with torch.no_grad():
        model.model.layers[0].post_feedforward_layernorm.weight.fill_(1e5)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints, of which one has been cut short."""
    folder = tmp_path_factory.mktemp("sources")
    tiny.save(tiny.build("t5-encoder", num_layers=2), folder / "hot")
    tiny.save(tiny.build("umt5-encoder", num_layers=2), folder / "pipe" / "text_encoder")
    tiny.save(tiny.build("t5-encoder", factor=1.0, num_layers=2), folder / "calm")
    olmo2(folder / "olmo2")
    broken = tiny.save(tiny.build("t5-encoder", num_layers=2), folder / "broken") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    return folder


@pytest.fixture(scope="module")
def hub(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """Return a Hub with one checkpoint, which the environment names."""
    server = HubServer().start()
    server.add("org/hot", {p.name: p.read_bytes() for p in (sources / "hot").iterdir()}, private=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.endpoint)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(constants, "ENDPOINT", server.endpoint)
        yield server
    server.stop()


@pytest.fixture(autouse=True, scope="module")
def started_warm(warm_python: Path) -> Iterator[None]:
    """Let the processes of surveys begin with their imports done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_python))
        yield


@pytest.fixture(scope="module")
def surveyed(sources: Path, hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return the folder of a survey of all, two at a time, and its exit status."""
    folder = tmp_path_factory.mktemp("survey")
    entries = [
        {"source": "org/hot", "revision": "main"},
        {"source": str(sources / "pipe"), "subfolder": "text_encoder"},
        {"source": str(sources / "olmo2")},
        {"source": str(sources / "broken")},
        {"source": str(sources / "calm" / "model.safetensors")},
    ]
    (folder / "list.yaml").write_text(json.dumps(entries))
    return folder, cli.main(["survey", str(folder / "list.yaml"), str(folder / "out"), "--jobs", "2"])


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "survey.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def reports(folder: Path, row: int) -> dict[str, Any]:
    """Return the reports of a checkpoint by the name of their file, without its ending."""
    entry = read_list(folder / "list.yaml")[row]
    place = folder / "out" / "checkpoints" / entry.folder
    return {path.stem: json.loads(path.read_text()) for path in place.glob("*.json")}


def test_every_checkpoint_is_a_row_in_the_order_of_the_list(surveyed: tuple[Path, int], hub: HubServer) -> None:
    folder, status = surveyed
    rows = table(folder)
    assert status == 1  # one of them failed
    assert tuple(rows[0]) == HEADER
    assert [row["source"] for row in rows] == ["org/hot", "pipe", "olmo2", "broken", "model.safetensors"]
    assert [row["status"] for row in rows] == ["done", "done", "audit only", "failed", "done"]
    assert rows[0]["revision"] == hub.repos["org/hot"].branches["main"]
    assert rows[1]["subfolder"] == "text_encoder"
    assert "cut short" in rows[3]["error"] and not rows[3]["verdict"]
    assert rows[2]["family"] == "Olmo2ForCausalLM" and not rows[2]["verdict"] and not rows[2]["source_proven"]
    assert all(float(row["seconds"]) > 0 and 10**8 < int(row["peak_bytes"]) < 2 * 10**9 for row in rows)
    assert not list((folder / "out").rglob("*.safetensors"))
    assert {path.name for path in (folder / "out").iterdir()} == {"survey.html", "survey.csv", "checkpoints"}


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_row_is_what_the_reports_say(surveyed: tuple[Path, int], number: int) -> None:
    folder, _ = surveyed
    row, found = table(folder)[number], reports(folder, number)
    before, bounds, after = found["audit"], found["certificate"], found["fp16_report"]
    assert row["source_verdict"] == before["verdict"] == ("safe" if number == 4 else "unsafe")
    broken = [name for name, each in before["regimes"].items() if each["nonfinite"] or each["saturated"]]
    assert row["source_broken"] == " ".join(broken) and bool(broken) == (number != 4)
    # The site that came nearest to its limit, with the value that fp32 has for it where fp16 could hold none.
    sites = [s for each in before["regimes"].values() for s in each["sites"] if s["limit"] and not s["benign"]]
    largest = max((s.get("fp32") or s["amax"]) / s["limit"] for s in sites)
    assert float(row["source_largest"]) == largest * FP16_MAX and row["source_site"] in {s["name"] for s in sites}
    assert (largest > 1) == (number != 4)
    assert row["source_proven"] == str(bounds["certificate"]["holds"]).lower()
    assert (row["verdict"], row["proof"], row["target"]) == (after["verdict"], after["proof"], after["target"])
    assert row["verdict"] == "safe" and row["proof"] == "certified"
    assert float(row["headroom_bits"]) == min(each["headroom_bits"] for each in after["regimes"].values()) > 0
    assert float(row["bound_bits"]) == after["certificate"]["headroom_bits"]
    assert row["tiers"] == " ".join(f"{n}:{t['proof']}" for n, t in after["tiers"].items() if t["holds"])
    assert (float(row["error_bf16"]), float(row["error_fp16"])) == (
        after["fidelity"]["kl_bf16"],
        after["fidelity"]["kl_fp16"],
    )
    assert int(row["parameters"]) == after["weights"]["elements"]


class Cells(HTMLParser):
    """The text of every cell of a page, by row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        self.inside = self.inside or tag == "td"
        self.links += [str(value) for name, value in attrs if name == "href"]

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_the_page_says_what_the_table_has(surveyed: tuple[Path, int]) -> None:
    folder, _ = surveyed
    html = (folder / "out" / "survey.html").read_text()
    page = Cells(html)
    shown = [row for row in page.rows if row]
    assert "4 of 5 checkpoints surveyed, 1 failed." in html and "3 of 4" in html
    for cells, row in zip(shown, table(folder), strict=True):
        text = " ".join(cells)
        assert row["source"] in cells[0] and row["architecture"] in cells[0]
        if row["source_site"]:
            assert row["source_site"] in text and reached(float(row["source_largest"])) in text
        if row["status"] == "done":
            assert row["verdict"] in cells[3] and row["proof"] in cells[3]
            assert headroom(float(row["headroom_bits"])) in text
            assert headroom_by_bound(float(row["bound_bits"])) in text
            assert scientific(float(row["error_fp16"])) in text
        else:
            assert (row["error"] or row["status"]) in text
    links = [link for link in page.links if not link.startswith("data:")]
    assert len(links) == 7 and all((folder / "out" / link).is_file() for link in links)
    assert "default-src 'none'" in html and not re.search(r'(src|href)="(https?:)?//', html)


def test_a_second_survey_does_what_was_not_done_and_nothing_else(
    surveyed: tuple[Path, int], sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = surveyed
    before = table(folder)
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "out").rglob("result.json")}
    assert cli.main(["survey", str(folder / "list.yaml"), str(folder / "out"), "--json", "-"]) == 1
    printed = capsys.readouterr()
    assert "4 of 5 are done already" in printed.err
    assert [row["status"] for row in json.loads(printed.out)["checkpoints"]] == [row["status"] for row in before]
    again = {path for path, stamp in stamps.items() if path.stat().st_mtime_ns != stamp}
    assert [path.parent.name.startswith("broken") for path in again] == [True]
    assert [row for row in table(folder) if row["status"] != "failed"] == [r for r in before if r["status"] != "failed"]


def test_a_result_of_other_options_or_files_is_not_taken(
    surveyed: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bf16_to_fp16.survey import run, worker

    folder, _ = surveyed
    entry, out = read_list(folder / "list.yaml")[4], folder / "out"
    assert run.stored(entry, out, Settings()) is not None
    assert run.stored(entry, out, Settings(seed=1)) is None and run.stored(entry, out, Settings(keep=True)) is None
    weights = Path(entry.source)
    original = weights.read_bytes()
    weights.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    assert run.stored(entry, out, Settings()) is None
    weights.write_bytes(original)
    assert run.stored(entry, out, Settings()) is not None
    monkeypatch.setattr("bf16_to_fp16.environment.installed", lambda package: "9.9")
    assert worker.key_of(entry.source, None, None, {})["version"] == "9.9"
    assert run.stored(entry, out, Settings()) is None


# --- processes that die ----------------------------------------------------------------------------------------------


def workers(out: Path) -> list[psutil.Process]:
    """Return the processes that work on checkpoints of a survey."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if "bf16_to_fp16.survey.worker" in line and line[-1].startswith(str(out)):
            found.append(process)
    return found


def wait_for(what: Callable[[], Any]) -> Any:
    """Return what is true in the end."""
    began = time.monotonic()
    while not (result := what()):
        assert time.monotonic() - began < 120
        time.sleep(0.02)
    return result


def test_a_process_that_is_killed_is_one_row_and_the_others_go_on(sources: Path, tmp_path: Path) -> None:
    out, listed = tmp_path / "out", [Listed(source=str(sources / name)) for name in ("hot", "olmo2")]
    first = out / "checkpoints" / listed[0].folder

    def kill() -> None:
        wait_for((first / "audit.json").exists)  # in the middle of its work
        (process,) = [each for each in workers(out) if each.cmdline()[-1] == str(first)]
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    rows = survey(listed, out, Settings(), jobs=1)
    killer.join()
    assert [row.status for row in rows] == ["failed", "audit only"]
    assert rows[0].error is not None and "killed (SIGKILL), as the system does where memory runs out" in rows[0].error
    assert rows[0].architecture == "T5EncoderModel" and rows[0].parameters  # known before it died
    assert not list(out.rglob("*.safetensors")) and "SIGKILL" in (out / "survey.html").read_text()


def test_a_survey_that_is_killed_takes_its_processes_with_it_and_goes_on(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listing, out = tmp_path / "list.yaml", tmp_path / "out"
    listing.write_text(json.dumps([{"source": str(sources / name)} for name in ("olmo2", "hot")]))
    done, cut = (out / "checkpoints" / entry.folder for entry in read_list(listing))
    # Not warm: those would be ended with it by what has started them.
    line = [PYTHON, "-m", "bf16_to_fp16", "survey", str(listing), str(out), "--jobs", "1"]
    running = subprocess.Popen(line, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    wait_for((cut / "audit.json").exists)
    with pytest.raises(UserError, match="another survey is at work"):
        survey(read_list(listing), out, Settings())
    running.kill()
    running.communicate()
    wait_for(lambda: not workers(out))
    assert not (cut / "result.json").exists()
    stamp = (done / "result.json").stat().st_mtime_ns
    assert cli.main(["survey", str(listing), str(out), "--keep"]) == 0
    printed = capsys.readouterr()
    assert "1 of 2 are done already" in printed.err and (done / "result.json").stat().st_mtime_ns == stamp
    assert (cut / "converted" / "model.safetensors").exists()
    assert [row["status"] for row in csv.DictReader((out / "survey.csv").open())] == ["audit only", "done"]
    assert cli.main(["survey", str(listing), str(out)]) == 0 and "2 of 2 are done already" in capsys.readouterr().err
    listing.write_text(json.dumps([{"source": str(sources / "olmo2")}]))
    assert cli.main(["survey", str(listing), str(out), "--force"]) == 0
    assert (done / "result.json").stat().st_mtime_ns > stamp and (cut / "converted").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_survey_that_is_stopped_ends_its_processes_first(
    sources: Path, tmp_path: Path, number: int, status: int
) -> None:
    listing, out = tmp_path / "list.yaml", tmp_path / "out"
    listing.write_text(json.dumps([{"source": str(sources / name)} for name in ("olmo2", "hot", "calm")]))
    line = [sys.executable, "-m", "bf16_to_fp16", "survey", str(listing), str(out), "--jobs", "2"]
    running = subprocess.Popen(line, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    wait_for(lambda: len(workers(out)) == 2)
    running.send_signal(number)
    said = running.communicate()[1].decode()
    assert (running.returncode, "Traceback" in said, workers(out)) == (status, False, [])
    assert [row["status"] for row in csv.DictReader((out / "survey.csv").open())] == ["waiting"] * 3


def test_memory_is_given_to_as_many_as_it_holds_and_to_one_that_is_too_large_alone() -> None:
    room, most, lock = Room(10.0), [0.0, 0.0], threading.Lock()

    def take(needed: float) -> None:
        with room.of(needed):
            with lock:
                most[:] = max(most[0], sum(room.taken)), max(most[1], len(room.taken))
                assert sum(room.taken) <= 10 or len(room.taken) == 1
            time.sleep(0.01)

    threads = [threading.Thread(target=take, args=(needed,)) for needed in (4, 5, 25, 4, 5, 9, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 25 and most[1] >= 2 and room.taken == []


def test_a_disk_that_is_too_small_is_said_with_what_is_needed(tmp_path: Path) -> None:
    check_disk(tmp_path, 1)
    with pytest.raises(UserError, match=r"the converted weights take 2\.0 TB on the disk, and .* are free"):
        check_disk(tmp_path, 2 * 10**12)


# --- the list --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "this is empty"),
        ("source: org/a", "this is a section"),
        ("- org/a", "entry 1 is text (org/a); write `source: org/a`"),
        ("- source: org/a\n- 3", "entry 2 is a whole number (3)"),
        ("- source: org/a\n  revison: main", "entry 1 (org/a): unknown key revison; did you mean revision?"),
        ("- subfolder: a", "entry 1 (no source): source is missing"),
        ("- source: org/a\n  revision: 12", "entry 1 (org/a): revision is 12, a whole number; give text"),
        ("- source: ' '", "source is empty"),
        ("- source: org/a@v1", "write it under a key of its own, revision"),
        ("- source: no/such/folder", "entry 1: no/such/folder does not exist"),
        ("- source: .\n  revision: main", "entry 1: . is on this machine and has no revision"),
        ("- source: org/a\n- source: org/b\n- source: org/a", "entry 3 (org/a) is entry 1 once more"),
        ("- source: org/a\n  source: org/b", "the key source is given twice"),
        ("- [", "not YAML at line 1"),
    ],
)
def test_a_bad_list_is_one_line_and_nothing_is_begun(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.yaml").write_text(text)
    assert cli.main(["survey", str(tmp_path / "list.yaml"), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line and "list.yaml" in line
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_in_it_is_left_alone(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.yaml").write_text(f"- source: {sources / 'hot'}")
    assert cli.main(["survey", str(tmp_path / "list.yaml"), str(tmp_path)]) == 2
    assert "is not empty and holds no survey" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["list.yaml"]


def test_the_same_source_in_two_folders_has_two_folders_of_results() -> None:
    entries = [Listed(source="org/a"), Listed(source="org/a", subfolder="b"), Listed(source="org/a", revision="v1")]
    assert len({entry.folder for entry in entries}) == 3
    assert all(re.fullmatch(r"[\w.-]+", entry.folder) for entry in entries)


def test_pin_writes_commits_and_leaves_all_else(hub: HubServer, sources: Path, tmp_path: Path) -> None:
    commit = hub.repos["org/hot"].branches["main"]
    listing = tmp_path / "list.yaml"
    text = f"""# What we use
- source: org/hot  # the usual
- source: org/hot
  subfolder: a
  revision: "main" # to be pinned
- {{source: org/hot, subfolder: b}}
- source: {sources / "hot"}
- source: org/hot
  subfolder: c
  revision: {"0" * 39}f
"""
    listing.write_text(text)
    assert cli.main(["survey", str(listing), "--pin"]) == 0
    wanted = text.replace("# the usual", f"# the usual\n  revision: {commit}")
    wanted = (
        wanted.replace('"main"', commit)
        .replace("subfolder: b}", "subfolder: b}")
        .replace("{source: org/hot,", f"{{source: org/hot, revision: {commit},")
    )
    assert listing.read_text() == wanted
    assert [entry.revision for entry in read_list(listing)] == [commit, commit, commit, None, "0" * 39 + "f"]
    assert cli.main(["survey", str(listing), "--pin"]) == 0 and listing.read_text() == wanted


def test_pin_that_fails_writes_nothing(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = tmp_path / "list.yaml"
    listing.write_text("- source: org/hot\n- source: org/none\n")
    assert cli.main(["survey", str(listing), str(tmp_path / "out"), "--pin"]) == 2
    assert "org/none" in capsys.readouterr().err
    assert listing.read_text() == "- source: org/hot\n- source: org/none\n" and not (tmp_path / "out").exists()


def test_the_shipped_list_is_valid_and_says_what_is_not_pinned() -> None:
    path = ROOT / "recipes" / "published.yaml"
    listed = read_list(path)
    assert len(listed) == 30 and all(entry.local is None for entry in listed)
    pinned = [entry for entry in listed if entry.revision != "main"]
    assert all(re.fullmatch("[0-9a-f]{40}", entry.revision or "") for entry in pinned)
    assert len(pinned) < 30 and "--pin" in path.read_text()


def test_the_columns_are_those_of_the_page_of_the_docs() -> None:
    text = (ROOT / "docs" / "survey.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(name, field.description) for name, field in Row.model_fields.items()]


def test_names_from_other_peoples_files_are_text_on_the_page() -> None:
    evil = "<script>alert(1)</script>"
    row = Row(source=evil, status="failed", error=evil, architecture=evil, source_verdict="unsafe", source_site=evil)
    html = render([row.model_copy(update={"source_largest": 1e5})])
    assert "<script>" not in html and html.count("&lt;script&gt;") >= 4
