"""Folders of sentence-transformers: what stands behind the encoder is written in fp16, bounded and undone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny
from support.fp16_sums import one_by_one
from torch import Tensor

from bf16_to_fp16 import UserError, audit, certify, convert, undo, verify
from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.side_modules import pooled
from bf16_to_fp16.progress import Progress
from bf16_to_fp16.report.facts import verdict_sentence
from bf16_to_fp16.report.remedies import NORMALISE_IN_FP32, OVER, SQUARES_UNSEEN
from bf16_to_fp16.report.schema import Report, read
from bf16_to_fp16.report.terminal import load_line
from bf16_to_fp16.run.probe import batches
from bf16_to_fp16.run.stock import load

pytestmark = pytest.mark.usefixtures("whole_probe")

WIDTH = tiny.T5_SHAPE["d_model"]
IDENTITY = "torch.nn.modules.linear.Identity"
RELU = "torch.nn.modules.activation.ReLU"
ZERO = "3_Normalize (zero vector)"
TIERS = {"half": "torch", "norm-safe": "norm-fp16", "fp16-accumulate": "fp16-accumulate"}


def sentence_encoder(
    folder: Path,
    weight: Tensor,
    *,
    modes: tuple[str, ...] = ("mean_tokens",),
    pickled: bool = False,
    normalised: bool = True,
    kind: str = "t5-encoder",
    bias: float = 1.0,
    **config: Any,
) -> Path:
    """Save an encoder with pooling, a linear and a normalisation behind it, as sentence-transformers does; bias: the
    largest of the linear's."""
    tiny.save(tiny.build(kind), folder)
    names = ("", "1_Pooling", "2_Dense", "3_Normalize")
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    listing = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listing if normalised else listing[:3]))
    for name in names[1:3]:  # that of the normalisation is empty, and no repository has it
        (folder / name).mkdir()
    pooling = {"word_embedding_dimension": WIDTH} | {f"pooling_mode_{mode}": True for mode in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    dense = {"in_features": weight.shape[1], "out_features": len(weight), "activation_function": IDENTITY} | config
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    tensors = {"linear.weight": weight, "linear.bias": bias * torch.linspace(-1, 1, len(weight))}
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
    assert result.next == result.report["next"] == NORMALISE_IN_FP32
    assert {"2_Dense.linear", "4_Dense.linear"} <= bounds(dict(result.report)).keys()
    assert [site["name"] for site in result.report["uncertified"]] == [ZERO]
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
    source = sentence_encoder(tmp_path / "source", drawn(7), pickled=pickled, normalised=False)
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


@pytest.mark.parametrize(
    ("dense", "pooling", "site"),
    [
        ({"activation_function": "torch.nn.modules.activation.ELUish"}, {}, "3_Normalize:norm"),
        # Under its name sentence-transformers may run another, or the repository's code.
        ({"activation_function": "mine.ReLU"}, {}, ZERO),
        ({}, {"pooling_mode": "whitening"}, "1_Pooling"),
        # The maximum of no token, where a prompt fills the row and is left out.
        ({}, {"pooling_mode": "max", "include_prompt": False}, "1_Pooling"),
    ],
)
def test_what_is_not_known_proves_nothing_behind_it(
    tmp_path: Path, dense: dict[str, Any], pooling: dict[str, Any], site: str
) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7), **dense)
    if pooling:
        (source / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert bounds(certify(source))[site] > 1e300


@pytest.mark.parametrize(
    ("weight", "name", "config", "said"),
    [
        (torch.full((2, WIDTH), 1e5), "linear.weight", {}, "which fp16 cannot hold"),
        (drawn(7, 5), "linear.weight", {}, "reads 5 channels, and 24 come before it"),
        (drawn(7), "weight", {}, "its linear has no weight"),
        (drawn(7), "linear.weight", {"use_residual": True}, "its residual has no weight"),
    ],
)
def test_a_linear_that_cannot_be_written_is_refused(
    tmp_path: Path, weight: Tensor, name: str, config: dict[str, Any], said: str
) -> None:
    source = sentence_encoder(tmp_path / "source", weight, **config)
    save_file({name: weight}, source / "2_Dense" / "model.safetensors")
    with pytest.raises(UserError, match=said):
        convert(source, tmp_path / "out", run_model=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("weight", "holds"), [(drawn(2), True), (torch.full((2, WIDTH), 3e4), False)])
def test_every_tier_asks_what_stands_behind_the_encoder(tmp_path: Path, weight: Tensor, holds: bool) -> None:
    source = sentence_encoder(tmp_path / "source", weight, modes=("cls_token",), normalised=False)
    result = convert(source, tmp_path / "out", run_model=False)
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


def last(folder: Path, kind: str, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """Put a module in the place of the normalisation, and return the folder."""
    (folder / "3_Last").mkdir()
    (folder / "3_Last" / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "3_Last" / "model.safetensors")
    return listed(folder, lambda modules: modules[3].update(path="3_Last", type=f"sentence_transformers.models.{kind}"))


def holds(report: Mapping[str, Any]) -> dict[str, bool]:
    """Return by site whether its bound is under its limit."""
    return {site["name"]: site["holds"] for site in report["certificate"]["sites"]}


def behind(report: Mapping[str, Any]) -> set[bool]:
    """Return whether the sites behind the encoder hold: one or both of True and False."""
    return {fits for name, fits in holds(report).items() if name[0].isdigit()}


def test_a_vector_of_zeros_that_is_normalised_is_not_certified(tmp_path: Path) -> None:
    """Two outputs behind a ReLU: where both are 0, fp16 divides 0 by an eps that is 0 too."""
    source = sentence_encoder(tmp_path / "source", drawn(2), activation_function=RELU)
    for target in TIERS:
        assert not holds(certify(source, target=target))[ZERO]
    result = convert(source, tmp_path / "out")
    assert not any(tier["proof"] == "certified" for tier in result.report["tiers"].values())
    # The audit runs what stands behind the encoder, and sees it.
    assert not result.safe and "3_Normalize:div" in {entry["signal"] for entry in result.report["unsafe"]}
    assert result.next == NORMALISE_IN_FP32 and "Nothing overflowed" in verdict_sentence(read(Report, result.report))


def test_weights_that_fp16_rounds_to_nothing_are_not_certified(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(40, scale=3e-9), bias=0.0)
    result = convert(source, tmp_path / "out")
    assert not result.safe and not holds(result.report)[ZERO]
    assert "3_Normalize:div" in {entry["signal"] for entry in result.report["unsafe"]}


def test_an_audit_runs_what_stands_behind_the_encoder(tmp_path: Path) -> None:
    """Nothing breaks on what is run, and nobody can say that no input ever gives 0: safe as observed."""
    result = convert(sentence_encoder(tmp_path / "source", drawn(40)), tmp_path / "out")
    assert result.safe and result.report["proof"] == "observed"
    assert certify(tmp_path / "out")["next"] == NORMALISE_IN_FP32
    assert [site["name"] for site in result.report["uncertified"]] == [ZERO]
    assert {name: tier["proof"] for name, tier in result.report["tiers"].items()} == {
        "torch": "observed",
        "norm-fp16": None,
        "fp16-accumulate": None,
    }
    seen = {site["name"] for site in result.report["regimes"]["half"]["sites"]}
    assert {"2_Dense.linear", "3_Normalize:linalg_vector_norm", "3_Normalize:div"} <= seen
    assert verify(tmp_path / "out")["problems"] == []


@pytest.mark.parametrize("config", [{"bias": 900.0}, {"activation_function": "torch.nn.Sigmoid", "scale": 0.01}])
def test_a_vector_that_cannot_be_zero_is_certified(tmp_path: Path, config: dict[str, Any]) -> None:
    """A bias larger than all else, or a sigmoid."""
    weight = drawn(7, scale=config.pop("scale", 0.1))
    source = sentence_encoder(tmp_path / "source", weight, modes=("cls_token",), **config)
    assert behind(certify(source)) == {True}


def test_squares_of_a_vector_have_to_fit_where_norms_compute_in_fp16(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7), modes=("cls_token",), bias=6260.0)
    assert holds(certify(source))[ZERO]
    for target in ("norm-safe", "fp16-accumulate"):
        assert not holds(certify(source, target=target))["3_Normalize (sum of squares)"]
    assert not any(certify(source)["tiers"][name]["holds"] for name in ("norm-fp16", "fp16-accumulate"))


def test_a_sum_of_many_tokens_has_to_fit_where_sums_are_fp16(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7), normalised=False)
    most = {n: holds(certify(source, target="fp16-accumulate", max_length=n))["1_Pooling:sum"] for n in (8, 32768)}
    assert most == {8: True, 32768: False}
    states = torch.full((1, 3000, 1), 30, dtype=torch.float16)
    assert states.sum(1).isinf().all()


