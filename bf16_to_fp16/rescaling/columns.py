"""Cuts of columns: powers of two that scale down a few input channels of a feed-forward's gate or of an attention's
queries. A cut is not exact: outputs stay nearly the same only at tokens with small values in these channels."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from ..families.layout import Layout, TensorReader
from ..families.signals import Kind, carried_by, signal_of_columns
from ..families.wiring import Attention, Sublayer, feed_forwards_of
from .plan import OfChannels

MOST_CHANNELS, MOST_BITS = 4, 24  # most channels that are cut, and by how many bits
CLOSE = 2.0**-10  # bits by which a row may stay over its aim

Reach = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps factors of columns to two results: by how many bits each row (or head) is still larger than it should become,
[rows], and each column's share in the square of the row's size, [rows, columns]."""


def column_exponents(layout: Layout, weights: TensorReader, needed: Mapping[str, OfChannels]) -> dict[str, list[int]]:
    """Return exponents of a few columns (input channels), by signal, that shrink outputs as far as ``needed`` asks.
    Weights for which a few columns are not enough are left out. needed: exponents of rows (outputs), by signal."""
    reaches: dict[str, Reach] = {}
    for each in layout.feed_forwards:
        if signal_of_columns(signal := columns_read_by(layout, each.gate)) in needed:
            v = read_by(layout, weights, each.gate, each.norm)
            reaches[signal] = gates(v, bits_of(needed[signal_of_columns(signal)], len(v)))
    for part in layout.topology:
        if isinstance(part, Attention) and signal_of_columns(signal := columns_read_by(layout, part.query)) in needed:
            q = read_by(layout, weights, part.query, part.norm)
            k = read_by(layout, weights, part.key, "" if part.memory else part.norm)
            heads, kv_heads = layout.heads(part), layout.kv_heads(part)
            k = k.unflatten(0, (kv_heads, -1)).repeat_interleave(heads // kv_heads, 0)
            bits = bits_of(needed[signal_of_columns(signal)], len(q)).view(heads, -1).amax(1)
            reaches[signal] = scores(q.unflatten(0, (heads, -1)), k, bits)
    cuts = ((signal, cut(reach, layout.signals[signal].size)) for signal, reach in reaches.items())
    return {signal: exponents for signal, exponents in cuts if exponents is not None}


def in_step(layout: Layout, cuts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return a copy of ``cuts`` with each stack's deepest cut of a channel in all its gates, and further cuts in later
    layers. At some tokens the first cut gate shrinks the residual stream, so norms enlarge the channel. cuts: exponents
    of columns (input channels), by signal."""
    # Some tokens have large values in a cut channel. At such a token, the first feed-forward with a cut gate writes
    # nearly all of the stream. A cut of its gate by 2^-k makes the stream 2^k times smaller, but not the value that the
    # embedding has in the channel. So after later norms, the channel is 2^k times as large. To make up for this, later
    # queries are cut by k more bits, and later gates by 2^-2k instead of 2^-k.
    deeper: dict[str, list[int]] = {}
    for stack in layout.stacks():
        readers = [(part, signals_of(layout, part, cuts)) for part in stack.sublayers]
        gates = [cuts[signal] for part, signals in readers if not isinstance(part, Attention) for signal in signals]
        deepest = torch.tensor(gates).amin(0) if gates else torch.zeros((), dtype=torch.int64)
        grown = torch.zeros_like(deepest)
        for part, signals in readers:
            for signal in signals:
                own = torch.tensor(cuts[signal]) if isinstance(part, Attention) else deepest
                deeper[signal] = (own + grown).tolist()
            if signals and not isinstance(part, Attention):
                grown = deepest
    return deeper


def signals_of(layout: Layout, part: Sublayer, cuts: Container[str]) -> list[str]:
    linears = [part.query] if isinstance(part, Attention) else [each.gate for each in feed_forwards_of(part)]
    return [signal for signal in (columns_read_by(layout, linear) for linear in linears) if signal in cuts]


def columns_read_by(layout: Layout, linear: str) -> str:
    tensor = layout.tensors.get(f"{linear}.weight")
    carried = () if tensor is None else carried_by(tensor.axes[1])
    return next((axis.signal for axis in carried if layout.signals[axis.signal].kind is Kind.COLUMNS), "")


def read_by(layout: Layout, weights: TensorReader, linear: str, norm: str) -> Tensor:
    weight = weights(f"{linear}.weight").double()
    if not norm:
        return weight
    return weight * (weights(f"{norm}.weight").double() + layout.tensors[f"{norm}.weight"].offset)


def bits_of(exponents: OfChannels, rows: int) -> Tensor:
    return -torch.as_tensor(exponents, dtype=torch.float64).expand(rows)


def gates(v: Tensor, bits: Tensor) -> Reach:
    aim = v.norm(dim=1).log2() - bits

    def reach(factors: Tensor) -> tuple[Tensor, Tensor]:
        squares = (v * factors).square()
        total = squares.sum(1, keepdim=True)
        return total.squeeze(1).sqrt().log2() - aim, squares / total

    return reach


def scores(q: Tensor, k: Tensor, bits: Tensor) -> Reach:
    """Return the ``Reach`` function of an attention: for factors on columns, it returns by how many bits each head is
    still too large. The size of a head is the spectral norm of qᵀk. q, k: query and key weights, [heads, channels of a
    head, columns]. bits: by how many bits each size is to become smaller, [heads]."""
    of_keys = k @ k.transpose(1, 2)
    regular = of_keys + torch.eye(k.shape[1]) * of_keys.diagonal(dim1=1, dim2=2).amax() * 1e-12
    root = torch.linalg.cholesky_ex(regular).L

    def largest(factors: Tensor) -> tuple[Tensor, Tensor]:
        cut = q * factors
        # The eigenvector of q·qᵀ·(k·kᵀ) leads to the left singular vector of qᵀk.
        values, vectors = torch.linalg.eigh(root.transpose(1, 2) @ (cut @ cut.transpose(1, 2)) @ root)
        left = torch.einsum("hrc,hrs,hs->hc", cut, root, vectors[..., -1])
        return values[:, -1].sqrt().log2(), left.square() / values[:, -1:]

    aim = largest(torch.ones(q.shape[2], dtype=torch.float64))[0] - bits

    def reach(factors: Tensor) -> tuple[Tensor, Tensor]:
        now, share = largest(factors)
        return now - aim, share

    return reach


def cut(reach: Reach, columns: int) -> list[int] | None:
    """Lower exponents of columns until ``reach`` reports no row as too large, and return them. Return None if this
    takes more than ``MOST_CHANNELS`` columns or ``MOST_BITS`` bits."""
    exponents = torch.zeros(columns, dtype=torch.float64)
    for step in range(MOST_CHANNELS * MOST_BITS):
        over, share = reach(2.0**exponents)
        if not bool((over > CLOSE).any()):
            return [int(e) for e in exponents]
        largest = share.topk(min(MOST_CHANNELS, columns)).values.sum(1)
        if step == 0 and bool((largest < 1 - 4.0 ** -over.clamp(min=0)).any()):
            return None  # a row stays over its aim even without these channels
        exponents[share[over.argmax()].argmax()] -= 1
        if int((exponents < 0).sum()) > MOST_CHANNELS or float(exponents.min()) < -MOST_BITS:
            return None
    return None
