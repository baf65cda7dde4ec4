"""Folders of sentence-transformers: what stands behind the encoder is carried over and run by an audit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import tiny
from support.folders import rewritten
from support.pipelines import contents
from torch import Tensor

from bf16_to_fp16 import UserError, audit, certify, convert, undo, verify
from bf16_to_fp16.measuring import sentence_vectors
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.report.coverage import every_input
from bf16_to_fp16.report.schema import Report, read
from bf16_to_fp16.report.terminal import load_line

WIDTH = tiny.T5_SHAPE["d_model"]
IDENTITY = "torch.nn.modules.linear.Identity"
RELU = "torch.nn.modules.activation.ReLU"


def sentence_encoder(
    folder: Path,
    weight: Tensor,
    *,
    pickled: bool = False,
    normalised: bool = True,
    kind: str = "t5-encoder",
    **config: Any,
) -> Path:
    """Save an encoder with pooling, a linear and a normalisation behind it, as sentence-transformers does."""
    tiny.save(tiny.build(kind, num_hidden_layers=1), folder)
    names = ("", "1_Pooling", "2_Dense", "3_Normalize")
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    listing = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listing if normalised else listing[:3]))
    for name in names[1:3]:  # that of the normalisation is empty, and no repository has it
        (folder / name).mkdir()
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
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
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def listed(folder: Path, change: Callable[..., object]) -> Path:
    with rewritten(folder / "modules.json") as listing:
        change(listing)
    return folder


def behind(report: Any) -> set[str]:
    return {site["name"] for site in report["regimes"]["half"]["sites"] if site["name"][0].isdigit()}


def test_an_embedding_gemma_is_converted_with_both_of_its_linears(first_batch: None, tmp_path: Path) -> None:
    """768 channels, to 3072 and back: here 24, 60 and 24."""
    source = sentence_encoder(tmp_path / "source", drawn(60, scale=0.1), kind="embeddinggemma")
    (source / "4_Dense").mkdir()
    shape = {"in_features": 60, "out_features": WIDTH, "bias": False, "activation_function": IDENTITY}
    (source / "4_Dense" / "config.json").write_text(json.dumps(shape))
    save_file({"linear.weight": drawn(WIDTH, 60, scale=0.1)}, source / "4_Dense" / "model.safetensors")
    dense = {"path": "4_Dense", "type": "sentence_transformers.models.Dense"}
    result = convert(listed(source, lambda modules: modules.insert(3, dense)), tmp_path / "out")
    assert result.safe and {"2_Dense.linear", "4_Dense.linear", "3_Normalize:div"} <= behind(result.report)
    # ``.half()`` would round the frequencies of its positions.
    out = tmp_path / "out"
    assert load_line(out) == f'load: SentenceTransformer("{out}", model_kwargs={{"dtype": torch.float16}})'


@pytest.mark.parametrize("pickled", [False, True])
def test_what_stands_behind_the_encoder_is_carried_over_and_back_byte_for_byte(tmp_path: Path, pickled: bool) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7), pickled=pickled, normalised=False)
    result = convert(source, tmp_path / "out", run_model=False)
    assert result.safe and result.out is not None
    back = undo(result.out, tmp_path / "back")
    wanted = {name: data for name, data in contents(source).items() if "/" in name}
    for folder in (result.out, back):
        assert {name: data for name, data in contents(folder).items() if "/" in name} == wanted
    assert verify(result.out, original=source)["verified"]
    assert load_line(result.out) == f'load: SentenceTransformer("{result.out}").half()'


def test_the_proof_says_that_it_ends_at_the_last_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = sentence_encoder(tmp_path / "source", torch.full((2, WIDTH), 3e4))
    report = certify(source, progress=Progress())
    assert "the proof ends at the encoder's last states" in capsys.readouterr().err
    assert not [site for site in report["certificate"]["sites"] if site["name"][0].isdigit()]
    result = convert(source, tmp_path / "out", run_model=False)
    assert every_input(read(Report, result.report)).endswith(" to the encoder's last states")
    assert "The proof ends at the encoder's last states" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.usefixtures("first_batch")
def test_an_audit_runs_what_stands_behind_the_encoder_however_its_folders_are_spelt(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(40))
    listed(source, lambda modules: [modules[1].update(path="1_Pooling/"), modules[2].update(path="./2_Dense")])
    result = convert(source, tmp_path / "out")
    assert (tmp_path / "out" / "2_Dense").is_dir()
    assert result.safe and {"2_Dense.linear", "3_Normalize:linalg_vector_norm"} <= behind(result.report)
    # The squares of a vector in fp16 are measured by no run.
    assert {name: tier["proof"] for name, tier in result.report["tiers"].items()}["torch"] == "certified"
    assert verify(tmp_path / "out")["problems"] == []


@pytest.mark.usefixtures("whole_probe_once")
def test_a_linear_that_overflows_and_a_vector_of_zeros_are_seen(tmp_path: Path) -> None:
    """Where the output behind a ReLU is 0, fp16 divides 0 by an eps that is 0 too."""
    zeros: dict[str, Any] = {"activation_function": RELU}
    for name, weight, config in (
        ("2_Dense.linear", torch.full((2, WIDTH), 3e4), dict[str, Any]()),
        ("3_Normalize:div", drawn(1), zeros),
    ):
        result = convert(sentence_encoder(tmp_path / name, weight, **config), tmp_path / f"{name}-out")
        assert not result.safe and name in {entry["signal"] for entry in result.report["unsafe"]}


def test_a_linear_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7))
    save_file({"weight": drawn(7)}, source / "2_Dense" / "model.safetensors")
    with pytest.raises(UserError, match="2_Dense: sentence-transformers cannot run it"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_sentence_transformers_the_encoder_alone_is_run_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7))
    monkeypatch.setattr(sentence_vectors, "find_spec", lambda name: None)
    assert behind(audit(source, regimes=("half",))) == set()
    certify(source, progress=Progress())
    assert "sentence-transformers, which runs them, is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda modules: modules[2].update(type="mine.Dense"), "'mine.Dense' in '2_Dense', but only"),
        (lambda modules: modules[0].update(type="sentence_transformers.models.Router"), "Router' in '.', but"),
        (lambda modules: modules[2].update(path="5_Dense"), "module '5_Dense' is not in "),
        (lambda modules: modules.pop(0), "Pooling' in '1_Pooling', but only"),
        (lambda modules: modules[0].update(path="1_Pooling"), "Transformer' in '1_Pooling', but only"),
        (lambda modules: modules[1].update(path=""), "Pooling' in '.', but only"),
    ],
)
def test_what_may_read_other_states_is_refused_before_anything_runs(tmp_path: Path, change: Any, said: str) -> None:
    source = listed(sentence_encoder(tmp_path / "source", drawn(7)), change)
    for run in (certify, audit, lambda source: convert(source, tmp_path / "out")):
        with pytest.raises(UserError, match=said):
            run(source)
    assert not (tmp_path / "out").exists()
