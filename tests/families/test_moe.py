"""Models of experts: taken apart they are stock code's, blocks are sparse as there, and what is unknown is refused."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import exhaustive, tiny
from support.contract import MOVABLE, layout_of, outputs, random_plan
from support.folders import rewritten

from bf16_to_fp16 import UserError, convert, make_fp16_safe, undo, verify
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.wiring import Experts
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.rescaling.apply import apply, edited_config

KINDS = ("mixtral", "qwen3_moe-mixed", "olmoe", "glm4_moe-shared")


def stock(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model that transformers makes of a folder, whose experts are in two tensors of each layer."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    assert any(parameter.dim() == 3 for parameter in model.parameters())
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.arange(2, 74).view(4, 18)).logits.float()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_experts_taken_apart_compute_what_stock_codes_do(kind: str, tmp_path: Path) -> None:
    """In fp32 and in fp16, apart from the order of sums, which another shape of a product may change."""
    folder = tiny.save(tiny.small(kind, factor=1.0), tmp_path / "source")
    for dtype, most in ((torch.float32, 2e-6), (torch.float16, 4e-3)):
        wanted, found = logits(stock(folder, dtype)), logits(load(folder, dtype))
        assert bool(wanted.isfinite().all()) and (wanted - found).abs().max() <= most * wanted.abs().max()
        assert not any(parameter.dim() == 3 for parameter in load(folder, dtype).parameters())


@pytest.mark.parametrize("kind", exhaustive.beyond(["mixtral", "glm4_moe-shared"], KINDS))
def test_stock_code_gives_the_same_logits_to_the_bit_and_stays_finite_in_fp16(kind: str, tmp_path: Path) -> None:
    """All of its own: the source overflows, and the output, whose experts it gathers, keeps every bit in fp32."""
    model = tiny.small(kind, 2)
    with torch.no_grad():
        for weight in model.parameters():  # so that fp16 holds them at the exponents that a plan takes
            weight.copy_((weight * 2**8).round() / 2**8)
    source = tiny.save(model, tmp_path / "source")
    report = convert(source, tmp_path / "out", run_model=False).report
    assert report["verdict"] == "safe" and report["proof"] == "certified" and "inexact" not in report
    assert report["weights"]["lossless_fraction"] == 1
    before, after = (logits(stock(folder, torch.float32)) for folder in (source, tmp_path / "out"))
    assert torch.equal(before, after)
    assert not bool(logits(stock(source, torch.float16)).isfinite().all())
    assert bool(logits(stock(tmp_path / "out", torch.float16)).isfinite().all())


def test_a_model_in_memory_is_made_safe_saved_and_undone() -> None:
    model = tiny.KINDS["qwen3_moe"]()
    gathered = transformers.Qwen3MoeForCausalLM(model.config)
    assert "model.layers.0.mlp.experts.gate_up_proj" in gathered.state_dict()
    gathered.set_experts_implementation("eager")
    before = outputs(gathered)
    gathered.model.embed_tokens.weight.data.mul_(1e5)
    made = make_fp16_safe(gathered)
    assert made.plan.residual_exponent < 0 and "model.layers.0.mlp.experts.0.up_proj.weight" in gathered.state_dict()
    made.undo(gathered)
    gathered.model.embed_tokens.weight.data.div_(1e5)
    assert all((x - y).abs().max() <= 1e-5 * x.abs().max() for x, y in zip(before, outputs(gathered), strict=True))


def test_what_the_choice_is_corrected_by_stays_in_fp32(tmp_path: Path) -> None:
    """To the bit, since experts that are nearly as good would change places."""
    source = tiny.save(tiny.small("glm4_moe", factor=1.0), tmp_path / "source")
    with rewritten(source / "model.safetensors") as weights:
        name = next(name for name in weights if name.endswith("e_score_correction_bias"))
        weights[name] = torch.randn(weights[name].shape) + 7
    assert convert(source, tmp_path / "out", run_model=False).safe
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written[name], weights[name]) and written[name].dtype == torch.float32
    assert all(tensor.dtype == torch.float16 for other, tensor in written.items() if "correction" not in other)
    assert verify(tmp_path / "out", original=source, run_model=False)["verified"]
    back = load_file(undo(tmp_path / "out", tmp_path / "back") / "model.safetensors")
    assert torch.equal(back[name], weights[name])


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Those that stock code drops: behind the last one, and of no model the 46th."""
    source = tiny.save(tiny.small("glm4_moe"), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    extra = "model.layers.46.eh_proj.weight"
    save_file(weights | {extra: torch.ones(2, 2)}, source / "model.safetensors", metadata={"format": "pt"})
    layout = resolve(open_checkpoint(source))
    assert list(layout.dropped) == [extra] and extra not in layout.tensors
    save_file(weights | {"model.layers.7.x": torch.ones(2)}, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.7\.x is not part of GLM-4.5"):
        resolve(open_checkpoint(source))


def test_both_names_of_the_number_of_experts_are_written(tmp_path: Path) -> None:
    """transformers 5 saves one and 4.57 reads the other; either may be in a source."""
    source = tiny.save(tiny.small("qwen3_moe", factor=1.0), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    assert "num_experts" not in config and config["num_local_experts"] == 4
    layout = resolve(open_checkpoint(source))
    written = edited_config(layout, random_plan(layout, ()))
    assert written["num_experts"] == written["num_local_experts"] == 4
    config["num_experts"] = config.pop("num_local_experts")
    (source / "config.json").write_text(json.dumps(config))
    assert sum(isinstance(w, Experts) for w in resolve(open_checkpoint(source)).topology) == 2


@pytest.mark.parametrize("layers, sparse", [(1, 0), (2, 0), (4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (3, 5), (7, 2)])
def test_sparse_blocks_are_those_of_stock_code(layers: int, sparse: int) -> None:
    model = tiny.build("switch-encoder", num_layers=layers, num_sparse_encoder_layers=sparse)
    stock = [f"encoder.block.{i}.layer.1" for i, block in enumerate(model.encoder.block) if block.is_sparse]
    found = [w.add.removesuffix(":add") for w in layout_of(model).topology if isinstance(w, Experts)]
    assert found == stock


def test_an_encoder_that_ties_nothing_keeps_its_copy_of_the_embedding() -> None:
    """Stock code with ``tie_word_embeddings`` false would make an absent copy at random."""
    model = tiny.build("switch-encoder", 0, tie_word_embeddings=False)
    assert model.encoder.embed_tokens.weight is not model.shared.weight
    layout = layout_of(model)
    assert {"shared.weight", "encoder.embed_tokens.weight"} <= set(layout.tensors)
    moved = deepcopy(model)
    apply(moved, layout, random_plan(layout, MOVABLE, seed=3))
    for a, b in zip(outputs(model), outputs(moved), strict=True):
        assert torch.equal(a, b)
