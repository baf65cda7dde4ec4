"""Folders of sentence-transformers: what stands behind the encoder is written in fp16, bounded and undone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny
from torch import Tensor

from bf16_to_fp16 import UserError, audit, certify, convert, undo, verify
from bf16_to_fp16.report.remedies import OVER, SQUARES_UNSEEN
from bf16_to_fp16.report.terminal import load_line
from bf16_to_fp16.run.probe import batches
from bf16_to_fp16.run.stock import load

pytestmark = pytest.mark.usefixtures("no_pictures")

WIDTH = tiny.T5_SHAPE["d_model"]
IDENTITY = "torch.nn.modules.linear.Identity"


def sentence_encoder(
    folder: Path,
    weight: Tensor,
    *,
    modes: tuple[str, ...] = ("mean_tokens",),
    pickled: bool = False,
    kind: str = "t5-encoder",
    **config: Any,
) -> Path:
    """Save an encoder with pooling, a linear and a normalisation behind it, as sentence-transformers does."""
    tiny.save(tiny.build(kind), folder)
    names = ("", "1_Pooling", "2_Dense", "3_Normalize")
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    listing = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listing))
    for name in names[1:3]:  # that of the normalisation is empty, and no repository has it
        (folder / name).mkdir()
    pooling = {"word_embedding_dimension": WIDTH} | {f"pooling_mode_{mode}": True for mode in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    dense = {"in_features": weight.shape[1], "out_features": len(weight), "activation_function": IDENTITY} | config
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    tensors = {"linear.weight": weight, "linear.bias": torch.linspace(-1, 1, len(weight))}
    if pickled:
        torch.save(tensors, folder / "2_Dense" / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return folder


def drawn(rows: int, columns: int = WIDTH, scale: float = 1.0) -> Tensor:
    """Return random weights in fp32."""
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def listed(folder: Path, change: Callable[..., object]) -> Path:
    """Change the list of a folder's modules, and return the folder."""
    listing = json.loads((folder / "modules.json").read_text())
    change(listing)
    (folder / "modules.json").write_text(json.dumps(listing))
    return folder


def with_another_dense(folder: Path, weight: Tensor, place: int = 3, **config: Any) -> Path:
    """Put a linear without a bias at a place in the list of modules, by default behind the first, and return the
    folder."""
    (folder / "4_Dense").mkdir()
    (folder / "4_Dense" / "config.json").write_text(json.dumps({"activation_function": IDENTITY} | config))
    save_file({"linear.weight": weight}, folder / "4_Dense" / "model.safetensors")
    entry = {"path": "4_Dense", "type": "sentence_transformers.models.Dense"}
    return listed(folder, lambda modules: modules.insert(place, entry))


def test_an_embedding_gemma_is_converted_with_both_of_its_linears(tmp_path: Path) -> None:
    """768 channels, to 3072 and back: here 24, 60 and 24."""
    source = sentence_encoder(tmp_path / "source", drawn(60, scale=0.1), kind="embeddinggemma")
    with_another_dense(source, drawn(WIDTH, 60, scale=0.1))
    result = convert(source, tmp_path / "out", run_model=False)
    assert result.safe and {"2_Dense.linear", "4_Dense.linear"} <= bounds(dict(result.report)).keys()
    # ``.half()`` would round the frequencies of its positions.
    assert load_line(tmp_path / "out") == (
        f'load: SentenceTransformer("{tmp_path / "out"}", model_kwargs={{"dtype": torch.float16}})'
    )
    written = load_file(tmp_path / "out" / "4_Dense" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float16}
    undo(tmp_path / "out", tmp_path / "back")
    assert certify(tmp_path / "back")["certificate"]["holds"] is False


def bounds(report: dict[str, Any]) -> dict[str, float]:
    """Return the bounds of a report's certificate by site."""
    return {site["name"]: site["bound"] for site in report["certificate"]["sites"]}


