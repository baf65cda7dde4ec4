"""Verifying a converted folder: true where nothing was touched, and each thing that was is named for what it is."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import exhaustive, tiny
from support.contract import random_plan
from support.forging import flip, forge
from support.program import refused

from bf16_to_fp16 import UserError, audit, certify, cli, convert, verify
from bf16_to_fp16.auditing.regimes import Audited, audit_folder
from bf16_to_fp16.checkpoint.folder import records
from bf16_to_fp16.checkpoint.pipeline import name_variants
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.commands.verify import Repeated, run_again
from bf16_to_fp16.devices import Device
from bf16_to_fp16.families.configs import with_value
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Kind
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.report.remedies import OVER, PENALTY, SQUARES_UNSEEN
from bf16_to_fp16.report.schema import Inputs, Report, Text, read
from bf16_to_fp16.report.stored import read_origin, read_plan
from bf16_to_fp16.rescaling.plan import describe_plan
from bf16_to_fp16.run import batch, probe
from bf16_to_fp16.run.stock import load, load_config
from bf16_to_fp16.verification.plans import check_plan

REPORT = "fp16_report.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "summariser"
    return tiny.save(tiny.build("t5-encoder", num_layers=2), folder, max_shard_size="12KB")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    """A converted checkpoint in two shards."""
    assert convert(source, source.parent / "out", target="norm-safe").safe
    return source.parent / "out"


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(converted, tmp_path / "out"))


@pytest.fixture
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let audits run on a batch of each shape, where any would do."""
    gather = probe.audit_batches

    def few(*given: Any, **options: Any) -> list[batch.Batch]:
        return [b for b in gather(*given, **options) if b.kind in (batch.PADDED, batch.REPEATED, batch.IMAGE)]

    monkeypatch.setattr(probe, "audit_batches", few)


def rehash(folder: Path, **changes: Any) -> None:
    """Make report, card and page agree with the files, hidden ones aside, as someone would who hides a change;
    ``changes`` are put into the report."""
    forge(folder, changes, new=True)


