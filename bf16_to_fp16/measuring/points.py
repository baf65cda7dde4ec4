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
    """A site of a feed-forward: the input or output of ``module``. ``width``: a linear whose output is as wide."""

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
    """Yield a dictionary that one forward fills with the values of sites that can overflow, by audit name. Rows are the
    first axis, channels the last."""
    watch = _Watch(model, layout)
    attentions = [sublayer.at for sublayer in layout.topology if isinstance(sublayer, Attention)]
    products = {f"{at}:{what}" for at in attentions for what in ("scores", "context")}
    with watch.hooks as hooks:
        hooks.enter_context(torch.enable_grad())  # else the tap hands nothing over; few inputs make a graph
        # Stock code may add a bias to the scores in place.
        tap = Tap(model, lambda name, value: watch.note(name, value.clone()), only=products.__contains__)
        hooks.enter_context(tap)
        yield watch.values


class _Watch:
    """Hooks on a layout's modules. ``taken``: for each site of an expert, a mask of the tokens that the expert gets."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout, self.hooks = model, layout, ExitStack()
        self.values: dict[str, Tensor] = {}  # without empty tensors, which short sequences give
        self.twice: set[str] = set()  # sites of positions, then of their sums
        self.taken: dict[str, Tensor] = {}
        for reader in walk(layout):
            sublayer = reader.sublayer
            self.entering(reader.entrance, reader.site)
            for norm in filter(None, (reader.norm, *norms_inside(sublayer))):
                self.leaving(norm, f"{norm}:{layout.family.norm_site}")
            if isinstance(sublayer, Attention):
                for path in dict.fromkeys((sublayer.query, sublayer.key, sublayer.value, sublayer.output)):
                    self.leaving(path)
                if sublayer.block:
                    self.twice |= {sublayer.key, sublayer.value}
                    self.entering(sublayer.block_norm, f"{sublayer.at}:sum")
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
        elif name in self.twice and name in self.values:
            self.values[name] = torch.cat([self.values[name], value], 1)
        elif value.numel():
            self.values[name] = value

    def entering(self, path: str, name: str) -> None:
        module = self.model.get_submodule(path)
        self.hooks.enter_context(module.register_forward_pre_hook(lambda _, inputs: self.note(name, inputs[0])))

    def leaving(self, path: str, name: str = "") -> None:
        self.after(path, lambda inputs, out: self.note(name or path, out[0] if isinstance(out, tuple) else out))

    def after(self, path: str, hook: Callable[[Any, Any], None]) -> None:
        module = self.model.get_submodule(path)
        self.hooks.enter_context(module.register_forward_hook(lambda _, *seen: hook(*seen)))

    def hand_out(self, sublayer: Experts, inputs: Any, output: Any) -> None:
        """Set every expert's sites to zeros, [rows, positions, channels], and ``taken`` to masks of its tokens."""
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
