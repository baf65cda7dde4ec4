"""Forging a converted folder or file, its hashes refreshed: verify finds it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import tiny
from support.forging import flip, forge, report_of

from bf16_to_fp16 import UserError, cli, convert, verify
from bf16_to_fp16.conversion.comparison import differences
from bf16_to_fp16.report.schema import CARD


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "summariser"
    return tiny.save(tiny.build("t5-encoder", num_layers=1), folder)


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    assert convert(source, source.parent / "out", target="norm-safe").safe
    return source.parent / "out"


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "out"))


def doubled(report: dict[str, Any], *path: str) -> None:
    for key in path[:-1]:
        report = report[key]
    report[path[-1]] *= 4


MEASURED: tuple[tuple[Callable[[dict[str, Any]], object], str, str], ...] = (
    (lambda r: doubled(r, "fidelity", "kl_bf16"), "fidelity", "fidelity.kl_bf16"),
    (lambda r: r["fidelity"].update(positions=3), "fidelity", "fidelity.positions"),
    (lambda r: doubled(r["signals"][0], "before"), "fidelity", "signals."),
    (lambda r: r["weights"].update(lossless_fraction=0.5), "replay", "weights.lossless_fraction"),
    (lambda r: r["source"].update(dtype="F32"), "replay", "source.dtype"),
    (lambda r: r["source"]["config_changes"]["dtype"].update(before="float32"), "replay", "source.config_changes"),
)
LEFT_OUT: tuple[tuple[Callable[[dict[str, Any]], object], str, str], ...] = (
    (lambda r: r.update(fidelity=None), "fidelity", "fidelity"),
    (lambda r: r["signals"].pop(), "fidelity", "signals."),
)
ANOTHER = ((lambda r: r["source"]["sha256"].update(other="0" * 64), "replay", "other"),)


@pytest.mark.parametrize("changes", [MEASURED, LEFT_OUT, ANOTHER], ids=["changed", "left out", "another source"])
def test_what_was_measured_on_the_original_is_measured_again(
    folder: Path, source: Path, changes: tuple[tuple[Callable[[dict[str, Any]], object], str, str], ...]
) -> None:
    forge(folder, lambda report: [change(report) for change, *_ in changes])
    problems = verify(folder, original=source)["problems"]
    for _, check, key in changes:
        assert any(p["check"] == check and p["name"].startswith(key) for p in problems), (key, problems)


@pytest.mark.parametrize(("key", "value"), [("stack", "decoder"), ("block", 7), ("role", "head")])
def test_a_site_that_is_put_elsewhere_is_found(folder: Path, key: str, value: object) -> None:
    [*names] = (
        site["name"] for site in report_of(folder)["certificate"]["sites"] if site.get(key) not in (None, value)
    )

    def moved(report: dict[str, Any]) -> None:
        next(site for site in report["certificate"]["sites"] if site["name"] == names[0])[key] = value

    forge(folder, moved)
    problems = verify(folder, run_model=False)["problems"]
    assert f"certificate.sites.{names[0]}.{key}" in {p["name"] for p in problems if p["check"] == "certificate"}


def test_the_regimes_are_compared_with_what_runs_again(folder: Path) -> None:
    changes: dict[str, dict[str, Any]] = {"half": {"headroom_bits": 14.0, "amax": 0.5}}
    changes |= {"stock": {"runs": []}, "amp": {"same_as": "half"}}
    forge(folder, lambda report: [report["regimes"][name].update(change) for name, change in changes.items()])
    named = "".join(problem["name"] for problem in verify(folder)["problems"] if problem["check"] == "audit")
    for regime, change in changes.items():
        assert all(f"regimes.{regime}.{key}" in named for key in change), named


def test_other_inputs_than_the_recorded_seed_gives_are_found(folder: Path) -> None:
    forge(folder, {"inputs": report_of(folder)["inputs"] | {"sha256": "0" * 64}})
    assert [(p["check"], p["name"]) for p in verify(folder)["problems"]] == [("audit", "inputs")]


def test_numbers_of_another_machine_are_the_same_and_others_are_not() -> None:
    site = {"name": "a", "amax": 100.0, "headroom_bits": 9.3, "nonfinite": 0}
    near = [site | {"amax": 104.0, "headroom_bits": 9.25}]
    assert not [*differences([site], near, "")] and not [*differences({"kl_fp16": 1e-6}, {"kl_fp16": 1.5e-6}, "")]
    for other in ({"amax": 150.0}, {"headroom_bits": 9.9}, {"nonfinite": 1}, {"amax": None}):
        assert [key for key, *_ in differences([site], [site | other], "")] == [f".a.{next(iter(other))}"]
    assert [key for key, *_ in differences({"x": [site]}, {"x": []}, "")] == [".x.a"]


def lay(name: str, content: bytes | None = None) -> Callable[[Path], None]:
    """Return what puts a file into a folder; by default with the folder's own weights."""

    def put(folder: Path) -> None:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((folder / "model.safetensors").read_bytes() if content is None else content)

    return put


@pytest.mark.parametrize(
    "name",
    [
        *("sub/model.safetensors", "onnx/model.onnx", "onnx/model.onnx_data", "custom_generate/generate.py"),
        *("modeling_t5.py", "MODELING_T5.PY", "handler.py", "Config.json", "MODEL.safetensors", "readme.md"),
        *("Modules.json", "pytorch_model.bin", "PYTORCH_MODEL.BIN", "tf_model.h5", "weights.pkl", "libx.so"),
        *("install.sh", "1_Dense/model.safetensors", "sub/config.json", "demo.ipynb"),
    ],
)
def test_weights_code_and_names_that_no_conversion_writes_are_found(folder: Path, name: str) -> None:
    lay(name)(folder)
    forge(folder, new=True)
    found = verify(folder, run_model=False)
    assert {(p["check"], p["name"]) for p in found["problems"]} == {("files", name)}


