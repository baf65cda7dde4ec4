"""An adversary that finds what every norm must read for a chosen signal behind it to be large, by gradient ascent, and
watches what a model makes of it.

The certificate claims nothing about which vectors can reach a norm, so any may.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from support.adversary import free_norms
from support.contract import layout_of
from support.inside import Whole, bound
from torch import Tensor
from torch.nn.functional import normalize

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.families.layout import Layout, walk
from bf16_to_fp16.families.resolve import ModelTensors, source_weights
from bf16_to_fp16.families.wiring import Attention, FeedForward
from bf16_to_fp16.measuring.observer import SiteObserver
from bf16_to_fp16.measuring.stock import set_attention

SIZE = 300.0  # of what a norm reads
Seen = Mapping[str, tuple[Tensor, Tensor]]  # inputs and outputs of linears by path
Lengths = tuple[int, int]  # of what encoder and decoder read


def certified(model: Any, arithmetic: Arithmetic, target: str = "half") -> Whole:
    layout = layout_of(model)
    return bound(layout, source_weights(ModelTensors(model), layout), arithmetic, target=target)


@contextmanager
def capturing(model: Any, layout: Layout) -> Iterator[Seen]:
    """Give input and output of every linear that the wiring names, by path."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str) -> Any:
        return lambda module, args, output: seen.update({path: (args[0], output)})

    paths = [linear.at for linear in layout.head.linears] if layout.head else []
    for w in layout.topology:
        if isinstance(w, Attention):
            paths += [w.query, w.key, w.value, w.output]
        elif isinstance(w, FeedForward):
            paths += [path for path in (w.gate, w.linear, w.output) if path]
    with ExitStack() as stack:
        for path in paths:
            stack.callback(model.get_submodule(path).register_forward_hook(keep(path)).remove)
        yield seen


def reading(model: Any, layout: Layout, inputs: Mapping[str, Tensor], lengths: Lengths) -> Callable[[], None]:
    """Return a run of a model whose norms read these inputs, on ids that are of no account then."""

    def run() -> None:
        batch, place = len(next(iter(inputs.values()))), next(model.parameters()).device
        ids, decoder = (torch.zeros(batch, length, dtype=torch.long, device=place) for length in lengths)
        more = {"decoder_input_ids": decoder, "use_cache": False} if layout.stock.decodes else {}
        with free_norms(model, inputs):
            model(input_ids=ids, **more)

    return run


@dataclass
class Aim:
    """What one row of the batch makes large: ``path`` and the signal there, a channel or head, and two positions."""

    row: int
    what: str
    topology: Any
    path: str
    index: int
    at: int
    other: int
    sign: int
    heads: int = 1

    def of(self, seen: Seen) -> Tensor:
        if self.what == "scores":
            paths = self.topology.query, self.topology.key
            query, key = (seen[path][1][self.row].unflatten(-1, (self.heads, -1)) for path in paths)
            return self.sign * (query[self.at, self.index] * key[self.other, self.index]).sum()
        return self.sign * seen[self.path][self.what == "output"][self.row, self.at, self.index]