def configure(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change a folder's config, and return what it was."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return config


def reweigh(file: Path, part: str, change: Callable[[torch.Tensor], object]) -> str:
    """Change in place the first weight of a file whose name ends so, and return its name."""
    weights = load_file(file)
    name = next(name for name in weights if name.endswith(part))
    change(weights[name])
    save_file(weights, file, metadata={"format": "pt"})
    return name


def swap(folder: Path) -> None:
    """Exchange the two shards."""
    one, two = (folder / ONE).read_bytes(), (folder / TWO).read_bytes()
    (folder / ONE).write_bytes(two)
    (folder / TWO).write_bytes(one)


def problems(folder: Path, **options: Any) -> list[tuple[str, str, str]]:
    """Return (check, name, reason) of everything that does not hold."""
    result = verify(folder, **options)
    assert result["verified"] is (not result["problems"]) and (result["verdict"] == "safe") is result["verified"]
    assert all(p["remedy"] for p in result["problems"])
    return [(p["check"], p["name"], p["reason"]) for p in result["problems"]]


def test_an_untouched_folder_is_verified_in_every_check(converted: Path, source: Path) -> None:
    result = verify(converted, original=source)
    assert result["verified"] and result["verdict"] == "safe" and set(result["checks"].values()) == {"passed"}
    assert result["source"] == {"path": "out", "revision": None} and result["files"] == len(records(converted)) - 1
    assert result["certificate"]["holds"] and set(result["regimes"]) == {"stock", "amp", "half"}


def test_a_converted_folder_inside_another_is_verified_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = folder.rename(folder.with_name("text_encoder_2"))
    assert verify(below.parent, subfolder="text_encoder_2", run_model=False)["verified"]
    assert cli.main(["verify", str(below.parent), "--subfolder", "text_encoder_2", "--no-audit"]) == 0
    said = refused(capsys, "verify", below.parent)
    assert said.endswith(f"has no fp16_report.json of its own; give {below}")


def test_exit_status_and_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(folder), "--no-audit"]) == 0
    out = capsys.readouterr().out
    assert "verified: " in out and "not run" in out and "nothing was run" in out
    flip(folder / ONE)
    assert cli.main(["verify", str(folder), "--no-audit", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["verified"] is False and found["checks"]["certificate"] == "not run"
    assert cli.main(["verify", str(folder), "--no-audit"]) == 1
    out = capsys.readouterr().out
    assert f"files: {ONE}: the weights were changed or damaged" in out and "not verified: 1 problem above" in out
    (folder / REPORT).unlink()
    assert "has no fp16_report.json" in refused(capsys, "verify", folder)


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        (lambda f: flip(f / ONE), ONE, "the weights were changed or damaged"),
        (lambda f: flip(f / TWO, 9), TWO, "the weights were changed or damaged"),
        (lambda f: flip(f / "README.md"), "README.md", "was changed or damaged"),
        (lambda f: flip(f / "model.safetensors.index.json"), "model.safetensors.index.json", "was changed or damaged"),
        (lambda f: (f / ONE).write_bytes((f / ONE).read_bytes()[:-4]), ONE, "cut short, or another file"),
        (lambda f: (f / ONE).unlink(), ONE, "is missing"),
        (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin", "is not in the report"),
        (lambda f: (f / "deep").mkdir() or (f / "deep" / "x.py").write_text(""), "deep/x.py", "is not in the report"),
    ],
)
def test_a_changed_file_is_named(folder: Path, damage: Callable[[Path], object], name: str, reason: str) -> None:
    damage(folder)
    found = problems(folder)
    assert [(check, named) for check, named, _ in found] == [("files", name)] and reason in found[0][2]


def test_swapped_shards_are_told_from_damaged_ones(folder: Path) -> None:
    swap(folder)
    assert problems(folder) == [
        ("files", ONE, f"holds what belongs in {TWO}: the shards are swapped"),
        ("files", TWO, f"holds what belongs in {ONE}: the shards are swapped"),
    ]


def test_a_changed_config_is_named_with_the_key_that_the_plan_needs(folder: Path) -> None:
    right = configure(folder, layer_norm_epsilon=1e-6)["layer_norm_epsilon"]
    [(check, name, reason)] = problems(folder)
    assert (check, name) == ("files", "config.json")
    assert reason.startswith(f"the config was changed, layer_norm_epsilon is 1e-06 instead of {right} (SHA-256 ")


def test_a_hidden_change_of_the_weights_contradicts_the_certificate(folder: Path) -> None:
    name = reweigh(folder / ONE, "wi_1.weight", lambda weight: weight.mul_(2))
    rehash(folder)
    found = problems(folder, run_model=False)
    assert found and {check for check, _, _ in found} == {"certificate", "tiers"}
    assert any(name.removesuffix(".weight") in site for _, site, _ in found)


def test_a_hidden_change_that_no_bound_shows_is_found_by_the_replay(folder: Path, source: Path) -> None:
    name = reweigh(folder / ONE, "wi_0.weight", lambda weight: weight[0].neg_())
    rehash(folder)
    found = problems(folder, original=source, run_model=False)
    assert ("replay", name, "is not what the plan makes of the original") in found


def test_a_hidden_key_of_the_config_is_found_by_the_replay(folder: Path, source: Path) -> None:
    """One on which no bound depends, in a report that says it was changed so."""
    configure(folder, initializer_factor=3.0)
    report = json.loads((folder / "fp16_report.json").read_text())
    report["source"]["config_changes"]["initializer_factor"] = {"before": 1.0, "after": 3.0}
    (folder / "fp16_report.json").write_text(json.dumps(report))
    rehash(folder)
    reason = "is not what the conversion makes of the original's config.json"
    changes = "source.config_changes.initializer_factor"
    assert problems(folder, original=source, run_model=False) == [
        ("replay", "config.json, initializer_factor", reason),
        ("replay", changes, "the report says {'before': 1.0, 'after': 3.0}, and nothing was found"),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["dtype", "inner.dtype"])
def test_a_dtype_that_is_not_fp16_is_found_whatever_the_report_says_was_changed(
    converted: Path, dtype: str, where: str
) -> None:
    """Stock code loads the weights in it where no other is asked for."""
    checkpoint = open_checkpoint(converted)
    plan, layout, source = read_plan(converted), resolve(checkpoint), read_origin(converted)
    source.config_changes.pop("dtype", None)
    assert check_plan(checkpoint, layout, plan, source) == []
    forged = replace(checkpoint, config=with_value(checkpoint.config, where, dtype))
    [problem] = check_plan(forged, layout, plan, source)
    assert problem.name == "config.json"
    assert problem.reason == f"{where} is {dtype}, which stock code loads the weights in"


def test_weights_that_only_another_loader_reads_are_found(folder: Path) -> None:
    name_variants(folder)
    rehash(folder)
    assert problems(folder, run_model=False) == []  # the very same
    other = ONE.replace("model-", "model.fp16-")
    (folder / other).unlink()  # a link
    shutil.copy(folder / TWO, folder / other)
    index = "model.safetensors.index.fp16.json"
    (folder / index).write_text((folder / index).read_text().replace("model.fp16-", "other.fp16-"))
    for name in ("pytorch_model.bin", "flax_model.msgpack"):
        (folder / name).write_bytes(b"x")
    shutil.copy(folder / TWO, folder / "adapter.safetensors")
    rehash(folder)
    reason = f"holds other weights than {ONE}, of which nothing is known"
    wrong = ["adapter.safetensors", "flax_model.msgpack", other, index, "pytorch_model.bin"]
    assert problems(folder, run_model=False) == [("files", name, reason) for name in sorted(wrong)]


def test_a_shard_that_is_hidden_from_the_report_is_found(folder: Path) -> None:
    (folder / ".hidden").mkdir()
    (folder / TWO).rename(folder / ".hidden" / TWO)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(TWO, f".hidden/{TWO}"))
    rehash(folder)
    found = problems(folder, run_model=False)
    assert found == [("files", f".hidden/{TWO}", "is not in the report, so nothing is known of it")]


