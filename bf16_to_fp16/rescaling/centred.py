"""Centred keys: remove the part that all scores of a softmax row share, where that has no cost.

A softmax ignores a number that is added to every score of a row. The key bias adds such a number, unless an operation
(rotation, norm or soft cap) lies between key and score. So the key bias may be any vector. It is chosen to cancel what
the bias of the LayerNorm before the key adds to every key.

From each head's position biases, the mean of the largest and the least is subtracted. It is the same in every layer
that reads these biases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import torch
from torch import Tensor

from ..families.layout import Layout, TensorReader
from ..families.wiring import Attention


def centrable(layout: Layout) -> tuple[Attention, ...]:
    """Return the attentions that can be centred, which are of two kinds. One kind has a table of position biases in its
    module. The second kind has biases of the key and of the norm before it, and no operation between key and score."""

    def free(here: Attention) -> bool:
        between = here.rotary, here.query_norm, here.key_norm, here.cap, here.radius, here.fused
        needed = f"{here.key}.bias", f"{norm_of_keys(layout, here)}.bias"
        return not any(between) and all(name in layout.tensors for name in needed)

    return tuple(each for each in layout.topology if isinstance(each, Attention) and (free(each) or tables_of(each)))


def tables_of(attention: Attention) -> tuple[str, ...]:
    return tuple(name for name in (attention.bias, attention.block_bias) if name.startswith(f"{attention.at}."))


def norm_of_keys(layout: Layout, attention: Attention) -> str:
    return layout.stacks()[0].ends.norm if attention.memory else attention.norm


def centred_tensors(layout: Layout, attentions: Collection[str]) -> dict[str, Attention]:
    chosen = [attention for attention in centrable(layout) if attention.at in attentions]
    return {name: attention for attention in chosen for name in tables_of(attention) or (f"{attention.key}.bias",)}


def centred_tensor(weights: TensorReader, layout: Layout, name: str, attention: Attention) -> Tensor:
    if tables := tables_of(attention):
        return weights(name).double() - shared_biases(list(map(weights, tables)))
    return centred_bias(weights, layout, attention)


def shared_biases(tables: Sequence[Tensor]) -> Tensor:
    """Return the mean of each head's largest and least bias over ``tables``, rounded to bf16: fp64 [heads]."""
    every = torch.cat([table.double() for table in tables])
    # In bf16, so that fp32 holds the differences of bf16 biases.
    return ((every.amax(0) + every.amin(0)) / 2).to(torch.bfloat16).double()


def centred_bias(weights: TensorReader, layout: Layout, attention: Attention) -> Tensor:
    """Return the key bias −Wβ that centres the keys, in fp64 and with the same bits on every machine. W is the key's
    weight, β the bias of the norm before it. weights: reads weights that are not rescaled."""
    # Products of fp32 weights are exact in fp64, and summed in a fixed order.
    beta = weights(f"{norm_of_keys(layout, attention)}.bias").double()
    terms = weights(f"{attention.key}.weight").double() * -beta
    while (width := terms.shape[1]) > 1:
        terms, rest = terms.split((width + 1) // 2, dim=1)
        terms = terms.clone()
        terms[:, : rest.shape[1]] += rest
    return terms[:, 0]


def centred(weights: TensorReader, layout: Layout, attentions: Collection[str]) -> TensorReader:
    replaced = centred_tensors(layout, attentions)
    read = cache(lambda name: centred_tensor(weights, layout, name, replaced[name]))
    return lambda name: read(name) if name in replaced else weights(name)
