"""The adversary: a gradient search for the inputs that bring each site nearest to its limit.

Random inputs rarely find what one rare token sequence does. Here every row of a batch goes after a site of its own,
many sites at once: first over input embeddings, as convex combinations of rows of the embedding table (the hull that
the certificate covers), then over token ids, changing one position at a time to what the gradient prefers and keeping
what improves (HotFlip, Ebrahimi et al. 2018). What is found is measured again in fp32 and in real fp16 arithmetic.
The pair of the worst found and the certificate's bound is the honest answer to how near a model can come.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .families.types import Layout
from .numerics import FP16_MAX, headroom_bits
from .observe import SiteObserver, watched

LENGTH = 12
"""Positions of an attack's sequences: enough for every score and every mixture of values."""

GROUP = 48
"""Sites attacked in one batch."""

WORDS = 512
"""Rows of the table that the hull is searched over; with a larger vocabulary a random choice of them."""

RATE = 0.3
FLIPS = 4
"""Best changes tried at each token step."""


@dataclass(frozen=True)
class Found:
    """What one site reached: by as many random inputs, by tokens, by embeddings (fp32), and in fp16 by any of them."""

    name: str
    random: float
    tokens: float
    embeddings: float
    half: float
    limit: float = FP16_MAX

    @property
    def worst(self) -> float:
        """The largest value found, in fp32 or fp16."""
        return max(self.random, self.tokens, self.embeddings, self.half)

    @property
    def gain(self) -> float:
        """How many times more than random inputs the search reached."""
        return self.worst / self.random if self.random else math.inf


@dataclass(frozen=True)
class Attack:
    """The result of a search: each site's findings, and the token ids that were worst for it.

    ``inputs``: per attacked site the encoder's and the decoder's ids (empty for an encoder).
    """

    steps: int
    seed: int
    found: tuple[Found, ...]
    inputs: Mapping[str, tuple[list[int], list[int]]] = field(default_factory=dict)

    @property
    def worst_headroom_bits(self) -> float:
        """log2(limit / worst) at the tightest site."""
        return min((headroom_bits(f.worst, f.limit) for f in self.found), default=math.inf)

    @property
    def worst(self) -> dict[str, float]:
        """The worst value found at every site."""
        return {f.name: f.worst for f in self.found}

    def to_json(self) -> dict[str, Any]:
        """Return the ``attack`` entry of the report; ``gain`` is over as many random inputs, ``ids`` replay it."""
        gains = [f.gain for f in self.found if f.name in self.inputs and f.random > 0]
        return {
            "steps": self.steps,
            "seed": self.seed,
            "worst_headroom_bits": self.worst_headroom_bits,
            "median_gain": statistics.median(gains) if gains else None,
            "sites": [
                {
                    "name": f.name,
                    "worst": f.worst,
                    "random": f.random,
                    "tokens": f.tokens,
                    "embeddings": f.embeddings,
                    "half": f.half,
                    "limit": f.limit,
                    "headroom_bits": headroom_bits(f.worst, f.limit),
                    "gain": f.gain,
                    "ids": self.inputs.get(f.name),
                }
                for f in sorted(self.found, key=lambda f: headroom_bits(f.worst, f.limit))
            ],
        }


@dataclass
class _Inputs:
    """A batch for both sides: ids [rows, length], or embeddings [rows, length, d]; decoder None for an encoder."""

    encoder: Tensor
    decoder: Tensor | None

    def rows(self, chosen: Tensor) -> _Inputs:
        return _Inputs(self.encoder[chosen], None if self.decoder is None else self.decoder[chosen])


