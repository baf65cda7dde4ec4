"""What rewriting weights costs: time and memory beside copying the files and beside stock loading and saving.

    python benchmarks/convert.py --gigabytes 2 --shards 2

makes a sharded bf16 checkpoint of T5 v1.1's shapes in a temporary folder and then, in turns, copies it (``cp -r``)
and rewrites it with a residual exponent of -4 (``write_fp16`` without and with SHA-256 of what is read and written);
last it loads and saves it with stock code in fp16. Every way runs in a process of its own and ends with fsync of its
files. Times are medians over the rounds, of a source in the page cache and without imports; memory is the peak resident
size less that of a process that has only imported torch. Several threads work, so times are only meaningful while two
cores are idle; the load and the processor seconds tell.

    python benchmarks/convert.py --scale t5-v1_1-small t5-v1_1-base t5-v1_1-large flan-t5-xl t5-v1_1-xxl-encoder

shows how time and memory grow, in shards of at most 5 GB. With ``--certified`` the same shapes are converted whole and
without a forward pass (``convert(..., run_model=False)``): planned from bounds, written, certified.

    python benchmarks/convert.py --whole t5-v1_1-base

converts a shape with outlier neurons once with all defaults, audit included, and prints each phase in seconds, in
processor seconds and in U: one stock fp32 forward of 4 × 128 encoder and 4 × 32 decoder tokens. ``--until PHASE`` stops
before the phase whose name begins so; ``--device`` is ``convert``'s; ``--layers`` takes so many in each stack, and from
two such numbers the whole can be continued (U stays the whole shape's). With ``--certified`` nothing is run, and what
was written is certified once more. With ``--audited`` the source is not converted but audited.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import synthetic

from bf16_to_fp16.progress import Progress

WIDTHS = synthetic.SHAPES["t5-v1_1-large"]
EXPONENT = -4
LIMITS = {"write_fp16": 1.4, "write_fp16, hashes": 2.0}
MEMORY_LIMIT = 64.0
SHARD = 5e9


def of_size(gigabytes: float) -> synthetic.Shape:
    """Return a shape with about this many bytes in bf16."""
    one, two = (WIDTHS.with_layers(n).parameters for n in (1, 2))
    return WIDTHS.with_layers(max(1, 1 + round((gigabytes * 1e9 / 2 - one) / (two - one))))


def rewriting(source: Path, out: Path, hashes: bool) -> Callable[[], object]:
    """Return what rewrites the checkpoint."""
    from bf16_to_fp16.checkpoint.reader import open_checkpoint
    from bf16_to_fp16.checkpoint.shards import Write
    from bf16_to_fp16.checkpoint.writer import write_fp16

    def act() -> None:
        checkpoint = open_checkpoint(source)
        scaled = (".o.weight", ".wo.weight", "shared.weight")
        writes = [
            Write(i.name, i.shape, i.name, exponent=EXPONENT if i.name.endswith(scaled) else 0)
            for i in checkpoint.tensors.values()
        ]
        out.mkdir()
        write_fp16(checkpoint, writes, out, hashes=hashes)

    return act


def stock(source: Path, out: Path) -> Callable[[], object]:
    """Return what loads and saves the checkpoint in fp16 with transformers."""
    import torch
    from transformers import T5ForConditionalGeneration

    def act() -> None:
        T5ForConditionalGeneration.from_pretrained(source, dtype=torch.float16).save_pretrained(out)
        synthetic.sync(out)

    return act


def copying(source: Path, out: Path) -> Callable[[], object]:
    """Return what copies the checkpoint."""

    def act() -> None:
        subprocess.run(["cp", "-r", source, out], check=True)
        synthetic.sync(out)

    return act


def converting(source: Path, out: Path) -> Callable[[], object]:
    """Return what plans from bounds, writes and certifies the checkpoint."""
    from bf16_to_fp16 import convert

    return lambda: convert(str(source), out, run_model=False)


def importing() -> Callable[[], object]:
    """Return what does nothing, after importing torch."""
    import torch  # noqa: F401

    return lambda: None


def processor_seconds() -> float:
    """Return the processor time of this process and the children it has waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def peak_megabytes() -> float:
    """Return the peak resident size of this process in MB."""
    # ru_maxrss would include the process that this one was forked from.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def child(way: str, source: Path, out: Path) -> dict[str, float]:
    """Run one way in this process and return its seconds, processor seconds and peak MB."""
    actions = {
        "import torch": importing,
        "cp -r": lambda: copying(source, out),
        "write_fp16": lambda: rewriting(source, out, False),
        "write_fp16, hashes": lambda: rewriting(source, out, True),
        "stock load and save": lambda: stock(source, out),
        "convert, no audit": lambda: converting(source, out),
    }
    act = actions[way]()
    begin, used = time.perf_counter(), processor_seconds()
    act()
    return {
        "seconds": time.perf_counter() - begin,
        "processor": processor_seconds() - used,
        "megabytes": peak_megabytes(),
    }


