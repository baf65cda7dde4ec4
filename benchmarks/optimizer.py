"""What a step of ``bf16_to_fp16.AdamW`` costs beside torch's fused AdamW and torchao's stochastic rounding.

T5-small's parameter shapes (60.5 million elements; 23.8 with ``--layers 1``) with random weights and gradients. Every
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import T5Config, T5ForConditionalGeneration

from bf16_to_fp16.optim.adamw import AdamW

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Make = Callable[[list[nn.Parameter]], Optimizer]


def shapes(layers: int) -> list[torch.Size]:
    """Return the shapes of T5-small's parameters, with so many layers in each stack."""
    with torch.device("meta"):
        return [p.shape for p in T5ForConditionalGeneration(T5Config(num_layers=layers)).parameters()]


def candidates() -> list[tuple[str, torch.dtype, Make]]:
    """Return (name, dtype of the parameters, constructor) for every row of the table."""

    def ours(**options: object) -> Make:
        return lambda parameters: AdamW(parameters, **options)  # type: ignore[arg-type]

    rows: list[tuple[str, torch.dtype, Make]] = [
        ("torch fused, bf16, again", BF16, lambda p: torch.optim.AdamW(p, fused=True)),
        ("torch foreach, bf16", BF16, lambda p: torch.optim.AdamW(p, foreach=True)),
        ("torch fused, fp32", FP32, lambda p: torch.optim.AdamW(p, fused=True)),
    ]
    for label, dtype in (("bf16", BF16), ("fp16", FP16)):
        for moments in ("float32", "bfloat16"):
            for compile in (True, False):
                path = "compiled" if compile else "eager"
                rows.append(
                    (f"AdamW, {label}, {moments} moments, {path}", dtype, ours(moments=moments, compile=compile))
                )
    if importlib.util.find_spec("torchao"):
        from torchao.optim import _AdamW

        rows.append(("torchao, bf16, stochastic", BF16, lambda p: _AdamW(p, bf16_stochastic_round=True)))
    return rows


def parameters(dtype: torch.dtype, device: str, sizes: Sequence[torch.Size]) -> list[nn.Parameter]:
    """Return random parameters of these shapes with gradients."""
    torch.manual_seed(0)

    def random(shape: torch.Size, scale: float) -> Tensor:
        return torch.randn(shape, device=device).mul_(scale).to(dtype)

    made = [nn.Parameter(random(shape, 0.05)) for shape in sizes]
    for parameter in made:
        parameter.grad = random(parameter.shape, 1e-3)
    return made


def seconds(action: Callable[[], object], device: str) -> float:
    """Return how long ``action`` takes: the processor's time, or the device's queue included."""
    if device == "cpu":
        start = time.process_time()
        action()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


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


@dataclass(frozen=True)
class Measured:
    """One row: the least time of a step over that of the baseline, the baseline's in ms, by how many 10⁶ bytes memory
    grows in a step, and the state's bytes an element."""

    name: str
    times: float
    baseline: float
    transient: float
    state: float


def measured(
    device: str, sizes: Sequence[torch.Size], rounds: int, wanted: Callable[[str], bool]
) -> Iterator[Measured]:
    """Measure the rows that are wanted by name, one after the other, on parameters of these shapes."""
    baseline = torch.optim.AdamW(parameters(BF16, device, sizes), fused=True)
    baseline.step()
    count = sum(shape.numel() for shape in sizes)
    for name, dtype, make in candidates():
        if not wanted(name):
            continue
        made = parameters(dtype, device, sizes)
        optimizer = make(made)
        optimizer.step()  # makes the states, compiles
        optimizer.step()
        pairs = [(seconds(baseline.step, device), seconds(optimizer.step, device)) for _ in range(rounds)]
        base, ours = (min(times) for times in zip(*pairs, strict=True))
        memory = transient_megabytes(optimizer.step, device)
        kept = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
        held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        yield Measured(name, ours / base, base * 1e3, memory, sum(held.values()) / count)
        del optimizer, made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = options.device
    sizes = shapes(options.layers)
    count = sum(shape.numel() for shape in sizes)
    print(
        f"{count / 1e6:.1f} million parameters in {len(sizes)} tensors, {device}, {options.threads} threads,"
        f" torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| optimizer | step, times torch's fused bf16 | of that step, ms | transient MB | state, bytes an element |")
    print("|---|---|---|---|---|")
    for row in measured(device, sizes, options.rounds, lambda name: options.only in name):
        print(
            f"| {row.name} | {row.times:.2f} | {row.baseline:.2f} | {row.transient:.0f} | {row.state:.1f} |", flush=True
        )
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
