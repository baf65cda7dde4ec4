"""A gradient search for inputs that bring each site as near to its limit as possible.

Each row of a batch maximises one goal: the largest |x| of a site, or 1/σ of a norm's input. The search changes either
mixtures of embedding rows, which the certificate covers too, or token ids, one position at a time (HotFlip, Ebrahimi et
al. 2018). Each round continues from the best inputs so far. At the end these are measured in fp32 and in real fp16."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..devices import Device
from ..families.known import spare_padding
from ..families.layout import Layout, norms_inside, walk
from ..families.wiring import Attention, Experts, FeedForward, feed_forwards_of
from ..numerics import FP16_MAX, headroom_bits
from ..progress import Progress
from ..results import AttackedSite, AttackEntry
from .observer import SiteObserver
from .stock import load, longest_sequence, run_everywhere, set_attention
from .tap import Tap

LENGTH = 16  # positions of an attack's sequences: enough for every score and every mixture of values
GROUP = 48  # goals attacked in one batch
ROUNDS = 4  # times that the rows start anew from the best inputs
STARTS = 3  # best inputs kept for each goal, for as many rows to start from
POOL = 8  # groups of random inputs among which the first rows choose their start

TOKEN_SHARE = 4  # one step in four changes tokens, at several times the cost of the others

START_WEIGHT = 0.7  # weight of its starting point in a row's first mixture
WORDS = 512  # rows of the table that the hull is searched over; with a larger vocabulary a random choice of them
MIXTURE_RATE = 0.3  # learning rate of mixtures
FLIPS = 4  # best changes tried at each token step

Inputs = tuple[Tensor, ...]
"""A batch for the encoder and, where there is one, the decoder: ids [rows, length], or embeddings [rows, length, d]."""


def joined(parts: Sequence[Inputs]) -> Inputs:
    return tuple(torch.cat(side) for side in zip(*parts, strict=True))


class _Elite:
    """The best inputs so far for each goal of the search, best first, with the values that they reach."""

    def __init__(self) -> None:
        self.kept: dict[str, list[tuple[float, Inputs]]] = {}

    def offer(self, x: Inputs, reached: Mapping[str, Tensor]) -> None:
        for goal, values in reached.items():
            kept = self.kept.setdefault(goal, [])
            # NaN counts as past every limit.
            top = values.nan_to_num(math.inf, math.inf).topk(min(STARTS, len(values)))
            for value, row in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                # An input is offered again whenever its row did not improve.
                if all(value != old for old, _ in kept):
                    kept.append((value, tuple(side[row : row + 1].clone() for side in x)))
            kept.sort(key=lambda pair: -pair[0])
            del kept[STARTS:]

    def starts(self, goals: Sequence[str]) -> Inputs:
        seen: dict[str, int] = {}
        parts = []
        for goal in goals:
            kept, turn = self.kept[goal], seen.get(goal, 0)
            seen[goal] = turn + 1
            parts.append(kept[turn % len(kept)][1])
        return joined(parts)


class _Adversary:
    """A model under attack, with the searches for its worst inputs. Each row of an input has one goal, the name of a
    value whose largest |x| is maximised."""

    def __init__(self, model: Any, layout: Layout, seed: int, length: int) -> None:
        self.model, self.layout, self.length = model, layout, length
        self.generator = torch.Generator().manual_seed(seed)
        named = dict(model.named_parameters(remove_duplicate=False))
        embedding = model.get_input_embeddings().weight
        tables: list[Tensor] = []
        # Pegasus's decoder, Granite and T5Gemma's stacks scale ``inputs_embeds`` too; others do not.
        for stack in layout.stacks()[: 1 if layout.shares_table else None]:
            table = (named[stack.ends.table] if stack.ends.table else embedding).detach()
            tables.append(table * layout.embedding_scale(stack.ends) if stack.ends.scaled_by == "module" else table)
        self.tables = tables * 2 if layout.stock.decodes and len(tables) == 1 else tables
        """Embedding tables of the encoder and, where there is one, the decoder. Inputs are mixtures of their rows."""
        first = layout.stacks()[0].ends
        by_lookup_alone = first.scaled_by == "stack" and first.switch
        self.encoder_scale = layout.embedding_scale(first) if by_lookup_alone else 1.0
        self.vocabulary, self.device = len(self.tables[0]), self.tables[0].device
        self.narrow = {f"{reader.norm}:1/σ": reader.site for reader in walk(layout) if reader.norm}
        """The goals that are 1/σ of a norm's input, each with the site of this input."""

    def draw(self, rows: int) -> Inputs:
        def side() -> Tensor:
            ids = torch.randint(self.vocabulary, (rows, self.length), generator=self.generator)
            ids[::4] = ids[::4, :1]
            return ids.to(self.device)

        return tuple(side() for _ in self.tables)

    def embed(self, ids: Inputs) -> Inputs:
        return tuple(table[side] for table, side in zip(self.tables, ids, strict=True))

    def run(self, x: Inputs, model: Any = None, mask: Tensor | None = None) -> None:
        model, kind = model or self.model, "input_ids"
        if x[0].is_floating_point():
            dtype, kind = next(model.parameters()).dtype, "inputs_embeds"
            x = tuple(side.to(dtype) for side in (x[0] * self.encoder_scale, *x[1:]))
        decoder = {f"decoder_{kind}": x[1], "use_cache": False} if len(x) > 1 else {}
        run_everywhere(model, self.layout, **{kind: x[0]}, attention_mask=mask, **decoder)

    def values(self, x: Inputs) -> dict[str, Tensor]:
        with watched(self.model, self.layout) as values:
            self.run(x)
        for goal, stream in self.narrow.items():
            if stream in values:
                h = values[stream]
                if self.layout.family.centred_norm:
                    h = h - h.mean(-1, keepdim=True)
                values[goal] = (h.square().mean(-1) + self.layout.eps).rsqrt()
        return values

    def reached(self, x: Inputs, goals: Sequence[str]) -> Tensor:
        values = self.values(x)
        return torch.stack([values[name][row].abs().max() for row, name in enumerate(goals)])

    def survey(self, x: Inputs) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: value.abs().flatten(1).amax(1) for name, value in self.values(x).items()}

    def nearest(self, x: Inputs) -> Inputs:
        sides = zip(x, self.tables, strict=True)
        return tuple(self.best_words(side, table, nearest=True)[1] for side, table in sides)

    def best_words(self, x: Tensor, table: Tensor, *, nearest: bool = False) -> tuple[Tensor, Tensor]:
        """Return, for every position, the largest product of x with a row of ``table``, and the id of that row.
        nearest: maximise x·row − ‖row‖²/2 instead, which finds the row nearest to x."""
        best = torch.full(x.shape[:2], -math.inf, device=x.device)
        word = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
        for start in range(0, len(table), 4096):
            part = table[start : start + 4096]
            products = x @ part.t()
            if nearest:
                products = products - part.square().sum(1) / 2
            largest = products.max(-1)
            better = largest.values > best
            best, word = torch.where(better, largest.values, best), torch.where(better, largest.indices + start, word)
        return best, word

    def measure(self, model: Any, inputs: Sequence[Inputs]) -> dict[str, float]:
        """Return the largest |x| of every site over all inputs, by name. If stock code can run padding, the first row
        of each batch also runs with padding, so that the operations on its mask are measured."""
        spare = spare_padding(model.config.to_dict()) or 1
        last = int(spare) if spare < self.length else 0
        observer = SiteObserver(model)
        with torch.no_grad(), observer:
            for x in inputs:
                again = joined([x, tuple(side[:1] for side in x)])
                mask = torch.ones(again[0].shape[:2], dtype=torch.int64, device=self.device)
                mask[-1, 1:][mask.shape[1] - 1 - last :] = 0
                self.run(again, model, mask)
        # A site without a limit in fp16 is benign, and constants do not depend on inputs.
        half = next(model.parameters()).dtype == torch.float16
        return {
            s.name: s.amax for s in observer.sites() if ":constant " not in s.name and (s.limit is not None or not half)
        }

    def in_hull(self, goals: Sequence[str], start: Inputs, steps: int, done: Callable[[], None]) -> Inputs:
        count = min(self.vocabulary, WORDS)
        words = torch.randperm(self.vocabulary, generator=self.generator)[:count].to(self.device)
        tables = [table[words] for table in self.tables]
        # The starting point is one more word of each position; the others share what is left of the weight.
        lead = math.log(START_WEIGHT / (1 - START_WEIGHT))

        def logits() -> Tensor:
            drawn = 2 * torch.randn(len(goals), self.length, count, generator=self.generator)
            first = drawn.logsumexp(-1, keepdim=True) + lead
            return torch.cat([first, drawn], -1).to(self.device).requires_grad_()

        def mixed(side: Tensor, origin: Tensor, table: Tensor) -> Tensor:
            weights = torch.softmax(side, -1)
            return weights[..., :1] * origin + weights[..., 1:] @ table

        sides = [logits() for _ in start]
        optimizer = torch.optim.Adam(sides, lr=MIXTURE_RATE)
        with torch.no_grad():
            best, kept = self.reached(start, goals), start
        for _ in range(steps):
            x = tuple(map(mixed, sides, start, tables))
            reached = self.reached(x, goals)
            better = reached.detach() > best
            best = torch.where(better, reached.detach(), best)
            kept = choose(better, x, kept)
            optimizer.zero_grad()
            (-reached.clamp(min=1e-30).log().sum()).backward()
            optimizer.step()
            done()
        return kept

    def by_tokens(self, goals: Sequence[str], ids: Inputs, steps: int, done: Callable[[], None]) -> Inputs:
        with torch.no_grad():
            best = self.reached(self.embed(ids), goals)
        for step in range(steps):
            x = tuple(side.requires_grad_() for side in self.embed(ids))
            self.reached(x, goals).clamp(min=1e-30).log().sum().backward()
            for trial in self.flips(ids, x, step):
                with torch.no_grad():
                    reached = self.reached(self.embed(trial), goals)
                better = reached > best
                best = torch.where(better, reached, best)
                ids = choose(better, trial, ids)
            done()
        return ids

    def flips(self, ids: Inputs, x: Inputs, step: int) -> list[Inputs]:
        trials: list[Inputs] = []
        for i, (side, given) in enumerate(zip(x, ids, strict=True)):
            if side.grad is None:
                continue
            gain, word = self.best_words(side.grad, self.tables[i])
            gain = gain - (side.grad * side.detach()).sum(-1)
            places = gain.topk(min(FLIPS, self.length), dim=1).indices.split(1, dim=1)
            changed = [given.scatter(1, place, word.gather(1, place)) for place in places]
            if step % 4 == 3:
                # One token everywhere: what a single change cannot reach.
                changed.append(word.gather(1, places[0]).expand_as(given))
            trials += [(*ids[:i], each, *ids[i + 1 :]) for each in changed]
        return trials