class _Adversary:
    def __init__(self, model: Any, layout: Layout, seed: int, length: int) -> None:
        self.model, self.layout, self.length = model, layout, length
        self.generator = torch.Generator().manual_seed(seed)
        self.table = model.get_input_embeddings().weight.detach()
        stack = model.get_encoder() if hasattr(model, "get_encoder") else model
        # Pegasus's encoder scales embeddings that it looks up, but not those that it is given; its decoder both.
        self.encoder_scale = float(getattr(stack, "embed_scale", 1.0))

    def draw(self, rows: int) -> _Inputs:
        """Return random ids; every fourth row repeats one token."""

        def side() -> Tensor:
            ids = torch.randint(len(self.table), (rows, self.length), generator=self.generator)
            ids[::4] = ids[::4, :1]
            return ids

        return _Inputs(side(), None if self.layout.encoder_only else side())

    def embed(self, ids: _Inputs) -> _Inputs:
        return _Inputs(self.table[ids.encoder], None if ids.decoder is None else self.table[ids.decoder])

    def run(self, x: _Inputs, model: Any = None) -> None:
        """Run the model on embeddings."""
        model = model or self.model
        dtype = next(model.parameters()).dtype
        encoder = (x.encoder * self.encoder_scale).to(dtype)
        if x.decoder is None:
            model(inputs_embeds=encoder)
        else:
            model(inputs_embeds=encoder, decoder_inputs_embeds=x.decoder.to(dtype), use_cache=False)

    def run_ids(self, x: _Inputs, model: Any) -> None:
        """Run a model on token ids."""
        if x.decoder is None:
            model(input_ids=x.encoder)
        else:
            model(input_ids=x.encoder, decoder_input_ids=x.decoder, use_cache=False)

    def reached(self, x: _Inputs, sites: Sequence[str]) -> Tensor:
        """Return the largest |value| at each row's own site, differentiable: [rows]."""
        with watched(self.model, self.layout) as values:
            self.run(x)
        return torch.stack([values[name][row].abs().max() for row, name in enumerate(sites)])

    # -- the two searches ---------------------------------------------------------------------------------------------

    def in_hull(self, sites: Sequence[str], start: _Inputs, steps: int, done: Callable[[], None]) -> _Inputs:
        """Climb over convex combinations of table rows; return the best embeddings of each row."""
        count = min(len(self.table), WORDS)
        words = torch.randperm(len(self.table), generator=self.generator)[:count]
        table = self.table[words]

        def logits() -> Tensor:
            drawn = torch.randn(len(sites), self.length, count, generator=self.generator)
            return (2 * drawn).requires_grad_()

        sides = [logits()] + ([] if start.decoder is None else [logits()])
        optimizer = torch.optim.Adam(sides, lr=RATE)
        best, kept = torch.zeros(len(sites)), self.embed(start)
        for _ in range(steps):
            mixed = [torch.softmax(side, -1) @ table for side in sides]
            x = _Inputs(mixed[0], mixed[1] if len(mixed) > 1 else None)
            reached = self.reached(x, sites)
            better = reached.detach() > best
            best = torch.where(better, reached.detach(), best)
            kept = choose(better, x, kept)
            optimizer.zero_grad()
            (-reached.clamp(min=1e-30).log().sum()).backward()
            optimizer.step()
            done()
        return kept

    def by_tokens(
        self, sites: Sequence[str], start: _Inputs, steps: int, done: Callable[[], None]
    ) -> tuple[_Inputs, Tensor]:
        """Change one token at a time to what the gradient prefers; return the best ids of each row and what they
        reach."""
        ids = start
        with torch.no_grad():
            best = self.reached(self.embed(ids), sites)
        for step in range(steps):
            x = self.embed(ids)
            for side in (x.encoder, x.decoder):
                if side is not None:
                    side.requires_grad_()
            self.reached(x, sites).clamp(min=1e-30).log().sum().backward()
            for trial in self.flips(ids, x, step):
                with torch.no_grad():
                    reached = self.reached(self.embed(trial), sites)
                better = reached > best
                best = torch.where(better, reached, best)
                ids = choose(better, trial, ids)
            done()
        return ids, best

    def flips(self, ids: _Inputs, x: _Inputs, step: int) -> list[_Inputs]:
        """Return changed ids: per row the most promising tokens by first order, at its most promising positions."""
        trials = []
        for name in ("encoder", "decoder"):
            side, given = getattr(x, name), getattr(ids, name)
            if side is None or side.grad is None:
                continue
            gain, word = self.promising(side.grad)
            gain = gain - (side.grad * side.detach()).sum(-1)
            places = gain.topk(min(FLIPS, self.length), dim=1).indices
            for k in range(places.shape[1]):
                changed = given.clone()
                place = places[:, k : k + 1]
                changed.scatter_(1, place, word.gather(1, place))
                trials.append(_Inputs(changed, ids.decoder) if name == "encoder" else _Inputs(ids.encoder, changed))
            if step % 4 == 3:
                # One token everywhere: what a single change cannot reach.
                best = word.gather(1, places[:, :1]).expand_as(given)
                trials.append(_Inputs(best, ids.decoder) if name == "encoder" else _Inputs(ids.encoder, best))
        return trials

    def promising(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return for every position the largest gradient·row of the table and its id, a few thousand rows at a time."""
        best = torch.full(gradient.shape[:2], -math.inf)
        word = torch.zeros(gradient.shape[:2], dtype=torch.int64)
        for start in range(0, len(self.table), 4096):
            found = (gradient @ self.table[start : start + 4096].t()).max(-1)
            better = found.values > best
            best, word = torch.where(better, found.values, best), torch.where(better, found.indices + start, word)
        return best, word

    # -- measuring ----------------------------------------------------------------------------------------------------

    def measure(self, model: nn.Module, inputs: Sequence[tuple[_Inputs, bool]]) -> dict[str, float]:
        """Return the largest |x| of every operation on all inputs; each is ids (True) or embeddings."""
        observer = SiteObserver(model)
        with torch.no_grad(), observer:
            for x, tokens in inputs:
                self.run_ids(x, model) if tokens else self.run(x, model)
        # What has no limit in fp16 is benign; masks are not an input's doing.
        half = next(model.parameters()).dtype == torch.float16
        return {
            s.name: s.amax for s in observer.sites() if ":constant " not in s.name and (s.limit is not None or not half)
        }


def choose(better: Tensor, new: _Inputs, old: _Inputs) -> _Inputs:
    """Return row by row the new input where it is better, else the old."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(better.view(-1, *[1] * (a.dim() - 1)), a.detach(), b)

    return _Inputs(
        pick(new.encoder, old.encoder),
        None if new.decoder is None or old.decoder is None else pick(new.decoder, old.decoder),
    )


def attack(
    model: Any,
    layout: Layout,
    *,
    steps: int,
    seed: int = 0,
    length: int = LENGTH,
    sites: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Attack:
    """Return what ``steps`` gradient steps, half over embeddings and half over tokens, find at each site of ``model``.

    model: a stock model in eval mode whose weights are those that are served, in any dtype; it is not changed. sites:
    audit names to go after, by default every linear, product, score, context, norm and residual add; a name given
    several times gets as many starts. Every other operation is measured on the same inputs. length: positions of both
    sides. Deterministic for a seed.
    """
    wide, half = copy.deepcopy(model).float().eval(), copy.deepcopy(model).half().eval()
    for each in (wide, half):
        each.set_attn_implementation("eager")
        each.requires_grad_(False)
    adversary = _Adversary(wide, layout, seed, min(length, longest(model.config)))
    if sites is None:
        with torch.no_grad(), watched(wide, layout) as values:
            adversary.run(adversary.embed(adversary.draw(1)))
        sites = list(values)
    groups = [list(sites[i : i + GROUP]) for i in range(0, len(sites), GROUP)]
    each_half = max(1, steps // 2)
    total, count = len(groups) * 2 * each_half, 0

    def done() -> None:
        nonlocal count
        count += 1
        if progress is not None:
            progress(count, total)

    tokens: list[tuple[_Inputs, bool]] = []
    mixed: list[tuple[_Inputs, bool]] = []
    inputs: dict[str, tuple[list[int], list[int]]] = {}
    highest: dict[str, float] = {}
    for group in groups:
        with torch.enable_grad():
            start = adversary.draw(len(group))
            mixed.append((adversary.in_hull(group, start, each_half, done), False))
            ids, reached = adversary.by_tokens(group, start, each_half, done)
        tokens.append((ids, True))
        for row, name in enumerate(group):
            if name not in inputs or float(reached[row]) > highest[name]:
                decoder = [] if ids.decoder is None else ids.decoder[row].tolist()
                inputs[name], highest[name] = (ids.encoder[row].tolist(), decoder), float(reached[row])
    # As many random inputs as the search has run forward passes.
    rounds = each_half * (2 + 2 * FLIPS)
    random = [(adversary.draw(GROUP), True) for _ in range(min(rounds, 64))]
    by_random, by_tokens, by_mixture = (adversary.measure(wide, x) for x in (random, tokens, mixed))
    in_half = adversary.measure(half, tokens + mixed)
    names = [n for n in in_half if n in by_random or n in inputs]
    found = tuple(Found(n, *(seen.get(n, 0.0) for seen in (by_random, by_tokens, by_mixture, in_half))) for n in names)
    return Attack(steps, seed, found, inputs)


def longest(config: Any) -> int:
    """Return the most positions that a model takes; models without positions of their own take any number."""
    return int(getattr(config, "max_position_embeddings", 0) or 1 << 30)


__all__ = ["Attack", "Found", "attack"]
