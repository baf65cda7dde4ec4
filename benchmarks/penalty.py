"""What the penalty costs: a training step of a T5 v1.1 (forward and backward) plain, and under the penalty.

One process, all variants interleaved so that a busy machine slows all alike; each figure is the least time of the
rounds over the least plain step. "naive" is what a few lines of hooks would do: relu(|x| − target)² summed over every
element of every site, always in the graph. "over" has every site past its target at once, the worst case. Run:

    python benchmarks/penalty.py --threads 1
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from penalty_forms import MeanSquare
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from bf16_to_fp16 import ActivationPenalty
from bf16_to_fp16.observe.tap import Tap
from bf16_to_fp16.run.stock import set_attention

SIZES = {
    "tiny": {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_heads": 8, "vocab_size": 4096},
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 8, "vocab_size": 8192},
}
State = tuple[AbstractContextManager[object], Callable[[], Tensor | float]]


def model_of(size: str) -> T5ForConditionalGeneration:
    """A T5 v1.1 with 6+6 layers and random weights, in train mode."""
    config = T5Config(
        num_layers=6,
        num_decoder_layers=6,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        **SIZES[size],
    )
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).train()
    set_attention(model, "eager")
    return model


@dataclass(frozen=True)
class Measured:
    """One row: sites seen and over their target, the least milliseconds of a step, and that over the plain step's."""

    name: str
    sites: int
    over: int
    milliseconds: float
    times: float


def naive(model: T5ForConditionalGeneration, target: float, sites: set[str]) -> State:
    """The step under relu(|x| − target)² of every site."""
    terms: list[Tensor] = []

    def total() -> Tensor:
        found = torch.stack(terms).sum()
        terms.clear()
        return found * 1e-6

    @contextmanager
    def tapped() -> Iterator[None]:
        with Tap(
            model,
            lambda name, x: terms.append((x.float().abs() - target).relu().square().sum()),
            only=sites.__contains__,
        ):
            yield

    return tapped(), total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'size':6} {'dtype':9} {'state':24} {'sites':>5} {'over':>5} {'ms':>8} {'times plain':>11}")
    for size in args.sizes:
        model = model_of(size).to(args.device)
        ids = torch.randint(1, model.config.vocab_size, (args.rows, args.length)).to(args.device)
        for dtype in (torch.float32, torch.bfloat16 if args.device == "cpu" else torch.float16):
            for row in measured(model, ids, dtype, args.rounds):
                print(
                    f"{size:6} {str(dtype).removeprefix('torch.'):9} {row.name:24} {row.sites:5} {row.over:5}"
                    f" {row.milliseconds:8.1f} {row.times:11.3f}",
                    flush=True,
                )


def measured(
    model: T5ForConditionalGeneration,
    ids: Tensor,
    dtype: torch.dtype,
    rounds: int,
) -> list[Measured]:
    """Measure the steps of one model, on the ids' device, where the model is."""

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

    with ActivationPenalty(model, form="none") as seen:
        step(seen)
    sites = set(seen.observations())
    # Largest values of a random model are below 1000 and above this.
    everywhere = dict.fromkeys(sites, 1e-3)
    some = {site: 1e-3 if i % 10 == 0 else 32752.0 for i, site in enumerate(sorted(sites))}
    penalties: dict[str, ActivationPenalty] = {
        "all inside": ActivationPenalty(model, weight=1.0),
        "a tenth over": ActivationPenalty(model, targets=some, weight=1e-3),
        "all over": ActivationPenalty(model, targets=everywhere, weight=1e-3),
        "mean-square": MeanSquare(model, weight=1e-3),
    }
    states: dict[str, Callable[[], State]] = {
        "plain": lambda: (nullcontext(), lambda: 0.0),
        **{name: lambda penalty=penalty: (penalty, penalty) for name, penalty in penalties.items()},
        "naive, all inside": lambda: naive(model, 32752.0, sites),
        "naive, all over": lambda: naive(model, 1e-3, sites),
    }
    times: dict[str, list[float]] = {name: [] for name in states}
    over: dict[str, int] = {}
    for _ in range(rounds + 1):
        for name, make in states.items():
            context, extra = make()
            with context:
                times[name].append(step(extra))
            if isinstance(context, ActivationPenalty):
                over[name] = sum(o.excess_bits > 0 for o in context.observations().values())
    plain = min(times["plain"][1:])
    least = {name: min(taken[1:]) for name, taken in times.items()}
    return [Measured(n, len(sites), over.get(n, 0), 1e3 * took, took / plain) for n, took in least.items()]


if __name__ == "__main__":
    main()
