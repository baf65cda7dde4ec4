"""Models that read images: text stack and projector are rescaled, the vision tower is carried over as it is."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compat.harness import compute_logits, relative_error
from PIL import Image
from safetensors.torch import load_file, save_file
from support import brief, exhaustive, tiny
from support.folders import rewritten, seen
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from bf16_to_fp16 import UserError, audit, convert, undo, verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.publish import prepare
from bf16_to_fp16.measuring.agreement import agreed_layout
from bf16_to_fp16.measuring.batch import Batch, run_batch
from bf16_to_fp16.measuring.probe import images
from bf16_to_fp16.measuring.stock import load_config, vocabulary_of
from bf16_to_fp16.report.facts import verdict_sentence
from bf16_to_fp16.report.other_reports import Verification
from bf16_to_fp16.report.schema import Report, read
from bf16_to_fp16.report.terminal import print_verification, runtimes_line, source_line, verdict_line

TOWER = "vision_tower."
PROJECTION = "multi_modal_projector.mm_input_projection_weight"


def as_written(name: str) -> str:
    return name


def as_published(name: str) -> str:
    """Return the name in published files, which are those of transformers 4."""
    return name.replace(TOWER, f"{TOWER}vision_model.")


def as_in_modules(name: str) -> str:
    for begin, module in (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")):
        if name.startswith(begin):
            return module + name.removeprefix(begin)
    return f"model.{name}"


MARKS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
"""What stands in a text for an image: the token of each of its places, and those around them."""


def gemma(folder: Path, naming: Callable[[str], str] = as_published, **changes: Any) -> Path:
    """Save a Gemma 3 whose stream overflows, with images larger than any token."""
    model = tiny.build("gemma3-images", vocab_size=384, **changes)
    model.model.multi_modal_projector.mm_input_projection_weight.data.mul_(16)
    file = tiny.save(model, folder) / "model.safetensors"
    save_file({naming(name): weight for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    return folder


def with_processor(folder: Path) -> Path:
    """Put what makes a model's input of text and images into its folder: an id for each mark, 96 first, and byte."""
    ids = [*(f"<unused{place}>" for place in range(96)), *MARKS.values(), *sorted(ByteLevel.alphabet())]
    text = Tokenizer(BPE(vocab={token: place for place, token in enumerate(ids)}, merges=[]))
    text.pre_tokenizer = ByteLevel(add_prefix_space=False)
    text.add_special_tokens([*MARKS.values()])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=text, pad_token="<unused0>", extra_special_tokens=MARKS
    )
    size = {"height": tiny.VISION["image_size"], "width": tiny.VISION["image_size"]}
    processor = transformers.Gemma3Processor(Gemma3ImageProcessorPil(size=size), tokenizer, image_seq_length=4)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("images")
    source = with_processor(gemma(root / "source"))
    assert convert(source, root / "out").safe
    return source, root / "out"


def test_an_image_that_broke_a_gemma_is_finite_and_true_in_fp16(converted: tuple[Path, Path]) -> None:
    source, out = converted
    assert not seen(source, torch.float16).isfinite().all()
    wanted, report = seen(source), json.loads((out / "fp16_report.json").read_text())
    predicted = report["plan"]["drift"]["predicted_max_logit_error"]
    assert (seen(out) - wanted).abs().max() <= max(1e-5 * wanted.abs().max(), 2 * predicted)
    assert (seen(out, torch.float16) - wanted).abs().max() <= 0.05 * wanted.abs().max()
    assert report["proof"] == "certified" and "image" in {batch["kind"] for batch in report["inputs"]["batches"]}
    assert report["fidelity"]["kl_fp16"] < report["fidelity"]["kl_bf16"] / 32
    assert verify(out, original=source, run_model=False)["verified"]


