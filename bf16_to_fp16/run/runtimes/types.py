"""What a runtime is given and what it gives back, and the same from stock code in torch.

Every runtime sees one batch of fixed shape: int64 ids and the encoder's mask. The decoder's rows are padded at their
end only, where its causal mask keeps them from mattering, so they need none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..batch import Batch, values_of
from ..interface import config_of, is_causal
from ..stock import load

FP16 = "float16"


FLOATS = ("float16", "bfloat16", "float32", "float64")
"""How formats are called here, whatever a runtime calls them."""


@dataclass(frozen=True)
class Arithmetic:
    """In which format a runtime computed.

    ``products``: matrix products by format. ``operations``: floating-point operations by format, these included and
    what only moves or casts values left out; None for the number where a runtime has one format for all of them.
    ``how``: how that was found out, in words.
    """

    products: Mapping[str, int | None]
    operations: Mapping[str, int | None]
    how: str

    @property
    def native(self) -> bool:
        """Whether every matrix product was computed in fp16."""
        return bool(self.products) and set(self.products) == {FP16}


@dataclass(frozen=True)
class Outcome:
    """What a runtime made of a checkpoint: its values as fp32 on the CPU, the device, and the arithmetic.

    ``values``: [rows, length, channels] logits or last hidden states, or what
    ``known.Runtime.expected`` makes of those.
    """

    values: Tensor
    device: str
    arithmetic: Arithmetic


class Outputs(nn.Module):
    """A stock model as a function of its ids alone, which returns one tensor: logits, or last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap a model in eval mode."""
        super().__init__()
        self.model = model
        self.options = {"use_cache": False} if is_causal(config_of(model)) else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        """Return [rows, length, channels]."""
        if decoder_input_ids is None:
            return values_of(self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options))
        return values_of(
            self.model(
                input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids, use_cache=False
            )
        )


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """Return the ids and the mask by the names that stock code has for them."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    return inputs if batch.decoder_input_ids is None else inputs | {"decoder_input_ids": batch.decoder_input_ids}


def as_function(folder: Path, dtype: torch.dtype) -> Outputs:
    """Return the stock model in a folder with every parameter in ``dtype``, as a function."""
    return Outputs(load(folder, torch.float32).to(dtype)).eval()


@contextmanager
def tracing() -> Iterator[None]:
    """Take no gradients, and keep back the warnings of a trace: what depends on shapes is right for those that run."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def in_torch(folder: Path, dtype: torch.dtype, batch: Batch) -> Tensor:
    """Return what stock code computes on a batch with every parameter in ``dtype``, as fp32."""
    values: Tensor = as_function(folder, dtype)(*inputs_of(batch).values())
    return values.float()
