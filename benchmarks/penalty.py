"""What the penalty and held bounds cost: a step of a T5 v1.1 (forward and backward) plain, under the penalty, and held.

One process, all variants interleaved; each figure is the least time of the rounds (processor time on a CPU) over the
least plain step. "all over" has every site past its target at once, the worst case. Under "bounds" the holding is added
to "all inside". "held": none is over its lid, and all are measured (every eighth step) or those near it. "pulled": the
scores of a tenth of the attentions come down by an eighth of a bit. Run:

    python benchmarks/penalty.py --threads 1
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from results import print_header, print_row
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from bf16_to_fp16 import ActivationPenalty
from bf16_to_fp16.families.resolve import ModelTensors, resolve
from bf16_to_fp16.finetuning.bound_constraint import BoundConstraint
from bf16_to_fp16.measuring.stock import set_attention

SIZES = {
    "small": {"num_layers": 6, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 8, "vocab_size": 8192},
    "flan-t5-base": {"num_layers": 12, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_heads": 12, "vocab_size": 32128},
}
INSIDE, OVER = 32752.0, 1e-3  # targets: the largest values of a random model are below 1000 and above the other


def model_of(size: str) -> T5ForConditionalGeneration:
    """Return a T5 v1.1 with random weights, in train mode; of each tenth attention the queries are 8 times as large."""
    torch.manual_seed(0)
    kind = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(**SIZES[size], **kind)).train()
    with torch.no_grad():
        for attention in [module for module in model.modules() if isinstance(module, T5Attention)][::10]:
            attention.q.weight.mul_(8)
    set_attention(model, "eager")
    return model


def measured(model: T5ForConditionalGeneration, ids: Tensor, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Return a step's least seconds in each state."""
    clock = time.perf_counter if ids.is_cuda else time.process_time

    def step(extra: Callable[[], Tensor | float]) -> float:
        start = clock()
        with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, labels=ids).loss
        loss = loss + extra()
        loss.backward()
        if ids.is_cuda:
            torch.cuda.synchronize()
        took = clock() - start
        model.zero_grad()
        return took

    with ActivationPenalty(model, weight=0.0) as seen:
        step(seen)
    sites = set(seen.observations())
    some = {site: OVER if i % 10 == 0 else INSIDE for i, site in enumerate(sorted(sites))}
    states: dict[str, Any] = {
        "plain": nullcontext(lambda: 0.0),
        "all inside": ActivationPenalty(model, weight=1.0),
        "a tenth over": ActivationPenalty(model, targets=some, weight=1e-3),
        "all over": ActivationPenalty(model, targets=dict.fromkeys(sites, OVER), weight=1e-3),
    }
    layout = resolve(ModelTensors(model))
    held, pulled = BoundConstraint(layout, model), BoundConstraint(layout, model)
    held.begin(0)
    pulled.first = 0
    pulled.target *= 2.0 ** max(float(bits.max()) for bits in held.excess().values())

    def pull() -> None:
        pulled.target *= 2.0**-0.125
        pulled.hold(1, 1)

    holds: dict[str, Callable[[], None]] = {
        "bounds held, all measured": lambda: held.hold(1, 1),
        "bounds held, near ones measured": lambda: held.hold(1, 9),
        "bounds pulled": pull,
    }
    times: dict[str, list[float]] = {name: [] for name in (*states, *holds)}
    for _ in range(rounds + 1):
        for name, state in states.items():
            with state as extra:
                times[name].append(step(extra))
        for name, hold in holds.items():
            start = clock()
            hold()
            times[name].append(clock() - start)
    least = {name: min(taken[1:]) for name, taken in times.items()}
    return least | {name: least["all inside"] + least[name] for name in holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print_header("size", "dtype", "state", "ms", "times plain")
    for size, tokens in zip(SIZES, (64, 128), strict=True):
        model = model_of(size).to(args.device)
        ids = torch.randint(1, model.config.vocab_size, (8, tokens)).to(args.device)
        for dtype in (torch.float32, torch.bfloat16 if args.device == "cpu" else torch.float16):
            found = measured(model, ids, dtype, args.rounds)
            for name, took in found.items():
                shown = str(dtype).removeprefix("torch.")
                print_row(size, shown, name, f"{1e3 * took:.1f}", f"{took / found['plain']:.3f}")


if __name__ == "__main__":
    main()
