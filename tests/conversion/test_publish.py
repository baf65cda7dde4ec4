"""Publishing: what goes up is what was converted, and every fault is a line with its remedy; the token is nowhere."""

import io
import json
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard, constants, snapshot_download
from support import tiny
from support.folders import rewritten
from support.forging import flip, forge
from support.hub_server import OTHER, READER, WRITER, Fault, HubServer
from support.pipelines import contents

from bf16_to_fp16 import UserError, cli, convert, publish, verify
from bf16_to_fp16.checkpoint.folder import records
from bf16_to_fp16.conversion.publish import MESSAGE
from bf16_to_fp16.progress import Progress

Run = Callable[..., tuple[int, str, str]]
Send = Callable[..., Any]
TOKENIZER = "tokenizer_config.json"
TOKENS = re.compile("|".join((WRITER, READER, OTHER)))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("a-private-place")
    source = tiny.save(tiny.build("t5-encoder", num_layers=2), root / "summariser", max_shard_size="12KB")
    (source / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# Theirs\n")
    (source / TOKENIZER).write_text("{}")
    assert convert(source, root / "out", run_model=False).safe  # so that no upload repeats an audit
    return root / "out"


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "copy"))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    noted: list[float] = []
    monkeypatch.setattr(time, "sleep", noted.append)
    return noted


