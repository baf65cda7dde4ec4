"""Keys without what all of a row share, where that is free.

A softmax ignores what is added to every score of a row. Where nothing stands between a key and its score (no rotation,
no norm, no soft cap), q·b is the same for every key, so the key bias b may be any vector. Behind a LayerNorm of gain g
and bias β keys are W(g·n + β) + b, and b = −Wβ leaves W(g·n): no shared part, so smaller keys and scores.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from torch import Tensor

from ..families.layout import Layout, TensorReader
from ..families.types import Attention


def centrable(layout: Layout) -> tuple[Attention, ...]:
    """Return the attentions of a layout whose key bias may be any vector and that read a norm with a bias."""

    def free(w: Attention) -> bool:
        between = w.rotary, w.query_norm, w.key_norm, w.cap, w.radius, w.fused
        needed = f"{w.key}.bias", f"{norm_of_keys(layout, w)}.bias"
        return not any(between) and all(name in layout.tensors for name in needed)

    return tuple(w for w in layout.topology if isinstance(w, Attention) and free(w))


def norm_of_keys(layout: Layout, attention: Attention) -> str:
    """Return the path of the norm whose output an attention's keys read, of another stack the final one."""
    return layout.stacks()[0].ends.norm if attention.memory else attention.norm


def key_biases(layout: Layout, attentions: Collection[str]) -> dict[str, Attention]:
    """Return the centrable attentions at these paths by the names of their key biases."""
    return {f"{w.key}.bias": w for w in centrable(layout) if w.at in attentions}


def centred_bias(weights: TensorReader, layout: Layout, attention: Attention) -> Tensor:
    """Return the bias that takes out of an attention's keys what they share, −Wβ, in fp64; weights: unscaled.

    Its bits are the same on every machine: each product is exact, unless weights have more bits than fp32, and sums
    are of halves, in one order.
    """
    beta = weights(f"{norm_of_keys(layout, attention)}.bias").double()
    terms = weights(f"{attention.key}.weight").double() * -beta
    while (width := terms.shape[1]) > 1:
        terms, rest = terms.split((width + 1) // 2, dim=1)
        terms = terms.clone()
        terms[:, : rest.shape[1]] += rest
    return terms[:, 0]


def centred(weights: TensorReader, layout: Layout, attentions: Collection[str]) -> TensorReader:
    """Return a reader of the same unscaled weights with the keys of the attentions at these paths centred."""
    biases = key_biases(layout, attentions)
    bias = cache(lambda name: centred_bias(weights, layout, biases[name]))
    return lambda name: bias(name) if name in biases else weights(name)