def choose(better: Tensor, new: Inputs, old: Inputs) -> Inputs:
    pairs = zip(new, old, strict=True)
    return tuple(torch.where(better.view(-1, *[1] * (a.dim() - 1)), a.detach(), b) for a, b in pairs)


def widths_of(sublayer: FeedForward) -> dict[str, str]:
    """Return a feed-forward's sites, each with the name of a linear that has as many output channels as the site."""
    widths = {sublayer.linear: sublayer.linear}
    if sublayer.gate:
        widths |= {sublayer.gate: sublayer.gate, f"{sublayer.at}:mul": sublayer.linear}
    return widths | {sublayer.output: sublayer.output}


@contextmanager
def watched(model: nn.Module, layout: Layout) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that one forward pass fills with the values of sites that can overflow, by the audit's names.
    Rows of the batch are the first dimension of a value, channels the last."""
    watch = _Watch(model, layout)
    with watch.hooks as hooks:
        hooks.enter_context(torch.enable_grad())  # else the tap hands nothing over; few inputs make a graph
        # Stock code may add a bias to the scores in place.
        tap = Tap(model, lambda name, value: watch.note(name, value.clone()), only=watch.tapped.__contains__)
        hooks.enter_context(tap)
        yield watch.values


class _Watch:
    """Records the values of sites, under their names in the fp16 audit."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout, self.hooks = model, layout, ExitStack()
        self.values: dict[str, Tensor] = {}  # without empty tensors, which short sequences give
        self.twice: set[str] = set()  # sites of positions, then of their sums
        self.taken: dict[str, Tensor] = {}  # by an expert's site, a mask of the tokens that the expert gets
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
                self.after(sublayer.router, partial(self.prepare_experts, sublayer))
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

    def prepare_experts(self, sublayer: Experts, inputs: Any, output: Any) -> None:
        """Set the sites of every expert to zeros, [rows, positions, channels]. ``note`` then fills in the tokens that
        the expert gets, by the masks in ``taken``."""
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


