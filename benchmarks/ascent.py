"""An adversary that finds what every norm must read for a chosen signal behind it to be large, by gradient ascent, and
watches what a model makes of it.

The certificate claims nothing about which vectors can reach a norm, so any may.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from support.adversary import free_norms
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.certificate import bound
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Attention, FeedForward
from bf16_to_fp16.families.walk import walk
from bf16_to_fp16.observe.observer import SiteObserver
from bf16_to_fp16.rescaling.weights import ModelTensors, source_weights
from bf16_to_fp16.run.stock import set_attention


def certified(model: Any, arithmetic: Arithmetic, target: str = "half") -> Certificate:
    """Return a model's certificate."""
    source = ModelTensors(model)
    layout = resolve(source)
    return bound(layout, source_weights(source, layout), arithmetic, target=target)


@contextmanager
def capturing(model: Any, layout: Layout) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Give input and output of every linear that the wiring names, by path."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            seen[path] = (args[0], output)

        return hook

    with ExitStack() as stack:
        for path in linears(layout):
            stack.callback(model.get_submodule(path).register_forward_hook(keep(path)).remove)
        yield seen


def linears(layout: Layout) -> list[str]:
    """Return the module paths of all linears."""
    paths: list[str] = []
    for topology in layout.topology:
        if isinstance(topology, Attention):
            paths += [topology.query, topology.key, topology.value, topology.output]
        elif isinstance(topology, FeedForward):
            paths += [p for p in (topology.gate, topology.linear, topology.output) if p]
    return paths if layout.head is None else [*paths, *(linear.at for linear in layout.head.linears)]


def forward(model: Any, layout: Layout, batch: int, lengths: tuple[int, int]) -> None:
    """Run a model on fixed ids, which are of no account where its norms read something else."""
    generator = torch.Generator().manual_seed(0)
    place = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (batch, lengths[0]), generator=generator).to(place)
    if not layout.stock.decodes:
        model(input_ids=ids)
    else:
        decoder = torch.randint(model.config.vocab_size, (batch, lengths[1]), generator=generator).to(place)
        model(input_ids=ids, decoder_input_ids=decoder, use_cache=False)


@dataclass
class Aim:
    """What one batch entry makes large: ``path`` and the signal there, a channel or head, and two positions."""

    what: str
    topology: Any
    path: str
    index: int
    at: int
    other: int
    sign: int

    def of(self, seen: Mapping[str, tuple[Tensor, Tensor]], b: int, heads: int) -> Tensor:
        """Return the signal, signed."""
        if self.what == "scores":
            size = seen[self.topology.query][1].shape[-1] // heads
            part = slice(self.index * size, (self.index + 1) * size)
            query, key = seen[self.topology.query][1][b, self.at, part], seen[self.topology.key][1][b, self.other, part]
            return self.sign * (query * key).sum()
        return self.sign * seen[self.path][self.what == "output"][b, self.at, self.index]


