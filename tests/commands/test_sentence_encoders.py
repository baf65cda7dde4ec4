"""Folders of sentence-transformers: what stands behind the encoder is written in fp16, bounded and undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny
from torch import Tensor

from bf16_to_fp16 import UserError, certify, convert, undo, verify
from bf16_to_fp16.run.probe import batches
from bf16_to_fp16.run.stock import load

WIDTH = tiny.T5_SHAPE["d_model"]
IDENTITY = "torch.nn.modules.linear.Identity"


def sentence_encoder(
    folder: Path, weight: Tensor, *, modes: tuple[str, ...] = ("mean_tokens",), pickled: bool = False, **config: Any
) -> Path:
    """Save a T5 encoder with pooling, a linear and a normalisation behind it, as sentence-transformers does."""
    tiny.save(tiny.build("t5-encoder"), folder)
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
    assert verify(result.out, run_model=False)["problems"] == []
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
