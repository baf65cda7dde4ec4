"""A converted folder in transformers 5, 4.57 and CTranslate2, against the same library on the source."""

import functools
import json
import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from compat.harness import Outcome, compute_logits, compute_scores, edit_config, read_config, relative_error
from support import tiny

from bf16_to_fp16 import convert

ENCODERS = ("t5-encoder", "mt5-encoder", "umt5-encoder")
HEADS = ("t5-states", "t5-classifier", "t5-token-classifier", "umt5-spans")
LONG = ("longt5", "longt5-local", "longt5-encoder")
SPARSE = ("switch", "switch-untied", "switch-encoder")
CAUSAL = (
    *("gemma3", "gemma3-untied", "embeddinggemma", "gemma2", "gemma", "llama", "mistral"),
    *("qwen2", "qwen3", "glm4", "olmo2"),
)
EXPERTS: dict[str, dict[str, int]] = {
    "mixtral": {"intermediate_size": 40},
    "qwen3_moe": {"moe_intermediate_size": 16},
    "olmoe": {"intermediate_size": 40},
    "glm4_moe": {"moe_intermediate_size": 16},
}
"""Sizes of which stock code of transformers 5 can group products."""
PEGASUS = ("pegasus", "mbart", "bigbird_pegasus")
KINDS = ("t5", "gated", "silu", "mt5", "umt5", *PEGASUS, *ENCODERS, *HEADS, *LONG, *SPARSE, *CAUSAL, *EXPERTS)
MORE = (
    *("silu", "mt5", "longt5", "llama", "bigbird_pegasus", "t5-encoder", "umt5-encoder", "t5-states"),
    *("t5-token-classifier", "umt5-spans", "longt5-encoder", "switch", "switch-untied", "gemma3-untied"),
    *("embeddinggemma", "gemma", "mistral", "qwen2", "mixtral", "olmoe", "gemma3", "glm4", "olmo2"),
    *("umt5-encoder", "glm4_moe", "mbart"),
)
"""Those of ``KINDS`` that only ``make test-all`` converts: others, and ``TURNED``, have each of their parts."""
DEMO = "t5-gated-bytes"
DRIFTING = (*PEGASUS, *(kind for kind in CAUSAL if "gemma" in kind))
VOCABULARY = 384
NEAR = 1e-5  # largest difference allowed, as a share of the version's own largest logit on the source
DRIFT = 1e-3
"""The same for ``DRIFTING``, with Pegasus's fixed eps or gains that round: it is 1e-7 to 6e-4 of these models. That it
is no more than the report predicts, ``test_drift`` shows."""