def test_code_of_the_source_is_not_carried_over(source: Path, tmp_path: Path) -> None:
    original = Path(shutil.copytree(source, tmp_path / "theirs"))
    for name in ("modeling_t5.py", "Config.json", "setup.SH"):
        (original / name).write_text("x")
    report = convert(original, tmp_path / "out", run_model=False).report
    assert {"modeling_t5.py", "Config.json", "setup.SH"} <= set(report["source"]["left_out"])
    assert verify(tmp_path / "out", original=original, run_model=False)["verified"]


def test_a_card_that_was_edited_is_told_as_such(folder: Path) -> None:
    (folder / CARD).write_text((folder / CARD).read_text() + "\nMore of mine.\n")
    assert not verify(folder, run_model=False)["verified"]
    forge(folder, {"output": report_of(folder)["output"] | {"card_edited": True}}, views=False)
    found = verify(folder, run_model=False)
    assert found["verified"] and "was edited" in found["notes"][0]


def test_tensors_that_the_class_does_not_read_fail(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["T5EncoderModel"]}))
    out = tmp_path / "out"
    convert(source, out, run_model=False)
    assert verify(out, run_model=False)["verified"]
    weights = load_file(out / "model.safetensors") | {
        name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items() if "decoder" in name
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    forge(out)
    [problem] = verify(out, run_model=False)["problems"]
    assert problem["check"] == "files" and "is no tensor of T5EncoderModel, of which alone" in problem["reason"]


def test_certify_names_the_class_of_which_alone_it_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.save(tiny.small("t5"), tmp_path / "source")
    assert convert(source, tmp_path / "whole", run_model=False).report.get("model_class") is None
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    (tmp_path / "part" / "fp16_report.json").unlink()
    (tmp_path / "part" / "config.json").write_text(json.dumps(config | {"architectures": ["T5EncoderModel"]}))
    assert cli.main(["certify", str(tmp_path / "part"), "--json", str(tmp_path / "said.json")]) == 0
    printed, said = capsys.readouterr(), json.loads((tmp_path / "said.json").read_text())
    assert "run as T5EncoderModel alone" in printed.out and "which T5EncoderModel does not read" in printed.err
    assert said["model_class"] == "T5EncoderModel" and any("decoder" in name for name in said["source"]["dropped"])
    assert cli.main(["certify", str(tmp_path / "whole")]) == 0
    assert "alone" not in capsys.readouterr().out


def test_verify_names_the_length(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(source, tmp_path / "out", run_model=False, max_length=4)
    assert "for every input of up to 4 positions" in (tmp_path / "out" / CARD).read_text()
    assert cli.main(["verify", str(tmp_path / "out"), "--no-audit"]) == 0
    assert "proven for every input of up to 4 positions" in capsys.readouterr().out
    convert(source, tmp_path / "file.safetensors", run_model=False, max_length=1, layout="single")
    assert cli.main(["verify", str(tmp_path / "file.safetensors"), "--no-audit"]) == 0
    assert "proven for every input of up to 1 position" in capsys.readouterr().out


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    file = source.parent / "packed.safetensors"
    assert convert(source, file, layout="single", run_model=False).safe
    return file


def repacked(file: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """Write a packed file with a change of its header, as parsed, and of its summary."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    summary = json.loads(header["__metadata__"]["bf16_to_fp16"])
    change(header, summary)
    header["__metadata__"]["bf16_to_fp16"] = json.dumps(summary)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return out


def test_flipped_bits_and_swapped_tensors_of_a_packed_file_are_found(packed: Path, tmp_path: Path) -> None:
    def swap(header: dict[str, Any], _: dict[str, Any]) -> None:
        names = [name for name in header if name.endswith(("SelfAttention.k.weight", "SelfAttention.v.weight"))]
        one, other = (header[name]["data_offsets"] for name in names[:2])
        header[names[0]]["data_offsets"], header[names[1]]["data_offsets"] = other, one

    assert verify(packed)["verified"]
    flipped = Path(shutil.copy(packed, tmp_path / "flipped.safetensors"))
    flip(flipped, -2)
    for bad in (flipped, repacked(packed, tmp_path / "swapped.safetensors", swap)):
        found = verify(bad, run_model=False)
        assert any("were changed or damaged" in problem["reason"] for problem in found["problems"])


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda h, s: h["__metadata__"].pop("bf16_to_fp16.tensors_sha256"), "files"),
        (lambda h, s: s["tiers"]["torch"].update(runtimes=["an abacus"]), "tiers"),
    ],
)
def test_what_a_packed_file_says_of_itself_is_held_against_it(
    packed: Path, tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object], check: str
) -> None:
    found = verify(repacked(packed, tmp_path / "bad.safetensors", change), run_model=False)
    assert check in {problem["check"] for problem in found["problems"]}


def test_a_packed_file_with_another_eps_than_its_plan_is_refused(packed: Path, tmp_path: Path) -> None:
    bad = repacked(packed, tmp_path / "bad.safetensors", lambda _, summary: summary.update(eps=1e-3))
    with pytest.raises(UserError, match="its metadata are damaged"):
        verify(bad, run_model=False)