def _ids_of(row: Inputs) -> tuple[list[int], list[int]]:
    encoder, *decoder = (side[0].tolist() for side in row)
    return encoder, decoder[0] if decoder else []


def attack(
    model: Any,
    layout: Layout,
    *,
    steps: int,
    seed: int = 0,
    length: int = LENGTH,
    sites: Sequence[str] | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> AttackEntry:
    """Search for inputs that bring sites near their limits, and return the largest |x| found at each site.

    model: a stock model in any dtype, whose weights should be fp16 values. Copies in fp32 and in fp16 are run; the
    model is not changed. steps: the number of gradient steps for each group of goals. sites: names of the sites to
    attack, by default all; a repeated name gets more rows. If the search cannot record a site, it attacks the scores of
    the site's attention. length: the number of positions in the encoder's and in the decoder's input. For one seed the
    search is deterministic, on every device."""
    half, wide = copy.deepcopy(model).half(), copy.deepcopy(model).float()
    for copied in (half, wide):
        set_attention(copied, "eager")
        copied.eval().requires_grad_(False)
    adversary = _Adversary(wide, layout, seed, min(length, longest_sequence(model.config)))
    known = list(adversary.survey(adversary.embed(adversary.draw(1))))
    goals = known
    if sites is not None:
        pairs = [(site, f"{site.partition(':')[0]}:scores") for site in sites]
        goals = [goal for pair in pairs for goal in [goal for goal in pair if goal in known][:1]] or known
    chosen = list(dict.fromkeys(goal for goal in goals if goal not in adversary.narrow))
    elites = _search(adversary, [*goals, *(goal for goal in adversary.narrow if goal not in goals)], steps, advance)
    groups = [chosen[i : i + GROUP] for i in range(0, len(chosen), GROUP)]
    tokens, mixed = ([elite.starts(group) for group in groups] for elite in elites)
    inputs = {name: _ids_of(elites[0].kept[name][0][1]) for name in chosen}
    # As many random inputs as the search has run forward passes.
    random = [adversary.draw(GROUP) for _ in range(min(steps * (2 + 2 * FLIPS) // 2, 64))]
    by_random, by_tokens, by_mixture = (adversary.measure(wide, x) for x in (random, tokens, mixed))
    in_half = adversary.measure(half, tokens + mixed)
    by = {"random": by_random, "tokens": by_tokens, "embeddings": by_mixture, "half": in_half}
    entries = []
    for name in (site for site in in_half if site in by_random or site in inputs):
        reached = {key: amax.get(name, 0.0) for key, amax in by.items()}
        worst, ids = max(reached.values()), inputs.get(name)
        bits = headroom_bits(worst, FP16_MAX)
        entries.append(AttackedSite(name=name, worst=worst, limit=FP16_MAX, headroom_bits=bits, ids=ids, **reached))
    return AttackEntry(
        steps=steps,
        seed=seed,
        worst_headroom_bits=min((site.headroom_bits for site in entries), default=math.inf),
        sites=sorted(entries, key=lambda site: site.headroom_bits),
    )


def _search(
    adversary: _Adversary, goals: Sequence[str], steps: int, advance: Callable[[int, int], None]
) -> tuple[_Elite, _Elite]:
    """Return the best inputs found for each goal: as token ids, and as mixtures of embedding rows."""
    tokens, mixtures = _Elite(), _Elite()
    groups = [goals[i : i + GROUP] for i in range(0, len(goals), GROUP)]
    numbers, changes = count(1), max(1, steps // TOKEN_SHARE)
    rounds = max(1, min(ROUNDS, changes))

    def done() -> None:
        advance(next(numbers), len(groups) * steps)

    def offer_ids(ids: Inputs) -> None:
        mixture = adversary.embed(ids)
        reached = adversary.survey(mixture)
        tokens.offer(ids, reached)
        mixtures.offer(mixture, reached)

    for _ in range(POOL):
        offer_ids(adversary.draw(GROUP))
    for turn in range(rounds):
        climb, change = (part * (turn + 1) // rounds - part * turn // rounds for part in (steps - changes, changes))
        with torch.enable_grad():
            for group in groups:
                mixed = adversary.in_hull(group, mixtures.starts(group), climb, done)
                mixtures.offer(mixed, adversary.survey(mixed))
                offer_ids(adversary.nearest(mixed))
                offer_ids(adversary.by_tokens(group, tokens.starts(group), change, done))
    return tokens, mixtures


def attacked(
    folder: Path,
    layout: Layout,
    steps: int,
    seed: int,
    device: Device,
    progress: Progress,
    *,
    sites: Sequence[str] | None = None,
) -> AttackEntry:
    with progress.step("Searching for the worst inputs") as advance:
        model = load(folder, torch.float16, half=True)
        return device.run(
            "attack",
            lambda place: attack(model.to(place), layout, steps=steps, seed=seed, sites=sites, advance=advance),
        )