def test_files_beside_the_weights_are_held_against_the_originals_in_the_replay(
    folder: Path, source: Path, tmp_path: Path
) -> None:
    original = Path(shutil.copytree(source, tmp_path / "theirs"))
    for name in ("tokenizer.json", "special_tokens_map.json"):
        (original / name).write_text('{"theirs": 1}')
        (folder / name).write_text('{"theirs": 1}')
    (original / "README.md").write_text("a card that was mended since")
    (folder / "SOURCE_README.md").write_text("a card")
    (original / "merges.txt").write_text("left behind")
    (folder / "LICENSE").write_text("put there since")
    rehash(folder)
    assert problems(folder, original=original, run_model=False) == []
    (folder / "tokenizer.json").write_text('{"ours": 1}')
    (folder / "generation_config.json").write_text('{"repetition_penalty": 50.0}')
    rehash(folder)
    reason = "is not what the conversion carries over from the original"
    wanted = [("replay", name, reason) for name in ("generation_config.json", "tokenizer.json")]
    assert problems(folder, original=original, run_model=False) == wanted
    assert problems(folder, run_model=False) == []


def test_a_class_of_which_less_is_claimed_is_found_by_the_replay(tmp_path: Path) -> None:
    """Of an encoder alone nothing is bounded in the decoder, which lies in the same file."""
    source = tiny.save(tiny.small("t5"), tmp_path / "source")
    out = tmp_path / "out"
    target = convert(source, out, run_model=False).report["target"]
    configure(out, architectures=["T5WithLMHeadModel"])
    rehash(out)
    assert problems(out, original=source, run_model=False) == []  # another name of the same
    configure(out, architectures=["T5EncoderModel"])
    certified = certify(out, target=target)
    rehash(out, **{key: certified[key] for key in ("certificate", "tiers", "proof")})
    reason = "is not what the conversion makes of the original's config.json"
    assert ("replay", "config.json, architectures", reason) in problems(out, original=source, run_model=False)


