"""What a runtime is given and what it gives back, and the same from stock code in torch.

Every runtime sees one batch of fixed shape: int64 ids and the encoder's mask. The decoder's rows are padded at their
end only, where its causal mask keeps them from mattering, so they need none.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..families.layout import Layout
from .batch import Batch, values_of
from .interface import config_of, is_causal
from .stock import load

FP16 = "float16"
FLOATS = ("float16", "bfloat16", "float32", "float64")  # how formats are called here, whatever a runtime calls them


@dataclass(frozen=True)
class Arithmetic:
    """In which format a runtime computed. ``products``: matrix products by format. ``operations``: floating-point
    operations by format, with these and without what only moves or casts; None for the number where one format serves
    all. ``how``: how that was found out."""

    products: Mapping[str, int | None]
    operations: Mapping[str, int | None]
    how: str

    @classmethod
    def counted(cls, operations: Iterable[tuple[str, bool]], how: str) -> Arithmetic:
        """Return the arithmetic of operations, of each its format and whether it is a matrix product."""
        listed = list(operations)
        products = Counter(kind for kind, is_product in listed if is_product)
        return cls(dict(products), dict(Counter(kind for kind, _ in listed)), how)

    @property
    def native(self) -> bool:
        """Whether every matrix product was computed in fp16."""
        return bool(self.products) and set(self.products) == {FP16}


@dataclass(frozen=True)
class Outcome:
    """A checkpoint's values in a runtime, fp32 on the CPU, the device, and the arithmetic. ``values``: [rows, length,
    channels] logits or last hidden states, or what ``Runtime.expected`` makes of those."""

    values: Tensor
    device: str
    arithmetic: Arithmetic


Run = Callable[[Path, Layout, Batch], Outcome]
"""Exports the checkpoint in a folder and runs it on a batch; raises UserError for one that it cannot take."""


@dataclass(frozen=True)
class Runtime:
    """A runtime by its name: the package that it needs, imported and installed under one name, whose version counts,
    and how it is run. ``expected``: makes what this runtime gives, [rows, length], from stock logits, the batch
    and the config; None where it gives what stock code does."""

    name: str
    package: str
    run: Run
    expected: Callable[[Tensor, Batch, Any], Tensor] | None = None

    def gives(self, *, states: bool) -> str:
        """Return what is compared, in words."""
        if self.expected is not None:
            return "log-probabilities"
        return "last hidden states" if states else "logits"


class Outputs(nn.Module):
    """A stock model as a function of its ids alone, which returns one tensor: logits, or last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.options = {"use_cache": False} if is_causal(config_of(model)) else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        """Return [rows, length, channels]."""
        options: dict[str, Any] = self.options
        if decoder_input_ids is not None:
            options = {"decoder_input_ids": decoder_input_ids, "use_cache": False}
        return values_of(self.model(input_ids=input_ids, attention_mask=attention_mask, **options))


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