def test_the_tower_is_carried_over_and_not_covered_and_the_projector_scaled(converted: tuple[Path, Path]) -> None:
    source, out = (load_file(folder / "model.safetensors") for folder in converted)
    assert source.keys() == out.keys()
    tower = [name for name in source if name.startswith(TOWER)]
    assert len(tower) > 20 and all(torch.equal(out[name], source[name].half()) for name in tower)
    report = json.loads((converted[1] / "fp16_report.json").read_text())
    r = report["plan"]["residual_exponent"]
    assert r < 0 and torch.equal(out[PROJECTION].float(), source[PROJECTION].float() * 2.0**r)
    config = json.loads((converted[1] / "config.json").read_text())
    assert config["text_config"]["rms_norm_eps"] == 1e-6 * 4.0**r
    assert config["vision_config"] == json.loads((converted[0] / "config.json").read_text())["vision_config"]
    assert "text_config.rms_norm_eps" in report["source"]["config_changes"]
    card, page = ((converted[1] / name).read_text() for name in ("README.md", "fp16_report.html"))
    for said in (card, page):
        assert "the vision tower aside" in said and "what happens inside the vision tower, which is carried" in said
    assert "AutoModelForImageTextToText" in card


def test_the_usage_on_the_card_runs_on_text_and_on_an_image(
    converted: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((20, 30), 64).convert("RGB").save("image.png")
    scope: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (converted[1] / "README.md").read_text(), re.DOTALL):
        exec(code.replace("path/to/this/folder", str(converted[1])), scope)
    ids = scope["inputs"]["input_ids"]
    assert (ids == 96).sum() == 4 and scope["inputs"]["pixel_values"].shape[0] == 1
    assert scope["tokens"].shape[1] > ids.shape[1] and scope["model"].dtype == torch.float16


@pytest.mark.exhaustive
def test_transformers_4_gives_the_logits(converted: tuple[Path, Path], warm_python: Path, compat_python: Path) -> None:
    for python in (warm_python, compat_python):
        source, out = compute_logits(converted, python)
        assert out.missing == out.unexpected == ()
        assert relative_error(out.output, source.output) < 0.01


def test_what_images_bring_decides_over_the_exponent(tmp_path: Path, converted: tuple[Path, Path]) -> None:
    """The bound of the projector is what holds for any image, whatever one image of noise shows."""
    source = gemma(tmp_path / "source")
    with rewritten(source / "model.safetensors") as weights:
        weights[PROJECTION] *= 64
    louder = convert(source, tmp_path / "out", run_model=False)
    plan = json.loads((converted[1] / "fp16_report.json").read_text())["plan"]
    assert louder.safe and louder.plan.residual_exponent < plan["residual_exponent"]


@pytest.mark.parametrize(("tied", "naming"), [(True, as_written), (False, as_published), (True, as_in_modules)])
def test_names_stay_as_in_the_files_and_come_back(naming: Callable[[str], str], tied: bool, tmp_path: Path) -> None:
    source = gemma(tmp_path / "source", naming, tie_word_embeddings=tied, num_hidden_layers=1)
    before = load_file(source / "model.safetensors")
    placed = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(before))}
    for file in set(placed.values()):
        save_file({name: before[name] for name in placed if placed[name] == file}, source / file, {"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (source / "model.safetensors").unlink()
    convert(source, tmp_path / "out", run_model=False)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    undo(tmp_path / "out", tmp_path / "back")
    config, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "back"))
    assert again == config
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    after = {name: weight for file in files for name, weight in load_file(file).items()}
    assert after.keys() == before.keys()
    assert all((after[name] - weight).abs().max() <= 2.0**-20 for name, weight in before.items())


LACKING = "vision_tower.post_layernorm.weight"
REFUSED: tuple[tuple[Callable[[dict[str, Any], dict[str, Any]], object], str], ...] = (
    (lambda weights, _: weights.pop(LACKING), r"tensor model\.vision_tower\.post_layernorm\.weight is missing"),
    (
        lambda weights, _: weights.update({"vision_tower.extra.weight": torch.ones(16)}),
        r"transformers drops tensor model\.vision_tower\.extra\.weight",
    ),
    (
        lambda weights, _: weights.update({"model.language_model.norm.weight": torch.ones(24)}),
        r"model\.norm\.weight also as model\.language_model\.norm\.weight",
    ),
    (lambda _, config: config["vision_config"].update(layer_norm_eps=0.0), r"the eps of .*soft_emb_norm is 0\.0, not"),
    (lambda _, config: config.update(image_token_index=-1), "'image_token_index' is -1, not an id"),
)