def test_a_hidden_overflow_is_found_by_the_audit(folder: Path) -> None:
    weights = load_file(folder / TWO)
    for name in weights:
        if name.endswith("wo.weight"):
            weights[name] = (weights[name].float() * 2.0**17).clamp(-60000, 60000).half()
    save_file(weights, folder / TWO, metadata={"format": "pt"})
    rehash(folder)
    found = problems(folder)
    sites = [name for check, name, _ in found if check == "audit"]
    assert any(name.endswith("wo") for name in sites)
    assert any("inf/NaN" in reason and "half" in reason for check, _, reason in found if check == "audit")


def test_a_true_report_of_an_unsafe_checkpoint_is_told_from_a_false_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], few_batches: None
) -> None:
    model = tiny.build("t5-encoder", num_layers=2)
    for name, weight in model.named_parameters():
        if name.endswith("wi_0.weight"):  # which no exact exponent moves
            weight.data.mul_(1e5)
    out = tmp_path / "out"
    assert not convert(tiny.save(model, tmp_path / "theirs"), out, exact=True).safe
    assert cli.main(["verify", str(out), "--json", str(tmp_path / "found.json")]) == 1
    said = capsys.readouterr().out
    assert "unsafe, as reported: the report is true" in said and "not verified" not in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["as_reported"] and not found["verified"] and found["verdict"] == "unsafe" and found["problems"]
    # What it does not say itself makes it a false one.
    report = json.loads((out / REPORT).read_text())
    (out / REPORT).write_text(json.dumps(report | {"unsafe": report["unsafe"][:1]}))
    assert not verify(out)["as_reported"]
    (out / REPORT).write_text(json.dumps(report))
    flip(out / "model.safetensors")
    assert not verify(out)["as_reported"]


@pytest.mark.parametrize(
    ("change", "check", "reason"),
    [
        ({"proof": "certified"}, None, None),
        ({"verdict": "unsafe"}, "report", "says itself that the checkpoint is unsafe"),
        ({"exponents": {"encoder.block.9.layer.0.SelfAttention.value": [1]}}, "plan", "has no such signal"),
        ({"family": "pegasus"}, "plan", "is for pegasus, and the checkpoint is t5"),
        ({"untied_head": True}, "plan", "the plan separates the head"),
        ({"bound": 1.0}, "certificate", "and the report says 1.0"),
        ({"sites": []}, "certificate", "the report has no bound for it"),
    ],
)
def test_a_forged_report_is_found(folder: Path, change: dict[str, Any], check: str | None, reason: str | None) -> None:
    report = json.loads((folder / REPORT).read_text())
    for key, value in change.items():
        if key in ("exponents", "family", "residual_exponent", "untied_head"):
            report["plan"][key] = value
        elif key == "bound":
            report["certificate"]["sites"][0]["bound"] = value
        elif key == "sites":
            report["certificate"]["sites"] = value
        else:
            report[key] = value
    rehash(folder, **report)
    found = problems(folder, run_model=False)
    assert {each for each, _, _ in found} - {"claims"} == ({check} if check else set())
    assert check is None or any(str(reason) in said for each, _, said in found if each == check)


@pytest.mark.parametrize(
    ("name", "change", "ran", "reason"),
    [
        (
            "fp16-accumulate",
            {"holds": True, "proof": "certified"},
            False,
            "that it is certified, and its bound is over",
        ),
        ("fp16-accumulate", {"holds": True, "proof": "observed"}, True, "that it was observed to hold, and its bound"),
        ("fp16-accumulate", {"holds": True, "proof": "observed"}, False, None),
        ("fp16-accumulate", {"holds": True}, False, "that it holds: True, and by what: None"),
        ("norm-fp16", {"runtimes": ["an abacus"]}, False, "that it stands for 'an abacus', which it does not"),
        ("norm-fp16", {"holds": False, "proof": None, "reason": OVER}, True, None),
        ("fp8", {"holds": False, "proof": None, "runtimes": [], "reason": OVER}, False, "is no tier of this program"),
    ],
)
def test_a_tier_of_which_the_report_says_more_than_the_files_give_is_found(
    folder: Path, name: str, change: dict[str, Any], ran: bool, reason: str | None
) -> None:
    """Of what was run, nothing is known where nothing is run; to say less than is so is no claim."""
    report = json.loads((folder / REPORT).read_text())
    report["tiers"][name] = report["tiers"].get(name, {}) | change | ({"reason": ""} if change.get("holds") else {})
    rehash(folder, tiers=report["tiers"])
    found = problems(folder, run_model=ran)
    assert [(check, named) for check, named, _ in found] == ([("tiers", name)] if reason else [])
    assert all(str(reason) in said for _, _, said in found)


