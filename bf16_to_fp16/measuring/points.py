"""The differentiable sites of a layout that can overflow, for the attack. The attack runs the model hundreds of times,
so only the layout's modules are hooked, not every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..families.layout import Layout, norms_inside, walk
from ..families.wiring import Attention, Experts, FeedForward, feed_forwards_of
from .tap import Tap


@dataclass(frozen=True)
class _Point:
    """A site of a feed-forward: the input or output of ``module``. ``width``: a linear as wide as the site."""

    name: str
    module: str
    enters: bool
    width: str


def points_of(sublayer: FeedForward) -> list[_Point]:
    points = [_Point(sublayer.linear, sublayer.linear, False, sublayer.linear)]
    if sublayer.gate:
        points += [
            _Point(sublayer.gate, sublayer.gate, False, sublayer.gate),
            _Point(f"{sublayer.at}:mul", sublayer.output, True, sublayer.linear),
        ]
    return [*points, _Point(sublayer.output, sublayer.output, False, sublayer.output)]


@contextmanager
def watched(model: nn.Module, layout: Layout) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that each forward fills with the values of sites that can overflow, by audit names, channels
    last. Scores are recomputed from queries and keys, [rows, heads, queries, keys]; those of local attention are taken
    from the module, [rows, ..., keys]."""
    local = [sublayer.at for sublayer in layout.topology if isinstance(sublayer, Attention) and sublayer.radius]
    near = {f"{at}:{what}" for at in local for what in ("scores", "context")}
    watch = _Watch(model, layout)
    with watch.hooks as hooks:
        if near:
            hooks.enter_context(torch.enable_grad())  # else the tap hands nothing over; few inputs make a graph
            hooks.enter_context(Tap(model, watch.values.__setitem__, only=near.__contains__))
        yield watch.values


