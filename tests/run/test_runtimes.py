"""What is said of a runtime's arithmetic is read off what it executed, and what it should give off stock code."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.contract import layout_of

from bf16_to_fp16.errors import UserError
from bf16_to_fp16.run import probe
from bf16_to_fp16.run.interface import config_of
from bf16_to_fp16.run.runtime import Arithmetic, Outputs, inputs_of
from bf16_to_fp16.run.runtimes import NAMES, ctranslate2, onnxruntime, openvino, runtime_named

ROOT = Path(__file__).parents[2]


def kernel(name: str, *types: str) -> dict[str, Any]:
    return {"cat": "Node", "args": {"op_name": name, "input_type_shape": [{kind: [2, 3]} for kind in types]}}


def test_an_fp16_graph_that_onnx_runtime_computes_in_fp32_is_seen_in_its_profile() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "Session", "name": "model_run"},
        {"cat": "Node", "args": {"op_name": "MatMul"}},  # before and behind a kernel
        kernel("Cast", "float16"),
        kernel("MatMul", "float", "float"),
        kernel("Clip", "float16"),
        kernel("Gather", "float16", "int64"),
        kernel("Add", "int64", "int64"),
        kernel("IsInf", "double"),
    ]
    found = onnxruntime.arithmetic(events)
    assert found.products == {"float32": 1}
    assert found.operations == {"float32": 1, "float16": 1, "float64": 1}
    assert not found.native
    assert onnxruntime.arithmetic([kernel("FusedMatMul", "float16")]).native


def test_an_executed_graph_of_openvino_says_the_precision_of_every_node() -> None:
    layers = [("Const", "f32"), ("FullyConnected", "f16"), ("RMS", "f32"), ("MatMul", "f16"), ("Eltwise", "i32")]
    nodes = [{"layerType": layer, "runtimePrecision": precision} for layer, precision in layers]
    found = openvino.arithmetic(nodes, "asked")
    assert (found.products, found.operations, found.how) == ({"float16": 2}, {"float16": 2, "float32": 1}, "asked")
    assert found.native


@pytest.mark.parametrize(
    ("products", "native"), [({}, False), ({"float16": 3, "float32": 1}, False), ({"float16": None}, True)]
)
def test_only_products_that_are_all_in_fp16_are_native(products: dict[str, int | None], native: bool) -> None:
    assert Arithmetic(products, {}, "").native is native


def test_scores_are_the_log_probabilities_of_the_following_ids_and_of_the_end() -> None:
    model = tiny.build("t5", factor=1.0)
    config = config_of(model)
    batch = probe.one_batch(config, probe.batches(config, None, None))
    assert batch.decoder_input_ids is not None and batch.decoder_attention_mask is not None
    with torch.no_grad():
        logits = Outputs(model.float().eval())(*inputs_of(batch).values())
    scores = ctranslate2.log_probabilities(logits, batch, config)
    rows = zip(batch.decoder_input_ids.tolist(), batch.decoder_attention_mask.sum(1).tolist(), strict=True)
    assert len({int(n) for n in batch.decoder_attention_mask.sum(1)}) > 2
    for row, (ids, length) in enumerate(rows):
        wanted = [*ids[1:length], config.eos_token_id]
        by_hand = [float(logits[row, i].log_softmax(-1)[token]) for i, token in enumerate(wanted)]
        assert scores[row, :length].tolist() == by_hand


def test_each_module_here_is_a_runtime_of_its_name_known_before_any_is_imported() -> None:
    assert {"ctranslate2", "mlx-lm", "onnx-reference", "onnxruntime", "openvino"} <= set(NAMES)
    modules = [import_module(f"bf16_to_fp16.run.runtimes.{name.replace('-', '_')}") for name in NAMES]
    assert tuple(module.RUNTIME.name for module in modules) == NAMES
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always, extra = (
        {re.split(r"[<>=\[]", requirement)[0].replace("-", "_") for requirement in requirements}
        for requirements in (project["dependencies"], project["optional-dependencies"]["runtimes"])
    )
    assert extra == {module.RUNTIME.package for module in modules} - always
    code = "import sys, bf16_to_fp16.run.runtimes; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_runtime_that_is_unknown_is_one_line_that_lists_the_known() -> None:
    with pytest.raises(UserError, match=f"known ones are {', '.join(NAMES)}"):
        runtime_named("tensorrt")


def test_ctranslate2_refuses_an_encoder_alone() -> None:
    model = tiny.build("t5-encoder")
    config = config_of(model)
    batch = probe.one_batch(config, probe.batches(config, None, None))
    with pytest.raises(UserError, match="no encoder of this family"):
        ctranslate2.run(Path("folder"), layout_of(model), batch)
