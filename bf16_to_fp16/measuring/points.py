"""The differentiable sites of a layout that can overflow, for the attack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..families.layout import Layout, norms_inside, walk
from ..families.wiring import Attention, Experts, FeedForward, feed_forwards_of
from .tap import Tap


def widths_of(sublayer: FeedForward) -> dict[str, str]:
    """Return a feed-forward's sites, each with a linear whose output is as wide."""
    widths = {sublayer.linear: sublayer.linear}
    if sublayer.gate:
        widths |= {sublayer.gate: sublayer.gate, f"{sublayer.at}:mul": sublayer.linear}
    return widths | {sublayer.output: sublayer.output}


@contextmanager
def watched(model: nn.Module, layout: Layout) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that one forward fills with the values of sites that can overflow, by audit name. Rows are the
    first axis, channels the last."""
    watch = _Watch(model, layout)
    with watch.hooks as hooks:
        hooks.enter_context(torch.enable_grad())  # else the tap hands nothing over; few inputs make a graph
        # Stock code may add a bias to the scores in place.
        tap = Tap(model, lambda name, value: watch.note(name, value.clone()), only=watch.tapped.__contains__)
        hooks.enter_context(tap)
        yield watch.values


class _Watch:
    """The sites to tap, and hooks where the tap has no site of that name: streams, and norms, named as in fp16.
    ``taken``: for each site of an expert, a mask of the tokens that the expert gets."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout, self.hooks = model, layout, ExitStack()
        self.values: dict[str, Tensor] = {}  # without empty tensors, which short sequences give
        self.twice: set[str] = set()  # sites of positions, then of their sums
        self.taken: dict[str, Tensor] = {}
        self.tapped = {linear.at for linear in layout.head.linears} if layout.head is not None else set()
        for reader in walk(layout):
            sublayer = reader.sublayer
            self.entering(reader.entrance, reader.site)
            for norm in filter(None, (reader.norm, *norms_inside(sublayer))):
                self.leaving(norm, f"{norm}:{layout.family.norm_site}")
            if isinstance(sublayer, Attention):
                self.tapped |= {sublayer.query, sublayer.key, sublayer.value, sublayer.output}
                self.tapped |= {f"{sublayer.at}:scores", f"{sublayer.at}:context"}
                if sublayer.block:
                    self.twice |= {sublayer.key, sublayer.value}
                    self.entering(sublayer.block_norm, f"{sublayer.at}:sum")
            elif isinstance(sublayer, Experts):
                self.tapped.add(sublayer.classifier)
                self.after(sublayer.router, partial(self.hand_out, sublayer))
            for feed_forward in feed_forwards_of(sublayer) if sublayer is not None else ():
                self.tapped |= widths_of(feed_forward).keys()

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

    def leaving(self, path: str, name: str) -> None:
        self.after(path, lambda inputs, out: self.note(name, out))

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
            for name, linear in widths_of(expert).items():
                # Part of the graph, so that a goal that no token reaches has a gradient too, 0.
                room = of_graph.expand(*takes.shape, layout.tensors[f"{linear}.weight"].shape[0])
                values[name], self.taken[name] = room, takes[..., None].expand_as(room)
