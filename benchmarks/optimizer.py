"""What a step of ``bf16_to_fp16.AdamW`` costs beside torch's fused AdamW and torchao's stochastic rounding.

T5-small's parameter shapes (60.5 million elements) with random weights and gradients. Every
optimizer is timed in turn with a fused bf16 step of torch.optim.AdamW, round by round, so that a busy machine slows
both; each figure is the least time of the rounds over the least time of that fused step. On a CPU the time is the
process's own, summed over its threads. Memory is the highest resident size during a step over the size before it (Linux
only), the states being there already. Run:

    python benchmarks/optimizer.py --threads 1
"""

import argparse
import ctypes
import gc
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
from results import print_header, print_row
from torch import nn
from torch.optim import Optimizer
from transformers import T5Config, T5ForConditionalGeneration

from bf16_to_fp16.optim.adamw import AdamW

BF16 = torch.bfloat16
Make = Callable[[list[nn.Parameter]], Optimizer]


def shapes() -> list[torch.Size]:
    """Return the shapes of T5-small's parameters."""
    with torch.device("meta"):
        return [p.shape for p in T5ForConditionalGeneration(T5Config()).parameters()]


def candidates() -> dict[str, tuple[torch.dtype, Make]]:
    """Return the dtype of the parameters and the constructor for every row of the table."""
    rows: dict[str, tuple[torch.dtype, Make]] = {
        "torch fused, bf16, again": (BF16, partial(torch.optim.AdamW, fused=True)),
        "torch fused, fp32": (torch.float32, partial(torch.optim.AdamW, fused=True)),
    }
    kinds = product((("bf16", BF16), ("fp16", torch.float16)), ("float32", "bfloat16"), ("compiled", "eager"))
    for (label, dtype), moments, path in kinds:
        make = partial(AdamW, moments=moments, compile=path == "compiled")
        rows[f"AdamW, {label}, {moments} moments, {path}"] = dtype, make
    if importlib.util.find_spec("torchao"):
        from torchao.optim import _AdamW

        rows["torchao, bf16, stochastic"] = BF16, partial(_AdamW, bf16_stochastic_round=True)
    return rows


def parameters(dtype: torch.dtype, device: str, sizes: Sequence[torch.Size]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, device=device).mul_(0.05).to(dtype)) for shape in sizes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, device=device).mul_(1e-3).to(dtype)
    return made


def seconds(action: Callable[[], object], device: str) -> float:
    """Return how long ``action`` takes: the processor's time, or the device's queue included."""
    on_cpu = (time.process_time, lambda: None)
    clock, wait = on_cpu if device == "cpu" else (time.perf_counter, torch.cuda.synchronize)
    wait()
    start = clock()
    action()
    wait()
    return clock() - start


def transient_megabytes(action: Callable[[], object], device: str) -> float:
    """Return by how much memory grows while ``action`` runs, in 10⁶ bytes; NaN where it cannot be measured."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else free memory of earlier rounds hides what is used
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except (OSError, AttributeError):
        return float("nan")
    before = status("VmRSS")
    action()
    return (status("VmHWM") - before) / 1e6


def status(field: str) -> int:
    """Return a size from Linux' /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, sizes = options.device, shapes()
    count = sum(shape.numel() for shape in sizes)
    where = f"{device}, {options.threads} threads, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    print(f"{count / 1e6:.1f} million parameters in {len(sizes)} tensors, {where}\n")
    columns = "step, times torch's fused bf16", "of that step, ms", "transient MB", "state, bytes an element"
    print_header("optimizer", *columns)
    baseline = torch.optim.AdamW(parameters(BF16, device, sizes), fused=True)
    baseline.step()
    for name, (dtype, make) in candidates().items():
        optimizer = make(parameters(dtype, device, sizes))
        optimizer.step()  # makes the states, compiles
        optimizer.step()
        pairs = [(seconds(baseline.step, device), seconds(optimizer.step, device)) for _ in range(options.rounds)]
        base, ours = (min(times) for times in zip(*pairs, strict=True))
        memory = transient_megabytes(optimizer.step, device)
        kept = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        state = sum(held.values()) / count
        print_row(name, f"{ours / base:.2f}", f"{base * 1e3:.2f}", f"{memory:.0f}", f"{state:.1f}")
        del optimizer


if __name__ == "__main__":
    main()
