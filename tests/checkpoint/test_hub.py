"""Reading from a Hub: convert, audit and verify take a Hub id, resume what broke, and say in a line what is wrong."""

import io
import json
import re
import time
from collections import namedtuple
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants, file_download, snapshot_download
from safetensors.torch import save
from support import tiny
from support.hub_server import OTHER, WRITER, Fault, HubServer
from support.pipelines import contents
from support.program import refused

from bf16_to_fp16 import UserError, cli, convert, verify
from bf16_to_fp16.checkpoint import hub as hub_module
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.checkpoint.sources import local_source
from bf16_to_fp16.conversion import locating

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "theirs"
    tiny.save(tiny.build("t5-encoder", num_layers=2), folder, max_shard_size="12KB")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Theirs\n")
    return folder


@pytest.fixture
def hub(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    hub.add("org/theirs", contents(source), private=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return hub


def error_at(source: str, hub: HubServer) -> str:
    with pytest.raises(UserError) as caught:
        open_checkpoint(source, endpoint=hub.endpoint)
    assert "\n" not in str(caught.value) and WRITER not in str(caught.value) and caught.value.__cause__ is None
    return str(caught.value)


def test_a_hub_id_is_converted_and_published(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", "org/theirs", "theirs-fp16", "--no-audit", "--json", "-"]) == 0
    printed = capsys.readouterr()
    report, commit = json.loads(printed.out), hub.repos["org/theirs"].branches["main"]
    assert report["source"]["path"] == "org/theirs" and report["source"]["revision"] == commit
    assert cli.main(["publish", "theirs-fp16", "me/theirs-fp16", "--yes", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["url"] == f"{hub.endpoint}/me/theirs-fp16"
    assert WRITER not in printed.out + printed.err
    up = hub.files("me/theirs-fp16")
    assert up == contents(tmp_path / "theirs-fp16") and hub.repos["me/theirs-fp16"].private
    card = up["README.md"].decode()
    assert "base_model: org/theirs\n" in card and "license: apache-2.0\n" in card and "language:\n- en\n" in card
    down = Path(snapshot_download("me/theirs-fp16", endpoint=hub.endpoint, token=WRITER))
    assert {n: d for n, d in contents(down).items() if n != ".gitattributes"} == up
    result = verify("me/theirs-fp16", original="org/theirs", endpoint=hub.endpoint, run_model=False)
    assert result["verified"] and result["checks"]["replay"] == "passed"
    assert result["source"] == {"path": "me/theirs-fp16", "revision": hub.repos["me/theirs-fp16"].branches["main"]}
    assert hub.count("^GET /cdn/") >= 2 and hub.leaks == []  # the token of what is private went nowhere else


def test_a_broken_download_goes_on_where_it_was(hub: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what came whole is kept
    hub.faults.append(Fault("GET", "/cdn/", cut=4000, times=2))
    checkpoint = open_checkpoint("org/theirs", endpoint=hub.endpoint)
    weights = {name: data for name, data in contents(source).items() if name.endswith(".safetensors")}
    assert {p.name: p.read_bytes() for p in checkpoint.weight_files} == weights
    assert hub.faults[0].times == 0 and hub.ranges == 2


def test_a_passing_fault_is_waited_for_a_lasting_one_told(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "WAITS", (0.0, 0.0, 0.0))
    hub.faults.append(Fault("GET", "/api/models/", 500, times=99))
    assert "answers 500; run the same command again later" in error_at("org/theirs", hub)
    hub.faults.clear()
    hub.faults.append(Fault("GET", "/api/models/org/theirs/revision", 500, times=2))
    hub.faults.append(Fault("GET", "/tree/", 429))
    assert open_checkpoint("org/theirs", endpoint=hub.endpoint).revision and not any(f.times for f in hub.faults)


def test_weights_are_of_the_commit_of_the_config(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, modules = hub.repos["org/theirs"], hub_module.module_folders

    def meanwhile(folder: Path) -> list[str]:
        theirs.commit({"config.json": b"{}"}, "theirs", "main")
        return modules(folder)

    monkeypatch.setattr(hub_module, "module_folders", meanwhile)
    first = theirs.branches["main"]
    opened = open_checkpoint("org/theirs", endpoint=hub.endpoint)
    assert opened.revision == opened.folder.name == first != theirs.branches["main"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"model_type": "t5", "architectures": ["T5Model"], "num_layers": 0}, "'num_layers' is 0, not a number"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_before_weights_are_fetched(
    config: dict[str, object], said: str, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": b"weights"}
    hub.add("org/other", files, private=False)
    for command in (("convert", "org/other", tmp_path / "out"), ("certify", "org/other")):
        assert f"error: org/other/config.json: {said}" in refused(capsys, *command)
    assert hub.count("^GET /.*safetensors") == hub.count("^GET /cdn/") == 0 and hub.count("^GET /.*config.json")


def test_an_address_is_repeated_as_it_was_given() -> None:
    for address in ("https://huggingface.co/google/flan-t5-base", "https://example.org/a"):
        with pytest.raises(UserError, match=f"^{re.escape(address)} does not exist; give the folder of a checkpoint"):
            local_source(address)


def test_what_cannot_be_read_is_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("them/secret", {}, private=True)
    none = error_at("org/none", hub)
    assert "org/none is neither a folder here nor a repository" in none and "check the name, or log in" in none
    assert "org/none@v1 is neither a folder here nor a repository" in error_at("org/none@v1", hub)
    assert "them/secret is neither a folder here nor a repository" in error_at("them/secret", hub)
    assert "org/theirs has no revision 'v9'" in error_at("org/theirs@v9", hub)
    commit = hub.repos["org/theirs"].branches["main"]
    assert open_checkpoint(f"org/theirs@{commit}", endpoint=hub.endpoint).revision == commit
    hub.faults.append(Fault("GET", "/api/models/org/theirs", 403, {"X-Error-Code": "GatedRepo"}))
    assert "org/theirs is gated" in error_at("org/theirs", hub)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token" in error_at("org/theirs", hub)


def fetched(hub: HubServer, files: dict[str, bytes]) -> list[str]:
    """Return what is fetched of a repository with these files, in which a tensor w is found."""
    name = f"org/other{len(hub.repos)}"
    hub.add(name, files | {"config.json": b"{}"}, private=False)
    opened = open_checkpoint(name, endpoint=hub.endpoint)
    assert list(opened.tensors) == ["w"] and opened.read("w").tolist() == [1.0, 1.0]
    return sorted(contents(opened.folder))


def test_only_what_stock_code_would_read_is_fetched(hub: HubServer) -> None:
    modules = json.dumps([{"path": ""}, {"path": "2_Dense"}]).encode()
    files = {"modules.json": modules, "model.safetensors": save({"w": torch.ones(2)})}
    files |= dict.fromkeys(("2_Dense/model.safetensors", "README.md", "spiece.model", "chat_template.jinja"), b"x")
    files |= {"additional_chat_templates/tool_use.jinja": b"tools"}
    others = dict.fromkeys(("model.fp16.safetensors", "pytorch_model.bin", "tf_model.h5"), b"x")
    assert fetched(hub, files | others) == sorted([*files, "config.json"])
    shards = {"model.safetensors.index.json": b'{"weight_map": {"w": "shard.safetensors"}}'}
    shards |= {"shard.safetensors": files["model.safetensors"]}
    assert fetched(hub, shards | {"pytorch_model.bin": b"x"}) == ["config.json", *shards]
    pickled = io.BytesIO()
    torch.save({"w": torch.ones(2)}, pickled)
    assert fetched(hub, {"pytorch_model.bin": pickled.getvalue()}) == ["config.json", "pytorch_model.bin"]


PAGE = b"<!DOCTYPE html><html><body>Log in</body></html>"
NO_REVISION: tuple[object, ...] = (PAGE, b'{"sha": "12', b"\xff\xfe", [], {"siblings": [{"size": 3}]})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/revision/", body) for body in NO_REVISION),
        ("/revision/", {"id": "org/theirs", "sha": "../..", "siblings": 3}),
        *(("/tree/", body) for body in (PAGE, b'[{"type": "file", ', {"error": "none"}, [3])),
        ("/tree/", [{"type": "file", "path": "config.json"}]),
        ("/tree/", [{"type": "file", "path": "config.json", "size": "x", "oid": "1"}]),
        *(("/resolve/", body) for body in (PAGE, b'{"model_type": "t5", ')),
    ],
)
def test_a_hub_that_answers_nonsense_is_one_line(
    path: str, body: object, hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults += [Fault("GET", path, 200, body=body, times=99), Fault("HEAD", path, 200, body=body, times=99)]
    assert WRITER not in refused(capsys, "convert", "org/theirs", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_local_fault_is_not_the_hubs_and_shows_no_password(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for fault, said in (
        (OSError(28, "No space left on device"), "the disk is full; free some space, or set HF_HOME"),
        (NotADirectoryError(20, "Not a directory", "/cache/models"), "/cache/models: cannot be read or written here;"),
    ):
        monkeypatch.setattr(file_download, "http_get", Mock(side_effect=fault))
        assert said in error_at("org/theirs", hub)
    with pytest.raises(UserError, match="the Hub cannot be reached") as caught:
        open_checkpoint("org/good", endpoint="http://me:s3cr3t@127.0.0.1:9")
    assert "s3cr3t" not in str(caught.value)


@pytest.fixture(scope="module")
def published(source: Path) -> dict[str, bytes]:
    assert convert(source, source.parent / "out", run_model=False).safe
    return contents(source.parent / "out")


def test_verify_names_what_is_not_listed(hub: HubServer, published: dict[str, bytes]) -> None:
    hub.add("me/out", published | {"pytorch_model.bin": b"old"})
    [problem] = verify("me/out", endpoint=hub.endpoint, run_model=False)["problems"]
    assert (problem["check"], problem["name"]) == ("files", "pytorch_model.bin")


def test_verify_fetches_one_commit_whatever_comes_meanwhile(
    hub: HubServer, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/out", published)
    fetched = locating.fetched

    def meanwhile(*args: Any) -> Any:
        found = fetched(*args)
        hub.repos["me/out"].commit(published | {"README.md": b"another"}, "theirs", "main")
        return found

    monkeypatch.setattr(locating, "fetched", meanwhile)
    assert verify("me/out", endpoint=hub.endpoint, run_model=False)["verified"]


def test_verify_needs_a_report_and_the_right_to_read(
    hub: HubServer, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="org/theirs has no fp16_report"):
        verify("org/theirs", endpoint=hub.endpoint)
    assert hub.count("/cdn/") == 0
    hub.add("me/out", published)
    monkeypatch.setenv("HF_TOKEN", OTHER)
    with pytest.raises(UserError, match="me/out is neither a folder here nor a repository"):
        verify("me/out", endpoint=hub.endpoint)