@pytest.mark.parametrize(("change", "line"), REFUSED)
def test_a_tensor_or_a_value_that_breaks_images_is_one_line(change: Any, line: str, tmp_path: Path) -> None:
    source = gemma(tmp_path / "source", as_written)
    with rewritten(source / "model.safetensors") as weights, rewritten(source / "config.json") as config:
        change(weights, config)
    with pytest.raises(UserError, match=line):
        agreed_layout(open_checkpoint(source))


def test_no_other_id_of_the_probes_row_is_an_images(tmp_path: Path) -> None:
    """Stock code counts them, and what is drawn may be any id of the vocabulary."""
    config = load_config(gemma(tmp_path / "source"))
    for config.image_token_index in range(384):
        (batch,) = images(config)
        assert (batch.input_ids == config.image_token_index).equal(batch.image["token_type_ids"] == 1)
    (batch,) = images(tiny.config("gemma4-images"))
    assert (batch.input_ids == 96).equal(batch.image["mm_token_type_ids"] == 1)


def test_a_vocabulary_outside_the_text_model_is_of_no_account(tmp_path: Path) -> None:
    source = gemma(tmp_path / "source")
    with rewritten(source / "config.json") as config:
        config["vocab_size"] = 500
    agreed_layout(open_checkpoint(source))
    assert vocabulary_of(load_config(source)) == 384


@pytest.mark.parametrize(
    "kind", exhaustive.beyond(["gemma3-images", "mistral3"], ["gemma3-images", "mistral3", "qwen2_5_vl", "qwen3_vl"])
)
def test_the_class_without_a_head_gives_the_sources_states_on_text_and_images(kind: str, tmp_path: Path) -> None:
    """Where the embedding is the head, as in most of these, the class with a head would give other last states."""
    model = tiny.small(kind, tie_word_embeddings=True)
    source = tiny.save(model, tmp_path / "source")
    name = type(model.model).__name__
    done = convert(source, tmp_path / "out", as_class=name, run_model=False)
    loaded, how = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert done.safe and done.plan.residual_exponent < 0 and not how["missing_keys"] and not how["unexpected_keys"]
    rows = [Batch("text", ids := torch.tensor([[5, 9, 2, 7]]), torch.ones_like(ids)), *images(model.config)]
    with torch.no_grad():
        for row in rows:
            before, after = (run_batch(each.eval(), row).last_hidden_state for each in (model.model, loaded.float()))
            exact = not row.image and kind != "gemma3-images"  # a tower's small weights round, and gains less 1 do
            assert torch.equal(before, after) if exact else relative_error(after.numpy(), before.numpy()) < 1e-3
    back = undo(tmp_path / "out", tmp_path / "back")
    again = type(model).from_pretrained(back, dtype=torch.bfloat16).state_dict()
    assert all(torch.allclose(weight, again[key].float(), atol=5e-3) for key, weight in model.state_dict().items())


KINDS = ("qwen2_5_vl", "qwen3_vl", "mistral3")
OF_GEMMA = ("gemma3-images", "gemma4-images")
LAST = {
    "qwen2_5_vl": ["visual.merger.mlp.2"],
    "qwen3_vl": ["model.visual.merger.linear_fc2", "model.visual.deepstack_merger_list.0.linear_fc2"],
    "mistral3": ["multi_modal_projector.linear_2"],
}
"""The linears that write the stream, by their names in files."""
Pairs = dict[str, tuple[Path, Path]]