def test_a_tier_that_only_the_bounds_speak_for_is_claimed_by_none_and_found_out(source: Path, tmp_path: Path) -> None:
    """The lower end of squares in fp16 has no bound, so only what was run speaks of it."""
    model = load(source, torch.float32)
    with torch.no_grad():
        model.shared.weight[5] *= 2.0**-40
    model.save_pretrained(tmp_path / "source")
    for name, ran, reason in (("audited", True, "falls to"), ("bounded", False, SQUARES_UNSEEN)):
        report = convert(tmp_path / "source", tmp_path / name, target="norm-safe", run_model=ran).report
        assert [tier["holds"] for tier in report["tiers"].values()] == [True, False, False]
        assert reason in report["tiers"]["norm-fp16"]["reason"]
        assert "Safe in fp16 in PyTorch " in (tmp_path / name / "README.md").read_text()
        assert problems(tmp_path / name) == problems(tmp_path / name, run_model=False) == []
    assert certify(tmp_path / "bounded", target="norm-safe")["tiers"] == report["tiers"]
    report["tiers"]["norm-fp16"] |= {"holds": True, "proof": "certified", "reason": ""}
    rehash(tmp_path / "bounded", tiers=report["tiers"])
    assert problems(tmp_path / "bounded", run_model=False) == []
    [(check, name, reason)] = problems(tmp_path / "bounded")
    assert (check, name) == ("tiers", "norm-fp16") and "where fp16 squares vanish" in reason


FEW = ("t5", "pegasus", "gemma2")  # an eps in the config, a drift, gains that round


@pytest.mark.parametrize("kind", exhaustive.beyond(FEW, [next(iter(entry.kinds)) for entry in tiny.ENTRIES]))
def test_what_bounds_alone_claim_of_any_family_a_run_does_not_withdraw(
    kind: str, tmp_path: Path, few_batches: None
) -> None:
    # A stream that needs 2^-3 brings the eps of BigBird-Pegasus into its states.
    factor = 300.0 if kind == "bigbird_pegasus" else 900.0
    source = tiny.save(tiny.build(kind, factor=factor, **tiny.few_layers(kind)), tmp_path / "source")
    result = convert(source, tmp_path / "out", run_model=False)
    assert result.safe and result.report["tiers"]["torch"]["proof"] == "certified"
    assert problems(tmp_path / "out") == []


