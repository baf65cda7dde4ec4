"""What rewriting weights costs: time and memory beside copying the files and beside stock loading and saving.

    python benchmarks/convert.py [SHAPE ...]

makes a bf16 checkpoint of each shape in a temporary folder, in shards of at most 5 GB, and then, in turns, copies it
(``cp -r``) and rewrites it with a residual exponent of -4 (``write_fp16``, with SHA-256 of what is read and written);
last it loads and saves it with stock code in fp16. Every way runs in a process of its own and ends with fsync of its
files. Times are medians of the rounds, of a source in the page cache and without imports; memory is the peak resident
size less that of a process with the same imports. Several threads work: times need two idle cores.

    python benchmarks/convert.py --whole t5-v1_1-base

converts a shape with outlier neurons once with all defaults, audit included, and prints each phase in seconds, in
processor seconds and in U: one stock fp32 forward of 4 × 128 encoder and 4 × 32 decoder tokens. ``--device`` is
``convert``'s; ``--layers`` takes so many in each stack, and from two such numbers the whole can be continued (U stays
the whole shape's).
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import synthetic
import torch
from optimizer import status
from results import print_header, print_row
from transformers import T5ForConditionalGeneration

from bf16_to_fp16 import convert
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.checkpoint.shards import Write
from bf16_to_fp16.checkpoint.writer import write_fp16
from bf16_to_fp16.measuring.stock import load
from bf16_to_fp16.progress import Progress


def apart(function: Callable[..., Any], *given: object) -> Any:
    """Return what a function returns in a process of its own, whose memory nothing else has touched."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


@contextmanager
def checkpoint(shape: synthetic.Shape, *, outliers: bool = False) -> Iterator[tuple[Path, Path, float]]:
    """Yield a source, a path for an output and the source's GB; both are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="bf16_to_fp16-bench-") as work:
        source = Path(work) / "source"
        yield source, Path(work) / "out", synthetic.write(source, shape, outliers=outliers) / 1e9


# ---- rewriting -------------------------------------------------------------------------------------------------------


def rewrite(source: Path, out: Path) -> None:
    checkpoint, scaled = open_checkpoint(source), (".o.weight", ".wo.weight", "shared.weight")
    exponents = {name: -4 if name.endswith(scaled) else 0 for name in checkpoint.tensors}
    writes = [Write(n, tensor.shape, n, exponent=exponents[n]) for n, tensor in checkpoint.tensors.items()]
    out.mkdir()
    write_fp16(checkpoint, writes, out)


def load_and_save(source: Path, out: Path) -> None:
    T5ForConditionalGeneration.from_pretrained(source, dtype=torch.float16).save_pretrained(out)
    synthetic.sync(out)


def copy(source: Path, out: Path) -> None:
    subprocess.run(["cp", "-r", source, out], check=True)
    synthetic.sync(out)


STOCK = "stock load and save"
WAYS: dict[str, Callable[[Path, Path], None]] = {"cp -r": copy, "write_fp16": rewrite, STOCK: load_and_save}


def clocks() -> tuple[float, float]:
    """Return seconds, and the processor's, of this process and the children that it has waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(u.ru_utime + u.ru_stime for u in usage)


def since(before: tuple[float, float]) -> tuple[float, float]:
    seconds, processor = clocks()
    return seconds - before[0], processor - before[1]


def peak_megabytes() -> float:
    return status("VmHWM") / 1e6  # ru_maxrss would include the process that this one was forked from


def cost(way: str, source: Path, out: Path) -> tuple[float, float, float]:
    """Return what a way costs in this process, and remove what it wrote: seconds, processor seconds and peak MB."""
    begin = clocks()
    WAYS[way](source, out)
    found = (*since(begin), peak_megabytes())
    shutil.rmtree(out)
    return found


