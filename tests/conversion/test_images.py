"""A model that reads images: its text stack and projector are rescaled, its vision tower is carried over as it is."""

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
from support import exhaustive, tiny
from support.folders import rewritten, seen
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from bf16_to_fp16 import UserError, convert, undo, verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.families.configs import with_value
from bf16_to_fp16.measuring.agreement import agreed_layout
from bf16_to_fp16.measuring.batch import Batch, run_batch
from bf16_to_fp16.measuring.probe import images
from bf16_to_fp16.measuring.stock import load_config, vocabulary_of

TOWER = "vision_tower."
PROJECTION = "multi_modal_projector.mm_input_projection_weight"


def as_written(name: str) -> str:
    """Return the name that transformers 5 writes."""
    return name


def as_published(name: str) -> str:
    """Return the name in published files, which are those of transformers 4."""
    return name.replace(TOWER, f"{TOWER}vision_model.")


def as_in_modules(name: str) -> str:
    """Return the name of a parameter of the stock class."""
    for begin, module in (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")):
        if name.startswith(begin):
            return module + name.removeprefix(begin)
    return f"model.{name}"


MARKS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
"""What stands in a text for an image: the token of each of its places, and those around them."""


def saved(folder: Path, naming: Callable[[str], str] = as_published, **changes: Any) -> Path:
    """Save a model whose stream overflows, with images larger than any token."""
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
    transformers.Gemma3Processor(Gemma3ImageProcessorPil(size=size), tokenizer, image_seq_length=4).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("images")
    source = with_processor(saved(root / "source"))
    assert convert(source, root / "out").safe
    return source, root / "out"


def test_an_image_that_broke_the_source_is_finite_and_true_in_fp16(converted: tuple[Path, Path]) -> None:
    source, out = converted
    assert not seen(source, torch.float16).isfinite().all()
    wanted, report = seen(source), json.loads((out / "fp16_report.json").read_text())
    predicted = report["plan"]["drift"]["predicted_max_logit_error"]
    assert (seen(out) - wanted).abs().max() <= max(1e-5 * wanted.abs().max(), 2 * predicted)
    assert (seen(out, torch.float16) - wanted).abs().max() <= 0.05 * wanted.abs().max()
    assert report["proof"] == "certified" and "image" in {batch["kind"] for batch in report["inputs"]["batches"]}
    assert report["fidelity"]["kl_fp16"] < report["fidelity"]["kl_bf16"] / 32
    assert verify(out, original=source)["verified"]


def test_the_tower_is_carried_over_and_the_projector_scaled_with_the_stream(converted: tuple[Path, Path]) -> None:
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


def test_the_report_says_that_the_tower_is_not_covered(converted: tuple[Path, Path]) -> None:
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
    source = saved(tmp_path / "source")
    with rewritten(source / "model.safetensors") as weights:
        weights[PROJECTION] *= 64
    assert convert(source, tmp_path / "out", run_model=False).safe
    plans = [json.loads((out / "fp16_report.json").read_text())["plan"] for out in (converted[1], tmp_path / "out")]
    assert plans[1]["residual_exponent"] < plans[0]["residual_exponent"]


@pytest.mark.parametrize(("tied", "naming"), [(True, as_written), (False, as_published), (True, as_in_modules)])
def test_names_stay_as_in_the_files_and_come_back(naming: Callable[[str], str], tied: bool, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", naming, tie_word_embeddings=tied)
    convert(source, tmp_path / "out", run_model=False, max_shard_size=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    before = load_file(source / "model.safetensors")
    assert index["weight_map"].keys() == before.keys()
    undo(tmp_path / "out", tmp_path / "back")
    config, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "back"))
    assert again == config
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    after = {name: weight for file in files for name, weight in load_file(file).items()}
    assert after.keys() == before.keys()
    assert all((after[name] - weight).abs().max() <= 2.0**-20 for name, weight in before.items())


def test_a_tensor_that_the_tower_lacks_or_does_not_know_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", as_written)
    with rewritten(source / "model.safetensors") as weights:
        gone = weights.pop("vision_tower.post_layernorm.weight")
    with pytest.raises(UserError, match=r"tensor model\.vision_tower\.post_layernorm\.weight is missing"):
        agreed_layout(open_checkpoint(source))
    weights |= {"vision_tower.post_layernorm.weight": gone, "vision_tower.extra.weight": gone.clone()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"stock code drops tensor model\.vision_tower\.extra\.weight"):
        agreed_layout(open_checkpoint(source))


def test_two_tensors_of_one_module_name_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", as_written)
    with rewritten(source / "model.safetensors") as weights:
        weights["model.language_model.norm.weight"] = weights["language_model.model.norm.weight"].clone()
    with pytest.raises(UserError, match=r"model\.norm\.weight is there as model\.language_model\.norm\.weight too"):
        open_checkpoint(source)


def test_no_other_id_of_the_probes_row_is_an_images(tmp_path: Path) -> None:
    """Stock code counts them, and what is drawn may be any id of the vocabulary."""
    config = load_config(saved(tmp_path / "source"))
    for config.image_token_index in range(384):
        (batch,) = images(config)
        assert (batch.input_ids == config.image_token_index).equal(batch.image["token_type_ids"] == 1)
    (batch,) = images(tiny.config("gemma4-images"))
    assert (batch.input_ids == 96).equal(batch.image["mm_token_type_ids"] == 1)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("vision_config.layer_norm_eps", 0.0, r"the eps of .*soft_emb_norm is 0\.0, not a small positive number"),
        ("image_token_index", -1, "'image_token_index' is -1, not an id"),
    ],
)
def test_a_value_that_breaks_images_is_one_line(key: str, value: object, line: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(with_value(config, key, value)))
    with pytest.raises(UserError, match=line):
        agreed_layout(open_checkpoint(source))


def test_a_vocabulary_outside_the_text_model_is_of_no_account(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
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
    done = convert(source, tmp_path / "out", as_class=name)
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
