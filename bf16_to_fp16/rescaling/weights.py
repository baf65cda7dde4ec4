"""A layout's weights by name before any exponent, from a checkpoint or from a model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..families.experts import experts_apart
from ..families.known import of_model_type
from ..families.layout import Layout, TensorReader, TensorSource
from ..families.resolve import unscaled


def source_weights(checkpoint: TensorSource, layout: Layout) -> TensorReader:
    return lambda name: unscaled(checkpoint, layout.tensors[name])


@dataclass(frozen=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]


class ModelTensors:
    def __init__(self, model: Any) -> None:
        experts_apart(model, of_model_type(model.config.model_type))
        self.source = type(model).__name__
        self.config: dict[str, object] = model.config.to_dict() | {"architectures": [self.source]}
        self._state = model.state_dict()
        names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
        self.tensors = {
            name: _Stored(names.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in self._state.items()
        }

    def read(self, name: str) -> torch.Tensor:
        return self._state[name]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._state[name][start:stop].contiguous()
