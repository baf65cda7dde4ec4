"""Is the certificate sound? Looks for values beyond their bounds in random models of every family.

    python benchmarks/certify_soundness.py 500

The models' norms read inputs found by gradient ascent on the signals behind them, in fp64, fp32, fp16, training,
and partial sums; and whole models run on random ids. Exits with 1 where a bound is passed.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from ascent import attacked, capturing, certified, reading, watch
from models import random_model
from results import print_header, print_row
from support.contract import FREE, layout_of
from torch import Tensor

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.families.layout import Layout, walk
from bf16_to_fp16.families.wiring import Attention
from bf16_to_fp16.numerics import FP16_MAX


def prefix(name: str) -> str:
    found = re.match(r"\w+\.block\.\d+\.layer\.\d+|\w+\.\w+\.layers\.\d+", name)
    return found[0] if found else name


@dataclass
class Tally:
    """What was compared: values per way of computing, the largest share of a bound per kind, and violations."""

    values: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    largest: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    violations: list[str] = field(default_factory=list)

    def compare(
        self,
        way: str,
        label: str,
        certificate: Certificate,
        seen: Mapping[str, float],
        kinds: tuple[str, ...] = (),
        slack: float = 0.0,
        partial: bool = False,
    ) -> None:
        spoiled = {prefix(s.name) for s in certificate.sites if not s.largest <= FP16_MAX}
        everywhere = any(s.kind == "norm" and not s.largest <= FP16_MAX for s in certificate.sites)
        for site in certificate.sites:
            if site.kind in kinds or site.name not in seen:
                continue
            amax = seen[site.name]
            # An overflow proves nothing behind a bound that lies beyond fp16 as well.
            if amax == math.inf and (everywhere or prefix(site.name) in spoiled):
                continue
            limit = site.partial if partial else site.bound
            self.values[way] += 1
            share = amax / limit if limit > 0 else (math.inf if amax > 0 else 0.0)
            if math.isfinite(limit):
                self.largest[way, site.kind] = max(self.largest[way, site.kind], share)
            if not amax <= limit * (1 + slack):
                self.violations.append(f"{label} {way} {site.kind} {site.name}: {amax!r} > {limit!r} ({share:.6f})")


@torch.no_grad()
def subset_sums(model: Any, layout: Layout, run: Callable[[], None]) -> dict[str, float]:
    """Return, for every linear and every attention's scores, the largest sum of some of its products, in fp64: all
    positive or all negative ones, rounded to fp16."""
    found: dict[str, float] = {}

    def add(site: str, left: Tensor, right: Tensor) -> None:
        if bool(left.isfinite().all() and right.isfinite().all()):
            up = left.clamp(min=0) @ right.clamp(min=0) + left.clamp(max=0) @ right.clamp(max=0)
            down = left.clamp(min=0) @ right.clamp(max=0) + left.clamp(max=0) @ right.clamp(min=0)
            found[site] = max(float(up.max().half()), float(-down.min().half()))

    model.set_attn_implementation("eager")
    with capturing(model, layout) as seen:
        run()
    for path, (x, _) in seen.items():
        add(path, x.double().flatten(0, 1), model.get_submodule(path).weight.double().t())
    for w in layout.topology:
        if isinstance(w, Attention):
            heads = layout.heads(w)
            q, k = (seen[p][1].double().unflatten(-1, (heads, -1)).transpose(1, 2) for p in (w.query, w.key))
            add(f"{w.at}:scores", q, k.transpose(2, 3))
    return found


def nearly_constant(inputs: dict[str, Tensor], certificate: Certificate, r: random.Random) -> dict[str, Tensor]:
    """Return inputs of LayerNorms with a mean as large as the stream allows beside a small deviation."""
    changed = {}
    for path, x in inputs.items():
        least = min(float(certificate.ranges[path].input.amax.min()), FP16_MAX / 2)
        spread = least * 2.0 ** -r.randint(2, 14)
        changed[path] = torch.nn.functional.normalize(x, dim=-1) * spread + (least - spread) * r.choice([-1, 1])
    return changed


def one_case(seed: int, tally: Tally) -> None:
    r = random.Random(seed * 7919 + 1)
    kind, wide = random_model(seed)
    label = f"seed {seed} {kind}"
    lengths = r.choice([(9, 7)] * 6 + [(1, 1), (1, 5), (80, 50), (400, 2)])
    places = getattr(wide.config, "max_position_embeddings", max(lengths))
    lengths = (min(lengths[0], places), min(lengths[1], places))
    longest = max(lengths)
    half = copy.deepcopy(wide).half()
    layout = layout_of(half)
    ways = Arithmetic(longest, splits=0), Arithmetic(longest, exact=True), Arithmetic(longest, splits=0, train=True)
    strict, exact, trained = (certified(half, arithmetic) for arithmetic in ways)
    double, inputs = attacked(wide, half, 12 if longest < 50 else 3, lengths, r, seed)
    noise = torch.Generator().manual_seed(seed)
    # Copies that round differently.
    for path, x in inputs.items():
        inputs[path] = torch.cat([x, x * (1 + 2.0**-9 * torch.randn(x.shape, generator=noise, dtype=x.dtype))])

    def free(model: Any, chosen: Mapping[str, Tensor] = inputs) -> Callable[[], None]:
        return reading(model, layout, chosen, lengths)

    normalised = (*FREE, "normalised")
    tally.compare("exact", label, exact, watch(double, free(double), "eager"), normalised, slack=1e-5)
    tally.compare("fp32", label, strict, watch(wide, free(wide), r.choice(["eager", "sdpa"])), normalised)
    native = ("fp16 native", "eager", False)
    for way, attention, fast in (("fp16", "eager", True) if seed % 3 else native, ("fp16 SDPA", "sdpa", True)):
        chosen = inputs
        if layout.family.centred_norm and r.random() < 0.4:
            chosen = nearly_constant(inputs, strict, r)
        tally.compare(way, label, strict, watch(half, free(half, chosen), attention, fast), FREE)
    tally.compare("partial sums", label, strict, subset_sums(half, layout, free(half)), FREE, partial=True)
    tally.compare("training", label, trained, in_training(half, free(half), seed), FREE)
    if strict.holds:
        run = on_random_ids(half, layout, lengths, seed)
        for attention in ("eager", "sdpa"):
            tally.compare("whole model", label, strict, watch(half, run, attention))
        safe = certified(half, Arithmetic(longest, splits=0), "norm-safe")
        if max(s.bound for s in safe.sites if s.kind == "squares") <= FP16_MAX:
            tally.compare("whole model", label, safe, squares(half, layout, run))
        if trained.holds:
            tally.compare("training", label, trained, in_training(half, run, seed))


def in_training(model: Any, run: Callable[[], None], seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    seen = watch(model.train(), run, "eager")
    model.eval()
    return seen


def on_random_ids(model: Any, layout: Layout, lengths: tuple[int, int], seed: int) -> Callable[[], None]:
    """Return a run of a whole model on rows of random ids, padded to different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def run() -> None:
        for _ in range(2):
            ids = torch.randint(model.config.vocab_size, (6, lengths[0]), generator=generator)
            ids[0] = ids[0, 0]
            mask = (torch.arange(lengths[0]) < torch.randint(1, lengths[0] + 1, (6, 1), generator=generator)).long()
            more: dict[str, Any] = {}
            if layout.stock.decodes:
                decoder = torch.randint(model.config.vocab_size, (6, lengths[1]), generator=generator)
                more = {"decoder_input_ids": decoder, "use_cache": False}
            model(input_ids=ids, attention_mask=mask, **more)

    return run