def aims(layout: Layout, certificate: Certificate, batch: int, lengths: Lengths, r: random.Random) -> list[Aim]:
    """Return for every row one aim per norm, the kinds of signal in turn: half of them at the channel with the largest
    bound, the others at any."""

    def channel(path: str, side: str) -> int:
        bounds = getattr(certificate.ranges[path], side).amax
        return int(bounds.argmax()) if r.random() < 0.5 else r.randrange(bounds.numel())

    found = []
    for row, reader in ((row, reader) for row in range(batch) for reader in walk(layout)):
        w, length = reader.sublayer, lengths[0 if reader.stack.is_encoder else 1]
        at, other, sign = r.randrange(length), r.randrange(length), r.choice([1, -1])
        if isinstance(w, Attention):
            outputs = [("output", path) for path in (w.output, w.query, w.key, w.value, w.output)]
            what, path = (*outputs, ("scores", ""), ("input", w.output), ("scores", ""))[row % 8]
            if path == w.output and r.random() < 0.5:
                at = length - 1  # the one position of a decoder that sees all
            other = r.randrange(lengths[0]) if w.memory else other
            if w.memory and path in (w.key, w.value):
                at = other
            index = r.randrange(layout.heads(w)) if what == "scores" else channel(path, what)
            found.append(Aim(row, what, w, path, index, at, other, sign, layout.heads(w)))
        elif isinstance(w, FeedForward):
            outputs = [("output", path) for path in (w.output, w.gate or w.linear, w.linear)]
            what, path = (*outputs, ("input", w.output), outputs[0])[row % 5]
            found.append(Aim(row, what, w, path, channel(path, what), at, other, (1, -1)[row // 5 % 2]))
        elif not reader.stack.is_encoder:
            path = layout.family.head.removesuffix(".weight")
            found.append(Aim(row, "output", None, path, channel(path, "output"), at, other, sign))
    return found


@torch.no_grad()
def start(model: Any, aim: Aim, generator: torch.Generator) -> Tensor | None:
    """Return a direction from which an aim behind a feed-forward's activation can be climbed, [d]; None where any can.

    A closed gate has no gradient. For a neuron: where its two rows agree. For an output: the leading eigenvector of
    the squares that bound the gated products (a few power iterations), or for plain neurons the sum of the open ones.
    """
    w = aim.topology
    if not isinstance(w, FeedForward) or aim.path != w.output:
        return None
    norm = model.get_submodule(w.norm).weight
    linear = model.get_submodule(w.linear).weight * norm
    gate = model.get_submodule(w.gate).weight * norm if w.gate else linear
    if aim.what == "input":
        one, other = (normalize(x[aim.index], dim=0) for x in (gate, linear))
        return one + aim.sign * other if w.gate else linear[aim.index]
    row = aim.sign * model.get_submodule(w.output).weight[aim.index]
    if not w.gate:
        return row.clamp(min=0) @ linear
    sizes = row.abs() * gate.norm(dim=1) * linear.norm(dim=1)
    rows = normalize(gate, dim=1) + row.sign()[:, None] * normalize(linear, dim=1)
    n = torch.randn(rows.shape[1], generator=generator, dtype=rows.dtype)
    for _ in range(12):
        n = normalize(rows.t() @ (sizes * (rows @ n)), dim=0)
    # Both ends of the axis give the same squares, but only one opens the gates that matter.
    reached = [(row * model.get_submodule(w.act)(gate @ v * 1e3) * (linear @ v)).sum() for v in (n, -n)]
    return n if reached[0] > reached[1] else -n


def attacked(
    wide: Any, half: Any, batch: int, lengths: Lengths, r: random.Random, seed: int, steps: int = 25
) -> tuple[Any, dict[str, Tensor]]:
    """Return a model in fp64, and what its norms read, of length ``SIZE`` and [batch, positions, d], as gradient ascent
    on the aims' logarithms finds it.

    Each step turns every vector towards its gradient, by less and less: the first steps are all but power iteration.
    """
    layout, model = layout_of(half), copy.deepcopy(wide).double().requires_grad_(False)
    set_attention(model, "eager")
    targets = aims(layout, certified(half, Arithmetic(max(lengths))), batch, lengths, r)
    generator = torch.Generator().manual_seed(seed)
    inputs, pace = {}, {}
    for reader in walk(layout):
        width, length = model.get_submodule(reader.norm).weight.numel(), lengths[0 if reader.stack.is_encoder else 1]
        inputs[reader.norm] = torch.randn(batch, length, width, generator=generator, dtype=torch.float64)
        pace[reader.norm] = torch.ones(batch, length, 1, dtype=torch.float64)
    for aim in targets:
        direction = start(model, aim, generator)
        if direction is not None:
            inputs[aim.topology.norm][aim.row, aim.at] = direction
            pace[aim.topology.norm][aim.row, aim.at] = 0.1
    inputs = {path: (SIZE * normalize(x, dim=-1)).requires_grad_() for path, x in inputs.items()}
    run = reading(model, layout, inputs, lengths)
    with capturing(model, layout) as seen:
        for step in range(steps):
            run()
            total = torch.zeros((), dtype=torch.float64)
            for aim in targets:
                reached = aim.of(seen)
                at = float(reached.detach())
                if step == 0 and at < 0 and aim.what != "input":
                    aim.sign, reached, at = -aim.sign, -reached, -at
                # A logarithm weighs all alike; below zero the value itself is raised.
                total = total + (reached.log() if at > 0 else reached / max(-at, 1e-30))
            gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
            with torch.no_grad():
                for (path, x), gradient in zip(inputs.items(), gradients, strict=True):
                    if gradient is not None:
                        turn = 3.0 * 0.9**step * pace[path] * normalize(gradient.nan_to_num(), dim=-1)
                        x.copy_(SIZE * normalize(x / SIZE + turn, dim=-1))
    return model, {path: x.detach() for path, x in inputs.items()}


def watch(model: Any, run: Callable[[], None], attention: str, fast: bool = True) -> dict[str, float]:
    """Return the largest |x| at every site while ``run`` runs."""
    set_attention(model, attention)
    observer = SiteObserver(model, fast_products=fast)
    with torch.set_grad_enabled(model.training), observer:
        run()
    # Kernels of SDPA multiply queries and keys under the names that eager attention gives to scores and weights.
    modules = model.named_modules() if attention == "sdpa" else ()
    skip = {name for name, module in modules if type(module).__name__.endswith("Attention")}
    found: dict[str, float] = {}
    for site in observer.sites():
        path, _, operation = site.name.partition(":")
        if "constant" not in site.name and (path not in skip or operation == "context"):
            found[site.name] = max(found.get(site.name, 0.0), site.amax)
    return found