def test_audit_and_verify_give_the_tiers_of_the_conversion(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = json.loads((converted / REPORT).read_text())["tiers"]
    proofs = [entry["proof"] for entry in recorded.values()]
    assert proofs == ["certified", "certified", None]
    found = audit(converted)
    assert found["tiers"] == recorded == verify(converted)["tiers"]
    assert found["proof"] == "certified" and found["certificate"]["holds"]
    # What ran in another regime shows no tier, and a source that was not converted has none to show.
    assert cli.main(["audit", str(converted), "--regime", "stock"]) == 0
    printed = capsys.readouterr().out
    assert "sums in fp16" in printed and "yes, for every input" in printed
    assert cli.main(["certify", str(converted)]) == 0
    assert "yes, for every input" in capsys.readouterr().out


@pytest.mark.parametrize(("field", "by", "found"), [("bound", 1.02, 1), ("partial", 1.02, 1), ("bound", 1.0001, 0)])
def test_a_bound_is_compared_to_a_thousandth(folder: Path, field: str, by: float, found: int) -> None:
    report = json.loads((folder / REPORT).read_text())
    site = next(site for site in report["certificate"]["sites"] if 1 < site["bound"] < 1e4)
    site[field] *= by
    site["headroom_bits"] = math.log2(site["limit"] / max(site["bound"], site["partial"]))
    tightest = min(each["headroom_bits"] for each in report["certificate"]["sites"])
    rehash(folder, certificate=report["certificate"] | {"headroom_bits": tightest})
    assert [(check, name) for check, name, _ in problems(folder, run_model=False)] == [
        ("certificate", site["name"])
    ] * found


def test_a_certificate_that_does_not_hold_must_not_be_called_one(folder: Path) -> None:
    reweigh(folder / ONE, "wi_0.weight", lambda weight: weight.mul_(3000 / weight.abs().max()))
    target = json.loads((folder / REPORT).read_text())["target"]
    found = certify(folder, target=target)
    certificate, uncertified = found["certificate"], found["uncertified"]
    seen = {
        site["name"]: site["observed"] for site in json.loads((folder / REPORT).read_text())["certificate"]["sites"]
    }
    for site in certificate["sites"]:
        site["observed"] = seen[site["name"]]
    assert not certificate["holds"]
    for site in uncertified:
        site["remedy"] = PENALTY
    rehash(folder, certificate=certificate, proof="observed", uncertified=uncertified)
    assert {(check, name) for check, name, _ in problems(folder, run_model=False)} == {
        ("tiers", "torch"),
        ("tiers", "norm-fp16"),
    }
    rehash(folder, certificate=certificate, proof="observed", tiers=found["tiers"])
    assert problems(folder, run_model=False) == []
    rehash(folder, certificate=certificate | {"holds": True}, proof="observed")
    assert problems(folder, run_model=False) == [
        ("certificate", "certificate", "the report says that it holds, wrongly"),
        ("claims", "certificate.holds", "the report says True, and False was found"),
    ]
    rehash(folder, certificate=certificate, proof="certified")
    (check, site, reason), (also, key, _) = problems(folder, run_model=False)
    assert (also, key) == ("claims", "proof")
    assert (check, site) == ("certificate", min(certificate["sites"], key=lambda s: s["headroom_bits"])["name"])
    assert reason.endswith("over its limit, and the report says certified")


def test_a_config_is_held_against_what_the_report_says_and_against_the_plan(folder: Path) -> None:
    config = configure(folder, dtype="bfloat16")
    rehash(folder)
    reason = "dtype is bfloat16 and the report says float16"
    assert problems(folder, run_model=False) == [("plan", "config.json", reason)]
    report = json.loads((folder / REPORT).read_text())
    right = config["layer_norm_epsilon"]
    report["source"]["config_changes"]["layer_norm_epsilon"]["after"] = 1e-6
    configure(folder, dtype=config["dtype"], layer_norm_epsilon=1e-6)
    rehash(folder, source=report["source"])
    found = [found for found in problems(folder, run_model=False) if found[0] == "plan"]
    assert found == [("plan", "config.json", f"layer_norm_epsilon is 1e-06 and the plan needs {right}")]


def test_the_audit_is_repeated_with_the_reports_seed_target_and_on_more_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = probe.audit_batches
    # One batch shows it as well as all.
    monkeypatch.setattr(probe, "audit_batches", lambda *given, **options: gather(*given, **options)[:1])
    report = json.loads((folder / REPORT).read_text())
    report |= {"inputs": {"seed": 7}, "target": "train"}
    config = load_config(folder)
    wanted = audit_folder(folder, inputs=probe.audit_batches(config, folder, None, seed=7), seed=7, train_mode=True)
    assert run_again(folder, read(Report, report), Progress(quiet=True), Device("cpu")).ran.regimes == wanted
    with pytest.raises(UserError, match=r"none\.txt: no such file"):
        verify(folder, data=str(folder / "none.txt"))


def test_the_certificate_is_made_for_the_reports_length(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", run_model=False, max_length=64)
    found = verify(tmp_path / "out", run_model=False)
    assert found["verified"] and found["certificate"]["max_length"] == 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"schema": 2}', "schema 2 is not 1"),
        ('{"schema": 1}', "has no verdict"),
        ('{"schema": 1, "verdict": "safe", "source": 3}', "has no source.sha256"),
    ],
)
def test_what_is_no_report_is_one_line(folder: Path, text: str, said: str) -> None:
    (folder / REPORT).write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        verify(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("inputs", 3, "lists something that convert does not write"),
        ("inputs.seed", "x", "its seed is not a number"),
        ("target", 3, "its certificate names no target and length"),
        ("target", "other", "its certificate names no target and length"),
        ("certificate.max_length", "x", "its certificate names no target and length"),
        ("certificate.splits", 0, "its certificate names no target and length"),
        ("certificate.sites", [3], "lists something that convert does not write"),
        ("source.config_changes", {"a": 3}, "lists something that convert does not write"),
        ("output.files", [{"name": "a", "sha256": "b"}], "lists something that convert does not write"),
        ("verdict", 3, "has no verdict, so convert did not write it"),
    ],
)
def test_what_is_not_of_its_type_is_one_line(folder: Path, place: str, value: object, said: str) -> None:
    report = json.loads((folder / REPORT).read_text())
    *above, key = place.split(".")
    inside = report[above[0]] if above else report
    inside[key] = value
    (folder / REPORT).write_text(json.dumps(report))
    with pytest.raises(UserError, match=said) as caught:
        verify(folder, run_model=False)
    assert "\n" not in str(caught.value) and str(caught.value).count("fp16_report.json: ") == 1


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a\0b", ""])
def test_a_report_cannot_make_it_read_elsewhere(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_text("x")
    report = json.loads((folder / REPORT).read_text())
    report["output"]["files"][0]["name"] = name
    (folder / REPORT).write_text(json.dumps(report))
    with pytest.raises(UserError, match="leaves the folder"):
        verify(folder)


def test_the_replay_wants_the_very_source(folder: Path, source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    flip(next(iter(sorted(other.glob("*.safetensors")))))
    [(check, _, reason)] = problems(folder, original=other, run_model=False)
    assert check == "replay" and reason == "is not the file that was converted"


@pytest.mark.usefixtures("few_batches")
def test_an_original_of_another_family_is_told_like_any_other_and_the_folder_run(source: Path, tmp_path: Path) -> None:
    plan = random_plan(resolve(open_checkpoint(source)), (Kind.VALUE, Kind.RESIDUAL))
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 1, "target": "half", "plan": describe_plan(plan)}))
    convert(source, tmp_path / "out", plan=tmp_path / "plan.json", run_model=False)
    found = verify(tmp_path / "out", original="shipped:pegasus-bytes")
    assert [p["reason"] for p in found["problems"]] == ["is not the file that was converted"]
    assert (found["checks"]["replay"], found["checks"]["audit"]) == ("failed", "passed")


