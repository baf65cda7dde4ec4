"""Is the certificate sound? Looks for values beyond their bounds in random models of every family.

    python benchmarks/certify_soundness.py 500

The models' norms read inputs found by gradient ascent on the signals behind them, in fp64, fp32, fp16, fp16 with split
sums, training, and partial sums; and whole models run on random ids. Exits with 1 where a bound is passed.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
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
from ascent import aims, ascend, capturing, certified, forward, watch
from models import random_model
from support.adversary import free_norms
from support.contract import FREE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.findings import Certificate
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.families.types import Attention
from bf16_to_fp16.families.walk import walk
from bf16_to_fp16.numerics import FP16_MAX
from bf16_to_fp16.rescaling.weights import ModelTensors


class SplitSums(TorchDispatchMode):
    """Computes every fp16 matrix product as up to ``splits`` partial sums over random parts of the terms, each rounded
    to fp16 and added in fp16, as kernels that split a reduction do."""

    def __init__(self, splits: int, seed: int) -> None:
        super().__init__()
        self.splits, self.generator = splits, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in ("mm", "bmm", "addmm") or args[0].dtype != torch.float16:
            return func(*args, **(kwargs or {}))
        left, right = (a.float() for a in args[-2:])
        terms = left.shape[-1]
        part = torch.randint(self.splits, (terms,), generator=self.generator)
        total = torch.zeros(())
        for k in range(self.splits):
            kept = (part == k).nonzero().flatten()
            total = total.half() + (left[..., kept] @ right[..., kept, :]).half() if len(kept) else total
        return total + args[0] if name == "addmm" else total.half().expand(*left.shape[:-1], right.shape[-1])


def prefix(name: str) -> str:
    """Return the sublayer or layer of a site."""
    parts = name.partition(":")[0].split(".")
    for word, length in (("block", 5), ("layers", 4)):
        if word in parts:
            return ".".join(parts[:length])
    return name


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
        """Compare what was seen with the bounds; ``kinds`` are left out."""
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
            key = (way, site.kind)
            if math.isfinite(limit):
                self.largest[key] = max(self.largest[key], share)
            if not amax <= limit * (1 + slack):
                self.violations.append(f"{label} {way} {site.kind} {site.name}: {amax!r} > {limit!r} ({share:.6f})")


def subset_sums(model: Any, layout: Layout, inputs: Mapping[str, Tensor], run: Callable[[], None]) -> dict[str, float]:
    """Return, for every linear and every attention's scores, the largest sum of some of its products, in fp64: all
    positive or all negative ones, rounded to fp16."""
    found: dict[str, float] = {}

    def sums(left: Tensor, right: Tensor) -> float:
        up = left.clamp(min=0) @ right.clamp(min=0) + left.clamp(max=0) @ right.clamp(max=0)
        down = left.clamp(min=0) @ right.clamp(max=0) + left.clamp(max=0) @ right.clamp(min=0)
        return max(float(up.max().half()), float(-down.min().half()))

    model.set_attn_implementation("eager")
    with torch.no_grad(), free_norms(model, inputs), capturing(model, layout) as seen:
        run()
    for path, (x, _) in seen.items():
        if bool(x.isfinite().all()):
            found[path] = sums(x.double().flatten(0, 1), model.get_submodule(path).weight.double().t())
    for w in layout.topology:
        if isinstance(w, Attention):
            heads = layout.heads(w)
            q, k = (seen[p][1].double().unflatten(-1, (heads, -1)).transpose(1, 2) for p in (w.query, w.key))
            if bool(q.isfinite().all() and k.isfinite().all()):
                found[f"{w.at}:scores"] = sums(q, k.transpose(2, 3))
    return found


def nearly_constant(inputs: dict[str, Tensor], certificate: Certificate, r: random.Random) -> dict[str, Tensor]:
    """Return inputs of LayerNorms with a mean as large as the stream allows beside a small deviation."""
    changed = {}
    for path, x in inputs.items():
        stream = certificate.ranges[path].input.amax.double()
        least = min(float(stream.min()), FP16_MAX / 2)
        spread = least * 2.0 ** -r.randint(2, 14)
        changed[path] = torch.nn.functional.normalize(x, dim=-1) * spread + (least - spread) * r.choice([-1, 1])
    return changed


def one_case(seed: int, tally: Tally, steps: int) -> str:
    """Look for a violation in one random model; return its label."""
    r = random.Random(seed * 7919 + 1)
    kind, wide = random_model(seed)
    label = f"seed {seed} {kind}"
    lengths = r.choice([(9, 7)] * 6 + [(1, 1), (1, 5), (80, 50), (400, 2)])
    places = getattr(wide.config, "max_position_embeddings", max(lengths))
    lengths = (min(lengths[0], places), min(lengths[1], places))
    batch = 12 if max(lengths) < 50 else 3
    longest = max(lengths)
    half, double = copy.deepcopy(wide).half(), copy.deepcopy(wide).double()
    layout = resolve(ModelTensors(half))
    default = certified(half, Arithmetic(longest))
    strict = certified(half, Arithmetic(longest, splits=0))
    double.set_attn_implementation("eager")
    double.requires_grad_(False)
    targets = aims(layout, default, batch, lengths, r, 0.5)
    inputs = ascend(double, layout, targets, lengths, seed, steps)
    noise = torch.Generator().manual_seed(seed)
    # Copies that round differently.
    inputs = {
        p: torch.cat([x, x * (1 + 2.0**-9 * torch.randn(x.shape, generator=noise, dtype=x.dtype))])
        for p, x in inputs.items()
    }

    def free(model: Any, chosen: Mapping[str, Tensor]) -> Callable[[], None]:
        def run() -> None:
            with free_norms(model, chosen):
                forward(model, layout, 2 * batch, lengths)

        return run

    exact = certified(half, Arithmetic(longest, exact=True))
    seen = watch(double, free(double, inputs), "eager")
    tally.compare("exact", label, exact, seen, (*FREE, "normalised"), slack=1e-5)
    seen = watch(wide, free(wide, inputs), r.choice(["eager", "sdpa"]))
    tally.compare("fp32", label, strict, seen, (*FREE, "normalised"))
    choices = [("fp16", "eager", True, 0), ("fp16 SDPA", "sdpa", True, 0), ("fp16 split", "eager", False, seed + 1)]
    if seed % 3 == 0:
        choices[0] = ("fp16 native", "eager", False, 0)
    for way, attention, fast, split in choices:
        chosen = inputs
        if layout.family.centred_norm and r.random() < 0.4:
            chosen = nearly_constant(inputs, strict, r)
        seen = watch(half, free(half, chosen), attention, fast=fast, under=SplitSums(8, split) if split else None)
        tally.compare(way, label, default if split else strict, seen, FREE)
    seen = subset_sums(half, layout, inputs, free(half, inputs))
    tally.compare("partial sums", label, strict, seen, FREE, partial=True)
    trained = certified(half, Arithmetic(longest, train=True, splits=0))
    half.train()
    torch.manual_seed(seed)
    seen = watch(half, free(half, inputs), "eager")
    half.eval()
    tally.compare("training", label, trained, seen, FREE)
    whole(seed, tally, label, half, layout, strict, trained, lengths)
    return label


def whole(
    seed: int,
    tally: Tally,
    label: str,
    half: Any,
    layout: Layout,
    strict: Certificate,
    trained: Certificate,
    lengths: tuple[int, int],
) -> None:
    """Run a model on random ids, and compare every site, the stream's too, and the squares of what enters a norm."""
    if not strict.holds:
        return
    squares: dict[str, float] = {}

    def look(path: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            x = args[0].detach()
            total = torch.zeros(x.shape[:-1], dtype=x.dtype)
            for channel in (x * x).unbind(-1):
                total = total + channel
            name = f"{path} (sum of squares)"
            squares[name] = max(squares.get(name, 0.0), float(total.max()))

        return hook

    generator = torch.Generator().manual_seed(seed)

    def run() -> None:
        for _ in range(2):
            ids = torch.randint(half.config.vocab_size, (6, lengths[0]), generator=generator)
            ids[0] = ids[0, 0]
            # Rows padded to different lengths.
            mask = (torch.arange(lengths[0]) < torch.randint(1, lengths[0] + 1, (6, 1), generator=generator)).long()
            if not layout.stock.decodes:
                half(input_ids=ids, attention_mask=mask)
            else:
                decoder = torch.randint(half.config.vocab_size, (6, lengths[1]), generator=generator)
                half(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder, use_cache=False)

    for attention in ("eager", "sdpa"):
        tally.compare("whole model", label, strict, watch(half, run, attention))
    safe = certified(half, Arithmetic(max(lengths), splits=0), "norm-safe")
    if max(s.bound for s in safe.sites if s.kind == "squares") <= FP16_MAX:
        with ExitStack() as stack, torch.no_grad():
            for reader in walk(layout):
                norm = half.get_submodule(reader.norm)
                stack.callback(norm.register_forward_pre_hook(look(reader.norm)).remove)
            run()
        tally.compare("whole model", label, safe, squares)
    if trained.holds:
        half.train()
        torch.manual_seed(seed)
        tally.compare("training", label, trained, watch(half, run, "eager"))
        half.eval()


def soundness(cases: int, first: int, steps: int) -> bool:
    """Look for violations in ``cases`` random models; return whether there is none."""
    torch.set_num_threads(1)
    tally, begin = Tally(), time.monotonic()
    for seed in range(first, first + cases):
        known = len(tally.violations)
        try:
            one_case(seed, tally, steps)
        except Exception as error:
            raise RuntimeError(f"seed {seed}") from error
        for line in tally.violations[known : known + 3]:
            print(f"VIOLATION {line}", file=sys.stderr, flush=True)
    ways = list(tally.values)
    kinds = sorted({kind for _, kind in tally.largest})
    print(
        f"{cases} models, {sum(tally.values.values())} sites compared, {len(tally.violations)} violations,"
        f" {time.monotonic() - begin:.0f} s, load {os.getloadavg()[0]:.1f}; largest share of its bound:\n"
    )
    print(f"| kind | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}")
    for kind in kinds:
        cells = [f"{tally.largest[w, kind]:.4f}" if (w, kind) in tally.largest else "" for w in ways]
        print(f"| {kind} | {' | '.join(cells)} |")
    print(f"| sites | {' | '.join(str(tally.values[w]) for w in ways)} |\n")
    return not tally.violations


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", type=int, help="random models to attack")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--steps", type=int, default=25, help="steps of the ascent")
    options = parser.parse_args()
    if not soundness(options.models, options.first, options.steps):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