@pytest.fixture
def run(hub: HubServer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Run:
    """Run the command line against the server and return its status, output and errors, none of which hold a token."""
    caplog.set_level(logging.DEBUG)
    for name in ("huggingface_hub", "httpx2", "httpcore2", "httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, logger=name)

    def run(*arguments: object) -> tuple[int, str, str]:
        caplog.clear()
        capsys.readouterr()  # what was said while the test made its model
        status = cli.main([*map(str, arguments)])
        printed = capsys.readouterr()
        assert not TOKENS.search(printed.out + printed.err + caplog.text)
        assert hub.leaks == []  # what is stored elsewhere is not sent the token
        return status, printed.out, printed.err

    return run


@pytest.fixture
def send(
    hub: HubServer,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Send:
    """Publish a folder whose audit was run once already; the result, or the line of the error. No token anywhere."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("bf16_to_fp16.conversion.publish.check_contents", lambda *_, **__: None)

    def send(folder: Path, **options: Any) -> Any:
        result: Any
        try:
            result = publish(folder, "me/out", endpoint=hub.endpoint, progress=Progress(), **options)
        except UserError as error:
            assert error.__cause__ is None  # its request would have the token in its headers
            result = str(error)
            assert "\n" not in result
        printed = capsys.readouterr()
        assert not TOKENS.search(printed.out + printed.err + caplog.text + str(result))
        return result

    return send


def error_of(result: tuple[int, str, str]) -> str:
    status, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (status, out, len(lines)) == (2, "", 1) and err.splitlines()[-1] == lines[0]
    return lines[0]


def upload(run: Run, folder: Path, *options: object, repo: str = "me/out") -> tuple[int, str, str]:
    """Publish without a question and print JSON, so that nothing else is on standard output."""
    return run("publish", folder, repo, "-y", "--json", "-", *options)


def test_every_byte_is_published_and_a_second_run_has_nothing_to_do(run: Run, hub: HubServer, folder: Path) -> None:
    status, out, _ = upload(run, folder)
    result = json.loads(out)
    assert status == 0 and hub.repos["me/out"].private and hub.repos["me/out"].messages == ["initial", MESSAGE]
    assert sorted(result["uploaded"]) == sorted(contents(folder))
    assert result["commit"] == hub.repos["me/out"].branches["main"] and result["private"] is True
    assert result["url"] == f"{hub.endpoint}/me/out" and result["verdict"] == "safe"
    down = Path(snapshot_download("me/out", endpoint=hub.endpoint, token=WRITER))
    assert contents(down) == contents(folder) | {".gitattributes": contents(down)[".gitattributes"]}
    for name, data in hub.files("me/out").items():
        assert b"a-private-place" not in data and str(Path.home()).encode() + b"/" not in data, name
    assert hub.count("^PUT ") == 2
    assert constants.HF_HUB_DISABLE_XET is False
    hub.seen.clear()
    status, out, err = upload(run, folder)
    assert status == 0 and json.loads(out)["uploaded"] == [] and "has all of it already" in err
    assert len(hub.repos["me/out"].messages) == 2 and hub.count("^(PUT|POST) ") == 0


def test_a_dry_run_sends_nothing(run: Run, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    status, out, _ = run("publish", folder, "me/out", "--dry-run")
    assert status == 0 and hub.seen == [] and "nothing was uploaded" in out
    for name in contents(folder):
        assert name in out
    size = (folder / "model-00001-of-00002.safetensors").stat().st_size
    assert f"{size / 1000:.1f} kB" in out
    assert out.startswith("private: an existing public repository is refused")
    assert run("publish", folder, "me/out", "--dry-run", "--public")[1].startswith("public: everyone can read")
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert "give -y" in run("publish", folder, "me/out")[2] and hub.seen == []  # where nobody can be asked


@pytest.mark.parametrize(("answer", "made"), [("n", False), ("y", True)])
def test_the_question_decides(
    run: Run, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, made: bool
) -> None:
    typed = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    status, out, err = run("publish", folder, "me/out")
    assert status == 0 and ("me/out" in hub.repos) is made and "private repository" in out + err
    assert ("nothing was uploaded" in out) is not made


def test_a_name_without_namespace_is_ones_own_and_public_only_if_asked(run: Run, hub: HubServer, folder: Path) -> None:
    assert upload(run, folder, "--public", repo="out")[0] == 0 and set(hub.repos) == {"me/out"}
    assert not hub.repos["me/out"].private
    assert "me/out is not private, so nothing was uploaded; give --public" in error_of(upload(run, folder))


def test_a_repository_that_turns_out_public_gets_no_byte(send: Send, hub: HubServer, converted: Path) -> None:
    """A server may not do as ``create`` asks."""

    def made_public() -> None:
        for repo in hub.repos.values():
            repo.private = False

    hub.before = made_public
    assert "me/out is not private, so nothing was uploaded" in send(converted)
    assert hub.count("^POST /api/repos/create") == 1
    assert hub.files("me/out") == {} and not hub.objects and hub.count("^PUT ") == 0


def test_a_pull_request_leaves_the_branch_alone(run: Run, hub: HubServer, folder: Path) -> None:
    theirs = {"model.safetensors": b"theirs", "README.md": b"# Theirs"}
    hub.add("them/model", theirs, private=False)
    status, out, _ = upload(run, folder, "--create-pr", "--public", repo="them/model")
    assert status == 0 and json.loads(out)["pull_request"] == f"{hub.endpoint}/them/model/discussions/1"
    assert hub.files("them/model") == theirs
    assert hub.files("them/model", "refs/pr/1") == theirs | contents(folder)


@pytest.mark.usefixtures("waits")
def test_no_fault_opens_a_second_pull_request(send: Send, hub: HubServer, converted: Path) -> None:
    hub.add("me/out", {})
    assert send(converted, create_pr=True)["pull_request"].endswith("/discussions/1")
    hub.faults[:] = [Fault("GET", "/api/models/", 503, times=99)]
    assert "answers 503; run the same command again" in send(converted, create_pr=True)
    assert [branch for branch in hub.repos["me/out"].branches if "pr" in branch] == ["refs/pr/1"]


def test_a_branch_must_exist_and_then_gets_the_files(send: Send, run: Run, hub: HubServer, converted: Path) -> None:
    assert "me/out@fp16 is neither a folder here nor a repository" in send(converted, revision="fp16")
    repo = hub.add("me/out", {})
    assert "me/out has no revision 'fp16'" in error_of(upload(run, converted, "--revision", "fp16"))
    repo.branches["fp16"] = repo.branches["main"]
    assert send(converted, revision="fp16")["uploaded"]
    assert hub.files("me/out", "fp16") == contents(converted) and hub.files("me/out") == {}


def test_other_content_is_left_alone_unless_it_is_to_be_replaced(send: Send, hub: HubServer, converted: Path) -> None:
    hub.add("me/out", {"tf_model.h5": b"old", "config.json": b"{}", "README.md": b"# Mine"})
    line = send(converted)
    assert "me/out exists with other content (README.md, config.json)" in line and "--force" in line
    assert hub.files("me/out")["tf_model.h5"] == b"old" and hub.count("^(PUT|POST) ") == 0
    hub.add("me/out", {"tf_model.h5": b"old", "notes.txt": b"mine", "config.json": b"{}", "pytorch_model.bin": b"old"})
    assert send(converted, force=True)["kept"] == ["pytorch_model.bin", "tf_model.h5"]
    stayed = {"tf_model.h5": b"old", "pytorch_model.bin": b"old", "notes.txt": b"mine"}
    assert hub.files("me/out") == contents(converted) | stayed
    again = send(converted)
    assert again["uploaded"] == [] and again["kept"] == ["pytorch_model.bin", "tf_model.h5"]
    assert hub.repos["me/out"].messages.count(MESSAGE) == 1


def test_weights_that_would_be_loaded_instead_stand_in_the_way(run: Run, hub: HubServer, folder: Path) -> None:
    hub.add("me/single", {"model.safetensors": b"old"})
    said = error_of(upload(run, folder, "--force", repo="me/single"))
    assert "has a model.safetensors, which from_pretrained would load instead of the shards" in said
    assert hub.files("me/single") == {"model.safetensors": b"old"}


def test_the_report_has_every_files_hash_and_every_version(converted: Path) -> None:
    report = json.loads((converted / "fp16_report.json").read_text())
    listed = {entry["name"]: (entry["nbytes"], entry["sha256"]) for entry in report["output"]["files"]}
    there = {str(entry["name"]): (entry["nbytes"], entry["sha256"]) for entry in records(converted)}
    del there["fp16_report.json"]
    assert listed == there
    source = converted.parent / "summariser"
    hashes = report["source"]["sha256"] | report["source"]["other_sha256"]
    assert hashes == {str(entry["name"]): entry["sha256"] for entry in records(source)}
    assert all(report["environment"]["versions"].values())


def test_a_card_that_was_edited_goes_up_with_its_own_hash(run: Run, hub: HubServer, folder: Path) -> None:
    card = (folder / "README.md").read_text() + "\nMore of mine.\n"
    (folder / "README.md").write_text(card)
    assert "edited since the conversion" in run("publish", folder, "me/out", "-y")[1]
    assert hub.files("me/out")["README.md"].decode() == card
    found = verify("me/out", endpoint=hub.endpoint, run_model=False)
    assert found["verified"] and "edited before it was published" in found["notes"][-1]


def test_a_checkpoint_below_a_repository_is_verified_by_its_folders_name(hub: HubServer, folder: Path) -> None:
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub.add("me/pipeline", {f"text_encoder_2/{name}": content for name, content in files.items()} | {"x": b""})
    with pytest.raises(UserError, match="folders inside it do; give --subfolder text_encoder_2"):
        verify("me/pipeline", endpoint=hub.endpoint)
    below = verify("me/pipeline", subfolder="text_encoder_2", endpoint=hub.endpoint, run_model=False)
    assert below["verified"] and below["source"]["revision"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: flip(f / "model-00001-of-00002.safetensors"), "of-00002.safetensors: was changed, damaged or cut"),
        (lambda f: (f / TOKENIZER).unlink(), f"{TOKENIZER}: is missing"),
        (lambda f: (f / "notes.txt").write_text("x"), "notes.txt: is not in the report"),
        (lambda f: (f / TOKENIZER).unlink() or (f / TOKENIZER).symlink_to(__file__), "outside the folder"),
        (lambda f: (f / "fp16_report.json").unlink(), "saved again, without fp16_report.json"),
        (lambda f: (f / "fp16_report.json").write_text("{}"), "schema None is not 1"),
    ],
)
def test_a_folder_that_is_not_what_its_report_says_does_not_leave(
    run: Run, hub: HubServer, folder: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(folder)
    assert said in error_of(upload(run, folder)) and hub.seen == []


def enlarge(folder: Path, part: str, by: float, dtype: torch.dtype) -> None:
    for shard in folder.glob("*.safetensors"):
        with rewritten(shard) as weights:
            for key in (key for key in weights if key.endswith(part)):
                weights[key] = (weights[key].float() * by).clamp(-60000, 60000).to(dtype)


def overflowing(folder: Path) -> None:
    """Make the weights overflow and the report agree with them, but for its verdict."""
    enlarge(folder, "o.weight", 2.0**17, torch.float16)  # o and wo
    forge(folder, views=False)


@pytest.mark.usefixtures("first_batch")
def test_the_audit_is_repeated_and_unsafe_is_told(run: Run, hub: HubServer, converted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    convert(converted.parent / "summariser", folder)
    overflowing(folder)
    line = error_of(upload(run, folder))
    assert "is unsafe in fp16" in line and "--allow-unsafe" in line and hub.repos == {}
    status, out, _ = upload(run, folder, "--allow-unsafe")
    assert status == 1 and json.loads(out)["verdict"] == "unsafe"
    up = hub.files("me/out")
    assert ModelCard(up["README.md"].decode()).text.lstrip().startswith("> **Unsafe in fp16.** Overflows in ")
    assert ModelCard(up["README.md"].decode()).data.get("license") == "mit"
    assert json.loads(up["fp16_report.json"])["verdict"] == "unsafe" and b"Unsafe in fp16" in up["fp16_report.html"]
    problems = verify("me/out", endpoint=hub.endpoint)["problems"]
    assert {p["check"] for p in problems} == {"certificate", "audit", "report"}
    assert any("inf/NaN" in p["reason"] and "finetune" in p["remedy"] for p in problems)


def test_where_nothing_was_run_the_certificate_is_computed_again(hub: HubServer, folder: Path) -> None:
    published: Any = publish(folder, "me/out", endpoint=hub.endpoint)
    assert published["verdict"] == "safe"
    overflowing(folder)
    with pytest.raises(UserError, match=r"unsafe in fp16 \(certificate\.holds: the report says True"):
        publish(folder, "me/other", endpoint=hub.endpoint)
    assert set(hub.repos) == {"me/out"}
    assert publish(folder, "me/other", endpoint=hub.endpoint, allow_unsafe=True)["verdict"] == "unsafe"
    assert b"**Unsafe in fp16.**" in hub.files("me/other")["README.md"]


@pytest.mark.parametrize("given", [False, True])
def test_the_token_does_not_leave(given: bool, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if given:
        monkeypatch.delenv("HF_TOKEN")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n" + "x" * 50_000 + WRITER)
    with pytest.raises(UserError, match=r"README\.md holds your token") as caught:
        publish(folder, "me/out", endpoint=hub.endpoint, token=WRITER if given else None)
    assert WRITER not in str(caught.value) and hub.seen == []


@pytest.mark.parametrize(
    "name", ["a/b/c", "me/", "/out", "me/a b", "me/-out", "me/out.git", "me/o--ut", "me/" + "x" * 97, "../out"]
)
def test_a_name_that_cannot_be_is_refused(run: Run, hub: HubServer, folder: Path, name: str) -> None:
    assert "is not a name for a repository; use namespace/name" in error_of(upload(run, folder, repo=name))
    assert hub.seen == []


@pytest.mark.parametrize(("token", "said"), [("", "not logged in"), ("hf_wrong", "does not accept the token")])
def test_without_a_token_that_the_hub_knows_it_says_how_to_log_in(
    token: str, said: str, run: Run, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    line = error_of(upload(run, folder))
    assert said in line and "hf auth login" in line and "hf_wrong" not in line and (hub.seen == []) is (token == "")


def test_a_reading_token_is_one_line(run: Run, hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    assert "no permission to write to me/new" in error_of(upload(run, folder, repo="me/new"))
    hub.add("me/out", {})
    line = error_of(upload(run, folder))
    # This server repeats the token in its message; it is cut out.
    assert "no permission to write to me/out" in line and "Bearer …" in line and "--create-pr" in line


@pytest.mark.parametrize(
    ("fault", "waited"),
    [
        (Fault("POST", "/commit/", 429), 1),
        (Fault("PUT", "/lfs/", 429, {"Retry-After": "7"}), 8),  # the client adds a second
        (Fault("POST", "/api/repos/create", 500), 1),
        (Fault("GET", "/api/models/me/out", 500, times=3), 16),
        (Fault("POST", "/objects/batch", 502), 1),
        (Fault("PUT", "/lfs/", cut=9000), 1),
    ],
    ids=lambda value: f"{value.method}-{value.path}-{value.status}" if isinstance(value, Fault) else None,
)
def test_a_passing_fault_is_waited_for(
    send: Send, hub: HubServer, converted: Path, waits: list[float], fault: Fault, waited: float
) -> None:
    hub.faults.append(Fault(**vars(fault)))
    assert send(converted)["commit"] == hub.repos["me/out"].branches["main"] and waited in waits
    assert hub.faults[0].times == 0 and hub.files("me/out") == contents(converted)
    assert len(hub.repos["me/out"].messages) == 2  # never committed twice


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("GET", "/api/models/", 500, times=99), "answers 500; run the same command again later"),
        (Fault("PUT", "/lfs/", cut=9000, times=99), "the connection to"),
        (Fault("POST", "/commit/", 429, times=99), "answers 429; run the same command again later"),
        (Fault("POST", "/api/repos/create", 409, body={"error": "exists"}), "was changed by someone else meanwhile"),
        (Fault("POST", "/commit/", 412, body={"error": "no"}), "was changed by someone else meanwhile"),
        (Fault("POST", "/commit/", 403, body={"error": "no"}), "no permission to write to me/out"),
        (Fault("POST", "/commit/", 401, body={"error": "no"}), "does not accept the token"),
        (Fault("POST", "/commit/", 413, body={"error": "quota"}), "no more room for me/out"),
        (Fault("POST", "/commit/", 418, body={"error": f"odd {WRITER}"}), "answers 418"),
    ],
    ids=lambda value: f"{value.method}-{value.path}-{value.status}" if isinstance(value, Fault) else None,
)
def test_a_lasting_fault_is_one_line_with_its_remedy(
    send: Send, hub: HubServer, converted: Path, waits: list[float], fault: Fault, said: str
) -> None:
    hub.faults.append(Fault(**vars(fault)))
    line = send(converted)
    assert said in line and ";" in line
    assert "me/out" not in hub.repos or hub.files("me/out") == {}  # all of it or nothing


def test_a_broken_upload_goes_on_where_it_was(send: Send, hub: HubServer, converted: Path, waits: list[float]) -> None:
    name = "model-00002-of-00002.safetensors"
    report = json.loads((converted / "fp16_report.json").read_text())
    second = next(entry["sha256"] for entry in report["output"]["files"] if entry["name"] == name)
    hub.faults.append(Fault("PUT", f"/lfs/{second}", cut=5000, times=99))
    assert "it goes on where it stopped" in send(converted)
    assert len(hub.objects) == 1
    hub.faults.clear()
    hub.seen.clear()
    assert send(converted)["uploaded"] and hub.files("me/out") == contents(converted)
    assert hub.count("^PUT ") == 1


def test_what_someone_else_commits_meanwhile_stays(
    send: Send, hub: HubServer, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preupload = huggingface_hub.HfApi.preupload_lfs_files

    def meanwhile(self: Any, *args: Any, **options: Any) -> None:
        preupload(self, *args, **options)
        repo = hub.repos["me/out"]
        if len(repo.messages) == 1:
            repo.commit({"theirs.txt": b"theirs"}, "theirs", "main")

    monkeypatch.setattr(huggingface_hub.HfApi, "preupload_lfs_files", meanwhile)
    assert "was changed by someone else meanwhile" in send(converted)
    assert hub.files("me/out") == {"theirs.txt": b"theirs"}


def test_an_endpoint_out_of_reach_is_asked_alone_and_told_in_one_line(run: Run, hub: HubServer, folder: Path) -> None:
    for command in (("publish", folder, "me/out", "-y"), ("verify", "me/out")):
        line = error_of(run(*command, "--json", "-", "--endpoint", "http://127.0.0.1:9"))
        assert "the Hub cannot be reached; check the name and the network" in line and hub.seen == []


def test_a_card_that_the_hub_refuses_is_one_line(send: Send, hub: HubServer, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: my-own\n---\n# Mine\n")
    line = send(folder)
    assert 'the Hub refuses README.md: "license" must be' in line and "metadata" in line
    assert hub.files("me/out") == {}


def test_what_is_unsafe_is_published_only_if_allowed(run: Run, hub: HubServer, converted: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(converted.parent / "summariser", tmp_path / "source"))
    enlarge(source, "wi_0.weight", 1e5, torch.bfloat16)  # what enters the gate, which no exact exponent moves
    assert run("convert", source, tmp_path / "out", "--exact", "--no-audit")[0] == 1
    assert "is unsafe in fp16 (its report says so)" in error_of(upload(run, tmp_path / "out"))
    assert upload(run, tmp_path / "out", "--allow-unsafe")[0] == 1
    # A card of one's own does not hide it.
    (tmp_path / "out" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert upload(run, tmp_path / "out", "--allow-unsafe", repo="me/mine")[0] == 1
    for repo in ("me/out", "me/mine"):
        card = ModelCard(hub.files(repo)["README.md"].decode()).text
        assert card.lstrip().startswith("> **Unsafe in fp16.**")
