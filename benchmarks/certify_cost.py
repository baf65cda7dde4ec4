"""What does a certificate cost? Its processor time at the layer shapes of large checkpoints beside reading their files,
and, with --held, what bounds that are held cost a training step on two processes with half of every weight each.

python benchmarks/certify_cost.py
python benchmarks/certify_cost.py --held t5-v1_1-base
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import synthetic
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from bf16_to_fp16.bounds.certificate import bound, fp16_weights
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.finetuning.bound_constraint import BoundConstraint
from bf16_to_fp16.finetuning.distillation import deal_out
from bf16_to_fp16.finetuning.mixed_precision import MixedPrecision
from bf16_to_fp16.rescaling.weights import ModelTensors

WHOLE = [name for name, shape in synthetic.SHAPES.items() if shape.decoder_layers]
PRODUCTS = {"mm", "bmm", "addmm", "mv", "dot", "addmv", "baddbmm"}
FACTORISATIONS = {"linalg_cholesky_ex", "_linalg_eigh", "linalg_eigh", "linalg_qr", "_linalg_eigvals", "geqrf"}


class Clock(TorchDispatchMode):
    """Sums the processor seconds and multiplications of matrix products, and those of factorisations and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self.multiplications: dict[torch.dtype, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        begin = time.process_time()
        out = func(*args, **(kwargs or {}))
        spent = time.process_time() - begin
        if name in PRODUCTS:
            self.seconds["products"] += spent
            self.multiplications[out.dtype] += out.numel() * args[-2].shape[-1]
        else:
            self.seconds["factorisations" if name in FACTORISATIONS else name] += spent
        return out


def read_once(folder: Path) -> float:
    """Return the seconds of reading a folder's weights once, in pieces of 16 MB."""
    buffer = bytearray(1 << 24)
    begin = time.process_time()
    with open(folder / "model.safetensors", "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.process_time() - begin


def peak_megabytes() -> float:
    """Return the peak resident size of this process in MB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def cost_of(folder: Path, threads: int) -> dict[str, Any]:
    """Certify a folder in this process and return its figures."""

    torch.set_num_threads(threads)
    with Clock():  # the first of all operations under a dispatch mode imports much of torch
        torch.linalg.eigvalsh(torch.eye(8, dtype=torch.float64))
    floor = peak_megabytes()
    read_once(folder)
    reading_seconds = min(read_once(folder) for _ in range(3))
    checkpoint = open_checkpoint(folder)
    layout = resolve(checkpoint)
    begin = time.process_time()
    bound(layout, fp16_weights(checkpoint, layout))
    seconds = time.process_time() - begin
    # Once more under the instruments, which cost something themselves, for its parts.
    marks = [time.process_time()]
    profiler, clock = cProfile.Profile(time.process_time), Clock()
    with profiler, clock:
        found = bound(
            layout, fp16_weights(checkpoint, layout), advance=lambda done, total: marks.append(time.process_time())
        )
        marks.append(time.process_time())
    slower = (marks[-1] - marks[0]) / seconds
    functions: dict[str, float] = {}
    stats: Any = pstats.Stats(profiler)
    for (file, line, name), (_, _, _, cumulative, _) in stats.stats.items():
        if Path(file).parent.name in ("bounds", "checkpoint"):
            functions[f"{Path(file).stem}:{line} {name}"] = cumulative / slower
    return {
        "reading": reading_seconds,
        "seconds": seconds,
        "sublayers": [(b - a) / slower for a, b in itertools.pairwise(marks)],
        "parts": dict(clock.seconds),
        "multiplications": {str(k).removeprefix("torch."): v for k, v in clock.multiplications.items()},
        "megabytes": peak_megabytes() - floor,
        "headroom": found.headroom_bits,
        "functions": functions,
    }


def cost(names: list[str], threads: int, profile: bool) -> None:
    """Print what certifying costs at the layer shapes of ``names``."""
    print(
        f"one layer of each stack and both ends, bf16, {threads} thread(s), processor seconds;"
        f" load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| shapes | GB | read s | certify s | / read | products s | TFLOP | factorisations s |"
        " / (read + products) | / all three |"
        " encoder layer s | decoder layer s | ends s | whole model s (extrapolated) | peak MB |\n|" + "---|" * 15
    )
    profiles = {}
    for name in names:
        shape = synthetic.SHAPES[name]
        with tempfile.TemporaryDirectory(prefix="bf16_to_fp16-bench-") as work:
            folder = Path(work) / "source"
            size = synthetic.write(folder, shape.with_layers(1), outliers=True)
            command = [sys.executable, __file__, "--child", str(folder), "--threads", str(threads)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result = json.loads(output.splitlines()[-1])
        profiles[name] = result
        times, parts = result["sublayers"], result["parts"]
        # The first sublayer was counted with the embedding, which is read once; the last mark is the head's.
        begin = sum(v for k, v in result["functions"].items() if k.endswith(" begin"))
        encoder, decoder, ends = sum(times[:2]) - begin, sum(times[2:-1]), times[-1] + begin
        whole = ends + shape.layers * (encoder + decoder)
        both = result["reading"] + parts["products"]
        flops = 2 * sum(result["multiplications"].values()) / 1e12
        print(
            f"| {name} | {size / 1e9:.2f} | {result['reading']:.2f} | {result['seconds']:.1f} |"
            f" {result['seconds'] / result['reading']:.0f} | {parts['products']:.1f} | {flops:.2f} |"
            f" {parts.get('factorisations', 0.0):.1f} | {result['seconds'] / both:.2f} |"
            f" {result['seconds'] / (both + parts.get('factorisations', 0.0)):.2f} | {encoder:.1f} |"
            f" {decoder:.1f} |"
            f" {ends:.1f} | {whole:.0f} | {result['megabytes']:.0f} |",
            flush=True,
        )
    if profile:
        for name, result in profiles.items():
            print(f"\n{name}: operations", sorted(result["parts"].items(), key=lambda x: -x[1])[:12])
            print("TFLOP by dtype", {k: 2 * v / 1e12 for k, v in result["multiplications"].items()})
            for function, seconds in sorted(result["functions"].items(), key=lambda x: -x[1])[:30]:
                print(f"  {seconds:8.2f} {function}")


LENGTH = 512  # ids of the one row of a step, a quarter of them of its target


def held_on(rank: int, folder: Path, layers: int) -> dict[str, Any]:
    """Train random weights of a folder's shape in one of two processes: seconds of a step under fp16 AMP, and of
    holding the bounds where they hold and where the largest is a bit over; peaks in GB."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    config = transformers.AutoConfig.from_pretrained(folder, num_layers=layers, num_decoder_layers=layers)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    layout, device = resolve(ModelTensors(model)), torch.device("cpu")
    model = deal_out(model.train(), device)
    optimizer, amp = torch.optim.AdamW(model.parameters(), lr=1e-5), MixedPrecision("fp16", device)
    ids = torch.randint(config.vocab_size, (1, LENGTH))
    seconds = []
    for _ in range(2):  # the first makes the moments
        begin = time.perf_counter()
        with amp.whole_step():
            with amp.forward():
                logits = model(input_ids=ids, decoder_input_ids=ids[:, : LENGTH // 4], use_cache=False).logits
            (logits.float().logsumexp(-1).mean() * amp.scale).backward()
            amp.finish(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    plain = peak_megabytes()
    constraint = BoundConstraint(layout, model)
    constraint.first = 0
    found = {"parameters": sum(p.numel() for p in model.parameters()), "step": seconds[-1], "plain GB": plain / 1e3}
    for name, over in (("held", 0.0), ("pulled", 1.0)):
        largest = max(float(bits.max()) for bits in constraint.excess().values())
        constraint.target *= 2 ** (largest - over)
        begin = time.perf_counter()
        constraint.hold(1, 10)
        found[name] = time.perf_counter() - begin
    return found | {"GB": peak_megabytes() / 1e3}


def held(name: str, layers: int) -> None:
    """Print what holding the bounds costs a step at the shape ``name`` with so many layers in each stack."""
    with tempfile.TemporaryDirectory(prefix="bf16_to_fp16-bench-") as work:
        folder = Path(work) / "source"
        synthetic.write(folder, synthetic.SHAPES[name].with_layers(1))
        given = [sys.executable, __file__, name, "--child", str(folder), "--layers", str(layers), "--rank"]
        processes = [subprocess.Popen([*given, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
        said, _ = [process.communicate()[0] for process in processes]
        found = json.loads(said.splitlines()[-1])
    shares = [(found["step"] + found[each]) / found["step"] for each in ("held", "pulled")]
    seconds = " | ".join(f"{found[each]:.1f}" for each in ("step", "held", "pulled"))
    print(
        f"| {name} | {layers} | {found['parameters'] / 1e6:.0f} M | {seconds} | {shares[0]:.2f} | {shares[1]:.2f} |"
        f" {found['plain GB']:.2f} | {found['GB']:.2f} |",
        flush=True,
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(synthetic.SHAPES)}; by default those with a decoder"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--held", action="store_true", help="what held bounds cost a step on two processes")
    parser.add_argument("--layers", type=int, default=12, help="of each stack, with --held")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(held_on(options.rank, Path(options.child), options.layers)), flush=True)
        torch.distributed.barrier()
        os._exit(0)  # gloo's threads may still run
    elif options.held:
        print(
            "| shapes | layers of a stack | weights | step s | held s | pulled s | held / plain | pulled / plain |"
            " GB plain | GB |\n|" + "---|" * 10
        )
        for name in options.shapes:
            held(name, options.layers)
    elif options.child:
        print(json.dumps(cost_of(Path(options.child), options.threads)))
    else:
        cost(options.shapes or WHOLE, options.threads, options.profile)


if __name__ == "__main__":
    main()