@torch.no_grad()
def squares(model: Any, layout: Layout, run: Callable[[], None]) -> dict[str, float]:
    """Return the largest sum of squares, made in the model's dtype, of what enters each norm."""
    found: dict[str, float] = {}

    def look(path: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            total = sum((args[0] * args[0]).unbind(-1))  # one channel after the other
            name = f"{path} (sum of squares)"
            found[name] = max(found.get(name, 0.0), float(total.max()))

        return hook

    with ExitStack() as stack:
        for reader in walk(layout):
            norm = model.get_submodule(reader.norm)
            stack.callback(norm.register_forward_pre_hook(look(reader.norm)).remove)
        run()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", type=int, help="random models to attack")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally, begin = Tally(), time.monotonic()
    for seed in range(options.first, options.first + options.models):
        known = len(tally.violations)
        try:
            one_case(seed, tally)
        except Exception as error:
            raise RuntimeError(f"seed {seed}") from error
        for line in tally.violations[known : known + 3]:
            print(f"VIOLATION {line}", file=sys.stderr, flush=True)
    ways = list(tally.values)
    print(
        f"{options.models} models, {sum(tally.values.values())} sites compared, {len(tally.violations)} violations,"
        f" {time.monotonic() - begin:.0f} s, load {os.getloadavg()[0]:.1f}; largest share of its bound:\n"
    )
    print_header("kind", *ways)
    for kind in sorted({kind for _, kind in tally.largest}):
        print_row(kind, *(f"{tally.largest[w, kind]:.4f}" if (w, kind) in tally.largest else "" for w in ways))
    print_row("sites", *tally.values.values())
    raise SystemExit(1 if tally.violations else 0)


if __name__ == "__main__":
    main()