@pytest.mark.parametrize("mode", ["mean", "mean_sqrt_len_tokens", "weightedmean"])
@pytest.mark.parametrize("count", [3, 361, 3000])
def test_no_pooling_in_fp16_passes_its_bound(mode: str, count: int) -> None:
    """Sums one by one, each addition rounded; the count stops at 2048."""
    terms = np.full(count, 2.5, np.float16)
    ranks = np.arange(1, count + 1).astype(np.float16) if mode == "weightedmean" else np.ones(count, np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        total, divisor = (one_by_one(each, np.random.default_rng(0))[0] for each in (terms * ranks, ranks))
        made = total / (np.sqrt(divisor) if mode == "mean_sqrt_len_tokens" else divisor)
    bound, sums = pooled(mode, torch.tensor([2.5]).double(), Arithmetic(count, norms16=True, sums16=True))
    assert not sums <= 65504 or (float(made) <= float(bound) and float(total) <= sums)
    assert np.isfinite(total) or sums > 65504


def test_the_bound_of_a_sum_over_the_root_of_the_length_grows_with_the_length(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7), modes=("mean_sqrt_len_tokens",))
    short, long = (bounds(certify(source, max_length=n))["1_Pooling"] for n in (4, 400))
    assert long == pytest.approx(10 * short, rel=0.01)


