"""The same folder computes the same function in transformers 5, transformers 4.57, CTranslate2."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from compat.harness import (
    Outcome,
    compare_logits,
    compare_scores,
    compute_logits,
    compute_scores,
    edit_config,
    make_inputs,
    read_config,
    relative_error,
    run_script,
)
from safetensors.torch import load_file, save_file
from support import config_edits, exhaustive
from support.tiny import KINDS, T5_SHAPE

from bf16_to_fp16 import convert
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.errors import UserError
from bf16_to_fp16.run.agreement import agreed_layout

NAMED = ("scale_decoder_outputs", "tie_word_embeddings")
"""Keys of which docs/certificate.md says what 4.57 makes of them beside a head of its own."""

VOCABULARY = 384  # that of the byte tokenizer, which needs no file of its own
UNTIED = ["gated", "mt5", "umt5", "longt5", "longt5-local"]
SCORED = ["t5", "gated", "mt5", "pegasus"]
SAME_IN_BOTH = ["t5", "gated", "mt5", "pegasus", "mbart", "t5-encoder", "longt5-tied", "switch"]
# CTranslate2 has one number of heads for both stacks of a Pegasus.
CHANGES = {"pegasus": {"decoder_attention_heads": 3}}

Outcomes = dict[str, Outcome]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders exactly as transformers 5 writes them, by family."""
    root = tmp_path_factory.mktemp("saved")
    for name in {*SAME_IN_BOTH, *UNTIED}:
        torch.manual_seed(0)
        model = KINDS[name](vocab_size=VOCABULARY, **CHANGES.get(name, {}))
        model.save_pretrained(root / name)
        # Minimal on purpose: 4.57 cannot read the tokenizer_config.json that transformers 5 saves.
        (root / name / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def flagged(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return copies of ``saved`` with what transformers 5 leaves out of config.json.

    That is whether the head is tied, and a key of published Pegasus files that CTranslate2 reads.
    """
    root = tmp_path_factory.mktemp("flagged")
    for name, folder in saved.items():
        shutil.copytree(folder, root / name)
        if name in UNTIED:
            edit_config(root / name, tie_word_embeddings=False)
    edit_config(root / "pegasus", normalize_before=True, normalize_embedding=False)
    return {name: root / name for name in saved}


def outcomes_by_name(folders: dict[str, Path], python: str | Path) -> Outcomes:
    return dict(zip(folders, compute_logits(list(folders.values()), python), strict=True))


@pytest.fixture(scope="module")
def as_saved_in_5(saved: dict[str, Path], warm_python: Path) -> Outcomes:
    return outcomes_by_name(saved, warm_python)


@pytest.fixture(scope="module")
def as_saved_in_4(saved: dict[str, Path], compat_python: Path) -> Outcomes:
    return outcomes_by_name(saved, compat_python)


@pytest.fixture(scope="module")
def flagged_in_5(flagged: dict[str, Path], warm_python: Path) -> Outcomes:
    return outcomes_by_name(flagged, warm_python)


@pytest.fixture(scope="module")
def flagged_in_4(flagged: dict[str, Path], compat_python: Path) -> Outcomes:
    return outcomes_by_name(flagged, compat_python)


def scaled_copy(source: Path, out: Path, factor: float, skip: str = "") -> Path:
    """Divide a T5's residual stream by ``factor``, by hand; ``skip`` leaves one tensor alone."""
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith((".o.weight", ".wo.weight", "shared.weight")) and name != skip:
            tensors[name] = tensors[name] / factor
    if "lm_head.weight" not in tensors:
        tensors["decoder.final_layer_norm.weight"] *= factor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    eps = read_config(source)["layer_norm_epsilon"]
    assert isinstance(eps, float)
    edit_config(out, layer_norm_epsilon=eps / factor**2)
    return out


def test_the_two_environments_run_transformers_5_and_4(as_saved_in_5: Outcomes, as_saved_in_4: Outcomes) -> None:
    assert {outcome.version for outcome in as_saved_in_5.values()} == {transformers.__version__}
    assert transformers.__version__.startswith("5.")
    assert {outcome.version for outcome in as_saved_in_4.values()} == {"4.57.6"}


@pytest.mark.parametrize("name", SAME_IN_BOTH)
def test_a_folder_that_states_its_tying_computes_the_same_in_both_versions(
    name: str, flagged_in_5: Outcomes, flagged_in_4: Outcomes
) -> None:
    for outcome in (flagged_in_5[name], flagged_in_4[name]):
        assert outcome.missing == outcome.unexpected == ()
    assert relative_error(flagged_in_4[name].output, flagged_in_5[name].output) <= 1e-5


@pytest.mark.parametrize("name", ["longt5", "longt5-local"])
def test_a_converted_longt5_computes_the_same_in_both_versions_though_4_calls_its_embeddings_missing(
    name: str, flagged: dict[str, Path], tmp_path: Path, warm_python: Path, compat_python: Path
) -> None:
    convert(flagged[name], tmp_path / "out", run_model=False)
    (five,), (four,) = (compute_logits([tmp_path / "out"], python) for python in (warm_python, compat_python))
    assert four.missing == ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight") and four.unexpected == ()
    assert relative_error(four.output, five.output) <= 1e-6


@pytest.mark.parametrize("name", UNTIED)
def test_transformers_5_reads_an_untied_head_whatever_the_flag_says(
    name: str, as_saved_in_5: Outcomes, flagged_in_5: Outcomes
) -> None:
    assert np.array_equal(as_saved_in_5[name].output, flagged_in_5[name].output)


@pytest.mark.parametrize("name", UNTIED)
def test_transformers_4_ties_an_untied_head_under_the_flag_that_transformers_5_writes(
    name: str, saved: dict[str, Path], as_saved_in_4: Outcomes, flagged_in_4: Outcomes
) -> None:
    assert read_config(saved[name])["tie_word_embeddings"] is True
    assert as_saved_in_4[name].missing == ()  # and not a word about it
    assert relative_error(as_saved_in_4[name].output, flagged_in_4[name].output) > 0.5


def test_untied_umt5_logits_differ_between_the_versions_by_the_root_of_the_width(
    flagged_in_5: Outcomes, flagged_in_4: Outcomes
) -> None:
    in_5 = flagged_in_5["umt5"].output * math.sqrt(T5_SHAPE["d_model"])
    assert relative_error(flagged_in_4["umt5"].output, in_5) <= 1e-5


def test_a_head_that_stock_code_invents_is_an_infinite_error(
    saved: dict[str, Path], tmp_path: Path, compat_python: Path
) -> None:
    untied = shutil.copytree(saved["t5"], tmp_path / "untied")
    edit_config(untied, tie_word_embeddings=False)
    assert compare_logits(saved["t5"], untied, compat_python) == math.inf


@pytest.mark.parametrize("name", ["t5", "gated"])
def test_a_residual_stream_divided_by_8_keeps_the_logits_in_transformers_4(
    name: str, flagged: dict[str, Path], tmp_path: Path, compat_python: Path
) -> None:
    scaled = scaled_copy(flagged[name], tmp_path / "scaled", 8.0)
    assert compare_logits(flagged[name], scaled, compat_python) <= 1e-6


def test_one_tensor_left_out_of_a_rescaling_shows_in_the_logits_and_in_the_scores(
    flagged: dict[str, Path], tmp_path: Path, compat_python: Path
) -> None:
    source, forgotten = flagged["gated"], "encoder.block.1.layer.1.DenseReluDense.wo.weight"
    wrong = scaled_copy(source, tmp_path / "wrong", 8.0, skip=forgotten)
    assert compare_logits(source, wrong, compat_python) > 1e-3
    assert compare_scores(source, wrong, compat_python) > 1e-3


@pytest.mark.parametrize("name", ["t5", "gated"])
def test_ctranslate2_scores_a_residual_stream_divided_by_8_as_it_scores_the_source(
    name: str, flagged: dict[str, Path], tmp_path: Path, compat_python: Path
) -> None:
    scaled = scaled_copy(flagged[name], tmp_path / "scaled", 8.0)
    assert compare_scores(flagged[name], scaled, compat_python) <= 1e-4


@pytest.fixture(scope="module")
def scores(flagged: dict[str, Path], compat_python: Path) -> dict[str, np.ndarray]:
    computed = compute_scores([flagged[name] for name in SCORED], compat_python)
    return dict(zip(SCORED, computed, strict=True))


@pytest.mark.parametrize("name", SCORED)
def test_ctranslate2_scores_are_the_log_softmax_of_transformers_logits(
    name: str,
    flagged: dict[str, Path],
    flagged_in_4: Outcomes,
    scores: dict[str, np.ndarray],
) -> None:
    targets = torch.from_numpy(make_inputs(flagged[name])["decoder_input_ids"][:, 1:])
    targets = torch.cat([targets, torch.ones_like(targets[:, :1])], dim=1)  # 1 ends a sentence
    log_probabilities = torch.from_numpy(flagged_in_4[name].output).log_softmax(-1)
    expected = log_probabilities.gather(-1, targets[..., None])[..., 0].numpy()
    assert relative_error(scores[name], expected) <= 1e-4


def test_ctranslate2_is_refused_under_transformers_5(flagged: dict[str, Path], warm_python: Path) -> None:
    with pytest.raises(RuntimeError, match=r"score_ct2\.py failed"):
        compute_scores([flagged["t5"]], warm_python)


def test_stock_fp16_logits_are_near_the_fp32_ones_and_not_equal(
    flagged: dict[str, Path], flagged_in_4: Outcomes, compat_python: Path
) -> None:
    half = compute_logits([flagged["t5"]], compat_python, dtype="float16")[0]
    assert 0 < relative_error(half.output, flagged_in_4["t5"].output) < 0.01


def test_a_script_that_fails_says_why(run_compat: Callable[..., str], flagged: dict[str, Path]) -> None:
    with pytest.raises(RuntimeError, match=r"absent"):
        run_compat("logits.py", flagged["mt5"] / "absent", "inputs.npz", "out.npz")


def under(
    python: str | Path, case: config_edits.Original, edits: list[dict[str, object]]
) -> tuple[list[str], list[object]]:
    """Return the keys that a version's config class knows, and the logits that it gives under each edit of a config."""
    given, out = case.folder / "configs.txt", case.folder / "out.txt"
    given.write_text(json.dumps([case.config | edit for edit in edits]))
    run_script(python, "edited.py", case.folder, given, out)
    found = json.loads(out.read_text())
    return found["keys"], found["logits"]


def is_taken(case: config_edits.Original, edit: dict[str, object]) -> bool:
    """Return whether a folder is taken with an edited config."""
    (case.folder / "config.json").write_text(json.dumps(case.config | edit))
    try:
        agreed_layout(open_checkpoint(case.folder))
    except UserError:
        return False
    return True


@pytest.mark.parametrize("kind", exhaustive.beyond(["t5", "mbart"], ["t5", "mt5", "pegasus", "mbart"]))
def test_what_is_taken_is_the_same_model_in_both_versions_or_none_in_4(
    kind: str, tmp_path: Path, warm_python: Path, compat_python: Path
) -> None:
    """Of every key that a config class of 4.57 knows, set to anything; of mT5 and mBART, whose code is T5's and nearly
    Pegasus's, to one value each, but for how they tie."""
    values = (None, True, 2) if kind in ("t5", "pegasus") else (True,)
    tried = dict.fromkeys(NAMED, (None, True, 2))
    case = config_edits.original(kind, tmp_path)
    keys, [own] = under(compat_python, case, [{}])
    edits: list[dict[str, object]] = [
        {key: value} for key in sorted({*keys, *NAMED}) for value in tried.get(key, values)
    ]
    if kind == "mt5":  # which has a head of its own
        edits = [edit for edit in edits if not edit.keys() & set(NAMED)]
    taken = [edit for edit in edits if is_taken(case, edit)]
    assert len(edits) > 65 * len(values) and len(taken) > len(edits) / 2
    _, found = under(compat_python, case, taken)
    # Most change nothing; of the others, the newer version says what they should give.
    odd = [(edit, logits) for edit, logits in zip(taken, found, strict=True) if logits not in (None, own)]
    _, (_, *wanted) = under(warm_python, case, [{}, *(edit for edit, _ in odd)])
    for (edit, logits), right in zip(odd, wanted, strict=True):
        assert relative_error(np.array(logits), np.array(right)) < 1e-5, edit


def test_without_the_door_4_would_make_another_model(tmp_path: Path, compat_python: Path) -> None:
    """The control of the one above."""
    case = config_edits.original("t5", tmp_path)
    kept_out: list[dict[str, object]] = [{"tie_encoder_decoder": True}, {"tie_word_embeddings": None}]
    _, (own, *others) = under(compat_python, case, [{}, *kept_out])
    assert all(logits is not None and logits != own for logits in others)
    assert not any(is_taken(case, edit) for edit in kept_out)


def test_a_tied_mt5_that_5_saves_without_a_flag_is_tied_in_4_once_converted(
    tmp_path: Path, warm_python: Path, compat_python: Path
) -> None:
    """4.57 takes an MT5 to have a head of its own unless its config says otherwise, and fills it at random; a tied one
    it scales, and 5 does not."""
    torch.manual_seed(0)
    model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**T5_SHAPE))
    model.save_pretrained(tmp_path / "source")
    config = read_config(tmp_path / "source")
    config.pop("tie_word_embeddings", None)
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "source", tmp_path / "out", run_model=False)
    (source,) = compute_logits([tmp_path / "source"], compat_python)
    assert source.missing == ("lm_head.weight",)
    (five,), (four,) = (compute_logits([tmp_path / "out"], python) for python in (warm_python, compat_python))
    assert four.missing == ()
    assert relative_error(four.output * math.sqrt(T5_SHAPE["d_model"]), five.output) < 1e-5
