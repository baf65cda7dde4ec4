"""``--layout comfy`` of decoder-only encoders: ComfyUI's class for them loads the file and computes the source."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import exhaustive, tiny, tools
from support.program import refused

from bf16_to_fp16 import certify, convert, undo, verify
from bf16_to_fp16.checkpoint import layouts
from bf16_to_fp16.cli import main
from bf16_to_fp16.conversion.options import Options
from bf16_to_fp16.families import known
from bf16_to_fp16.families.configs import looked_up

KINDS = ("qwen3", "qwen2_5_vl", "gemma3-images", "llama", "mistral3")
IDS = torch.arange(1, 96).view(19, 5)  # within the window, which ComfyUI had none of before 2026


def model_of(kind: str, **changes: Any) -> Any:
    """Return a model whose stream overflows; scores are scaled by the size of a head, as ComfyUI has it."""
    model = tiny.small(kind, **changes | ({"query_pre_attn_scalar": 10} if kind.startswith("gemma") else {}))
    text = model.config.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return model


def host(monkeypatch: pytest.MonkeyPatch, model: Any, fit: str = "One", unfit: str = "Two") -> layouts.Hosted:
    """Let ComfyUI have a class for a model of this size, which pipelines of these names read."""
    text, kind = model.config.get_text_config(), model.config.model_type
    shape = " ".join(str(getattr(text, key)) for key in layouts.SHAPE)
    hosted = replace(layouts.COMFY_MODELS[kind], sizes=(layouts.sized("Small", shape, fit, unfit),))
    hosted = replace(hosted, fixed={key: looked_up(text.to_dict(), key) for key in hosted.fixed})
    monkeypatch.setitem(layouts.COMFY_MODELS, kind, hosted)
    return hosted


def read_by_comfy(file: Path, model: Any, eps: float) -> tools.ComfyDecoder:
    """Return ComfyUI's class with the tensors of a file, each of which it has a place for."""
    reader = tools.ComfyDecoder(model.config.get_text_config(), eps)
    tower = ("visual.", "vision_model.", "vision_tower.", "multi_modal_projector.")
    inside = {name: t for name, t in load_file(file).items() if name not in layouts.TOKENIZERS}
    reader.load_state_dict({name: t for name, t in inside.items() if not name.startswith(tower)}, strict=True)
    return reader


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).square().sum() / wanted.double().square().sum())