def test_a_proof_for_less_than_the_config_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7), modes=("mean_sqrt_len_tokens",), normalised=False)
    (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 300, "do_lower_case": False}))
    for run in (certify, lambda source, **options: convert(source, tmp_path / "out", run_model=False, **options)):
        run(source, max_length=4, progress=Progress())
        assert "the proof is for 4 positions at most, and source takes 300 by its config" in capsys.readouterr().err
    certify(source, max_length=300, progress=Progress())
    assert "by its config" not in capsys.readouterr().err


@pytest.mark.parametrize(("gain", "fits"), [(60000.0, False), (2.0, True)])
def test_a_layer_norm_behind_the_pooling_is_bounded(tmp_path: Path, gain: float, fits: bool) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7))
    last(source, "LayerNorm", {"norm.weight": torch.full((7,), gain), "norm.bias": torch.ones(7)}, dimension=7)
    report, made = certify(source), torch.nn.LayerNorm(7)(torch.eye(7) * 100) * gain + 1
    assert holds(report)["3_Last.norm:layer_norm"] == fits
    assert 0.5 * bounds(report)["3_Last.norm:layer_norm"] < float(made.abs().max())
    assert float(made.abs().max()) <= bounds(report)["3_Last.norm:layer_norm"]
    assert "3_Last (sum of squares)" in holds(certify(source, target="norm-safe"))