class _Watch:
    """Hooks on a layout's modules. ``taken``: for each site of an expert, a mask of the tokens that the expert gets."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout, self.hooks = model, layout, ExitStack()
        self.values: dict[str, Tensor] = {}  # without empty tensors, which short sequences give
        self.taken: dict[str, Tensor] = {}
        for reader in walk(layout):
            sublayer = reader.sublayer
            self.entering(reader.entrance, reader.site)
            for norm in filter(None, (reader.norm, *norms_inside(sublayer))):
                self.leaving(norm, f"{norm}:{layout.family.norm_site}")
            if isinstance(sublayer, Attention):
                self.attending(sublayer)
            elif isinstance(sublayer, Experts):
                self.leaving(sublayer.classifier)
                self.after(sublayer.router, partial(self.hand_out, sublayer))
            for feed_forward in feed_forwards_of(sublayer) if sublayer is not None else ():
                for point in points_of(feed_forward):
                    (self.entering if point.enters else self.leaving)(point.module, point.name)
        for linear in layout.head.linears if layout.head is not None else ():
            self.leaving(linear.at)

    def note(self, name: str, value: Tensor) -> None:
        if name in self.taken:
            self.values[name] = self.values[name].masked_scatter(self.taken[name], value)
        elif value.numel():
            self.values[name] = value

    def entering(self, path: str, name: str) -> None:
        module = self.model.get_submodule(path)
        # Before others' hooks: behind ZeRO-3's a gradient would end the module's backward, which it never began.
        hook = module.register_forward_pre_hook(lambda _, inputs: self.note(name, inputs[0]), prepend=True)
        self.hooks.enter_context(hook)

    def leaving(self, path: str, name: str = "") -> None:
        self.after(path, lambda inputs, kwargs, out: self.note(name or path, out[0] if isinstance(out, tuple) else out))

    def after(self, path: str, hook: Callable[[Any, Any, Any], None]) -> None:
        module = self.model.get_submodule(path)
        self.hooks.enter_context(module.register_forward_hook(lambda _, *seen: hook(*seen), with_kwargs=True))

    def attending(self, sublayer: Attention) -> None:
        self.leaving(sublayer.query)
        self.leaving(sublayer.output)
        keys_and_values = sublayer.key, sublayer.value
        if sublayer.block:  # keys and values of positions, then of sums
            for path in keys_and_values:
                self.after(path, partial(self.append, path))
            self.entering(sublayer.block_norm, f"{sublayer.at}:sum")
            attention = self.model.get_submodule(sublayer.at)
            self.hooks.enter_context(attention.register_forward_pre_hook(lambda *_: self.forget(*keys_and_values)))
        else:
            for path in keys_and_values:
                self.leaving(path)
        if not sublayer.radius:  # the tap sees local attention's products, with the last block's padding
            self.entering(sublayer.output, f"{sublayer.at}:context")
            self.after(sublayer.at, partial(self.score, sublayer))

    def append(self, name: str, inputs: Any, kwargs: Any, output: Tensor) -> None:
        self.values[name] = torch.cat([self.values[name], output], 1) if name in self.values else output

    def forget(self, *names: str) -> None:
        for name in names:
            self.values.pop(name, None)

    def score(self, sublayer: Attention, inputs: Any, kwargs: Any, output: Any) -> None:
        values, layout = self.values, self.layout
        heads = layout.heads(sublayer), layout.kv_heads(sublayer)
        both = (
            values[sublayer.query].split(sublayer.fused, -1)[:2]
            if sublayer.fused
            else (values[sublayer.query], values[sublayer.key])
        )
        q, k = (x.unflatten(-1, (number, -1)).transpose(1, 2) for x, number in zip(both, heads, strict=True))
        if sublayer.query_norm:
            q, k = (values[f"{path}:{layout.family.norm_site}"] for path in (sublayer.query_norm, sublayer.key_norm))
            if sublayer.norms_whole:
                q, k = (x.unflatten(-1, (number, -1)) for x, number in zip((q, k), heads, strict=True))
            if sublayer.norms_by_position or sublayer.norms_whole:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
        if (rotary := sublayer.rotary) is not None and sublayer.turns:
            q, k = (rotated(x, *kwargs["position_embeddings"], interleaved=rotary.interleaved) for x in (q, k))
        if rotary is not None and rotary.growth is not None:
            growth, positions = rotary.growth
            q = q * (1 + growth * (kwargs["position_ids"] // positions).log1p())[:, None, :, None]
        values[f"{sublayer.at}:scores"] = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)

    def hand_out(self, sublayer: Experts, inputs: Any, kwargs: Any, output: Any) -> None:
        """Set every expert's sites to zeros, [rows, positions, channels], with a mask of the tokens that it gets."""
        values, layout = self.values, self.layout
        chosen, weights = output[0].bool(), output[1]
        if sublayer.chosen:  # of tokens of all rows
            positions = values[f"{sublayer.norm}:{layout.family.norm_site}"].shape[:2]
            logits, weights, numbers = (x.view(*positions, -1) for x in output)
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, numbers, True)
            values[sublayer.classifier] = logits
        of_graph = weights[..., :1].to(inputs[0].dtype) * 0
        for number, expert in enumerate(sublayer.experts):
            takes = chosen[..., number]
            for point in points_of(expert):
                # Part of the graph, so that a goal that no token reaches has a gradient too, 0.
                room = of_graph.expand(*takes.shape, layout.tensors[f"{point.width}.weight"].shape[0])
                values[point.name], self.taken[point.name] = room, takes[..., None].expand_as(room)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return queries or keys [rows, heads, positions, channels] rotated by angles [rows, positions, channels]. Channel
    i pairs with i + channels/2 or, ``interleaved``, 2i with 2i + 1; channels beyond the angles are unchanged."""
    size = cos.shape[-1]
    turning, rest = x[..., :size], x[..., size:]
    if interleaved:
        cos, sin = (angles[..., : size // 2].repeat_interleave(2, -1) for angles in (cos, sin))
        other = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        left, right = turning.chunk(2, -1)
        other = torch.cat((-right, left), -1)
    return torch.cat((turning * cos.unsqueeze(1) + other * sin.unsqueeze(1), rest), -1)
