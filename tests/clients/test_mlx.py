"""mlx-lm runs converted folders of decoder-only families in fp16, on the processor."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.utils import load_model
from runtimes import measure
from support import tiny
from support.folders import rewritten

from bf16_to_fp16 import convert

KINDS: dict[str, dict[str, Any]] = {kind: {} for kind in ("llama", "mistral", "qwen3", "gemma", "gemma3")} | {
    "qwen2": {"hidden_size": 40, "use_sliding_window": False},  # mlx-lm has no head_dim here and no windows
    "gemma2": {"sliding_window": 4096},  # mlx-lm has no windows here
    "gemma3-untied": {"final_logit_softcapping": None},  # mlx-lm has no cap here
    "glm4": {"head_dim": 8},  # of which an even part is rotated
}
"""Kinds of model that mlx-lm has, with the changes under which it computes the same as stock code."""


def save(kind: str, folder: Path) -> Path:
    # Mistral's weights are Llama's, and the tiny Mistral has no head.
    tiny.save(tiny.small("llama" if kind == "mistral" else kind, **KINDS[kind]), folder)
    if kind == "mistral":
        with rewritten(folder / "config.json") as config:
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_overflows_in_fp16_and_its_conversion_is_nearer_to_fp32_than_bf16(kind: str, tmp_path: Path) -> None:
    source = save(kind, tmp_path / "source")
    convert(source, tmp_path / "out", run_model=False)
    result = measure(tmp_path / "out", source, "mlx-lm")
    errors = {name: result[name]["error"] for name in ("output", "bf16")}
    print(kind, result["source"]["nonfinite"], errors)  # the figures of docs/runtimes.md
    assert result["products"] == {"float16": None}
    assert result["source"]["nonfinite"] > 0
    assert result["verdict"] == "safe"
    assert errors["output"] < errors["bf16"] / 10


def test_norms_take_the_configs_eps_and_compute_in_fp32(tmp_path: Path) -> None:
    source = save("qwen3", tmp_path / "source")
    convert(source, tmp_path / "out", run_model=False)
    eps = json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"]
    assert eps != json.loads((source / "config.json").read_text())["rms_norm_eps"]
    model, _ = load_model(tmp_path / "out")
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    streams = [norm for norm in norms if norm.weight.size == 24]
    assert len(streams) == 5 and {norm.eps for norm in norms} == {eps}
    ones = mx.ones(64, mx.float16)
    for value, small, wanted in ((4000.0, 0.0, 1.0), (2.0**-16, 2.0**-32, 0.5**0.5)):  # the squares of fp16: inf and 0
        given = mx.fast.rms_norm(mx.full((64,), value, mx.float16), ones, small)
        assert given.dtype == mx.float16 and abs(given[0].item() - wanted) < 2e-3
