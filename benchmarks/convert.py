"""What rewriting weights costs: time and memory beside copying the files and beside stock loading and saving.

    python benchmarks/convert.py --gigabytes 2 --shards 2

makes a sharded bf16 checkpoint of T5 v1.1's shapes in a temporary folder and then, in turns, copies it (``cp -r``)
and rewrites it with a residual exponent of -4 (``write_fp16`` without and with SHA-256 of what is read and written);
last it loads and saves it with stock code in fp16. Every way runs in a process of its own and ends with fsync of its
files. Times are medians over the rounds, of a source in the page cache and without imports; memory is the peak resident
size less that of a process that has only imported torch. Two threads write, so times are only meaningful while two
cores are idle; the load and the processor seconds tell.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

D_MODEL, D_FF, HEADS, VOCABULARY = 1024, 2816, 16, 32128
EXPONENT = -4
LIMITS = {"write_fp16": 1.6, "write_fp16, hashes": 2.3}
MEMORY_LIMIT = 64.0


def shapes(gigabytes: float) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the shapes of a T5 v1.1's tensors for about this many bytes in bf16, and its layers in each stack."""
    attention = {f"{n}.weight": (D_MODEL, D_MODEL) for n in "qkvo"}
    feed_forward = {
        "wi_0.weight": (D_FF, D_MODEL),
        "wi_1.weight": (D_FF, D_MODEL),
        "wo.weight": (D_MODEL, D_FF),
    }
    norm = {"layer_norm.weight": (D_MODEL,)}
    ends = 2 * VOCABULARY * D_MODEL
    layer = 12 * D_MODEL * D_MODEL + 6 * D_MODEL * D_FF
    layers = max(1, round((gigabytes * 1e9 / 2 - ends) / layer))
    result: dict[str, tuple[int, ...]] = {
        "shared.weight": (VOCABULARY, D_MODEL),
        "lm_head.weight": (VOCABULARY, D_MODEL),
    }
    for stack, kinds in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention"))):
        for i in range(layers):
            for number, kind in enumerate((*kinds, "DenseReluDense")):
                prefix = f"{stack}.block.{i}.layer.{number}"
                inside = feed_forward if kind == "DenseReluDense" else attention
                result |= {f"{prefix}.{kind}.{n}": s for n, s in inside.items()}
                result |= {f"{prefix}.{n}": s for n, s in norm.items()}
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        result |= {bias: (32, HEADS), f"{stack}.final_layer_norm.weight": (D_MODEL,)}
    return result, layers


def make(folder: Path, gigabytes: float, shards: int) -> None:
    """Write the synthetic checkpoint: normal weights of standard deviation 0.05, in shards of about equal size."""
    import torch
    from safetensors.torch import save_file

    table, layers = shapes(gigabytes)
    config = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": D_MODEL,
        "d_kv": D_MODEL // HEADS,
        "d_ff": D_FF,
        "num_heads": HEADS,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "vocab_size": VOCABULARY,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-6,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(table)
    sizes = [torch.Size(table[n]).numel() for n in names]
    groups: list[list[str]] = [[] for _ in range(shards)]
    seen = 0
    for name, size in zip(names, sizes, strict=True):
        groups[min(shards - 1, seen * shards // sum(sizes))].append(name)
        seen += size
    torch.manual_seed(0)
    placed: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({n: (torch.randn(table[n]) * 0.05).bfloat16() for n in group}, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(group, file)
    if shards > 1:
        index = {"metadata": {"total_size": 2 * sum(sizes)}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sync(folder)


def sync(folder: Path) -> None:
    """Flush every file of a folder to the disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def rewriting(source: Path, out: Path, hashes: bool) -> Callable[[], object]:
    """Return what rewrites the checkpoint."""
    from bf16_to_fp16.checkpoint import open_checkpoint
    from bf16_to_fp16.writer import Write, write_fp16

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
        sync(out)

    return act


def copying(source: Path, out: Path) -> Callable[[], object]:
    """Return what copies the checkpoint."""

    def act() -> None:
        subprocess.run(["cp", "-r", source, out], check=True)
        sync(out)

    return act


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


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        way, first, second = arguments.child
        if way == "make":
            make(Path(first), arguments.gigabytes, arguments.shards)
        else:
            print(json.dumps(child(way, Path(first), Path(second))))
        return
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="bf16_to_fp16-bench-") as work:
        source, out = Path(work) / "source", Path(work) / "out"
        sizes = ["--gigabytes", str(arguments.gigabytes), "--shards", str(arguments.shards)]
        subprocess.run([sys.executable, __file__, *sizes, "--child", "make", source, out], check=True)
        size = sum(p.stat().st_size for p in source.iterdir())
        floor = measure("import torch", source, out)["megabytes"]
        measure("cp -r", source, out)
        for _ in range(arguments.rounds):
            for way in ("cp -r", *LIMITS):
                results.setdefault(way, []).append(measure(way, source, out))
        results["stock load and save"] = [measure("stock load and save", source, out)]
    print(table(results, floor, size))


if __name__ == "__main__":
    main()