def compare(name: str, rounds: int) -> None:
    """Print a row for each way to rewrite a shape; stock code goes once."""
    with checkpoint(synthetic.SHAPES[name]) as (source, out, size):
        floor = apart(peak_megabytes)
        cost("cp -r", source, out)  # so that the source is in the page cache
        runs: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
        for turn in range(rounds):
            for way in WAYS:
                if way != STOCK or turn == rounds - 1:
                    os.sync()
                    runs[way].append(apart(cost, way, source, out))
    for way, found in runs.items():
        seconds, used, megabytes = zip(*found, strict=True)
        median = statistics.median(seconds)
        ratio = median / statistics.median(each[0] for each in runs["cp -r"])
        shown = [f"{x:.2f}" for x in (median, min(seconds), statistics.median(used), ratio)]
        print_row(name, f"{size:.2f}", way, *shown, f"{max(*megabytes, floor) - floor:.0f}")


# ---- a whole conversion ----------------------------------------------------------------------------------------------


class Phases(Progress):
    """Progress that prints what each step took, and between them what was none, with the peak of memory until then."""

    def __init__(self, unit: float) -> None:
        super().__init__(quiet=True)
        self.unit, self.last = unit, clocks()

    def lap(self, name: str) -> None:
        seconds, used = since(self.last)
        self.last = clocks()
        if seconds > 0.5:
            peak = peak_megabytes() / 1e3
            print_row(name, f"{seconds:.1f}", f"{used:.1f}", f"{used / self.unit:.1f}", f"{peak:.2f}")

    @contextmanager
    def step(self, text: str) -> Iterator[Callable[[int, int], None]]:
        self.lap("between")
        yield lambda done, total: None
        self.lap(text)


def one_forward(name: str, layers: int) -> tuple[float, float]:
    """Return the seconds and processor seconds of one stock fp32 forward of 4 × 128 encoder and 4 × 32 decoder tokens
    through a shape with so many layers, of the fastest of three."""
    shape = synthetic.SHAPES[name].with_layers(layers)
    with checkpoint(shape) as (source, _, _):
        model = load(source, torch.float32)
    ids = torch.arange(512).view(4, 128) + 2
    given = {"decoder_input_ids": ids[:, :32]} if shape.decodes else {}
    taken = []
    with torch.no_grad():
        for _ in range(3):
            begin = clocks()
            model(input_ids=ids, **given)
            taken.append(since(begin))
    return min(taken)


def unit(name: str) -> tuple[float, float]:
    """Return U in seconds and processor seconds, continued from one and from three layers: fp32 may not fit whole."""
    more = (synthetic.SHAPES[name].layers - 1) / 2
    found = [apart(one_forward, name, layers) for layers in (1, 3)]
    seconds, used = (one + more * (three - one) for one, three in zip(*found, strict=True))
    return seconds, used


def whole(name: str, layers: int | None, device: str) -> None:
    """Convert a shape and print the phases."""
    seconds, used = unit(name)
    shape = synthetic.SHAPES[name] if layers is None else synthetic.SHAPES[name].with_layers(layers)
    with checkpoint(shape, outliers=True) as (source, out, size):
        units = f"U {seconds:.2f} s, {used:.2f} processor seconds on {torch.get_num_threads()} threads"
        copied = f"cp -r {cost('cp -r', source, out)[0]:.1f} s"
        print(f"{name}, {size:.2f} GB, {device}: {units}, {copied}, load {os.getloadavg()[0]:.1f}")
        print_header("phase", "seconds", "processor", "U", "peak GB")
        # Making the source took memory too: the peak is counted from here.
        Path("/proc/self/clear_refs").write_text("5")
        phases = Phases(used)
        start = phases.last
        convert(str(source), out, progress=phases, device=device)
        phases.lap("between")
        taken, phases.last = since(start)[0], start
        phases.lap("all")
        print(f"{taken / seconds:.0f} U by the clock")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="for example t5-v1_1-base, the default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--whole", metavar="SHAPE", choices=synthetic.SHAPES)
    parser.add_argument("--layers", type=int, help="with --whole")
    parser.add_argument("--device", default="cpu", help="with --whole")
    asked = parser.parse_args()
    if asked.whole:
        return whole(asked.whole, asked.layers, asked.device)
    print(f"medians of {asked.rounds} rounds, stock of 1; load {os.getloadavg()[0]:.1f}")
    print_header("shape", "GB", "way", "seconds", "least", "processor s", "/ cp", "MB over imports")
    for name in asked.shapes or ["t5-v1_1-base"]:
        compare(name, asked.rounds)


if __name__ == "__main__":
    main()
