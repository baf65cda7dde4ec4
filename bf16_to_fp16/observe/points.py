"""The sites of a layout that can overflow, watched in one forward: what the attack climbs.

It asks for the gradients of these sites and no other, hundreds of times, so hooks on the modules that the layout names
do, where observer and tap look at every operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..families.layout import Layout
from ..families.types import Attention, Experts, feed_forwards_of
from ..families.walk import norms_inside, walk
from .tap import Tap


@contextmanager
def watched(model: nn.Module, layout: Layout) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that each forward fills with differentiable values of the sites that can overflow, by the
    audit's names: linears, scores, context, gated products, the residual stream before each norm, norms' outputs.

    Scores are recomputed from queries and keys, [rows, heads, queries, keys], where every query meets every key, else
    taken as they are, [rows, ..., keys]; everything else has the channels last.
    """
    found: dict[str, Tensor] = {}  # without what a sequence too short for any sum leaves empty
    local = [w.at for w in layout.topology if isinstance(w, Attention) and w.radius]
    near = {f"{at}:{what}" for at in local for what in ("scores", "context")}
    tap = Tap(model, found.__setitem__, only=near.__contains__)
    tap.without_gradients = True
    handles = []
    taken: dict[str, Tensor] = {}

    def note(name: str, value: Tensor) -> None:
        """Note a site's values; those of an expert's at the places of the tokens that it takes, else 0."""
        if name in taken:
            found[name] = found[name].masked_scatter(taken[name], value)
        elif value.numel():
            found[name] = value

    def output(name: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            note(name, result[0] if isinstance(result, tuple) else result)

        return hook

    def entering(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            note(name, args[0])

        return hook

    def watch(path: str, *, before: str = "", after: str = "", also: Any = None) -> None:
        module = model.get_submodule(path)
        if before:
            handles.append(module.register_forward_pre_hook(entering(before)))
        if after:
            handles.append(module.register_forward_hook(output(after)))
        if also is not None:
            handles.append(module.register_forward_hook(also, with_kwargs=True))

    site = layout.family.norm_site
    for reader in walk(layout):
        watch(reader.norm, before=reader.site, after=f"{reader.norm}:{site}")
        w = reader.sublayer
        for norm in norms_inside(w):
            watch(norm, after=f"{norm}:{site}")
        if isinstance(w, Attention):
            watch(w.query, after=w.query)
            if w.block:  # keys and values of positions, then of sums
                watch(w.value, also=_further(found, w.value))
                watch(w.key, also=_further(found, w.key))
                watch(w.block_norm, before=f"{w.at}:sum")
                handles.append(model.get_submodule(w.at).register_forward_pre_hook(_forgetting(found, w.value, w.key)))
            else:
                watch(w.value, after=w.value)
                watch(w.key, after=w.key)
            # Of local attention the tap sees both products, with the positions that fill up the last block.
            watch(w.output, before="" if w.radius else f"{w.at}:context", after=w.output)
            if not w.radius:
                watch(w.at, also=_scores(found, layout, w))
        elif isinstance(w, Experts):
            watch(w.classifier, after=w.classifier)
            watch(w.router, also=_handed_out(found, layout, w, taken))
        for expert in feed_forwards_of(w) if w is not None else ():
            watch(expert.linear, after=expert.linear)
            if expert.gate:
                watch(expert.gate, after=expert.gate)
                watch(expert.output, before=f"{expert.at}:mul")
            watch(expert.output, after=expert.output)
    for linear in layout.head.linears if layout.head is not None else ():
        watch(linear.at, after=linear.at)
    try:
        with tap if near else nullcontext():
            yield found
    finally:
        for handle in handles:
            handle.remove()


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return queries or keys [rows, heads, positions, channels] turned by their positions' angles, [rows, positions,
    channels] each, channel i with i + channels/2 or, ``interleaved``, 2i with 2i + 1; more channels than there are
    angles stay as they are."""
    size = cos.shape[-1]
    turning, rest = x[..., :size], x[..., size:]
    if interleaved:
        cos, sin = (angles[..., : size // 2].repeat_interleave(2, -1) for angles in (cos, sin))
        other = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        left, right = turning.chunk(2, -1)
        other = torch.cat((-right, left), -1)
    return torch.cat((turning * cos.unsqueeze(1) + other * sin.unsqueeze(1), rest), -1)


def _scores(found: dict[str, Tensor], layout: Layout, w: Attention) -> Any:
    """A hook that makes an attention's scores again of the queries and keys that were found."""
    heads = layout.heads(w), layout.kv_heads(w)

    def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        both = found[w.query].split(w.fused, -1)[:2] if w.fused else (found[w.query], found[w.key])
        q, k = (x.unflatten(-1, (number, -1)).transpose(1, 2) for x, number in zip(both, heads, strict=True))
        if w.query_norm:
            q, k = (found[f"{path}:{layout.family.norm_site}"] for path in (w.query_norm, w.key_norm))
            if w.norms_by_position:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
        if w.rotary:
            q, k = (rotated(x, *kwargs["position_embeddings"], interleaved=w.interleaved) for x in (q, k))
        found[f"{w.at}:scores"] = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)

    return hook


def _handed_out(found: dict[str, Tensor], layout: Layout, w: Experts, taken: dict[str, Tensor]) -> Any:
    """A hook of a router that makes room, [rows, positions, channels], for the values at the sites of every expert, 0
    where it takes no token; taken: where it does, by site."""

    def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        chosen, probabilities = result[0].bool(), result[1]
        for number, expert in enumerate(w.experts):
            for name in (expert.linear, expert.gate, f"{expert.at}:mul" if expert.gate else "", expert.output):
                if name:
                    path = expert.linear if name.endswith(":mul") else name
                    width = layout.tensors[f"{path}.weight"].shape[0]
                    # Of the graph, so that a goal that nothing reaches has a gradient too, 0.
                    room = (probabilities * 0).expand(*chosen.shape[:2], width)
                    found[name], taken[name] = room, chosen[..., number, None].expand_as(room)

    return hook


def _further(found: dict[str, Tensor], name: str) -> Any:
    """A hook of what a module gives when it runs for more positions of one forward."""

    def hook(module: nn.Module, args: Any, kwargs: Any, result: Tensor) -> None:
        found[name] = torch.cat([found[name], result], 1) if name in found else result

    return hook


def _forgetting(found: dict[str, Tensor], *names: str) -> Any:
    """A hook before a module that forgets what was found in an earlier forward."""

    def hook(module: nn.Module, args: Any) -> None:
        for name in names:
            found.pop(name, None)

    return hook
