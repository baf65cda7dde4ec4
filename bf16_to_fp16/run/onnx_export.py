"""A stock model as an ONNX file: as exported, or with every operation in fp16.

Stock code casts to fp32 around norms and softmaxes, and an export keeps that. Tools that make an fp16 file of an fp32
one, and compilers that are asked for fp16, take the casts out: so does the second form of the graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..families.layout import Layout
from ..wording import bytes_in_words
from .batch import Batch
from .runtime import as_function, inputs_of, tracing

LARGEST = 2**31 - 1  # bytes of an ONNX file, which protobuf allows

MOVES = {"Cast", "Constant", "Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Transpose", "Where"}
"""Operations that compute nothing."""


def export(folder: Path, layout: Layout, batch: Batch, path: Path) -> None:
    """Write the checkpoint in ``folder``, every parameter in fp16, as an ONNX file for the shapes of a batch. Raises
    UserError for one that is too large for a file."""
    nbytes = 2 * sum(int(np.prod(tensor.shape)) for tensor in layout.tensors.values())
    if nbytes > LARGEST:
        raise UserError(
            f"{folder} has {bytes_in_words(nbytes)} of weights, and an ONNX file holds {bytes_in_words(LARGEST)};"
            " try --runtime openvino, or a smaller checkpoint of the same family"
        )
    inputs = inputs_of(batch)
    with tracing():
        torch.onnx.export(
            as_function(folder, torch.float16),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=["output"],
            # The other exporter takes ten times as long, and gives the same function.
            dynamo=False,
        )


def all_in_fp16(model: Any) -> None:
    """Turn every fp32 constant, weight and cast of an ONNX model into fp16, in place."""
    from onnx import TensorProto, numpy_helper

    def halved(tensor: Any) -> None:
        if tensor.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    for tensor in model.graph.initializer:
        halved(tensor)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                halved(attribute.t)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