@pytest.mark.parametrize("tensors", [{}, {"norm.weight": torch.ones(6), "norm.bias": torch.ones(6)}])
def test_a_layer_norm_of_another_width_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    source = last(sentence_encoder(tmp_path / "source", drawn(7)), "LayerNorm", tensors or {"a": torch.ones(1)})
    with pytest.raises(UserError, match="its norm has not a weight and a bias for each of the 7 channels"):
        certify(source)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda modules: modules[3].update(type="sentence_transformers.models.LSTM", path="2_Dense"), "has no bound"),
        (lambda modules: modules[2].update(type="mine.Dense"), "'mine.Dense' in '2_Dense' has no bound"),
        (lambda modules: modules[0].update(type="sentence_transformers.models.Router"), "begins with .*Router"),
        (lambda modules: modules.pop(0), "begins with .*Pooling"),
        (lambda modules: modules[0].update(path="1_Pooling"), "begins with .*Transformer' in '1_Pooling'"),
        (lambda modules: modules[1].update(path=""), "Pooling' in '.' has no bound"),
        (lambda modules: modules[3].update(name="2"), "two modules have the name '2'"),
    ],
)
def test_what_has_no_bound_is_refused_before_anything_runs(tmp_path: Path, change: Any, said: str) -> None:
    source = listed(sentence_encoder(tmp_path / "source", drawn(7)), change)
    for run in (certify, audit, lambda source: convert(source, tmp_path / "out")):
        with pytest.raises(UserError, match=said):
            run(source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"config_args": {"layer_norm_epsilon": 3.0}}, "'config_args' has 'layer_norm_epsilon'"),
        ({"model_args": {"num_layers": 1}}, "'model_args' has 'num_layers'"),
        ({"config_kwargs": {"num_layers": 1}}, "'config_kwargs' has 'num_layers'"),
        ({"model_kwargs": {"torch_dtype": "bfloat16"}}, "'model_kwargs' has 'torch_dtype'"),
        ({"model_kwargs": [1]}, "'model_kwargs' has"),
        ({"transformer_task": "fill-mask"}, "'transformer_task' is 'fill-mask'"),
        (
            {"modality_config": {"text": {"method": "forward", "method_output_name": ["hidden_states", -2]}}},
            "'method_output_name' is .'hidden_states', -2.",
        ),
    ],
)
def test_what_changes_the_encoder_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7))
    # An empty file is passed over, as sentence-transformers does.
    (source / "sentence_bert_config.json").write_text("{}")
    (source / "sentence_roberta_config.json").write_text(json.dumps({"max_seq_length": 64} | config))
    with pytest.raises(UserError, match=said):
        certify(source)


def test_a_folder_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    """Of a cross-encoder sentence-transformers takes the encoder and a mean pooling, whatever is listed."""
    source = sentence_encoder(tmp_path / "source", drawn(7))
    (source / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    with pytest.raises(UserError, match="'model_type' is 'CrossEncoder'"):
        certify(source)
    (source / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SentenceTransformer"}))
    assert ZERO in bounds(certify(source))


def test_a_config_that_changes_nothing_is_taken(tmp_path: Path) -> None:
    source = sentence_encoder(tmp_path / "source", drawn(7), normalised=False)
    text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    config = {"config_args": {}, "model_args": {"trust_remote_code": True}, "modality_config": text}
    config |= {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
    (source / "sentence_bert_config.json").write_text(json.dumps(config))
    assert behind(certify(source)) == {True}


def test_dropout_counts_in_training_before_the_pooling_and_behind_it(tmp_path: Path) -> None:
    source = last(sentence_encoder(tmp_path / "source", drawn(7)), "Dropout", dropout=0.5)
    half, train = (bounds(certify(source, target=target)) for target in ("half", "train"))
    assert train["1_Pooling"] > 1.05 * half["1_Pooling"] and "3_Last:mul" not in half
    assert train["3_Last:mul"] == pytest.approx(2 * train["2_Dense.linear"], rel=0.01)
