"""A layout's unscaled weights by name, from a checkpoint or from a model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..families.known import of_model_type
from ..families.layout import Layout, TensorReader, TensorSource
from ..families.resolve import unscaled
from ..run.experts import experts_apart


def source_weights(checkpoint: TensorSource, layout: Layout) -> TensorReader:
    """Return a function from a layout's tensor name to its unscaled values."""
    return lambda name: unscaled(checkpoint, layout.tensors[name])


@dataclass(frozen=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]


class ModelTensors:
    """A stock model in memory, seen as a source of tensors under the names of files."""

    def __init__(self, model: Any) -> None:
        """Look at ``model``; nothing is copied but the experts that it gathers, which are taken apart in place."""
        experts_apart(model, of_model_type(model.config.model_type))
        self.source = type(model).__name__
        self.config: dict[str, object] = model.config.to_dict() | {"architectures": [self.source]}
        self._state = model.state_dict()
        names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
        self.tensors = {
            name: _Stored(names.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in self._state.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, shared with the model."""
        return self._state[name]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows of a tensor."""
        return self._state[name][start:stop].contiguous()
