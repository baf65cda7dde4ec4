"""Matrices that are weights times row and column factors, computed in blocks of rows that fit a core's cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WIDE = 1 << 18  # elements from which matrices are multiplied in fp32, chunk by chunk
IN_CACHE = 1 << 17  # elements of the rows that are computed at a time


def working_dtype(matrix: Tensor | Factored) -> torch.dtype:
    """Return the dtype to compute with a matrix: fp64 if it is small or fp64, else fp32."""
    return torch.float64 if matrix.numel() < WIDE or matrix.dtype == torch.float64 else torch.float32


def chunks(matrix: Tensor, elements: int = IN_CACHE) -> Iterator[Tensor]:
    """Yield blocks of a matrix's rows with at most ``elements`` entries, but at least one row each."""
    rows = max(1, elements // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], rows):
        yield matrix[start : start + rows]


@dataclass(frozen=True)
class Factored:
    """The matrix diag(rows)·W·diag(columns) for a weight W [m, d] in any floating dtype. columns: fp64 [d]. rows: fp64
    [m], None for ones. name: the weight's name in the checkpoint, "" for none."""

    weight: Tensor
    columns: Tensor
    rows: Tensor | None = None
    name: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def numel(self) -> int:
        return self.weight.numel()

    def part(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return the rows from ``start`` to ``stop``, with at most four roundings to ``dtype`` in each element."""
        rows = self.weight[start:stop].to(dtype) * self.columns.to(dtype)
        return rows if self.rows is None else rows.mul_(self.rows[start:stop, None].to(dtype))

    def parts(self) -> Iterator[Tensor]:
        """Yield all rows in order, in the dtype of ``working_dtype`` and in blocks that fit a core's cache."""
        dtype, count = working_dtype(self), len(self.weight)
        rows = max(1, IN_CACHE // max(1, self.weight.shape[1]))
        for start in range(0, count, rows):
            yield self.part(start, min(start + rows, count), dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        return self.part(rows.start, rows.stop, torch.float64)

    def chosen(self, rows: Tensor) -> Tensor:
        """Return the rows at the given indices, in fp64."""
        factors = None if self.rows is None else self.rows[rows]
        return replace(self, weight=self.weight[rows], rows=factors).part(0, len(rows), torch.float64)

    def columns_first(self, dtype: torch.dtype) -> Tensor:
        """Return the transposed matrix as a contiguous tensor."""
        transposed, start = torch.empty(self.weight.shape[::-1], dtype=dtype), 0
        for part in self.parts():
            transposed[:, start : start + len(part)] = part.t()
            start += len(part)
        return transposed


@dataclass(frozen=True)
class Tall:
    """A matrix made of blocks of rows, one below the other. Each block is a sum of ``Factored`` matrices."""

    blocks: tuple[tuple[Factored, ...], ...]
    label: str  # the matrix's name within a model, "" for none
    length: float  # at least √Σ f² over blocks, with f the sum of Frobenius norms in a block

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(block[0].weight) for block in self.blocks), self.blocks[0][0].weight.shape[1]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(part.name for block in self.blocks for part in block)

    @property
    def dtype(self) -> torch.dtype:
        return working_dtype(self.blocks[0][0])

    def parts(self, rows: int) -> Iterator[Tensor]:
        for first, *others in self.blocks:
            for start in range(0, len(first.weight), rows):
                stop = min(start + rows, len(first.weight))
                total = first.part(start, stop, self.dtype)
                for other in others:
                    total += other.part(start, stop, self.dtype)
                yield total