def measure(way: str, source: Path, out: Path) -> dict[str, float]:
    """Run one way in a process of its own, remove what it wrote, and return its figures."""
    os.sync()
    command = [sys.executable, __file__, "--child", way, str(source), str(out)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    shutil.rmtree(out, ignore_errors=True)
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def table(results: dict[str, list[dict[str, float]]], floor: float, size: int) -> str:
    """Return the lines of the result, times as ratios to cp and to stock code."""

    def median(way: str, what: str = "seconds") -> float:
        return statistics.median(r[what] for r in results[way])

    lines = [
        f"{size / 1e9:.2f} GB; medians of {len(results['cp -r'])} rounds, stock of 1; load {os.getloadavg()[0]:.1f}",
        f"{'':20}{'seconds':>9}{'best':>7}{'CPU s':>7}{'/ cp':>7}{'limit':>7}{'/ stock':>9}{'MB over torch':>15}"
        f"{'limit':>7}",
    ]
    for way, runs in results.items():
        best = min(r["seconds"] for r in runs)
        memory = "" if way == "cp -r" else f"{max(r['megabytes'] for r in runs) - floor:.0f}"
        limit, room = (f"{LIMITS[way]}", f"{MEMORY_LIMIT:.0f}") if way in LIMITS else ("", "")
        lines.append(
            f"{way:20}{median(way):9.2f}{best:7.2f}{median(way, 'processor'):7.2f}"
            f"{median(way) / median('cp -r'):7.2f}{limit:>7}"
            f"{median(way) / median('stock load and save'):9.2f}{memory:>15}{room:>7}"
        )
    return "\n".join(lines)


def scale(names: list[str], rounds: int, certified: bool) -> None:
    """Print a line for every shape as soon as it is measured."""
    ways = ["cp -r", *LIMITS] + (["convert, no audit"] if certified else [])
    print("| shape | GB | " + " | ".join(f"{way}, s" for way in ways), end=" | ")
    print(" | ".join(f"{way}, / cp | MB over torch" for way in ways[1:]) + " |\n|" + "---|" * (3 * len(ways)))
    for name in names:
        with checkpoint(synthetic.SHAPES[name], None) as (source, out, size):
            floor = measure("import torch", source, out)["megabytes"]
            measure("cp -r", source, out)
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way in ways:
                    runs[way].append(measure(way, source, out))
        seconds = {way: statistics.median(r["seconds"] for r in runs[way]) for way in ways}
        memory = {way: max(r["megabytes"] for r in runs[way]) - floor for way in ways}
        print(f"| {name} | {size / 1e9:.2f} | " + " | ".join(f"{seconds[way]:.2f}" for way in ways), end=" | ")
        print(" | ".join(f"{seconds[way] / seconds['cp -r']:.2f} | {memory[way]:.0f}" for way in ways[1:]), end=" |\n")
        sys.stdout.flush()


class Stopped(Exception):
    """Raised before the phase at which a measurement is to stop."""


class Phases(Progress):
    """Progress that prints what each step took, and between them what was none, with the peak of memory until then."""

    def __init__(self, until: str | None) -> None:
        super().__init__(quiet=True)
        self.until, self.last = until, (time.perf_counter(), processor_seconds())
        self.unit = math.nan

    def lap(self, name: str) -> None:
        """Print the time since the last lap."""
        now = (time.perf_counter(), processor_seconds())
        seconds, used = (a - b for a, b in zip(now, self.last, strict=True))
        self.last = now
        if seconds > 0.5:
            peak = peak_megabytes() / 1e3
            print(f"| {name} | {seconds:.1f} | {used:.1f} | {used / self.unit:.1f} | {peak:.2f} |", flush=True)

    @contextmanager
    def step(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """Measure a step."""
        self.lap("between")
        if self.until is not None and text.startswith(self.until):
            raise Stopped
        yield lambda done, total: None
        self.lap(text)


def one_forward(name: str, layers: int) -> tuple[float, float]:
    """Return the seconds and processor seconds of one stock fp32 forward of 4 × 128 encoder and 4 × 32 decoder tokens
    through a shape with so many layers, of the fastest of three."""
    import torch

    from bf16_to_fp16.run.stock import load

    shape = synthetic.SHAPES[name].with_layers(layers)
    with checkpoint(shape, 1) as (source, _, _):
        model = load(source, torch.float32)
    ids = torch.arange(512).view(4, 128) + 2
    given = {"decoder_input_ids": ids[:, :32]} if shape.decodes else {}
    taken = []
    with torch.no_grad():
        for _ in range(3):
            begin = time.perf_counter(), processor_seconds()
            model(input_ids=ids, **given)
            taken.append((time.perf_counter() - begin[0], processor_seconds() - begin[1]))
    return min(taken)


def unit(name: str) -> tuple[float, float]:
    """Return U of a shape in seconds and in processor seconds.

    It is measured with one layer and with three in each stack, each in a process of its own, and continued to all of
    them: in fp32 a whole one may not fit.
    """
    found = []
    for layers in (1, 3):
        command = [sys.executable, __file__, "--unit", name, str(layers)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append(json.loads(printed.splitlines()[-1]))
    more = (synthetic.SHAPES[name].layers - 1) / 2
    seconds, used = (one + more * (three - one) for one, three in zip(*found, strict=True))
    return seconds, used


def whole(name: str, layers: int | None, until: str | None, certified: bool, audited: bool, device: str) -> None:
    """Convert a shape with its audit, or without one and certify it, or only audit it, and print the phases.

    layers: of each stack, instead of the shape's own.
    """
    import torch

    from bf16_to_fp16 import audit, certify, convert

    phases, shape = Phases(until), synthetic.SHAPES[name]
    seconds, phases.unit = unit(name)
    if layers is not None:
        shape = shape.with_layers(layers)
    with checkpoint(shape, None, outliers=True) as (source, out, size):
        begin = time.perf_counter()
        copying(source, out)()
        shutil.rmtree(out)
        copy = time.perf_counter() - begin
        print(
            f"{name}, {size / 1e9:.2f} GB, {device}: U {seconds:.2f} s, {phases.unit:.2f} processor seconds on"
            f" {torch.get_num_threads()} threads, cp -r {copy:.1f} s, load {os.getloadavg()[0]:.1f}\n"
            "| phase | seconds | processor | U | peak GB |\n|---|---|---|---|---|"
        )
        # Making the source took memory too: the peak is counted from here.
        Path("/proc/self/clear_refs").write_text("5")
        start = phases.last = (time.perf_counter(), processor_seconds())
        with suppress(Stopped):
            if audited:
                audit(str(source), progress=phases, device=device)
            else:
                convert(str(source), out, run_model=not certified, progress=phases, device=device)
        phases.lap("between")
        taken = time.perf_counter() - start[0]
        phases.last = start
        phases.lap("all")
        print(f"{taken / seconds:.0f} U by the clock")
        if certified:
            phases.last = (time.perf_counter(), processor_seconds())
            certify(out, progress=phases, device=device)


@contextmanager
def checkpoint(
    shape: synthetic.Shape, shards: int | None, *, outliers: bool = False
) -> Iterator[tuple[Path, Path, int]]:
    """Yield a source, a path for an output and the source's size; both are removed afterwards."""
    shards = shards or math.ceil(2 * shape.parameters / SHARD)
    with tempfile.TemporaryDirectory(prefix="bf16_to_fp16-bench-") as work:
        source, out = Path(work) / "source", Path(work) / "out"
        yield source, out, synthetic.write(source, shape, shards, outliers=outliers)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", nargs="+", metavar="SHAPE", choices=synthetic.SHAPES)
    parser.add_argument("--certified", action="store_true", help="with --scale or --whole")
    parser.add_argument("--audited", action="store_true", help="with --whole")
    parser.add_argument("--whole", metavar="SHAPE", choices=synthetic.SHAPES)
    parser.add_argument("--layers", type=int, help="with --whole")
    parser.add_argument("--device", default="cpu", help="with --whole")
    parser.add_argument("--until", metavar="PHASE", help="with --whole")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--unit", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        way, first, second = arguments.child
        print(json.dumps(child(way, Path(first), Path(second))))
        return
    if arguments.unit:
        name, layers = arguments.unit
        print(json.dumps(one_forward(name, int(layers))))
        return
    if arguments.whole:
        a = arguments
        return whole(a.whole, a.layers, a.until, a.certified, a.audited, a.device)
    if arguments.scale:
        return scale(arguments.scale, arguments.rounds, arguments.certified)
    results: dict[str, list[dict[str, float]]] = {}
    with checkpoint(of_size(arguments.gigabytes), arguments.shards) as (source, out, size):
        floor = measure("import torch", source, out)["megabytes"]
        measure("cp -r", source, out)
        for _ in range(arguments.rounds):
            for way in ("cp -r", *LIMITS):
                results.setdefault(way, []).append(measure(way, source, out))
        results["stock load and save"] = [measure("stock load and save", source, out)]
    print(table(results, floor, size))


if __name__ == "__main__":
    main()
