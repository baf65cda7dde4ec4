"""What looking costs: a T5 forward plain, under ``SiteObserver``, and under transformers' DebugUnderflowOverflow.

One process, the three interleaved so that a busy machine slows all alike; each figure is the least of the
rounds over the least plain forward. "Seen" is the share of the floating-point op outputs of that forward (views
left out) that the tool looks at. Run:

    python benchmarks/audit.py --threads 2
"""

import argparse
import contextlib
import gc
import io
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import T5Config, T5ForConditionalGeneration
from transformers.debug_utils import DebugUnderflowOverflow

from bf16_to_fp16.observe.observer import SiteObserver

VOCABULARY = 32128


def small_t5() -> T5ForConditionalGeneration:
    """T5 v1.1 small's widths with 6+6 layers, random weights."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=512,
        d_kv=64,
        d_ff=1024,
        num_layers=6,
        num_heads=8,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config).eval()


class NothingMode(TorchDispatchMode):
    """The floor: a dispatch mode that only passes on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def seconds(action: Callable[[], object]) -> float:
    """Return how long ``action`` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def debug_seen(model: nn.Module, forward: Callable[[], object]) -> int:
    """How many distinct floating op outputs pass a module boundary, which is what DebugUnderflowOverflow tests."""
    seen: dict[tuple[int, int], Tensor] = {}

    def keep(value: object) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            seen[value.data_ptr(), value.numel()] = value  # held, so that no address returns
        elif isinstance(value, (tuple, list)):
            for item in value:
                keep(item)

    def hook(module: nn.Module, args: object, output: object) -> None:
        keep(args)
        keep(output)

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    forward()
    for handle in handles:
        handle.remove()
    return len(seen)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    model = small_t5()
    ids = torch.randint(1, VOCABULARY, (options.rows, options.length))
    mask = torch.ones_like(ids)
    mask[0, options.length // 2 :] = 0

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids, use_cache=False)

    print(
        f"T5 6+6, d_model 512, {options.rows} x {options.length} tokens on each side,"
        f" {options.threads} threads, torch {torch.__version__}"
    )
    print(f"{'dtype':9}{'attention':11}{'tool':32}{'times plain':>12}{'outputs seen':>16}")
    for dtype in (torch.float32, torch.float16):
        model = model.to(dtype)
        for attention in ("eager", "sdpa"):
            model.set_attn_implementation(attention)
            report(model, forward, dtype, attention, options.rounds)


def report(
    model: T5ForConditionalGeneration,
    forward: Callable[[], None],
    dtype: torch.dtype,
    attention: str,
    rounds: int,
) -> None:
    """Print the rows of one dtype and attention."""
    native = SiteObserver(model, fast_products=False)
    observers = {"SiteObserver": native}  # in fp32, faster products would hide what looking costs
    if dtype == torch.float16:
        observers = {"SiteObserver": SiteObserver(model), "SiteObserver, native fp16": native}
    best: dict[str, float] = {}

    def note(name: str, action: Callable[[], object]) -> None:
        best[name] = min(best.get(name, float("inf")), seconds(action))

    forward()
    for observer in observers.values():
        with observer:
            forward()
    total = next(iter(observers.values())).outputs
    for _ in range(rounds):
        gc.collect()
        note("plain", forward)
        with NothingMode():
            note("a mode that does nothing", forward)
        for name, observer in observers.items():
            with observer:
                note(name, forward)
        DebugUnderflowOverflow(model)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                note("DebugUnderflowOverflow", forward)
        except NotImplementedError:  # it takes the abs of SDPA's boolean masks
            best["DebugUnderflowOverflow"] = float("nan")
        for module in model.modules():  # it has no way out of its own
            module._forward_hooks.clear()
    seen = debug_seen(model, forward)
    for name, least in best.items():
        share = {"plain": 0, "a mode that does nothing": 0, "DebugUnderflowOverflow": seen}.get(name, total)
        print(
            f"{str(dtype).removeprefix('torch.'):9}{attention:11}{name:32}"
            f"{least / best['plain']:12.2f}{share:8} / {total}"
        )


if __name__ == "__main__":
    main()