@pytest.mark.parametrize("kind", exhaustive.beyond(["qwen2_5_vl", "gemma3-images"], [*KINDS]))
def test_comfyuis_class_computes_the_source_in_fp32_and_in_fp16(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = model_of(kind), tmp_path / "out.safetensors"
    hosted, source = host(monkeypatch, model), tiny.save(model, tmp_path / "source")
    name, file = hosted.tokenizer
    if name:
        (source / file).write_bytes(tools.SPIECE)
    done = convert(source, out, layout="comfy", as_class=hosted.stock)
    assert done.safe and done.report["target"] == "half" and done.plan.eps == hosted.eps
    assert any("for One alone: for Two ComfyUI reads inner states" in note for note in done.notes)
    tensors = load_file(out)
    assert {t.dtype for n, t in tensors.items() if n != name} == {torch.float16}
    assert not name or bytes(tensors[name].tolist()) == tools.SPIECE
    with torch.no_grad():
        wanted = model.model(input_ids=IDS).last_hidden_state
        bf16 = error(model.model.bfloat16()(input_ids=IDS).last_hidden_state, wanted)
        reader = read_by_comfy(out, model, hosted.eps)
        assert error(reader(IDS)[0], wanted) < bf16 / 16
        assert error(reader.half()(IDS, torch.float16)[0], wanted) < bf16 / 16
        text = getattr(model.model, "language_model", model.model).state_dict()
        reader.load_state_dict({f"model.{key}": weight for key, weight in text.items()})
        assert not error(reader(IDS, torch.float16)[0], wanted) < bf16  # the source overflows, or is NaN
    assert verify(out, original=source)["problems"] == []
    assert certify(out)["certificate"]["holds"] == (done.report["proof"] == "certified")
    back = load_file(undo(out, tmp_path / "back.safetensors"))
    assert back.keys() == tensors.keys()
    stock = {hosted.naming.from_stock(key): t for key, t in model.model.state_dict().items()}
    assert all(torch.allclose(back[key].float(), t.float(), atol=5e-3) for key, t in stock.items())


def test_a_stream_that_only_linears_read_stays_and_its_overflow_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flux 2 reads inner states of Mistral 3 in a linear of its own, which no file of the encoder can scale."""
    for factor, status in ((900.0, 1), (6.0, 0)):
        model = model_of("mistral3", factor=factor)
        hosted, source = host(monkeypatch, model, fit=""), tiny.save(model, tmp_path / f"source-{status}")
        out = tmp_path / f"out-{status}.safetensors"
        assert main(["convert", str(source), str(out), "--layout", "comfy", "--as", hosted.stock]) == status
        said = " ".join(capsys.readouterr().out.split())
        assert "the stream stays as it is, since ComfyUI reads inner states of Small for Two" in said
        with torch.no_grad():
            wanted, found = model.model(input_ids=IDS, output_hidden_states=True), read_by_comfy(out, model, hosted.eps)
            assert all(error(x, y) < 1e-7 for x, y in zip(found(IDS)[1], wanted.hidden_states, strict=False))


def test_where_eps_would_cost_more_than_bf16_the_stream_stays_for_activations_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI computes in fp32 unless it is told otherwise: there the file is the source, and in fp16 it overflows."""
    model, out = model_of("gemma3"), tmp_path / "out.safetensors"
    hosted, source = host(monkeypatch, model), tiny.save(model, tmp_path / "source")
    done = convert(source, out, layout="comfy", as_class=hosted.stock)
    (note,) = [note for note in done.notes if "the stream stays as it is, for activations in fp32" in note]
    cost, bf16 = map(float, re.findall(r"\d\.\de[+-]\d\d", note))
    assert cost > bf16 and done.plan.residual_exponent == 0 and not done.safe
    with torch.no_grad():
        wanted = model.model(input_ids=IDS).last_hidden_state
        assert error(read_by_comfy(out, model, hosted.eps)(IDS)[0], wanted) < bf16 / 1000


def test_a_file_of_comfyui_is_a_source_with_the_models_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("qwen3")
    hosted, source = host(monkeypatch, model), tiny.save(model, tmp_path / "source")
    file, out = tmp_path / "comfy.safetensors", tmp_path / "out.safetensors"
    save_file(
        tools.stored(model.model, prefix="model.")
        | {"model.embed_tokens.weight": model.model.embed_tokens.weight.bfloat16().clone()},
        file,
    )
    line = ["convert", str(file), str(out), "--layout", "comfy", "--config", str(source / "config.json"), "--no-audit"]
    assert main(line) in (0, 1)
    assert main(
        ["convert", str(source), str(tmp_path / "other.safetensors"), *line[3:5], "--as", hosted.stock, "--no-audit"]
    ) in (0, 1)
    one, other = load_file(out), load_file(tmp_path / "other.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert "give its config.json with --config" in refused(capsys, *line[:5], "--force")


@pytest.mark.parametrize(("gain", "shown"), [(10.0, False), (69.0, True)])
def test_scores_that_pass_comfyuis_smaller_masks_are_said(
    gain: float, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masks are a quarter of fp16's range, stock code's the whole."""
    model = model_of("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(gain)
            layer.self_attn.k_norm.weight.fill_(gain)
    host(monkeypatch, model)
    source, out = tiny.save(model, tmp_path / "source"), tmp_path / "out.safetensors"
    done = convert(source, out, layout="comfy", as_class="Qwen3Model", run_model=False)
    assert any("its masks take 16376 from a score" in note for note in done.notes) is shown


REFUSED = {
    "a head": ("qwen3", [], "ComfyUI reads encoders alone; add --as Qwen3Model, or choose --layout single"),
    "another size": (
        "qwen3",
        ["--as", "Qwen3Model"],
        "ComfyUI has classes for Qwen3 0.6B, Qwen3 1.7B, Qwen3 4B, Qwen3 8B,",
    ),
    "another family": ("olmo2", ["--as", "Olmo2Model"], "Gemma 2 or Gemma 3, and this is 'olmo2'"),
}


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5},
    "mistral": {"rope_theta": 1e9, "sliding_window": None},
    "mistral3": {"model_type": "mistral", "rope_theta": 1e9, "sliding_window": None},
    "qwen3": {"rope_theta": 1e6, "sliding_window": 4096, "use_sliding_window": False, "attention_bias": False},
    "qwen2_5_vl": {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    "gemma2": {"rope_theta": 1e4, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256},
    "gemma3_text": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024},
    "gemma3": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024},
}
"""What published configs say of what the classes fix, as they say it."""

OTHERWISE: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_theta": 1e4}, "rope_parameters.rope_theta 500000.0, and the config says 10000.0"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type 'default', and the config says 'yarn'",
    ),
    ("llama", {"attention_bias": True}, "attention_bias False"),
    ("llama", {"mlp_bias": True}, "mlp_bias False"),
    ("mistral", {"rope_theta": 1e8}, "the config says 100000000.0"),  # the first Mistral Small 3
    ("mistral", {"sliding_window": 4096}, "sliding_window None"),
    ("mistral3", {"model_type": "ministral3"}, "model_type 'mistral', and the config says 'ministral3'"),
    ("qwen3", {"rope_theta": 5e6}, "the config says 5000000.0"),  # Qwen3 4B of July 2025
    ("qwen3", {"attention_bias": True}, "attention_bias False"),
    ("qwen3", {"use_sliding_window": True}, "sliding_window None, and the config says 4096"),
    ("qwen2_5_vl", {"rope_theta": 1e4}, "the config says 10000.0"),
    ("gemma2", {"attn_logit_softcapping": 20.0}, "attn_logit_softcapping None, and the config says 20.0"),
    ("gemma2", {"sliding_window": 128}, "the config says 128"),
    ("gemma2", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar 256"),
    ("gemma3_text", {"rope_scaling": None}, "full_attention.rope_type 'linear'"),
    ("gemma3", {"rope_local_base_freq": 5e4}, "sliding_attention.rope_theta 10000.0, and the config says 50000.0"),
    ("gemma3", {"sliding_window": 512}, "sliding_window 1024"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention False"),
    ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 17}, "layer_types"),
]


def unlike(kind: str, size: layouts.Size, folder: Path, changes: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return what is refused, and what is said, of a published config of a size with these changes."""
    says: dict[str, Any] = {"model_type": NESTED.get(kind, kind), **size.numbers, **PUBLISHED[kind], **changes}
    config = {"model_type": kind, "text_config": says} if kind in NESTED else says
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    family = known.of_model_type(kind)
    assert family is not None
    layout: Any = SimpleNamespace(family=family, stack_numbers=dict(size.numbers))
    options = Options(layout="comfy")
    refused, said = (list(options.unlike(layout, folder, refused=each)) for each in (True, False))
    fixed = layouts.COMFY_MODELS[kind].fixed
    return [f"{key} {fixed[key]!r}, and the config says {value!r}" for key, value in refused], [k for k, _ in said]


NESTED = {"mistral3": "mistral", "qwen2_5_vl": "qwen2_5_vl_text", "gemma3": "gemma3_text"}


def test_published_configs_are_what_comfyuis_classes_compute_but_for_what_is_said(tmp_path: Path) -> None:
    hosted = {kind: each for kind, each in layouts.COMFY_MODELS.items() if each.sizes}
    assert hosted.keys() == PUBLISHED.keys()
    for kind, each in hosted.items():
        for size in each.sizes:
            refused, said = unlike(kind, size, tmp_path / "config", dict(PUBLISHED_OF_SIZES.get(size.title, {})))
            assert refused == [] and set(said) == set(size.left_out), size.title


PUBLISHED_OF_SIZES = {
    "Llama 3.1 8B": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131_072,
    }
}


@pytest.mark.parametrize(("kind", "changes", "said"), OTHERWISE)
def test_a_config_that_comfyuis_class_does_not_compute_is_refused(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    refused, _ = unlike(kind, layouts.COMFY_MODELS[kind].sizes[0], tmp_path / "config", changes)
    assert any(said in each for each in refused)


def test_another_base_of_positions_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("qwen3")
    host(monkeypatch, model)
    model.config.rope_parameters["rope_theta"] *= 5
    source = tiny.save(model, tmp_path / "source")
    line = ["convert", str(source), str(tmp_path / "out.safetensors"), "--layout", "comfy", "--as", "Qwen3Model"]
    capsys.readouterr()
    assert main(line) == 2
    (said,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert "ComfyUI computes Qwen3 with rope_parameters.rope_theta" in said and "choose --layout single" in said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_comfyui_has_no_class_for_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, options, said = REFUSED[name]
    source = tiny.save(tiny.small(kind), tmp_path / "source")
    capsys.readouterr()
    assert main(["convert", str(source), str(tmp_path / "out.safetensors"), "--layout", "comfy", *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line and [path.name for path in tmp_path.iterdir()] == ["source"]
