"""What is said of a runtime's arithmetic is read off what it executed, on one batch of the probe."""

import sys
from typing import Any

import torch
from support import tiny

from bf16_to_fp16.measuring import probe

sys.path.insert(0, "benchmarks")

import runtimes


def kernel(name: str, *types: str) -> dict[str, Any]:
    return {"cat": "Node", "args": {"op_name": name, "input_type_shape": [{kind: [2, 3]} for kind in types]}}


def test_an_fp16_graph_that_onnx_runtime_computes_in_fp32_is_seen_in_its_profile() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "Session", "name": "model_run"},
        {"cat": "Node", "args": {"op_name": "MatMul"}},  # before and behind a kernel
        kernel("Cast", "float16"),
        kernel("MatMul", "float", "float"),
        kernel("MatMul", "int64", "int64"),
    ]
    assert runtimes.products_of_profile(events) == {"float32": 1}
    assert runtimes.products_of_profile([kernel("FusedMatMul", "float16")]) == {"float16": 1}


def test_rows_of_every_batch_fit_into_one_of_one_shape() -> None:
    config = tiny.config("t5")
    inputs = probe.batches(config, None, None)
    one = runtimes.one_batch(config, inputs, length=24, decoder_length=8)
    assert one.decoder_input_ids is not None and one.decoder_attention_mask is not None
    assert one.input_ids.shape[1] == 24 and one.decoder_input_ids.shape[1] == 8
    assert (one.decoder_input_ids[:, 0] == config.decoder_start_token_id).all()
    firsts = [batch.input_ids[0][batch.attention_mask[0].bool()][:24] for batch in inputs if not batch.generate]
    rows = [ids[mask.bool()] for ids, mask in zip(one.input_ids, one.attention_mask, strict=True)]
    assert all(any(torch.equal(first, row) for row in rows) for first in firsts)
    assert len(set(map(len, rows))) > 1
    config.vocab_size = 250_000
    assert len(runtimes.one_batch(config, inputs).input_ids) == 4