def loud(kind: str, folder: Path) -> Path:
    """Save a model whose images overflow the stream, of weights that fp16 holds before and after."""
    model = tiny.build(kind, num_hidden_layers=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(f"{path}.weight".endswith(name.removeprefix("model.")) for path in LAST[kind]):
                weight.normal_(0, 3e5).copy_(weight.bfloat16())
            weight[weight.abs() < 2.0**-9] = 0
    return tiny.save(model, folder)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    root, made = tmp_path_factory.mktemp("towers"), dict[str, tuple[Path, Path]]()
    with pytest.MonkeyPatch.context() as patch:
        brief.audit_first_batch(patch)
        for kind in KINDS:
            made[kind] = loud(kind, root / kind), root / f"{kind}-fp16"
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
    # The last linears carry the stream's factor, and the tower nothing.
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert before.keys() == after.keys()
    r = report["plan"]["residual_exponent"]
    for name in (f"{path}.{what}" for path in LAST[kind] for what in ("weight", "bias") if f"{path}.{what}" in before):
        assert r < 0 and torch.equal(after[name].float(), before[name].float() * 2.0**r), name
    tower = [n for n in before if any(part in n for part in ("visual.", "vision_tower.")) and "merger" not in n]
    assert len(tower) > 9 and all(torch.equal(after[name], before[name].half()) for name in tower)


def test_no_stricter_arithmetic_takes_the_proof_where_nothing_overflows(first_batch: None, tmp_path: Path) -> None:
    """Norms in fp16 square what a tower gives, which has no bound."""
    model = tiny.build("qwen2_5_vl")
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    result = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out")
    assert (result.report["target"], result.report["proof"]) == ("half", "certified")
    assert "the vision tower aside" in source_line(read(Report, result.report)).plain


LOUD_TOWER = r"(visual|vision_tower)\..*\.0\.\w+\.(up_proj|down_proj|(linear_)?fc[12])(\.linear)?\.weight$"


@pytest.mark.parametrize("kind", exhaustive.beyond(["qwen3_vl"], [*KINDS, *OF_GEMMA]))
def test_a_tower_that_overflows_alone_is_named(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.build(kind, num_hidden_layers=1 if kind == "qwen3_vl" else 2)
    for name, weight in model.named_parameters():
        if re.search(LOUD_TOWER, name):
            weight.data.mul_(1e5)
    out = tmp_path / "out"
    result = convert(tiny.save(model, tmp_path / "source"), out)
    told = result.report["next"]
    paths = re.findall(r'model\.get_submodule\("([^"]+)"\)\.float\(\)', told)
    assert not result.safe and told.startswith("only the vision tower overflows")
    assert {entry["remedy"] for entry in result.report["unsafe"]} == {told}
    close = result.report["fidelity"]
    assert close["reference"] == "fp32 source, on text alone" and close["kl_fp16"] < close["kl_bf16"] / 4
    if kind == "qwen3_vl":  # what these say does not depend on the family
        audited = audit(out, regimes=("half",), attention=("eager",))
        assert audited["next"] == told and {entry["remedy"] for entry in audited["unsafe"]} == {told}
        verified = verify(out, run_model=False)
        assert verified["problems"][-1]["remedy"] == told
        print_verification(read(Verification, verified))
        assert capsys.readouterr().out.count("get_submodule") == len(paths)
        with pytest.raises(UserError, match=r"\(only the vision tower overflows\) and is not published; give --allow"):
            prepare(out)
    report = read(Report, result.report)
    assert "the vision tower aside" in runtimes_line(report)
    proven = "; the text model is proven for every input"
    assert proven in verdict_line(report).plain and proven in verdict_sentence(report)
    card, page = ((out / name).read_text() for name in ("README.md", "fp16_report.html"))
    unproven = report.model_copy(update={"certificate": None})
    assert verdict_line(unproven).plain.endswith("; in the text model nothing overflowed on what was run")
    assert all(f'\nmodel.get_submodule("{path}").float()  # its vision tower' in card for path in paths)
    for text in (card, html.unescape(page)):
        assert proven in text and all(f'model.get_submodule("{path}").float()' in text for path in paths)
    wanted = seen(out)
    assert not seen(out, torch.float16).isfinite().all()
    assert (seen(out, torch.float16, paths) - wanted).abs().max() <= 0.05 * wanted.abs().max()


@pytest.mark.usefixtures("first_batch")
def test_the_tower_is_not_said_to_be_alone_where_the_text_model_overflows_too(tmp_path: Path) -> None:
    model = tiny.build("qwen3_vl", num_hidden_layers=1, factor=9000.0)
    for name, weight in model.named_parameters():
        if re.search(LOUD_TOWER, name):
            weight.data.mul_(1e5)
    result = convert(tiny.save(model, tmp_path / "source"), tmp_path / "out", stream=0)
    assert not result.safe and "vision tower" not in result.report["next"]
    assert result.report["next"].startswith("leave out --stream, ")


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
    source = loud("qwen2_5_vl", tmp_path / "source")
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
