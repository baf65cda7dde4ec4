"""``verify``: an untouched checkpoint passes every check, and each kind of damage is found by the check named here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import exhaustive, tiny
from support.contract import random_plan
from support.folders import rewritten
from support.forging import flip, forge, plan_file, report_of
from support.program import refused

from bf16_to_fp16 import UserError, audit, certify, cli, convert, verify
from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.certificate import bound, fp16_weights
from bf16_to_fp16.checkpoint.folder import records
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.checkpoint.recorded import CONVERTED_KEY
from bf16_to_fp16.conversion.comparison import near
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.signals import Kind
from bf16_to_fp16.json_text import finite
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.report.remedies import OVER, SQUARES_UNSEEN
from bf16_to_fp16.report.schema import REPORT
from bf16_to_fp16.results import dump

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "summariser"
    return tiny.save(tiny.build("t5-encoder", num_layers=2), folder, max_shard_size="12KB")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    assert convert(source, source.parent / "out", target="norm-safe").safe
    return source.parent / "out"


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "out"))


def problems(folder: Path, **options: Any) -> list[tuple[str, str, str]]:
    result = verify(folder, **options)
    assert result["verified"] is (not result["problems"]) and (result["verdict"] == "safe") is result["verified"]
    assert all(p["remedy"] for p in result["problems"])
    return [(p["check"], p["name"], p["reason"]) for p in result["problems"]]


def reweigh(file: Path, part: str, change: Callable[[torch.Tensor], object]) -> None:
    with rewritten(file) as weights:
        for name in (name for name in weights if name.endswith(part)):
            change(weights[name])


def edit(file: Path, place: str, value: object) -> None:
    with rewritten(file) as data:
        *above, last = place.split(".")
        at = data
        for key in above:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[int(last) if isinstance(at, list) else last] = value


def hide(folder: Path) -> None:
    """Move a shard into a hidden folder, where its index still finds it."""
    (folder / ".hidden").mkdir()
    (folder / TWO).rename(folder / ".hidden" / TWO)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(TWO, f".hidden/{TWO}"))


def of_report(place: str, value: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / REPORT, place, value)


def of_config(key: str, value: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", key, value)


def bf16_as_listed(folder: Path) -> None:
    """Let the config say bf16, and the report say that the conversion set that."""
    edit(folder / "config.json", "dtype", "bfloat16")
    changes = json.loads((folder / REPORT).read_text())["source"]["config_changes"]
    edit(folder / REPORT, "source.config_changes", changes | {"dtype": {"before": "float32", "after": "bfloat16"}})


def test_an_untouched_folder_passes_every_check(converted: Path, source: Path) -> None:
    result = verify(converted, original=source)
    assert result["verified"] and result["verdict"] == "safe" and set(result["checks"].values()) == {"passed"}
    assert result["source"] == {"path": "out", "revision": None} and result["files"] == len(records(converted)) - 1
    assert result["certificate"]["holds"] and set(result["regimes"]) == {"stock", "amp", "half"}
    audited = audit(converted)
    assert result["tiers"] == audited["tiers"] == report_of(converted)["tiers"]
    assert audited["proof"] == "certified" and audited["certificate"]["holds"]


PLAIN = {
    "a bit of a shard": (lambda f: flip(f / ONE), ONE, "was changed"),
    "a bit of the card": (lambda f: flip(f / "README.md"), "README.md", "was changed"),
    "a bit of the page": (lambda f: flip(f / "fp16_report.html"), "fp16_report.html", "was changed"),
    "the config": (of_config("layer_norm_epsilon", 1e-6), "config.json", "was changed"),
    "a short shard": (lambda f: (f / ONE).write_bytes((f / ONE).read_bytes()[:-4]), ONE, "cut short"),
    "no shard": (lambda f: (f / ONE).unlink(), ONE, "is missing"),
    "code": (lambda f: (f / "d").mkdir() or (f / "d" / "x.py").write_text(""), "d/x.py", "not in the report"),
}


@pytest.mark.parametrize(("damage", "name", "reason"), PLAIN.values(), ids=PLAIN)
def test_a_changed_file_fails_its_hash(folder: Path, damage: Callable[[Path], object], name: str, reason: str) -> None:
    damage(folder)
    found = problems(folder, run_model=False)
    assert found[0][:2] == ("files", name) and reason in found[0][2]


# Damage whose hashes, card and page were made to fit: (damage, how verify is asked, check, name, reason).
OVER_A_LIMIT = {"signal": "a", "kind": "limit", "excess_bits": 1.0, "remedy": "none", "reason": "over"}
BOUNDS, REPLAY = {"run_model": False}, {"run_model": False, "original": True}
RUN: dict[str, Any] = {}
HIDDEN: dict[str, tuple[Callable[[Path], object], dict[str, Any], str, str, str]] = {
    "a hidden shard": (hide, BOUNDS, "files", f".hidden/{TWO}", "is not in the report"),
    "other weights": (
        lambda f: shutil.copy(f / TWO, f / "adapter.safetensors"),
        *(BOUNDS, "files", "adapter.safetensors", f"holds other weights than {ONE}"),
    ),
    "weights twice as large": (
        lambda f: reweigh(f / ONE, "wi_1.weight", lambda weight: weight.mul_(2)),
        *(BOUNDS, "certificate", "wi_1", "and "),
    ),
    "weights of another sign": (
        lambda f: reweigh(f / ONE, "wi_0.weight", lambda weight: weight[0].neg_()),
        *(REPLAY, "replay", "wi_0.weight", "is not what the plan makes of the original"),
    ),
    "weights that overflow": (
        lambda f: reweigh(f / TWO, "wo.weight", lambda weight: weight.fill_(60000)),
        *(RUN, "audit", "wo", "inf/NaN"),
    ),
    "a key of the config": (
        of_config("initializer_factor", 3.0),
        *(REPLAY, "replay", "config.json, initializer_factor", "is not what the conversion makes"),
    ),
    "the class": (of_config("architectures", ["T5ForConditionalGeneration"]), *(REPLAY, "refused", "", "tensor")),
    "bf16 as dtype": (of_config("dtype", "bfloat16"), BOUNDS, "plan", "config.json", "dtype is bfloat16"),
    "bf16 as a dtype that is listed": (bf16_as_listed, BOUNDS, "plan", "config.json", "dtype is bfloat16"),
    "another eps": (
        of_config("layer_norm_epsilon", 1e-6),
        *(BOUNDS, "plan", "config.json", "layer_norm_epsilon is 1e-06"),
    ),
    "the tokenizer": (
        lambda f: (f / "generation_config.json").write_text('{"repetition_penalty": 50.0}'),
        *(REPLAY, "replay", "generation_config.json", "is not what the conversion carries over"),
    ),
    "a signal of the plan": (
        of_report("plan.exponents", {"encoder.block.9.layer.0.SelfAttention.value": [1]}),
        *(BOUNDS, "plan", "plan", "fit no signal of this checkpoint"),
    ),
    "a fraction where only whole exponents are exact": (
        of_report("plan.exponents", {"encoder.block.0.layer.0.SelfAttention.value": -0.5}),
        *(BOUNDS, "plan", "plan", "fit no signal of this checkpoint"),
    ),
    "the plan's family": (of_report("plan.family", "pegasus"), BOUNDS, "plan", "plan", "is for pegasus"),
    "a head apart": (of_report("plan.untied_head", True), BOUNDS, "plan", "config.json", "separates the head"),
    "other inputs than the seed's": (of_report("inputs.sha256", "0" * 64), RUN, "audit", "inputs", ""),
    "another plan's mark": (
        of_config(f"{CONVERTED_KEY}.stream_exponents", [-3]),
        *(BOUNDS, "plan", "config.json", "is not what the conversion wrote for this plan"),
    ),
    "no bounds": (
        of_report("certificate.sites", []),
        *(BOUNDS, "certificate", "certificate.sites", "the report says None"),
    ),
    "a stricter tier": (
        of_report("tiers.fp16-accumulate", {"holds": True, "proof": "certified", "runtimes": []}),
        *(BOUNDS, "tiers", "fp16-accumulate", "that this tier is certified, but its bound is over"),
    ),
    "an observed tier": (
        of_report("tiers.fp16-accumulate", {"holds": True, "proof": "observed", "runtimes": []}),
        *(RUN, "tiers", "fp16-accumulate", "that this tier was observed to hold"),
    ),
    "a runtime": (of_report("tiers.norm-fp16.runtimes", ["an abacus"]), BOUNDS, "tiers", "norm-fp16", "'an abacus'"),
    "no such tier": (
        of_report("tiers.fp8", {"holds": False, "proof": None, "runtimes": [], "reason": OVER}),
        *(BOUNDS, "tiers", "fp8", "is no tier of this program"),
    ),
    "the verdict": (of_report("verdict", "unsafe"), BOUNDS, "report", REPORT, "states that"),
    "a safe verdict beside what is unsafe": (of_report("unsafe", [OVER_A_LIMIT]), BOUNDS, "report", "a", "also over"),
    "a safe verdict beside a divergence": (
        of_report("fidelity", {"kl_bf16": 1e-9, "kl_fp16": 1.0}),
        *(BOUNDS, "report", "the output", "and also fp16 is further"),
    ),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_hidden_damage_is_found(folder: Path, source: Path, what: str) -> None:
    damage, asked, check, name, reason = HIDDEN[what]
    damage(folder)
    forge(folder, new=True)
    options = asked | ({"original": source} if asked.get("original") else {})
    if check == "refused":
        with pytest.raises(UserError, match=reason):
            verify(folder, **options)
        return
    found = problems(folder, **options)
    assert any(each == check and name in named and reason in why for each, named, why in found), found


def test_what_stock_code_reads_besides_is_the_originals(folder: Path, source: Path) -> None:
    names = {"chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"}
    names |= {"special_tokens_map.json", "tokenizer.model", "hf_quant_config.json"}
    for name in names:
        (folder / name).write_text("{}")
    forge(folder, new=True)
    found = {(check, name) for check, name, _ in problems(folder, **REPLAY | {"original": source})}
    assert found == {("replay", name) for name in names}


HARMLESS: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "another licence": (lambda f: (f / "LICENSE").write_text("put there since"), REPLAY),
    "a bound within a thousandth": (lambda f: edit_bound(f, 1.0001), BOUNDS),
    "a tier of less": (
        of_report("tiers.norm-fp16", {"holds": False, "proof": None, "runtimes": [], "reason": OVER}),
        {},
    ),
}


def edit_bound(folder: Path, by: float) -> None:
    sites = json.loads((folder / REPORT).read_text())["certificate"]["sites"]
    number = next(i for i, site in enumerate(sites) if 1 < site["bound"] < 1e4)
    edit(folder / REPORT, f"certificate.sites.{number}.bound", sites[number]["bound"] * by)


@pytest.mark.parametrize(("change", "asked"), HARMLESS.values(), ids=HARMLESS)
def test_a_change_that_promises_no_more_passes(
    folder: Path, source: Path, change: Callable[[Path], object], asked: dict[str, Any]
) -> None:
    change(folder)
    forge(folder, new=True)
    assert problems(folder, **asked | ({"original": source} if asked.get("original") else {})) == []


BROKEN: dict[str, tuple[str, object, str]] = {
    "inputs": ("inputs", 3, "is not what convert writes"),
    "target": ("target", "other", "its certificate names no target and length"),
    "files": ("output.files", [{"name": "a", "sha256": "b"}], "is not what convert writes"),
    "verdict": ("verdict", 3, "verdict is not what convert writes"),
    "above": ("output.files.0.name", "../secret", "is not inside the folder"),
    "schema": ("schema", 2, "schema 2 is not 1"),
    "exponent": ("plan.residual_exponent", 2**40, "is not what convert writes"),
}


@pytest.mark.parametrize(("place", "value", "said"), BROKEN.values(), ids=BROKEN)
def test_a_report_that_cannot_be_read_is_one_line(folder: Path, place: str, value: object, said: str) -> None:
    edit(folder / REPORT, place, value)
    with pytest.raises(UserError, match=said) as caught:
        verify(folder, run_model=False)
    assert "\n" not in str(caught.value)


def test_bounds_for_kinder_kernels_than_the_programs_own_are_no_proof(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    layout = resolve(checkpoint)
    kind = bound(layout, fp16_weights(checkpoint, layout), Arithmetic(splits=1), target="norm-safe")
    forge(folder, lambda report: report["certificate"].update(finite(dump(kind.entry()))))
    found = problems(folder, run_model=False)
    assert {check for check, *_ in found} == {"certificate"} and "certificate.splits" in {name for _, name, _ in found}


def test_a_tier_that_bounds_alone_cannot_show_is_found_by_a_run(source: Path, tmp_path: Path) -> None:
    """The lower end of squares in fp16 has no bound, so only a run speaks of it."""
    model = load(source, torch.float32)
    model.shared.weight.data[5] *= 2.0**-40
    model.save_pretrained(tmp_path / "source")
    out = tmp_path / "out"
    report = convert(tmp_path / "source", out, target="norm-safe", run_model=False).report
    assert SQUARES_UNSEEN in report["tiers"]["norm-fp16"]["reason"]
    assert problems(out) == [] and certify(out, target="norm-safe")["tiers"] == report["tiers"]
    edit(out / REPORT, "tiers.norm-fp16", report["tiers"]["norm-fp16"] | {"holds": True, "proof": "certified"})
    forge(out)
    assert problems(out, run_model=False) == []
    [(check, name, reason)] = problems(out)
    assert (check, name) == ("tiers", "norm-fp16") and "where fp16 squares vanish" in reason


FEW = ("pegasus", "gemma2")  # a drift, gains that round


@pytest.mark.parametrize("kind", exhaustive.beyond(FEW, [next(iter(entry.kinds)) for entry in tiny.ENTRIES]))
def test_a_run_does_not_withdraw_what_the_bounds_prove(first_batch: None, kind: str, tmp_path: Path) -> None:
    # A stream that needs 2^-3 brings the eps of BigBird-Pegasus into its states.
    factor = 300.0 if kind == "bigbird_pegasus" else 900.0
    source = tiny.save(tiny.build(kind, factor=factor, **tiny.few_layers(kind)), tmp_path / "source")
    result = convert(source, tmp_path / "out", run_model=False)
    assert result.safe and result.report["tiers"]["torch"]["proof"] == "certified"
    assert problems(tmp_path / "out") == []


def test_the_replay_wants_the_very_source(first_batch: None, source: Path, tmp_path: Path) -> None:
    plan = random_plan(resolve(open_checkpoint(source)), (Kind.VALUE, Kind.RESIDUAL))
    convert(source, tmp_path / "out", plan=plan_file(tmp_path / "plan.json", plan), run_model=False)
    assert problems(tmp_path / "out", original=source) == []
    found = verify(tmp_path / "out", original="shipped:pegasus-bytes")
    assert {p["reason"] for p in found["problems"]} == {"is not the file that was converted"}
    assert (found["checks"]["replay"], found["checks"]["audit"]) == ("failed", "passed")


def test_usage_and_exit_status(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(folder), "--no-audit"]) == 0
    assert "verified: " in capsys.readouterr().out
    flip(folder / ONE)
    assert cli.main(["verify", str(folder), "--no-audit", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["verified"] is False and found["checks"]["certificate"] == "not run"
    for bad in (tmp_path / "nowhere", folder / REPORT):
        with pytest.raises(UserError, match="a converted folder"):
            verify(bad)
    with pytest.raises(UserError, match="so --data has no use"):
        verify(folder, data="x.txt", run_model=False)
    with pytest.raises(UserError, match="no-such does not exist"):
        verify(folder, original=tmp_path / "no-such")
    below = folder.rename(folder.with_name("text_encoder_2"))
    flip(below / ONE)
    assert verify(below.parent, subfolder="text_encoder_2", run_model=False)["verified"]
    assert refused(capsys, "verify", below.parent).endswith(
        f"has no fp16_report.json, but folders inside it do; give {below}"
    )
    forge(below, {"finetune": {}})
    with pytest.raises(UserError, match="was finetuned"):
        verify(below, original=below)


@pytest.mark.parametrize(
    ("key", "said", "found", "same"),
    [
        ("nonfinite", 3, 9, True),
        ("saturated", 0, 1, False),
        ("amax", 100.0, 111.0, True),
        ("amax", 100.0, 120.0, False),
        ("amax", 0.001, 0.01, True),  # 22 bits from the limit
        ("amax", 0.01, 0.5, False),
        ("amax", 100.0, 70000.0, False),  # of an overflow the other must be one too
        ("amax", 66000.0, 900000.0, True),
        ("headroom_bits", 3.0, 3.15, True),
        ("headroom_bits", 3.0, 3.3, False),
        ("headroom_bits", 21.0, 40.0, True),
        ("kl_fp16", 1e-6, 1.9e-6, True),
        ("kl_fp16", 1e-6, 2.1e-6, False),
        ("kl_fp16", 0.0, 5e-10, True),  # the noise of fp32 logits
        ("top1_fp16", 0.99, 0.95, True),
        ("top1_fp16", 0.99, 0.9, False),
        ("elements", 1000.0, 1000.0001, False),
        ("bound", 3.0, 3.0 * (1 + 5e-10), True),
        ("bound", float("inf"), float("inf"), True),
        ("limit", float("nan"), 1.0, False),
    ],
)
def test_a_number_is_the_same_up_to_another_machines_rounding(key: str, said: float, found: float, same: bool) -> None:
    assert near(key, said, found) is same and near(key, found, said) is same


FORGED: dict[str, list[tuple[str, object, str, str]]] = {
    "changed": [
        ("certificate.sites.0.bound", 1.0, "certificate", ".bound"),
        ("certificate.sites.0.limit", 7.0, "certificate", ".limit"),
        ("certificate.sites.0.kind", "x", "certificate", ".kind"),
        ("certificate.sites.9.block", 7, "certificate", ".block"),
        ("regimes.half.sites.0.amax", 1.0, "audit", "regimes.half.sites."),
        ("regimes.half.amax", 0.5, "audit", "regimes.half.amax"),
        ("regimes.half.headroom_bits", 14.0, "audit", "regimes.half.headroom_bits"),
        ("regimes.stock.runs", [], "audit", "regimes.stock.runs"),
        ("fidelity.kl_fp16", 0.5, "fidelity", "fidelity.kl_fp16"),
        ("fidelity.positions", 3, "fidelity", "fidelity.positions"),
        ("signals.0.before", 1e9, "fidelity", "signals."),
        ("weights.lossless_fraction", 0.5, "replay", "weights.lossless_fraction"),
        ("weights.flushed_to_zero", 9, "replay", "weights.flushed_to_zero"),
        ("source.dtype", "F32", "replay", "source.dtype"),
        ("source.config_changes.dtype.before", "float32", "replay", "source.config_changes"),
    ],
    "left out": [("fidelity", None, "fidelity", "fidelity"), ("signals.0.module", "x", "fidelity", "signals.")],
    "emptied": [("signals", [], "fidelity", "signals.")],
    "another source": [("source.sha256.other", "0" * 64, "replay", "other")],
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_figures_are_measured_again(folder: Path, source: Path, forged: list[tuple[str, object, str, str]]) -> None:
    for place, value, *_ in forged:
        edit(folder / REPORT, place, value)
    forge(folder)
    found = problems(folder, original=source)
    for _, _, check, part in forged:
        assert any(each == check and part in name for each, name, _ in found), (part, found)


NO_CONVERSIONS = (
    *("sub/model.safetensors", "onnx/model.onnx", "onnx/model.onnx_data", "custom_generate/generate.py"),
    *("modeling_t5.py", "MODELING_T5.PY", "handler.py", "MODEL.safetensors"),
    *("pytorch_model.bin", "PYTORCH_MODEL.BIN", "tf_model.h5", "weights.pkl", "libx.so"),
    *("install.sh", "1_Dense/model.safetensors", "sub/config.json", "demo.ipynb"),
)


def test_weights_code_and_names_that_no_conversion_writes_are_found(folder: Path) -> None:
    for name in NO_CONVERSIONS:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / ONE, folder / name)
    forge(folder, new=True)
    found = verify(folder, run_model=False)
    assert {(p["check"], p["name"]) for p in found["problems"]} == {("files", name) for name in NO_CONVERSIONS}


def test_code_of_the_source_is_not_carried_over(source: Path, tmp_path: Path) -> None:
    original = Path(shutil.copytree(source, tmp_path / "theirs"))
    for name in ("modeling_t5.py", "Config.json", "setup.SH"):
        (original / name).write_text("x")
    report = convert(original, tmp_path / "out", run_model=False).report
    assert {"modeling_t5.py", "Config.json", "setup.SH"} <= set(report["source"]["left_out"])
    assert verify(tmp_path / "out", original=original, run_model=False)["verified"]


def test_tensors_that_the_class_does_not_read_fail(tmp_path: Path) -> None:
    source = tiny.save(tiny.small("t5", num_layers=1), tmp_path / "source")
    edit(source / "config.json", "architectures", ["T5EncoderModel"])
    out = tmp_path / "out"
    convert(source, out, run_model=False)
    assert verify(out, run_model=False)["verified"]
    original, weights = (load_file(folder / "model.safetensors") for folder in (source, out))
    weights |= {name: tensor.half() for name, tensor in original.items() if "decoder" in name}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    forge(out)
    [problem] = verify(out, run_model=False)["problems"]
    assert problem["check"] == "files" and "is no tensor of T5EncoderModel, and the" in problem["reason"]


def test_certify_names_the_class_of_which_alone_it_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.save(tiny.small("t5", num_layers=1), tmp_path / "source")
    assert convert(source, tmp_path / "whole", run_model=False).report.get("model_class") is None
    part = Path(shutil.copytree(tmp_path / "whole", tmp_path / "part"))
    (part / REPORT).unlink()
    edit(part / "config.json", "architectures", ["T5EncoderModel"])
    assert cli.main(["certify", str(part), "--json", str(tmp_path / "said.json")]) == 0
    printed, said = capsys.readouterr(), json.loads((tmp_path / "said.json").read_text())
    assert "run as T5EncoderModel alone" in printed.out and "which T5EncoderModel does not read" in printed.err
    assert said["model_class"] == "T5EncoderModel" and any("decoder" in name for name in said["source"]["dropped"])
    assert cli.main(["certify", str(tmp_path / "whole")]) == 0
    assert "alone" not in capsys.readouterr().out