Pairs = dict[str, tuple[Path, Path]]
Logits = Callable[[str], dict[str, tuple[Outcome, Outcome]]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Pairs:
    root = tmp_path_factory.mktemp("stock")
    made: Pairs = {}
    for kind in KINDS if pytestconfig.getoption("--exhaustive") else sorted({*KINDS} - {*MORE}):
        sizes = tiny.few_layers(kind) | EXPERTS.get(kind, {})
        sizes |= {"vocab_size": VOCABULARY} if kind in ("gated", *MORE) else {}
        source = tiny.save(tiny.build(kind, **sizes), root / kind)
        if kind == "qwen3_moe":  # which transformers 5 saves under a name that 4.57 does not read
            edit_config(source, num_experts=read_config(source)["num_local_experts"])
        (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
        made[kind] = source, root / f"{kind}-fp16"
    if pytestconfig.getoption("--exhaustive"):
        made[DEMO] = Path(str(files("bf16_to_fp16") / "demo_data" / DEMO)), root / f"{DEMO}-fp16"
    for name, (source, out) in made.items():
        # Stricter tiers ask for other exponents, not for other tensors.
        target = "auto" if name == "gemma3" else "half"
        # Running the models would take most of this file's time; no other test does it with an mT5 encoder's.
        assert convert(source, out, target=target, run_model=name == "mt5-encoder").safe
    return made


@pytest.fixture(scope="module")
def logits(pairs: Pairs, warm_python: Path, compat_python: Path) -> Logits:
    def computed(version: str) -> dict[str, tuple[Outcome, Outcome]]:
        python = warm_python if version == "5" else compat_python
        outcomes = compute_logits([folder for pair in pairs.values() for folder in pair], python)
        return dict(zip(pairs, zip(outcomes[::2], outcomes[1::2], strict=True), strict=True))

    return functools.cache(computed)


@pytest.mark.parametrize("version", ["5", "4"])
def test_logits_are_the_versions_own_on_the_source(version: str, logits: Logits) -> None:
    for name, (source, out) in logits(version).items():
        assert source.version.startswith(f"{version}."), name
        # 4.57 counts LongT5's copies of the embedding as missing before it makes them, of the source too.
        assert out.missing == (source.missing if "longt5" in name and version == "4" else ()), name
        assert out.unexpected == (), name
        assert relative_error(out.output, source.output) <= (DRIFT if name in DRIFTING else NEAR), name


FLAT: dict[str, Any] = {"rope_theta": 500.0}
TURNED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", FLAT | {"rope_type": "linear", "factor": 4.0}),
    "dynamic": ("llama", FLAT | {"rope_type": "dynamic", "factor": 4.0}),
    "glm4": ("glm4", FLAT | {"rope_type": "default", "partial_rotary_factor": 1.0}),
    "gemma3": (
        "gemma3",
        {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
        },
    ),
    "t5gemma": ("t5gemma", FLAT | {"rope_type": "default"}),
    "olmo3": (
        "olmo3",
        {
            "full_attention": FLAT | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
            "sliding_attention": FLAT | {"rope_type": "default"},
        },
    ),
}
"""Rotary positions as transformers 5 saves them, other than 4.57's defaults."""


def test_rotary_positions_saved_by_5_are_read_by_4(tmp_path: Path, warm_python: Path, compat_python: Path) -> None:
    """Of models without caps on scores."""
    turned: Pairs = {}
    for name, (kind, positions) in TURNED.items():
        few = tiny.few_layers(kind) | {"rope_parameters": positions}
        few |= {"max_position_embeddings": 8} if name == "dynamic" else {}
        few |= {"attn_logit_softcapping": None, "sliding_window": 64} if kind == "t5gemma" else {}
        turned[name] = tiny.save(tiny.build(kind, **few), tmp_path / name), tmp_path / f"{name}-fp16"
        result = convert(*turned[name], target="half", run_model=False)
        assert result.safe and len(result.report["older"]) == (kind == "t5gemma")
    folders = [folder for pair in turned.values() for folder in pair]
    five, four = (compute_logits(folders, python) for python in (warm_python, compat_python))
    for number, name in enumerate(turned):
        (source, out), (before, after) = (every[2 * number : 2 * number + 2] for every in (five, four))
        assert relative_error(out.output, source.output) <= DRIFT, name
        assert relative_error(after.output, source.output) <= DRIFT, name
        assert relative_error(before.output, source.output) > 0.1, name  # of the source itself 4.57 makes another model


def test_what_transformers_4_does_otherwise_is_told(tmp_path: Path, warm_python: Path, compat_python: Path) -> None:
    unscaled = tiny.save(tiny.small("longt5-tied"), tmp_path / "longt5")
    edit_config(unscaled, scale_decoder_outputs=False)
    capped = tiny.save(tiny.small("gemma2"), tmp_path / "gemma2")
    for source, sentence in ((unscaled, "divides the logits"), (capped, "soft cap on scores")):
        out = tmp_path / f"{source.name}-fp16"
        [note] = convert(source, out, target="half", run_model=False).report["older"]
        assert sentence in note
        card, page = ((out / name).read_text() for name in ("README.md", "fp16_report.html"))
        assert f"**Use transformers 5: {note}.**" in card.partition("\n| ")[0].replace("\\", "")
        assert note in page.replace("&#39;", "'")
    out = tmp_path / "longt5-fp16"
    five, four = (compute_logits([out], python)[0].output for python in (warm_python, compat_python))
    assert relative_error(four * math.sqrt(24), five) <= NEAR


def test_ctranslate2_scores_a_converted_t5_as_the_source(pairs: Pairs, compat_python: Path) -> None:
    """It ignores the config's eps; with ``half`` the stream's variance stays far over it."""
    names = [name for name in ("gated", DEMO) if name in pairs]
    scores = compute_scores([folder for name in names for folder in pairs[name]], compat_python)
    for name, source, out in zip(names, scores[::2], scores[1::2], strict=True):
        assert relative_error(out, source) <= 1e-4, name


def test_stock_fp16_is_finite_in_both(pairs: Pairs, logits: Logits, warm_python: Path, compat_python: Path) -> None:
    for python in (warm_python, compat_python):
        stock = compute_logits([out for _, out in pairs.values()], python, "float16")
        for name, fp16 in zip(pairs, stock, strict=True):
            expected = logits("5")[name][0].output
            if python == compat_python and name == "umt5":
                expected = expected * math.sqrt(tiny.T5_SHAPE["d_model"])
            if python == compat_python and name == "gemma2":  # under SDPA 4.57 leaves the soft cap on scores out
                expected = logits("4")[name][0].output
            # Of LongT5's local attention stock fp16 bears no padding, and only the first row has none.
            rows = slice(1) if name == "longt5-local" else slice(None)
            assert relative_error(fp16.output[rows], expected[rows]) <= 0.1, name
