"""What the penalty costs: a training step of a T5 v1.1 (forward and backward) plain, and under the penalty.

One process, all variants interleaved so that a busy machine slows all alike; each figure is the least time of the
rounds over the least plain step. "naive" is what a few lines of hooks would do: relu(|x| − target)² summed over every
element of every site, always in the graph. "over" has every site past its target at once, the worst case. Run:

    python benchmarks/penalty.py --threads 1
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from results import print_header, print_row
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from bf16_to_fp16 import ActivationPenalty
from bf16_to_fp16.measuring.stock import set_attention
from bf16_to_fp16.measuring.tap import Tap

SIZES = {
    "tiny": {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_heads": 8, "vocab_size": 4096},
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 8, "vocab_size": 8192},
}
INSIDE, OVER = 32752.0, 1e-3  # targets: the largest values of a random model are below 1000 and above the other


@contextmanager
def naive(model: nn.Module, target: float, sites: set[str]) -> Iterator[Callable[[], Tensor]]:
    """Give the total of relu(|x| − target)² over every site of the last forward."""
    terms: list[Tensor] = []

    def add(name: str, x: Tensor) -> None:
        terms.append((x.float().abs() - target).relu().square().sum())

    with Tap(model, add, only=sites.__contains__):
        yield lambda: torch.stack(terms).sum() * 1e-6


def model_of(size: str) -> T5ForConditionalGeneration:
    """Return a T5 v1.1 with 6+6 layers and random weights, in train mode."""
    layers = {"num_layers": 6, "num_decoder_layers": 6, "feed_forward_proj": "gated-gelu"}
    torch.manual_seed(0)
    config = T5Config(**layers, **SIZES[size], tie_word_embeddings=False, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).train()
    set_attention(model, "eager")
    return model


def measured(
    model: T5ForConditionalGeneration, ids: Tensor, dtype: torch.dtype, rounds: int
) -> tuple[int, dict[str, tuple[int, float]]]:
    """Return the number of sites, and of each state how many were over their target and a step's least seconds."""

    def step(extra: Callable[[], Tensor | float]) -> float:
        start = time.perf_counter()
        with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, labels=ids).loss
        loss = loss + extra()
        loss.backward()
        if ids.is_cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        model.zero_grad()
        return took

    with ActivationPenalty(model, weight=0.0) as seen:
        step(seen)
    sites = set(seen.observations())
    some = {site: OVER if i % 10 == 0 else INSIDE for i, site in enumerate(sorted(sites))}
    penalties: dict[str, ActivationPenalty] = {
        "all inside": ActivationPenalty(model, weight=1.0),
        "a tenth over": ActivationPenalty(model, targets=some, weight=1e-3),
        "all over": ActivationPenalty(model, targets=dict.fromkeys(sites, OVER), weight=1e-3),
    }
    states: dict[str, Callable[[], Any]] = {
        "plain": lambda: nullcontext(lambda: 0.0),
        **{name: lambda penalty=penalty: penalty for name, penalty in penalties.items()},
        "naive, all inside": lambda: naive(model, INSIDE, sites),
        "naive, all over": lambda: naive(model, OVER, sites),
    }
    times: dict[str, list[float]] = {name: [] for name in states}
    for _ in range(rounds + 1):
        for name, make in states.items():
            with make() as extra:
                times[name].append(step(extra))
    over = {name: sum(o.excess_bits > 0 for o in each.observations().values()) for name, each in penalties.items()}
    return len(sites), {name: (over.get(name, 0), min(taken[1:])) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print_header("size", "dtype", "state", "sites", "over", "ms", "times plain")
    for size in SIZES:
        model = model_of(size).to(args.device)
        ids = torch.randint(1, model.config.vocab_size, (8, 64)).to(args.device)
        for dtype in (torch.float32, torch.bfloat16 if args.device == "cpu" else torch.float16):
            sites, found = measured(model, ids, dtype, args.rounds)
            plain = found["plain"][1]
            for name, (over, took) in found.items():
                shown = str(dtype).removeprefix("torch.")
                print_row(size, shown, name, sites, over, f"{1e3 * took:.1f}", f"{took / plain:.3f}")


if __name__ == "__main__":
    main()
