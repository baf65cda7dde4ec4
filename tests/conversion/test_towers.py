"""Qwen2.5-VL, Qwen3-VL and Mistral 3 as their users load them: converted with images in mind, to the bit, in both
versions of transformers."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compat.harness import compute_logits, relative_error
from safetensors.torch import load_file
from support import exhaustive, tiny
from support.folders import rewritten, seen

from bf16_to_fp16 import UserError, audit, convert, undo, verify
from bf16_to_fp16.conversion.publish import prepare
from bf16_to_fp16.report.facts import verdict_sentence
from bf16_to_fp16.report.other_reports import Verification
from bf16_to_fp16.report.schema import Report, read
from bf16_to_fp16.report.terminal import print_verification, runtimes_line, source_line, verdict_line

KINDS = ("qwen2_5_vl", "qwen3_vl", "mistral3")
OF_GEMMA = ("gemma3-images", "gemma4-images")
LAST = {
    "qwen2_5_vl": ["visual.merger.mlp.2"],
    "qwen3_vl": ["model.visual.merger.linear_fc2", "model.visual.deepstack_merger_list.0.linear_fc2"],
    "mistral3": ["multi_modal_projector.linear_2"],
}
"""The linears that write the stream, by their names in files."""
Pairs = dict[str, tuple[Path, Path]]


def kept(told: str) -> list[str]:
    return re.findall(r'model\.get_submodule\("([^"]+)"\)\.float\(\)', told)


def saved(kind: str, folder: Path) -> Path:
    """Save a model whose images overflow the stream, of weights that fp16 holds before and after."""
    model = tiny.build(kind)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(f"{path}.weight".endswith(name.removeprefix("model.")) for path in LAST[kind]):
                weight.normal_(0, 3e5).copy_(weight.bfloat16())
            weight[weight.abs() < 2.0**-9] = 0
    return tiny.save(model, folder)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    root, made = tmp_path_factory.mktemp("towers"), dict[str, tuple[Path, Path]]()
    for kind in KINDS:
        source = saved(kind, root / kind)
        made[kind] = source, root / f"{kind}-fp16"
        assert convert(*made[kind]).safe
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_broke_the_source_is_finite_and_the_sources_in_fp32(kind: str, pairs: Pairs) -> None:
    source, out = pairs[kind]
    report: Any = json.loads((out / "fp16_report.json").read_text())
    assert report["proof"] == "certified" and "image" in {batch["kind"] for batch in report["inputs"]["batches"]}
    assert report["fidelity"]["kl_fp16"] < report["fidelity"]["kl_bf16"] / 16
    wanted, found = seen(source), seen(out)
    assert not seen(source, torch.float16).isfinite().all()
    assert (seen(out, torch.float16) - wanted).abs().max() <= 0.05 * wanted.abs().max()
    if kind == "mistral3":  # whose projector's norm has the text model's eps
        drift = report["plan"]["drift"]
        assert drift["predicted_max_logit_error"] > 0 and (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    else:
        assert report["plan"]["drift"] is None and torch.equal(found, wanted)
    assert verify(out, run_model=False)["verified"]


def test_no_stricter_arithmetic_takes_the_proof_where_nothing_overflows(tmp_path: Path) -> None:
    """Norms in fp16 square what a tower gives, which has no bound."""
    model = tiny.build("qwen2_5_vl")
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    result = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out")
    assert (result.report["target"], result.report["proof"]) == ("half", "certified")
    assert "the vision tower aside" in source_line(read(Report, result.report)).plain


LOUD = r"(visual|vision_tower)\..*\.0\.\w+\.(up_proj|down_proj|(linear_)?fc[12])(\.linear)?\.weight$"


@pytest.mark.parametrize("kind", exhaustive.beyond(["qwen3_vl", "gemma4-images"], [*KINDS, *OF_GEMMA]))
def test_a_tower_that_overflows_alone_is_named(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.build(kind)
    for name, weight in model.named_parameters():
        if re.search(LOUD, name):
            weight.data.mul_(1e5)
    out = tmp_path / "out"
    result = convert(tiny.save(model, tmp_path / "source"), out)
    told = result.report["next"]
    assert not result.safe and told.startswith("only the vision tower overflows")
    assert {entry["remedy"] for entry in result.report["unsafe"]} == {told}
    close = result.report["fidelity"]
    assert close["reference"] == "fp32 source, on text alone" and close["kl_fp16"] < close["kl_bf16"] / 4
    if kind == "qwen3_vl":  # what these say does not depend on the family
        audited = audit(out)
        assert audited["next"] == told and {entry["remedy"] for entry in audited["unsafe"]} == {told}
        verified = verify(out)
        assert verified["problems"][-1]["remedy"] == told
        print_verification(read(Verification, verified))
        assert capsys.readouterr().out.count("get_submodule") == len(kept(told))
        with pytest.raises(UserError, match=r"\(only the vision tower overflows\) and is not published; give --allow"):
            prepare(out)
    report = read(Report, result.report)
    assert "the vision tower aside" in runtimes_line(report)
    proven = "; the text model is proven for every input"
    assert proven in verdict_line(report).plain and proven in verdict_sentence(report)
    card, page = ((out / name).read_text() for name in ("README.md", "fp16_report.html"))
    unproven = report.model_copy(update={"certificate": None})
    assert verdict_line(unproven).plain.endswith("; in the text model nothing overflowed on what was run")
    assert all(f'\nmodel.get_submodule("{path}").float()  # its vision tower' in card for path in kept(told))
    for text in (card, html.unescape(page)):
        assert proven in text and all(f'model.get_submodule("{path}").float()' in text for path in kept(told))
    wanted, paths = seen(out), kept(told)
    assert not seen(out, torch.float16).isfinite().all()
    assert (seen(out, torch.float16, paths) - wanted).abs().max() <= 0.05 * wanted.abs().max()


def test_the_tower_is_not_said_to_be_alone_where_the_text_model_overflows_too(tmp_path: Path) -> None:
    model = tiny.build("qwen3_vl")
    for name, weight in model.named_parameters():
        if re.search(LOUD, name):
            weight.data.mul_(1e5)
    result = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out", stream=0)
    assert not result.safe and "vision tower" not in result.report["next"]
    assert result.report["next"].startswith("leave out --stream, ")


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_linears_carry_the_streams_factor_and_the_tower_nothing(kind: str, pairs: Pairs) -> None:
    source, out = (load_file(folder / "model.safetensors") for folder in pairs[kind])
    assert source.keys() == out.keys()
    r = json.loads((pairs[kind][1] / "fp16_report.json").read_text())["plan"]["residual_exponent"]
    for name in (f"{path}.{what}" for path in LAST[kind] for what in ("weight", "bias") if f"{path}.{what}" in source):
        assert r < 0 and torch.equal(out[name].float(), source[name].float() * 2.0**r), name
    tower = [n for n in source if any(part in n for part in ("visual.", "vision_tower.")) and "merger" not in n]
    assert len(tower) > 9 and all(torch.equal(out[name], source[name].half()) for name in tower)


def test_both_versions_give_the_sources_logits(pairs: Pairs, warm_python: Path, compat_python: Path) -> None:
    """Also where 4.57 cannot run what 5 saved as its source: the keys that it reads are in the output."""
    wanted = compute_logits([source for source, _ in pairs.values()], warm_python)
    for version, python in (("5", warm_python), ("4", compat_python)):
        found = compute_logits([out for _, out in pairs.values()], python)
        for name, one, other in zip(pairs, found, wanted, strict=True):
            assert one.version.startswith(f"{version}.") and one.missing == () and one.unexpected == (), name
            for row, length in enumerate((12, 9, 4)):  # what stands behind is padding
                given, source = (each.output[row, :length] for each in (one, other))
                assert relative_error(given, source) <= 1e-5, name
    for name in pairs:
        assert json.loads((pairs[name][1] / "fp16_report.json").read_text())["older"] == [], name


def test_a_config_that_holds_the_text_models_keys_itself_is_taken_and_keeps_its_form(tmp_path: Path) -> None:
    """As published Qwen2.5-VL's do."""
    source = saved("qwen2_5_vl", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    positions = text.pop("rope_parameters")
    text |= {"rope_theta": positions["rope_theta"]}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": positions["mrope_section"]}}
    flat = {key: value for key, value in text.items() if key not in ("model_type", "layer_types")} | config
    (source / "config.json").write_text(json.dumps(flat))
    result = convert(source, tmp_path / "out", run_model=False)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "text_config" not in written
    assert written["rms_norm_eps"] == flat["rms_norm_eps"] * 4.0**result.plan.residual_exponent
    assert result.safe and torch.equal(seen(tmp_path / "out"), seen(source))
    undo(tmp_path / "out", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == flat


def test_a_text_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = tiny.save(tiny.build("mistral3", 1), tmp_path / "source")
    with rewritten(source / "config.json") as config:
        config["text_config"]["model_type"] = "qwen2"
    with pytest.raises(UserError, match=r"'text_config\.model_type' is 'qwen2'"):
        convert(source, tmp_path / "out")