@pytest.mark.parametrize("pickled", [False, True])
def test_its_linear_is_written_in_fp16_and_comes_back_in_its_own_dtype(tmp_path: Path, pickled: bool) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7), pickled=pickled)
    result = convert(source, tmp_path / "out", run_model=False)
    assert result.safe and result.out is not None
    assert [path.name for path in sorted((result.out / "2_Dense").iterdir())] == ["config.json", "model.safetensors"]
    written = load_file(result.out / "2_Dense" / "model.safetensors")
    assert torch.equal(written["linear.weight"], drawn(7).half()) and written["linear.bias"].dtype == torch.float16
    assert result.report["source"]["side_dtypes"] == {"2_Dense/linear.bias": "F32", "2_Dense/linear.weight": "F32"}
    assert verify(result.out, run_model=False)["verified"]
    assert "SentenceTransformer" in (result.out / "README.md").read_text()
    assert load_line(result.out) == f'load: SentenceTransformer("{result.out}").half()'
    back = load_file(undo(result.out, tmp_path / "back") / "2_Dense" / "model.safetensors")
    assert back["linear.weight"].dtype == torch.float32 and torch.equal(back["linear.weight"], drawn(7).half().float())


@pytest.mark.parametrize("modes", [("mean_tokens",), ("cls_token", "max_tokens"), ("mean_sqrt_len_tokens",)])
def test_no_sentence_passes_the_bounds_behind_the_encoder(tmp_path: Path, modes: tuple[str, ...]) -> None:
    """The rows of the linear are made of what the encoder gives, so that its bound is not far off."""
    tiny.save(tiny.build("t5-encoder"), tmp_path / "encoder")
    encoder, found = load(tmp_path / "encoder", torch.float32), []
    with torch.no_grad():
        for batch in batches(encoder.config, None, None):
            states = encoder(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
            mask = batch.attention_mask[..., None]
            mean = (states * mask).sum(1) / mask.sum(1)
            each = {
                "mean_tokens": mean,
                "mean_sqrt_len_tokens": mean * mask.sum(1).sqrt(),
                "cls_token": states[:, 0],
                "max_tokens": states.masked_fill(mask == 0, -torch.inf).amax(1),
            }
            found.append(torch.cat([each[mode] for mode in modes], 1))
    pooled = torch.cat(found)
    weight = pooled.sign()[:40] * 50
    source = sentence_encoder(tmp_path / "source", weight, modes=modes)
    proven = bounds(certify(source, max_length=512))
    made = pooled @ weight.t() + torch.linspace(-1, 1, len(weight))
    assert 0.02 * proven["1_Pooling"] < float(pooled.abs().max()) <= proven["1_Pooling"]
    assert 0.02 * proven["2_Dense.linear"] < float(made.abs().max()) <= proven["2_Dense.linear"]
    assert 0.02 * proven["3_Normalize:norm"] < float(made.norm(dim=1).max()) <= proven["3_Normalize:norm"]


def test_a_linear_that_overflows_is_not_certified(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", torch.full((2, WIDTH), 3e4))
    result = convert(source, tmp_path / "out", run_model=False)
    assert not result.safe and result.report["proof"] == "observed"
    assert "2_Dense.linear" in {site["name"] for site in result.report["uncertified"]}
    audited = audit(tmp_path / "out", regimes=("half",))
    for report in (result.report, certify(tmp_path / "out"), audited):
        assert not any(tier["proof"] == "certified" for tier in report["tiers"].values())


def test_an_activation_that_is_not_known_proves_nothing_behind_it(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7), activation_function="torch.nn.modules.activation.ELUish")
    assert bounds(certify(source))["3_Normalize:norm"] > 1e300


@pytest.mark.parametrize(
    ("weight", "said"),
    [(torch.full((2, WIDTH), 1e5), "which fp16 cannot hold"), (drawn(7, 5), "reads 5 channels, and 24 come before it")],
)
def test_a_linear_that_cannot_be_written_is_refused(tmp_path: Path, weight: Tensor, said: str) -> None:
    source = sentence_encoder(tmp_path / "source", weight)
    with pytest.raises(UserError, match=said):
        convert(source, tmp_path / "out", run_model=False)
    assert not (tmp_path / "out").exists()


def test_a_converted_one_is_verified(tmp_path: Path) -> None:
    result = convert(sentence_encoder(tmp_path / "source", drawn(7)), tmp_path / "out", run_model=False)
    assert verify(tmp_path / "out", run_model=False)["problems"] == []
    assert result.safe


@pytest.mark.parametrize(("weight", "holds"), [(drawn(2), True), (torch.full((2, WIDTH), 3e4), False)])
def test_every_tier_asks_what_stands_behind_the_encoder(tmp_path: Path, weight: Tensor, holds: bool) -> None:
    result = convert(sentence_encoder(tmp_path / "source", weight), tmp_path / "out", run_model=False)
    # Of the stricter ones the bounds hold, and no more is known of what is not run.
    reasons = ["", SQUARES_UNSEEN, SQUARES_UNSEEN] if holds else [OVER] * 3
    for report in (result.report, certify(tmp_path / "out")):
        assert [tier["reason"] for tier in report["tiers"].values()] == reasons


def test_a_sigmoid_gives_a_half_of_nothing(tmp_path: Path) -> None:
    source = sentence_encoder(
        tmp_path / "source", torch.zeros(24, WIDTH), activation_function="torch.nn.modules.activation.Sigmoid"
    )
    weight = torch.full((2, 24), 6e4)
    made = float((torch.sigmoid(torch.linspace(-1, 1, 24)) @ weight.t()).max())
    assert made <= bounds(certify(with_another_dense(source, weight)))["4_Dense.linear"]


@pytest.mark.parametrize("aside", [{"module_output_name": "other"}, {"module_input_name": "token_embeddings"}])
def test_a_linear_aside_proves_nothing_of_the_next(tmp_path: Path, aside: dict[str, Any]) -> None:
    """The second linear reads what the pooling gave, and not what the first made small."""
    source = sentence_encoder(tmp_path / "source", drawn(WIDTH, scale=1e-4), **aside)
    assert bounds(certify(with_another_dense(source, drawn(7))))["4_Dense.linear"] > 1e300


def test_a_pooling_behind_a_linear_pools_the_tokens(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(WIDTH, scale=1e-4))
    before = bounds(certify(source))["1_Pooling"]
    again = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    listed(source, lambda modules: modules.insert(3, again))
    found = bounds(certify(source))
    assert found["1_Pooling"] == before and found["3_Normalize:norm"] > before


def test_a_pooling_that_is_not_known_proves_nothing(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7))
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "whitening"}))
    assert bounds(certify(source))["1_Pooling"] > 1e300