def test_what_cannot_be_checked_is_refused(folder: Path, tmp_path: Path) -> None:
    for bad in (tmp_path / "nowhere", folder / REPORT):
        with pytest.raises(UserError, match="a converted folder"):
            verify(bad)
    with pytest.raises(UserError, match="--data or --no-audit"):
        verify(folder, data="x.txt", run_model=False)
    shard = min(folder.glob("*.safetensors"))
    flip(shard)  # so that it would end at the hash
    with pytest.raises(UserError, match="no-such does not exist"):
        verify(folder, original=tmp_path / "no-such")
    flip(shard)
    report = json.loads((folder / REPORT).read_text())
    rehash(folder, plan=report["plan"] | {"residual_exponent": 2**40})
    with pytest.raises(UserError, match="its plan is not one of this program"):
        verify(folder)
    rehash(folder, finetune={}, plan=report["plan"])
    with pytest.raises(UserError, match="was finetuned"):
        verify(folder, original=folder)


def test_figures_of_another_text_are_told_to_be_so() -> None:
    said = [Inputs(), Inputs(data=Text(name="mine.txt"))]
    ran = Audited({}, [], [])
    notes = [Repeated([], each, data, [], ran).other_text for each in said for data in (None, "x")]
    assert [bool(note) for note in notes] == [False, True, True, True]
    assert "those with no --data: give the same" in notes[1][0] and "those with --data mine.txt" in notes[2][0]