def aims(
    layout: Layout, certificate: Certificate, batch: int, lengths: tuple[int, int], r: random.Random, tall: float
) -> list[list[Aim]]:
    """Return for every batch entry one aim per norm, the kinds of signal in turn.

    tall: how often it is the channel with the largest bound; else any.
    """

    def channel(path: str, side: str) -> int:
        bounds = getattr(certificate.ranges[path], side).amax
        return int(bounds.argmax()) if r.random() < tall else r.randrange(bounds.numel())

    result = []
    for b in range(batch):
        entry = []
        for reader in walk(layout):
            topology = reader.sublayer
            length, behind = lengths[0 if reader.stack.is_encoder else 1], lengths[0]
            at, other, sign = r.randrange(length), r.randrange(length), r.choice([1, -1])
            if isinstance(topology, Attention):
                choices = [
                    ("output", p)
                    for p in (topology.output, topology.query, topology.key, topology.value, topology.output)
                ]
                what, path = (*choices, ("scores", ""), ("input", topology.output), ("scores", ""))[b % 8]
                if path == topology.output and r.random() < 0.5:
                    at = length - 1  # the one position of a decoder that sees all
                other = r.randrange(behind) if topology.memory else other
                if topology.memory and path in (topology.key, topology.value):
                    at = other
                heads = layout.heads(topology)
                index = r.randrange(heads) if what == "scores" else channel(path, what)
                entry.append(Aim(what, topology, path, index, at, other, sign))
            elif isinstance(topology, FeedForward):
                choices = [("output", p) for p in (topology.output, topology.gate or topology.linear, topology.linear)]
                what, path = (*choices, ("input", topology.output), *choices[:1])[b % 5]
                sign = (1, -1)[b // 5 % 2]
                entry.append(Aim(what, topology, path, channel(path, what), at, other, sign))
            elif not reader.stack.is_encoder:
                path = layout.family.head.removesuffix(".weight")
                entry.append(Aim("output", None, path, channel(path, "output"), at, other, sign))
        result.append(entry)
    return result


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
        one, other = (torch.nn.functional.normalize(x[aim.index], dim=0) for x in (gate, linear))
        return one + aim.sign * other if w.gate else linear[aim.index]
    row = aim.sign * model.get_submodule(w.output).weight[aim.index]
    if not w.gate:
        return row.clamp(min=0) @ linear
    sizes = (row.abs() * gate.norm(dim=1) * linear.norm(dim=1))[:, None]
    rows = torch.nn.functional.normalize(gate, dim=1) + row.sign()[:, None] * torch.nn.functional.normalize(
        linear, dim=1
    )
    n = torch.randn(rows.shape[1], generator=generator, dtype=rows.dtype)
    for _ in range(12):
        n = torch.nn.functional.normalize(rows.t() @ (sizes[:, 0] * (rows @ n)), dim=0)
    # Both ends of the axis give the same squares, but only one opens the gates that matter.
    reached = [(row * model.get_submodule(w.act)(gate @ v * 1e3) * (linear @ v)).sum() for v in (n, -n)]
    return n if reached[0] > reached[1] else -n


def ascend(
    model: Any,
    layout: Layout,
    targets: list[list[Aim]],
    lengths: tuple[int, int],
    seed: int,
    steps: int,
    size: float = 300.0,
) -> dict[str, Tensor]:
    """Return inputs of every norm, of length ``size`` and [batch, positions, d], found by gradient ascent on the
    targets' logarithms.

    Each step turns every vector towards its gradient, by less and less: the first steps are all but power iteration.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    inputs, pace = {}, {}
    for reader in walk(layout):
        width = model.get_submodule(reader.norm).weight.numel()
        shape = (len(targets), lengths[0 if reader.stack.is_encoder else 1], width)
        inputs[reader.norm] = torch.randn(shape, generator=generator, dtype=dtype)
        pace[reader.norm] = torch.ones(*shape[:2], 1, dtype=dtype)
    for b, entry in enumerate(targets):
        for aim in entry:
            direction = start(model, aim, generator)
            if direction is not None:
                inputs[aim.topology.norm][b, aim.at] = direction
                pace[aim.topology.norm][b, aim.at] = 0.1
    inputs = {p: (size * torch.nn.functional.normalize(x, dim=-1)).requires_grad_() for p, x in inputs.items()}
    heads = {w.at: layout.heads(w) for w in layout.topology if isinstance(w, Attention)}
    with free_norms(model, inputs), capturing(model, layout) as seen:
        for step in range(steps):
            forward(model, layout, len(targets), lengths)
            total = torch.zeros((), dtype=dtype)
            for b, entry in enumerate(targets):
                for aim in entry:
                    reached = aim.of(seen, b, heads[aim.topology.at] if isinstance(aim.topology, Attention) else 1)
                    if step == 0 and float(reached.detach()) < 0 and aim.what != "input":
                        aim.sign *= -1
                        reached = -reached
                    # A logarithm weighs all alike; below zero the value itself is raised.
                    at = float(reached.detach())
                    total = total + (reached.log() if at > 0 else reached / max(-at, 1e-30))
            gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
            turn = 3.0 * (0.9**step)
            with torch.no_grad():
                for (path, x), gradient in zip(inputs.items(), gradients, strict=True):
                    if gradient is not None:
                        step_ = turn * pace[path] * torch.nn.functional.normalize(gradient.nan_to_num(), dim=-1)
                        x.copy_(size * torch.nn.functional.normalize(x / size + step_, dim=-1))
    return {path: x.detach() for path, x in inputs.items()}


def unscreened(site: Any, skip: frozenset[str]) -> bool:
    """Return whether a site's name means the same in every kernel."""
    path, _, operation = site.name.partition(":")
    return "constant" not in site.name and not (path in skip and operation != "context")


def watch(
    model: Any,
    run: Callable[[], None],
    attention: str,
    *,
    fast: bool = True,
    under: AbstractContextManager[Any] | None = None,
) -> dict[str, float]:
    """Return the largest |x| at every site while ``run`` runs, ``under`` a context beneath the observer's."""
    set_attention(model, attention)
    observer = SiteObserver(model, fast_products=fast)
    with torch.set_grad_enabled(model.training), under or nullcontext(), observer:
        run()
    # Kernels of SDPA multiply queries and keys under the names that eager attention gives to scores and weights.
    skip = frozenset(
        name for name, m in model.named_modules() if attention == "sdpa" and type(m).__name__.endswith("Attention")
    )
    found: dict[str, float] = {}
    for site in observer.sites():
        if unscreened(site, skip):
            found[site.name] = max(found.get(site.name, 0.0), site.amax)
    return found