@pytest.mark.parametrize("kind", ["t5", "t5-states"])
def test_of_a_model_with_a_decoder_the_encoder_is_pooled(tmp_path: Path, kind: str) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7))
    (source / "model.safetensors").unlink()
    model = tiny.build(kind)
    with torch.no_grad():
        model.get_decoder().final_layer_norm.weight.mul_(2.0**-10)
    tiny.save(model, source)
    with torch.no_grad():
        states = model.get_encoder()(input_ids=torch.arange(8, 40)[None]).last_hidden_state
    assert float(states.abs().max()) <= bounds(certify(source))["1_Pooling"]


@pytest.mark.parametrize("spelling", ["./{}", "{}/"])
def test_another_spelling_of_a_folder_is_the_same_folder(tmp_path: Path, spelling: str) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7))
    for number in (1, 2):
        listed(source, lambda modules, i=number: modules[i].update(path=spelling.format(modules[i]["path"])))
    out = convert(source, tmp_path / "out", run_model=False).out
    assert out is not None and (out / "1_Pooling" / "config.json").is_file()
    assert load_file(out / "2_Dense" / "model.safetensors")["linear.weight"].dtype == torch.float16


def test_a_linear_without_a_weight_is_refused(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7))
    save_file({"weight": drawn(7)}, source / "2_Dense" / "model.safetensors")
    with pytest.raises(UserError, match="its linear has no weight"):
        certify(source)


def test_a_linear_behind_a_normalisation_reads_a_vector_of_length_one(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", torch.eye(WIDTH))
    found = bounds(certify(with_another_dense(source, torch.full((2, WIDTH), 3.0), place=4)))
    assert found["4_Dense.linear"] > 3 * WIDTH**0.5


@pytest.mark.parametrize("projected", [False, True])
def test_a_residual_joins_what_a_linear_gives(tmp_path: Path, projected: bool) -> None:
    """The linear gives its bias alone, so that what follows reads what the pooling gave."""
    source = sentence_encoder(tmp_path / "source", torch.zeros(WIDTH, WIDTH), use_residual=True)
    tensors = {"linear.weight": torch.zeros(WIDTH, WIDTH)}
    if projected:
        tensors["residual.weight"] = torch.eye(WIDTH)
    save_file(tensors, source / "2_Dense" / "model.safetensors")
    found = bounds(certify(with_another_dense(source, torch.eye(WIDTH))))
    assert found["1_Pooling"] <= found["2_Dense.linear"] and found["1_Pooling"] <= found["4_Dense.linear"]
